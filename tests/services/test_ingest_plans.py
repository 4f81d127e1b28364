"""New plans reach a running ingest through the control topic, and leave it in the order that makes them safe."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from confluent_kafka import Producer

from schemas import topics
from schemas.block import MAGIC, PlanChanged, decode_header
from schemas.control import PlanPublished, encode_control
from schemas.mesh import Mesh
from services.runtime.control import ControlWatch, read_history, read_plans
from services.simulation.world import World
from topology.ingest.reading import Reading


class Control:
    """Stands for `ControlWatch`: says what it was given, once."""

    def __init__(self) -> None:
        self.coming: list[PlanPublished] = []

    def news(self) -> list[PlanPublished]:
        coming, self.coming = self.coming, []
        return coming


def test_a_plan_that_is_heard_of_is_announced_durable_and_followed_by_a_restart() -> None:
    for seed in (0, 3, 5, 8):
        world = World(seed)
        case = world.case
        again = msgspec.structs.replace(case.published, epoch=2, feedback="off")
        world.calm = True
        with world.patched():
            world.append(len(world.coming) // 2)
            process: Any = world.start("ingest")
            process.drain()
            ingest = process.ingest
            ingest.control = Control()
            ingest.control.coming = [case.published, again, msgspec.structs.replace(again, query="other")]
            ingest._hear_plans()
            assert ingest.core.courses["q"].newest == 2
            nexts = {place: ingest.core.reading(place).next for place in ingest.core.backlogs}
            for node in case.plan.nodes:
                for partition in range(case.mesh.partitions):
                    values = [r.value for r in world.broker.log((topics.node_in("m", "q", node.id), partition))]
                    assert any(
                        v is not None and v.startswith(MAGIC) and isinstance(decode_header(v), PlanChanged)
                        for v in values
                    )
            world.append(len(world.coming))
            process.drain()
            for (topic, partition), first in nexts.items():
                offset, metadata = world.broker.offsets["m.ingest", topic, partition]
                reading = msgspec.json.decode(metadata, type=Reading)
                assert reading.epochs == {"q": {2: first}}
                assert offset == len(world.broker.log((topic, partition)))


def test_the_control_topic_is_watched_while_it_grows(
    bootstrap: str, create_topics: Callable[..., None], mesh_name: str
) -> None:
    mesh = Mesh(name=mesh_name, kafka={"bootstrap.servers": bootstrap}, partitions=1, streams={}, queries={})
    create_topics(topics.control(mesh_name), partitions=1)
    producer = Producer({"bootstrap.servers": bootstrap})
    plans = [PlanPublished("q", epoch, "", "(a b)", "", 0, {}) for epoch in (1, 2, 2, 3)]

    def publish(value: bytes) -> None:
        producer.produce(topics.control(mesh_name), value, partition=0)
        producer.flush()

    publish(encode_control(plans[0]))
    publish(b"not a plan")
    watch = ControlWatch(mesh)
    heard: list[PlanPublished] = []
    try:
        for plan in plans[1:]:
            publish(encode_control(plan))
        deadline = time.monotonic() + 20
        while len(heard) < 4 and time.monotonic() < deadline:
            heard += watch.news()
            time.sleep(0.05)
    finally:
        watch.close()
    assert heard == plans
    assert read_plans(mesh) == {"q": plans[-1]}
    assert [plan.epoch for plan in read_history(mesh)["q"]] == [1, 2, 3]
