"""What stored rows show: which of many values some stored row has, and which rows have them.

Invariant: looking costs a search per value in an index that is made once for each immutable run, however many rows
have the value.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import I64, U64, Mask, Rows
from topology.state.hashing import shape_hash
from topology.state.window_state import EVER, NEWEST, Run, WindowState, merge_runs, stretches

BITS_A_ROW = 16
SCANNED_MOST = 4_096  # rows of a run that are looked through for sub-tuples; a larger one is worth an index


def among(values: npt.NDArray[Any], ordered: npt.NDArray[Any]) -> Mask:
    """Which values stand in a sorted array."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[at] == values, np.bool_)


def mask_of(length: int, at: I64) -> Mask:
    mask = np.zeros(length, np.bool_)
    mask[at] = True
    return mask


def indexed(run: Run, names: tuple[str, ...]) -> tuple[U64, I64]:
    """A run's sub-tuples in order, and which row each is of; made once a run."""
    found: tuple[U64, I64] | None = run.indexes.get(names)
    if found is None:
        hashes = shape_hash(run.rows, names)
        order = np.argsort(hashes, kind="stable")
        found = run.indexes[names] = (hashes[order], order)
    return found


def present(state: WindowState, names: tuple[str, ...], hashes: U64) -> Mask:
    """Which sub-tuples some stored row shows."""
    found = np.zeros(len(hashes), np.bool_)
    for segment in state.segments():
        run = state.store.get(segment.id)
        found |= among(hashes, run.hashes if names == state.key else indexed(run, names)[0])
    return found


def perhaps_present(state: WindowState, names: tuple[str, ...], hashes: U64) -> Mask:
    """The same by Bloom filters, made once a run without sorting it: what is not found is surely not there."""
    found = np.zeros(len(hashes), np.bool_)
    for segment in state.segments():
        run = state.store.get(segment.id)
        bits: Mask | None = run.indexes.get(("bloom", *names))
        if bits is None:
            bits = np.zeros(1 << max(10, (len(run) * BITS_A_ROW).bit_length()), np.bool_)
            bits[shape_hash(run.rows, names) % np.uint64(len(bits))] = True
            run.indexes["bloom", *names] = bits
        found |= bits[hashes % np.uint64(len(bits))]
    return found


def shown_by(run: Run, names: tuple[str, ...]) -> U64:
    """The sub-tuple of each row of a run, in order of its rows; made once a run."""
    found: U64 | None = run.indexes.get(("shown", *names))
    if found is None:
        found = run.indexes["shown", *names] = shape_hash(run.rows, names)
    return found


@dataclass(frozen=True)
class Picked:
    """Some rows of a state, by their places; what the kernels need of them, and the rest on demand."""

    runs: list[tuple[Run, I64]]
    shown: U64
    hashes: U64
    starts: I64
    ends: I64

    def __len__(self) -> int:
        return len(self.shown)

    def run(self, at: I64) -> Run:
        """Those at these places, in this order."""
        bounds = np.cumsum([0, *(len(where) for _, where in self.runs)])
        owner = np.searchsorted(bounds, at, "right") - 1
        order = np.argsort(owner, kind="stable")
        parts = [
            run.rows.take(where[at[owner == k] - bounds[k]])
            for k, (run, where) in enumerate(self.runs)
            if (owner == k).any()
        ]
        back = np.empty(len(at), np.int64)
        back[order] = np.arange(len(at))
        return Run(Rows.concat(parts).take(back), self.hashes[at], self.starts[at], self.ends[at])


def pick(
    state: WindowState, names: tuple[str, ...], hashes: U64, start: int, end: int, above: int = EVER, upto: int = NEWEST
) -> Picked:
    """The stored rows that show one of these sorted sub-tuples and whose validity meets [start, end]."""
    found: list[tuple[Run, I64, U64]] = []
    for run in state.reachable(start, end, above, upto):
        if len(run) > SCANNED_MOST:
            ordered, order = indexed(run, names)
            first, stop = np.searchsorted(ordered, hashes, "left"), np.searchsorted(ordered, hashes, "right")
            at = order[stretches(first, stop - first)]
            shown = shape_hash(run.rows.select(names).take(at), names)
        else:
            at = np.flatnonzero(among(shown_by(run, names), hashes))
            shown = shown_by(run, names)[at]
        if at.size:
            near = (run.ends[at] >= start) & (run.starts[at] <= end)
            if not near.all():
                at, shown = at[near], shown[near]
            found.append((run, at, shown))
    if not found:
        nothing = np.empty(0, np.int64)
        return Picked([], np.empty(0, np.uint64), np.empty(0, np.uint64), nothing, nothing)
    return Picked(
        [(run, at) for run, at, _ in found],
        np.concatenate([shown for _, _, shown in found]),
        np.concatenate([run.hashes[at] for run, at, _ in found]),
        np.concatenate([run.starts[at] for run, at, _ in found]),
        np.concatenate([run.ends[at] for run, at, _ in found]),
    )


def rows_with(
    state: WindowState, names: tuple[str, ...], hashes: U64, since: int, above: int = EVER, upto: int = NEWEST
) -> Run | None:
    """The stored rows that show one of these sorted sub-tuples and end at `since` or later, of epochs behind `above` up
    to `upto`."""
    runs = []
    for run in state.reachable(since, NEWEST, above, upto):
        where = np.flatnonzero(among(shown_by(run, names), hashes) & (run.ends >= since))
        if where.size:
            runs.append(run.take(where))
    return merge_runs(runs) if runs else None
