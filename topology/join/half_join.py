"""One half join of an M-Join (JIT, figure 2): composites of some inputs meet the state of one more.

A composite holds the columns of its inputs; it finds partners by all equalities between them and the new input at once,
not only by the key. For that a stored run is indexed by those columns, once.

Invariant: what is made are exactly the composites whose equalities hold, whose validities meet and whose residuals are
true, each once. It comes in pieces of bounded size, whatever the skew, so that nothing larger is ever in memory on the
way to a result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from schemas.rows import I64, Mask, Rows
from topology.plan.plan import Node
from topology.plan.shapes import shape_hash
from topology.query.conditions import Conditions
from topology.query.expression import columns_of
from topology.state.hashing import equal_keys
from topology.state.lookup import indexed
from topology.state.meeting import ARRIVED
from topology.state.window_state import Run, WindowState, matches

COMPOSITES_AT_ONCE = 1 << 17
Waiting = Callable[[int, Run, I64], Mask | None]  # input, stored run, places in it -> which of these no path may meet


@dataclass(frozen=True)
class HalfJoin:
    to: int  # the input whose state is met
    mine: tuple[str, ...]  # columns of the composite
    theirs: tuple[str, ...]  # columns of the input that equal them
    by_key: bool  # they are the key, whose hash every row carries
    residual: Conditions

    @property
    def name(self) -> str:
        return f"{self.to}: {', '.join(self.theirs)}"


def half_join(node: Node, held: tuple[int, ...], to: int) -> HalfJoin:
    """How composites of the inputs `held` meet the input `to`."""
    pairs = [
        (mine, members[to])
        for members in equalities(node)
        if to in members
        for mine in [_first(members, held)]
        if mine is not None
    ]
    mine, theirs = (tuple(names) for names in zip(*pairs, strict=True))
    before = {alias for side in held for alias in node.inputs[side].aliases}
    known = before | set(node.inputs[to].aliases)
    due = [
        r
        for r in node.residuals
        if {c.alias for c in columns_of(r)} <= known and not {c.alias for c in columns_of(r)} <= before
    ]
    return HalfJoin(to, mine, theirs, theirs == tuple(map(str, node.inputs[to].key)), Conditions(due))


def equalities(node: Node) -> list[dict[int, str]]:
    """Per class of equal columns, the key's first: input -> its column."""
    side_of = {alias: side for side, edge in enumerate(node.inputs) for alias in edge.aliases}
    keys = zip(*(edge.key for edge in node.inputs), strict=True)
    return [{side_of[column.alias]: str(column) for column in members} for members in (*keys, *node.equal)]


def _first(members: dict[int, str], held: tuple[int, ...]) -> str | None:
    return next((members[side] for side in held if side in members), None)


def composites(
    half: HalfJoin, probe: Run, state: WindowState, carried: list[str], waiting: Waiting | None, met: Mask
) -> Iterator[Run]:
    """The composites that `probe` makes with a state, in pieces; marks in `met` which rows of it have a partner by
    value, whether or not it waits."""
    if not len(probe):
        return
    hashes = probe.hashes if half.by_key else shape_hash(probe.rows, half.mine)
    asked = Run(probe.rows, hashes, probe.starts, probe.ends)
    found: list[tuple[I64, Rows, I64, I64]] = []
    count = 0
    for run in state.reachable(int(probe.starts.min()), int(probe.ends.max())):
        ordered, order = (run, None) if half.by_key else _ordered(run, half.theirs)
        for i, at in matches(asked, ordered):
            met[i] = True
            j = at if order is None else order[at]
            waits = None if waiting is None else waiting(half.to, run, j)
            if waits is not None:
                i, j = i[~waits], j[~waits]
            for begin in range(0, len(i), COMPOSITES_AT_ONCE):
                some, theirs = i[begin : begin + COMPOSITES_AT_ONCE], j[begin : begin + COMPOSITES_AT_ONCE]
                found.append((some, run.rows.select(carried).take(theirs), run.starts[theirs], run.ends[theirs]))
                count += len(some)
                if count >= COMPOSITES_AT_ONCE:
                    yield _made(half, probe, found)
                    found, count = [], 0
    if found:
        yield _made(half, probe, found)


def _made(half: HalfJoin, probe: Run, found: list[tuple[I64, Rows, I64, I64]]) -> Run:
    i = np.concatenate([some for some, _, _, _ in found])
    mine, theirs = probe.rows.take(i), Rows.concat([rows for _, rows, _, _ in found])
    rows = Rows({**mine.columns, **theirs.columns}, len(i))
    if ARRIVED in theirs.columns:
        rows = rows.with_column(ARRIVED, np.maximum(mine.ints(ARRIVED), theirs.ints(ARRIVED)))
    starts = np.maximum(probe.starts[i], np.concatenate([starts for _, _, starts, _ in found]))
    ends = np.minimum(probe.ends[i], np.concatenate([ends for _, _, _, ends in found]))
    made = Run(rows, probe.hashes[i], starts, ends)
    same = equal_keys([rows[name] for name in half.mine], [rows[name] for name in half.theirs])
    if same is not None and not same.all():
        made = made.take(np.flatnonzero(same))
    if half.residual and len(made):
        made = made.take(np.flatnonzero(half.residual.mask(made.rows)))
    return made


def _ordered(run: Run, names: tuple[str, ...]) -> tuple[Run, I64]:
    """A run in order of the hash of some columns, without its rows, and which row each is; made once a run."""
    known: tuple[Run, I64] | None = run.indexes.get(("ordered", *names))
    if known is None:
        hashes, order = indexed(run, names)
        known = run.indexes["ordered", *names] = (
            Run(Rows({}, len(run)), hashes, run.starts[order], run.ends[order]),
            order,
        )
    return known
