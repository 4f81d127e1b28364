"""The ingest service: source topics in, blocks for the join nodes out.

A round: fetch, decide which partitions may go on (alignment), read them into columns, send blocks; now and then tell
every channel its positions, flush, and commit the source offsets with each partition's reading as metadata. Static
tables come first: streams wait until those of this worker are loaded up to their cut, and nothing behind it is read.

Invariant: a source offset is committed only after every block of the rows before it is delivered and every channel
knows the position; so a restart repeats rows (dropped downstream by source offset) and never skips one.
"""

import logging
import signal
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from schemas import topics
from schemas.block import NO_WATERMARK, encode_block
from schemas.control import PlanPublished
from schemas.errors import StateError
from schemas.mesh import Mesh
from schemas.rows import Rows
from services.ingest.alignment import Backlog, Place, may_go
from services.runtime.control import wait_for_plans
from services.runtime.dead import dead_letter
from services.runtime.failpoints import failpoint
from services.runtime.flow import Flow
from services.runtime.health import Health
from services.runtime.kafka import client_config, source_partitions
from services.runtime.producer import Sender
from services.runtime.report import Reporter
from services.runtime.service import Arguments, end_when_fatal, end_when_lost
from topology.ingest.reading import HeraldRouter, Read, Reading, Router, StreamReader, routers_of
from topology.ingest.table import TableReader
from topology.plan.plan import Plan
from topology.state.window import COMPLETE

log = logging.getLogger("joinmesh.ingest")
FETCH = 20_000  # records a round
PER_PARTITION = 4_000  # records of one partition a round, so that streams advance together
PER_PARTITION_LEAST = 250  # when receivers are slow: what is sent in one round cannot be called back
LINGER_S = 0.03
COMMIT_S = 1.0
BACKLOG_MOST = 40_000  # fetched and waiting, per partition, before its fetching is paused
SILENT_S = 30.0


def serve(arguments: Arguments) -> None:
    mesh, instance = arguments.mesh, arguments.instance
    plans = wait_for_plans(mesh, mesh.queries)
    used = {s.stream for _, plan in plans.values() for s in plan.query.sources}
    sender = Sender(mesh)
    consumer = Consumer(
        client_config(
            mesh,
            group_id=f"{mesh.name}.ingest",
            group_instance_id=f"{mesh.name}.ingest-{instance}",
            enable_auto_commit=False,
            auto_offset_reset="error",
            session_timeout_ms=10_000,
            fetch_wait_max_ms=20,
            fetch_min_bytes=64 << 10,
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
    flows = [
        Flow(mesh, name, [topics.node_in(mesh.name, name, node.id) for node in plan.nodes], sender.delivered)
        for name, (published, plan) in plans.items()
        if published.feedback != "off"
    ]
    Ingest(mesh, plans, counts, consumer, sender, reporter, health=arguments.new_health(), flows=flows).run()


class Ingest:
    def __init__(
        self,
        mesh: Mesh,
        plans: Mapping[str, tuple[PlanPublished, Plan]],
        counts: Mapping[str, int],
        consumer: Any,
        sender: Any,
        reporter: Reporter | None,
        incarnation: int | None = None,
        health: Health | None = None,
        flows: Sequence[Flow] = (),
    ) -> None:
        self.per_round_least = min(PER_PARTITION, PER_PARTITION_LEAST)
        self.flows, self.per_round, self.has_room = flows, self.per_round_least if flows else PER_PARTITION, True
        self.mesh, self.stopping = mesh, False
        self.consumer, self.sender, self.reporter, self.health = consumer, sender, reporter, health or Health()
        streams = [mesh.streams[name] for name in mesh.streams if name in counts]
        cuts = {table: cut for message, _ in plans.values() for table, cut in message.table_cuts.items()}
        self.readers = {
            stream.name: (
                StreamReader(stream, counts[stream.name])
                if stream.table is None
                else TableReader(stream, counts[stream.name], cuts[stream.name])
            )
            for stream in streams
        }
        self.by_topic = {stream.topic: stream.name for stream in streams}
        incarnation = incarnation or int(time.time() * 1000)
        self.routers: dict[str, list[Router]] = {name: [] for name in self.readers}
        for message, plan in plans.values():
            for router in routers_of(plan, mesh.partitions, message.epoch, incarnation, message.heralds):
                self.routers[router.source.stream].append(router)
        windows = [s.window_ms for _, plan in plans.values() for s in plan.query.sources if not s.is_table]
        self.slack_ms = max(1_000, min(windows) // 4)
        self.longest_ms = max(windows)
        self.backlogs: dict[Place, Backlog] = {}  # of streams
        self.tables: dict[Place, Backlog] = {}
        self.unread: dict[Place, int] = {}  # records of tables behind their cut
        self.committed: dict[Place, int] = {}
        self.first_event_ms: int | None = None
        self.counts = dict.fromkeys(("events_in", "late", "dead", "rounds"), 0)
        self.per_stream = {name: {"events": 0, "late": 0, "dead": 0} for name in self.readers}

    def run(self) -> None:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)
        self.consumer.subscribe(
            list(self.by_topic), on_assign=self._assigned, on_revoke=self._revoked, on_lost=end_when_lost("ingest")
        )
        log.info("reading %s", ", ".join(self.by_topic))
        commit_due = time.monotonic() + COMMIT_S
        progressed = False
        self.health.watch()
        while not self.stopping:
            self.health.beat()
            # After a round with work there is likely more at hand; after one without, wait for fetches or for others to
            # catch up.
            self._fetch(0.0 if progressed else LINGER_S)
            progressed = self._may_send() and self._round()
            self.sender.check()
            if time.monotonic() >= commit_due:
                self._commit()
                self._idle()
                commit_due = time.monotonic() + COMMIT_S
            if self.reporter is not None and self.reporter.is_due:
                self._report()
        self._commit()
        self._report()
        self.sender.flush()
        self.consumer.close()
        log.info("stopped after %s events", f"{self.counts['events_in']:,}")

    def _stop(self, *_: Any) -> None:
        self.stopping = True

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        stored = consumer.committed(places, timeout=30)
        for place in stored:
            stream = self.by_topic[place.topic]
            low, high = consumer.get_watermark_offsets(TopicPartition(place.topic, place.partition), timeout=30)
            start = place.offset if place.offset >= 0 else low
            reader = self.readers[stream]
            if isinstance(reader, TableReader) and start >= reader.cut[place.partition]:
                low = min(low, start)  # it is loaded: what became of its records since does not matter
            if start < low:
                raise StateError(
                    f"source topic {place.topic} partition {place.partition}: next record to read is {start}, but the"
                    f" topic now begins at {low}; {low - start:,} records were deleted before they were joined. Keep"
                    " records longer, and use a new mesh name to join again from what the topics hold now"
                )
            reading = (
                msgspec.json.decode(place.metadata, type=Reading)
                if place.offset >= 0 and place.metadata
                else Reading(start)
            )
            reading.next = start
            reader.readings[place.partition] = reading
            for router in self.routers[stream]:
                router.assign(place.partition, start)
            backlog = Backlog(fetched=start, end=high)
            backlog.time = reading.max_time if reading.max_time != NO_WATERMARK else None
            (self.tables if isinstance(reader, TableReader) else self.backlogs)[place.topic, place.partition] = backlog
            self.committed[place.topic, place.partition] = start
            place.offset = high if reader.watermark(place.partition) == COMPLETE else start
        consumer.assign([TopicPartition(p.topic, p.partition, p.offset) for p in stored])
        for place in stored:
            reader = self.readers[self.by_topic[place.topic]]
            if isinstance(reader, TableReader):
                self._watch_cut(
                    reader, place.topic, place.partition, self.tables[place.topic, place.partition].end or 0
                )
        self.health.ready = True

    def _revoked(self, _: Consumer, places: list[TopicPartition]) -> None:
        self._commit()
        for place in places:
            stream = self.by_topic[place.topic]
            self.readers[stream].forget(place.partition)
            for known in (self.backlogs, self.tables, self.unread):
                known.pop((place.topic, place.partition), None)
            for router in self.routers[stream]:
                router.revoke(place.partition)

    def _fetch(self, wait_s: float) -> None:
        messages = self.consumer.consume(
            FETCH, wait_s
        )  # an assignment may happen within: what it brings belongs to the first of these already
        backlogs = {**self.backlogs, **self.tables}
        for message in messages:
            error, place = message.error(), (message.topic(), message.partition())
            backlog = backlogs.get(place)
            if error is not None:
                self._fetch_error(message, error, backlog)
            elif backlog is not None:
                value = message.value()
                backlog.offsets.append(message.offset())
                backlog.values.append(value)
                if value is None and place in self.tables:
                    backlog.keys[message.offset()] = message.key()
        for (topic, partition), backlog in backlogs.items():
            if backlog.offsets:
                backlog.fetched = max(backlog.fetched, backlog.offsets[-1] + 1)
            if len(backlog) > BACKLOG_MOST and not backlog.paused:
                backlog.paused = True
                self.consumer.pause([TopicPartition(topic, partition)])
            elif backlog.paused and len(backlog) < BACKLOG_MOST // 4:
                backlog.paused = False
                self.consumer.resume([TopicPartition(topic, partition)])

    def _fetch_error(self, message: Message, error: KafkaError, backlog: Backlog | None) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            if backlog is not None:
                # Offsets before it that held no event are passed too: markers of the producers' transactions.
                backlog.end = message.offset()
                backlog.fetched = cast(int, message.offset())
        elif error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            raise StateError(f"source topic {message.topic()} no longer holds the next record to read: {error.str()}")
        elif error.fatal() or error.code() in (
            KafkaError._FATAL,
            KafkaError.FENCED_INSTANCE_ID,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        ):
            raise KafkaException(error)
        else:
            log.warning("fetching: %s", error.str())

    def _may_send(self) -> bool:
        """Whether receivers that want short queues have room; a round is smaller the slower they are: half as large
        each time they have none, a quarter larger after each that was sent."""
        if not self.flows:
            return True
        had_room, self.has_room = self.has_room, not any(flow.is_ahead for flow in self.flows)
        if had_room and not self.has_room:
            self.per_round = max(self.per_round_least, self.per_round // 2)
        return self.has_room

    def _round(self) -> bool:
        now = time.monotonic()
        rows = self._load_tables()
        if self.first_event_ms is None and any(len(b) for b in self.backlogs.values()):
            self.first_event_ms = int(time.time() * 1000)
        for place in may_go(self.backlogs, self.slack_ms, now) if self._tables_loaded() else ():
            backlog = self.backlogs[place]
            offsets, values = backlog.take(self.per_round)
            topic, partition = place
            stream = self.by_topic[topic]
            reader = self.readers[stream]
            read = reader.read(partition, offsets, values)
            backlog.moved_at = now
            reading = reader.readings[partition]
            backlog.time = reading.max_time if reading.max_time != NO_WATERMARK else None
            self.counts["events_in"] += len(values)
            self.per_stream[stream]["events"] += len(values)
            if read.late or read.broken:
                self._set_aside(stream, topic, partition, values, read)
            rows.setdefault(stream, []).append(read.rows)
        read_now = {stream: Rows.concat(frames) for stream, frames in rows.items()}
        for heralds in (True, False):  # of all streams before the rows of any
            for stream, frame in read_now.items():
                for router in self.routers[stream]:
                    if isinstance(router, HeraldRouter) == heralds:
                        self._send(router, router.send(frame, self.readers[stream]))
        self.counts["rounds"] += bool(rows)
        if rows:
            self.per_round = min(PER_PARTITION, self.per_round + self.per_round // 4)
        return any(len(backlog) for backlog in self.backlogs.values()) and bool(rows)

    def _tables_loaded(self) -> bool:
        return all(cast(TableReader, self.readers[self.by_topic[topic]]).is_loaded(p) for topic, p in self.tables)

    def _load_tables(self) -> dict[str, list[Rows]]:
        """Take what was fetched of tables; gives the rows of those partitions whose cut is reached now."""
        rows: dict[str, list[Rows]] = {}
        for (topic, partition), backlog in self.tables.items():
            stream = self.by_topic[topic]
            reader = cast(TableReader, self.readers[stream])
            if reader.is_loaded(partition):
                continue
            offsets, values = backlog.take(len(backlog))
            count = bisect_left(offsets, reader.cut[partition])
            if count:
                read = reader.read(partition, offsets[:count], values[:count], backlog.keys)
                self.counts["events_in"] += count
                self.per_stream[stream]["events"] += count
                if read.broken:
                    self._set_aside(stream, topic, partition, values, read)
            backlog.keys.clear()
            if backlog.fetched >= reader.cut[partition]:
                rows.setdefault(stream, []).append(reader.load(partition))
                self._watch_cut(reader, topic, partition, max(backlog.end or 0, backlog.fetched))
        return rows

    def _watch_cut(self, reader: TableReader, topic: str, partition: int, end: int) -> None:
        """A loaded table is not read on; what stands behind its cut is said once."""
        if not reader.is_loaded(partition):
            return
        self.consumer.pause([TopicPartition(topic, partition)])
        self.tables[topic, partition].paused = False  # that was for a full backlog, and would be undone
        told = self.unread.get((topic, partition), 0)
        self.unread[topic, partition] = unread = max(told, end - reader.cut[partition])
        if unread and not told:
            log.warning("%s", _behind_cut(reader.stream.name, partition, unread))

    def _send(self, router: Router, sends: list[Any]) -> None:
        failpoint("ingest.before_send")
        for send in sends:
            topic = topics.node_in(self.mesh.name, router.plan.query.name, send.target)
            self.sender.send(topic, send.partition, encode_block(send.block))
        failpoint("ingest.after_send")

    def _set_aside(self, stream: str, topic: str, partition: int, values: list[bytes | None], read: Read) -> None:
        target = partition % self.mesh.partitions
        for late in read.late:
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
        for offset, broken in read.broken:
            letter = dead_letter(stream, topic, partition, offset, broken.reason, values[broken.index])
            self.sender.send(topics.dead(self.mesh.name), target, letter, f"{topic}:{partition}:{offset}".encode())
        self.counts["late"] += len(read.late)
        self.counts["dead"] += len(read.broken)
        self.per_stream[stream]["late"] += len(read.late)
        self.per_stream[stream]["dead"] += len(read.broken)

    def _idle(self) -> None:
        """Raise the floor of partitions silent longer than their stream allows; durable before anyone is told.

        Called right after a commit, so that offset, largest time and floor are of one moment.
        """
        now = time.monotonic()
        active = [
            self.readers[self.by_topic[topic]].watermark(partition)
            for (topic, partition), b in self.backlogs.items()
            if now - b.moved_at < self._idle_after_s(topic)
        ]
        floor = min(active, default=NO_WATERMARK)
        raised = False
        for (topic, partition), backlog in self.backlogs.items():
            reader = self.readers[self.by_topic[topic]]
            silent = backlog.at_end and not len(backlog) and now - backlog.moved_at >= self._idle_after_s(topic)
            if silent and floor > reader.watermark(partition):
                reader.readings[partition].floor = floor
                raised = True
        if raised:
            self._write_offsets(force=True)

    def _idle_after_s(self, topic: str) -> float:
        idle = self.mesh.streams[self.by_topic[topic]].idle_after_ms
        return idle / 1000 if idle is not None else float("inf")

    def _commit(self) -> None:
        for stream, routers in self.routers.items():
            for router in routers:
                self._send(router, router.tell_all(self.readers[stream]))
        self.sender.flush()
        failpoint("ingest.before_commit")
        self._write_offsets()
        failpoint("ingest.after_commit")

    def _write_offsets(self, force: bool = False) -> None:
        offsets = []
        for (topic, partition), committed in self.committed.items():
            reading = self.readers[self.by_topic[topic]].readings.get(partition)
            if reading is not None and (force or reading.next > committed):
                offsets.append(TopicPartition(topic, partition, reading.next, msgspec.json.encode(reading).decode()))
                self.committed[topic, partition] = reading.next
        if offsets:
            self.consumer.commit(offsets=offsets, asynchronous=False)

    def _report(self) -> None:
        lag = 0
        for (topic, partition), backlog in (*self.backlogs.items(), *self.tables.items()):
            try:
                _, high = self.consumer.get_watermark_offsets(
                    TopicPartition(topic, partition), timeout=2, cached=not self.health.quiet
                )
            except KafkaException:
                continue
            reader = self.readers[self.by_topic[topic]]
            reading = reader.readings.get(partition)
            if isinstance(reader, TableReader) and reader.is_loaded(partition):
                self._watch_cut(reader, topic, partition, high)
                continue
            if backlog.at_end and not len(backlog) and not self.health.quiet:
                continue
            if high >= 0 and reading is not None:
                # Offsets up to `fetched` are known, also those that hold no event (markers of transactions).
                lag += (
                    max(0, high - max(reading.next, backlog.fetched))
                    if self.health.quiet
                    else max(1, high - reading.next)
                )
        watermarks = [
            min((r.watermark(p) for p in range(r.partitions)), default=NO_WATERMARK)
            for r in self.readers.values()
            if not isinstance(r, TableReader)
        ]
        low = min(watermarks, default=NO_WATERMARK)
        routers = [r for group in self.routers.values() for r in group if not isinstance(r, HeraldRouter)]
        assert self.reporter is not None
        self.reporter.send(
            **self.counts,
            first_event_ms=self.first_event_ms,
            lag=lag,
            watermark_ms=low if low != NO_WATERMARK else None,
            rows_out=sum(r.rows_out for r in routers),
            null_keys=sum(r.dropped_null for r in routers),
            filtered=sum(r.dropped_selection for r in routers),
            streams=self.per_stream,
            alarms=self._alarms(),
            ready=self.health.ready,
        )
        self.health.observe(self.counts["events_in"], lag)
        self.health.check()

    def _alarms(self) -> list[str]:
        now = time.monotonic()
        alarms = [_behind_cut(self.by_topic[topic], partition, n) for (topic, partition), n in self.unread.items() if n]
        newest = max((b.time for b in self.backlogs.values() if b.time is not None), default=None)
        for (topic, partition), backlog in self.backlogs.items():
            stream = self.by_topic[topic]
            if (
                newest is None
                or now - backlog.moved_at < SILENT_S
                or self.mesh.streams[stream].idle_after_ms is not None
            ):
                continue
            if backlog.time is None:
                alarms.append(
                    f"stream {stream} partition {partition} has never had an event and holds the watermark: state"
                    " grows; send it events or set idle_after on the stream"
                )
            elif newest - backlog.time > self.longest_ms:
                alarms.append(
                    f"stream {stream} partition {partition} is silent since {now - backlog.moved_at:.0f} s and holds"
                    " the watermark: state grows; send it events or set idle_after on the stream"
                )
        return alarms


def _behind_cut(table: str, partition: int, count: int) -> str:
    return (
        f"table {table} partition {partition}: {count:,} records came after the mesh first started and are not joined; "
        "a table is static: restart under a new mesh name to read it again"
    )
