"""Whatever stands in an inner topic, a receiver sets it aside or takes it: no other error, no change of state, no wrong
row.

Good blocks of a small mesh are mixed with hostile ones: damaged, cut, of another version, or whole with a right
checksum and wrong in one respect. Every hostile one is refused with `BlockError`, leaves memo and segments as they
were, and the good ones give exactly what they give alone.
"""

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition

from schemas import topics
from schemas.block import (
    Block,
    Composites,
    Events,
    FromNode,
    FromSource,
    Header,
    Heralds,
    NodeEnded,
    PlanChanged,
    Poll,
    Position,
    Reached,
    Release,
    Resume,
    ResumeDone,
    SourceEnded,
    Step,
    Suspend,
    decode_block,
    encode_block,
)
from schemas.control import PlanPublished, encode_control
from schemas.errors import BlockError, StateError
from schemas.mesh import FieldType, Mesh, Stream
from schemas.rows import Rows, as_arrow, decode_rows
from services.join_node.host import PartitionHost
from services.runtime.control import plan_digest
from services.runtime.report import Durations
from services.runtime.store import Cache, NodeStore
from services.simulation.broker import Record, SimBroker, SimConsumer, SimMessage, SimSender, SimTransactionalProducer
from services.simulation.processes import Disk
from services.sink.loop import Sink
from tests.sealed import parts, sealed
from topology.join.partition import Partition
from topology.message.effects import Send
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.results.results import SequenceFilter
from topology.state.window import HASH, OFFSET_BITS
from topology.testing.driver import TopologyDriver

PARTITIONS, SOURCE_PARTITIONS = 2, 2
FIELDS = {
    "k": FieldType.INT64,
    "s": FieldType.STRING,
    "f": FieldType.FLOAT64,
    "b": FieldType.BOOL,
    "v": FieldType.INT64,
    "ts": FieldType.TIMESTAMP,
}
TEXT = """SELECT x.v, y.s AS s, z.b AS b, x.f + z.f AS total
FROM r0 [RANGE 300 MS] AS x, r1 [RANGE 200 MS] AS y, r2 [RANGE 400 MS] AS z
WHERE x.k = y.k AND x.s = y.s AND y.f = z.f"""
STREAMS = {n: Stream(n, n, FIELDS, "ts", lateness_ms=20) for n in ("r0", "r1", "r2")}
QUERY = parse_query("q", TEXT, STREAMS)
PLAN = build_plan(QUERY, (("x", "y"), "z"))
MESH = Mesh("m", {"bootstrap.servers": "none"}, PARTITIONS, STREAMS, {"q": TEXT})
PUBLISHED = PlanPublished(
    "q", 1, TEXT, "((x y) z)", plan_digest(MESH, PLAN), 0, dict.fromkeys(STREAMS, SOURCE_PARTITIONS)
)
HUGE = 2**62
Remake = Callable[[random.Random, Block], Block | None]


@dataclass
class Good:
    """Inputs of a run without faults: of one partition of each node, and of the sink."""

    inputs: dict[str, list[bytes]]
    out: list[bytes]
    results: list[tuple[str, dict[str, Any], int]]


@pytest.fixture(scope="module")
def good() -> Good:
    rng = random.Random(7)
    driver = TopologyDriver(PLAN, STREAMS, partitions=PARTITIONS, source_partitions=SOURCE_PARTITIONS)
    for i in range(180):
        values = {
            "k": rng.choice((0, 1)),
            "s": rng.choice(("a", "longer than sixteen bytes", "é")),
            "f": rng.choice((0.0, 1.5)),
            "b": rng.choice((True, False, None)),
            "v": rng.choice((1, 2, None)),
            "ts": 1_000 + 5 * i,
        }
        driver.produce(f"r{i % 3}", rng.randrange(SOURCE_PARTITIONS), values)
    driver.run(rng.randrange, most=4)
    # 0.0 and 1.5 fall into different partitions or into one; take the one with more.
    inputs = {node: max((driver.inputs[node, p].records for p in range(PARTITIONS)), key=len) for node in ("j1", "j2")}
    out = max((driver.out[p].records for p in range(PARTITIONS)), key=len)
    made = Good(inputs, out, driver.results)
    assert all(len(records) > 20 for records in (*inputs.values(), out))
    return made


def partition_of(good: Good, node: str) -> int:
    """Which partition the chosen records are of."""
    block = next(b for b in map(decode_block, good.inputs[node]) if b.rows is not None and len(b.rows))
    assert block.rows is not None
    return int(block.rows[HASH][0] % np.uint64(PARTITIONS))


# -- hostile blocks


def header(**changes: Any) -> Remake:
    """With these fields changed, where a block has them."""

    def remake(_: random.Random, block: Block) -> Block | None:
        if not all(hasattr(block.header, name) for name in changes):
            return None
        return Block(msgspec.structs.replace(block.header, **changes), block.rows)

    return remake


def sender(name: str) -> Remake:
    def remake(_: random.Random, block: Block) -> Block:
        field = "alias" if isinstance(block.header, FromSource) else "node"
        return Block(msgspec.structs.replace(block.header, **{field: name}), block.rows)

    return remake


def of_kind(kind: type[Header], *said: Any) -> Remake:
    """The same under another header, with these fields behind those that all of its sort have."""

    def remake(_: random.Random, block: Block) -> Block | None:
        header, rows = block.header, block.rows
        if isinstance(header, kind) or (rows is None and issubclass(kind, SourceEnded | NodeEnded)):
            return None  # it may be as good as the block was
        first: tuple[Any, ...] = (header.epoch,)
        if issubclass(kind, FromSource):
            first += (header.sender, SOURCE_PARTITIONS, (Position(0, 0, 1, 5),))
        elif issubclass(kind, FromNode):
            first += (header.sender, 0, PARTITIONS, 1, 1 << 40)
        return Block(kind(*first, *said), rows)

    return remake


def barrier_of_the_other_sort(_: random.Random, block: Block) -> Block:
    """An input that is a stream is ended by ingest, one that is a join by that."""
    epoch, name = block.header.epoch, block.header.sender
    if isinstance(block.header, FromSource):
        return Block(NodeEnded(epoch, name, 0, PARTITIONS, 1, 1 << 40))
    return Block(SourceEnded(epoch, name, SOURCE_PARTITIONS, (Position(0, 0, 1, 5),)))


def column(change: Callable[[random.Random, str, pa.Array], Any], names: Callable[[str], bool]) -> Remake:
    """Replace a column that fits."""

    def remake(rng: random.Random, block: Block) -> Block | None:
        fitting = [n for n in block.rows.columns if names(n)] if block.rows is not None and len(block.rows) else []
        if block.rows is None or not fitting:
            return None
        name = rng.choice(fitting)
        return Block(block.header, block.rows.with_column(name, change(rng, name, as_arrow(block.rows[name]))))

    return remake


def is_part(name: str) -> bool:
    return name[0] in "#@"


def is_time(name: str) -> bool:
    return name[0] == "@"


def is_id(name: str) -> bool:
    return name[0] == "#" and name != HASH


def with_null(_: random.Random, __: str, array: pa.Array) -> Any:
    return pa.array([None, *array.to_pylist()[1:]], array.type)


def with_first(value: Any) -> Callable[[random.Random, str, pa.Array], Any]:
    def change(_: random.Random, __: str, array: pa.Array) -> Any:
        return np.asarray([value, *array.to_pylist()[1:]], array.type.to_pandas_dtype())

    return change


def other_type(rng: random.Random, _: str, array: pa.Array) -> Any:
    types = [
        pa.int32(),
        pa.uint8(),
        pa.float32(),
        pa.large_binary(),
        pa.timestamp("ms"),
        pa.null(),
        pa.list_(pa.int64()),
        pa.date64(),
    ]
    if rng.random() < 0.3:
        return array.dictionary_encode()
    if rng.random() < 0.3 and array.type != pa.large_utf8():
        return pa.array([str(v) for v in array.to_pylist()], pa.large_utf8())
    return pa.nulls(len(array), rng.choice(types))


def without_column(rng: random.Random, block: Block) -> Block | None:
    if block.rows is None:
        return None
    gone = rng.choice(list(block.rows.columns))
    return Block(block.header, block.rows.select([n for n in block.rows.columns if n != gone]))


def with_more_columns(_: random.Random, block: Block) -> Block | None:
    return (
        None
        if block.rows is None
        else Block(block.header, block.rows.with_column("x.more", np.zeros(len(block.rows), np.int64)))
    )


def renamed_column(rng: random.Random, block: Block) -> Block | None:
    if block.rows is None:
        return None
    old = rng.choice(list(block.rows.columns))
    return Block(
        block.header, Rows({("w" + n if n == old else n): c for n, c in block.rows.columns.items()}, len(block.rows))
    )


def for_another_partition(_: random.Random, block: Block) -> Block | None:
    if block.rows is None or HASH not in block.rows.columns or not len(block.rows):
        return None
    return Block(block.header, block.rows.with_column(HASH, block.rows[HASH] + np.uint64(1)))


def wrong_hash(_: random.Random, block: Block) -> Block | None:
    """In the right partition, but not the hash of the row's key: would join rows whose keys differ."""
    if block.rows is None or HASH not in block.rows.columns or not len(block.rows):
        return None
    return Block(block.header, block.rows.with_column(HASH, block.rows[HASH] + np.uint64(2 * PARTITIONS)))


def positions(change: Callable[[Position], Position]) -> Remake:
    def remake(_: random.Random, block: Block) -> Block | None:
        if not isinstance(block.header, FromSource):
            return None
        first, *rest = block.header.positions
        return Block(msgspec.structs.replace(block.header, positions=(change(first), *rest)), block.rows)

    return remake


def outside_its_positions(_: random.Random, block: Block) -> Block | None:
    """A row that the block's positions do not speak of: it would escape the check for repeats."""
    if not isinstance(block.header, FromSource) or block.rows is None or not len(block.rows):
        return None
    name, position = "#" + block.header.sender, block.header.positions[0]
    ids = block.rows.ints(name).copy()
    ids[0] = position.partition << OFFSET_BITS | position.next
    return Block(block.header, block.rows.with_column(name, ids))


def row_twice(_: random.Random, block: Block) -> Block | None:
    """Of a source: its ids are the block's own, so it can be seen here."""
    if not isinstance(block.header, FromSource) or block.rows is None or not len(block.rows):
        return None
    return Block(block.header, block.rows.take(np.asarray([0, *range(len(block.rows))])))


def more_partitions(_: random.Random, block: Block) -> Block | None:
    """Of a node: it has as many as the mesh."""
    return (
        None
        if isinstance(block.header, FromSource)
        else Block(msgspec.structs.replace(block.header, partitions=1_000), block.rows)
    )


def steps(change: Callable[[int, int], tuple[Step, ...]]) -> Remake:
    """With these steps, made from the block's sequence and number of rows."""

    def remake(_: random.Random, block: Block) -> Block | None:
        if not isinstance(block.header, Composites):
            return None
        count = 0 if block.rows is None else len(block.rows)
        return Block(msgspec.structs.replace(block.header, steps=change(block.header.sequence, count)), block.rows)

    return remake


REMAKES: dict[str, Remake] = {
    "unknown sender": sender("nobody"),
    "empty sender": sender(""),
    "epoch 2": header(epoch=2),
    "epoch 0": header(epoch=0),
    "as events": of_kind(Events),
    "as heralds": of_kind(Heralds, 0),
    "as heralds of number 2": of_kind(Heralds, 2, HUGE),
    "as heralds of number -1": of_kind(Heralds, -1, 5),
    "as the end of a source": of_kind(SourceEnded),
    "as composites": of_kind(Composites, 5),
    "as the end of a node": of_kind(NodeEnded),
    "as the end of the other sort": barrier_of_the_other_sort,
    "as a plan of no epoch": lambda _, block: Block(PlanChanged(0, b""), block.rows),
    "as a plan of epoch 2^62": lambda _, block: Block(PlanChanged(HUGE, b""), block.rows),
    "as a plan with rows": lambda _, block: None if block.rows is None else Block(PlanChanged(2, b""), block.rows),
    "as suspend": of_kind(Suspend, 5),
    "as resume": of_kind(Resume, 5, 1),
    "as reached": of_kind(Reached, 5),
    "as resume-done": of_kind(ResumeDone, 1),
    "as release": of_kind(Release),
    "as poll": of_kind(Poll),
    "sequence -1": header(sequence=-1),
    "sequence 2^62": header(sequence=HUGE),
    "sequence 2^64-1": header(sequence=2**64 - 1),
    "partition -1": header(node="j1", partition=-1),
    "partition 99": header(node="j1", partition=99),
    "no partitions": header(partitions=0),
    "more partitions than the mesh has": more_partitions,
    "incarnation -1": header(incarnation=-1),
    "incarnation 2^63": header(incarnation=2**63),
    "watermark 2^62": header(watermark=HUGE),
    "watermark -2^63": header(watermark=-(2**63)),
    "steps of more rows": steps(lambda at, rows: (Step(at, rows + 1),)),
    "steps of fewer rows": steps(lambda at, rows: (Step(at, max(1, rows) + 2), Step(at + 1, -3))),
    "a step later than the block": steps(lambda at, rows: (Step(at + 1, max(1, rows)),)),
    "a step before all": steps(lambda _, rows: (Step(-1, max(1, rows)),)),
    "steps out of order": steps(lambda at, rows: (Step(at, rows - 1), Step(at - 1, 1)) if rows > 1 else (Step(at, 7),)),
    "a step without rows": steps(lambda at, rows: (Step(at - 1, 0), Step(at, max(1, rows)))),
    "positions missing": header(positions=()),
    "position of partition -1": positions(lambda p: msgspec.structs.replace(p, partition=-1)),
    "position of partition 99": positions(lambda p: msgspec.structs.replace(p, partition=99)),
    "position backwards": positions(lambda p: msgspec.structs.replace(p, first=p.next + 1)),
    "position negative": positions(lambda p: msgspec.structs.replace(p, first=-1)),
    "position 2^48": positions(lambda p: msgspec.structs.replace(p, next=1 << 48)),
    "position's watermark": positions(lambda p: msgspec.structs.replace(p, watermark=HUGE)),
    "column missing": without_column,
    "column too many": with_more_columns,
    "column renamed": renamed_column,
    "column of another type": column(other_type, lambda _: True),
    "null in a part": column(with_null, is_part),
    "time too large": column(with_first(2**63 - 1), is_time),
    "time negative": column(with_first(-5), is_time),
    "id negative": column(with_first(-1), is_id),
    "a row twice": row_twice,
    "another partition's rows": for_another_partition,
    "wrong hash": wrong_hash,
    "row outside its positions": outside_its_positions,
}


def stream_of(batches: list[pa.RecordBatch], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def hostile_bytes(rng: random.Random, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Damaged, cut, foreign, and rows that are not those of one block."""
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        i = rng.randrange(len(data))
        flipped[i] ^= 1 << rng.randrange(8)
    if flipped != data:
        yield "flipped bits", bytes(flipped)
    yield "cut", data[: rng.randrange(len(data))]
    yield "empty", b""
    yield "too long", data + rng.randbytes(rng.randint(1, 9))
    yield "another version", data[:3] + bytes([rng.choice((0, 3, 255))]) + data[4:]
    yield "noise", rng.randbytes(rng.randint(1, 200))
    yield "large noise", b"JMB\x02" + bytes(1 << 18)
    head, rows = parts(data)
    yield "noise for a header", sealed(rng.randbytes(20), rows)
    yield "header is a number", sealed(b"\x05", rows)
    yield "header too short", sealed(msgspec.msgpack.encode(["events", 1, "x"]), rows)
    yield "noise for rows", sealed(head, rng.randbytes(rng.randint(1, 300)))
    yield "absurd header length", sealed(head, rows, size=2**31)
    fields = msgspec.msgpack.decode(head)
    yield "a kind of tomorrow", sealed(msgspec.msgpack.encode(["completion", *fields[1:]]), rows)
    yield "a kind of yesterday", sealed(msgspec.msgpack.encode(["rows", *fields[1:]]), rows)
    yield "no kind", sealed(msgspec.msgpack.encode(fields[1:]), rows)
    yield "header cut", sealed(msgspec.msgpack.encode(fields[:4]), rows)
    if rows:
        columns = {name: as_arrow(column) for name, column in decode_rows(rows).columns.items()}
        batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        for form, encoded in (("rows", rows), ("Arrow", stream_of([batch], batch.schema))):
            yield f"{form} cut", sealed(head, encoded[: rng.randint(1, len(encoded) - 9)])
            absurd = bytearray(encoded)
            absurd[4:8] = struct.pack("<i", rng.choice((2**31 - 1, -5, 1 << 20)))
            yield f"absurd length of {form}", sealed(head, bytes(absurd))
        yield "rows twice", sealed(head, rows + rows)
        yield "no batch", sealed(head, stream_of([], batch.schema))
        yield "two batches", sealed(head, stream_of([batch, batch], batch.schema))
        twice = pa.RecordBatch.from_arrays(
            [*batch.columns, batch.columns[0]], [*batch.schema.names, batch.schema.names[0]]
        )
        yield "a column twice", sealed(head, stream_of([twice], twice.schema))


def hostile(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """One hostile block made from a good one."""
    while True:
        if rng.random() < 0.3:
            return rng.choice(list(hostile_bytes(rng, data)))
        name = rng.choice(list(REMAKES))
        made = REMAKES[name](rng, decode_block(data))
        if made is not None:
            return name, encode_block(made)


# -- receivers


def emitted(sends: list[Send]) -> Counter[tuple[Any, ...]]:
    """The rows that were sent, as values."""
    found: Counter[tuple[Any, ...]] = Counter()
    for send in sends:
        if send.block.rows is not None:
            names = sorted(n for n in send.block.rows.columns)
            found.update(zip(*[as_arrow(send.block.rows[n]).to_pylist() for n in names], strict=True))
    return found


def snapshot(node: Partition) -> tuple[bytes, list[Any]]:
    return msgspec.msgpack.encode(node.memo), [list(state.segments()) for state in node.states]


@pytest.mark.parametrize("node_id", ["j1", "j2"])
def test_a_step_refuses_and_goes_on(good: Good, node_id: str) -> None:
    rng, records = random.Random(node_id), good.inputs[node_id]
    partition = partition_of(good, node_id)
    plain = Partition(PLAN, node_id, partition, PARTITIONS)
    wanted = emitted([s for i, data in enumerate(records) for s in plain.step(i, decode_block(data)).sends])
    mixed = Partition(PLAN, node_id, partition, PARTITIONS)
    sends: list[Send] = []
    refused: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    offset = 0
    for data in records:
        for _ in range(14):
            name, bad = hostile(rng, rng.choice(records))
            before = snapshot(mixed)
            try:
                mixed.step(offset, decode_block(bad))
                wrong[f"{name}: taken"] += 1
            except BlockError:
                refused[name] += 1
                assert snapshot(mixed) == before, f"{name}: refused, but the state changed"
            except Exception as error:
                wrong[f"{name}: {type(error).__name__}: {error}"] += 1
            if snapshot(mixed) != before:  # go on from a clean one, so that one finding does not hide the next
                mixed = Partition(PLAN, node_id, partition, PARTITIONS)
                sends = []
                for i, earlier in enumerate(records[: records.index(data)]):
                    sends += mixed.step(i, decode_block(earlier)).sends
            offset += 1
        sends += mixed.step(offset, decode_block(data)).sends
        offset += 1
    assert not wrong, f"not refused: {dict(wrong)}"
    assert emitted(sends) == wanted
    assert len(refused) > 40
    assert sum(refused.values()) > 500


def test_a_host_sets_aside_and_counts(good: Good) -> None:
    rng, records = random.Random(2), good.inputs["j2"]
    partition = partition_of(good, "j2")
    broker, disk = SimBroker(), Disk(strict=True)
    sender = SimSender(broker)
    host = PartitionHost(
        MESH, [PUBLISHED], "j2", partition, NodeStore(disk, partition, Cache(), 1), sender, Durations()
    )
    plain = Partition(PLAN, "j2", partition, PARTITIONS)
    wanted = emitted([s for i, data in enumerate(records) for s in plain.step(i, decode_block(data)).sends])
    offset = bad_ones = 0
    for data in records:
        for _ in range(6):
            _, bad = hostile(rng, rng.choice(records))
            host.take(offset, bad)
            offset, bad_ones = offset + 1, bad_ones + 1
        host.take(offset, data)
        host.commit()
        offset += 1
        sender.flush()
        if rng.random() < 0.1:
            dead = host.dead
            host = PartitionHost(
                MESH, [PUBLISHED], "j2", partition, NodeStore(disk, partition, Cache(), 1), sender, Durations()
            )
            host.dead = dead
            assert host.next_offset("in") == offset
    once = SequenceFilter()  # a restart sends its outbox again
    sent = [Send("out", p, decode_block(r.value or b"")) for p, r in broker.topic(topics.query_out("m", "q"))]
    new = [(s, once.unseen(s.block)) for s in sent]
    assert emitted([Send("out", s.partition, Block(s.block.header, rows)) for s, rows in new]) == wanted
    letters = [msgspec.json.decode(r.value or b"") for _, r in broker.topic(topics.dead("m"))]
    assert host.dead == bad_ones == len({letter["offset"] for letter in letters})


def test_the_sink_sets_aside_and_counts(good: Good) -> None:
    rng, broker = random.Random(3), SimBroker()
    producer = SimTransactionalProducer(broker, "sink")
    producer.init_transactions()
    consumer = SimConsumer(broker, "sink", rng, eof=False)
    sink = Sink(MESH, PLAN, 1, consumer, producer, None)
    source = topics.query_out("m", "q")
    first = decode_block(good.out[0]).header
    assert isinstance(first, FromNode)
    partition = first.partition
    sink._assigned(consumer, [TopicPartition(source, partition)])  # type: ignore[arg-type]
    offset = bad_ones = 0
    unrefused: Counter[str] = Counter()
    for data in good.out:
        messages = []
        for _ in range(8):
            name, bad = hostile(rng, data)
            before = sink.counts["dead"]
            sink._take([SimMessage((source, partition), offset, Record(bad))])  # type: ignore[list-item]
            unrefused[name] += sink.counts["dead"] == before
            offset, bad_ones = offset + 1, bad_ones + 1
        messages.append(SimMessage((source, partition), offset, Record(data)))
        messages.append(SimMessage((source, partition), offset + 1, Record(data)))  # a repeat
        offset += 2
        sink._take(messages)  # type: ignore[arg-type]
        sink._close_transaction()
    assert not +unrefused, f"not refused: {dict(+unrefused)}"
    assert sink.counts["dead"] == bad_ones
    assert len(list(broker.topic(topics.dead("m")))) == bad_ones
    wanted = Counter(
        key
        for data in good.out
        if (rows := decode_block(data).rows) is not None
        for key in sink.encoder.encode(rows).keys
    )
    found = Counter(str(r.key) for _, r in broker.topic(topics.results("m", "q")))
    assert found == wanted
    assert set(found) <= {key for key, _, _ in good.results}


@pytest.mark.parametrize("node_id", ["j1", "j2"])
def test_damage_under_a_right_checksum_is_never_another_error(good: Good, node_id: str) -> None:
    """What a checksum cannot see may pass as other data, but must not end the process."""
    rng, records = random.Random(node_id), good.inputs[node_id]
    partition = partition_of(good, node_id)
    node = Partition(PLAN, node_id, partition, PARTITIONS)
    outcomes: Counter[str] = Counter()
    with_rows = [data for data in records if parts(data)[1]]
    for _ in range(1_500):
        head, rows = parts(rng.choice(with_rows))
        changed = bytearray(rows)
        for _ in range(rng.choice((1, 1, 3, 20))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            node.step(0, decode_block(sealed(head, bytes(changed))))
            outcomes["taken"] += 1
            node = Partition(PLAN, node_id, partition, PARTITIONS)
        except BlockError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 200


def test_damage_in_a_header_under_a_right_checksum_is_never_another_error(good: Good) -> None:
    """Found by noise with one of many hash seeds: a sender's name that is not UTF-8."""
    rng, outcomes = random.Random(5), Counter[str]()
    head, rows = parts(good.inputs["j2"][0])
    for i in range(20_000):
        changed = bytearray(head if i % 2 else head[:1] + rng.randbytes(20))
        for _ in range(rng.choice((1, 2, 4))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            decode_block(sealed(bytes(changed), rows))
            outcomes["taken"] += 1
        except BlockError as error:
            outcomes["utf-8" if "utf-8" in str(error) else "refused"] += 1
    assert min(outcomes.values()) > 100
    assert len(outcomes) == 3


def test_whatever_stands_for_a_plan_is_set_aside(good: Good) -> None:
    """What somebody announces by mistake is a dead letter and the plan goes on; a plan after it still counts."""
    broker = SimBroker()
    sender, disk = SimSender(broker), Disk(strict=True)
    host = PartitionHost(MESH, [PUBLISHED], "j2", 0, NodeStore(disk, 0, Cache(), 1), sender, Durations())
    plan = encode_control(msgspec.structs.replace(PUBLISHED, epoch=2))
    bad = [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[" * 100_000,
        b'{"kind":"plan","query":"\xff"}',
        b'{"kind":"tomorrow"}',
        plan[:-1],
        encode_control(msgspec.structs.replace(PUBLISHED, epoch=2, text="SELECT")),
        encode_control(msgspec.structs.replace(PUBLISHED, epoch=2, tree="(x y")),
        good.out[0],
    ]
    before = msgspec.msgpack.encode(host.memo.live)
    for offset, data in enumerate(bad):
        host.take(offset, encode_block(Block(PlanChanged(2, data))))
        assert msgspec.msgpack.encode(host.memo.live) == before
    host.take(len(bad), encode_block(Block(PlanChanged(2, plan))))
    host.commit()
    sender.flush()
    assert host.memo.live == [1, 2]
    assert host.dead == len(bad) == len(list(broker.topic(topics.dead("m"))))
    again = PartitionHost(MESH, [PUBLISHED], "j2", 0, NodeStore(disk, 0, Cache(), 1), sender, Durations())
    assert again.next_offset("in") == len(bad) + 1
    assert again.memo.live == [1, 2]
    with pytest.raises(StateError, match="differs from the one that was published"):
        again.take(
            len(bad) + 1,
            encode_block(Block(PlanChanged(3, encode_control(msgspec.structs.replace(PUBLISHED, digest="x"))))),
        )


def test_a_record_without_a_value_is_refused(good: Good) -> None:
    """A tombstone in an inner topic."""
    sender = SimSender(SimBroker())
    host = PartitionHost(MESH, [PUBLISHED], "j2", 0, NodeStore(Disk(strict=True), 0, Cache(), 1), sender, Durations())
    host.take(0, None)  # type: ignore[arg-type]
    assert host.dead == 1
    assert host.next_offset("in") == 1
    assert good.inputs


def test_headers_of_any_numbers_are_refused_or_taken(good: Good) -> None:
    """Header fields drawn at random, checksum right: an error of ours, or a block."""
    rng = random.Random(9)
    data = good.inputs["j2"][0]
    numbers = [0, 1, 2, -1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1]
    kinds: list[Any] = [Events, Heralds, SourceEnded, PlanChanged, Composites, NodeEnded]
    kinds += [Suspend, Resume, Reached, ResumeDone, Release, Poll]
    senders, refused = ["z", "j1", "", "j2", "x" * 1000], 0
    for _ in range(2_000):
        kind = rng.choice(kinds)
        drawn: dict[str, Any] = {"alias": rng.choice(senders), "node": rng.choice(senders), "plan": b""}
        drawn["positions"] = [[rng.choice(numbers) for _ in range(4)] for _ in range(rng.randrange(3))]
        drawn["steps"] = [[rng.choice(numbers) for _ in range(2)] for _ in range(rng.randrange(3))]
        fields = [kind.__struct_config__.tag]
        fields += [drawn.get(name, rng.choice(numbers)) for name in kind.__struct_fields__]
        node = Partition(PLAN, "j2", 0, PARTITIONS)
        try:
            node.step(0, decode_block(sealed(msgspec.msgpack.encode(fields), rng.choice((b"", parts(data)[1])))))
        except BlockError:
            refused += 1
        msgspec.msgpack.encode(node.memo)  # and what it leaves can be stored
    assert refused > 1_500
    assert isinstance(decode_block(data).header, Header)
