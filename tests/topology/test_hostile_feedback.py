"""Whatever stands for feedback in an input topic, a node refuses it or takes it: no other error, no change by what it
refuses, no lost row."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.block import (
    OF_CONSUMER,
    OF_PRODUCER,
    Block,
    Events,
    FromNode,
    NodeEnded,
    Poll,
    Position,
    Reached,
    Release,
    Resume,
    ResumeDone,
    Suspend,
    decode_block,
    encode_block,
)
from schemas.errors import BlockError
from schemas.mesh import FieldType, Stream
from schemas.rows import Rows
from tests.drawn import restraint_of
from tests.sealed import parts, sealed
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.restraint.suspension.border import changed_tables
from topology.restraint.suspension.suspension import Suspension
from topology.restraint.suspension.wire import LEFT, SHAPE, VALUE
from topology.testing.driver import TopologyDriver

FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "z": FieldType.INT64, "ts": FieldType.TIMESTAMP}
STREAMS = {n: Stream(n, n, FIELDS, "ts", lateness_ms=5) for n in "abcd"}
TEXT = """SELECT a.k FROM a [RANGE 200 MS], b [RANGE 200 MS], c [RANGE 200 MS], d [RANGE 200 MS]
WHERE a.k = b.k AND a.m = c.m AND a.z = d.z AND b.m = d.m"""
PLAN = build_plan(parse_query("q", TEXT, STREAMS), ((("a", "b"), "c"), "d"))
PARTITIONS = 2
FEEDBACK = Settings(feedback="on")
Remake = Callable[[random.Random, Block], Block | bytes | None]


def header(**changes: Any) -> Remake:
    """With these fields changed, where a block has them."""

    def remake(_: random.Random, block: Block) -> Block | None:
        if not all(hasattr(block.header, name) for name in changes):
            return None
        return Block(msgspec.structs.replace(block.header, **changes), block.rows)

    return remake


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
    if block.rows is None:
        return None
    return Block(block.header, Rows.concat([block.rows, block.rows]))


def empty(_: random.Random, block: Block) -> Block | None:
    return None if block.rows is None else Block(block.header, block.rows.slice(0, 0))


def no_rows(_: random.Random, block: Block) -> Block | None:
    return None if isinstance(block.header, Reached | ResumeDone) else Block(block.header)


def with_rows(_: random.Random, block: Block) -> Block | None:
    """A word that brings no values, with some."""
    if not isinstance(block.header, Reached | ResumeDone):
        return None
    one = np.ones(1, np.uint64)
    return Block(block.header, Rows({SHAPE: np.zeros(1, np.int64), VALUE: one, LEFT: one}))


def said(block: Block) -> tuple[Any, ...]:
    """What all words have: epoch, node, partition, partitions, incarnation, sequence."""
    assert isinstance(block.header, FromNode)
    return tuple(getattr(block.header, name) for name in FromNode.__struct_fields__)


def the_other_way(rng: random.Random, block: Block) -> Block:
    """A consumer answers, or a producer asks."""
    if isinstance(block.header, OF_PRODUCER):
        header: FromNode = rng.choice([Suspend(*said(block), 5), Resume(*said(block), 5, 1), Reached(*said(block), 5)])
    else:
        header = rng.choice([Release(*said(block)), Poll(*said(block)), ResumeDone(*said(block), 1)])
    return Block(header, None if isinstance(header, Reached | ResumeDone) else block.rows)


def barrier(_: random.Random, block: Block) -> Block | None:
    """With rows; or of one that sends no rows here."""
    if block.rows is None and isinstance(block.header, OF_PRODUCER):
        return None
    return Block(NodeEnded(*said(block)), block.rows)


def of_a_source(_: random.Random, block: Block) -> Block:
    return Block(Events(1, block.header.sender, 1, (Position(0, 0, 1, 0),)), block.rows)


def a_field_too_few(_: random.Random, block: Block) -> bytes:
    """Such as a resume without its ticket."""
    head, rows = parts(encode_block(block))
    return sealed(msgspec.msgpack.encode(msgspec.msgpack.decode(head)[:-1]), rows)


REMAKES: dict[str, Remake] = {
    "another sender": header(node="j9"),
    "no sender": header(node=""),
    "another epoch": header(epoch=7),
    "epoch 0": header(epoch=0),
    "the other way": the_other_way,
    "sequence -1": header(sequence=-1),
    "sequence 2^62": header(sequence=2**62),
    "incarnation -1": header(incarnation=-1),
    "partition 9": header(partition=9),
    "3 partitions": header(partitions=3),
    "reached tomorrow": header(reached=2**62),
    "reached before all": header(reached=-(2**63)),
    "of a source": of_a_source,
    "a barrier": barrier,
    "shape 99": column(SHAPE, lambda c: c + 99),
    "shape -2": column(SHAPE, lambda c: c * 0 - 2),
    "shapes as floats": column(SHAPE, lambda c: c.astype(np.float64)),
    "signed values": column(VALUE, lambda c: c.astype(np.int64)),
    "ticket -1": header(ticket=-1),
    "ticket 2^62": header(ticket=2**62),
    "a field too few": a_field_too_few,
    "no left part": without(LEFT),
    "no values": without(VALUE),
    "twice": twice,
    "empty": empty,
    "without rows": no_rows,
    "with rows": with_rows,
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


def snapshot(node: Partition) -> Any:
    suspension = restraint_of(node, Suspension)
    assert suspension is not None
    here = [(t.entries.tobytes(), t.intervals.tobytes()) for t in suspension.suspended.tables]
    above = [t.entries.tobytes() for d in suspension.demands if d is not None for t in d.tables]
    return msgspec.msgpack.encode(node.memo), here, above, changed_tables(suspension)


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, int, list[tuple[int, Block]]]]:
    return list(feedback_blocks())


def test_every_kind_is_there(runs: list[Any]) -> None:
    kinds = {block.header.kind for _, _, blocks in runs for _, block in blocks}
    assert {"suspend", "resume", "reached", "release", "resume-done", "poll", "composites", "events"} == kinds


def test_forged_feedback_is_refused_and_changes_nothing(runs: list[Any]) -> None:
    rng, refused = random.Random(1), dict.fromkeys(REMAKES, 0)
    for node_id, partition, blocks in runs:
        node = Partition(PLAN, node_id, partition, PARTITIONS, settings=FEEDBACK)
        for offset, block in blocks:
            if isinstance(block.header, (*OF_CONSUMER, *OF_PRODUCER)):
                before = snapshot(node)
                for name in rng.sample(sorted(REMAKES), 6):
                    bad = REMAKES[name](rng, block)
                    if bad is not None:
                        with pytest.raises(BlockError):
                            node.step(offset, decode_block(bad if isinstance(bad, bytes) else encode_block(bad)))
                        refused[name] += 1
                assert snapshot(node) == before
            node.step(offset, block)
    assert min(refused.values()) > 0, refused


def test_a_mesh_without_feedback_refuses_it(runs: list[Any]) -> None:
    refused = 0
    for node_id, partition, blocks in runs:
        node = Partition(PLAN, node_id, partition, PARTITIONS)
        for offset, block in blocks:
            if isinstance(block.header, (*OF_CONSUMER, *OF_PRODUCER)):
                with pytest.raises(BlockError):
                    node.step(offset, block)
                refused += 1
    assert refused > 50
