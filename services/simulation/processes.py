"""The services as processes of the simulation: real code, simulated clients and disks, started, stepped, and dropped at
a crash.

Invariant: what outlives a process is the broker and its disk, byte by byte; every object of the process itself is gone.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from confluent_kafka import TopicPartition

from schemas import topics
from schemas.block import MAGIC, Header, decode_header
from services.ingest.loop import Ingest
from services.join_node.host import PartitionHost
from services.runtime.report import Durations
from services.runtime.store import Cache, NodeStore, OutboxEntry
from services.simulation.broker import SimConsumer, SimSender, SimTransactionalProducer
from services.sink.loop import Sink

if TYPE_CHECKING:
    from services.simulation.world import World


_OFFSETS = b"moffsets"  # where a node's memo says how far it has read


class SimulatedCrash(BaseException):
    """The process is gone, at once. Not an `Exception`, so that no service code catches it."""


class ProtocolBroken(AssertionError):
    """A step did not keep its order, whether or not a result shows it."""


class Disk:
    """A `KeyValue` in memory that outlives its process. Checks that every write is a whole step."""

    def __init__(self, strict: bool, data: dict[bytes, bytes] | None = None) -> None:
        self.strict, self.data = strict, dict(data or {})

    def get(self, key: bytes) -> bytes | None:
        return self.data.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        yield from [(k, self.data[k]) for k in sorted(self.data) if k.startswith(prefix)]

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        if self.strict:
            self._check(puts, deletes)
        for key in deletes:
            self.data.pop(key, None)
        for key, value in puts:
            assert type(key) is bytes
            assert type(value) is bytes
            self.data[key] = value

    def _check(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        """Segments and outbox change only together with the input offset that they belong to."""
        if not any(key[:1] in (b"s", b"o") for key, _ in puts) and not any(key[:1] == b"s" for key in deletes):
            return
        stored = dict(puts).get(_OFFSETS)
        if stored is None or _next(stored) <= _next(self.data.get(_OFFSETS)):
            raise ProtocolBroken("segments or outbox were written without the input offset behind them")

    def close(self) -> None: ...


def _next(offsets: bytes | None) -> int:
    """How far the inputs were read; grows with every record taken."""
    return sum(msgspec.msgpack.decode(offsets, type=dict[str, int]).values()) if offsets is not None else -1


def _content(value: bytes) -> tuple[Header | None, bytes]:
    """A record without the incarnation that sent it: a block that is sent again may carry a later one."""
    if not value.startswith(MAGIC):
        return None, value
    header = decode_header(value)
    return msgspec.structs.replace(header, incarnation=0), value[12 + int.from_bytes(value[8:12], "little") :]


class Process:
    """One process; `left` is how many steps a zombie has until it finds out."""

    name: str
    sender: SimSender

    def __init__(self, world: "World") -> None:
        self.world, self.left = world, -1

    @property
    def rng(self) -> Random:
        return self.world.rng

    def step(self) -> None:
        raise NotImplementedError

    def finish(self) -> bool:
        """One step of draining; whether something moved."""
        raise NotImplementedError

    def drain(self) -> None:
        while self.finish():
            pass


class IngestProcess(Process):
    def __init__(self, world: "World") -> None:
        super().__init__(world)
        self.name, case = "ingest", world.case
        self.sender = SimSender(world.broker)
        self.consumer = SimConsumer(world.broker, "m.ingest", world.rng, eof=True)
        self.ingest = Ingest(
            case.mesh,
            {"q": [(published, case.plan) for published in world.history]},
            case.counts,
            self.consumer,
            self.sender,
            None,
            settings=world.ingest_settings,
            clock=world.clock,
        )
        self.places = [TopicPartition(s, p) for s, count in case.counts.items() for p in range(count)]
        self._assign()

    def _assign(self) -> None:
        self.ingest._assigned(self.consumer, [TopicPartition(p.topic, p.partition) for p in self.places])  # type: ignore[arg-type]

    def hear_plans(self) -> None:
        """What the control topic has brought since."""
        for published in self.world.history:
            self.ingest._do(self.ingest.core.change_plan(published, self.world.case.plan))

    def step(self) -> None:
        if self.world.changes:
            self.hear_plans()
        roll = self.rng.random()
        if roll < 0.05:
            self.ingest._revoked(self.consumer, self.places)  # type: ignore[arg-type]
            self._assign()
        elif roll < 0.35:
            self.ingest._commit()
        else:
            self.ingest._fetch(0)
            self.ingest._round()
            self.ingest.sender.check()

    def finish(self) -> bool:
        self.hear_plans()
        self.ingest._fetch(0)
        self.ingest._round()
        core = self.ingest.core
        if core.waiting or any(
            at < len(self.world.broker.log(place))
            for place, at in self.consumer.positions.items()
            if place not in self.consumer.paused  # a table is not read on behind its cut
        ):
            return True
        before = dict(core.committed)
        self.ingest._commit()
        return before != core.committed


class NodeProcess(Process):
    """One partition of one join node, on a disk of some worker."""

    def __init__(self, world: "World", node: str, partition: int, disk: Disk) -> None:
        super().__init__(world)
        self.node, self.partition, self.disk = node, partition, disk
        self.name = f"{node}.{partition}"
        self.sender = SimSender(world.broker, self._leaves if disk.strict else None)
        store = NodeStore(disk, partition, Cache(world.cache_bytes), world.tick())
        self.host = PartitionHost(
            world.case.mesh,
            world.history,
            node,
            partition,
            store,
            self.sender,
            Durations(),
            settings=world.settings,
            derive=lambda *_: world.case.plan,
        )
        self.place = (topics.node_in("m", "q", node), partition)
        self.back = (topics.node_feedback("m", "q", node), partition)
        self.at, self.at_back = self.host.next_offset("in") or 0, self.host.next_offset("feedback") or 0
        world.stats["resent from outbox"] += sum(len(q) for q in self.sender.queues.values())

    def _leaves(self, topic: str, partition: int, value: bytes) -> None:
        wanted = (topic, partition, _content(value))
        entries = (msgspec.msgpack.decode(stored, type=OutboxEntry) for _, stored in self.disk.scan(b"o"))
        if not any((e.topic, e.partition, _content(e.value)) == wanted for e in entries):
            raise ProtocolBroken(f"{self.name} sent a block that is not durable")

    def step(self) -> None:
        if self.rng.random() < 0.02:
            self.at = max(0, self.at - self.rng.randint(1, 3))  # fetched again
            self.at_back = max(0, self.at_back - self.rng.randint(0, 2))
        if self.rng.random() < 0.3:
            self._relay(self.rng.randint(1, 4))
            return
        log = self.world.broker.log(self.place)
        self._take(log, self.rng.randint(1, 4))

    def _relay(self, count: int) -> bool:
        log, before = self.world.broker.log(self.back), self.at_back
        while count > 0 and self.at_back < len(log):
            self.at_back += 1
            count -= 1
            self.host.relay(self.at_back - 1, log[self.at_back - 1].value)
            self._perhaps_commit()
        return self.at_back > before

    def _take(self, log: list[Any], count: int) -> None:
        while count > 0 and self.at < len(log):
            self.at += 1
            count -= 1
            self.host.take(self.at - 1, log[self.at - 1].value)
            self._perhaps_commit()

    def _perhaps_commit(self) -> None:
        """After each record, after some, or in a later action: a crash may find any number of steps that are not on
        disk yet."""
        if self.rng.random() < self.world.commits:
            self.world.stats["steps committed together"] += self.host.waiting - 1
            self.host.commit()

    def finish(self) -> bool:
        log, before = self.world.broker.log(self.place), self.at
        relayed = self._relay(1 << 30)
        self._take(log, len(log))
        waited = self.host.waiting > 0
        self.host.commit()
        return relayed or waited or self.at > before


class SinkProcess(Process):
    def __init__(self, world: "World") -> None:
        super().__init__(world)
        self.name, case = "sink", world.case
        self.sender = SimSender(world.broker)  # never used: a sink writes in transactions only
        self.producer = SimTransactionalProducer(world.broker, "m.q.sink-0")
        self.producer.init_transactions()
        self.consumer = SimConsumer(world.broker, "m.q.sink", world.rng, eof=False)
        self.sink = Sink(
            case.mesh,
            case.plan,
            case.published.epoch,
            self.consumer,
            self.producer,
            None,
            newest=lambda: world.history[-1].epoch,
        )
        self.places = [TopicPartition(topics.query_out("m", "q"), p) for p in range(case.mesh.partitions)]
        self.sink._assigned(self.consumer, self.places)  # type: ignore[arg-type]

    def step(self) -> None:
        roll = self.rng.random()
        if roll < 0.04:
            self.sink._revoked(self.consumer, self.places)  # type: ignore[arg-type]
            self.sink._assigned(self.consumer, self.places)  # type: ignore[arg-type]
        elif roll < 0.3:
            self.sink._close_transaction()
        else:
            self.sink._take(self.consumer.consume(64, 0))  # type: ignore[arg-type]

    def finish(self) -> bool:
        before = dict(self.sink.next)
        self.sink._take(self.consumer.consume(64, 0))  # type: ignore[arg-type]
        if all(at == len(self.world.broker.log(place)) for place, at in self.consumer.positions.items()):
            self.sink._close_transaction()
        else:
            return True
        return before != self.sink.next
