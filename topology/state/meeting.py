"""Whether a stored row of some value meets a span of time, and when the first such row came: over runs that are sorted
by hash, for many questions at once.

A run is indexed once by (value, start): a value's rows that start within a span are then a stretch of the index.

Invariant: `meets` and `first_met` look at every stored row of the value, whatever segment it is in; a question costs a
search per segment, however many rows have that value.
"""

from dataclasses import dataclass

import numpy as np

from schemas.rows import I64, U64, Mask
from topology.state.window_state import Run, WindowState, stretches

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
            known = run.indexes[_INDEX] = _Spans(
                run.hashes[first], keys if order is None else keys[order], bits, base, order
            )
        return known

    def ask(self, hashes: U64, low: I64, high: I64) -> tuple[I64, I64, I64, I64]:
        """The questions that may have an answer here: which they are, the rank of their value, and both ends of the
        span as the index counts."""
        at = np.searchsorted(self.values, hashes)
        at[at == len(self.values)] = 0
        asked = np.flatnonzero(self.values[at] == hashes)
        if not asked.size:
            return asked, asked, asked, asked
        most = (1 << self.bits) - 1
        begin, end = low[asked] - self.base, high[asked] - self.base
        near = (begin <= most) & (end >= 0)
        if not near.all():
            asked, begin, end = asked[near], begin[near], end[near]
        return asked, at[asked] << self.bits, np.maximum(begin, 0), np.minimum(end, most)


def met(run: Run, hashes: U64, low: I64, high: I64) -> Mask:
    """For each value, whether a row of the run shows it and starts from `low` to `high`."""
    found = np.zeros(len(hashes), np.bool_)
    if len(run) and len(hashes):
        spans = _Spans.of(run)
        asked, rank, begin, end = spans.ask(hashes, low, high)
        if asked.size:
            last = np.searchsorted(spans.keys, rank | end, "right") - 1  # the latest that starts by then
            found[asked] = (last >= 0) & (spans.keys[last] >= rank | begin)
    return found


def meets(state: WindowState, hashes: U64, low: I64, high: I64) -> Mask:
    """The same, for a stored row of a state."""
    found = np.zeros(len(hashes), np.bool_)
    if not len(hashes):
        return found
    latest, earliest = high.max(), low.min()
    for segment in state.segments():
        if segment.min_start <= latest and segment.max_start >= earliest:
            found |= met(state.store.get(segment.id), hashes, low, high)
    return found


def first_met(state: WindowState, hashes: U64, low: I64, high: I64) -> I64:
    """For each value, the moment when the first stored row that shows it and starts from `low` to `high` came; `NEVER`
    if there is none."""
    moments = np.full(len(hashes), NEVER, np.int64)
    for segment in state.segments() if len(hashes) else ():
        run = state.store.get(segment.id)
        spans = _Spans.of(run)
        asked, rank, begin, end = spans.ask(hashes, low, high)
        first, stop = (
            np.searchsorted(spans.keys, rank | begin, "left"),
            np.searchsorted(spans.keys, rank | end, "right"),
        )
        some = stop > first
        asked, first, counts = asked[some], first[some], (stop - first)[some]
        if asked.size:
            begins = np.cumsum(counts) - counts
            at = stretches(first, counts)
            came = run.rows.ints(ARRIVED)[at if spans.order is None else spans.order[at]]
            moments[asked] = np.minimum(moments[asked], np.minimum.reduceat(came, begins))
    return moments
