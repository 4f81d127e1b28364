"""Whatever stands for feedback in an input topic, a node refuses it or takes it: no other error, no change by what it
refuses, no lost row."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.block import Block, Header, Position, decode_block
from schemas.errors import BlockError
from schemas.mesh import FieldType, Stream
from schemas.rows import Rows
from topology.join.node import JoinNode
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.restraint.suspension.border import changed_tables
from topology.state.lookup import LEFT, SHAPE, TICKET, VALUE
from topology.testing.driver import TopologyDriver

FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "z": FieldType.INT64, "ts": FieldType.TIMESTAMP}
STREAMS = {n: Stream(n, n, FIELDS, "ts", lateness_ms=5) for n in "abcd"}
TEXT = """SELECT a.k FROM a [RANGE 200 MS], b [RANGE 200 MS], c [RANGE 200 MS], d [RANGE 200 MS]
WHERE a.k = b.k AND a.m = c.m AND a.z = d.z AND b.m = d.m"""
PLAN = build_plan(parse_query("q", TEXT, STREAMS), ((("a", "b"), "c"), "d"))
PARTITIONS = 2
Remake = Callable[[random.Random, Block], Block | None]


def header(**changes: Any) -> Remake:
    return lambda _, block: Block(msgspec.structs.replace(block.header, **changes), block.rows)


def column(name: str, change: Callable[[Any], Any]) -> Remake:
    def remake(_: random.Random, block: Block) -> Block | None:
        return (
            None if block.rows is None else Block(block.header, block.rows.with_column(name, change(block.rows[name])))
        )

    return remake


def without(name: str) -> Remake:
    def remake(_: random.Random, block: Block) -> Block | None:
        return (
            None
            if block.rows is None
            else Block(block.header, Rows({n: c for n, c in block.rows.columns.items() if n != name}))
        )

    return remake


def twice(_: random.Random, block: Block) -> Block | None:
    if block.rows is None or block.header.kind == "resume-done":
        return None
    return Block(block.header, Rows.concat([block.rows, block.rows]))


def empty(_: random.Random, block: Block) -> Block | None:
    return None if block.rows is None else Block(block.header, block.rows.slice(0, 0))


def no_rows(_: random.Random, block: Block) -> Block | None:
    return None if block.header.kind == "watermark" else Block(block.header)


REMAKES: dict[str, Remake] = {
    "another sender": header(sender="j9"),
    "no sender": header(sender=""),
    "another epoch": header(epoch=7),
    "side 2": header(side=2),
    "sequence -1": header(sequence=-1),
    "partition 9": header(sender_partition=9),
    "3 partitions": header(sender_partitions=3),
    "watermark of tomorrow": header(watermark=2**62),
    "positions": header(positions=(Position(0, 0, 1, 0),)),
    "a kind of tomorrow": header(kind="barrier"),
    "shape 99": column(SHAPE, lambda c: c + 99),
    "shape -2": column(SHAPE, lambda c: c * 0 - 2),
    "shapes as floats": column(SHAPE, lambda c: c.astype(np.float64)),
    "signed values": column(VALUE, lambda c: c.astype(np.int64)),
    "ticket -1": column(TICKET, lambda c: c * 0 - 1),
    "no ticket": without(TICKET),
    "no left part": without(LEFT),
    "no values": without(VALUE),
    "twice": twice,
    "empty": empty,
    "without rows": no_rows,
}


def feedback_blocks() -> Iterator[tuple[str, int, list[tuple[int, Block]]]]:
    """Inputs of a run with much feedback: (node, partition, blocks in order)."""
    rng = random.Random(5)
    driver = TopologyDriver(PLAN, STREAMS, partitions=PARTITIONS, source_partitions=1, feedback=True)
    for i in range(500):
        stream = rng.choice("abc") if rng.random() < 0.93 else "d"
        driver.produce(
            stream, 0, {"k": rng.randrange(3), "m": rng.randrange(3), "z": rng.randrange(6), "ts": 1_000 + 3 * i}
        )
        driver.run(rng.randrange, most=3)
    for (node, partition), log in driver.inputs.items():
        yield node, partition, [(i, decode_block(data)) for i, data in enumerate(log.records)]


def about_demand(h: Header, node: str) -> bool:
    return h.kind in ("suspend", "resume", "release", "resume-done", "poll") or (
        h.kind == "watermark" and h.sender == PLAN.node(node).target
    )


def snapshot(node: JoinNode) -> Any:
    assert node.feedback is not None
    here = [(t.entries.tobytes(), t.intervals.tobytes()) for t in node.feedback.suspended.tables]
    above = [t.entries.tobytes() for d in node.feedback.demands if d is not None for t in d.tables]
    return msgspec.msgpack.encode(node.memo), here, above, changed_tables(node.feedback)


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, int, list[tuple[int, Block]]]]:
    return list(feedback_blocks())


def test_every_kind_is_there(runs: list[Any]) -> None:
    kinds = {block.header.kind for _, _, blocks in runs for _, block in blocks}
    assert {"suspend", "resume", "release", "resume-done", "poll", "rows", "watermark"} <= kinds


def test_forged_feedback_is_refused_and_changes_nothing(runs: list[Any]) -> None:
    rng, refused = random.Random(1), dict.fromkeys(REMAKES, 0)
    for node_id, partition, blocks in runs:
        node = JoinNode(PLAN, node_id, partition, PARTITIONS, feedback=True)
        for offset, block in blocks:
            if about_demand(block.header, node_id):
                before = snapshot(node)
                for name in rng.sample(sorted(REMAKES), 6):
                    bad = REMAKES[name](rng, block)
                    if bad is not None:
                        with pytest.raises(BlockError):
                            node.step(offset, bad)
                        refused[name] += 1
                assert snapshot(node) == before
            node.step(offset, block)
    assert min(refused.values()) > 0, refused


def test_a_mesh_without_feedback_refuses_it(runs: list[Any]) -> None:
    refused = 0
    for node_id, partition, blocks in runs:
        node = JoinNode(PLAN, node_id, partition, PARTITIONS)
        for offset, block in blocks:
            if block.header.kind in ("suspend", "resume", "release", "resume-done", "poll"):
                with pytest.raises(BlockError):
                    node.step(offset, block)
                refused += 1
    assert refused > 50
