"""Short queues between services: a sender waits while the node it feeds is far behind.

Feedback about rows is worth something only while there are rows left to make, and a node acts on it when its turn comes in the input topic. So the queries
that use feedback keep that topic short. A node publishes its place in its input topic as the committed offsets of the group `<mesh>.<query>.places` (nobody
subscribes there; `kafka-consumer-groups.sh` shows it as lag). A sender compares it with what it has delivered.

Invariant: waiting never changes what is sent, only when; and nobody waits for a node whose place has not moved for a while.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas.mesh import Mesh
from services.runtime.kafka import client_config

POLL_S = 0.1
AHEAD_S = 0.5  # of the receiver's work may be under way to it
BLOCKS_LEAST = 2  # per partition, however slow the receiver is
STUCK_S = 5.0
Place = tuple[str, int]  # topic, partition


def _client(mesh: Mesh, query: str) -> Consumer:
    return Consumer(client_config(mesh, group_id=f"{mesh.name}.{query}.places", enable_auto_commit=False, log_level=0))


class Places:
    """Publishes how far this worker is in its input topic."""

    def __init__(self, mesh: Mesh, query: str) -> None:
        self._client, self._due = _client(mesh, query), 0.0
        self._said: dict[Place, int] = {}

    def publish(self, places: Mapping[Place, int]) -> None:
        """Now and then; a place that is lost is published again soon."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + POLL_S
        news = [TopicPartition(*place, at) for place, at in places.items() if self._said.get(place) != at]
        if news:
            with contextlib.suppress(KafkaException):
                self._client.commit(offsets=news, asynchronous=True)
                self._said.update(places)


class Distance:
    """How far a receiver is behind what was delivered to it, and how fast it goes; pure, so that it can be tested."""

    def __init__(self, partitions: int, now: float) -> None:
        self.places = [0] * partitions
        self.rate = 0.0  # blocks a second
        self._at = self._moved = now

    def reached(self, places: Sequence[int], now: float) -> None:
        done = sum(max(0, new - old) for new, old in zip(places, self.places, strict=True))
        passed = max(now - self._at, 1e-3)
        self.rate += (done / passed - self.rate) * min(1.0, passed)  # over about the last second
        self.places, self._at = list(places), now
        if done:
            self._moved = now

    def is_far(self, delivered: Sequence[int], now: float) -> bool:
        behind = sum(max(0, sent - place) for sent, place in zip(delivered, self.places, strict=True))
        most = max(BLOCKS_LEAST * len(self.places), self.rate * AHEAD_S)
        return behind > most and now - self._moved < STUCK_S


class Flow:
    """Watches the nodes of one query that this service feeds."""

    def __init__(self, mesh: Mesh, query: str, receivers: Sequence[str], delivered: Mapping[Place, int]) -> None:
        self._client, self._partitions, self._delivered = _client(mesh, query), mesh.partitions, delivered
        self._distances = {topic: Distance(mesh.partitions, time.monotonic()) for topic in receivers}
        self._wanted = [TopicPartition(topic, p) for topic in receivers for p in range(mesh.partitions)]
        threading.Thread(target=self._follow, name="flow", daemon=True).start()

    def _follow(self) -> None:
        while True:
            with contextlib.suppress(KafkaException):
                found = {(p.topic, p.partition): max(0, p.offset) for p in self._client.committed(self._wanted, timeout=5)}
                for topic, distance in self._distances.items():
                    distance.reached([found[topic, p] for p in range(self._partitions)], time.monotonic())
            time.sleep(POLL_S)

    @property
    def is_ahead(self) -> bool:
        """Whether some receiver has enough to do for now."""
        now = time.monotonic()
        return any(
            distance.is_far([self._delivered.get((topic, p), 0) for p in range(self._partitions)], now)
            for topic, distance in self._distances.items()
        )
