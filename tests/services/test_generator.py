"""The generator: the same seed writes the same log, what it says about late and broken records is what a reader finds,
and keys join."""

import json
import time
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, TopicPartition

from schemas.errors import JoinmeshError, TopicError
from schemas.mesh import FieldType, Mesh, parse_mesh
from services.generator import Generated, Workload, generate
from services.generator.sequence import sequence
from services.generator.workload import shape_of
from services.runtime.kafka import topic_offsets
from services.runtime.queries import parse_queries

Record = tuple[bytes | None, bytes | None]
PYTHON_TYPES = {
    FieldType.INT64: int,
    FieldType.TIMESTAMP: int,
    FieldType.FLOAT64: float,
    FieldType.STRING: str,
    FieldType.BOOL: bool,
}


def read(mesh: Mesh, topic: str, partitions: int) -> dict[int, list[Record]]:
    """Every record of a topic, by partition, in offset order."""
    ends = [high for _, high in topic_offsets(mesh, {topic: partitions})[topic]]
    consumer = Consumer({"bootstrap.servers": mesh.bootstrap, "group.id": "t", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    records: dict[int, list[Record]] = defaultdict(list)
    deadline = time.monotonic() + 20
    while sum(map(len, records.values())) < sum(ends):
        messages = consumer.consume(10_000, 0.2)
        assert messages or time.monotonic() < deadline
        for message in messages:
            partition = message.partition()
            assert partition is not None
            assert message.error() is None
            records[partition].append((message.key(), message.value()))
    consumer.close()
    return records


def decoded(mesh: Mesh, stream: str, value: bytes | None) -> dict[str, object] | None:
    """The event, or None for what the mesh file's types do not allow."""
    try:
        event = json.loads(value or b"")
    except ValueError:
        return None
    fields = mesh.streams[stream].fields
    for name, kind in fields.items():
        required = name == mesh.streams[stream].event_time
        if event.get(name) is None:
            if required:
                return None
        elif type(event[name]) is not PYTHON_TYPES[kind]:
            return None
    return event if set(event) == set(fields) else None


def late_and_broken(mesh: Mesh, stream: str, records: dict[int, list[Record]]) -> tuple[int, int]:
    """Written anew from the definition, one record at a time."""
    late = broken = 0
    for values in records.values():
        largest: int | None = None
        for _, value in values:
            event = decoded(mesh, stream, value)
            if event is None:
                broken += 1
                continue
            ts = event["ts"]
            assert isinstance(ts, int)
            late += largest is not None and ts < largest - mesh.streams[stream].lateness_ms
            largest = max(ts, largest if largest is not None else ts)
    return late, broken


@pytest.mark.parametrize("keys", ["related", "uniform", "zipf", "sequential"])
def test_says_what_a_reader_finds(shop: Mesh, keys: str) -> None:
    work = Workload(
        count=6_000, keys=keys, out_of_order_ms=1_500, late=0.02, broken=0.03, null=0.02, key_count=500, event_rate=100
    )
    done = generate(shop, work, create=3)
    for stream in done.streams:
        records = read(shop, stream.topic, 3)
        assert sum(map(len, records.values())) == stream.events == 6_000
        assert late_and_broken(shop, stream.stream, records) == (stream.late, stream.broken)
        assert stream.late > 60
        assert stream.broken > 100
        empty = [value for values in records.values() for _, value in values if not value]
        assert 0 < len(empty) < stream.broken / 2  # one way of four


def test_the_same_seed_gives_the_same_log(shop: Mesh, mesh_name: str) -> None:
    work = Workload(count=2_500, out_of_order_ms=500, late=0.01, broken=0.01, null=0.01, seed=5, event_rate=100)
    logs = []
    for run, variant in enumerate([work, replace(work, rate=30_000.0), replace(work, seed=6)]):
        streams = {name: replace(stream, topic=f"{mesh_name}-{run}-{name}") for name, stream in shop.streams.items()}
        mesh = replace(shop, streams=streams)
        generate(mesh, variant, create=2)
        logs.append({name: read(mesh, stream.topic, 2) for name, stream in streams.items()})
    assert logs[0] == logs[1]  # the pace does not change the events
    assert logs[0] != logs[2]


def test_a_stream_alone_is_as_among_the_others(shop: Mesh) -> None:
    work = Workload(count=1_000)
    generate(shop, work, create=2)
    together = read(shop, shop.streams["payments"].topic, 2)
    alone = replace(
        shop, streams={**shop.streams, "payments": replace(shop.streams["payments"], topic=f"{shop.name}-alone")}
    )
    generate(alone, work, streams=["payments"], create=2)
    assert read(alone, f"{shop.name}-alone", 2) == together


def test_related_keys_join_mostly_one_to_one_and_in_time(shop: Mesh) -> None:
    generate(shop, Workload(count=3_000, event_rate=50), create=2)
    times: dict[str, dict[int, list[int]]] = {}
    for name, stream in shop.streams.items():
        times[name] = defaultdict(list)
        for values in read(shop, stream.topic, 2).values():
            for key, value in values:
                event = json.loads(value or b"")
                assert key == str(event["order_id"]).encode()
                times[name][event["order_id"]].append(event["ts"])
    complete = set(times["orders"]) & set(times["payments"]) & set(times["shipments"])
    assert len(complete) > 2_600
    for key in complete:
        assert (
            max(times["shipments"][key]) - min(times["orders"][key]) < 20_000 + 1000
        )  # within the shortest window, a neighbour's key included
        assert min(times["payments"][key]) >= min(times["orders"][key]) - 1000


def test_zipf_is_skewed_and_uniform_is_not(shop: Mesh) -> None:
    shape = shape_of(shop, parse_queries(shop))
    domain = shape.domains["orders", "order_id"]

    def top_share(keys: str) -> float:
        rows = sequence(
            shop.streams["orders"], 0, [domain], shape, Workload(count=20_000, keys=keys, key_count=1_000), 1000.0, 4
        )
        counts = Counter(rows.keys[domain.number].tolist())
        assert len(counts) <= 1_000
        return counts.most_common(1)[0][1] / 20_000

    assert top_share("zipf") > 0.1
    assert top_share("uniform") < 0.01


CHAIN = """
mesh: {mesh}
kafka: {{bootstrap: "{bootstrap}"}}
streams:
  a: {{topic: {mesh}-a, event_time: at, fields: {{at: int64, name: string, ok: bool, word: string, n: int64}}}}
  b: {{topic: {mesh}-b, event_time: at, fields: {{at: timestamp, label: string, price: float64, seen: timestamp}}}}
  c: {{topic: {mesh}-c, event_time: at, fields: {{at: timestamp, cost: float64, seen: timestamp, flag: bool}}}}
queries:
  q: |
    SELECT a.name FROM a [RANGE 10 SECONDS], b [RANGE 10 SECONDS], c [RANGE 10 SECONDS]
    WHERE a.name = b.label AND b.price = c.cost AND b.seen = c.seen AND a.word = 'rare' AND a.n > 5000
"""


def test_keys_of_every_type_and_values_around_the_constants(bootstrap: str, mesh_name: str) -> None:
    mesh = parse_mesh(CHAIN.format(mesh=mesh_name, bootstrap=bootstrap))
    generate(mesh, Workload(count=500, keys="uniform", key_count=20), create=1)
    events = {
        name: [decoded_chain(mesh, name, value) for _, value in read(mesh, f"{mesh_name}-{name}", 1)[0]]
        for name in "abc"
    }
    assert {e["name"] for e in events["a"]} == {e["label"] for e in events["b"]}
    assert {e["price"] for e in events["b"]} == {e["cost"] for e in events["c"]}
    assert {e["seen"] for e in events["b"]} == {e["seen"] for e in events["c"]}
    assert 10 < sum(e["word"] == "rare" for e in events["a"]) < 250
    assert 100 < sum(e["n"] > 5000 for e in events["a"]) < 400


def decoded_chain(mesh: Mesh, stream: str, value: bytes | None) -> dict[str, object]:
    event = json.loads(value or b"")
    for name, kind in mesh.streams[stream].fields.items():
        assert type(event[name]) is PYTHON_TYPES[kind]
    return dict(event)


def test_throughput_is_reported_and_sums_up(shop: Mesh) -> None:
    said: list[str] = []
    done = generate(shop, Workload(count=100), streams=["orders"], create=1, progress=said.append)
    assert isinstance(done, Generated)
    assert done.events == 100
    generate(shop, Workload(count=100), streams=["orders"], progress=said.append)
    assert any("already holds 100 records" in text for text in said)


def test_clear_errors(shop: Mesh) -> None:
    with pytest.raises(TopicError, match="does not create source topics"):
        generate(shop, Workload(count=1))
    with pytest.raises(JoinmeshError, match=r"no stream `oders` in .*did you mean `orders`"):
        generate(shop, Workload(count=1), streams=["oders"])
    with pytest.raises(JoinmeshError, match="--late is a share from 0 to 1, not 5"):
        Workload(late=5)
    with pytest.raises(JoinmeshError, match="unknown --keys foo; use one of uniform"):
        Workload(keys="foo")
