"""One half join: composites of some inputs meet the state of one more (JIT, figure 2). A binary join is a path of one.

A composite holds the columns of its inputs; it finds partners by all equalities between them and the new input at once.
Where these are the key of the input, its runs are sorted for it; else a stored run is indexed by the columns, once.

Invariant: `meet` finds each pair of equal hashes whose validities meet once, and `build` keeps those whose equalities
hold and whose residuals are true. Both go piece by piece, so that nothing larger than a piece is ever in memory on the
way to a result, whatever the skew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.rows import I64, Rows
from topology.plan.plan import Node
from topology.query.conditions import Conditions
from topology.query.expression import columns_of
from topology.restraint.interface import Restraint
from topology.state.hashing import equal_keys, shape_hash
from topology.state.lookup import indexed
from topology.state.meeting import ARRIVED
from topology.state.pairs import Piece, joined
from topology.state.window_state import Run, WindowState, least, matches, most


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


def meet(half: HalfJoin, probe: Run, state: WindowState, above: int, upto: int) -> Iterator[Piece]:
    """Pairs of `probe` with the stored rows of some epochs."""
    asked = probe if half.by_key else _asked(probe, half.mine)
    for run in state.reachable(least(probe.starts), most(probe.ends), above, upto):
        if half.by_key:
            for i, j in matches(asked, run):
                yield i, run, j
        else:
            ordered, order = _ordered(run, half.theirs)
            for i, at in matches(asked, ordered):
                yield i, run, order[at]


def visible(pieces: Iterator[Piece], to: int, restraints: Sequence[Restraint]) -> Iterator[Piece]:
    """Without the stored rows that may not be met."""
    for i, run, j in pieces:
        for restraint in restraints:
            hidden = restraint.hidden(to, run, j)
            if hidden is not None and hidden.any():
                i, j = i[~hidden], j[~hidden]
        if len(i):
            yield i, run, j


def build(half: HalfJoin, probe: Run, pieces: Sequence[Piece], mine: list[str], theirs: list[str]) -> Run:
    """Pairs as rows with these columns of both; equality and residuals verified. When both came is the later moment."""
    i = pieces[0][0] if len(pieces) == 1 else np.concatenate([i for i, _, _ in pieces])
    stored = Rows.concat([run.rows.select(theirs).take(j) for _, run, j in pieces])
    probed = probe.rows.select(mine).take(i)
    columns = {**probed.columns, **stored.columns}
    if ARRIVED in mine and ARRIVED in theirs:
        columns[ARRIVED] = np.maximum(probed.ints(ARRIVED), stored.ints(ARRIVED))
    rows = Rows(columns, len(i))
    starts = np.maximum(probe.starts[i], joined([run.starts[j] for _, run, j in pieces]))
    ends = np.minimum(probe.ends[i], joined([run.ends[j] for _, run, j in pieces]))
    made = Run(rows, probe.hashes[i], starts, ends)
    same = equal_keys([rows[name] for name in half.mine], [rows[name] for name in half.theirs])
    if same is not None and not same.all():
        made = made.take(np.flatnonzero(same))
    if half.residual and len(made):
        kept = half.residual.mask(made.rows)
        if not kept.all():
            made = made.take(np.flatnonzero(kept))
    return made


def _asked(probe: Run, names: tuple[str, ...]) -> Run:
    return Run(probe.rows, shape_hash(probe.rows, names), probe.starts, probe.ends)


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
