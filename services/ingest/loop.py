"""The ingest service: source topics in, blocks for the join nodes out.

All that is decided is decided by `topology.ingest.ingest.Ingestion`; this loop fetches, hands over, and does what comes
back, in its order: sends, waits for deliveries, commits. It also watches the control topic for new plans.

Invariant: effects are done in the order they are given, and one that cannot be done ends the process; the next one
begins from what is committed.
"""

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.block import encode_block
from schemas.control import PlanPublished
from schemas.errors import StateError
from schemas.mesh import Mesh
from services.ingest.waits import NO_ROOM_S, Waits
from services.runtime.control import ControlWatch, derive_plan, earlier_plans, wait_for_plans
from services.runtime.dead import dead_letter
from services.runtime.failpoints import failpoint
from services.runtime.flow import Flow
from services.runtime.health import Health
from services.runtime.kafka import client_config, source_partitions
from services.runtime.producer import Sender
from services.runtime.report import Reporter
from services.runtime.security.refusals import raise_refused
from services.runtime.service import Arguments, end_when_fatal, end_when_lost
from topology.ingest import account
from topology.ingest.effects import Assign, Commit, Effect, Emit, Flush, Pause, Place, Resume, SetAside, Warn
from topology.ingest.epochs import Published
from topology.ingest.ingest import Fetched, Ingestion, Stored
from topology.ingest.settings import IngestSettings
from topology.plan.plan import Plan

log = logging.getLogger("joinmesh.ingest")
FETCH = 20_000  # records a round
COMMIT_S = 1.0
CONTROL_S = 0.2


def serve(arguments: Arguments) -> None:
    mesh, instance = arguments.mesh, arguments.instance
    newest = wait_for_plans(mesh, mesh.queries)
    earlier = earlier_plans(mesh, {query: published.epoch for query, (published, _) in newest.items()})
    plans = {query: [*earlier[query], plan] for query, plan in newest.items()}
    used = {s.stream for _, plan in newest.values() for s in plan.query.sources}
    sender = Sender(mesh)
    consumer = Consumer(
        client_config(
            mesh,
            group_id=f"{mesh.name}.ingest",
            group_instance_id=f"{mesh.name}.ingest-{instance}",
            enable_auto_commit=False,
            auto_offset_reset="error",
            session_timeout_ms=10_000,
            fetch_wait_max_ms=100,  # the broker answers with the first record; else it is asked ten times a second
            fetch_min_bytes=1,
            fetch_message_max_bytes=512 << 10,
            queued_min_messages=60_000,
            fetch_queue_backoff_ms=10,
            queued_max_messages_kbytes=64 << 10,
            enable_partition_eof=True,
            partition_assignment_strategy="roundrobin",
            error_cb=end_when_fatal("ingest"),
        )
    )
    reporter = Reporter(mesh, sender.producer, "ingest", f"ingest-{instance}")
    counts = source_partitions(mesh, [mesh.streams[name] for name in used])
    health, control = arguments.new_health(), ControlWatch(mesh)
    Ingest(mesh, plans, counts, consumer, sender, reporter, health=health, control=control).run()


class Ingest:
    def __init__(
        self,
        mesh: Mesh,
        plans: Mapping[str, Sequence[Published]],
        counts: Mapping[str, int],
        consumer: Any,
        sender: Any,
        reporter: Reporter | None,
        health: Health | None = None,
        control: ControlWatch | None = None,
        settings: IngestSettings | None = None,
        clock: Any = time,
    ) -> None:
        self.mesh, self.stopping, self.clock = mesh, False, clock
        self.consumer, self.sender, self.reporter, self.health = consumer, sender, reporter, health or Health()
        self.control, self.waits = control, Waits()
        self.flows: dict[str, list[Flow]] = {}  # query -> what watches its nodes
        talks = control is not None and any(known[-1][0].feedback != "off" for known in plans.values())
        self.core = Ingestion(mesh.streams, mesh.partitions, plans, counts, settings, waits=talks)
        for known in plans.values():
            self._watch_nodes(*known[-1])
        self.first_event_ms: int | None = None

    def run(self) -> None:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)
        self.consumer.subscribe(
            list(self.core.by_topic), on_assign=self._assigned, on_revoke=self._revoked, on_lost=end_when_lost("ingest")
        )
        log.info("reading %s", ", ".join(self.core.by_topic))
        commit_due = control_due = time.monotonic()
        self.health.watch()
        while not self.stopping:
            self.health.beat()
            self._fetch(self.waits.patience_s(time.monotonic(), min(commit_due, control_due)))
            if self._may_send():
                self._round()
            else:
                time.sleep(NO_ROOM_S)
            self.sender.check()
            now = time.monotonic()
            if now >= commit_due or self.core.wants_commit:
                self._commit()
                self._idle()
                commit_due = time.monotonic() + COMMIT_S
            if now >= control_due:
                self._hear_plans()
                control_due = now + CONTROL_S
            if self.reporter is not None and self.reporter.is_due:
                self._report()
        self._commit()
        self._report()
        self.sender.flush()
        self.consumer.close()
        log.info("stopped after %s events", f"{self.core.counts['events_in']:,}")

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    # -- what is handed over

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        stored = []
        for place in consumer.committed(places, timeout=30):
            low, high = consumer.get_watermark_offsets(TopicPartition(place.topic, place.partition), timeout=30)
            stored.append(Stored(place.topic, place.partition, place.offset, place.metadata, low, high))
        self._do(self.core.assigned(stored, self.clock.monotonic()))
        self.health.ready = True

    def _revoked(self, _: Consumer, places: list[TopicPartition]) -> None:
        self._do(self.core.revoked([(place.topic, place.partition) for place in places]))

    def _fetch(self, patience_s: float) -> None:
        """After a round that left work there is more at hand; after another, wait for a first record, and gather for as
        long as it pays."""
        if self.core.has_more:
            self._hand_over(self.consumer.consume(FETCH, 0))
            return
        # Each is handed over by itself: partitions may be taken away and given again within either call.
        first = self.consumer.consume(1, patience_s)
        self._hand_over(first)
        if first or self.core.waiting:
            self._hand_over(self.consumer.consume(FETCH, self.waits.linger_s(self.clock.monotonic())))

    def _hand_over(self, messages: list[Message]) -> None:
        runs: dict[Place, Fetched] = {}
        ends: dict[Place, int] = {}
        last, run = None, Fetched()
        offsets, values = run.offsets, run.values
        for message in messages:
            place: Any = (message.topic(), message.partition())
            offset: Any = message.offset()
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    ends[place] = offset
                else:
                    _fetch_error(self.mesh, message, error)
                continue
            if place != last:  # they come in runs of one partition
                last, run = place, runs.setdefault(place, Fetched())
                offsets, values = run.offsets, run.values
            value = message.value()
            offsets.append(offset)
            values.append(value)
            if value is None:
                run.keys[offset] = message.key()
        self._do(self.core.fetched(runs, ends))

    def _may_send(self) -> bool:
        """Whether receivers that want short queues have room."""
        flows = [flow for group in self.flows.values() for flow in group]
        return not flows or self.core.size.room(not any(flow.is_ahead for flow in flows))

    def _round(self) -> None:
        began = self.clock.monotonic()
        if self.first_event_ms is None and self.core.waiting:
            self.first_event_ms = int(self.clock.time() * 1000)
        rounds = self.core.counts["rounds"]
        effects = self.core.round(began)
        self._do(effects)
        blocks = sum(len(effect.sends) for effect in effects if isinstance(effect, Emit))
        nothing = self.core.counts["rounds"] == rounds and self.core.waiting > 0
        self.waits.worked(began, self.clock.monotonic(), blocks, nothing)

    def _commit(self) -> None:
        self._do(self.core.commit())

    def _idle(self) -> None:
        self._do(self.core.idle(self.clock.monotonic()))

    def _hear_plans(self) -> None:
        """New plans of queries that run here."""
        for published in self.control.news() if self.control is not None else ():
            course = self.core.courses.get(published.query)
            if course is not None and published.epoch > course.newest:
                plan = derive_plan(self.mesh, published)
                log.info("query %s: plan epoch %s begins: %s", published.query, published.epoch, published.tree)
                self._do(self.core.change_plan(published, plan))
                self._watch_nodes(published, plan)

    def _watch_nodes(self, published: PlanPublished, plan: Plan) -> None:
        """Nodes of a query with feedback want short queues."""
        if self.control is None or published.feedback == "off":
            return
        watching = self.flows.setdefault(published.query, [])
        receivers = [topics.node_in(self.mesh.name, published.query, node.id) for node in plan.nodes]
        if new := [topic for topic in receivers if not any(topic in flow.receivers for flow in watching)]:
            watching.append(Flow(self.mesh, published.query, new, self.sender.delivered))

    # -- what comes back

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._send(effect)
                case SetAside():
                    self._set_aside(effect)
                case Flush():
                    self.sender.flush()
                case Commit(offsets, is_floor):
                    self._store(offsets, is_floor)
                case Assign(starts):
                    self.consumer.assign([TopicPartition(*start) for start in starts])
                case Pause(places):
                    self.consumer.pause([TopicPartition(*place) for place in places])
                case Resume(places):
                    self.consumer.resume([TopicPartition(*place) for place in places])
                case Warn(text):
                    log.warning("%s", text)

    def _send(self, emit: Emit) -> None:
        failpoint("ingest.before_send")
        for send in emit.sends:
            topic = topics.node_in(self.mesh.name, emit.query, send.target)
            self.sender.send(topic, send.partition, encode_block(send.block))
        failpoint("ingest.after_send")

    def _store(self, offsets: list[tuple[str, int, int, str]], is_floor: bool) -> None:
        if not is_floor:
            failpoint("ingest.before_commit")
        self._write_offsets([TopicPartition(*offset) for offset in offsets])
        if not is_floor:
            failpoint("ingest.after_commit")

    def _write_offsets(self, offsets: list[TopicPartition]) -> None:
        if offsets:
            self.consumer.commit(offsets=offsets, asynchronous=False)

    def _set_aside(self, aside: SetAside) -> None:
        stream, topic, partition = aside.stream, aside.topic, aside.partition
        target = partition % self.mesh.partitions
        for late in aside.late:
            record = {
                "stream": stream,
                "topic": topic,
                "partition": partition,
                "offset": late.offset,
                "ts": late.time,
                "reason": late.reason,
                "watermark": late.watermark,
            }
            key = f"{stream}:{partition}:{late.offset}".encode()
            self.sender.send(topics.late(self.mesh.name), target, msgspec.json.encode(record), key)
        for offset, reason, value in aside.broken:
            letter = dead_letter(stream, topic, partition, offset, reason, value)
            self.sender.send(topics.dead(self.mesh.name), target, letter, f"{topic}:{partition}:{offset}".encode())

    def _report(self) -> None:
        core, lag = self.core, 0
        for place in (*core.backlogs, *core.tables):
            try:
                _, high = self.consumer.get_watermark_offsets(
                    TopicPartition(*place), timeout=2, cached=not self.health.quiet
                )
            except KafkaException:
                continue
            if core.is_loaded_table(place):
                self._do(core.ended(place, high))
            else:
                lag += account.lag(core, place, high, self.health.quiet)
        assert self.reporter is not None
        self.reporter.send(
            **core.counts,
            first_event_ms=self.first_event_ms,
            lag=lag,
            watermark_ms=account.watermark(core),
            **account.sent(core),
            streams=core.per_stream,
            alarms=account.alarms(core, self.clock.monotonic()),
            ready=self.health.ready,
        )
        self.health.observe(core.counts["events_in"], lag)
        self.health.check()


def _fetch_error(mesh: Mesh, message: Message, error: KafkaError) -> None:
    raise_refused(mesh, error, message.topic())
    if error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
        raise StateError(f"source topic {message.topic()} no longer holds the next record to read: {error.str()}")
    ending = (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID, KafkaError.UNKNOWN_TOPIC_OR_PART)
    if error.fatal() or error.code() in ending:
        raise KafkaException(error)
    log.warning("fetching: %s", error.str())
