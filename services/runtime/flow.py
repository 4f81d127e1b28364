"""Short queues between services: a sender waits while the node it feeds is far behind.

Feedback about rows is worth something only while there are rows left to make, and a node acts on it when its turn comes
in the input topic. So the queries that use feedback keep that topic short. A node publishes its place in its input
topic as the committed offsets of the group `<mesh>.<query>.places` (nobody subscribes there; `kafka-consumer-groups.sh`
shows it as lag), and with it which worker it is and how long a block takes it. A sender compares it with what it has
delivered.

Invariant: waiting never changes what is sent, only when; and nobody waits for a node whose place has not moved for a
while.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas.mesh import Mesh
from services.runtime.kafka import client_config

POLL_S = 0.1
AHEAD_S = 0.5  # of the receiver's work may be under way to it
BLOCKS_LEAST = 2  # per partition, however slow the receiver is
STUCK_S = 5.0
PACE_S = 0.5  # of work after which what a block took before counts half
Place = tuple[str, int]  # topic, partition


def _client(mesh: Mesh, query: str) -> Consumer:
    return Consumer(client_config(mesh, group_id=f"{mesh.name}.{query}.places", enable_auto_commit=False, log_level=0))


class Pace:
    """How long a block takes a worker, of late. Of its own work: a worker that is kept waiting is not a slow one."""

    def __init__(self) -> None:
        self._busy = self._blocks = 0.0

    def add(self, seconds: float, blocks: int) -> None:
        rest = 0.5 ** (seconds / PACE_S)
        self._busy, self._blocks = self._busy * rest + seconds, self._blocks * rest + blocks

    @property
    def block_s(self) -> float:
        return self._busy / self._blocks if self._blocks else AHEAD_S


class Reached(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says beside its place."""

    worker: int = -1
    block_s: float = AHEAD_S  # unknown: as if one block were enough


class Places:
    """Publishes how far this worker is in its input topic."""

    def __init__(self, mesh: Mesh, query: str, worker: int) -> None:
        self._client, self._due, self._worker = _client(mesh, query), 0.0, worker
        self._said: dict[Place, int] = {}

    def publish(self, places: Mapping[Place, int], block_s: float) -> None:
        """Now and then; a place that is lost is published again soon."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + POLL_S
        said = msgspec.json.encode(Reached(self._worker, block_s)).decode()
        news = [TopicPartition(*place, at, said) for place, at in places.items() if self._said.get(place) != at]
        if news:
            with contextlib.suppress(KafkaException):
                self._client.commit(offsets=news, asynchronous=True)
                self._said.update(places)


class Distance:
    """How much work a receiver's workers have before them, of what was delivered to it; pure, so that it can be
    tested."""

    def __init__(self, partitions: int, now: float) -> None:
        self.places = [0] * partitions
        self.said = [Reached()] * partitions
        self._moved = now

    def reached(self, places: Sequence[int], said: Sequence[Reached], now: float) -> None:
        if any(new > old for new, old in zip(places, self.places, strict=True)):
            self._moved = now
        self.places, self.said = list(places), list(said)

    def is_far(self, delivered: Sequence[int], now: float) -> bool:
        if now - self._moved >= STUCK_S:
            return False
        blocks: dict[int, int] = {}  # worker -> how many wait for it beyond those that it is given in any case
        work: dict[int, float] = {}
        for sent, place, said in zip(delivered, self.places, self.said, strict=True):
            behind = max(0, sent - place)
            blocks[said.worker] = blocks.get(said.worker, 0) + behind - BLOCKS_LEAST
            work[said.worker] = work.get(said.worker, 0.0) + behind * said.block_s
        return any(blocks[worker] > 0 and work[worker] > AHEAD_S for worker in blocks)


class Flow:
    """Watches the nodes of one query that this service feeds."""

    def __init__(self, mesh: Mesh, query: str, receivers: Sequence[str], delivered: Mapping[Place, int]) -> None:
        self._client, self._partitions, self._delivered = _client(mesh, query), mesh.partitions, delivered
        self.receivers = frozenset(receivers)
        self._distances = {topic: Distance(mesh.partitions, time.monotonic()) for topic in receivers}
        self._wanted = [TopicPartition(topic, p) for topic in receivers for p in range(mesh.partitions)]
        threading.Thread(target=self._follow, name="flow", daemon=True).start()

    def _follow(self) -> None:
        while True:
            with contextlib.suppress(KafkaException):
                found = {(p.topic, p.partition): p for p in self._client.committed(self._wanted, timeout=5)}
                for topic, distance in self._distances.items():
                    mine = [found[topic, p] for p in range(self._partitions)]
                    distance.reached(
                        [max(0, p.offset) for p in mine], [_said(p.metadata) for p in mine], time.monotonic()
                    )
            time.sleep(POLL_S)

    @property
    def is_ahead(self) -> bool:
        """Whether some receiver has enough to do for now."""
        now = time.monotonic()
        return any(
            distance.is_far([self._delivered.get((topic, p), 0) for p in range(self._partitions)], now)
            for topic, distance in self._distances.items()
        )


def _said(metadata: str | None) -> Reached:
    try:
        return msgspec.json.decode(metadata or b"[]", type=Reached)
    except msgspec.MsgspecError:  # anybody may write to a group
        return Reached()
