"""Values that are not wanted, and when they were not: the blacklist as a table, one a shape.

Rows stay where they are, in the window states. An *entry* is a sub-tuple that the consumer's partitions have voted
against; while enough of them do, it is active and every pair that shows it is left unmade. A pair is made at the first
moment when both its rows are there and no active entry covers it. When an entry ends, its pairs that were covered at
every moment since their later row came are exactly those never made: they follow from the intervals in which values
were suspended (`free_at`), whichever side waited for which and however often (moments are offsets of the input topic).

Invariant: entries and intervals are kept as long as a row they cover may still matter to a consumer; then both ends
forget them. What an operation costs follows from the values it is about, not from how many there are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import I64, U64, Mask
from topology.plan.shapes import Shape
from topology.restraint.intervals import INTERVAL, Intervals
from topology.restraint.values import Bits, Values, by_hash, by_owner

ENTRY = np.dtype([("hash", "u8"), ("left", "u8"), ("votes", "u8"), ("since", "i8"), ("last", "i8"), ("polled", "u8")])
Table = npt.NDArray[Any]
_NEVER = -1


class ShapeTable:
    def __init__(self, shape: Shape, everyone: int, keeps_intervals: bool = True) -> None:
        self.shape = shape
        self.everyone = everyone  # the votes that make an entry active, unless one partition decides alone
        self.keeps_intervals = keeps_intervals  # to know later what is owed; not where nothing ever is
        self.version = 0  # grows with every change of what is active
        self.count_active = 0
        self._values, self._intervals = Values(ENTRY, expires="last"), Intervals()
        self._voters = Bits()
        self._unpolled: list[U64] = []  # what `poll` may find, and perhaps more

    # -- how much there is, and all of it

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_used(self) -> bool:
        """Whether it covers anything, or did of late."""
        return bool(len(self._values) or len(self._intervals))

    @property
    def voters(self) -> int:
        """The partitions that want anything suspended, as bits."""
        return self._voters.word

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._intervals.nbytes

    @property
    def entries(self) -> Table:
        """All, sorted by hash; costs what there is, as the next two do."""
        return self._values.all()

    @property
    def active(self) -> U64:
        entries = self.entries
        found: U64 = entries["hash"][entries["since"] != _NEVER]
        return found

    @property
    def intervals(self) -> Table:
        """Those that ended, sorted by hash and start."""
        return self._intervals.all()

    # -- what a step asks and does

    def covers(self, hashes: U64) -> Mask:
        if not self.count_active:
            return np.zeros(len(hashes), np.bool_)
        at = self._values.find(hashes)
        return np.asarray((at >= 0) & (self._values.rows["since"][at] != _NEVER), np.bool_)

    def vote(self, given: Table, voter: int, now: int, last: int) -> U64:
        """Take a partition's votes for entries of distinct hashes, in order; gives the hashes that are active from now
        on."""
        bit = np.uint64(1 << voter)
        at = self._values.find(given["hash"])
        is_known = at >= 0
        known, rows = at[is_known], self._values.rows
        votes = rows["votes"][known]
        self._voters.shift(voter, len(given) - int((votes & bit != 0).sum()))
        votes |= bit
        rows["votes"][known] = votes
        rows["last"][known] = np.maximum(rows["last"][known], last)
        begins = np.full(len(given), self.shape.authority or int(bit) == self.everyone)
        begins[is_known] = (self.shape.authority | (votes == self.everyone)) & (rows["since"][known] == _NEVER)
        rows["since"][at[is_known & begins]] = now
        self._values.touch(known)
        fresh = given[~is_known].copy()
        fresh["votes"], fresh["last"], fresh["polled"] = bit, last, 0
        fresh["since"] = np.where(begins[~is_known], now, _NEVER)
        self._values.insert(fresh)
        if not self.shape.authority:
            self._unpolled.append(fresh["hash"][~begins[~is_known]])
        begun: U64 = given["hash"][begins]
        self._activated(len(begun))
        return begun

    def poll(self) -> Table:
        """The entries that some but not all want suspended and nobody was asked about; they count as asked from now
        on."""
        if self.shape.authority or not self._unpolled:
            return np.empty(0, ENTRY)
        at = self._values.find(np.unique(np.concatenate(self._unpolled)))
        self._unpolled, rows = [], self._values.rows
        at = at[at >= 0]
        at = at[(rows["since"][at] == _NEVER) & (rows["polled"][at] == 0)]
        rows["polled"][at] = 1
        self._values.touch(at)
        found: Table = rows[at]
        return found

    def retract(self, hashes: U64, voter: int, now: int, last: int) -> Table:
        """Take votes for distinct hashes back; gives the entries that were active until now."""
        bit = np.uint64(1 << voter)
        at, rows = self._values.find(hashes), self._values.rows
        at = at[at >= 0]
        at = at[rows["votes"][at] & bit != 0]
        rows["votes"][at] &= ~bit
        self._voters.shift(voter, -len(at))
        ends = at[rows["since"][at] != _NEVER]
        ended = by_hash(rows[ends])
        if len(ended) and self.keeps_intervals:
            closed = np.empty(len(ended), INTERVAL)
            closed["hash"], closed["start"], closed["end"] = ended["hash"], ended["since"], now
            closed["last"] = np.maximum(last, ended["last"])
            self._intervals.add(closed)
        rows["since"][ends] = _NEVER
        if not self.shape.authority:
            self._unpolled.append(ended["hash"])
        self._values.touch(at)
        self._values.remove(at[rows["votes"][at] == 0])
        self._activated(-len(ended))
        return ended

    def waits(self, hashes: U64, ends: I64) -> None:
        """Rows that show these values came and wait, valid until `ends`."""
        at, lasts = self._values.find(hashes), self._values.rows["last"]
        later = ends > lasts[at]
        np.maximum.at(lasts, at[later], ends[later])
        self._values.touch(at[later])

    def forget(self, horizon: int, unseen: int, keep: Callable[[U64], Mask] | None = None) -> Table:
        """Drop the intervals that no row can matter to any more, and the entries of which none came since `unseen`, but
        for those to be kept; gives these."""
        found = self._values.remove_expired(unseen, keep)
        self._voters.add(found["votes"], -1)
        self._activated(-int((found["since"] != _NEVER).sum()))
        self._intervals.drop(horizon)
        return found

    def free_at(self, hashes: U64, moment: I64) -> I64:
        """For each value, the end of the ended interval that holds this moment, or the moment itself."""
        return self._intervals.free_at(hashes, moment)

    def _activated(self, count: int) -> None:
        self.count_active += count
        self.version += count != 0

    # -- how it is written

    @property
    def changed(self) -> bool:
        return self._values.changed or self._intervals.changed

    def written(self, name: str) -> dict[str, bytes | None]:
        """What changed since the last time, to be written now."""
        return self._values.written(name) | self._intervals.written(f"{name}i")

    def restore(self, name: str, stored: Mapping[str, Mapping[str, bytes]]) -> None:
        """Take over what was written under this name."""
        self._values.restore(stored.get(name, {}))
        self._intervals.restore(stored.get(f"{name}i", {}))
        entries = self._values.all()
        self._voters.add(entries["votes"])
        self._activated(int((entries["since"] != _NEVER).sum()))
        if not self.shape.authority:
            self._unpolled = [entries["hash"][entries["since"] == _NEVER]]


def entries_of(hashes: U64, left: U64 | None = None) -> Table:
    """Values to be voted for."""
    entries = np.zeros(len(hashes), ENTRY)
    entries["hash"] = hashes
    if left is not None:
        entries["left"] = left
    return entries


def written_tables(prefix: str, tables: Sequence[ShapeTable]) -> dict[str, bytes | None]:
    """What changed in each since it was last written, to be written now: by a prefix and their number."""
    found: dict[str, bytes | None] = {}
    for number, table in enumerate(tables):
        if table.changed:
            found |= table.written(f"{prefix}{number}")
    return found


def restore_tables(prefix: str, tables: Sequence[ShapeTable], stored: Mapping[str, bytes | None]) -> None:
    """Take over what `written_tables` gave."""
    owners = by_owner(stored)
    for number, table in enumerate(tables):
        table.restore(f"{prefix}{number}", owners)


def bits_of(word: int) -> list[int]:
    return [p for p in range(word.bit_length()) if word >> p & 1]
