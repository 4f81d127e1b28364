"""Which streams a join is told of before their rows meet its own: heralds.

The JIT paper's consumer learns from a composite, made for nothing, that it has no partner for it, and then tells its
producer. But all rows pass through ingest first. A stream that a join's composites will meet further down is *heralded*
there: for each of its rows, the join gets a hash of the columns that must be equal, and the time. So it knows what is
in demand before it makes anything, and makes a composite only when every heralded stream has a row that fits it by
value and by time.

Invariant: heralds are a function of the plan. A composite that lacks a fitting row of a heralded stream is part of no
result until such a row comes. What a herald says rests on rows of sources alone, never on composites, so joins that
wait for heralds cannot wait for one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from topology.plan.plan import Node, Plan, Route
from topology.query.expression import Column

HERALDS_MOST = 3  # of a join: each more finds less that the others have left


def part_hash(number: int) -> str:
    """Column of a herald's row: the hash of what one input of the join shows of it; only where several do."""
    return f"#:{number}"


@dataclass(frozen=True)
class Part:
    """The equalities of a herald that one input of the join shows."""

    side: int
    mine: tuple[Column, ...]  # of that input
    theirs: tuple[Column, ...]  # of the heralded stream


@dataclass(frozen=True)
class Herald:
    alias: str  # the stream that is heralded
    parts: tuple[
        Part, ...
    ]  # one: rows of an input alone show all equalities (type I); else only several together do (type II)
    also: tuple[Part, ...]  # of a single part: other inputs that show the same values
    to: (
        tuple[Column, ...] | None
    )  # the columns of the stream whose hash names the partition it concerns; None: all partitions

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for part in self.parts for column in part.theirs)

    def shown_by(self, side: int) -> tuple[str, ...] | None:
        """The columns by which rows of an input show it alone; None if they do not."""
        parts = (*self.parts, *self.also) if len(self.parts) == 1 else ()
        return next((tuple(map(str, part.mine)) for part in parts if part.side == side), None)

    def __str__(self) -> str:
        return (
            f"{self.alias} by"
            f" {', '.join(f'{a} = {b}' for part in self.parts for a, b in zip(part.mine, part.theirs, strict=True))}"
        )


def heralds_of(plan: Plan, node: Node) -> tuple[Herald, ...]:
    """The streams that a join is told of: those it does not hold and that some column of its rows must equal; first
    those with more equalities, because fewer rows fit, then those that its rows meet sooner."""
    below, order = node, list[str]()
    while below.target != "out":
        below = plan.node(below.target)
        order += [alias for alias in below.aliases if alias not in (*node.aliases, *order)]
    found = [herald for alias in order for herald in _herald(plan, node, alias)]
    return tuple(sorted(found, key=lambda herald: -len(herald.columns))[:HERALDS_MOST])


def _herald(plan: Plan, node: Node, alias: str) -> Iterator[Herald]:
    links: list[
        tuple[Column, dict[int, Column]]
    ] = []  # (column of the stream, input -> column of it that must be equal)
    for members in plan.query.equal:
        theirs = [column for column in members if column.alias == alias]
        mine = {
            side: min(held)
            for side, edge in enumerate(node.inputs)
            if (held := [c for c in members if c.alias in edge.aliases]) and min(held) in edge.columns
        }
        if theirs and mine:
            links.append((min(theirs), mine))
    if not links:
        return
    whole = [side for side in range(len(node.inputs)) if all(side in mine for _, mine in links)]
    sides = whole or sorted({min(mine) for _, mine in links})
    parts = tuple(
        Part(
            side,
            *(
                tuple(columns)
                for columns in zip(
                    *((mine[side], theirs) for theirs, mine in links if side in whole or side == min(mine)), strict=True
                )
            ),
        )
        for side in sides
    )
    key = [next((theirs for theirs, mine in links if mine.get(0) == column), None) for column in node.inputs[0].key]
    to = tuple(column for column in key if column is not None)
    yield Herald(alias, parts[:1] if whole else parts, parts[1:] if whole else (), to if len(to) == len(key) else None)


def sides_of(plan: Plan, node: str, heralds: bool) -> int:
    """How many things a node keeps segments of: its inputs, then its heralds."""
    found = plan.node(node)
    return len(found.inputs) + (len(heralds_of(plan, found)) if heralds else 0)


def herald_routes(plan: Plan) -> list[tuple[Route, Herald]]:
    """What ingest sends beside the rows themselves."""
    routes = {route.alias: route for route in plan.routes}
    return [
        (
            Route(
                h.alias,
                node.id,
                len(node.inputs) + k,
                h.columns,
                h.columns,
                routes[h.alias].selection,
                routes[h.alias].non_null,
            ),
            h,
        )
        for node in plan.nodes
        for k, h in enumerate(heralds_of(plan, node))
    ]
