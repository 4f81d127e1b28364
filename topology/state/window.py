"""Validity: when a row counts, from the event times of its parts and their windows.

Invariant (design 1): a row is valid during [start, end], both ends included: start = the largest event time of its
parts, end = the smallest event time + window. Two rows join iff their intersection is not empty; intersecting is
associative and commutative, so no plan, order or batching changes the answer. A row of a static table has a start
before and an end after every event's, so the same rule holds for it.
"""

from collections.abc import Mapping

import numpy as np

from schemas.rows import I64, Rows


def part_id(alias: str) -> str:
    """Column of a part's id: partition << 48 | offset."""
    return "#" + alias


def part_time(alias: str) -> str:
    """Column of a part's event time."""
    return "@" + alias


WATERMARKS_PER_WINDOW = 12  # how often a target that gets no rows is told the time
HASH = "#:key"  # no alias has a colon
OFFSET_BITS = 48
OFFSET_MASK = (1 << OFFSET_BITS) - 1
ALWAYS_MS = 0  # the time of a table's rows: before any event
COMPLETE = 1 << 61  # the watermark of what is complete; behind the end of every row, and safe to add to


def validity(rows: Rows, windows_ms: Mapping[str, int]) -> tuple[I64, I64]:
    """Start and end of each row.

    >>> frame = Rows({"@a": np.array([10, 50]), "@b": np.array([30, 20])})
    >>> [column.tolist() for column in validity(frame, {"a": 100, "b": 5})]
    [[30, 50], [35, 25]]
    """
    start: I64 | None = None
    end: I64 | None = None
    for alias, window in windows_ms.items():
        time = rows.ints(part_time(alias))
        start = time if start is None else np.maximum(start, time)
        end = time + window if end is None else np.minimum(end, time + window)
    assert start is not None
    assert end is not None
    return start, end
