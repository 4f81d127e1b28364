"""When values were suspended and are no more: ended intervals [start, end) by hash, until no row can matter to them.

They stand in a few sorted runs, each several times as long as the next, so that adding some costs what they are and now
and then a merge. They are written as they come, one piece a step; a piece goes when all in it are dropped. What is
dropped follows from a mark: the latest horizon, and which pieces were there when it was reached.

Invariant: the intervals of one value do not meet. One is there as long as its `last` is not before a horizon reached
after it came; a horizon that is not later than one before drops nothing.
"""

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import I64, U64
from topology.restraint.values import by_hash

INTERVAL = np.dtype([("hash", "u8"), ("start", "i8"), ("end", "i8"), ("last", "i8")])
Table = npt.NDArray[Any]
_MOMENT_BITS = 43
_MARK = "mark"
_SOONEST, _LATEST = -(2**63), 2**63 - 1
TIMES_LONGER = 4  # a run that is at most so much longer than what comes is merged with it


class Intervals:
    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._fresh: list[Table] = []  # not yet written
        self._pieces: list[tuple[int, int]] = []  # (the latest `last` in it, its number): a heap
        self._next = 0
        self._mark, self._marked = (_SOONEST, 0), False  # (horizon, the next number then); whether it is to be written
        self._over: list[int] = []  # pieces to be deleted

    def __len__(self) -> int:
        return sum(len(run.table) for run in self._runs)

    @property
    def nbytes(self) -> int:
        return len(self) * INTERVAL.itemsize

    @property
    def changed(self) -> bool:
        return bool(self._fresh or self._over or self._marked)

    def all(self) -> Table:
        """Everything, sorted by hash and start."""
        whole = np.concatenate([np.empty(0, INTERVAL), *(run.table for run in self._runs)])
        return whole[np.lexsort((whole["start"], whole["hash"]))]

    def add(self, ended: Table) -> None:
        """Intervals that just ended, sorted by hash; each is the last of its value."""
        self._fresh.append(ended)
        while self._runs and len(self._runs[-1].table) <= TIMES_LONGER * len(ended):
            ended = by_hash(np.concatenate([self._runs.pop().table, ended]))  # those of one value stay in order
        self._runs.append(_Run(ended))

    def drop(self, horizon: int) -> None:
        """Forget those that no row can matter to from here on."""
        if horizon <= self._mark[0] or not any(run.soonest < horizon for run in self._runs):
            return
        runs = [_Run(run.table[run.table["last"] >= horizon]) if run.soonest < horizon else run for run in self._runs]
        self._runs = [run for run in runs if len(run.table)]
        self._fresh = [table[table["last"] >= horizon] for table in self._fresh]
        self._mark, self._marked = (horizon, self._next), True
        while self._pieces and self._pieces[0][0] < horizon:
            self._over.append(heapq.heappop(self._pieces)[1])

    def free_at(self, hashes: U64, moment: I64) -> I64:
        """For each value, the end of the interval that holds this moment, or the moment itself."""
        found = moment
        for run in self._runs:  # at most one of them holds it
            found = np.maximum(found, run.free_at(hashes, moment))
        return found

    def written(self, name: str) -> dict[str, bytes | None]:
        """What changed since the last time, as pieces of this name; None: one that is needed no more."""
        found: dict[str, bytes | None] = {f"{name}/{number:012d}": None for number in self._over}
        fresh = np.concatenate([np.empty(0, INTERVAL), *self._fresh])
        if len(fresh):
            found[f"{name}/{self._next:012d}"] = fresh.tobytes()
            heapq.heappush(self._pieces, (int(fresh["last"].max()), self._next))
            self._next += 1
        if self._marked:
            found[f"{name}/{_MARK}"] = np.array(self._mark, "<i8").tobytes()
        self._fresh, self._over, self._marked = [], [], False
        return found

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Take over what was written, by the names of the pieces."""
        if _MARK in pieces:
            horizon, before = np.frombuffer(pieces[_MARK], "<i8").tolist()
            self._mark, self._next = (horizon, before), before
        tables = []
        for piece, data in sorted(pieces.items()):
            if piece != _MARK:
                table, number = np.frombuffer(data, INTERVAL), int(piece)
                heapq.heappush(self._pieces, (int(table["last"].max()), number))
                tables.append(table[table["last"] >= self._mark[0]] if number < self._mark[1] else table)
                self._next = max(self._next, number + 1)
        whole = by_hash(np.concatenate([np.empty(0, INTERVAL), *tables]))
        self._runs = [_Run(whole)] if len(whole) else []


class _Run:
    """Intervals sorted by hash and start, and what finds one: the number of its hash, then its start."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.soonest = int(table["last"].min()) if len(table) else _LATEST
        differs = np.ones(len(table), np.bool_)
        differs[1:] = table["hash"][1:] != table["hash"][:-1]
        self._hashes = table["hash"][differs]
        self._moments = ((np.cumsum(differs) - 1) << _MOMENT_BITS) | table["start"]
        self._ends = np.ascontiguousarray(table["end"])

    def free_at(self, hashes: U64, moment: I64) -> I64:
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        place = np.searchsorted(self._moments, (at << _MOMENT_BITS) | moment, "right") - 1
        inside = (self._hashes[at] == hashes) & (place >= 0) & (self._moments[place] >> _MOMENT_BITS == at)
        ends = self._ends[place]
        return np.where(inside & (moment < ends), ends, moment)
