"""Topics: the missing ones are created right, and one that would lose data is refused with what was found, needed and
to do."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from schemas import topics
from schemas.errors import MachineError, TopicError
from schemas.mesh import Mesh
from services.runtime.kafka import Topic, describe_topics, ensure_topics, left_open, source_partitions, topic_offsets
from services.runtime.queries import keep_ms, parse_queries, services_of, topics_of

CreateTopics = Callable[..., None]


def test_creates_what_is_missing_once(shop: Mesh) -> None:
    wanted = topics_of(shop, parse_queries(shop))
    said: list[str] = []
    assert ensure_topics(shop, wanted, said.append) == [topic.name for topic in wanted]
    assert said[0].startswith(f"creating {len(wanted)} topics: ")
    assert ensure_topics(shop, wanted, said.append) == []
    found = describe_topics(shop, [topic.name for topic in wanted])
    node_in = found[topics.node_in(shop.name, "paid_orders", "j2")]
    assert node_in.partitions == 4
    assert int(node_in.config["retention.ms"]) == 60_000 + 3_000 + topics.MARGIN_MS
    assert found[topics.results(shop.name, "paid_orders")].config["retention.ms"] == "-1"
    assert topic_offsets(shop, {node_in.name: 4}) == {node_in.name: [(0, 0)] * 4}


@pytest.mark.parametrize(
    ("partitions", "config", "says"),
    [
        (
            3,
            {"retention.ms": "-1"},
            r"topic (\S+) has 3 partitions, 4 needed: set `partitions: 3` .*kafka-topics.sh .* --delete --topic",
        ),
        (
            4,
            {"retention.ms": "1000"},
            (
                r"topic (\S+) has retention.ms=1000, \d+ or more needed: run kafka-configs.sh .* --add-config"
                r" retention.ms=\d+"
            ),
        ),
        (
            4,
            {"cleanup.policy": "compact", "retention.ms": "-1"},
            r"topic (\S+) has cleanup.policy=compact, delete needed: run kafka-configs.sh",
        ),
    ],
)
def test_refuses_a_topic_that_would_lose_data(
    shop: Mesh, create_topics: CreateTopics, partitions: int, config: dict[str, str], says: str
) -> None:
    name = topics.query_out(shop.name, "paid_orders")
    create_topics(name, partitions=partitions, config=config)
    with pytest.raises(TopicError, match=says) as caught:
        ensure_topics(shop, topics_of(shop, parse_queries(shop)), lambda _: None)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_longer_retention_is_welcome(shop: Mesh, create_topics: CreateTopics) -> None:
    wanted = topics_of(shop, parse_queries(shop))
    out = next(topic for topic in wanted if topic.name == topics.query_out(shop.name, "paid_orders"))
    create_topics(out.name, config={**out.config, "retention.ms": str(10**12)})
    assert out.name not in ensure_topics(shop, wanted, lambda _: None)


def test_source_topics_belong_to_their_producers(shop: Mesh, create_topics: CreateTopics) -> None:
    create_topics(shop.streams["orders"].topic, partitions=2)
    assert source_partitions(shop, [shop.streams["orders"]]) == {"orders": 2}
    with pytest.raises(
        TopicError,
        match=(
            r"source topic \S+-payments of stream payments is not on .*joinmesh does not create source topics.*joinmesh"
            r" generate"
        ),
    ):
        source_partitions(shop)


def test_a_broker_that_does_not_answer_is_named(shop: Mesh) -> None:
    nowhere = replace(shop, kafka={"bootstrap.servers": "127.0.0.1:1"})
    with pytest.raises(MachineError, match=r"no Kafka broker answers at 127.0.0.1:1 within 8 s .*joinmesh broker up"):
        source_partitions(nowhere)


def test_services_and_retention_follow_from_the_queries(shop: Mesh) -> None:
    queries = parse_queries(shop)
    assert keep_ms(shop, queries) == 63_000
    assert [service.name for service in services_of(shop, queries)] == [
        "controller",
        "ingest",
        "paid_orders.j1",
        "paid_orders.j2",
        "paid_orders.sink",
    ]


def test_an_open_transaction_is_seen(bootstrap: str, mesh_name: str) -> None:
    mesh = Mesh(mesh_name, {"bootstrap.servers": bootstrap}, 2, {}, {})
    topic = f"{mesh_name}.results"
    ensure_topics(mesh, [Topic(topic, 2)], lambda _: None)
    assert left_open(mesh, topic, 2) == []
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": mesh_name})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"x", partition=1)
    producer.flush(30)
    assert left_open(mesh, topic, 2) == [1]
    producer.abort_transaction(30)
    deadline = time.monotonic() + 10  # the marker is written a moment after the answer
    while left_open(mesh, topic, 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_open(mesh, topic, 2) == []
