"""What a consumer may say to its producer: sub-tuples as values of columns.

A *shape* is a tuple of columns of the producer's output; with values for them it is a sub-tuple (JIT, section III-A). The empty shape stands for every row (DOE).
A sub-tuple travels as the hash of its values: equal values have equal hashes, and what shares a hash is suspended and resumed together, so a
collision costs work and never a row.

Invariant: shapes are a function of the plan, in a fixed order, so both ends of an edge number them alike. The first shapes of an edge are the
consumer's own (what it can find without a partner); the rest it only passes on from its own consumer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from schemas.rows import U64, Rows
from topology.expression import Column
from topology.hashing import hash_key
from topology.plan import Input, Node, Plan

OWN_COLUMNS_MOST = 4  # a key of more columns is taken whole: its lattice has 2^n nodes


@dataclass(frozen=True)
class Shape:
    columns: tuple[Column, ...]  # of the producer's output
    opposite: tuple[Column, ...] | None  # the columns of the consumer's other side they equal; None if only passed on
    sides: tuple[bool, ...]  # whether a row of the producer's left or right input alone shows it (type I); neither: type II
    targets: int | None  # 0 or 1: it is that producer side's key, so its hash names the one partition; None: all partitions
    authority: bool  # it is the consumer's key, so one consumer partition sees all its rows and decides alone

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.columns))

    @property
    def opposite_names(self) -> tuple[str, ...]:
        return tuple(map(str, self.opposite or ()))

    def __str__(self) -> str:
        return ", ".join(self.names) or "everything"


def shapes_of(plan: Plan) -> Mapping[str, tuple[Shape, ...]]:
    """For each node that feeds another one, the shapes it is told about."""
    found: dict[str, tuple[Shape, ...]] = {}
    for consumer in reversed(plan.nodes):  # from the root up, because feedback is passed on that way
        for side, edge in enumerate(consumer.inputs):
            if edge.is_source:
                continue
            producer = plan.node(edge.name)
            if consumer.is_flat or producer.is_flat:  # an M-Join keeps its feedback to itself (`hiding`)
                found[producer.id] = ()
                continue
            own = dict(_lattice(edge, consumer.inputs[1 - side], side))
            # Passed on as a hash, so only to where a row of one input shows it whole.
            passed = [s.columns for s in found.get(consumer.id, ()) if any(_within(s.columns, i) for i in producer.inputs)]
            found[producer.id] = tuple(_shape(c, own.get(c), edge, producer) for c in dict.fromkeys([*own, *passed]))
    return found


def _lattice(edge: Input, other: Input, side: int) -> list[tuple[tuple[Column, ...], tuple[Column, ...]]]:
    """The sub-tuples of the key that may be suspended for want of a partner, small ones first; each with the columns it equals.

    Where both inputs come from joins, rows of both might wait for one another: left ones that show x for a right one with x, right ones that show y for a
    left one with y, and the pair that shows both would never be made. So there either both sides speak of the same single column (whoever
    comes is seen by the other), or the left side alone speaks.
    """
    width = len(edge.key)
    sizes: list[int] = list(range(width + 1)) if width <= OWN_COLUMNS_MOST else [0, width]
    if not other.is_source:
        sizes = [1] if width == 1 else sizes if side == 0 else []
    chosen = [c for size in sizes for c in combinations(range(width), size)]
    return [(tuple(edge.key[i] for i in c), tuple(other.key[i] for i in c)) for c in chosen]


def _within(columns: tuple[Column, ...], edge: Input) -> bool:
    return all(column.alias in edge.aliases for column in columns)


def _shape(columns: tuple[Column, ...], opposite: tuple[Column, ...] | None, edge: Input, producer: Node) -> Shape:
    sides = (_within(columns, producer.left), _within(columns, producer.right))
    keys = (producer.left.key, producer.right.key)
    targets = keys.index(columns) if columns in keys else None
    return Shape(columns, opposite, sides, targets, columns == edge.key)


def shape_hash(rows: Rows, names: tuple[str, ...]) -> U64:
    """The hash of each row's sub-tuple."""
    if not names:
        return np.zeros(len(rows), np.uint64)
    return hash_key([rows[name] for name in names])
