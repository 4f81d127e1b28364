"""Which partition of a join node a row belongs to: its hash modulo their number.

Invariant: rows of equal keys go to the same partition, whoever sends them.
"""

import numpy as np

from schemas.rows import U64, Rows
from topology.state.window import HASH


def partition_rows(rows: Rows, partitions: int, hashes: U64 | None = None) -> dict[int, Rows]:
    """Rows by the partition that hashes say, those of their key unless others are given."""
    if partitions == 1:
        return {0: rows}
    where = ((rows[HASH] if hashes is None else hashes) % np.uint64(partitions)).astype(np.int64)
    if len(rows) == 1:
        return {int(where[0]): rows}
    order = np.argsort(where, kind="stable")
    bounds = np.searchsorted(where[order], np.arange(partitions + 1)).tolist()
    rows = rows.take(order)
    return {p: rows.slice(bounds[p], bounds[p + 1]) for p in range(partitions) if bounds[p + 1] > bounds[p]}
