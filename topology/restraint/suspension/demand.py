"""What a consumer has told its producer not to make: the MNS buffer, and the resumes that are under way.

Per shape, an entry says which producer partitions are told (`told`) and which of them still wait for the message
(`unsent`), why (`why`: no partner here, or our own consumer does not want it), and under which ticket it is being asked
for again (`open`). A ticket is open from the resume until every producer partition has answered `resume-done`; while it
is, the node holds its clock where it stood, so that the partners wait for the rows that are on their way.

Invariant: as long as a producer partition may leave rows unmade for a value, the value stands here; so a partner that
arrives always asks for them. A value is never suspended again while a resume of it is open, so answers and releases
cannot be mistaken for those of a later suspension.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.rows import U64, Mask
from topology.plan.shapes import Shape
from topology.restraint.suspension.suspended import bits_of, by_hash
from topology.state.lookup import among

TOLD = np.dtype([("hash", "u8"), ("left", "u8"), ("told", "u8"), ("unsent", "u8"), ("why", "u1"), ("open", "i8")])
NO_PARTNER, NOT_WANTED = 1, 2
Table = npt.NDArray[Any]


class Ticket(msgspec.Struct, array_like=True):
    """A resume under way."""

    id: int
    waiting: int  # producer partitions that have not answered, as bits
    hold: int  # the clock while it is open
    answers: list[tuple[int, int]]  # (consumer partition, its ticket) that wait for this one


@dataclass
class Demand:
    """One node-fed side."""

    shapes: tuple[Shape, ...]
    partitions: int
    tickets: list[Ticket]  # owned by the memo
    tables: list[Table] = field(default_factory=list)
    changed: bool = False  # since they were last written

    def __post_init__(self) -> None:
        self.tables = self.tables or [np.empty(0, TOLD) for _ in self.shapes]

    @property
    def is_empty(self) -> bool:
        return not any(len(t) for t in self.tables)

    @property
    def passed_on(self) -> float:
        """The share of what is told that our own consumer does not want."""
        told = sum(map(len, self.tables))
        return sum(int((t["why"] & NOT_WANTED != 0).sum()) for t in self.tables) / told if told else 0.0

    def told_anyone(self) -> int:
        """Producer partitions that leave something out for us, as bits."""
        told = 0
        for table in self.tables:
            told |= int(np.bitwise_or.reduce(table["told"])) if len(table) else 0
        return told

    def say(self, shape: int, entries: Table, why: int, to: npt.NDArray[np.uint64]) -> int:
        """Note a suspension of entries with sorted, distinct hashes at the partitions `to` (bits); gives how many are
        news. `unsent` has them until `take_unsent`."""
        table, hashes = self.tables[shape], entries["hash"]
        known = among(hashes, table["hash"])
        fresh = np.zeros(int((~known).sum()), TOLD)
        fresh["hash"], fresh["left"] = hashes[~known], entries["left"][~known]
        table = by_hash(np.concatenate([table, fresh])) if len(fresh) else table
        at = np.searchsorted(table["hash"], hashes)
        closed = table["open"][at] == 0
        news = np.where(closed, to & ~table["told"][at], np.uint64(0))
        self.changed |= bool(len(fresh) or news.any() or (closed & (table["why"][at] & why == 0)).any())
        table["told"][at] |= news
        table["unsent"][at] |= news
        table["why"][at] |= np.where(closed, np.uint8(why), np.uint8(0))
        self.tables[shape] = table
        return int((news != 0).sum())

    def take_unsent(self) -> Iterator[tuple[int, list[tuple[int, Table]]]]:
        """(producer partition, its news shape by shape), which count as sent from now on."""
        everyone = 0
        for table in self.tables:
            everyone |= int(np.bitwise_or.reduce(table["unsent"])) if len(table) else 0
        for p in bits_of(everyone):
            found = [(i, t[t["unsent"] & np.uint64(1 << p) != 0]) for i, t in enumerate(self.tables)]
            yield p, [(i, entries) for i, entries in found if len(entries)]
        for table in self.tables if everyone else ():
            table["unsent"] = 0
            self.changed = True

    def stop(self, shape: int, hashes: U64, why: int, ticket: int) -> Table:
        """A reason is gone for these sorted hashes. Gives the entries without any left that some partition was told of:
        these are open under `ticket` from now on."""
        table = self.tables[shape]
        hit = among(table["hash"], hashes) & (table["open"] == 0) & (table["why"] & why != 0)
        self.changed |= bool(hit.any())
        table["why"][hit] &= np.uint8(~why & 0xFF)
        ends = hit & (table["why"] == 0)
        table["told"][ends] &= ~table["unsent"][ends]  # who does not know yet need not hear of it
        table["unsent"][ends] = 0
        ended: Table = table[ends & (table["told"] != 0)].copy()
        table["open"][ends & (table["told"] != 0)] = ticket
        table["told"][ends] = 0
        self.tables[shape] = table[~ends | (table["open"] != 0)]
        return ended

    def answered(self, ticket: int, partition: int) -> Ticket | None:
        """A producer partition has sent all it owed; gives the ticket once all have."""
        found = next((t for t in self.tickets if t.id == ticket), None)
        if found is None:
            return None
        found.waiting &= ~(1 << partition)
        if found.waiting:
            return None
        self.tickets.remove(found)
        self.changed = True
        self.tables = [t[t["open"] != ticket] for t in self.tables]
        return found

    def released(self, shape: int, hashes: U64, partition: int) -> None:
        """A producer partition has nothing left for these sorted hashes and has forgotten them."""
        table = self.tables[shape]
        hit = among(table["hash"], hashes) & (table["open"] == 0)
        self.changed |= bool(hit.any())
        table["told"][hit] &= np.uint64(~(1 << partition) & (2**64 - 1)) | table["unsent"][hit]
        self.tables[shape] = table[(table["told"] != 0) | (table["open"] != 0)]

    def open_for(self, shape: int, hashes: U64) -> set[int]:
        """The tickets under which some of these sorted hashes are being asked for."""
        table = self.tables[shape]
        found = table["open"][among(table["hash"], hashes)]
        return set(found[found != 0].tolist())

    def is_open(self, shape: int, hashes: U64) -> Mask:
        table = self.tables[shape]
        return among(hashes, table["hash"][table["open"] != 0])

    def is_told(self, shape: int, hashes: U64) -> Mask:
        """Whether any producer partition still leaves these out."""
        table = self.tables[shape]
        return among(hashes, table["hash"][table["told"] != 0])
