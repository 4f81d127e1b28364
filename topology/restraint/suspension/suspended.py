"""What a producer does not make, and what it owes: the blacklist as a table of values.

Rows stay where they are, in the window states. An *entry* is a sub-tuple that the consumer's partitions have voted
against; while enough of them do, it is active and every pair that shows it is left unmade. A pair is made at the first
moment when both its rows are there and no active entry covers it. When an entry ends, its pairs that were covered at
every moment since their later row came are exactly those never made: `never_free` finds them from the intervals in
which values were suspended, whichever side waited for which and however often (moments are offsets of the input topic).

Invariant: entries and intervals are kept as long as a row they cover may still matter to a consumer; then both ends
forget them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.block import NO_WATERMARK
from schemas.rows import I64, U64, Mask
from topology.plan.shapes import Shape
from topology.state.lookup import among

ENTRY = np.dtype([("hash", "u8"), ("left", "u8"), ("votes", "u8"), ("since", "i8"), ("last", "i8"), ("polled", "u1")])
INTERVAL = np.dtype([("hash", "u8"), ("start", "i8"), ("end", "i8"), ("last", "i8")])
Table = npt.NDArray[Any]
_MOMENT_BITS = 43
_NEVER = -1
NOTHING_KEPT = 2**62


@dataclass
class ShapeTable:
    shape: Shape
    everyone: int  # the votes that make an entry active, unless one partition decides alone
    entries: Table = field(default_factory=lambda: np.empty(0, ENTRY))  # sorted by hash
    intervals: Table = field(default_factory=lambda: np.empty(0, INTERVAL))  # ended ones, sorted by hash and start
    active: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    version: int = 0  # grows with every change of what is active
    keeps_intervals: bool = True  # to know later what is owed; not where nothing ever is
    changed: bool = False  # since it was last written

    def __post_init__(self) -> None:
        self._index()

    def to_bytes(self) -> bytes:
        return len(self.entries).to_bytes(8, "big") + self.entries.tobytes() + self.intervals.tobytes()

    def load_bytes(self, data: bytes) -> None:
        stop = 8 + int.from_bytes(data[:8], "big") * ENTRY.itemsize
        self.entries, self.intervals = (
            np.frombuffer(data[8:stop], ENTRY).copy(),
            np.frombuffer(data[stop:], INTERVAL).copy(),
        )
        self._index()

    def _index(self) -> None:
        self.version += 1
        self.active = np.ascontiguousarray(self.entries["hash"][self.entries["since"] != _NEVER])
        self._hashes, starts = np.unique(self.intervals["hash"], return_inverse=True)
        self._moments = (starts.astype(np.int64) << _MOMENT_BITS) | self.intervals["start"]

    def covers(self, hashes: U64) -> Mask:
        return among(hashes, self.active)

    def vote(self, given: Table, voter: int, now: int, last: int) -> U64:
        """Take a partition's votes; gives the hashes that are active from now on."""
        self.changed = True
        bit = np.uint64(1 << voter)
        known = among(given["hash"], self.entries["hash"])
        at = np.searchsorted(self.entries["hash"], given["hash"][known])
        self.entries["votes"][at] |= bit
        self.entries["last"][at] = np.maximum(self.entries["last"][at], last)
        fresh = given[~known].copy()
        fresh["votes"], fresh["since"], fresh["last"], fresh["polled"] = bit, _NEVER, last, 0
        if len(fresh):
            self.entries = by_hash(np.concatenate([self.entries, fresh]))
        agreed = self.shape.authority | (self.entries["votes"] == self.everyone)
        begins = agreed & (self.entries["since"] == _NEVER)
        self.entries["since"][begins] = now
        self._index()
        begun: U64 = self.entries["hash"][begins].copy()
        return begun

    def poll(self) -> Table:
        """The entries that some but not all want suspended and nobody was asked about; they count as asked from now
        on."""
        if self.shape.authority or not len(self.entries):
            return self.entries[:0]
        open_ = (self.entries["since"] == _NEVER) & (self.entries["polled"] == 0)
        self.entries["polled"][open_] = 1
        self.changed |= bool(open_.any())
        found: Table = self.entries[open_].copy()
        return found

    def retract(self, hashes: U64, voter: int, now: int, last: int) -> Table:
        """Take votes back; gives the entries that were active until now."""
        mine = among(self.entries["hash"], hashes) & (self.entries["votes"] & np.uint64(1 << voter) != 0)
        self.changed |= bool(mine.any())
        self.entries["votes"][mine] &= np.uint64(~(1 << voter) & (2**64 - 1))
        ends = mine & (self.entries["since"] != _NEVER)
        ended: Table = self.entries[ends].copy()
        if len(ended) and self.keeps_intervals:
            closed = np.empty(len(ended), INTERVAL)
            closed["hash"], closed["start"], closed["end"] = ended["hash"], ended["since"], now
            closed["last"] = np.maximum(last, ended["last"])
            self.intervals = by_hash(
                np.concatenate([self.intervals, closed])
            )  # those of one value stay in order: the new one is the last
        self.entries["since"][ends] = _NEVER
        self.entries = self.entries[self.entries["votes"] != 0]
        self._index()
        return ended

    def waits(self, hashes: U64, ends: I64) -> None:
        """Rows that show these values came and wait, valid until `ends`."""
        self.changed |= len(hashes) > 0
        at = np.searchsorted(self.entries["hash"], hashes)
        np.maximum.at(self.entries["last"], at, ends)

    def forget(self, horizon: int, unseen: int, keep: Mask) -> Table:
        """Drop the intervals that no row can matter to any more, and the entries of which none came since `unseen`;
        gives these."""
        gone = (self.entries["last"] < unseen) & ~keep
        found: Table = self.entries[gone]
        old = self.intervals["last"] < horizon
        if gone.any() or old.any():
            self.entries, self.intervals = self.entries[~gone], self.intervals[~old]
            self.changed = True
            self._index()
        return found

    def free_at(self, hashes: U64, moment: I64) -> I64:
        """For each value, the end of the ended interval that holds this moment, or the moment itself."""
        if not len(self._hashes):
            return moment
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        key = (at.astype(np.int64) << _MOMENT_BITS) | moment
        place = np.searchsorted(self._moments, key, "right") - 1
        inside = (self._hashes[at] == hashes) & (place >= 0) & (self._moments[place] >> _MOMENT_BITS == at)
        ends = self.intervals["end"][place]
        return np.where(inside & (moment < ends), ends, moment)


@dataclass
class Suspended:
    """All shapes of one producer partition, and how far its consumer's partitions are."""

    tables: tuple[ShapeTable, ...]
    reached: dict[int, int]  # consumer partition -> the watermark of its other side, as last told; owned by the memo

    @staticmethod
    def of(shapes: Sequence[Shape], partitions: int, reached: dict[int, int]) -> "Suspended":
        return Suspended(tuple(ShapeTable(shape, (1 << partitions) - 1) for shape in shapes), reached)

    @property
    def is_empty(self) -> bool:
        return not any(len(t.entries) for t in self.tables)

    @property
    def kept_from(self) -> int:
        """Rows that end before this no consumer wants any more; `NOTHING_KEPT` while nothing is suspended."""
        votes = 0
        for table in self.tables:
            if len(table.entries):
                votes |= int(np.bitwise_or.reduce(table.entries["votes"]))
        if not votes:
            return NOTHING_KEPT
        return min(self.reached.get(p, NO_WATERMARK) for p in range(votes.bit_length()) if votes >> p & 1)

    @property
    def used(self) -> list[ShapeTable]:
        """The tables that cover anything, or did of late."""
        return [table for table in self.tables if len(table.entries) or len(table.intervals)]


def changed_bytes(prefix: str, tables: Sequence[ShapeTable]) -> dict[str, bytes | None]:
    """Those that changed since they were last written, to be written now: by a prefix and their number."""
    found: dict[str, bytes | None] = {}
    for number, table in enumerate(tables):
        if table.changed:
            found[f"{prefix}{number}"] = table.to_bytes()
            table.changed = False
    return found


def by_hash(table: Table) -> Table:
    """Sorted by hash; rows of one hash stay in order. Sorting whole records takes many times as long."""
    return table[np.argsort(table["hash"], kind="stable")]


def entries_of(hashes: U64, left: U64 | None = None) -> Table:
    entries = np.zeros(len(hashes), ENTRY)
    entries["hash"] = hashes
    if left is not None:
        entries["left"] = left
    return entries


def bits_of(word: int) -> list[int]:
    return [p for p in range(word.bit_length()) if word >> p & 1]
