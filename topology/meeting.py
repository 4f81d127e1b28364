"""Whether a stored row of some value meets a span of time, and when the first such row came: over runs that are sorted by hash, for many questions at once.

A run is indexed once by (value, start): a value's rows that start within a span are then a stretch of the index.

Invariant: `meets` and `first_met` look at every stored row of the value, whatever segment it is in; a question costs a search per segment, however many rows have that value.
"""

from dataclasses import dataclass

import numpy as np

from schemas.rows import I64, U64, Mask
from topology.state import Run, WindowState

ARRIVED = "#:came"  # at which moment (offset of the input topic) a stored row came
NEVER = 2**62
_INDEX = ("spans",)


@dataclass(frozen=True)
class _Spans:
    """A run in order of (value, start): each is one number, the value's rank above, the start below."""

    values: U64  # distinct, in order
    keys: I64
    bits: int
    base: int
    order: I64 | None  # which row each is; None: they are in order as they are

    @staticmethod
    def of(run: Run) -> "_Spans":
        known: _Spans | None = run.indexes.get(_INDEX)
        if known is None:
            first = np.ones(len(run), np.bool_)
            np.not_equal(run.hashes[1:], run.hashes[:-1], out=first[1:])
            base = int(run.starts.min())
            bits = max(1, (int(run.starts.max()) - base).bit_length())
            keys = ((np.cumsum(first) - 1) << bits) | (run.starts - base)
            order = None if (keys[1:] >= keys[:-1]).all() else np.argsort(keys, kind="stable")
            known = run.indexes[_INDEX] = _Spans(run.hashes[first], keys if order is None else keys[order], bits, base, order)
        return known

    def stretch(self, hashes: U64, low: I64, high: I64) -> tuple[I64, I64, I64]:
        """The questions whose value is here at all, and for each the stretch of rows that start from `low` to `high`."""
        at = np.minimum(np.searchsorted(self.values, hashes), len(self.values) - 1)
        asked = np.flatnonzero(self.values[at] == hashes)
        rank, most = at[asked].astype(np.int64) << self.bits, (1 << self.bits) - 1
        begin, end = low[asked] - self.base, high[asked] - self.base
        first = np.searchsorted(self.keys, rank | np.clip(begin, 0, most), "left")
        stop = np.searchsorted(self.keys, rank | np.clip(end, 0, most), "right")
        return asked, first, np.where((begin > most) | (end < 0), first, stop)


def met(run: Run, hashes: U64, low: I64, high: I64) -> Mask:
    """For each value, whether a row of the run shows it and starts from `low` to `high`."""
    found = np.zeros(len(hashes), np.bool_)
    if len(run) and len(hashes):
        asked, first, stop = _Spans.of(run).stretch(hashes, low, high)
        found[asked] = stop > first
    return found


def meets(state: WindowState, hashes: U64, low: I64, high: I64) -> Mask:
    """The same, for a stored row of a state."""
    found = np.zeros(len(hashes), np.bool_)
    if not len(hashes):
        return found
    latest, earliest = int(high.max()), int(low.min())
    for segment in state.segments():
        if segment.min_start <= latest and segment.max_start >= earliest:
            open_ = np.flatnonzero(~found)
            if not open_.size:
                break
            found[open_] = met(state.store.get(segment.id), hashes[open_], low[open_], high[open_])
    return found


def first_met(state: WindowState, hashes: U64, low: I64, high: I64) -> I64:
    """For each value, the moment when the first stored row that shows it and starts from `low` to `high` came; `NEVER` if there is none."""
    moments = np.full(len(hashes), NEVER, np.int64)
    for segment in state.segments() if len(hashes) else ():
        run = state.store.get(segment.id)
        spans = _Spans.of(run)
        asked, first, stop = spans.stretch(hashes, low, high)
        some = stop > first
        asked, first, counts = asked[some], first[some], (stop - first)[some]
        if asked.size:
            begins = np.cumsum(counts) - counts
            at = np.arange(int(counts.sum())) + np.repeat(first - begins, counts)
            came = run.rows.ints(ARRIVED)[at if spans.order is None else spans.order[at]]
            moments[asked] = np.minimum(moments[asked], np.minimum.reduceat(came, begins))
    return moments
