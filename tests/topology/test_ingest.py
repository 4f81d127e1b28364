"""Lateness, idleness, positions and repeats at the edge between source topics and join nodes."""

import json
from typing import Any

import msgspec
import pytest

from schemas.block import NO_WATERMARK, Block, decode_block
from schemas.errors import StateError
from schemas.mesh import FieldType, Stream
from topology.ingest.reading import Reading, StreamReader
from topology.ingest.routing import Router
from topology.join.partition import Partition
from topology.plan.plan import Plan, build_plan
from topology.query.cql import parse_query
from topology.testing.driver import TopologyDriver

FIELDS = {"k": FieldType.INT64, "s": FieldType.STRING, "ts": FieldType.TIMESTAMP}


def stream(name: str, **settings: Any) -> Stream:
    return Stream(name, name, FIELDS, "ts", **settings)


STREAMS = {n: stream(n, lateness_ms=100) for n in ("a", "b")}


def plan() -> Plan:
    query = parse_query("q", "SELECT a.k, b.s FROM a [RANGE 500 MS], b [RANGE 500 MS] WHERE a.k = b.k", STREAMS)
    return build_plan(query, ("a", "b"))


def records(*times: int) -> list[bytes]:
    return [json.dumps({"k": 1, "ts": t}).encode() for t in times]


def test_an_event_is_late_below_the_largest_earlier_time_minus_lateness() -> None:
    reader = StreamReader(stream("a", lateness_ms=100), 1)
    read = reader.read(0, range(5), records(1000, 1200, 1100, 1099, 1300))
    assert [(x.offset, x.reason, x.watermark) for x in read.late] == [(3, "late", 1100)]
    assert reader.watermark(0) == 1200
    again = reader.read(0, [5, 6], records(1199, 1200))
    assert [x.offset for x in again.late] == [5], "lateness does not depend on where batches end"


def test_what_comes_below_an_idle_floor_is_late_with_that_reason_also_after_a_restart() -> None:
    reader = StreamReader(stream("a", lateness_ms=100), 1)
    reader.read(0, [0], records(1000))
    reader.readings[0].floor = 5000
    assert reader.watermark(0) == 5000
    kept = reader.readings[0]
    fresh = StreamReader(stream("a", lateness_ms=100), 1)
    fresh.readings[0] = Reading(kept.next, kept.max_time, kept.floor)
    for one in (reader, fresh):
        late = one.read(0, [1, 2], records(4999, 5000)).late
        assert [(x.offset, x.reason) for x in late] == [(1, "idle")]


def test_a_partition_that_was_never_read_holds_the_watermark() -> None:
    reader = StreamReader(stream("a"), 2)
    reader.read(0, [0], records(1000))
    assert reader.watermark(1) == NO_WATERMARK


def test_positions_follow_one_another_and_cut_blocks_keep_the_old_time() -> None:
    reader = StreamReader(STREAMS["a"], 1)
    values = [json.dumps({"k": i, "s": "x" * 300, "ts": 1000 + i}).encode() for i in range(4000)]
    big = build_plan(
        parse_query("q", "SELECT a.k, a.s FROM a [RANGE 1 SECOND], b [RANGE 1 SECOND] WHERE a.k = b.k", STREAMS),
        ("a", "b"),
    )
    router = Router(big, big.routes[0], 1, 1)
    router.assign(0, 0)
    sends = router.send(reader.read(0, range(4000), values).rows, reader)
    assert len(sends) > 1
    positions = [s.block.header.positions[0] for s in sends]
    assert [p.first for p in positions[1:]] == [p.next for p in positions[:-1]]
    assert {p.watermark for p in positions[:-1]} == {NO_WATERMARK}
    assert (positions[0].first, positions[-1].next, positions[-1].watermark) == (0, 4000, 4999 - 100)


def test_rows_sent_again_in_other_blocks_are_dropped_by_source_offset() -> None:
    node = Partition(plan(), "j1", 0, 1)
    route = plan().routes[0]
    offset = 0
    for chunk in ([5, 5], [3, 4, 3]):  # the second life begins again from the start, in other batches
        reader, router = StreamReader(STREAMS["a"], 1), Router(plan(), route, 1, 1)
        router.assign(0, 0)
        at = 0
        for size in chunk:
            read = reader.read(0, range(at, at + size), records(*range(1000 + at, 1000 + at + size)))
            at += size
            for send in router.send(read.rows, reader):
                node.step(offset, send.block)
                offset += 1
    assert node.memo.counts.rows_in == [10, 0]
    assert node.memo.rows_repeated == 10
    assert sum(segment.rows for segment in node.states[0].segments()) == 10


def test_a_gap_stops_loudly() -> None:
    node = Partition(plan(), "j1", 0, 1)
    reader, router = StreamReader(STREAMS["a"], 1), Router(plan(), plan().routes[0], 1, 1)
    router.assign(0, 0)
    (first,) = router.send(reader.read(0, [0], records(1000)).rows, reader)
    (lost,) = router.send(reader.read(0, [1], records(1001)).rows, reader)
    (third,) = router.send(reader.read(0, [2], records(1002)).rows, reader)
    assert lost.block.header.positions[0].first == 1
    node.step(0, first.block)
    with pytest.raises(StateError, match="never arrived"):
        node.step(1, third.block)


def test_a_block_of_an_earlier_incarnation_is_refused_once_a_later_one_was_seen() -> None:
    text = (
        "SELECT a.k FROM a [RANGE 1 SECOND], b [RANGE 1 SECOND], a [RANGE 1 SECOND] AS c WHERE a.k = b.k AND b.k = c.k"
    )
    three = build_plan(parse_query("q", text, STREAMS), (("a", "b"), "c"))
    driver = TopologyDriver(three, STREAMS, partitions=1, source_partitions=1)
    driver.nodes["j1", 0].voice.incarnation = 5
    for name in ("a", "b"):
        driver.produce(name, 0, {"k": 1, "ts": 1000})
    while any(kind != "node" or key[0] == "j1" for kind, key in driver.ready()):
        driver.advance(next(a for a in driver.ready() if a[0] != "node" or a[1][0] == "j1"), 10)
    receiver = Partition(three, "j2", 0, 1)
    blocks = [decode_block(r) for r in driver.inputs["j2", 0].records]
    (block,) = [b for b in blocks if b.header.sender == "j1" and b.rows is not None]
    zombie = Block(msgspec.structs.replace(block.header, incarnation=4, sequence=block.header.sequence + 1), block.rows)
    receiver.step(0, block)
    receiver.step(1, zombie)
    assert receiver.memo.counts.rows_in[0] == 1
    assert receiver.memo.blocks_fenced == 1
