"""A broker that lives in memory, and clients with the methods our services call.

Logs per topic partition, offsets and metadata per group, transactions with fencing. Records of a producer wait in a
queue per partition until `deliver` moves some of them to the log: that is when the rest of the world can see them.

Invariant: records of one producer reach a partition in the order they were sent, as a prefix; a transaction's records
and offsets are there together or not at all; a client that was succeeded by another changes no offset and commits no
transaction.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

Place = tuple[str, int]  # topic, partition


@dataclass(frozen=True)
class Record:
    value: bytes | None
    key: bytes | str | None = None
    time: int = 0


@dataclass(frozen=True)
class SimMessage:
    """What `consume` gives: a record, or the news that a partition has ended."""

    place: Place
    at: int
    record: Record | None

    def topic(self) -> str:
        return self.place[0]

    def partition(self) -> int:
        return self.place[1]

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes | str | None:
        return self.record.key if self.record is not None else None

    def value(self) -> bytes | None:
        return self.record.value if self.record is not None else None

    def timestamp(self) -> tuple[int, int]:
        return (1, self.record.time if self.record is not None else 0)

    def error(self) -> KafkaError | None:
        return None if self.record is not None else KafkaError(KafkaError._PARTITION_EOF)


@dataclass
class Transaction:
    records: list[tuple[Place, Record]] = field(default_factory=list)
    offsets: list[TopicPartition] = field(default_factory=list)
    group: str = ""


class SimBroker:
    def __init__(self) -> None:
        self.logs: dict[Place, list[Record]] = {}
        self.offsets: dict[tuple[str, str, int], tuple[int, str]] = {}
        self.generations: dict[str, int] = {}  # group -> the member that counts now
        self.epochs: dict[str, int] = {}  # transactional id -> the producer that counts now

    def log(self, place: Place) -> list[Record]:
        return self.logs.setdefault(place, [])

    def topic(self, name: str) -> Iterator[tuple[int, Record]]:
        """Every record of a topic that a read_committed reader sees."""
        for (topic, partition), records in sorted(self.logs.items()):
            if topic == name:
                for record in records:
                    yield partition, record

    def join(self, group: str) -> int:
        self.generations[group] = self.generations.get(group, 0) + 1
        return self.generations[group]

    def commit(self, group: str, generation: int, offsets: Sequence[TopicPartition]) -> None:
        if generation != self.generations[group]:
            raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))
        for o in offsets:
            self.offsets[group, o.topic, o.partition] = (o.offset, o.metadata or "")


class SimConsumer:
    """A member of a group; which records one fetch brings is up to chance."""

    def __init__(self, broker: SimBroker, group: str, rng: Random, eof: bool) -> None:
        self.broker, self.group, self.rng, self.eof = broker, group, rng, eof
        self.generation = broker.join(group)
        self.positions: dict[Place, int] = {}
        self.paused: set[Place] = set()
        self.ended: dict[Place, int] = {}

    def committed(self, places: Sequence[TopicPartition], timeout: float = 0) -> list[TopicPartition]:  # noqa: ARG002
        found = []
        for p in places:
            offset, metadata = self.broker.offsets.get((self.group, p.topic, p.partition), (OFFSET_INVALID, ""))
            found.append(TopicPartition(p.topic, p.partition, offset, metadata))
        return found

    def get_watermark_offsets(self, place: TopicPartition, timeout: float = 0, cached: bool = False) -> tuple[int, int]:  # noqa: ARG002
        return 0, len(self.broker.log((place.topic, place.partition)))

    def assign(self, places: Sequence[TopicPartition]) -> None:
        self.positions = {(p.topic, p.partition): p.offset for p in places}
        self.paused, self.ended = set(), {}

    def pause(self, places: Sequence[TopicPartition]) -> None:
        self.paused |= {(p.topic, p.partition) for p in places}

    def resume(self, places: Sequence[TopicPartition]) -> None:
        self.paused -= {(p.topic, p.partition) for p in places}

    def commit(self, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        self.broker.commit(self.group, self.generation, offsets)

    def consumer_group_metadata(self) -> tuple[str, int]:
        return self.group, self.generation

    def consume(self, count: int, wait_s: float) -> list[SimMessage]:  # noqa: ARG002
        messages: list[SimMessage] = []
        places = list(self.positions)
        self.rng.shuffle(places)
        for place in places:
            if place in self.paused:
                continue
            log, at = self.broker.log(place), self.positions[place]
            stop = min(len(log), at + self.rng.randint(0, 8), at + max(0, count - len(messages)))
            messages += [SimMessage(place, i, log[i]) for i in range(at, stop)]
            self.positions[place] = stop
            if self.eof and stop == len(log) and self.ended.get(place) != stop:
                self.ended[place] = stop
                messages.append(SimMessage(place, stop, None))
        return messages


class SimSender:
    """Queues records per partition; `watch` sees each send as it is asked for."""

    def __init__(self, broker: SimBroker, watch: Callable[[str, int, bytes], None] | None = None) -> None:
        self.broker, self.watch = broker, watch
        self.queues: dict[Place, deque[tuple[Record, Callable[[], None] | None]]] = {}
        self.done: deque[Callable[[], None]] = deque()

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, done: Callable[[], None] | None = None
    ) -> None:
        if self.watch is not None:
            self.watch(topic, partition, value)
        self.queues.setdefault((topic, partition), deque()).append((Record(value, key), done))

    @property
    def waiting(self) -> list[Place]:
        return [place for place, queue in self.queues.items() if queue]

    def deliver(self, place: Place, count: int) -> int:
        queue, log = self.queues[place], self.broker.log(place)
        count = min(count, len(queue))
        for _ in range(count):
            record, done = queue.popleft()
            log.append(record)
            if done is not None:
                self.done.append(done)
        return count

    def acknowledge(self, count: int) -> None:
        """Tell the process of deliveries, oldest first."""
        for _ in range(min(count, len(self.done))):
            self.done.popleft()()

    def lose(self, rng: Random) -> int:
        """The process died: what is not yet at the broker arrives as some prefix per partition, perhaps later. Returns
        how many are lost."""
        lost = 0
        for queue in self.queues.values():
            keep = rng.choice((0, len(queue), rng.randint(0, len(queue))))
            while len(queue) > keep:
                queue.pop()
                lost += 1
        self.done.clear()
        return lost

    def check(self, wait_s: float = 0.0) -> None: ...

    def flush(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002
        for place, queue in self.queues.items():
            self.deliver(place, len(queue))
        self.acknowledge(len(self.done))


class SimTransactionalProducer:
    def __init__(self, broker: SimBroker, transactional_id: str) -> None:
        self.broker, self.id, self.epoch = broker, transactional_id, -1
        self.open: Transaction | None = None

    def init_transactions(self, timeout: float = 0) -> None:  # noqa: ARG002
        self.epoch = self.broker.epochs[self.id] = self.broker.epochs.get(self.id, 0) + 1

    def _fence(self) -> None:
        if self.broker.epochs[self.id] != self.epoch:
            raise KafkaException(KafkaError(KafkaError._FENCED))

    def begin_transaction(self) -> None:
        assert self.open is None, "a transaction is open"
        self.open = Transaction()

    def produce(
        self,
        topic: str,
        value: bytes | str,
        key: bytes | str | None = None,
        partition: int = 0,
        timestamp: int = 0,
        **_: Any,
    ) -> None:
        assert self.open is not None, "produced outside a transaction"
        data = value.encode() if isinstance(value, str) else value
        self.open.records.append(((topic, partition), Record(data, key, timestamp)))

    def poll(self, timeout: float = 0) -> int:  # noqa: ARG002
        return 0

    def flush(self, timeout: float = 0) -> int:  # noqa: ARG002
        return 0

    def send_offsets_to_transaction(
        self,
        offsets: Sequence[TopicPartition],
        member: tuple[str, int],
        timeout: float = 0,  # noqa: ARG002
    ) -> None:
        self._fence()
        group, generation = member
        if generation != self.broker.generations[group]:
            raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))
        assert self.open is not None
        self.open.group, self.open.offsets = group, list(offsets)

    def commit_transaction(self, timeout: float = 0) -> None:  # noqa: ARG002
        self._fence()
        assert self.open is not None
        for place, record in self.open.records:
            self.broker.log(place).append(record)
        for o in self.open.offsets:
            self.broker.offsets[self.open.group, o.topic, o.partition] = (o.offset, o.metadata or "")
        self.open = None
