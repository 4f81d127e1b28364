"""A join that is told what is in demand: a composite is made when the last of what it needs has come, its own rows and
a fitting row of each stream whose herald it heeds.

A heralded row *fits* a composite if it has its values and their validities meet. That never changes again, so the
moment when a composite is made is a fact of the log: the latest of the moments when its own rows came and when, for
each herald, the first fitting row came.

- New rows of an input make what fits all heralds at once; the rest waits where its rows are, in the window states.
- A new herald lets go what it is the first to fit. What another has fitted before it was let go then.
- A herald that does not pay is *let be* (`heeding.py`): composites whose last row comes later need not fit it. Those
  from before still must, so it is listened to until they are gone.

Invariants
- Each composite is let go once, and none that is part of a result is held for good.
- A result made of what is made later starts at the node's watermark or later, which counts the heralded streams' too:
  so whoever purges by it loses nothing.
- Heralds are kept as long as a composite that they fitted may be asked for again: the shortest window of the node's own
  streams longer than they are valid.
"""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from schemas.block import NO_WATERMARK, Block, Header, Heralds
from schemas.rows import I64, U64, Mask, Rows
from topology.plan.heralds import Herald, part_hash
from topology.restraint.heralding import heeding
from topology.restraint.heralding.heeding import HeraldMemo, HeraldsMemo, Weights
from topology.restraint.interface import Freed, FreeFrom, Ground, Restraint
from topology.state.hashing import combine, shape_hash
from topology.state.lookup import Picked, pick
from topology.state.meeting import ARRIVED, NEVER, first_met, meets, met
from topology.state.pairs import Pairs
from topology.state.window import HASH, part_time
from topology.state.window_state import Run, WindowState, matches

BITS_A_ROW = 8
SLICES = 2  # of a heralded window: they are asked often and small, so few segments matter more than purging early
_NO_ROWS = Rows({}, 0)


class Heard:
    """One herald and the rows of it that have come."""

    def __init__(self, herald: Herald, state: WindowState, memo: HeraldMemo) -> None:
        self.herald, self.state, self.memo = herald, state, memo
        (self.window,) = state.windows_ms.values()
        self.names = [tuple(map(str, part.mine)) for part in herald.parts]
        self._bits: Mask | None = None
        self._added = 0  # rows, since the filter was made

    def has_for(self, pairs: Pairs, at: I64) -> Mask:
        """Whether it has a row that fits each of those at some places."""
        shown = self.shown(pairs)[at]
        fits = self._perhaps(shown)
        which = np.flatnonzero(fits)
        some = at[which]
        fits[which] = meets(self.state, shown[which], pairs.starts[some] - self.window, pairs.ends[some])
        return fits

    def shown(self, pairs: Pairs) -> U64:
        """What composites show of it."""
        return combine([pairs.shown(names) for names in self.names])

    def of_rows(self, rows: Rows) -> U64:
        """The same, of composites that are built."""
        return combine([shape_hash(rows, names) for names in self.names])

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

    def fits(self, pairs: Pairs, at: I64) -> Mask:
        """Whether it has a row that fits each of those at some places, or is not needed for it. Those that it is needed
        for are counted."""
        if self.memo.is_plain:
            fits = self.has_for(pairs, at)
            self.memo.test(len(at), len(at) - int(fits.sum()))
            return fits
        fits = ~self.concerns(pairs, at)
        which = np.flatnonzero(~fits)
        fits[which] = has = self.has_for(pairs, at[which])
        self.memo.test(len(which), len(which) - int(has.sum()))
        return fits

    def concerns(self, pairs: Pairs, at: I64) -> Mask:
        """Which composites it is needed for."""
        if self.memo.is_plain:
            return np.ones(len(at), np.bool_)
        return self.is_needed(pairs.starts[at], pairs.came[at])

    def is_needed(self, starts: I64, came: I64) -> Mask:
        """The same, by when they start and when their last rows came."""
        return (starts > self.memo.gap) & (came >= self.memo.since) & (came < self.memo.until)


class Heralding(Restraint):
    keeps_moments = True
    takes = (Heralds,)

    def __init__(
        self,
        ground: Ground,
        heralds: Sequence[Herald],
        states: Sequence[WindowState],
        memo: HeraldsMemo,
        weights: Weights,
    ) -> None:
        self.ground, self.memo, self.weights = ground, memo, weights
        if not memo.each:
            memo.each = [HeraldMemo() for _ in heralds]
            memo.each[0].heed(0)
        self.heard = [Heard(h, s, m) for h, s, m in zip(heralds, states, memo.each, strict=True)]
        self.window = min(window for windows in ground.windows for window in windows.values())

    # -- new rows

    def probing(self, side: int, run: Run) -> Run:
        """Those that fit by what they show alone."""
        for heard in self.heard:
            names = heard.herald.shown_by(side)
            if names is not None and len(run) and heard.memo.heeded:
                fits = meets(heard.state, shape_hash(run.rows, names), run.starts - heard.window, run.ends)
                fits |= run.starts <= heard.memo.gap
                if not fits.all():
                    self._hold_back(heard, side, run.take(np.flatnonzero(~fits)))
                    run = run.take(np.flatnonzero(fits))
        return run

    def _hold_back(self, heard: Heard, side: int, run: Run) -> None:
        """Count what these rows would have made, in one step of those between two looks for all of them."""
        if self.is_due:
            count = self.ground.estimate(side, run) * (self.weights.weighed_blocks if self.memo.elected else 1)
            self.memo.found += count
            heard.memo.test(count, count)

    def allowed(self, pairs: Pairs) -> Mask | None:
        """Which composites of a new row fit all heralds."""
        if self.memo.elected and not any(herald.heeded for herald in self.memo.each):
            return None
        self.memo.found += len(pairs)
        if not self.memo.elected:
            few = np.arange(min(len(pairs), self.weights.sample))
            for heard in self.heard:
                heard.memo.asked += len(few)
                heard.memo.unfit += len(few) - int(heard.has_for(pairs, few).sum())
        return self._fit([heard for heard in self.heard if heard.memo.heeded], pairs, np.arange(len(pairs)))

    def _fit(self, asked: Sequence[Heard], pairs: Pairs, at: I64) -> Mask:
        keep = np.zeros(len(pairs), np.bool_)
        for heard in asked:
            at = at[heard.fits(pairs, at)]
        keep[at] = True
        return keep

    # -- stored rows

    def free_from(self, pairs: Rows, starts: I64, ends: I64, came: I64) -> FreeFrom | None:
        """When they had all heralds they need."""
        last = np.full(len(came), -1, np.int64)
        for heard in self.heard:
            at = np.flatnonzero(heard.is_needed(starts, came))
            if at.size:
                shown = heard.of_rows(pairs.take(at))
                first = first_met(heard.state, shown, starts[at] - heard.window, ends[at])
                last[at] = np.maximum(last[at], first)
        return lambda moments: np.maximum(moments, last)

    # -- heralds

    def reads(self, header: Header) -> bool:
        """Of a herald that is let be, the header is enough."""
        if not isinstance(header, Heralds) or not 0 <= header.herald < len(self.memo.each):
            return True
        return self.memo.each[header.herald].collects

    def take(self, block: Block, rows: Rows) -> Generator[Freed, int, None]:
        """New rows of a heralded stream; gives what can be made because they have come."""
        header = block.header
        assert isinstance(header, Heralds)
        heard = self.heard[header.herald]
        if not heard.memo.collects:
            if header.latest != NO_WATERMARK:  # what its rows fit is not known
                heard.memo.skip(header.latest + heard.window)
        elif len(rows):
            heard.memo.hear(len(rows))
            run = Run.of(rows, heard.state.windows_ms)
            freed = self._first(heard, run)
            if freed is not None:
                made = yield freed
                heard.memo.made += made
                heard.memo.makes += made > 0
            came = np.full(len(run), self.ground.now, np.int64)
            kept = Rows({HASH: run.hashes, part_time(header.alias): run.starts, ARRIVED: came}, len(run))
            heard.add(Run(kept, run.hashes, run.starts, run.ends))

    def _first(self, heard: Heard, run: Run) -> Freed | None:
        """What these rows are the first of their stream to fit."""
        latest = self.ground.latest_start()
        if latest <= heard.memo.gap or heard.memo.since == NEVER or self.ground.is_silenced:
            return None
        # An earlier one of the same value that starts no later, and lasts until all that is stored has begun, has
        # fitted all that this one fits.
        known = meets(heard.state, run.hashes, np.full(len(run), latest - heard.window), run.starts)
        if known.all():
            return None
        run = run.take(np.flatnonzero(~known))
        others = [h for h in self.heard if h is not heard and h.memo.since != NEVER]

        def wanted(pairs: Pairs) -> Mask:
            at = np.flatnonzero(heard.concerns(pairs, np.arange(len(pairs))))
            shown = heard.shown(pairs)[at]
            at = at[met(run, shown, pairs.starts[at] - heard.window, pairs.ends[at])]
            return self._fit(others, pairs, at[~heard.has_for(pairs, at)])

        each = _distinct(run)

        def rows(above: int, upto: int) -> Run | None:
            found = self._pick(heard, 0, each, above, upto)
            return found.run(np.argsort(found.hashes, kind="stable")) if len(found) else None

        between = len(heard.names) == 2 and len(self.ground.states) == 2
        return Freed(
            heard.herald.parts[0].side,
            rows,
            (lambda: self._between(heard, each)) if between else None,
            wanted,
            without_a_gap=True,
        )

    def _pick(self, heard: Heard, number: int, run: Run, above: int, upto: int) -> Picked:
        """The stored rows that show one part of what these heralds fit, and may be valid with one of them."""
        hashes = np.unique(run.hashes if len(heard.names) == 1 else run.rows[part_hash(number)])
        state = self.ground.states[heard.herald.parts[number].side]
        return pick(
            state, heard.names[number], hashes, int(run.starts.min()), int(run.ends.max()), above=above, upto=upto
        )

    def _between(self, heard: Heard, heralds: Run) -> tuple[Run, Run] | None:
        """Pairs of rows of both inputs of which each shows its part of one herald: by way of the heralds, so that
        nothing is found that none of them fits."""
        mine, theirs = (self._pick(heard, number, heralds, -1, 2**62) for number in (0, 1))
        if not len(mine) or not len(theirs):
            return None
        keyed = combine([theirs.hashes, theirs.shown])
        order, last = np.argsort(mine.shown, kind="stable"), np.argsort(keyed, kind="stable")
        first = Run(_NO_ROWS, mine.shown[order], mine.starts[order], mine.ends[order])
        second = Run(_NO_ROWS, keyed[last], theirs.starts[last], theirs.ends[last])
        asked = Run(_NO_ROWS, heralds.rows[part_hash(0)], heralds.starts, heralds.ends)
        some: list[tuple[I64, I64]] = []
        for c, x in matches(asked, first):
            i = order[x]
            starts, ends = np.maximum(heralds.starts[c], mine.starts[i]), np.minimum(heralds.ends[c], mine.ends[i])
            probe = Run(_NO_ROWS, combine([mine.hashes[i], heralds.rows[part_hash(1)][c]]), starts, ends)
            some += [(i[y], last[z]) for y, z in matches(probe, second)]
        if not some:
            return None
        left, right = (np.concatenate(at) for at in zip(*some, strict=True))
        return mine.run(left), theirs.run(right)

    # -- the end of a step

    def purge(self, horizons: Sequence[int]) -> None:
        horizon = min(horizons)
        for heard in self.heard:
            from_ = heard.memo.purge(horizon, self.window)
            if from_ == NEVER:  # what is forgotten now is missing when it is heeded again
                heard.memo.gap = max((heard.memo.gap, *(segment.max_end for segment in heard.state.segments())))
            heard.state.purge(from_)

    @property
    def is_due(self) -> bool:  # type: ignore[override]
        return not self.memo.elected or self.ground.counts.blocks_in % self.weights.weighed_blocks == 0

    def weigh(self) -> None:
        """Now and then: which heralds pay?"""
        if self.is_due:
            ground, time = self.ground, min(self.ground.times)
            stored = [segment for state in ground.states for segment in state.segments()]
            look = heeding.Look(
                ground.counts.rows_out,
                ground.now + 1,
                min((s.min_start for s in stored), default=time),
                max((s.max_end for s in stored), default=NO_WATERMARK),
                time,
                self.window,
                ground.is_silenced,
                ground.avoided,
            )
            heeding.weigh(self.weights, self.memo, look)

    def counts(self) -> dict[str, Any]:
        return {
            str(heard.herald): {
                "heeded": int(heard.memo.heeded),
                "blocks": heard.memo.blocks + heard.memo.skipped,
                "rows_held": heard.state.rows,
                "composites_found": heard.memo.tested,
                "not_made": heard.memo.refused,
                "made_later": heard.memo.made,
            }
            for heard in self.heard
        }


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
