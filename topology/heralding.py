"""A join that is told what is in demand: a composite is made when the last of what it needs has come, its own rows and a fitting row of each heralded stream.

A heralded row *fits* a composite if it has its values and their validities meet. That never changes again, so the moment when a composite is made is a fact of the log: the latest of the moments when its own
rows came and when, for each herald, the first fitting row came.

- New rows of an input make what fits all heralds at once (`wanting`); the rest waits where its rows are, in the window states.
- A new herald makes what it is the first to fit, if all other heralds fit too (`take`). Whoever has fitted before it has made them already.

Invariants
- Each composite is made once, and none that is part of a result is left out.
- A result made of what is made later starts at the node's watermark or later, which counts the heralded streams' too: so whoever purges by it loses nothing.
- Heralds are kept as long as a composite that they fitted may be asked for again: the shortest window of the node's own streams longer than they are valid.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from schemas.rows import I64, U64, Mask, Rows
from topology.hashing import combine
from topology.heralds import Herald, heralds_of, part_hash
from topology.meeting import ARRIVED, first_met, meets, met
from topology.shapes import shape_hash
from topology.state import Run, SegmentStore, WindowState
from topology.subtuples import rows_with, shown_by
from topology.window import HASH, part_time

if TYPE_CHECKING:
    from topology.partition import Partition


class HeraldMemo(msgspec.Struct):
    """What was done so far for one herald."""

    rows: int = 0
    tested: int = 0  # composites that were found
    refused: int = 0  # of these, that no row of it fitted then
    made: int = 0  # composites that were made when a row of it came


@dataclass(frozen=True)
class Found:
    """Composites that were found and are perhaps not built yet."""

    starts: I64
    ends: I64
    shown: Callable[["Told", I64], U64]  # what those at some places show of a herald

    def __len__(self) -> int:
        return len(self.starts)


Wanted = Callable[[Found], Mask]


class Told:
    """One herald and what has come of it."""

    def __init__(self, herald: Herald, window: int, store: SegmentStore, memo: HeraldMemo) -> None:
        self.herald, self.window, self.memo = herald, window, memo
        self.windows = {herald.alias: window}
        self.state = WindowState(self.windows, store)
        self.names = [tuple(map(str, part.mine)) for part in herald.parts]

    def fits(self, found: Found, at: I64) -> Mask:
        return meets(self.state, found.shown(self, at), found.starts[at] - self.window, found.ends[at])

    def of_rows(self, rows: Rows) -> U64:
        """What composites show of it."""
        return combine([shape_hash(rows, names) for names in self.names])

    def of_pairs(self, sides: Sequence[tuple[Run, I64]]) -> U64:
        """The same for pairs of a binary join that are not built yet: a run and places in it for each side."""
        for side, (run, at) in enumerate(sides):
            alone = self.herald.shown_by(side)
            if alone is not None:
                return shown_by(run, alone)[at]
        shown = [(sides[part.side], names) for part, names in zip(self.herald.parts, self.names, strict=True)]
        return combine([shown_by(run, names)[at] for (run, at), names in shown])


class Heralding:
    def __init__(self, join: "Partition", stores: Sequence[SegmentStore], memos: list[HeraldMemo]) -> None:
        self.join = join
        heralds = heralds_of(join.plan, join.node)
        memos += [HeraldMemo() for _ in range(len(heralds) - len(memos))]
        self.told = [Told(h, join.plan.query.source(h.alias).window_ms, s, m) for h, s, m in zip(heralds, stores, memos, strict=True)]
        self.window = min(window for side in join.windows for window in side.values())

    def purge(self, horizon: int) -> None:
        """Rows of the node's own that end before the horizon are needed no more."""
        for told in self.told:
            told.state.purge(horizon - self.window)

    def probing(self, side: int, run: Run) -> Run:
        """The rows that may make something at once: those that fit by what they show alone."""
        for told in self.told:
            names = told.herald.shown_by(side)
            if names is not None and len(run):
                fits = meets(told.state, shape_hash(run.rows, names), run.starts - told.window, run.ends)
                if not fits.all():
                    run = run.take(np.flatnonzero(fits))
        return run

    def wanted(self, found: Found) -> Mask:
        """Which composites of a new row fit all heralds."""
        return self._fit(self.told, found, np.arange(len(found)))

    def _fit(self, asked: Sequence[Told], found: Found, at: I64) -> Mask:
        keep = np.zeros(len(found), np.bool_)
        for told in asked:
            fits = told.fits(found, at)
            told.memo.tested += len(at)
            told.memo.refused += len(at) - int(fits.sum())
            at = at[fits]
        keep[at] = True
        return keep

    def moments(self, rows: Rows, starts: I64, ends: I64, since: I64) -> I64:
        """When composites whose last row came at `since` had all heralds they need; `NEVER` if they do not yet."""
        for told in self.told:
            since = np.maximum(since, first_met(told.state, told.of_rows(rows), starts - told.window, ends))
        return since

    def take(self, number: int, rows: Rows, now: int) -> Iterator[Rows]:
        """New rows of a heralded stream; gives what can be made because they have come."""
        told = self.told[number]
        told.memo.rows += len(rows)
        run = Run.of(rows, told.windows)
        for made in self._first(told, run):
            told.memo.made += len(made)
            yield made
        kept = Rows({HASH: run.hashes, part_time(told.herald.alias): run.starts, ARRIVED: np.full(len(run), now, np.int64)}, len(run))
        told.state.insert(Run(kept, run.hashes, run.starts, run.ends))

    def _first(self, told: Told, run: Run) -> Iterator[Rows]:
        """What these rows are the first of their stream to fit."""
        latest = max((s.max_start for state in self.join.states for s in state.segments()), default=None)
        if latest is None:
            return
        # An earlier one of the same value that starts no later, and lasts until all that is stored has begun, has fitted all that this one fits.
        known = meets(told.state, run.hashes, np.full(len(run), latest - told.window), run.starts)
        if known.all():
            return
        run = run.take(np.flatnonzero(~known))
        others = [t for t in self.told if t is not told]

        def wanted(found: Found) -> Mask:
            everyone = np.arange(len(found))
            at = np.flatnonzero(met(run, found.shown(told, everyone), found.starts - told.window, found.ends))
            return self._fit(others, found, at[~told.fits(found, at)])

        yield from self.join.make_for(told, _distinct(run), wanted)

    def rows_of(self, told: Told, number: int, run: Run) -> Run | None:
        """The stored rows that show one part of what these heralds fit, and may be valid with one of them."""
        part = told.herald.parts[number]
        hashes = np.unique(run.hashes if len(told.names) == 1 else run.rows[part_hash(number)])
        found = rows_with(self.join.states[part.side], told.names[number], hashes)
        if found is None:
            return None
        near = np.flatnonzero((found.ends >= run.starts.min()) & (found.starts <= run.ends.max()))
        return found.take(near) if near.size else None


def _distinct(run: Run) -> Run:
    """One row for each value, valid whenever one of them is."""
    first = np.flatnonzero(np.concatenate([[True], run.hashes[1:] != run.hashes[:-1]]))
    if len(first) == len(run):
        return run
    return Run(run.rows.take(first), run.hashes[first], np.minimum.reduceat(run.starts, first), np.maximum.reduceat(run.ends, first))
