"""An M-Join's partition: three or more inputs in one node (JIT, section V and figure 2; `partition` has what every node
does alike).

A row of one input goes through half joins with the states of all others, one after the other; the order is `routing`'s.
With feedback, rows that cannot become part of a result are hidden from the paths of others (`hiding`), and the node
speaks with those before and behind it as every node does (`feedback`).

Invariant: a result is made by whichever of its rows is processed last, so exactly once: only then are all others
stored; with feedback, at the first moment nobody has it suspended. Composites on the way to a result are never stored;
the state is one window of each input.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from schemas.block import Header
from schemas.mesh import Routing
from schemas.rows import I64, Mask, Rows
from topology.join.half_join import HalfJoin, composites, half_join
from topology.join.node import JoinNode
from topology.join.partition import Effects, Partition
from topology.join.routing import PathsMemo, Router
from topology.plan.plan import Plan
from topology.restraint.heralding.heralding import Found, Told, Wanted
from topology.restraint.hiding import Hiding
from topology.restraint.suspension.memo import FeedbackMemo
from topology.state.meeting import ARRIVED
from topology.state.window import validity
from topology.state.window_state import Run

COMPOSITES_A_ROW = 16  # that hiding is worth its tables, as measured


def open_node(plan: Plan, node: str, partition: int, partitions: int, **settings: Any) -> "JoinNode | MultiJoin":
    """A partition of a node, of the kind that the plan says; the settings are those of every `Partition`."""
    kind = MultiJoin if plan.node(node).is_flat else JoinNode
    return kind(plan, node, partition, partitions, **settings)


class MultiJoin(Partition):
    """One partition of a join of three or more inputs."""

    def _prepare(self, feedback: bool | str, routing: Routing) -> None:
        self.paths = self.memo.paths = self.memo.paths or PathsMemo()
        self.router = Router(routing, self.paths)
        self._half_joins: dict[tuple[tuple[int, ...], int], HalfJoin] = {}
        self.hiding: Hiding | None = None
        if feedback:
            self.memo.feedback = self.memo.feedback or FeedbackMemo()
            self.hiding = Hiding(self.node, self.states, self.memo.feedback)
        self._weighs = feedback == "auto"
        self._all_windows = {alias: window for side in self.windows for alias, window in side.items()}

    def _take(self, offset: int, header: Header, rows: Rows, effects: Effects) -> Rows | None:
        side = header.side
        run = leaving = self.arriving(offset, side, rows)
        if self.feedback is not None:
            self.feedback.arrive(side, run, effects)
        if self.hiding is not None:
            leaving = self.hiding.arrive(side, run)
        if self.feedback is not None:
            leaving = self.feedback.probing(side, leaving)
        if self.heralding is not None:
            leaving = self.heralding.probing(side, leaving)
        made = [piece for piece in self._paths(side, leaving) if len(piece)]
        if self.heralding is not None and self.heralding.asks:
            fitting = [piece.take(np.flatnonzero(self.heralding.wanted(_found(piece)))) for piece in made]
            made = [piece for piece in fitting if len(piece)]
        if self.feedback is not None and not self.feedback.suspended.is_empty:
            kept = [piece.take(np.flatnonzero(self.feedback.allowed(piece.rows, piece.ends))) for piece in made]
            made = [piece for piece in kept if len(piece)]
        self._insert(side, run)
        if self.feedback is not None:
            self.feedback.detect(side, run, header.sender_partition)
            self.feedback.weigh(side, run, header, effects)
        return Rows.concat([piece.rows.select(self.carried) for piece in made]) if made else None

    def _paths(self, side: int, leaving: Run) -> Iterator[Run]:
        """All that rows of an input become part of, in pieces."""
        if len(leaving):
            self.router.begin()
            yield from self._follow(self._start(side, leaving), (side,), again=False)

    def _start(self, side: int, run: Run, *more: str) -> Run:
        return Run(run.rows.select([*self._joined[side], *more]), run.hashes, run.starts, run.ends)

    def _follow(self, composite: Run, held: tuple[int, ...], again: bool) -> Iterator[Run]:
        """The results that composites of the inputs `held` become part of, in pieces. `again`: of rows that are all
        stored, whatever is hidden or suspended."""
        rest = [i for i in range(len(self.states)) if i not in held]
        ways = [self._half_join(held, to) for to in rest]
        to = self.router.choose([(way.to, way.name) for way in ways], first=len(held) == 1)
        half = ways[rest.index(to)]
        met, count = np.zeros(len(composite), np.bool_), 0
        carried = [*self._joined[to], ARRIVED] if again else self._joined[to]
        for made in composites(half, composite, self.states[to], carried, None if again else self._waiting, met):
            count += len(made)
            if len(rest) == 1:
                yield made
            elif len(made):
                self.paths.composites += len(made)
                yield from self._follow(made, (*held, to), again)
        self.router.measure(half.name, len(composite), count)
        if self.hiding is not None and not again and self._hides and not met.all():
            self.hiding.detect(held, to, composite.take(np.flatnonzero(~met)))

    def _waiting(self, side: int, run: Run, at: I64) -> Mask | None:
        """Which of the rows at these places of a stored run no path may meet: those that cannot become part of a
        result, and those of suspended values."""
        found = None
        for who in (self.hiding, self.feedback):
            waits = None if who is None else who.hidden(side, run, at)
            if who is not None and waits is not None:
                who.memo.pairs_avoided += int(waits.sum())
                found = waits if found is None else found | waits
        return found

    def join_again(self, side: int, stored: Run) -> tuple[Rows | None, I64]:
        made = (
            [
                piece.rows
                for piece in self._follow(self._start(side, stored, ARRIVED), (side,), again=True)
                if len(piece)
            ]
            if len(stored)
            else []
        )
        if not made:
            return None, np.empty(0, np.int64)
        rows = Rows.concat(made)
        since = rows.ints(ARRIVED)
        if self.heralding is not None:
            since = self.heralding.moments(rows, *validity(rows, self._all_windows), since)
        return rows, since

    def make_for(self, told: Told, heralds: Run, wanted: Wanted) -> Iterator[Rows]:
        assert self.heralding is not None
        picked, side = self.heralding.pick(told, 0, heralds), told.herald.parts[0].side
        if not len(picked):
            return
        mine = picked.run(np.argsort(picked.hashes, kind="stable"))
        for piece in self._follow(self._start(side, mine, ARRIVED), (side,), again=True):
            keep = wanted(_found(piece, again=True))
            if keep.any():
                yield piece.rows.filter(keep)

    def candidates(self, side: int, probe: Run) -> int:  # noqa: ARG002
        return len(probe) * max(1, self.memo.rows_out // max(1, sum(self.memo.rows_in)))

    @property
    def _hides(self) -> bool:
        """With `auto`: only where rows make many composites on their way, as an Eddy's seldom do."""
        return not self._weighs or self.paths.composites > COMPOSITES_A_ROW * sum(self.memo.rows_in)

    def _half_join(self, held: tuple[int, ...], to: int) -> HalfJoin:
        key = (tuple(sorted(held)), to)
        if key not in self._half_joins:
            self._half_joins[key] = half_join(self.node, *key)
        return self._half_joins[key]

    def _finish(self, effects: Effects) -> None:
        super()._finish(effects)
        if self.hiding is not None:
            for side in range(len(self.states)):
                self.hiding.forget(side, self._horizon(side))
            effects.tables.update(self.hiding.stored())

    def _restore_tables(self, tables: Mapping[str, bytes | None]) -> None:
        super()._restore_tables(tables)
        if self.hiding is not None:
            self.hiding.restore(tables)

    def feedback_counts(self) -> dict[str, int] | None:
        if self.hiding is None or self.memo.feedback is None:
            return None
        counts = self.memo.feedback.counts(here=0) if self.feedback is None else self.feedback.counts()
        return {**counts, "suspended_here": counts["suspended_here"] + self.hiding.values}


def _found(made: Run, again: bool = False) -> Found:
    return Found(
        made.starts,
        made.ends,
        lambda told, at: told.of_rows(made.rows.take(at)),
        (lambda at: made.rows.ints(ARRIVED)[at]) if again else None,
    )
