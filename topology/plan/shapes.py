"""What a consumer may say to its producer: sub-tuples as values of columns.

A *shape* is a tuple of columns of the producer's output; with values for them it is a sub-tuple (JIT, section III-A).
The empty shape stands for every row (DOE). A sub-tuple travels as the hash of its values: equal values have equal
hashes, and what shares a hash is suspended and resumed together, so a collision costs work and never a row.

Invariant: shapes are a function of the plan, in a fixed order, so both ends of an edge number them alike. The first
shapes of an edge are the consumer's own (what it can find without a partner); the rest it only passes on from its own
consumer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from topology.plan.plan import Input, Node, Plan
from topology.query.expression import Column

OWN_COLUMNS_MOST = 4  # a key of more columns is taken whole: its lattice has 2^n nodes


@dataclass(frozen=True)
class Shape:
    columns: tuple[Column, ...]  # of the producer's output
    opposite: (
        tuple[Column, ...] | None
    )  # the columns of another input of the consumer they equal; None if only passed on
    other: int  # which input that is; -1 if only passed on
    sides: tuple[
        bool, ...
    ]  # for each input of the producer, whether a row of it alone shows it (type I); none: type II
    targets: (
        int | None
    )  # it is the key of this input of the producer, so its hash names the one partition; None: all partitions
    authority: bool  # it is the consumer's key, so one consumer partition sees all its rows and decides alone

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.columns))

    @property
    def opposite_names(self) -> tuple[str, ...]:
        return tuple(map(str, self.opposite or ()))

    def __str__(self) -> str:
        return ", ".join(self.names) or "everything"

    def lead(self, inputs: Sequence[Input]) -> tuple[int, tuple[str, ...]]:
        """An input of the producer whose rows show it, or of which they show a part (type II), and the columns that
        they show."""
        if any(self.sides):
            return self.sides.index(True), self.names
        first = next(i for i, edge in enumerate(inputs) if any(c.alias in edge.aliases for c in self.columns))
        return first, tuple(str(c) for c in self.columns if c.alias in inputs[first].aliases)


def shapes_of(plan: Plan) -> Mapping[str, tuple[Shape, ...]]:
    """For each node that feeds another one, the shapes it is told about."""
    found: dict[str, tuple[Shape, ...]] = {}
    for consumer in reversed(plan.nodes):  # from the root up, because feedback is passed on that way
        for side, edge in enumerate(consumer.inputs):
            if edge.is_source:
                continue
            producer = plan.node(edge.name)
            others = [k for k in range(len(consumer.inputs)) if k != side]
            own = [(mine, theirs, k) for k in others for mine, theirs in _lattice(consumer, side, k)]
            own.sort(key=lambda link: len(link[0]))
            # Passed on as a hash, so only to where a row of one input shows it whole.
            known = {mine for mine, _, _ in own}
            passed = dict.fromkeys(
                s.columns for s in found.get(consumer.id, ()) if any(_within(s.columns, i) for i in producer.inputs)
            )
            shapes = [_shape(mine, theirs, k, edge, producer) for mine, theirs, k in own]
            found[producer.id] = (*shapes, *(_shape(c, None, -1, edge, producer) for c in passed if c not in known))
    return found


def links(node: Node, side: int, other: int) -> list[tuple[Column, Column]]:
    """The columns of one input that must equal columns of another, the key's first."""
    mine, theirs = node.inputs[side], node.inputs[other]
    found = list(zip(mine.key, theirs.key, strict=True))
    for members in node.equal:
        one, two = (next((c for c in members if c.alias in edge.aliases), None) for edge in (mine, theirs))
        if one is not None and two is not None:
            found.append((one, two))
    return found


def sizes_of(width: int) -> Sequence[int]:
    """Of how many columns sub-tuples of a key of `width` columns may be."""
    return range(width + 1) if width <= OWN_COLUMNS_MOST else (0, width)


def _lattice(node: Node, side: int, other: int) -> list[tuple[tuple[Column, ...], tuple[Column, ...]]]:
    """The sub-tuples that may be suspended for want of a partner in one other input, small ones first; each with the
    columns it equals.

    Where both inputs come from joins, rows of both might wait for one another: left ones that show x for a right one
    with x, right ones that show y for a left one with y, and the pair that shows both would never be made. So there
    either both sides speak of the same single column (whoever comes is seen by the other), or one side alone speaks:
    that of fewer streams, because rows of the other, which need more to agree, are the rarer ones. In an M-Join it is
    always one side alone, so that nobody waits in a circle.
    """
    mine, theirs = node.inputs[side], node.inputs[other]
    linked = links(node, side, other)
    sizes = sizes_of(len(linked))
    if not theirs.is_source:
        if len(linked) == 1 and not node.is_flat:
            sizes = [1]
        elif (len(mine.aliases), side) > (len(theirs.aliases), other):
            return []
    return [
        (tuple(a for a, _ in chosen), tuple(b for _, b in chosen))
        for size in sizes
        for chosen in combinations(linked, size)
    ]


def _within(columns: tuple[Column, ...], edge: Input) -> bool:
    return all(column.alias in edge.aliases for column in columns)


def _shape(
    columns: tuple[Column, ...], opposite: tuple[Column, ...] | None, other: int, edge: Input, producer: Node
) -> Shape:
    sides = tuple(_within(columns, i) for i in producer.inputs)
    keys = [i.key for i in producer.inputs]
    targets = keys.index(columns) if columns in keys else None
    return Shape(columns, opposite, other, sides, targets, columns == edge.key)
