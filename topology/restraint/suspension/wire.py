"""Sub-tuples as they travel in a block about demand: one row each, the number of its shape, the hash of its values, and
the hash of its left part (type II).

Invariant: `unpack` gives back what `pack` was given, shape by shape and sorted by hash.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import Rows
from topology.restraint.tables import entries_of
from topology.restraint.values import by_hash

SHAPE, VALUE, LEFT = "#s", "#h", "#l"
TYPES = {SHAPE: np.int64, VALUE: np.uint64, LEFT: np.uint64}


def pack(parts: list[tuple[int, Any]]) -> Rows:
    """Sub-tuples, shape by shape, as rows."""
    shapes = np.concatenate([np.full(len(e), i, np.int64) for i, e in parts])
    columns = {name: np.concatenate([e[field] for _, e in parts]) for name, field in ((VALUE, "hash"), (LEFT, "left"))}
    return Rows({SHAPE: shapes, **columns})


def unpack(rows: Rows) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(shape, entries sorted by hash), shape by shape."""
    at = rows.ints(SHAPE)
    for i in np.unique(at).tolist():
        mine = at == i
        yield i, by_hash(entries_of(rows[VALUE][mine], rows[LEFT][mine]))
