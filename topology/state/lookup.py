"""Sub-tuples as they travel in a block, and as they are found in stored runs.

A block about demand holds one row per sub-tuple: the number of its shape, the hash of its values, the hash of its left
part (type II), and the ticket of the resume it belongs to.

Invariant: `unpack` gives back what `pack` was given, shape by shape and sorted by hash. Looking for sub-tuples costs a
search per value in an index that is made once for each immutable run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import I64, U64, Mask, Rows
from topology.plan.shapes import shape_hash
from topology.restraint.suspension.suspended import ENTRY, ShapeTable, among
from topology.restraint.values import by_hash
from topology.state.window_state import Run, WindowState, merge_runs

SHAPE, VALUE, LEFT, TICKET = "#s", "#h", "#l", "#t"
_HIDDEN = ("hidden",)
BITS_A_ROW = 16
SCANNED_MOST = 4_096  # rows of a run that are looked through for sub-tuples; a larger one is worth an index
TYPES = {SHAPE: np.int64, VALUE: np.uint64, LEFT: np.uint64, TICKET: np.int64}


def entries_of(hashes: U64, left: U64 | None = None) -> npt.NDArray[Any]:
    entries = np.zeros(len(hashes), ENTRY)
    entries["hash"] = hashes
    if left is not None:
        entries["left"] = left
    return entries


def pack(parts: list[tuple[int, Any]], ticket: int) -> Rows:
    """Sub-tuples as rows; without any, one row that carries the ticket alone."""
    parts = parts or [(-1, entries_of(np.zeros(1, np.uint64)))]
    shapes = np.concatenate([np.full(len(e), i, np.int64) for i, e in parts])
    columns = {name: np.concatenate([e[field] for _, e in parts]) for name, field in ((VALUE, "hash"), (LEFT, "left"))}
    return Rows({SHAPE: shapes, **columns, TICKET: np.full(len(shapes), ticket, np.int64)})


def unpack(rows: Rows) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(shape, entries sorted by hash), shape by shape."""
    at = rows.ints(SHAPE)
    for i in np.unique(at).tolist():
        if i >= 0:
            mine = at == i
            entries = entries_of(rows[VALUE][mine])
            entries["left"] = rows[LEFT][mine]
            yield i, by_hash(entries)


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


def pick(state: WindowState, names: tuple[str, ...], hashes: U64, start: int, end: int) -> Picked:
    """The stored rows that show one of these sorted sub-tuples and whose validity meets [start, end]."""
    found: list[tuple[Run, I64, U64]] = []
    for run in state.reachable(start, end):
        if len(run) > SCANNED_MOST:
            ordered, order = indexed(run, names)
            first, stop = np.searchsorted(ordered, hashes, "left"), np.searchsorted(ordered, hashes, "right")
            counts = stop - first
            at = order[np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)]
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


def rows_with(state: WindowState, names: tuple[str, ...], hashes: U64) -> Run | None:
    """The stored rows that show one of these sorted sub-tuples."""
    runs = []
    for segment in state.segments():
        run = state.store.get(segment.id)
        where = np.flatnonzero(among(shown_by(run, names), hashes))
        if where.size:
            runs.append(run.take(where))
    return merge_runs(runs) if runs else None


def waiting_rows(tables: Sequence[ShapeTable], side: int, run: Run) -> Mask:
    """Which new rows of a side show a suspended value; the tables take note of them."""
    waits = np.zeros(len(run), np.bool_)
    for table in tables:
        if table.shape.sides[side] and table.count_active:
            shown = shape_hash(run.rows, table.shape.names)
            covered = table.covers(shown)
            if covered.any():
                waits |= covered
                table.waits(shown[covered], run.ends[covered])
    return waits


def hidden_rows(tables: Sequence[ShapeTable], side: int, run: Run, at: I64) -> Mask | None:
    """Which of the rows at these places of a stored run of a side show a suspended value; None if no value is.

    If they are few, each is looked up; else all rows of the run are, once for every change of what is suspended.
    """
    mine = [t for t in tables if t.shape.sides[side] and t.count_active]
    if not mine:
        return None
    version = tuple(t.version for t in tables)
    known = run.indexes.get(_HIDDEN)
    if (
        known is None or known[0] is not tables or known[1] != version
    ):  # a node that starts again counts its versions from the beginning
        few = 2 * len(at) < len(run)
        mask = np.zeros(len(at) if few else len(run), np.bool_)
        for table in mine:
            shown = shown_by(run, table.shape.names)
            mask |= table.covers(shown[at] if few else shown)
        if few:
            return mask
        known = run.indexes[_HIDDEN] = (tables, version, mask)
    found: Mask = known[2][at]
    return found
