"""Feedback inside an M-Join (JIT, section V): rows that cannot become part of a result are hidden in their state until
a partner comes.

A half join that finds no partner for a composite looks for the smallest part of one of its components that nothing in
its own state shows (Identify_MNS), and the state of that component hides all rows that show it: no other path makes
composites of them. A row of the same value that arrives later is stored and does not set out. When a row arrives whose
value partners what is hidden, it is hidden no more. Nothing has to be made for it then: the row's own path makes the
results.

Invariant: while a value of input i is hidden for want of input k, no stored row of k shows it. So every result that
hiding leaves out of a path lacks its row of k, and is made when that row comes. Hiding never changes results, and an
entry may be dropped at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from schemas.block import NO_WATERMARK
from schemas.rows import I64, U64, Mask
from topology.plan.plan import Node
from topology.plan.shapes import Shape, links, sizes_of
from topology.restraint.detection import without_partner
from topology.restraint.interface import Ground, Restraint
from topology.restraint.tables import ShapeTable, entries_of, restore_tables, written_tables
from topology.restraint.waiting import hidden_rows, waiting_rows
from topology.state.hashing import shape_hash
from topology.state.window_state import Run

COMPOSITES_A_ROW = 16  # that hiding is worth its tables, as `python -m tests.benchmarks.mjoin` measured
_VOTER, _NOW = 0, 0  # a partition decides alone, and does not care since when


class HidingMemo(msgspec.Struct):
    """What was done so far."""

    pairs_avoided: int = 0
    rows_diverted: int = 0
    values_suspended: int = 0
    values_resumed: int = 0


@dataclass(frozen=True)
class Pair:
    """What input `side` may hide for want of a partner in input `other`."""

    side: int
    other: int
    tables: list[ShapeTable]  # small shapes first


class Hiding(Restraint):
    def __init__(self, ground: Ground, memo: HidingMemo, weighs: bool) -> None:
        """`weighs`: only where rows make many composites on their way, as an Eddy's seldom do."""
        self.ground, self.memo, self._weighs = ground, memo, weighs
        count = len(ground.node.inputs)
        self.pairs = [Pair(i, k, _tables(ground.node, i, k)) for i in range(count) for k in range(count) if i != k]
        self.tables = [table for pair in self.pairs for table in pair.tables]
        self._of_side = [
            [table for pair in self.pairs if pair.side == side for table in pair.tables] for side in range(count)
        ]
        self._latest = [NO_WATERMARK] * count  # the end of the longest-lived row of the step, before it is stored

    notes_unmet = True

    @property
    def avoided(self) -> int:  # type: ignore[override]
        return self.memo.pairs_avoided

    def arrive(self, side: int, run: Run) -> None:
        """Show again what these rows are partners of."""
        shown: dict[tuple[str, ...], U64] = {}
        for pair in self.pairs:
            for table in pair.tables if pair.other == side else ():
                if table.count_active:
                    names = table.shape.opposite_names
                    if names not in shown:
                        shown[names] = np.unique(shape_hash(run.rows, names))
                    wanted = shown[names][table.covers(shown[names])]
                    if len(wanted):
                        self.memo.values_resumed += len(table.retract(wanted, _VOTER, _NOW, NO_WATERMARK))
        self._latest[side] = int(run.ends.max())

    def probing(self, side: int, run: Run) -> Run:
        waits = waiting_rows(self._of_side[side], side, run)
        if not waits.any():
            return run
        self.memo.rows_diverted += int(waits.sum())
        return run.take(np.flatnonzero(~waits))

    def hidden(self, side: int, run: Run, at: I64) -> Mask | None:
        waits = hidden_rows(self._of_side[side], side, run, at)
        if waits is not None:
            self.memo.pairs_avoided += int(waits.sum())
        return waits

    def unmet(self, held: tuple[int, ...], to: int, alone: Run) -> None:
        """Hide the minimal sub-tuples of their components that show why."""
        counts = self.ground.counts
        if self._weighs and counts.composites <= COMPOSITES_A_ROW * sum(counts.rows_in):
            return
        for pair in self.pairs:
            if pair.other != to or pair.side not in held:
                continue
            segments = self.ground.states[pair.side].segments()
            last = max(max((s.max_end for s in segments), default=NO_WATERMARK), self._latest[pair.side])
            shapes = [(i, t.shape) for i, t in enumerate(pair.tables)]
            for i, _, shown in without_partner(shapes, alone.rows, self.ground.states):
                table, hashes = pair.tables[i], np.unique(shown)
                fresh = hashes[~table.covers(hashes)]
                if len(fresh):
                    table.vote(entries_of(fresh), _VOTER, _NOW, last)
                    self.memo.values_suspended += len(fresh)

    def purge(self, horizons: Sequence[int]) -> None:
        """Drop the values that no stored row of an input can show any more."""
        for side, horizon in enumerate(horizons):
            self._latest[side] = NO_WATERMARK
            for table in self._of_side[side]:
                table.forget(horizon, horizon)

    @property
    def values(self) -> int:
        """How many are hidden now."""
        return sum(t.count_active for t in self.tables)

    def changed(self) -> dict[str, bytes | None]:
        return written_tables("h", self.tables)

    def restore(self, stored: Mapping[str, bytes]) -> None:
        restore_tables("h", self.tables, stored)

    def counts(self) -> dict[str, Any]:
        return {
            "suspended_here": self.values,
            "rows_diverted": self.memo.rows_diverted,
            "pairs_avoided": self.memo.pairs_avoided,
            "values_suspended": self.memo.values_suspended,
            "values_resumed": self.memo.values_resumed,
        }


def _tables(node: Node, side: int, other: int) -> list[ShapeTable]:
    """One table for each sub-tuple of the columns of an input that equal columns of another; the empty one stands for
    every row."""
    linked = links(node, side, other)
    sides = tuple(i == side for i in range(len(node.inputs)))
    return [
        ShapeTable(
            Shape(tuple(a for a, _ in chosen), tuple(b for _, b in chosen), other, sides, None, authority=True),
            1,
            keeps_intervals=False,
        )
        for size in sizes_of(len(linked))
        for chosen in combinations(linked, size)
    ]
