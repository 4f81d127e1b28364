"""Plan epochs at ingest: whatever records, batches, plans, rebalances and crashes are drawn, a row has the epoch that
the durable record says, announcements come before it and barriers behind the last row of the epoch before."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from schemas.block import Block, FromSource, SourceEnded
from schemas.control import PlanPublished
from schemas.errors import StateError
from schemas.mesh import FieldType, Stream
from tests.drawn import check_often, say
from topology.ingest.blocks import announced
from topology.ingest.effects import Commit, Effect, Emit, Flush, Place
from topology.ingest.epochs import Published
from topology.ingest.ingest import Fetched, Ingestion, Stored
from topology.ingest.reading import Reading
from topology.ingest.routing import routers_of
from topology.ingest.settings import IngestSettings
from topology.plan.plan import Plan, build_plan, parse_tree
from topology.query.cql import parse_query
from topology.state.window import OFFSET_BITS, OFFSET_MASK, part_id

FIELDS = {"k": FieldType.INT64, "s": FieldType.STRING, "ts": FieldType.TIMESTAMP}
STREAMS = {
    **{n: Stream(n, f"topic-{n}", FIELDS, "ts", lateness_ms=50) for n in ("a", "b", "c")},
    "t": Stream("t", "topic-t", FIELDS, "", table="k"),
}
TEXTS = {
    "q": "SELECT a.s FROM a [RANGE 500 MS], b [RANGE 500 MS], c [RANGE 500 MS] WHERE a.k = b.k AND b.k = c.k",
    "r": "SELECT x.s FROM a [RANGE 900 MS] AS x, t, a [RANGE 90 MS] AS y WHERE x.k = t.k AND x.k = y.k AND y.s = 'x'",
}
TREES = {
    "q": ("((a b) c)", "(a (b c))", "(a b c)", "((c a) b)", "((b a) c)"),
    "r": ("((x t) y)", "(x (t y))", "(x t y)", "((x y) t)"),
}
SEEDS = 400
AT_LEAST = {
    "plans": 1_000,
    "crashes": 1_000,
    "rows": 20_000,
    "rows again": 3_000,
    "barriers": 5_000,
    "passed later": 300,
    "moved": 500,
    "held": 20,
    "lost": 500,
}
Channel = tuple[str, str, int]  # query, node, partition


@cache
def built(query: str, tree: str) -> Plan:
    parsed = parse_query(query, TEXTS[query], STREAMS)
    return build_plan(parsed, parse_tree(tree, parsed))


def plan_of(query: str, tree: str, epoch: int, heralds: bool, cut: dict[int, int]) -> Published:
    plan = built(query, tree)
    cuts = {"t": cut} if query == "r" else {}
    return PlanPublished(query, epoch, TEXTS[query], tree, "", 0, {}, table_cuts=cuts, heralds=heralds), plan


@dataclass
class Life:
    """A process: its machine, what it has sent that nobody has yet, and how far it has fetched."""

    core: Ingestion
    known: dict[str, list[Published]]
    places: set[Place] = field(default_factory=set)
    under_way: list[tuple[Channel, Block]] = field(default_factory=list)
    fetched: dict[Place, int] = field(default_factory=dict)


class World:
    """Source topics, a group's offsets, the nodes' input topics, and the processes that are ingest."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.stats: Counter[str] = Counter()
        self.partitions = rng.choice((1, 2, 3))
        self.counts = {name: rng.choice((1, 2)) for name in STREAMS}
        self.queries = rng.choice((("q",), ("r",), ("q", "r")))
        used = {name for q in self.queries for name in (("a", "b", "c") if q == "q" else ("a", "t"))}
        self.counts = {name: n for name, n in self.counts.items() if name in used}
        self.heralds = rng.random() < 0.5
        self.logs = {(STREAMS[n].topic, p): self.draw(n) for n, count in self.counts.items() for p in range(count)}
        self.visible = {
            place: len(log) if place[0] == "topic-t" else rng.randint(0, len(log)) for place, log in self.logs.items()
        }
        self.cut = {p: self.end(("topic-t", p)) for p in range(self.counts.get("t", 0))}
        self.settings = IngestSettings(
            per_partition=rng.choice((1, 3, 4_000)),
            block_bytes=rng.choice((200, 1 << 19)),
            ahead_most=rng.choice((3, 10, 200_000)),
        )
        self.plans = {q: [plan_of(q, rng.choice(TREES[q]), 1, self.heralds, self.cut)] for q in self.queries}
        self.offsets: dict[Place, tuple[int, str]] = {}
        self.inputs: dict[Channel, list[Block]] = {}
        self.points: dict[tuple[str, Place, int], int] = {}  # (query, place, epoch) -> first offset, as committed
        self.epoch_of: dict[tuple[str, str, int, int], int] = {}  # (query, alias, partition, offset) -> epoch
        self.routes: dict[tuple[str, int], set[tuple[str, str]]] = {}  # of each plan: alias, node
        self.lives: list[Life] = []
        self.now = 0.0

    def draw(self, name: str) -> list[tuple[int, bytes]]:
        """Records with gaps between their offsets; some are late, broken or without a key."""
        rng, at, time, found = self.rng, 0, 1_000, []
        for _ in range(rng.randint(0, 40)):
            at += rng.choice((1, 1, 1, 2, 5))
            time += rng.choice((0, 5, 20))
            row: dict[str, Any] = {"k": rng.randrange(6), "s": "xy"[rng.randrange(2)], "ts": time}
            if rng.random() < 0.1:
                row["ts"] -= 200
            if rng.random() < 0.1 and name != "t":
                row["k"] = None
            found.append((at, b"{" if rng.random() < 0.05 else json.dumps(row).encode()))
        return found

    def end(self, place: Place) -> int:
        """Where the topic ends now: sometimes behind markers that hold no record."""
        log, seen = self.logs[place], self.visible[place]
        last = log[seen - 1][0] + 1 if seen else 0
        if seen < len(log):
            return log[seen][0] if seen % 2 else last
        return last + (seen % 3 == 0)

    # -- the shell

    def start(self) -> Life:
        behind = self.rng.random() < 0.3  # it has not heard of the newest plan yet
        known = {q: plans[:-1] if behind and len(plans) > 1 else list(plans) for q, plans in self.plans.items()}
        core = Ingestion(STREAMS, self.partitions, known, self.counts, self.settings)
        life = Life(core, known)
        self.lives.append(life)
        return life

    def assign(self, life: Life, places: list[Place]) -> None:
        stored = [Stored(*place, *self.offsets.get(place, (-1, "")), 0, self.end(place)) for place in places]
        effects = life.core.assigned(stored, self.now)
        life.places |= set(places)
        for topic, partition, start in effects[0].starts:  # type: ignore[union-attr]
            life.fetched[topic, partition] = start
        self.do(life, effects[1:])

    def revoke(self, life: Life, places: list[Place]) -> None:
        self.do(life, life.core.revoked(places))
        life.places -= set(places)

    def crash(self, life: Life) -> None:
        """Of what is under way, some prefix of each channel arrives."""
        self.stats["crashes"] += 1
        self.lives.remove(life)
        keep = {channel: self.rng.randint(0, 3) for channel, _ in life.under_way}
        for channel, block in life.under_way:
            keep[channel] -= 1
            if keep[channel] >= 0:
                self.inputs.setdefault(channel, []).append(block)
            else:
                self.stats["lost"] += 1

    def do(self, life: Life, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                for send in effect.sends:
                    channel = (effect.query, send.target, send.partition)
                    self.check(life, channel, send.block)
                    life.under_way.append((channel, send.block))
            elif isinstance(effect, Flush):
                self.deliver(life)
            elif isinstance(effect, Commit):
                assert effect.is_floor or not life.under_way, "committed what is not delivered"
                for topic, partition, offset, metadata in effect.offsets:
                    self.offsets[topic, partition] = (offset, metadata)
                    self.record((topic, partition), msgspec.json.decode(metadata, type=Reading))

    def deliver(self, life: Life) -> None:
        for channel, block in life.under_way:
            self.inputs.setdefault(channel, []).append(block)
        life.under_way.clear()

    def record(self, place: Place, reading: Reading) -> None:
        for query, epochs in reading.epochs.items():
            assert list(epochs.values()) == sorted(epochs.values())
            for epoch, first in epochs.items():
                assert self.points.setdefault((query, place, epoch), first) == first, "a point has moved"

    # -- what must hold of each block as it is sent

    def durable(self, query: str, place: Place, offset: int) -> int:
        begun = [e for (q, p, e), first in self.points.items() if (q, p) == (query, place) and first <= offset]
        return max(begun, default=1)

    def check(self, life: Life, channel: Channel, block: Block) -> None:
        query, header = channel[0], block.header
        if announced(block) is not None or isinstance(header, SourceEnded) or block.rows is None:
            return
        plan = next(p for m, p in self.plans[query] if m.epoch == header.epoch)
        if (query, header.epoch) not in self.routes:
            routes = [router.route for router in routers_of(plan, 1, 1, self.heralds)]
            self.routes[query, header.epoch] = {(route.alias, route.node) for route in routes}
        assert (header.sender, channel[1]) in self.routes[query, header.epoch], "not of this plan"
        source = plan.query.source(header.sender)
        for row in block.rows.ints(part_id(header.sender)).tolist():
            partition, offset = row >> OFFSET_BITS, row & OFFSET_MASK
            place = (STREAMS[source.stream].topic, partition)
            assert place in life.places
            assert header.epoch == self.durable(query, place, offset), "not the epoch that is on record"
            key = (query, header.sender, partition, offset)
            self.stats["rows again"] += key in self.epoch_of
            self.stats["rows"] += 1
            assert self.epoch_of.setdefault(key, header.epoch) == header.epoch, "a row of two epochs"

    # -- what happens

    def act(self) -> None:
        rng, roll = self.rng, self.rng.random()
        self.now += 0.01
        if not self.lives:
            self.assign(self.start(), list(self.logs))
            return
        life = rng.choice(self.lives)
        if roll < 0.06 and all(len(plans) < 6 for plans in self.plans.values()):
            query = rng.choice(self.queries)
            new = plan_of(query, rng.choice(TREES[query]), len(self.plans[query]) + 1, self.heralds, self.cut)
            self.plans[query].append(new)
            self.stats["plans"] += 1
        elif roll < 0.2:
            self.hear(life)
        elif roll < 0.26:
            places = sorted(life.places)
            self.crash(life)
            if places:
                self.assign(rng.choice(self.lives) if self.lives and rng.random() < 0.5 else self.start(), places)
        elif roll < 0.32:
            moving = [place for place in sorted(life.places) if rng.random() < 0.5]
            self.revoke(life, moving)
            self.assign(self.start() if len(self.lives) < 2 else rng.choice(self.lives), moving)
            self.stats["moved"] += len(moving)
        elif roll < 0.42:
            self.do(life, life.core.commit())
            self.do(life, life.core.idle(self.now))
        elif roll < 0.5:
            place = rng.choice(list(self.logs))
            self.visible[place] = min(len(self.logs[place]), self.visible[place] + rng.randint(1, 10))
        else:
            self.fetch(life, rng.randint(0, 6))
            self.do(life, life.core.round(self.now))
            if life.core.wants_commit and rng.random() < 0.7:
                self.do(life, life.core.commit())
        self.stats["held"] += sum(len(one.core._held) for one in self.lives)
        self.stats["passed later"] += sum(len(one.core._ends) for one in self.lives)

    def hear(self, life: Life) -> None:
        for query, plans in self.plans.items():
            for published, plan in plans[len(life.known[query]) :]:
                self.do(life, life.core.change_plan(published, plan))
                life.known[query].append((published, plan))

    def fetch(self, life: Life, count: int) -> None:
        runs: dict[Place, Fetched] = {}
        ends: dict[Place, int] = {}
        for place in sorted(life.places):
            left = [r for r in self.logs[place][: self.visible[place]] if r[0] >= life.fetched[place]]
            if coming := left[:count]:
                runs[place] = Fetched([o for o, _ in coming], [v for _, v in coming])
                life.fetched[place] = coming[-1][0] + 1
            if len(left) <= count:
                ends[place] = life.fetched[place] = max(life.fetched[place], self.end(place))
        self.do(life, life.core.fetched(runs, ends))

    def finish(self) -> None:
        self.visible = {place: len(log) for place, log in self.logs.items()}
        if not self.lives:
            self.assign(self.start(), list(self.logs))
        for _ in range(300):
            self.now += 1.0
            for life in self.lives:
                self.hear(life)
                self.fetch(life, 50)
                self.do(life, life.core.round(self.now))
                if life.core.wants_commit:
                    self.do(life, life.core.commit())
            if not any(life.core.waiting or life.core._held or life.core._ends for life in self.lives):
                break
        for life in self.lives:
            self.do(life, life.core.round(self.now))
            self.do(life, life.core.commit())
            self.do(life, life.core.commit())

    # -- what must hold of each input topic at the end

    def audit(self) -> None:
        assert not any(life.core.waiting or life.core._held or life.core._ends for life in self.lives)
        for place, log in self.logs.items():
            offset, metadata = self.offsets.get(place, (0, ""))
            assert not log or offset > log[-1][0] or place[0] == "topic-t"
            for query, epochs in (msgspec.json.decode(metadata, type=Reading).epochs if metadata else {}).items():
                assert list(epochs) == [self.plans[query][-1][0].epoch], "something old is left"
        for (query, _, _), blocks in self.inputs.items():
            self.audit_channel(query, blocks)
        for query, plans in self.plans.items():
            for (_, plan), (later, _) in pairwise(plans):
                self.audit_barriers(query, plan, later.epoch)

    def audit_channel(self, query: str, blocks: list[Block]) -> None:
        known, ended = {1}, set()
        read: dict[tuple[str, int, int], int] = {}  # (alias, epoch, source partition) -> told up to
        for block in blocks:
            header = block.header
            if (published := announced(block)) is not None:
                assert published == next(m for m, _ in self.plans[query] if m.epoch == header.epoch)
                known.add(header.epoch)
                continue
            assert header.epoch in known, "rows before their plan is announced"
            assert isinstance(header, FromSource)
            for position in header.positions:
                channel = (header.sender, header.epoch, position.partition)
                place = (STREAMS[self.plans[query][0][1].query.source(header.sender).stream].topic, position.partition)
                before = read.get(channel, position.first)
                assert position.first <= before, "a gap"
                if block.rows is not None and channel in ended:
                    ids = block.rows.ints(part_id(header.sender))
                    mine = ids[ids >> OFFSET_BITS == position.partition] & OFFSET_MASK
                    assert (mine < before).all(), "a new row behind the barrier"
                read[channel] = max(before, position.next)
                end = self.points.get((query, place, header.epoch + 1))
                assert end is None or position.next <= end, "told of offsets of another epoch"
                if isinstance(header, SourceEnded):
                    ended.add(channel)
                    assert position.next == end
                    assert read[channel] == end, "a barrier before the last row"
                    self.stats["barriers"] += 1

    def audit_barriers(self, query: str, plan: Plan, later: int) -> None:
        """Every channel of the old plan got one for every source partition."""
        for router in routers_of(plan, self.partitions, 1, self.heralds):
            route, stream = router.route, router.source.stream
            for target in range(self.partitions):
                blocks = self.inputs.get((query, route.node, target), [])
                told = {
                    position.partition
                    for b in blocks
                    if isinstance(b.header, SourceEnded)
                    and (b.header.sender, b.header.epoch) == (route.alias, later - 1)
                    for position in b.header.positions
                }
                assert told == set(range(self.counts[stream])), f"barriers of {route.alias} are missing in {route.node}"


def run(seed: int) -> Counter[str]:
    world = World(seed)
    try:
        for _ in range(world.rng.choice((30, 80))):
            world.act()
        world.finish()
        world.audit()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world.stats


def test_every_row_has_the_epoch_that_is_on_record(capsys: pytest.CaptureFixture[str]) -> None:
    done: Counter[str] = Counter()
    for seed in range(SEEDS):
        done += run(seed)
        done["seeds"] += 1
    say(capsys, "epochs at ingest", done)
    check_often(done, SEEDS, AT_LEAST)


def caught(monkeypatch: pytest.MonkeyPatch, why: str) -> int:
    """The first seed that fails, for this reason, with what is patched now and holds without it."""
    failed: dict[int, str] = {}
    for seed in range(SEEDS):
        try:
            run(seed)
        except AssertionError as failure:
            failed[seed] = str(failure)
            break
    assert failed, "nothing caught it"
    ((seed, said),) = failed.items()
    assert why in said
    monkeypatch.undo()
    run(seed)
    return seed


def test_a_point_that_is_committed_after_the_first_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: rows go by the new plan at once, the point is stored with the next commit."""
    begin = Ingestion._begin

    def later(self: Ingestion) -> list[Effect]:
        return [effect for effect in begin(self) if not isinstance(effect, Commit)]

    monkeypatch.setattr(Ingestion, "_begin", later)
    caught(monkeypatch, "not the epoch that is on record")


def test_a_point_before_what_an_earlier_process_sent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a plan begins at the next offset, though somebody may have sent rows from there on before it ended."""
    assigned = Ingestion.assigned

    def forgetful(self: Ingestion, places: Sequence[Stored], now: float) -> list[Effect]:
        effects = assigned(self, places, now)
        self._reach = dict.fromkeys(self._reach, 0)
        return effects

    monkeypatch.setattr(Ingestion, "assigned", forgetful)
    caught(monkeypatch, "a row of two epochs")


def test_barriers_before_the_last_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: partitions that reach the end of their epoch in a round are passed on before their rows are sent."""
    read = Ingestion._read

    def eager(self: Ingestion, place: Place, count: int, now: float, frames: Any, effects: list[Effect]) -> None:
        read(self, place, count, now, frames, effects)
        effects += self._pass_on()

    monkeypatch.setattr(Ingestion, "_read", eager)
    caught(monkeypatch, "")


# -- by hand


def machine(plans: list[Published], offset: int = -1, metadata: str = "") -> Ingestion:
    core = Ingestion(STREAMS, 2, {"q": plans}, {"a": 1, "b": 1, "c": 1})
    places = [Stored("topic-a", 0, offset, metadata, 0, offset)]
    core.assigned([*places, *(Stored(f"topic-{n}", 0, -1, None, 0, 0) for n in "bc")], 0.0)
    return core


def feed(core: Ingestion, first: int, count: int) -> list[Effect]:
    values: list[bytes | None] = [
        json.dumps({"k": o, "s": "x", "ts": 1_000 + o}).encode() for o in range(first, first + count)
    ]
    core.fetched({("topic-a", 0): Fetched(list(range(first, first + count)), values)}, {})
    return core.round(0.0)


def rows_sent(effects: list[Effect]) -> list[tuple[str, int, int, int]]:
    """(node, target, epoch, offset) of every row."""
    return [
        (send.target, send.partition, send.block.header.epoch, int(row) & OFFSET_MASK)
        for effect in effects
        if isinstance(effect, Emit)
        for send in effect.sends
        if send.block.rows is not None and announced(send.block) is None
        for row in send.block.rows.ints("#a").tolist()
    ]


def kinds(effects: list[Effect]) -> list[str]:
    found: list[str] = []
    for effect in effects:
        sent = [str(send.block.header.kind) for send in effect.sends] if isinstance(effect, Emit) else []
        found += sent or ([] if isinstance(effect, Emit) else [type(effect).__name__])
    return [kind for i, kind in enumerate(found) if i == 0 or found[i - 1] != kind]


def test_a_change_is_announced_then_durable_then_barriers_then_rows() -> None:
    old, new = (plan_of("q", "((a b) c)", e, False, {}) for e in (1, 2))
    core = machine([old])
    feed(core, 0, 10)
    effects = core.change_plan(*new)
    assert kinds(effects) == ["plan", "Flush", "Commit", "source-ended"]
    (commit,) = [effect for effect in effects if isinstance(effect, Commit)]
    assert commit.offsets[0][:3] == ("topic-a", 0, 10)
    assert msgspec.json.decode(commit.offsets[0][3], type=Reading).epochs == {"q": {1: 0, 2: 10}}
    plans = [announced(s.block) for e in effects if isinstance(e, Emit) for s in e.sends]
    assert [p for p in plans if p is not None] == [new[0]] * 4, "two partitions of two nodes"
    assert core.change_plan(*new) == [], "the same again changes nothing"
    after = core.commit()
    (commit,) = [effect for effect in after if isinstance(effect, Commit)]
    assert msgspec.json.decode(commit.offsets[0][3], type=Reading).epochs == {"q": {2: 10}}


def test_a_change_to_the_same_tree_changes_the_epoch_and_nothing_else() -> None:
    old, new = (plan_of("q", "((a b) c)", e, True, {}) for e in (1, 2))
    stays, changes = machine([old]), machine([old])
    assert rows_sent(feed(stays, 0, 20)) == rows_sent(feed(changes, 0, 20))
    changes.change_plan(*new)
    same, other = rows_sent(feed(stays, 20, 20)), rows_sent(feed(changes, 20, 20))
    assert other == [(node, target, 2, offset) for node, target, _, offset in same]


def test_a_commit_before_the_point_goes_by_the_old_plan_until_the_point() -> None:
    plans = [plan_of("q", tree, e, False, {}) for e, tree in ((1, "((a b) c)"), (2, "(a (b c))"))]
    core = machine(plans, 10, msgspec.json.encode(Reading(10, epochs={"q": {1: 0, 2: 15}})).decode())
    effects = feed(core, 10, 10)
    assert {(epoch, node) for node, _, epoch, _ in rows_sent(effects)} == {(1, "j1")}
    assert sorted(offset for *_, offset in rows_sent(effects)) == [10, 11, 12, 13, 14]
    assert kinds(effects)[-1] == "source-ended"
    assert {(epoch, node) for node, _, epoch, _ in rows_sent(core.round(0.0))} == {(2, "j2")}


def test_a_partition_in_an_epoch_that_is_not_known_waits_for_its_plan() -> None:
    plans = [plan_of("q", tree, e, False, {}) for e, tree in ((1, "((a b) c)"), (2, "(a (b c))"))]
    core = machine(plans[:1], 10, msgspec.json.encode(Reading(10, epochs={"q": {2: 10}})).decode())
    assert rows_sent(feed(core, 10, 10)) == []
    core.change_plan(*plans[1])
    assert {epoch for _, _, epoch, _ in rows_sent(core.round(0.0))} == {2}


def test_an_epoch_that_is_gone_stops_loudly() -> None:
    newest = plan_of("q", "((a b) c)", 3, False, {})
    with pytest.raises(StateError, match="plan epoch 2"):
        machine([newest], 10, msgspec.json.encode(Reading(10, epochs={"q": {2: 0}})).decode())
