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

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from schemas.block import NO_WATERMARK
from schemas.rows import I64, U64, Mask
from topology.plan.plan import Node
from topology.plan.shapes import Shape, links, shape_hash, sizes_of
from topology.restraint.suspension.detection import without_partner
from topology.restraint.suspension.memo import FeedbackMemo
from topology.restraint.suspension.suspended import ShapeTable, restore_tables, written_tables
from topology.state.lookup import entries_of, hidden_rows, waiting_rows
from topology.state.window_state import Run, WindowState

_VOTER, _NOW = 0, 0  # a partition decides alone, and does not care since when


@dataclass(frozen=True)
class Pair:
    """What input `side` may hide for want of a partner in input `other`."""

    side: int
    other: int
    tables: list[ShapeTable]  # small shapes first


class Hiding:
    def __init__(self, node: Node, states: tuple[WindowState, ...], memo: FeedbackMemo) -> None:
        self.states, self.memo = states, memo
        count = len(node.inputs)
        self.pairs = [Pair(i, k, _tables(node, i, k)) for i in range(count) for k in range(count) if i != k]
        self._all = [table for pair in self.pairs for table in pair.tables]
        self._of_side = [
            [table for pair in self.pairs if pair.side == side for table in pair.tables] for side in range(count)
        ]
        self._latest = [NO_WATERMARK] * count  # the end of the longest-lived row of the step, before it is stored

    def arrive(self, side: int, run: Run) -> Run:
        """Show again what these rows are partners of; gives those of them that may set out."""
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
        waits = waiting_rows(self._of_side[side], side, run)
        if not waits.any():
            return run
        self.memo.rows_diverted += int(waits.sum())
        return run.take(np.flatnonzero(~waits))

    def hidden(self, side: int, run: Run, at: I64) -> Mask | None:
        """Which of the rows at these places of a stored run no path need meet."""
        return hidden_rows(self._of_side[side], side, run, at)

    def detect(self, held: tuple[int, ...], to: int, alone: Run) -> None:
        """Composites of the inputs `held` that have no partner in `to`: hide the minimal sub-tuples of their components
        that show why."""
        for pair in self.pairs:
            if pair.other != to or pair.side not in held:
                continue
            last = max((s.max_end for s in self.states[pair.side].segments()), default=NO_WATERMARK)
            last = max(last, self._latest[pair.side])
            for i, _, shown in without_partner(
                [(i, t.shape) for i, t in enumerate(pair.tables)], alone.rows, self.states
            ):
                table, hashes = pair.tables[i], np.unique(shown)
                fresh = hashes[~table.covers(hashes)]
                if len(fresh):
                    table.vote(entries_of(fresh), _VOTER, _NOW, last)
                    self.memo.values_suspended += len(fresh)

    def forget(self, side: int, horizon: int) -> None:
        """Drop the values that no stored row of a side can show any more."""
        self._latest[side] = NO_WATERMARK
        for table in self._of_side[side]:
            table.forget(horizon, horizon)

    @property
    def values(self) -> int:
        """How many are hidden now."""
        return sum(t.count_active for t in self._all)

    def stored(self) -> dict[str, bytes | None]:
        """What changed in the tables, to be written with the step."""
        return written_tables("h", self._all)

    def restore(self, stored: Mapping[str, bytes | None]) -> None:
        restore_tables("h", self._all, stored)


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
