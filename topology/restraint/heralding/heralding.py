"""A join that is told what is in demand: a composite is made when the last of what it needs has come, its own rows and
a fitting row of each stream whose herald it heeds.

A heralded row *fits* a composite if it has its values and their validities meet. That never changes again, so the
moment when a composite is made is a fact of the log: the latest of the moments when its own rows came and when, for
each herald, the first fitting row came.

- New rows of an input make what fits all heralds at once (`wanted`); the rest waits where its rows are, in the window
  states.
- A new herald makes what it is the first to fit, if all other heralds fit too (`take`). What another has fitted before
  it was made then.
- A herald that does not pay is *let be* (`heeding.py`): composites whose last row comes later need not fit it. Those
  from before still must, so it is listened to until they are gone.

Invariants
- Each composite is made once, and none that is part of a result is left out.
- A result made of what is made later starts at the node's watermark or later, which counts the heralded streams' too:
  so whoever purges by it loses nothing.
- Heralds are kept as long as a composite that they fitted may be asked for again: the shortest window of the node's own
  streams longer than they are valid.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schemas.block import NO_WATERMARK
from schemas.rows import I64, U64, Mask, Rows
from topology.plan.heralds import Herald, heralds_of, part_hash
from topology.plan.shapes import shape_hash
from topology.restraint.heralding import heeding
from topology.restraint.heralding.heeding import HeraldMemo, HeraldsMemo
from topology.state.hashing import combine
from topology.state.lookup import Picked, pick
from topology.state.meeting import ARRIVED, NEVER, first_met, meets, met
from topology.state.window import HASH, part_time
from topology.state.window_state import Run, SegmentStore, WindowState

if TYPE_CHECKING:
    from topology.join.partition import Partition


BITS_A_ROW = 8
SLICES = 2  # of a heralded window: they are asked often and small, so few segments matter more than purging early


@dataclass(frozen=True)
class Found:
    """Composites that were found and are perhaps not built yet."""

    starts: I64
    ends: I64
    shown: Callable[["Told", I64], U64]  # what those at some places show of a herald
    came: Callable[[I64], I64] | None = None  # when the last rows of those at some places came; None: just now

    def __len__(self) -> int:
        return len(self.starts)


Wanted = Callable[[Found], Mask]


class Told:
    """One herald and what has come of it."""

    def __init__(self, herald: Herald, window: int, store: SegmentStore, memo: HeraldMemo) -> None:
        self.herald, self.window, self.memo = herald, window, memo
        self.windows = {herald.alias: window}
        self.state = WindowState(self.windows, store, slices_per_window=SLICES)
        self.names = [tuple(map(str, part.mine)) for part in herald.parts]
        self._bits: Mask | None = None
        self._added = 0  # rows, since the filter was made

    def has_for(self, found: Found, at: I64) -> Mask:
        """Whether it has a row that fits each of those at some places."""
        shown = found.shown(self, at)
        fits = self._perhaps(shown)
        which = np.flatnonzero(fits)
        some = at[which]
        fits[which] = meets(self.state, shown[which], found.starts[some] - self.window, found.ends[some])
        return fits

    @property
    def filter_bytes(self) -> int:
        return 0 if self._bits is None else self._bits.nbytes

    def add(self, run: Run) -> None:
        self.state.insert(run)
        self._added += len(run)
        if self._bits is not None:
            self._bits[run.hashes & np.uint64(len(self._bits) - 1)] = True

    def _perhaps(self, hashes: U64) -> Mask:
        """Which values may have come: by a Bloom filter of the whole state, because most have not. It is made anew when
        it has taken in twice what it was made for."""
        if self._bits is None or self._added * BITS_A_ROW > 2 * len(self._bits):
            held = self.state.rows
            self._bits, self._added = np.zeros(1 << max(10, (held * BITS_A_ROW).bit_length()), np.bool_), held
            for segment in self.state.segments():
                self._bits[self.state.store.get(segment.id).hashes & np.uint64(len(self._bits) - 1)] = True
        found: Mask = self._bits[hashes & np.uint64(len(self._bits) - 1)]
        return found

    def fits(self, found: Found, at: I64) -> Mask:
        """Whether it has a row that fits each of those at some places, or is not needed for it. Those that it is needed
        for are counted."""
        if self.memo.is_plain:
            fits = self.has_for(found, at)
            self.memo.test(len(at), len(at) - int(fits.sum()))
            return fits
        fits = ~self.concerns(found, at)
        which = np.flatnonzero(~fits)
        fits[which] = has = self.has_for(found, at[which])
        self.memo.test(len(which), len(which) - int(has.sum()))
        return fits

    def concerns(self, found: Found, at: I64) -> Mask:
        """Which composites it is needed for."""
        if self.memo.is_plain:
            return np.ones(len(at), np.bool_)
        if found.came is None:
            return (found.starts[at] > self.memo.gap) & self.memo.heeded
        came = found.came(at)
        return (found.starts[at] > self.memo.gap) & (came >= self.memo.since) & (came < self.memo.until)

    def of_rows(self, rows: Rows) -> U64:
        """What composites show of it."""
        return combine([shape_hash(rows, names) for names in self.names])

    def of_pairs(self, by: Callable[[int, tuple[str, ...]], U64]) -> U64:
        """The same for composites that are not built yet: `by` gives what their rows of an input show of some
        columns."""
        for side in (0, 1):
            alone = self.herald.shown_by(side)
            if alone is not None:
                return by(side, alone)
        return combine([by(part.side, names) for part, names in zip(self.herald.parts, self.names, strict=True)])


class Heralding:
    def __init__(self, join: "Partition", stores: Sequence[SegmentStore], memo: HeraldsMemo) -> None:
        self.join, self.memo = join, memo
        heralds = heralds_of(join.plan, join.node)
        if not memo.each:
            memo.each = [HeraldMemo() for _ in heralds]
            memo.each[0].heed(0)
        self.told = [
            Told(h, join.plan.query.source(h.alias).window_ms, s, m)
            for h, s, m in zip(heralds, stores, memo.each, strict=True)
        ]
        self.window = min(window for side in join.windows for window in side.values())

    def purge(self, horizon: int) -> None:
        """Rows of the node's own that end before the horizon are needed no more."""
        for told in self.told:
            from_ = told.memo.purge(horizon, self.window)
            if from_ == NEVER:  # what is forgotten now is missing when it is heeded again
                told.memo.gap = max((told.memo.gap, *(segment.max_end for segment in told.state.segments())))
            told.state.purge(from_)

    @property
    def is_weighed_now(self) -> bool:
        return not self.memo.elected or self.join.memo.blocks_in % heeding.WEIGHED_BLOCKS == 0

    def weigh(self, now: int) -> None:
        """Behind a step, now and then: which heralds pay?"""
        if self.is_weighed_now:
            made, time = self.join.memo.rows_out, min(self.join.memo.watermarks)
            stored = [segment for state in self.join.states for segment in state.segments()]
            earliest, latest = (
                min((s.min_start for s in stored), default=time),
                max((s.max_end for s in stored), default=NO_WATERMARK),
            )
            avoided = 0 if self.join.memo.feedback is None else self.join.memo.feedback.pairs_avoided
            heeding.weigh(
                self.memo,
                heeding.Look(made, now + 1, earliest, latest, time, self.window, self.join.makes_nothing, avoided),
            )

    def reads(self, number: int) -> bool:
        """Whether the rows of a herald are to be read at all."""
        return self.told[number].memo.collects

    def skip(self, number: int, latest: int) -> None:
        """Rows of a herald that is let be, the latest of this time: what they fit is not known."""
        told = self.told[number]
        told.memo.skip(latest + told.window)

    def probing(self, side: int, run: Run) -> Run:
        """The rows that may make something at once: those that fit by what they show alone."""
        for told in self.told:
            names = told.herald.shown_by(side)
            if names is not None and len(run) and told.memo.heeded:
                fits = meets(told.state, shape_hash(run.rows, names), run.starts - told.window, run.ends) | (
                    run.starts <= told.memo.gap
                )
                if not fits.all():
                    self._hold_back(told, side, run.take(np.flatnonzero(~fits)))
                    run = run.take(np.flatnonzero(fits))
        return run

    def _hold_back(self, told: Told, side: int, run: Run) -> None:
        """Count what these rows would have made, in one step of those between two looks for all of them."""
        if self.is_weighed_now:
            count = self.join.candidates(side, run) * (heeding.WEIGHED_BLOCKS if self.memo.elected else 1)
            self.memo.found += count
            told.memo.test(count, count)

    @property
    def asks(self) -> bool:
        """Whether composites of new rows are to be asked about."""
        return not self.memo.elected or any(herald.heeded for herald in self.memo.each)

    def wanted(self, found: Found) -> Mask:
        """Which composites of a new row fit all heralds."""
        self.memo.found += len(found)
        if not self.memo.elected:
            few = np.arange(min(len(found), heeding.SAMPLE))
            for told in self.told:
                told.memo.asked += len(few)
                told.memo.unfit += len(few) - int(told.has_for(found, few).sum())
        return self._fit([told for told in self.told if told.memo.heeded], found, np.arange(len(found)))

    def _fit(self, asked: Sequence[Told], found: Found, at: I64) -> Mask:
        keep = np.zeros(len(found), np.bool_)
        for told in asked:
            at = at[told.fits(found, at)]
        keep[at] = True
        return keep

    def moments(self, rows: Rows, starts: I64, ends: I64, since: I64) -> I64:
        """When composites whose last row came at `since` had all heralds they need; `NEVER` if they do not yet."""
        found, last = Found(starts, ends, lambda told, at: told.of_rows(rows.take(at)), lambda at: since[at]), since
        for told in self.told:
            at = np.flatnonzero(told.concerns(found, np.arange(len(found))))
            if at.size:
                last = last.copy()
                last[at] = np.maximum(
                    last[at], first_met(told.state, found.shown(told, at), starts[at] - told.window, ends[at])
                )
        return last

    def take(self, number: int, rows: Rows, now: int) -> Iterator[Rows]:
        """New rows of a heralded stream; gives what can be made because they have come."""
        told = self.told[number]
        told.memo.hear(len(rows))
        run = Run.of(rows, told.windows)
        before = told.memo.made
        for made in self._first(told, run):
            told.memo.made += len(made)
            yield made
        told.memo.makes += told.memo.made > before
        kept = Rows(
            {HASH: run.hashes, part_time(told.herald.alias): run.starts, ARRIVED: np.full(len(run), now, np.int64)},
            len(run),
        )
        told.add(Run(kept, run.hashes, run.starts, run.ends))

    def _first(self, told: Told, run: Run) -> Iterator[Rows]:
        """What these rows are the first of their stream to fit."""
        latest = max((s.max_start for state in self.join.states for s in state.segments()), default=NO_WATERMARK)
        if latest <= told.memo.gap or told.memo.since == NEVER or self.join.makes_nothing:
            return
        # An earlier one of the same value that starts no later, and lasts until all that is stored has begun, has
        # fitted all that this one fits.
        known = meets(told.state, run.hashes, np.full(len(run), latest - told.window), run.starts)
        if known.all():
            return
        run = run.take(np.flatnonzero(~known))
        others = [t for t in self.told if t is not told and t.memo.since != NEVER]

        def wanted(found: Found) -> Mask:
            at = np.flatnonzero(told.concerns(found, np.arange(len(found))))
            at = at[met(run, found.shown(told, at), found.starts[at] - told.window, found.ends[at])]
            return self._fit(others, found, at[~told.has_for(found, at)])

        yield from self.join.make_for(told, _distinct(run), wanted)

    def pick(self, told: Told, number: int, run: Run) -> Picked:
        """The stored rows that show one part of what these heralds fit, and may be valid with one of them."""
        hashes = np.unique(run.hashes if len(told.names) == 1 else run.rows[part_hash(number)])
        return pick(
            self.join.states[told.herald.parts[number].side],
            told.names[number],
            hashes,
            int(run.starts.min()),
            int(run.ends.max()),
        )


def _distinct(run: Run) -> Run:
    """One row for each value, valid whenever one of them is."""
    first = np.flatnonzero(np.concatenate([[True], run.hashes[1:] != run.hashes[:-1]]))
    if len(first) == len(run):
        return run
    return Run(
        run.rows.take(first),
        run.hashes[first],
        np.minimum.reduceat(run.starts, first),
        np.maximum.reduceat(run.ends, first),
    )
