"""The tables of feedback say what plain dictionaries say, operation by operation, and after any restart from what was
written; and what a step writes does not grow with the table.

Operations are drawn. A failing seed prints itself.
"""

from random import Random
from typing import Any

import numpy as np
import pytest

from topology.plan.shapes import Shape
from topology.query.expression import Column
from topology.restraint import values
from topology.restraint.intervals import INTERVAL
from topology.restraint.suspension.demand import NO_PARTNER, NOT_WANTED, TOLD, Demand, Ticket
from topology.restraint.tables import ENTRY, ShapeTable, entries_of, restore_tables, written_tables
from topology.restraint.values import Values

SEEDS, OPERATIONS, PARTITIONS = 60, 250, 3
NEVER = -1
SAME_PLACE = pow(0x9E3779B97F4A7C15, -1, 2**64)  # multiples of it are looked for from one place on
Disk = dict[str, bytes]


@pytest.fixture(
    params=[(4, 2, 0, 0, 1), (8, 3, 20, 8, 2), (1_024, 256, 8_192, 8, 4)], ids=["tiny", "small", "as it is"]
)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("_PIECE", "WRITTEN_MOST", "SLACK", "PIECE_COST", "LOG_TIMES"), request.param, strict=True):
        monkeypatch.setattr(values, name, value)


def write(disk: Disk, pieces: dict[str, bytes | None]) -> None:
    for name, data in pieces.items():
        if data is None:
            del disk[name]  # it was there
        else:
            assert name not in disk or name.endswith("mark")
            disk[name] = data


def pool(rng: Random) -> list[int]:
    """Values to speak of: any, those next to each other, those that get in each other's way."""
    count = rng.choice((3, 12, 60))
    kind = rng.randrange(3)
    return [(rng.getrandbits(64), k, k * SAME_PLACE % 2**64)[kind] for k in range(count)]


def some(rng: Random, hashes: list[int]) -> Any:
    return np.unique(np.array(rng.sample(hashes, rng.randint(0, min(len(hashes), 9))), np.uint64))


def shape(authority: bool) -> Shape:
    return Shape((Column("a", "k"),), (Column("b", "k"),), 1, (True, False), None, authority=authority)


class Suspensions:
    """What a `ShapeTable` says, in dictionaries."""

    def __init__(self, authority: bool) -> None:
        self.authority, self.everyone = authority, (1 << PARTITIONS) - 1
        self.entries: dict[int, list[int]] = {}  # hash -> left, votes, since, last, polled
        self.ended: list[tuple[int, int, int, int]] = []
        self.mark = -(2**63)

    def table(self, hashes: list[int]) -> Any:
        return np.array([(h, *self.entries[h]) for h in sorted(hashes)], ENTRY)

    def active(self) -> list[int]:
        return sorted(h for h, e in self.entries.items() if e[2] != NEVER)

    def vote(self, given: Any, voter: int, now: int, last: int) -> list[int]:
        begun = []
        for h, left in zip(given["hash"].tolist(), given["left"].tolist(), strict=True):
            entry = self.entries.setdefault(h, [left, 0, NEVER, last, 0])
            entry[1], entry[3] = entry[1] | 1 << voter, max(entry[3], last)
            if entry[2] == NEVER and (self.authority or entry[1] == self.everyone):
                entry[2] = now
                begun.append(h)
        return begun

    def retract(self, hashes: list[int], voter: int, now: int, last: int) -> Any:
        ended = []
        for h in hashes:
            entry = self.entries.get(h)
            if entry is not None and entry[1] >> voter & 1:
                entry[1] &= ~(1 << voter)
                if entry[2] != NEVER:
                    ended.append((h, *entry))
                    self.ended.append((h, entry[2], now, max(last, entry[3])))
                    entry[2] = NEVER
                if not entry[1]:
                    del self.entries[h]
        return np.array(ended, ENTRY)

    def poll(self) -> Any:
        found = [h for h, e in self.entries.items() if e[2] == NEVER and not e[4] and not self.authority]
        for h in found:
            self.entries[h][4] = 1
        return self.table(found)

    def forget(self, horizon: int, unseen: int, keep: set[int]) -> Any:
        gone = [h for h, e in self.entries.items() if e[3] < unseen and h not in keep]
        found = self.table(gone)
        for h in gone:
            del self.entries[h]
        if horizon > self.mark and any(i[3] < horizon for i in self.ended):
            self.mark, self.ended = horizon, [i for i in self.ended if i[3] >= horizon]
        return found

    def free_at(self, h: int, moment: int) -> int:
        return next((end for x, start, end, _ in self.ended if x == h and start <= moment < end), moment)


def same(found: Any, wanted: Any) -> None:
    assert found.dtype == wanted.dtype
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_suspended_values_are_those_of_a_dictionary(seed: int) -> None:
    rng = Random(seed)
    authority, hashes, disk, restarts = rng.random() < 0.4, pool(rng), Disk(), rng.choice((0.0, 0.1, 0.6))
    table, model, saves = ShapeTable(shape(authority), (1 << PARTITIONS) - 1), Suspensions(authority), rng.random()
    for now in range(1, OPERATIONS):
        voter, last, drawn = rng.randrange(PARTITIONS), now + rng.randint(-20, 60), some(rng, hashes)
        if authority:  # one partition has the say about each
            drawn = drawn[drawn % np.uint64(PARTITIONS) == voter]
        active, version = model.active(), table.version
        match rng.randrange(6):
            case 0 | 1:
                given = entries_of(drawn, drawn ^ np.uint64(5))
                assert table.vote(given, voter, now, last).tolist() == model.vote(given, voter, now, last)
            case 2:
                same(table.retract(drawn, voter, now, last), model.retract(drawn.tolist(), voter, now, last))
            case 3:
                covered = np.repeat(drawn[table.covers(drawn)], 2)
                ends = np.array([now + rng.randint(-20, 90) for _ in covered], np.int64)
                table.waits(covered, ends)
                for h, end in zip(covered.tolist(), ends.tolist(), strict=True):
                    model.entries[h][3] = max(model.entries[h][3], end)
            case 4:
                same(table.poll(), model.poll())
            case 5:
                horizon, unseen, kept = now - rng.randint(0, 30), now - rng.randint(0, 50), set(drawn.tolist())
                keep = lambda h, kept=kept: np.array([x in kept for x in h.tolist()], np.bool_)  # noqa: E731
                same(table.forget(horizon, unseen, keep), model.forget(horizon, unseen, kept))
        assert (table.version != version) == (model.active() != active)
        check_suspended(table, model, np.array(hashes, np.uint64), now)
        if rng.random() < saves or rng.random() < restarts:
            write(disk, written_tables("s", [table]))
            assert not table.changed
            if rng.random() < restarts:
                table = ShapeTable(table.shape, table.everyone)
                restore_tables("s", [table], disk)
                check_suspended(table, model, np.array(hashes, np.uint64), now)


def check_suspended(table: ShapeTable, model: Suspensions, hashes: Any, now: int) -> None:
    active = model.active()
    assert len(table) == len(model.entries)
    assert table.count_active == len(active)
    assert table.active.tolist() == active
    assert table.covers(hashes).tolist() == [h in active for h in hashes.tolist()]
    assert table.voters == np.bitwise_or.reduce([e[1] for e in model.entries.values()] or [0])
    assert table.is_used == bool(model.entries or model.ended)
    same(table.entries, model.table(list(model.entries)))
    same(table.intervals, np.array(sorted(model.ended), INTERVAL))
    moments = np.arange(len(hashes)) * 7 % (now + 2)
    wanted = [model.free_at(h, m) for h, m in zip(hashes.tolist(), moments.tolist(), strict=True)]
    assert table.free_at(hashes, moments).tolist() == wanted


class Tellings:
    """What a `Demand` of one shape says, in dictionaries."""

    def __init__(self) -> None:
        self.entries: dict[int, list[int]] = {}  # hash -> left, told, unsent, open, why
        self.waiting: dict[int, int] = {}

    def table(self, hashes: list[int]) -> Any:
        return np.array([(h, *self.entries[h]) for h in sorted(hashes)], TOLD)

    def say(self, entries: Any, why: int, to: list[int]) -> int:
        news = 0
        for h, left, bits in zip(entries["hash"].tolist(), entries["left"].tolist(), to, strict=True):
            entry = self.entries.setdefault(h, [left, 0, 0, 0, 0])
            if not entry[3]:
                new = bits & ~entry[1]
                entry[1], entry[2], entry[4] = entry[1] | new, entry[2] | new, entry[4] | why
                news += new != 0
        return news

    def take_unsent(self) -> list[tuple[int, Any]]:
        found = [(p, self.table([h for h, e in self.entries.items() if e[2] >> p & 1])) for p in range(PARTITIONS)]
        for entry in self.entries.values():
            entry[2] = 0
        return [(p, table) for p, table in found if len(table)]

    def stop(self, hashes: list[int], why: int, ticket: int) -> Any:
        ended = []
        for h in hashes:
            entry = self.entries.get(h)
            if entry is None or entry[3] or not entry[4] & why:
                continue
            entry[4] &= ~why
            if not entry[4]:
                entry[1], entry[2] = entry[1] & ~entry[2], 0
                if entry[1]:
                    ended.append((h, *entry))
                    entry[1], entry[3] = 0, ticket
                else:
                    del self.entries[h]
        return np.array(ended, TOLD)

    def answered(self, ticket: int, partition: int) -> bool:
        if ticket not in self.waiting:
            return False
        self.waiting[ticket] &= ~(1 << partition)
        if self.waiting[ticket]:
            return False
        del self.waiting[ticket]
        self.entries = {h: e for h, e in self.entries.items() if e[3] != ticket}
        return True

    def released(self, hashes: list[int], partition: int) -> None:
        for h in hashes:
            entry = self.entries.get(h)
            if entry is not None and not entry[3]:
                entry[1] &= ~(1 << partition) | entry[2]
                if not entry[1]:
                    del self.entries[h]


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_told_is_that_of_a_dictionary(seed: int) -> None:
    rng = Random(seed)
    hashes, disk, restarts, saves = pool(rng), Disk(), rng.choice((0.0, 0.1, 0.6)), rng.random()
    tickets: list[Ticket] = []
    demand, model = Demand((shape(True), shape(False)), PARTITIONS, tickets), Tellings()
    for now in range(1, OPERATIONS):
        drawn, why = some(rng, hashes), rng.choice((NO_PARTNER, NOT_WANTED))
        match rng.randrange(6):
            case 0 | 1:
                to = np.array([rng.randrange(1, 1 << PARTITIONS) for _ in drawn], np.uint64)
                entries = entries_of(drawn, drawn ^ np.uint64(9))
                assert demand.say(1, entries, why, to) == model.say(entries, why, to.tolist())
            case 2:
                for (p, news), (q, wanted) in zip(demand.take_unsent(), model.take_unsent(), strict=True):
                    assert p == q
                    assert [i for i, _ in news] == [1]
                    same(news[0][1], wanted)
            case 3:
                ended = demand.stop(1, drawn, why, now)
                same(ended, model.stop(drawn.tolist(), why, now))
                if len(ended):
                    told = int(np.bitwise_or.reduce(ended["told"]))
                    tickets.append(Ticket(now, told, 0, []))
                    model.waiting[now] = told
            case 4:
                ticket, partition = rng.choice([*model.waiting, 0]), rng.randrange(PARTITIONS)
                assert (demand.answered(ticket, partition) is not None) == model.answered(ticket, partition)
            case 5:
                partition = rng.randrange(PARTITIONS)
                demand.released(1, drawn, partition)
                model.released(drawn.tolist(), partition)
        check_told(demand, model, np.array(hashes, np.uint64))
        if rng.random() < saves or rng.random() < restarts:
            write(disk, demand.written("d1"))
            assert not demand.changed
            if rng.random() < restarts:
                demand = Demand(demand.shapes, PARTITIONS, tickets)
                demand.restore("d1", disk)
                check_told(demand, model, np.array(hashes, np.uint64))


def check_told(demand: Demand, model: Tellings, hashes: Any) -> None:
    entries = model.entries
    same(demand.tables[1].entries, model.table(list(entries)))
    assert demand.hashes(1).tolist() == sorted(entries)
    assert demand.is_empty == (not entries)
    assert demand.told_anyone() == np.bitwise_or.reduce([e[1] for e in entries.values()] or [0])
    assert demand.count_told == sum(e[1] != 0 for e in entries.values())
    wanted = sum(e[4] & NOT_WANTED != 0 for e in entries.values()) / len(entries) if entries else 0
    assert demand.passed_on == pytest.approx(wanted)
    of = [entries.get(h, [0] * 5) for h in hashes.tolist()]
    assert demand.is_open(1, hashes).tolist() == [e[3] != 0 for e in of]
    assert demand.is_told(1, hashes).tolist() == [e[1] != 0 for e in of]
    assert demand.open_for(1, hashes) == {e[3] for e in of} - {0}


@pytest.mark.parametrize("count", [1_000, 100_000])
def test_what_is_written_is_what_changed_and_the_log_stays_short(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "SLACK", 500)
    monkeypatch.setattr(values, "LOG_TIMES", 2)
    rng, table, disk = np.random.default_rng(1), Values(ENTRY, expires="last"), Disk()
    table.insert(entries_of(np.unique(rng.integers(0, 2**63, count).astype(np.uint64))))
    write(disk, table.written("x"))
    hashes, most, total = table.all()["hash"], 0, 0
    for _ in range(2 * count // 100):
        at = table.find(rng.choice(hashes, 100, replace=False))
        table.rows["votes"][at] += 1
        table.touch(at)
        pieces = table.written("x")
        write(disk, pieces)
        size = sum(len(data or b"") for data in pieces.values())
        most, total = max(most, size), total + size
    assert (
        most <= (3 * 100 + 2 * values.PIECE_COST + values.WRITTEN_MOST) * ENTRY.itemsize + 100
    )  # its own, and a bounded part of the oldest
    assert total <= 3 * 2 * count * (ENTRY.itemsize + 1)
    assert sum(map(len, disk.values())) <= 3.2 * (count + 500) * ENTRY.itemsize
    again = Values(ENTRY, expires="last")
    again.restore({name.split("/")[1]: data for name, data in disk.items()})
    same(again.all(), table.all())


def test_a_table_that_has_become_small_is_small() -> None:
    table = Values(ENTRY, expires="last")
    records = entries_of(np.arange(200_000, dtype=np.uint64))
    records["last"] = np.arange(200_000)
    table.insert(records)
    assert len(table.remove_expired(199_990, None)) == 199_990
    assert table.all()["hash"].tolist() == list(range(199_990, 200_000))
    assert table.rows.nbytes < 100_000
    assert table.find(np.array([5, 199_995], np.uint64))[0] == -1


def test_a_mark_is_not_in_force_against_what_comes_after_a_restart() -> None:
    disk, value = Disk(), entries_of(np.ones(1, np.uint64))
    for now in (1, 3, 5):
        table = ShapeTable(shape(True), 1)
        restore_tables("s", [table], disk)
        assert len(table.intervals) == (now == 5)
        table.vote(value, 0, now, 10)
        table.retract(value["hash"], 0, now + 1, 10)
        write(disk, written_tables("s", [table]))
        if now == 1:
            table.forget(100, 0)
            write(disk, written_tables("s", [table]))
            assert list(disk) == ["s0/000000000000", "s0i/mark"]
