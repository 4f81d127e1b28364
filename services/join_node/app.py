"""The join node service: a Faust agent over the node's input topic, with own offsets and own state.

Faust gives group membership, agents and signals. Offsets are ours: they live in RocksDB with the state they belong to,
so after any stop each partition goes on exactly where its state is (docs/decisions/0002-faust.md).

Invariant: a partition's host exists exactly while the partition is assigned here and its stored offsets have been
sought.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import faust
import mode
from aiokafka import TopicPartition as KafkaPartition
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport
from faust.types import TP

from schemas import topics
from schemas.errors import JoinmeshError, StateError
from schemas.mesh import Mesh
from services.join_node.host import PartitionHost
from services.runtime.control import derive_plan, wait_for_history
from services.runtime.flow import Flow, Pace, Places
from services.runtime.health import Health
from services.runtime.producer import Sender
from services.runtime.report import Durations, Reporter
from services.runtime.rocks import open_newest
from services.runtime.security.for_faust import faust_brokers, faust_credentials
from services.runtime.service import EX_CONFIG, Arguments
from services.runtime.store import Cache, NodeStore
from topology.restraint.heralding.heralding import Heralding
from topology.restraint.hiding import Hiding
from topology.restraint.suspension.memo import FeedbackMemo
from topology.restraint.suspension.suspension import Suspension

log = logging.getLogger("joinmesh.node")
T = TypeVar("T")
UNACKNOWLEDGED_MOST = 2_000
FETCH_WAIT_MS, IDLE_WAIT_MS = 20, 500  # how long a fetch waits on the broker: after records, and after none
STEPS_MOST = 32  # of a partition that are made durable and sent together
TOGETHER_LEAST_S, TOGETHER_MOST_S = 0.01, 0.05  # how long steps wait for those behind them
BLOCK_S = 0.0015  # that a small block takes receivers and broker: as long as several wait for those behind them
BEHIND_SHARE = 0.2  # of the time since there was last nothing to do
TURNS = 10


def serve(arguments: Arguments) -> int:
    if arguments.query is None or arguments.node is None:
        raise JoinmeshError("a join node needs --query and --node")
    worker = NodeWorker(
        arguments.mesh, arguments.query, arguments.node, arguments.instance, arguments.data, arguments.new_health()
    )
    return worker.run()


class OwnOffsetsConsumer(Consumer):
    """Seeks to the offsets stored with the state instead of Kafka's."""

    async def seek_to_committed(self) -> Mapping[TP, int]:
        wanted = await cast(NodeApp, self.app).node_worker.assigned(self.assignment(), self)
        await self.seek_wait(wanted)
        return wanted

    def _new_consumer_thread(self) -> Any:
        return FetchThread(self, loop=self.loop, beacon=self.beacon)


class FetchThread(AIOKafkaConsumerThread):
    """A fetch comes back with the first byte; one that finds nothing waits on the broker for a moment only while there
    is work, and for long when there is none.

    aiokafka has one fetch under way per broker. While the input's records are still buffered it asks for the silent
    topics alone, and with Faust's wait of 1.5 s the input would not be asked for again before that is over. A node
    without work has nothing buffered, so its fetches ask for everything.
    """

    async def _fetch_records(self, consumer: Any, *given: Any, **named: Any) -> Any:
        found = await super()._fetch_records(consumer, *given, **named)
        consumer._fetcher._fetch_max_wait_ms = FETCH_WAIT_MS if found else IDLE_WAIT_MS
        return found

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = FETCH_WAIT_MS
        return consumer


class OwnOffsetsTransport(Transport):
    Consumer = OwnOffsetsConsumer


class NodeApp(faust.App):
    node_worker: "NodeWorker"

    def _new_transport(self) -> Any:
        return OwnOffsetsTransport(self.conf.broker_consumer, self)


class NodeWorker:
    """All partitions of one join node that this process has."""

    def __init__(self, mesh: Mesh, query: str, node: str, instance: int, data: Path, health: Health) -> None:
        self.mesh, self.query, self.node_id, self.health = mesh, query, node, health
        self.directory = data / query / node
        self.cache, self.sender, self.steps = Cache(), Sender(mesh), Durations()
        # Read before the consumer starts: Faust delivers all topics through one loop, so waiting for the control topic
        # inside it would
        # wait for ever behind a full input buffer.
        self.history = wait_for_history(mesh, query)
        self.published, plan = self.history[-1], derive_plan(mesh, self.history[-1])
        self.places: Places | None = None
        self.flow: Flow | None = None
        if self.published.feedback != "off":
            self.places, target = Places(mesh, query, instance), plan.node(node).target
            if target != "out":
                self.flow = Flow(mesh, query, [topics.node_in(mesh.name, query, target)], self.sender.delivered)
        self.hosts: dict[int, PartitionHost] = {}
        self.input_topic = topics.node_in(mesh.name, query, node)
        self.feedback_topic = topics.node_feedback(mesh.name, query, node)
        self.failure: BaseException | None = None
        self.reporter = Reporter(
            mesh, self.sender.producer, "join_node", f"{query}.{node}-{instance}", query=query, node=node
        )
        self.taken = 0
        self.pace = Pace()
        self._begun = self._busy = (
            0.0  # when the first step was done that is not on disk yet, and how long all since the last commit took
        )
        self._together = 0  # how many these are
        self._rested = time.monotonic()  # when there was last nothing to do
        self._due = 0.0  # when the next blocks may follow the last ones
        self.app = self._app(instance)

    def _app(self, instance: int) -> NodeApp:
        group = f"{self.mesh.name}.{self.query}.{self.node_id}"
        app = NodeApp(
            group,
            broker=faust_brokers(self.mesh),
            broker_credentials=faust_credentials(self.mesh),
            consumer_group_instance_id=f"{group}-{instance}",
            broker_session_timeout=10.0,
            broker_heartbeat_interval=3.0,
            broker_request_timeout=90.0,
            broker_max_poll_records=64,
            consumer_auto_offset_reset="earliest",
            consumer_max_fetch_size=4 << 20,
            stream_buffer_maxsize=32,
            stream_wait_empty=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            table_standby_replicas=1,  # 0 would switch to an assignor that separates co-partitioned topics
            agent_supervisor=mode.CrashingSupervisor,
            autodiscover=False,
            web_enabled=False,
            datadir=str(self.directory / "faust"),
            store="memory://",
        )
        app.node_worker = self
        raw: dict[str, Any] = {
            "key_serializer": "raw",
            "value_serializer": "raw",
            "key_type": bytes,
            "value_type": bytes,
            "acks": False,
        }
        app.agent(app.topic(self.input_topic, **raw), name="join")(self._join)
        if self.published.feedback != "off":
            app.agent(app.topic(self.feedback_topic, **raw), name="feedback")(self._relay)
        app.on_partitions_revoked.connect(self._revoked)
        app.task(self._tend)
        return app

    def run(self) -> int:
        (self.directory / "faust").mkdir(mode=0o700, parents=True, exist_ok=True)
        worker = faust.Worker(self.app, loglevel="WARN", override_logging=False, quiet=True)
        try:
            worker.execute_from_commandline()
        except SystemExit as exit:
            if exit.code not in (None, 0):
                self.failure = self.failure or RuntimeError("the worker stopped on an error; see above")
        except BaseException as error:
            self.failure = self.failure or error
        for host in self.hosts.values():
            host.close()
        self.sender.producer.flush(10)
        if self.failure is not None:
            if isinstance(self.failure, JoinmeshError):
                raise self.failure
            log.error("stopped: %r", self.failure)
            return 1
        log.info("stopped")
        return 0

    async def assigned(self, assignment: set[TP], consumer: Any) -> dict[TP, int]:
        """Open the state of every partition that is ours now; gives the offset each topic is to be read from."""
        try:
            mine = {tp.partition for tp in assignment if tp.topic == self.input_topic}
            for partition in set(self.hosts) - mine:
                self.hosts.pop(partition).close()
            earliest = await consumer.earliest_offsets(*[KafkaPartition(tp.topic, tp.partition) for tp in assignment])
            starts = {TP(tp.topic, tp.partition): offset for tp, offset in earliest.items()}
            for partition in sorted(mine - set(self.hosts)):
                self.hosts[partition] = PartitionHost(
                    self.mesh,
                    self.history,
                    self.node_id,
                    partition,
                    self._open(partition),
                    self.sender,
                    self.steps,
                    start=starts.get(TP(self.input_topic, partition), 0),
                )
            latest = await consumer.highwaters(*[KafkaPartition(tp.topic, tp.partition) for tp in assignment])
            ends = {TP(tp.topic, tp.partition): offset for tp, offset in latest.items()}
            wanted = {}
            kinds = {self.input_topic: "in", self.feedback_topic: "feedback"}
            for tp in assignment:
                host = self.hosts.get(tp.partition)
                stored = host.next_offset(kinds[tp.topic]) if host else None
                wanted[tp] = self._checked(tp, stored, starts.get(tp, 0), ends.get(tp, 0))
                if (
                    tp.topic == self.input_topic
                    and stored is None
                    and wanted[tp] > 0
                    and host is not None
                    and any(host.node.ground.is_static)
                ):
                    raise StateError(
                        f"{tp.topic} partition {tp.partition}: there is no state, and the topic begins at {wanted[tp]}:"
                        " the static table that stood before it is gone, so the state cannot be built from it again."
                        " Restore the state's directory, or use a new mesh name"
                    )
            self.health.ready = True
            log.info("%s.%s has partitions %s", self.query, self.node_id, sorted(mine))
            return wanted
        except BaseException as error:
            self._fail(error)
            raise

    def _open(self, partition: int) -> NodeStore:
        now_ms = int(time.time() * 1000)
        return NodeStore(open_newest(self.directory, partition, now_ms), partition, self.cache, now_ms)

    def _checked(self, tp: TP, stored: int | None, start: int, end: int) -> int:
        if stored is not None and stored < start:
            raise StateError(
                f"{tp.topic} partition {tp.partition}: the state is at offset {stored} but the topic now begins at"
                f" {start}; blocks were deleted before they were joined. Keep them longer (retention.ms), and use a new"
                " mesh name to compute from the source topics again"
            )
        if stored is not None and stored > end:
            raise StateError(
                f"{tp.topic} partition {tp.partition}: the state is at offset {stored} but the topic ends at {end}; it"
                f" was deleted and made again. Delete {self.directory} to build the state from the topic as it is now"
            )
        return start if stored is None else stored

    async def _revoked(self, *_: Any, **__: Any) -> None:
        # A step runs to its end before anything else on this loop, so none is in flight here.
        for partition in list(self.hosts):
            self.hosts.pop(partition).close()

    async def _relay(self, stream: AsyncIterable[Any]) -> None:
        async for event in stream.events():  # type: ignore[attr-defined]
            host = self.hosts.get(event.message.partition)
            if host is not None:
                self._guard(host.relay, event.message.offset, event.message.value)
                if stream.channel.queue.empty():  # type: ignore[attr-defined]
                    self._commit(*self.hosts.values())

    async def _join(self, stream: AsyncIterable[Any]) -> None:
        async for event in stream.events():  # type: ignore[attr-defined]
            message = event.message
            host = self.hosts.get(message.partition)
            if host is None:
                continue
            self._guard(host.take, message.offset, message.value)
            self.taken, self._together = self.taken + 1, self._together + 1
            self._begun = self._begun or time.monotonic()
            # What is there already is done together; it takes Faust some turns of the loop to pass it on.
            if host.waiting < STEPS_MOST and time.monotonic() - self._begun < self._together_s():
                queue = stream.channel.queue  # type: ignore[attr-defined]
                for _ in range(TURNS):
                    if queue.empty():
                        await asyncio.sleep(0)
                if queue.empty() and (pause := self._due - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                if not queue.empty():
                    continue
                self._rested = time.monotonic()
            sent = self._commit(*self.hosts.values())
            self._due = time.monotonic() + min(TOGETHER_MOST_S, BLOCK_S * sent)
            self.pace.add(self._busy, self._together)
            self._begun, self._busy, self._together = 0.0, 0.0, 0
            self.sender.producer.poll(0)
            while self.sender.unacknowledged > UNACKNOWLEDGED_MOST or (self.flow is not None and self.flow.is_ahead):
                await asyncio.sleep(0.005)
                self.sender.producer.poll(0)

    def _together_s(self) -> float:
        """How long the first of some steps waits for those behind it: the longer there has been something behind, the
        more it pays to do much at once."""
        return min(TOGETHER_MOST_S, max(TOGETHER_LEAST_S, BEHIND_SHARE * (time.monotonic() - self._rested)))

    def _commit(self, *hosts: PartitionHost) -> int:
        """What was taken is durable, then sent; how many blocks that made."""
        return sum(self._guard(host.commit) for host in hosts)

    def _guard(self, do: Callable[..., T], *given: Any) -> T:
        begun = time.perf_counter()
        try:
            return do(*given)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._busy += time.perf_counter() - begun

    def _fail(self, error: BaseException) -> None:
        """State in memory may be ahead of the disk: end the process, so that it starts again from what is stored."""
        import os
        import sys

        if isinstance(error, JoinmeshError):
            print(f"joinmesh join_node: {error}", file=sys.stderr, flush=True)
            os._exit(EX_CONFIG if isinstance(error, StateError) else 1)
        log.exception("step failed", exc_info=error)
        os._exit(1)

    async def _tend(self) -> None:
        """Take deliveries and write reports."""
        self.health.watch()
        while not self.app.should_stop:
            self.health.beat()
            await asyncio.sleep(0.05)
            self._commit(*self.hosts.values())  # behind records that were passed over
            try:
                self.sender.check()
                if self.places is not None:
                    self.places.publish(
                        {(self.input_topic, p): host.memo.offsets.get("in", 0) for p, host in self.hosts.items()},
                        self.pace.block_s,
                    )
                if self.reporter.is_due:
                    self._report()
            except JoinmeshError as error:
                self._fail(error)

    def _report(self) -> None:
        memos = [host.memo for host in self.hosts.values()]
        lag = 0
        for partition, host in self.hosts.items():
            try:
                high = self.app.consumer.highwater(TP(self.input_topic, partition))
            except Exception:
                high = None
            if high is not None:
                lag += max(0, high - host.memo.offsets.get("in", 0))
        state: dict[str, dict[str, Any]] = {}
        for host in self.hosts.values():
            for held in host.node.describe():
                _add_state(state, held)
        low = min((min(m.watermarks) for m in memos), default=None)
        self.reporter.send(
            epoch=max((epoch for m in memos for epoch in m.live), default=0),
            epochs={partition: host.memo.live for partition, host in self.hosts.items()},
            partitions=sorted(self.hosts),
            events_in=sum(m.counts.blocks_in for m in memos),
            rows_in=sum(sum(m.counts.rows_in) for m in memos),
            rows_out=sum(m.counts.rows_out for m in memos),
            rows_repeated=sum(m.rows_repeated for m in memos),
            dead=sum(h.dead for h in self.hosts.values()),
            lag=lag,
            watermark_ms=low if low is not None and low > 0 else None,
            state=list(state.values()),
            step_ms_p50=self.steps.percentile(0.5),
            step_ms_p99=self.steps.percentile(0.99),
            feedback=_feedback_counts(self.hosts),
            heralds=_herald_counts(self.hosts),
            cache_bytes=self.cache.used,
            ready=self.health.ready,
            blocks_fenced=sum(m.blocks_fenced for m in memos),
        )
        self.health.observe(self.taken, lag)
        self.health.check()


def _feedback_counts(hosts: Mapping[int, PartitionHost]) -> dict[str, int] | None:
    """What feedback has done here; None where it is off."""
    total: Counter[str] = Counter()
    for restraint in (r for host in hosts.values() for r in host.node.restraints if isinstance(r, Suspension | Hiding)):
        total.update(restraint.counts())
    return {name: total[name] for name in FeedbackMemo().counts(here=0)} if total else None


def _herald_counts(hosts: Mapping[int, PartitionHost]) -> list[dict[str, Any]]:
    """What the node is told of streams further down, over its partitions here."""
    total: dict[str, Counter[str]] = {}
    for restraint in (r for host in hosts.values() for r in host.node.restraints if isinstance(r, Heralding)):
        for herald, counts in restraint.counts().items():
            total.setdefault(herald, Counter()).update({**counts, "partitions": 1})
    return [{"herald": herald, **counts} for herald, counts in total.items()]


def _add_state(total: dict[str, dict[str, Any]], held: dict[str, Any]) -> None:
    """Add one partition's side to the worker's sum."""
    known = total.setdefault(held["side"], {**held, "rows": 0, "bytes": 0, "segments": 0})
    for what in ("rows", "bytes", "segments"):
        known[what] += held[what]
    for what, pick in (("oldest_ms", min), ("newest_ms", max)):
        values = [v for v in (known[what], held[what]) if v is not None]
        known[what] = pick(values) if values else None
