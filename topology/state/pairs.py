"""Pairs that were found and are not built: rows of a probe beside rows of stored runs.

Whether a pair may be made is mostly seen by a few columns of its rows, and most pairs of a sparse stream may not. So it
is asked before anything is copied.

Invariant: the k-th pair has the same place in everything that is asked of it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from schemas.rows import I64, U64, Mask
from topology.state.hashing import combine
from topology.state.lookup import shown_by
from topology.state.meeting import ARRIVED
from topology.state.window_state import Run

Piece = tuple[I64, Run, I64]  # rows of the probe, a stored run, rows of that


class Pairs:
    def __init__(self, probe: Run, pieces: Sequence[Piece], now: int | None) -> None:
        """`now`: the moment at which the probe has come; None if its rows are stored, too."""
        self.probe, self.pieces, self.now = probe, pieces, now
        self.i: I64 = pieces[0][0] if len(pieces) == 1 else np.concatenate([i for i, _, _ in pieces])

    def __len__(self) -> int:
        return len(self.i)

    @cached_property
    def starts(self) -> I64:
        found: I64 = np.maximum(self.probe.starts[self.i], joined([run.starts[j] for _, run, j in self.pieces]))
        return found

    @cached_property
    def ends(self) -> I64:
        found: I64 = np.minimum(self.probe.ends[self.i], joined([run.ends[j] for _, run, j in self.pieces]))
        return found

    @cached_property
    def came(self) -> I64:
        """The moment when the later row of each came."""
        if self.now is not None:
            return np.full(len(self), self.now, np.int64)
        theirs = joined([run.rows.ints(ARRIVED)[j] for _, run, j in self.pieces])
        found: I64 = np.maximum(self.probe.rows.ints(ARRIVED)[self.i], theirs)
        return found

    def shown(self, names: tuple[str, ...]) -> U64:
        """The hash of some columns, which one row of each shows, or both together."""
        mine = [name in self.probe.rows.columns for name in names]
        if all(mine):
            hashes: U64 = shown_by(self.probe, names)[self.i]
            return hashes
        if any(mine):
            return combine([self.shown((name,)) for name in names])
        stored: U64 = joined([shown_by(run, names)[j] for _, run, j in self.pieces])
        return stored

    def kept(self, keep: Mask) -> list[Piece]:
        """The pieces without the pairs that are not kept."""
        found, begin = [], 0
        for i, run, j in self.pieces:
            mine = keep[begin : begin + len(i)]
            begin += len(i)
            if mine.all():
                found.append((i, run, j))
            elif mine.any():
                found.append((i[mine], run, j[mine]))
        return found


def joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
