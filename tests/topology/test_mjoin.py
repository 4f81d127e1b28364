"""An M-Join by itself: it goes on after a restart as if nothing had been, forgets in time, refuses what is wrong, and
its paths save work."""

import random
from collections import Counter, defaultdict
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import topology.join.kernel
from schemas.block import Block, Composites, Events, Header, Heralds, Suspend, decode_block, encode_block
from schemas.errors import BlockError
from schemas.mesh import FieldType, Routing, Stream
from tests.drawn import restraint_of
from topology.join.memo import Memo
from topology.join.partition import Partition
from topology.join.routing import EXPLORE_EVERY, MEASURED_MOST, Paths, PathsMemo
from topology.join.settings import Settings
from topology.message.effects import Effects
from topology.oracle.truth import Event, truth
from topology.plan.plan import Plan, build_plan
from topology.query.cql import parse_query
from topology.restraint.hiding import Hiding
from topology.state.window_state import MemoryStore, StateName
from topology.testing.driver import TopologyDriver, with_modes

FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "s": FieldType.STRING, "ts": FieldType.TIMESTAMP}
STREAMS = {n: Stream(n, n, FIELDS, "ts", lateness_ms=10) for n in "abcd"}
SOURCES = ", ".join(f"{n} [RANGE 100 MS]" for n in "abcd")
WHERE = "a.k = b.k AND b.k = c.k AND c.k = d.k AND a.m = c.m AND b.s = d.s"
QUERY = parse_query("q", f"SELECT a.ts AS t, d.s AS s FROM {SOURCES} WHERE {WHERE}", STREAMS)
PLAN = build_plan(QUERY, ("a", "b", "c", "d"))
MODES: list[tuple[Routing, bool]] = [("fixed", False), ("fixed", True), ("eddy", False), ("eddy", True)]


def drive(
    plan: Plan, routing: Routing, feedback: bool, seed: int = 1, rare: str = "d", count: int = 600, keep: float = 0.1
) -> tuple[TopologyDriver, list[Event]]:
    """A stream that is rare, and a mesh of one partition that has worked off all."""
    rng = random.Random(seed)
    driver = TopologyDriver(plan, STREAMS, partitions=1, source_partitions=1, feedback=feedback, routing=routing)
    events = []
    for i in range(count):
        stream = rng.choice("abcd")
        if stream == rare and rng.random() > keep:
            continue
        row: dict[str, Any] = {
            "k": rng.randrange(12),
            "m": rng.randrange(3),
            "s": "x" * rng.randrange(2),
            "ts": 1_000 + i - rng.randrange(8),
        }
        events.append(Event(stream, 0, driver.produce(stream, 0, row), row))
        if i % 3 == 0:
            driver.run(rng.randrange)
    driver.run(rng.randrange)
    return driver, events


def the_node(driver: TopologyDriver, node: str = "j1") -> Partition:
    found = driver.nodes[node, 0]
    assert found.node.is_flat
    return found


@pytest.mark.parametrize(("routing", "feedback"), MODES)
def test_after_any_restart_it_goes_on_as_if_nothing_had_been(routing: Routing, feedback: bool) -> None:
    """Memo, segments and tables are all there is: the same sends, the same counts, the same choices."""
    driver, events = drive(PLAN, routing, feedback)
    rng, stores, tables = random.Random(2), defaultdict[StateName, MemoryStore](MemoryStore), dict[str, bytes]()
    settings = with_modes(Settings(), feedback, routing)
    node = Partition(PLAN, "j1", 0, 1, stores=stores.__getitem__, settings=settings)
    untouched = Partition(PLAN, "j1", 0, 1, settings=settings)
    sent, wanted = list[bytes](), list[bytes]()
    for offset, data in enumerate(driver.inputs["j1", 0].records):
        effects: Effects = node.step(offset, decode_block(data))
        for name, record in effects.tables.items():
            assert record is not None
            tables[name] = record
        sent += [encode_block(send.block) for send in effects.sends]
        wanted += [encode_block(send.block) for send in untouched.step(offset, decode_block(data)).sends]
        if rng.random() < 0.2:
            memo = msgspec.msgpack.decode(msgspec.msgpack.encode(node.memo), type=Memo)
            node = Partition(PLAN, "j1", 0, 1, stores=stores.__getitem__, memo=memo, settings=settings)
            node.restore({name: list(store.segments.values()) for name, store in stores.items()}, tables)
    assert [content(data) for data in sent] == [content(data) for data in wanted]
    assert msgspec.msgpack.encode(node.memo) == msgspec.msgpack.encode(the_node(driver).memo)
    assert len(driver.results) == len(truth(QUERY, STREAMS, events)) > 40


def content(data: bytes) -> tuple[Any, ...]:
    """A block but for the order of its rows, which is that of the segments."""
    block = decode_block(data)
    rows = (
        []
        if block.rows is None
        else sorted(zip(*(np.asarray(c).tolist() for _, c in sorted(block.rows.columns.items())), strict=True))
    )
    return block.header, rows


@pytest.mark.parametrize(("routing", "feedback"), MODES)
def test_pieces_of_any_size_give_the_same(routing: Routing, feedback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.join.kernel, "COMPOSITES_AT_ONCE", 2)
    driver, events = drive(PLAN, routing, feedback, seed=3, count=300, keep=1)
    assert {key: (value, at) for key, value, at in driver.results} == truth(QUERY, STREAMS, events)
    assert len({key for key, _, _ in driver.results}) == len(driver.results) > 50


@pytest.mark.parametrize("feedback", [False, True])
def test_it_forgets_what_no_other_side_can_meet(feedback: bool) -> None:
    driver, _ = drive(PLAN, "fixed", feedback, count=3_000)
    node = the_node(driver)
    for side, state in enumerate(node.states):
        horizon = min(time for other, time in enumerate(node.memo.watermarks) if other != side)
        assert node.horizon(side) == horizon
        assert all(segment.max_end >= horizon for segment in state.segments())
        assert sum(segment.rows for segment in state.segments()) < 250
    hiding = restraint_of(node, Hiding)
    assert (hiding is not None) == feedback
    if hiding is not None:
        assert sum(len(t.entries) for t in hiding.tables) < 400
        assert not any(len(t.intervals) for t in hiding.tables)


def test_feedback_saves_composites() -> None:
    made = {mode: the_node(drive(PLAN, *mode, count=2_000, keep=0.02)[0]).memo.counts.composites for mode in MODES}
    print(made)
    assert made["fixed", True] < 0.35 * made["fixed", False]
    assert made["eddy", True] < made["eddy", False]


def test_an_eddy_finds_the_selective_input_by_itself() -> None:
    """d is rare but written last: a fixed path meets it last, an Eddy first. Where the written order is the best
    already, looking around costs a little."""
    made: Counter[str] = Counter()
    for rare in "dab":
        for routing in ("fixed", "eddy"):
            made[rare + routing] = the_node(
                drive(PLAN, routing, False, rare=rare, count=2_000, keep=0.02)[0]
            ).memo.counts.composites
    print(made)
    assert made["deddy"] < 0.5 * made["dfixed"]
    assert made["beddy"] < 0.5 * made["bfixed"]
    assert made["aeddy"] < 1.5 * made["afixed"]


def test_the_eddy_chooses_by_counts_alone() -> None:
    router = Paths("eddy", PathsMemo())
    ways = [(1, "one"), (2, "two"), (3, "three")]
    assert router.choose(ways, first=True) == 1  # none was tried: as written
    router.measure("one", 100, 300)
    router.measure("two", 10, 20)
    assert router.choose(ways, first=True) == 3  # not yet tried
    router.measure("three", 1_000, 2_500)
    assert router.choose(ways, first=True) == 2
    assert router.choose(ways[::2], first=False) == 3
    router.memo.batches = EXPLORE_EVERY
    assert router.choose(ways, first=True) == 2  # tried least
    router.measure("two", 5_000, 20)
    assert router.choose(ways, first=True) == 1
    assert router.choose(ways, first=False) == 2
    router.measure("one", MEASURED_MOST, 0)
    assert router.memo.fan_outs["one"] == [(MEASURED_MOST + 100) // 2, 150]  # what was long ago counts less and less
    assert Paths("fixed", router.memo).choose(ways, first=True) == 1


def test_it_refuses_what_does_not_belong_here() -> None:
    driver, _ = drive(PLAN, "fixed", True, count=100, keep=1)
    node = Partition(PLAN, "j1", 0, 1, settings=Settings(feedback="on"))
    blocks = [block for block in map(decode_block, driver.inputs["j1", 0].records) if block.rows is not None]
    block = next(b for b in blocks if b.header.sender == "c")
    header, good = block.header, block.rows
    assert good is not None
    assert isinstance(header, Events)
    said = (1, "j2", 0, 1, 1, 0, 5_000)
    heralds = Heralds(header.epoch, header.alias, header.partitions, header.positions, 0)
    changed: list[tuple[Header, Any, str]] = [
        (header, good.with_column("c.m", pa.array([None] * len(good), pa.int64())), "column c.m holds nulls"),
        (msgspec.structs.replace(header, alias="e"), good, "events of 'e', which sends nothing of that kind here"),
        (msgspec.structs.replace(header, alias="b"), good, "has columns .*, the plan says"),
        (Suspend(*said), good, "suspend of 'j2', which sends nothing of that kind here"),
        (Composites(*said), None, "composites of 'j2', which sends nothing of that kind here"),
        (heralds, good, "of kind 'heralds', which c does not send"),
        (msgspec.structs.replace(header, epoch=2), good, "of plan epoch 2, but epoch 1 is the newest here"),
    ]
    before = msgspec.msgpack.encode(node.memo)
    for bad, rows, why in changed:
        with pytest.raises(BlockError, match=why):
            node.step(0, Block(bad, rows))
    assert msgspec.msgpack.encode(node.memo) == before
    assert not any(list(state.segments()) for state in node.states)
