"""One side's state: the rows that a later row of the other side may still meet.

Rows live in immutable *segments*, sorted by key hash, grouped by time *slice* (the slice of a row is its validity's
end on a fixed grid). Insert appends a segment and merges small neighbours of its slice; probe looks only into segments
whose validity can meet the probe's; purge drops whole segments. Rows of a small state, and those of a small block that
fall into several slices, as composites do, are not cut at once: they stay together, *young*, until they are many, and
what of them has ended is taken out when the horizon enters another slice. So a small state has few segments.

While several plans are alive, rows of different epochs stand in different segments, so that an operator finds those of
its epochs without looking at rows. Epochs up to `oldest`, the oldest plan alive, are all one.

Invariant: after `purge(horizon)` every row whose end >= horizon is still there, exactly once, and what is kept beyond
that ends less than one slice before the horizon. Cost of a step does not grow with rows that are out of reach.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from schemas.rows import I64, U64, Rows
from topology.state.window import HASH, validity

SLICES_PER_WINDOW = 6
YOUNG, YOUNG_ROWS = -(2**40), 8_192  # the slice of rows that are not cut into slices yet, and how many these may be
EVER, NEWEST = -1, 2**62  # no epoch is before the one, none behind the other
PAIRS_AT_ONCE = 1 << 20  # candidate pairs held in memory at a time, whatever the skew


@dataclass(frozen=True)
class Run:
    """Rows sorted by hash, with the arrays that the kernels work on."""

    rows: Rows
    hashes: U64
    starts: I64
    ends: I64
    indexes: dict[tuple[str, ...], Any] = field(
        default_factory=dict, compare=False, repr=False
    )  # what feedback derives from it, once

    @staticmethod
    def of(rows: Rows, windows_ms: Mapping[str, int], *, presorted: bool = False) -> "Run":
        hashes = rows[HASH]
        assert isinstance(hashes, np.ndarray)
        if not presorted and len(rows) > 1:
            rows = rows.take(np.argsort(hashes, kind="stable"))
            hashes = rows[HASH]
        starts, ends = validity(rows, windows_ms)
        return Run(rows, hashes, starts, ends)

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def index_bytes(self) -> int:
        """What was derived from it so far; there are as many indexes as shapes at most, whatever its rows."""
        parts = (part for index in self.indexes.values() for part in (index if isinstance(index, tuple) else (index,)))
        return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))

    def take(self, index: I64) -> "Run":
        return Run(self.rows.take(index), self.hashes[index], self.starts[index], self.ends[index])


class StateName(NamedTuple):
    """What a state is called by: what it holds, not whose side it is."""

    parts: tuple[str, ...]  # aliases, in FROM order
    key: tuple[str, ...]  # the columns whose hash its runs are sorted by
    heralded: bool = False  # of the parts only what heralds say

    def __str__(self) -> str:
        return f"{'heralds of ' if self.heralded else ''}{'+'.join(self.parts)} by {','.join(self.key)}"


@dataclass(frozen=True)
class Segment:
    """What is known of a stored run without loading it."""

    id: int
    slice: int
    rows: int
    bytes: int
    min_start: int
    max_end: int
    max_start: int
    min_end: int
    epoch: int = 0  # of all its rows


class SegmentStore(Protocol):
    """Where runs are kept. A run that was put stays readable until it is dropped, across restarts."""

    def get(self, id: int) -> Run: ...
    def put(self, segment: Segment, run: Run) -> None: ...
    def drop(self, id: int) -> None: ...


class MemoryStore:
    """A store for tests and simulations."""

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        self.segments: dict[int, Segment] = {}

    def get(self, id: int) -> Run:
        return self.runs[id]

    def put(self, segment: Segment, run: Run) -> None:
        self.runs[segment.id], self.segments[segment.id] = run, segment

    def drop(self, id: int) -> None:
        del self.runs[id], self.segments[id]


@dataclass
class WindowState:
    windows_ms: Mapping[str, int]  # alias -> window, of the parts this side's rows hold
    store: SegmentStore
    next_id: int = 0
    newest: int = -(2**62)  # the latest slice that rows came into
    slices: dict[int, list[Segment]] = field(default_factory=dict)
    key: tuple[str, ...] = ()  # the columns whose hash runs are sorted by
    slices_per_window: int = SLICES_PER_WINDOW
    oldest: int = 0  # epoch that is alive

    @cached_property
    def slice_ms(self) -> int:
        return max(1, min(self.windows_ms.values()) // self.slices_per_window)

    def restore(self, segments: list[Segment]) -> None:
        """Take over what the store holds after a restart."""
        for segment in sorted(segments, key=lambda s: s.id):
            self.slices.setdefault(segment.slice, []).append(segment)
            self.newest = max(self.newest, segment.max_end // self.slice_ms)
            self.next_id = max(self.next_id, segment.id + 1)

    def insert(self, run: Run, epoch: int = 0) -> None:
        """Add rows of one epoch."""
        if len(run) == 0:
            return
        low, high = least(run.ends) // self.slice_ms, most(run.ends) // self.slice_ms
        if high > self.newest:
            self.newest = high
            self._settle()
        if low == high and len(run) + self.rows >= YOUNG_ROWS:
            self._append(low, run, epoch)
        elif len(run) < YOUNG_ROWS:
            self._append(YOUNG, run, epoch)
            if sum(segment.rows for segment in self.slices[YOUNG]) >= YOUNG_ROWS:
                self._grow_up()
        else:
            self._cut(run, epoch)

    def _cut(self, run: Run, epoch: int) -> None:
        slice_of = run.ends // self.slice_ms
        for slice in np.unique(slice_of).tolist():
            self._append(slice, run.take(np.flatnonzero(slice_of == slice)), epoch)

    def _grow_up(self) -> None:
        """Young rows go into their slices."""
        for epoch, segments in self._by_epoch(self.slices.pop(YOUNG)):
            self._cut(self._taken(segments), epoch)

    def _purge_young(self, horizon: int) -> int:
        """Young rows become one segment without what has ended, if the horizon has entered another slice since; few as
        they are, that costs less than to cut them."""
        segments = self.slices[YOUNG]
        bound = horizon - horizon % self.slice_ms  # the first end that falls into the horizon's slice
        if all(segment.min_end >= bound for segment in segments):
            return 0
        left, dropped = [], 0
        for epoch, some in self._by_epoch(self.slices.pop(YOUNG)):
            run = self._taken(some)
            kept = run.take(np.flatnonzero(run.ends >= horizon))
            dropped += len(run) - len(kept)
            if len(kept):
                left.append(self._put(YOUNG, kept, epoch))
        if left:
            self.slices[YOUNG] = left
        return dropped

    def _taken(self, segments: list[Segment]) -> Run:
        """The rows of some segments, which are stored no more."""
        run = merge_runs([self.store.get(segment.id) for segment in segments])
        for segment in segments:
            self.store.drop(segment.id)
        return run

    def _by_epoch(self, segments: list[Segment]) -> list[tuple[int, list[Segment]]]:
        """Segments that may be merged with one another; one group, unless several plans are alive."""
        groups: dict[int, list[Segment]] = {}
        for segment in segments:
            groups.setdefault(max(segment.epoch, self.oldest), []).append(segment)
        return sorted(groups.items())

    def _settle(self) -> None:
        """Slices that few rows come into any more become one segment each, so that probes look into few."""
        for slice, segments in self.slices.items():
            if YOUNG < slice < self.newest - 1 and len(segments) > 1:
                groups = self._by_epoch(segments)
                if len(groups) < len(segments):
                    segments[:] = [
                        some[0] if len(some) == 1 else self._put(slice, self._taken(some), epoch)
                        for epoch, some in groups
                    ]

    def _append(self, slice: int, run: Run, epoch: int) -> None:
        # Size-tiered: merge with the neighbour before while it is at most twice as large, so a slice holds O(log n)
        # segments and a row is rewritten O(log n) times.
        segments = self.slices.setdefault(slice, [])
        merged, rows, epoch = [run], len(run), max(epoch, self.oldest)
        while segments and segments[-1].rows <= 2 * rows and max(segments[-1].epoch, self.oldest) == epoch:
            last = segments.pop()
            merged.append(self.store.get(last.id))
            self.store.drop(last.id)
            rows += last.rows
        if len(merged) > 1:
            run = merge_runs(merged)
        segments.append(self._put(slice, run, epoch))

    def _put(self, slice: int, run: Run, epoch: int) -> Segment:
        segment = Segment(
            id=self.next_id,
            slice=slice,
            rows=len(run),
            bytes=run.rows.nbytes,
            min_start=least(run.starts),
            max_end=most(run.ends),
            max_start=most(run.starts),
            min_end=least(run.ends),
            epoch=epoch,
        )
        self.next_id += 1
        self.store.put(segment, run)
        return segment

    def reachable(self, start: int, end: int, above: int = EVER, upto: int = NEWEST) -> Iterator[Run]:
        """Runs of epochs behind `above` up to `upto` that may hold a row whose validity meets [start, end]."""
        for segment in self.segments():
            if (
                segment.min_start <= end
                and segment.max_end >= start
                and above < max(segment.epoch, self.oldest) <= upto
            ):
                yield self.store.get(segment.id)

    def purge(self, horizon: int) -> int:
        """Drop segments that no row starting at `horizon` or later can meet. Returns the rows dropped."""
        dropped = 0
        if YOUNG in self.slices:
            dropped += self._purge_young(horizon)
        for slice in [s for s in self.slices if s * self.slice_ms < horizon]:
            kept = []
            for segment in self.slices[slice]:
                if segment.max_end < horizon:
                    self.store.drop(segment.id)
                    dropped += segment.rows
                else:
                    kept.append(segment)
            if kept:
                self.slices[slice] = kept
            else:
                del self.slices[slice]
        return dropped

    @property
    def rows(self) -> int:
        return sum(segment.rows for segments in self.slices.values() for segment in segments)

    @property
    def is_empty(self) -> bool:
        return not any(self.slices.values())

    def segments(self) -> Iterator[Segment]:
        """Oldest slices first, whenever they came: so a restart changes no order."""
        for _, segments in sorted(self.slices.items()):
            yield from segments


def merge_runs(runs: list[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]
    rows = Rows.concat([run.rows for run in runs])
    hashes = np.concatenate([run.hashes for run in runs])
    order = np.argsort(hashes, kind="stable")  # timsort: the runs are sorted already, so this is a merge
    starts = np.concatenate([run.starts for run in runs])
    ends = np.concatenate([run.ends for run in runs])
    return Run(rows.take(order), hashes[order], starts[order], ends[order])


def matches(probe: Run, stored: Run) -> Iterator[tuple[I64, I64]]:
    """Index pairs (row of probe, row of stored) of equal hash whose validities meet, in bounded pieces.

    Both runs are sorted by hash, so the search walks forward through `stored`.
    """
    if len(stored) == 0 or len(probe) == 0:
        return
    if len(probe) == 1:
        yield from _matches_of_one(probe, stored)
        return
    hashes = stored.hashes
    low = hashes.searchsorted(probe.hashes)
    hit = (hashes.take(low, mode="clip") == probe.hashes).nonzero()[0]
    if hit.size == 0:
        return
    low = low[hit]
    counts = hashes.searchsorted(probe.hashes[hit], "right") - low
    totals = counts.cumsum()
    begin = 0
    while begin < hit.size:
        base = int(totals[begin - 1]) if begin else 0
        stop = max(begin + 1, int(totals.searchsorted(base + PAIRS_AT_ONCE, "right")))
        i, j = hit[begin:stop], low[begin:stop]
        if int(totals[stop - 1]) - base > stop - begin:  # some value stands more than once
            c = counts[begin:stop]
            i, j = i.repeat(c), stretches(j, c)
        meets = np.maximum(probe.starts[i], stored.starts[j]) <= np.minimum(probe.ends[i], stored.ends[j])
        if not meets.all():
            i, j = i[meets], j[meets]
        if i.size:
            yield i, j
        begin = stop


def _matches_of_one(probe: Run, stored: Run) -> Iterator[tuple[I64, I64]]:
    """The same for a probe of one row: most small steps are made of these."""
    low = int(stored.hashes.searchsorted(probe.hashes[0]))
    if low == len(stored) or stored.hashes[low] != probe.hashes[0]:
        return
    high = int(stored.hashes.searchsorted(probe.hashes[0], "right"))
    for begin in range(low, high, PAIRS_AT_ONCE):
        end = min(high, begin + PAIRS_AT_ONCE)
        meets = (stored.starts[begin:end] <= probe.ends[0]) & (stored.ends[begin:end] >= probe.starts[0])
        j = np.flatnonzero(meets)
        if j.size:
            yield np.zeros(j.size, np.int64), j + begin


def least(values: I64) -> int:
    """The least of some; of one, without asking numpy, which takes as long for one as for thousands."""
    return int(values[0]) if len(values) == 1 else int(values.min())


def most(values: I64) -> int:
    return int(values[0]) if len(values) == 1 else int(values.max())


def stretches(first: I64, counts: I64) -> I64:
    """The places of several stretches, one behind the other: so many from each first one on.

    >>> stretches(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    places: I64 = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return places


def count_matches(probe: Run, stored: Run) -> int:
    """How many pairs have equal hashes."""
    low, high = (np.searchsorted(stored.hashes, probe.hashes, side) for side in ("left", "right"))
    return int((high - low).sum())
