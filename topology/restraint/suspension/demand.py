"""What a consumer has told its producer not to make: the MNS buffer, and the resumes that are under way.

Per shape, an entry says which producer partitions are told (`told`) and which of them still wait for the message
(`unsent`), why (`why`: no partner here, or our own consumer does not want it), and under which ticket it is being asked
for again (`open`). A ticket is open from the resume until every producer partition has answered `resume-done`; while it
is, the node holds its clock where it stood, so that the partners wait for the rows that are on their way.

Invariant: as long as a producer partition may leave rows unmade for a value, the value stands here; so a partner that
arrives always asks for them. A value is never suspended again while a resume of it is open, so answers and releases
cannot be mistaken for those of a later suspension. An entry has been told to somebody or is open.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.rows import I64, U64, Mask
from topology.plan.shapes import Shape
from topology.restraint.tables import bits_of
from topology.restraint.values import Bits, Values, by_owner

TOLD = np.dtype([("hash", "u8"), ("left", "u8"), ("told", "u8"), ("unsent", "u8"), ("open", "i8"), ("why", "u8")])
NO_PARTNER, NOT_WANTED = 1, 2
Table = npt.NDArray[Any]


class Ticket(msgspec.Struct, array_like=True):
    """A resume under way."""

    id: int
    waiting: int  # producer partitions that have not answered, as bits
    hold: int  # the clock while it is open
    answers: list[tuple[int, int]]  # (consumer partition, its ticket) that wait for this one


class Told:
    """The entries of one shape, and what is counted of them."""

    def __init__(self) -> None:
        self.values, self.told_to = Values(TOLD), Bits()
        self.count_told = self.count_not_wanted = 0
        self.unsent: list[U64] = []  # the hashes of which something may be unsent, and perhaps more
        self.opened: dict[int, list[U64]] = {}  # ticket -> the hashes under it

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def entries(self) -> Table:
        """All, sorted by hash; costs what there is."""
        return self.values.all()

    def get(self, hashes: U64) -> tuple[I64, Table]:
        """The entries of these hashes that are there: their places, and copies."""
        at = self.values.find(hashes)
        at = at[at >= 0]
        return at, self.values.rows[at]

    def put(self, at: I64, entries: Table) -> None:
        """Entries as they are from now on; those that nobody is told of and that are not open go."""
        self.count(self.values.rows[at], -1)
        stays = (entries["told"] != 0) | (entries["open"] != 0)
        self.values.rows[at] = entries
        self.values.touch(at)
        self.count(entries[stays])
        self.values.remove(at[~stays])

    def count(self, entries: Table, sign: int = 1) -> None:
        self.told_to.add(entries["told"], sign)
        self.count_told += sign * int((entries["told"] != 0).sum())
        self.count_not_wanted += sign * int((entries["why"] & NOT_WANTED != 0).sum())

    def take_over(self, pieces: Mapping[str, bytes]) -> None:
        """Take over what was written."""
        self.values.restore(pieces)
        entries = self.values.all()
        self.count(entries)
        self.unsent = [entries["hash"][entries["unsent"] != 0]]
        for ticket in np.unique(entries["open"][entries["open"] != 0]).tolist():
            self.opened[ticket] = [entries["hash"][entries["open"] == ticket]]


class Demand:
    """One node-fed side."""

    def __init__(self, shapes: tuple[Shape, ...], partitions: int, tickets: list[Ticket]) -> None:
        self.shapes, self.partitions = shapes, partitions
        self.tickets = tickets  # owned by the memo
        self.tables = [Told() for _ in shapes]

    @property
    def is_empty(self) -> bool:
        return not any(map(len, self.tables))

    @property
    def passed_on(self) -> float:
        """The share of what is told that our own consumer does not want."""
        told = sum(map(len, self.tables))
        return sum(t.count_not_wanted for t in self.tables) / told if told else 0.0

    @property
    def count_told(self) -> int:
        """How many values some producer partition leaves out."""
        return sum(t.count_told for t in self.tables)

    def told_anyone(self) -> int:
        """Producer partitions that leave something out for us, as bits."""
        told = 0
        for table in self.tables:
            told |= table.told_to.word
        return told

    def say(self, shape: int, entries: Table, why: int, to: npt.NDArray[np.uint64]) -> int:
        """Note a suspension of entries with sorted, distinct hashes at the partitions `to` (bits); gives how many are
        news. `unsent` has them until `take_unsent`."""
        table, hashes = self.tables[shape], entries["hash"]
        at = table.values.find(hashes)
        known = at >= 0
        noted = np.zeros(len(hashes), TOLD)
        noted["hash"], noted["left"] = hashes, entries["left"]
        noted[known] = table.values.rows[at[known]]
        closed = noted["open"] == 0
        news = np.where(closed, to & ~noted["told"], np.uint64(0))
        differs = (news != 0) | (closed & (noted["why"] & why == 0))
        noted["told"] |= news
        noted["unsent"] |= news
        noted["why"] |= np.where(closed, np.uint64(why), np.uint64(0))
        table.put(at[known & differs], noted[known & differs])
        table.count(noted[~known])
        table.values.insert(noted[~known])
        table.unsent.append(hashes[news != 0])
        return int((news != 0).sum())

    def take_unsent(self) -> list[tuple[int, list[tuple[int, Table]]]]:
        """(producer partition, its news shape by shape), which count as sent from now on."""
        found, everyone = [], 0
        for i, table in enumerate(self.tables):
            if table.unsent:
                at, entries = table.get(np.unique(np.concatenate(table.unsent)))
                table.unsent = []
                at, entries = at[entries["unsent"] != 0], entries[entries["unsent"] != 0]
                if len(at):
                    table.values.rows["unsent"][at] = 0
                    table.values.touch(at)
                    everyone |= int(np.bitwise_or.reduce(entries["unsent"]))
                    found.append((i, entries))
        news = []
        for p in bits_of(everyone):
            mine = [(i, entries[entries["unsent"] & np.uint64(1 << p) != 0]) for i, entries in found]
            news.append((p, [(i, entries) for i, entries in mine if len(entries)]))
        return news

    def stop(self, shape: int, hashes: U64, why: int, ticket: int) -> Table:
        """A reason is gone for these sorted, distinct hashes. Gives the entries without any left that some partition
        was told of: these are open under `ticket` from now on."""
        table = self.tables[shape]
        at, entries = table.get(hashes)
        hit = (entries["open"] == 0) & (entries["why"] & why != 0)
        at, entries = at[hit], entries[hit]
        if not len(at):
            return np.empty(0, TOLD)
        entries["why"] &= ~np.uint64(why)
        ends = entries["why"] == 0
        entries["told"][ends] &= ~entries["unsent"][ends]  # who does not know yet need not hear of it
        entries["unsent"][ends] = 0
        asked = ends & (entries["told"] != 0)
        ended: Table = entries[asked]
        entries["open"][asked] = ticket
        entries["told"][ends] = 0
        table.put(at, entries)
        if len(ended):
            table.opened.setdefault(ticket, []).append(ended["hash"])
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
        for table in self.tables:
            for hashes in table.opened.pop(ticket, ()):
                at, entries = table.get(hashes)
                entries["open"] = 0
                table.put(at, entries)  # nobody is told of what is open, so they go
        return found

    def released(self, shape: int, hashes: U64, partition: int) -> None:
        """A producer partition has nothing left for these sorted, distinct hashes and has forgotten them."""
        table = self.tables[shape]
        at, entries = table.get(hashes)
        hit = entries["open"] == 0
        at, entries = at[hit], entries[hit]
        entries["told"] &= np.uint64(~(1 << partition) & (2**64 - 1)) | entries["unsent"]
        table.put(at, entries)

    def hashes(self, shape: int) -> U64:
        """All of a shape, in order; costs what there is."""
        found: U64 = self.tables[shape].entries["hash"]
        return found

    def open_for(self, shape: int, hashes: U64) -> set[int]:
        """The tickets under which some of these hashes are being asked for."""
        found = self.tables[shape].get(hashes)[1]["open"]
        return set(found[found != 0].tolist())

    def is_open(self, shape: int, hashes: U64) -> Mask:
        return self._has("open", shape, hashes)

    def is_told(self, shape: int, hashes: U64) -> Mask:
        """Whether any producer partition still leaves these out."""
        return self._has("told", shape, hashes)

    def _has(self, field: str, shape: int, hashes: U64) -> Mask:
        values = self.tables[shape].values
        at = values.find(hashes)
        return np.asarray((at >= 0) & (values.rows[field][at] != 0), np.bool_)

    # -- how it is written

    @property
    def changed(self) -> bool:
        return any(table.values.changed for table in self.tables)

    def written(self, name: str) -> dict[str, bytes | None]:
        """What changed since the last time, to be written now."""
        found: dict[str, bytes | None] = {}
        for i, table in enumerate(self.tables):
            found |= table.values.written(f"{name}.{i}")
        return found

    def restore(self, name: str, stored: Mapping[str, bytes | None]) -> None:
        """Take over what was written under this name."""
        owners = by_owner(stored)
        for i, table in enumerate(self.tables):
            table.take_over(owners.get(f"{name}.{i}", {}))
