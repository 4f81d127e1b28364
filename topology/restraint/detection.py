"""Which rows nobody has a use for, and the smallest part of each that says so: Identify_MNS of the JIT paper (section
IV-A) over columns of rows at once.

The shapes of an edge are the nodes of the paper's lattice, small ones first. A row whose part is found without a
partner is dead for every larger shape that contains it, so what is reported is minimal.

Invariant: a reported sub-tuple has no partner in the other side's state; what is not reported costs work and never a
row.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from schemas.rows import I64, U64, Mask, Rows
from topology.plan.shapes import Shape
from topology.query.expression import Column
from topology.restraint.tables import ShapeTable
from topology.state.hashing import shape_hash
from topology.state.lookup import mask_of, perhaps_present, present
from topology.state.window_state import Run, WindowState

# of a smaller block nothing can be told; with more kinds of values than that for each row of a block hardly any comes
# twice
ROWS_LEAST = 4
KINDS_A_ROW = 2
Found = tuple[int, I64, U64]  # number of the shape, rows, the hash each shows


def without_partner(
    shapes: Sequence[tuple[int, Shape]],
    rows: Rows,
    states: Sequence[WindowState],
    bloom: bool = False,
    rows_least: int = ROWS_LEAST,
) -> Iterator[Found]:
    """The minimal sub-tuples of these rows that nothing stored in the input they must meet shows; of these numbered
    shapes, small ones first.

    `bloom`: the paper's cheap variant. Of single columns alone, by Bloom filters, which may miss some.

    Values that only rows of several inputs of the producer show together (type II) are as many as composites, unless
    few rows have few values: where hardly any comes twice, they are not worth a word and not looked for.
    """
    found: list[tuple[set[Column], Mask]] = []
    rare: list[set[Column]] = []  # sub-tuples that hardly two rows share; still fewer share one that contains them
    for i, shape in shapes:
        if (bloom and len(shape.columns) > 1) or (
            not any(shape.sides) and any(columns <= set(shape.columns) for columns in rare)
        ):
            continue
        open_rows = np.ones(len(rows), np.bool_)  # those of which no smaller part is found already
        for columns, mask in found:
            if columns <= set(shape.columns):
                open_rows &= ~mask
        at = np.flatnonzero(open_rows)
        if not at.size:
            continue
        shown = shape_hash(rows.take(at) if at.size < len(rows) else rows, shape.names)
        values, which = np.unique(shown, return_inverse=True)
        if not any(shape.sides) and len(rows) >= rows_least and not repeats(len(shown), len(values)):
            rare.append(set(shape.columns))
            continue
        gone = missing(shape, values, states[shape.other], bloom)[which]
        at, shown = at[gone], shown[gone]
        if at.size:
            found.append((set(shape.columns), mask_of(len(rows), at)))
            yield i, at, shown


def kinds(rows: int, distinct: int) -> float:
    """About how many different values there are in all, if a sample of so many rows shows so many: as many as would let
    that many rows repeat one by chance."""
    low, high = float(distinct), float(rows) ** 2
    if distinct == rows:
        return high
    for _ in range(30):  # n rows show about d (1 - exp(-n/d)) of d values, which grows with d
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-rows / middle) < distinct else (low, middle)
    return high


def repeats(rows: int, distinct: int) -> bool:
    """Whether values are few enough to be told one by one, by a sample of so many rows that show so many."""
    return kinds(rows, distinct) <= KINDS_A_ROW * rows


def are_few(ordered: U64, rows_least: int = ROWS_LEAST) -> bool:
    """Whether the values of a block's rows, given in order, are few enough for that."""
    return len(ordered) >= rows_least and repeats(len(ordered), 1 + int((ordered[1:] != ordered[:-1]).sum()))


def missing(shape: Shape, hashes: U64, other: WindowState, bloom: bool = False) -> Mask:
    """Which sub-tuples of a shape nothing on the other side shows. The empty one is missing while that side holds
    nothing."""
    if not shape.columns:
        return np.full(len(hashes), other.is_empty)
    return ~(perhaps_present if bloom else present)(other, shape.opposite_names, hashes)


def whole_without_partner(
    shapes: Sequence[tuple[int, Shape]], rows: Rows, states: Sequence[WindowState]
) -> Iterator[Found]:
    """The rows whose whole key nothing on another side shows: an estimate of what the lattice would find, from what is
    sorted anyway."""
    for i, shape in shapes:
        if shape.authority:
            shown = shape_hash(rows, shape.names)
            at = np.flatnonzero(missing(shape, shown, states[shape.other]))
            if at.size:
                yield i, at, shown[at]


def together(length: int, found: Sequence[Found]) -> tuple[int, U64]:
    """How many rows were found, and all the values they show."""
    rows = np.zeros(length, np.bool_)
    for _, at, _ in found:
        rows[at] = True
    return int(rows.sum()), np.concatenate([np.empty(0, np.uint64), *(shown for _, _, shown in found)])


def not_wanted(tables: Sequence[tuple[ShapeTable, int]], run: Run) -> Iterator[Found]:
    """Sub-tuples that our consumer has suspended here, each table with the number its shape has at the producer."""
    for table, i in tables:
        if table.count_active:
            shown = shape_hash(run.rows, table.shape.names)
            at = np.flatnonzero(table.covers(shown))
            if at.size:
                yield i, at, shown[at]
