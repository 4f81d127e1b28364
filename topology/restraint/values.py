"""A table of records by 64-bit hash, in memory and as it is written: a step costs what it changes, however many records
there are.

In memory records stand in one array, in no order, and are found by open addressing; what is removed leaves a place that
is used again. The field `expires`, if there is one, has a lower bound for each piece of the array, so that what has
expired is found without looking at the rest. On disk the table is a log: each step writes the records that it changed
and the hashes that it removed, in numbered pieces. When the log is much longer than the table, each write also takes up
the oldest pieces, twice as much as it writes itself, and writes again what of them is still in force.

Invariant: the table is what its log says, read in the order of its numbers, after every `written`. A removal is in
force against earlier pieces only, and the oldest piece goes first: when its turn comes there is none that it speaks of.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import I64, U64, Mask

Table = npt.NDArray[Any]
_EMPTY, _GONE = -1, -2
_MIX = np.uint64(0x9E3779B97F4A7C15)
_PIECE = 1_024  # records that share a bound of when they expire, in a large table
_LATEST = np.iinfo(np.int64).max
ROOM_LEAST = 16
WRITTEN_MOST = 256  # records in one piece of the log
PIECE_COST = 8  # a piece of the log counts as so many records beside those in it, so that there are not too many
LOG_TIMES = 4  # a log may count so many times the records that there are: what is in force is rewritten the more seldom
SLACK = 8_192  # and so many more


class Values:
    def __init__(self, record: np.dtype[Any], expires: str | None = None) -> None:
        self._record, self._expires = record, expires
        self._touched: list[U64] = []  # since it was last written
        self._log: deque[tuple[int, U64, int]] = deque()  # (number, hashes of its records, what it counts)
        self._logged = self._next = self._debt = 0
        self._arrange(np.empty(0, record), np.empty(0, np.int64), 0)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Of the records, with room for more, and of what finds them."""
        arrays = (self.rows, self._alive, self._numbers, self._free, self._slots)
        return sum(array.nbytes for array in arrays) + 8 * (self._logged - PIECE_COST * len(self._log))

    @property
    def changed(self) -> bool:
        """Whether there is something to write."""
        return bool(self._touched)

    def all(self) -> Table:
        """Everything, sorted by hash. Costs what there is."""
        return by_hash(self.rows[: self._end][self._alive[: self._end]])

    # -- what is found and changed: by place in `rows`, which holds until the next `insert` or `remove`

    def find(self, hashes: U64) -> I64:
        """Where the record of each hash stands, or -1."""
        if not self._count:
            return np.full(len(hashes), -1, np.int64)
        slot = self._home(hashes)
        found = self._slots[slot].astype(np.int64)
        more = np.flatnonzero((self._hashes[found] != hashes) & (found != _EMPTY) | (found == _GONE))
        while more.size:  # what is left after a step is not decided: another's place, or one that was left
            slot[more] = (slot[more] + 1) & self._mask
            at = found[more] = self._slots[slot[more]]
            more = more[(self._hashes[at] != hashes[more]) & (at != _EMPTY) | (at == _GONE)]
        return found

    def insert(self, records: Table) -> None:
        """Add records of hashes that are not there, each once."""
        count = len(records)
        if not count:
            return
        if self._used + count > len(self.rows):
            self._arrange(self.rows[: self._end], self._numbers[: self._end], count, self._alive[: self._end])
        reused = min(count, self._free_count)
        at = np.concatenate(
            [
                self._free[self._free_count - reused : self._free_count],
                np.arange(self._end, self._end + count - reused),
            ]
        )
        self._free_count -= reused
        self._end += count - reused
        self._fill(at, records)
        self._numbers[at] = -1
        self._touched.append(records["hash"].copy())

    def remove(self, at: I64) -> None:
        """Take out the records at these places, each named once."""
        if not len(at):
            return
        self._touched.append(self._hashes[at])
        self._slots[self._slots_of(at)] = _GONE
        self._alive[at] = False
        self._free[self._free_count : self._free_count + len(at)] = at
        self._free_count += len(at)
        self._count -= len(at)
        if len(self.rows) > ROOM_LEAST and self._count < len(self.rows) // 16:
            self._arrange(self.rows[: self._end], self._numbers[: self._end], 0, self._alive[: self._end])

    def touch(self, at: I64) -> None:
        """The records at these places were changed, and are to be written."""
        if len(at):
            self._touched.append(self._hashes[at])

    def remove_expired(self, bound: int, keep: Callable[[U64], Mask] | None) -> Table:
        """Take out what expired before a bound, but for what is to be kept; gives it, sorted by hash."""
        assert self._expires is not None
        due = np.flatnonzero(self._least < bound)
        if not due.size:
            return np.empty(0, self._record)
        pieces = self.rows[self._expires].reshape(-1, self._piece)
        alive = self._alive.reshape(-1, self._piece)
        piece, place = np.nonzero((pieces[due] < bound) & alive[due])
        at = due[piece] * self._piece + place
        if keep is not None and at.size:
            at = at[~keep(self._hashes[at])]
        found = by_hash(self.rows[at])
        rows = self.rows
        self.remove(at)
        if rows is self.rows:
            self._least[due] = pieces[due].min(axis=1, where=alive[due], initial=_LATEST)
        return found

    # -- how it is written

    def written(self, name: str) -> dict[str, bytes | None]:
        """What changed since the last time, as pieces of the log of this name; None: a piece that is needed no more."""
        if not self._touched:
            return {}
        hashes = np.unique(np.concatenate(self._touched))
        self._touched = []
        at = self.find(hashes)
        live, gone = at[at >= 0], hashes[at < 0]
        found, again = self._taken_up(name, len(hashes))
        if again:
            live = np.unique(np.concatenate([live, *again]))
        for begin in range(0, max(len(live), len(gone)), WRITTEN_MOST):
            part, removed = live[begin : begin + WRITTEN_MOST], gone[begin : begin + WRITTEN_MOST]
            data = len(part).to_bytes(8, "big") + self.rows[part].tobytes() + removed.tobytes()
            found[_piece(name, self._next)] = data
            self._numbers[part] = self._next
            self._note(self._hashes[part], len(removed))
        return found

    def _taken_up(self, name: str, changes: int) -> tuple[dict[str, bytes | None], list[I64]]:
        """The oldest pieces go, where there are too many: which, and what of them is in force."""
        found: dict[str, bytes | None] = {}
        again: list[I64] = []
        self._debt = self._debt + 2 * (changes + PIECE_COST) if self._logged > LOG_TIMES * self._count + SLACK else 0
        while self._log and self._log[0][2] <= self._debt:
            number, hashes, size = self._log.popleft()
            self._debt -= size
            self._logged -= size
            found[_piece(name, number)] = None
            at = self.find(hashes)
            at = at[at >= 0]
            again.append(at[self._numbers[at] == number])
        return found, again

    def _note(self, hashes: U64, removed: int) -> None:
        size = len(hashes) + removed + PIECE_COST
        self._log.append((self._next, hashes, size))
        self._logged += size
        self._next += 1

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Take over a log, by the names of its pieces."""
        numbers, records, hashes = [], [], []
        for piece, data in sorted(pieces.items()):
            stop = 8 + int.from_bytes(data[:8], "big") * self._record.itemsize
            self._next = int(piece)
            records.append(np.frombuffer(data[8:stop], self._record))
            removed = np.frombuffer(data[stop:], np.uint64)
            hashes += [records[-1]["hash"], removed]
            numbers.append((self._next, len(records[-1]), len(removed)))
            self._note(records[-1]["hash"].copy(), len(removed))
        if not numbers:
            return
        # Of each hash the last word counts; behind the place of a removal there is no record.
        places = [np.arange(kept + removed) < kept for _, kept, removed in numbers]
        is_record = np.concatenate(places)
        place = np.where(is_record, np.cumsum(is_record) - 1, -1)
        last = len(place) - 1 - np.unique(np.concatenate(hashes)[::-1], return_index=True)[1]
        at = place[last]
        of = np.repeat([n for n, _, _ in numbers], [kept for _, kept, _ in numbers])
        self._arrange(np.concatenate(records)[at[at >= 0]], of[at[at >= 0]], 0)

    # -- how it is arranged

    def _arrange(self, records: Table, numbers: I64, more: int, alive: Mask | None = None) -> None:
        """Everything anew, with room for a third more at least."""
        if alive is not None:
            records, numbers = records[alive], numbers[alive]
        room = max(ROOM_LEAST, 1 << (4 * (len(records) + more) // 3).bit_length())
        self.rows: Table = np.zeros(room, self._record)
        self._hashes: U64 = self.rows["hash"]
        self._alive = np.zeros(room, np.bool_)
        self._numbers = np.empty(room, np.int64)  # the piece of the log that holds each, or -1
        self._free, self._free_count = np.empty(room, np.int64), 0
        self._slots = np.full(2 * room, _EMPTY, np.int32)
        self._mask, self._shift = 2 * room - 1, np.uint64(64 - (2 * room - 1).bit_length())
        self._count = self._used = 0
        self._end = len(records)
        if self._expires is not None:
            self._piece = min(room, _PIECE)
            self._least = np.full(room // self._piece, _LATEST)
        at = np.arange(len(records))
        self._fill(at, records)
        self._numbers[at] = numbers

    def _fill(self, at: I64, records: Table) -> None:
        self.rows[at] = records
        self._alive[at] = True
        self._count += len(at)
        self._used += len(at)
        if self._expires is not None:
            np.minimum.at(self._least, at // self._piece, records[self._expires])
        slot = self._home(records["hash"])
        while len(at):
            free = self._slots[slot] < 0
            self._slots[slot[free]] = at[free]
            lost = self._slots[slot] != at  # taken before, or by another of these
            at, slot = at[lost], (slot[lost] + 1) & self._mask

    def _slots_of(self, at: I64) -> I64:
        found = self._home(self._hashes[at])
        more = np.flatnonzero(self._slots[found] != at)
        while more.size:
            found[more] = (found[more] + 1) & self._mask
            more = more[self._slots[found[more]] != at[more]]
        return found

    def _home(self, hashes: U64) -> I64:
        return ((hashes * _MIX) >> self._shift).astype(np.int64)


class Bits:
    """How many of some words have each bit, kept as words come and go."""

    def __init__(self) -> None:
        self._counts = np.zeros(64, np.int64)
        self.word = 0  # the bits that any has

    def add(self, words: U64, sign: int = 1) -> None:
        if len(words):
            octets = np.ascontiguousarray(words, "<u8").view(np.uint8).reshape(-1, 8)
            self._counts += sign * np.unpackbits(octets, axis=1, bitorder="little").sum(axis=0, dtype=np.int64)
            self._sum_up()

    def shift(self, bit: int, count: int) -> None:
        """So many words have a bit that had it not, or the other way round."""
        if count:
            self._counts[bit] += count
            self._sum_up()

    def _sum_up(self) -> None:
        self.word = int.from_bytes(np.packbits(self._counts > 0, bitorder="little").tobytes(), "little")


def by_owner(stored: Mapping[str, bytes | None]) -> dict[str, dict[str, bytes]]:
    """Stored pieces by the table they are of: what stands before the stroke in their names."""
    found: dict[str, dict[str, bytes]] = {}
    for name, data in stored.items():
        if data is not None and "/" in name:  # others keep records of another form
            owner, piece = name.split("/")
            found.setdefault(owner, {})[piece] = data
    return found


def _piece(name: str, number: int) -> str:
    return f"{name}/{number:012d}"


def by_hash(table: Table) -> Table:
    """Sorted by hash; rows of one hash stay in order. Sorting whole records takes many times as long."""
    return table[np.argsort(table["hash"], kind="stable")]
