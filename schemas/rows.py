"""Rows as columns: what blocks carry and segments hold.

A column is a numpy array when it is fixed-width and without nulls (ids, times, hashes, most numbers) and an Arrow array
otherwise (text, anything with nulls). Kernels work on the numpy ones directly; taking, joining and sending columns
costs microseconds a block, not a row.

Invariant: all columns have the same length, and a fixed-width column without nulls always has the numpy form, whatever
it was cut or taken from (hashes and comparisons rely on it).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

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


def encode_rows(rows: Rows) -> pa.Buffer:
    """An Arrow IPC stream of one record batch."""
    batch = pa.RecordBatch.from_arrays([as_arrow(c) for c in rows.columns.values()], list(rows.columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode_rows(data: bytes | memoryview) -> Rows:
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
