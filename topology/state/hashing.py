"""A 64-bit hash of a row's join key, the same on every machine, version and block size.

Invariant: equal keys have equal hashes, for ever: partitions and stored segments depend on it, so changing a constant
here means a new mesh. For a single int64, timestamp, bool or float64 column the hash is a bijection (equal hashes mean
equal keys), so only text and multi-column keys need their candidates verified (`is_exact`).

Floats: -0.0 hashes as 0.0. Null and NaN never get here (they join nothing; ingest drops them).
Text: the UTF-8 bytes, eight at a time, over the whole column at once.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.rows import I64, U64, Column, Mask, Rows

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def _mix(x: U64) -> U64:
    """splitmix64's finalizer: a bijection of 64-bit words."""
    x = x + _GOLDEN
    x ^= x >> _S30
    x *= _M1
    x ^= x >> _S27
    x *= _M2
    x ^= x >> _S31
    return x


def hash_key(columns: Sequence[Column]) -> U64:
    """Hash one or more columns without nulls, row by row.

    >>> [hex(h) for h in hash_key([np.array([0, 1])])]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    return combine([_hash_column(column) for column in columns])


def shape_hash(rows: Rows, names: tuple[str, ...]) -> U64:
    """The hash of some columns of each row; of none, always the same."""
    if not names:
        return np.zeros(len(rows), np.uint64)
    return hash_key([rows[name] for name in names])


def combine(hashes: Sequence[U64]) -> U64:
    """One hash of several; that of a single one is itself.

    >>> [hex(h) for h in combine([hash_key([np.array([0])]), hash_key([np.array([1])])])]
    ['0xc1a59a2213732ad1']
    """
    combined = hashes[0]
    for more in hashes[1:]:
        combined = _mix(combined * _M1 ^ more)
    return combined


def sample(length: int, about: int) -> I64:
    """About so many of the places 0 to `length`, in order and without a pattern; always the same."""
    return np.unique(_mix(np.arange(about, dtype=np.uint64)) % np.uint64(length)).astype(np.int64)


def is_exact(columns: Sequence[Column]) -> bool:
    """True if equal hashes alone prove equal keys."""
    return len(columns) == 1 and isinstance(columns[0], np.ndarray)


def equal_keys(left: Sequence[Column], right: Sequence[Column]) -> Mask | None:
    """Whether the keys of pairs of equal hash are really equal; None if their hashes prove it."""
    if is_exact(left):
        return None
    return np.logical_and.reduce([_equal(a, b) for a, b in zip(left, right, strict=True)])  # type: ignore[no-any-return]


def _equal(left: Column, right: Column) -> Mask:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.equal(left, right)
    return np.asarray(pc.equal(left, right).to_numpy(zero_copy_only=False), np.bool_)


def _hash_column(column: Column) -> U64:
    if not isinstance(column, np.ndarray):
        return _hash_text(column)
    if column.dtype == np.float64:
        return _mix(np.where(column == 0, 0.0, column).view(np.uint64))
    if column.dtype == np.bool_:
        return _mix(column.astype(np.uint64))
    return _mix(column.view(np.uint64))


def _hash_text(arrow: pa.Array) -> U64:
    rows = len(arrow)
    if rows == 0:
        return np.empty(0, np.uint64)
    assert arrow.null_count == 0, "null keys never reach a hash"
    arrow = arrow.cast(pa.large_utf8())
    _, offsets_buffer, data = arrow.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, rows + 1, arrow.offset * 8)
    size = int(offsets[-1])
    padded = np.zeros(size + 8, np.uint8)
    if size:
        padded[:size] = np.frombuffer(data, np.uint8, size)
    words = np.ndarray((size + 1,), np.dtype("<u8"), padded, 0, (1,))  # the 8 bytes from each position on
    lengths = offsets[1:] - offsets[:-1]
    hashes = _mix(lengths.astype(np.uint64))
    active, done = np.arange(rows), 0
    while True:
        active = active[lengths[active] > done]
        if active.size == 0:
            return hashes
        left = lengths[active] - done
        word = words[offsets[active] + done].astype(np.uint64)
        short = left < 8  # bytes beyond the text belong to the next row: shift them out
        shift = ((8 - left[short]) * 8).astype(np.uint64)
        word[short] = (word[short] << shift) >> shift
        hashes[active] = _mix(hashes[active] ^ word)
        done += 8
