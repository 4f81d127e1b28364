"""Rows as columns: what blocks carry and segments hold.

A column is a numpy array when it is fixed-width and without nulls (ids, times, hashes, most numbers) and an Arrow array
otherwise (text, anything with nulls). Kernels work on the numpy ones directly; taking, joining and sending columns
costs microseconds a block, not a row.

Invariant: all columns have the same length, and a fixed-width column without nulls always has the numpy form, whatever
it was cut or taken from (hashes and comparisons rely on it).

Rows as bytes: magic, length of the head (u32), head (MessagePack: number of rows, names, a letter for the form of each
column, the bytes of each text column), then the buffers of each column in order, each from a multiple of 8 bytes on. An
Arrow stream describes itself anew in every message and costs more than the rows of a small block; a head of some forty
bytes does not. Rows with a type that has no letter are an Arrow stream still, and such a stream is read as ever.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.errors import BlockError

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Column: TypeAlias = Any  # npt.NDArray, or pa.Array, which has no types of its own
_FIXED = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_())


def as_column(array: pa.Array) -> Column:
    """The numpy form where there is one."""
    if array.null_count or array.type not in _FIXED:
        return array
    return array.to_numpy(zero_copy_only=False)


def as_arrow(column: Column) -> pa.Array:
    return pa.array(column) if isinstance(column, np.ndarray) else column


class Rows:
    """Columns of equal length, by name."""

    __slots__ = ("columns", "length")

    def __init__(self, columns: Mapping[str, Column], length: int | None = None) -> None:
        self.columns = dict(columns)
        self.length = len(next(iter(self.columns.values()))) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def ints(self, name: str) -> I64:
        """A column that is known to be int64 without nulls: ids and times."""
        column = self.columns[name]
        assert isinstance(column, np.ndarray), f"{name} must not hold nulls"
        return column

    def take(self, index: I64) -> "Rows":
        if len(index) == 1 and index[0] >= 0:
            return self.slice(int(index[0]), int(index[0]) + 1)
        where = pa.array(index) if any(not isinstance(c, np.ndarray) for c in self.columns.values()) else None
        columns = self.columns.items()
        return Rows(
            {n: c.take(index) if isinstance(c, np.ndarray) else as_column(c.take(where)) for n, c in columns},
            len(index),
        )

    def filter(self, mask: Mask) -> "Rows":
        return self.take(np.flatnonzero(mask))

    def slice(self, start: int, stop: int) -> "Rows":
        stop = min(stop, self.length)
        columns = self.columns.items()
        return Rows(
            {n: c[start:stop] if isinstance(c, np.ndarray) else as_column(c[start:stop]) for n, c in columns},
            stop - start,
        )

    def select(self, names: Iterable[str]) -> "Rows":
        return Rows({n: self.columns[n] for n in names}, self.length)

    def with_column(self, name: str, column: Column) -> "Rows":
        return Rows({**self.columns, name: column}, self.length)

    @property
    def nbytes(self) -> int:
        return sum(int(c.nbytes) for c in self.columns.values())

    @staticmethod
    def concat(parts: Sequence["Rows"]) -> "Rows":
        if len(parts) == 1:
            return parts[0]
        return Rows({n: _concat([p.columns[n] for p in parts]) for n in parts[0].columns}, sum(p.length for p in parts))


def _concat(columns: list[Column]) -> Column:
    if all(isinstance(c, np.ndarray) for c in columns):
        return np.concatenate(columns)
    return pa.concat_arrays([as_arrow(c) for c in columns])


# The letters of a column's form. Upper case: an Arrow array with a bitmap that says which rows are known.
_DTYPES = {"i": np.dtype("<i8"), "u": np.dtype("<u8"), "f": np.dtype("<f8"), "b": np.dtype("?")}
_LETTERS = {dtype: letter for letter, dtype in _DTYPES.items()}
_ARROW = {"I": pa.int64(), "U": pa.uint64(), "F": pa.float64(), "B": pa.bool_(), "T": pa.large_utf8(), "S": pa.utf8()}
_ARROW_LETTERS = {type: letter for letter, type in _ARROW.items()}
_OFFSETS: dict[str, np.dtype[Any]] = {"t": np.dtype("<i8"), "s": np.dtype("<i4")}  # of text, wide and narrow
_MAGIC, _ARROW_MAGIC = b"JMR1", b"\xff\xff\xff\xff"
_PREFIX = struct.Struct("<4sI")
_PADDING = [bytes(-size % 8) for size in range(8)]
_ROWS_MOST = 2**31 - 1


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    rows: Annotated[int, msgspec.Meta(ge=0, le=_ROWS_MOST)]
    names: list[str]
    forms: str
    texts: list[Annotated[int, msgspec.Meta(ge=0, le=_ROWS_MOST)]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


def encode_rows(rows: Rows) -> pa.Buffer:
    """Rows as bytes; equal rows of equal forms give equal bytes."""
    forms, texts, buffers = "", list[int](), list[Any]()
    for column in rows.columns.values():
        if isinstance(column, np.ndarray):
            letter = _LETTERS.get(column.dtype)
            if letter is not None and letter != "b":
                buffers.append(column if column.flags.c_contiguous else column.copy())
            elif letter is not None:
                _append(buffers, np.packbits(column, bitorder="little"))
        else:
            letter = _ARROW_LETTERS.get(column.type)
            if letter is not None:
                letter = _append_arrow(buffers, texts, letter, column)
        if letter is None:
            return _encode_stream(rows)
        forms += letter
    head = _encoder.encode(_Head(rows.length, list(rows.columns), forms, texts))
    prefix = _PREFIX.pack(_MAGIC, len(head))
    return pa.py_buffer(b"".join((prefix, head, _PADDING[len(head) % 8], *buffers)))


def _append(buffers: list[Any], buffer: Any) -> None:
    buffers += (buffer, _PADDING[len(buffer) % 8])


def _append_arrow(buffers: list[Any], texts: list[int], letter: str, array: pa.Array) -> str:
    """The buffers of an Arrow array, cut to what it holds; gives its letter, lower case without nulls."""
    if array.offset:
        array = pa.concat_arrays([array])  # copies, and begins at zero
    known, *rest = array.buffers()
    size, bits = len(array), (len(array) + 7) // 8
    nulls = array.null_count > 0
    if nulls:
        _append(buffers, memoryview(known)[:bits])
    if letter not in "TS":
        _append(buffers, memoryview(rest[0])[: bits if letter == "B" else size * 8] if size else b"")
        return letter if nulls else letter.lower()
    width = _OFFSETS[letter.lower()]
    offsets = np.frombuffer(rest[0], width, size + 1) if size else np.zeros(1, width)
    first, last = int(offsets[0]), int(offsets[-1])
    _append(buffers, (offsets - offsets[0] if first else offsets).tobytes())
    _append(buffers, memoryview(rest[1])[first:last] if last > first else b"")
    texts.append(last - first)
    return letter if nulls else letter.lower()


def decode_rows(data: bytes | memoryview) -> Rows:
    """The rows of some bytes that `encode_rows` made; of any others `BlockError`, or rows whose columns are sound."""
    if bytes(data[:4]) == _ARROW_MAGIC:
        return _decode_stream(data)
    # Its own copy: numbers stand at multiples of eight, nothing is kept that stands around it, nobody can write to it.
    data = bytes(data)
    try:
        magic, size = _PREFIX.unpack_from(data)
        if magic != _MAGIC or size > len(data) - _PREFIX.size:
            raise ValueError("they do not begin with a head")
        head = _decoder.decode(memoryview(data)[_PREFIX.size : _PREFIX.size + size])
        columns = _columns(data, _PREFIX.size + size + -size % 8, head)
    except (msgspec.MsgspecError, struct.error, ValueError, KeyError, pa.ArrowException) as error:
        raise BlockError(f"rows cannot be read: {error}") from None
    return Rows(columns, head.rows)


def _columns(data: bytes, at: int, head: _Head) -> dict[str, Column]:
    """Every column, its buffers within the data; they are all of it."""
    rows, columns, texts = head.rows, dict[str, Column](), iter(head.texts)
    for name, form in zip(head.names, head.forms, strict=True):
        if form in "iuf":
            columns[name] = np.frombuffer(data, _DTYPES[form], rows, at)
            at += rows * 8
        elif form == "b":
            bits = np.frombuffer(data, np.uint8, (rows + 7) // 8, at)
            columns[name] = np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
            at += len(bits) + -len(bits) % 8
        else:
            columns[name], at = _arrow_column(data, at, form, rows, texts)
    if at != len(data) or next(texts, None) is not None or len(columns) < len(head.names):
        raise ValueError("they hold more or less than the head says, or a column twice")
    return columns


def _arrow_column(data: bytes, at: int, form: str, rows: int, texts: Iterable[int]) -> tuple[Column, int]:
    type, bits = _ARROW[form.upper()], (rows + 7) // 8
    sizes = [bits if form.isupper() else None]
    if form in "tsTS":
        size = next(iter(texts), None)
        if size is None:
            raise ValueError("the size of a text column is missing")
        sizes += [(rows + 1) * _OFFSETS[form.lower()].itemsize, size]
    else:
        sizes.append(bits if form == "B" else rows * 8)
    whole, buffers = pa.py_buffer(data), list[pa.Buffer | None]()
    for size in sizes:
        if size is not None and at + size > len(data):
            raise ValueError(f"a buffer of {size} bytes ends behind the last one")
        buffers.append(None if size is None else whole.slice(at, size))
        at += 0 if size is None else size + -size % 8
    array = pa.Array.from_buffers(type, rows, buffers)
    array.validate(full=True)
    return as_column(array), at


def _encode_stream(rows: Rows) -> pa.Buffer:
    """An Arrow IPC stream of one record batch."""
    batch = pa.RecordBatch.from_arrays([as_arrow(c) for c in rows.columns.values()], list(rows.columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _decode_stream(data: bytes | memoryview) -> Rows:
    try:
        with pa.ipc.open_stream(data) as reader:
            batch = reader.read_next_batch()
            if next(iter(reader), None) is not None:
                raise ValueError("there is more than one batch")
        batch.validate(full=True)
        names = batch.schema.names
        if len(set(names)) < len(names):
            raise ValueError("a column is there twice")
    except (pa.ArrowInvalid, pa.ArrowException, OSError, StopIteration, ValueError, KeyError) as error:
        raise BlockError(f"rows are not an Arrow stream: {error}") from None
    return Rows({n: as_column(c) for n, c in zip(names, batch.columns, strict=True)}, batch.num_rows)
