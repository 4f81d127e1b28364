"""An M-Join's partition: three or more inputs in one node (JIT, section V and figure 2; `partition` has what every node does alike).

A row of one input goes through half joins with the states of all others, one after the other; the order is `routing`'s. With feedback, rows that cannot
become part of a result are hidden from the paths of others (`hiding`).

Invariant: a result is made by whichever of its rows is processed last, so exactly once: only then are all others stored. Composites on the way to a result are
never stored; the state is one window of each input.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from schemas.block import Header
from schemas.mesh import Routing
from schemas.rows import Rows
from topology.feedback import FeedbackMemo
from topology.half_join import HalfJoin, composites, half_join
from topology.hiding import Hiding
from topology.node import JoinNode
from topology.partition import Effects, Partition
from topology.plan import Plan
from topology.routing import PathsMemo, Router
from topology.state import Run

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
        self.feedback: Hiding | None = None
        if feedback:
            self.memo.feedback = self.memo.feedback or FeedbackMemo()
            self.feedback = Hiding(self.node, self.states, self.memo.feedback)
        self._weighs = feedback == "auto"

    def _take(self, offset: int, header: Header, rows: Rows, effects: Effects) -> Rows | None:  # noqa: ARG002
        side = header.side
        run = Run.of(rows, self.windows[side])
        leaving = run if self.feedback is None else self.feedback.arrive(side, run)
        made = []
        if len(leaving):
            self.router.begin()
            start = Run(leaving.rows.select(self._joined[side]), leaving.hashes, leaving.starts, leaving.ends)
            rest = tuple(i for i in range(len(self.states)) if i != side)
            made = [piece.rows.select(self.carried) for piece in self._follow(start, (side,), rest) if len(piece)]
        self._insert(side, run)
        return Rows.concat(made) if made else None

    def _follow(self, composite: Run, held: tuple[int, ...], rest: tuple[int, ...]) -> Iterator[Run]:
        """The results that composites of the inputs `held` become part of, in pieces."""
        ways = [self._half_join(held, to) for to in rest]
        to = self.router.choose([(way.to, way.name) for way in ways], first=len(held) == 1)
        half = ways[rest.index(to)]
        left = tuple(i for i in rest if i != to)
        met, count = np.zeros(len(composite), np.bool_), 0
        for made in composites(half, composite, self.states[to], self._joined[to], self.feedback, met):
            count += len(made)
            if not left:
                yield made
            elif len(made):
                self.paths.composites += len(made)
                yield from self._follow(made, (*held, to), left)
        self.router.measure(half.name, len(composite), count)
        if self.feedback is not None and self._hides and not met.all():
            self.feedback.detect(held, to, composite.take(np.flatnonzero(~met)))

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
        if self.feedback is not None:
            for side in range(len(self.states)):
                self.feedback.forget(side, self._horizon(side))
            effects.tables = self.feedback.stored()

    def _restore_tables(self, tables: dict[str, bytes]) -> None:
        if self.feedback is not None:
            self.feedback.restore(tables)
