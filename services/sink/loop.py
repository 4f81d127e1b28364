"""The sink service of one query: the root's blocks in, result records out, in Kafka transactions.

Invariant: a transaction holds the results of some blocks and the offsets behind them, with the last sequence seen per
partition as the offset's metadata. So for a read_committed reader each result is there exactly once, whatever is killed
when; a second sink with the same transactional id fences the first.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from schemas import topics
from schemas.block import Block, NodeEnded, decode_block
from schemas.errors import BlockError, JoinmeshError, StateError
from schemas.mesh import Mesh
from schemas.rows import Rows
from schemas.topics import MAX_RECORD_BYTES
from services.runtime.control import read_plans, wait_for_plans
from services.runtime.dead import dead_letter
from services.runtime.failpoints import failpoint
from services.runtime.health import Health
from services.runtime.kafka import client_config, left_open
from services.runtime.membership import HEARTBEAT_MS, SESSION_MS, leave
from services.runtime.report import Durations, Reporter
from services.runtime.security.refusals import raise_refused, refusal
from services.runtime.service import Arguments, Stop, end_when_fatal, end_when_lost
from topology.join.admission import Admission, check_barrier, check_epoch
from topology.plan.plan import Input, Plan
from topology.results.results import ResultEncoder, Results, SequenceFilter

log = logging.getLogger("joinmesh.sink")
TRANSACTION_S = 0.1  # a transaction is closed after this long while blocks keep coming …
TRANSACTION_RESULTS = 50_000  # … or with this many results
FETCH = 64  # blocks that are taken together
SETTLE_S = 0.008  # for the broker to write the last one's markers; begun sooner, one commit in ten took 20 ms
IDLE_S = 0.1  # how long a loop without a block waits for one
TRANSACTION_PATIENCE_S = 10.0  # after that the process ends; the next one aborts the transaction and goes on


class Closing:
    """How long it takes to close a transaction, of late, and from when on the next one may be closed: so that with
    blocks coming in all the time half of it is spent on closing at most."""

    def __init__(self) -> None:
        self.cost_s, self.due = 0.0, 0.0

    def took(self, begun: float, ended: float) -> None:
        self.cost_s += (min(ended - begun, TRANSACTION_S) - self.cost_s) / 8
        self.due = ended + self.cost_s


class Seen(msgspec.Struct):
    sequence: int = -1


def serve(arguments: Arguments) -> None:
    if arguments.query is None:
        raise JoinmeshError("the sink needs --query")
    mesh, query, instance = arguments.mesh, arguments.query, arguments.instance
    ((published, plan),) = wait_for_plans(mesh, [query]).values()
    name = f"{mesh.name}.{query}.sink-{instance}"
    producer = Producer(
        client_config(
            mesh,
            transactional_id=name,
            linger_ms=0,  # a transaction that closes would wait for it
            retry_backoff_ms=10,
            message_max_bytes=MAX_RECORD_BYTES,
            queue_buffering_max_messages=1_000_000,
            queue_buffering_max_kbytes=512 << 10,
            batch_num_messages=50_000,
            batch_size=1 << 20,
            transaction_timeout_ms=60_000,
            error_cb=end_when_fatal("sink"),
        )
    )
    consumer = Consumer(
        client_config(
            mesh,
            group_id=f"{mesh.name}.{query}.sink",
            group_instance_id=name,
            enable_auto_commit=False,
            auto_offset_reset="error",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            fetch_wait_max_ms=500,
            fetch_min_bytes=1,
            isolation_level="read_committed",
            fetch_message_max_bytes=4 << 20,
            queued_max_messages_kbytes=64 << 10,
            queued_min_messages=1000,
            fetch_queue_backoff_ms=5,
            error_cb=end_when_fatal("sink"),
        )
    )
    reporter = Reporter(mesh, Producer(client_config(mesh)), "sink", f"{query}.sink-{instance}", query=query)

    def newest() -> int:
        return read_plans(mesh)[query].epoch

    sink = Sink(mesh, plan, published.epoch, consumer, producer, reporter, arguments.new_health(), newest)
    sink.run(arguments.stop)
    if arguments.stop.for_good:
        leave(mesh, f"{mesh.name}.{query}.sink", name)


class Sink:
    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        epoch: int,
        consumer: Any,
        producer: Any,
        reporter: Reporter | None,
        health: Health | None = None,
        newest: Callable[[], int] | None = None,
    ) -> None:
        """`newest` looks up the newest epoch of the query's plans."""
        query = plan.query.name
        self._newest = newest
        self.mesh, self.query, self.epoch = mesh, query, epoch
        self.consumer, self.producer, self.reporter, self.health = consumer, producer, reporter, health or Health()
        root = Input(plan.root.id, plan.root.aliases, plan.root.columns, ())
        self.admission = Admission(plan, root, 0, mesh.partitions, hashed=False)
        self.encoder = ResultEncoder(plan)
        self.source, self.results_topic = topics.query_out(mesh.name, query), topics.results(mesh.name, query)
        self.filters: dict[int, SequenceFilter] = {}
        self.next: dict[int, int] = {}
        self.started: float | None = None
        self.pending = 0
        self.counts = dict.fromkeys(("blocks_in", "rows_in", "rows_out", "transactions", "dead"), 0)
        self.latency = Durations(20_000)
        self.closing = Closing()

    def run(self, stop: Stop) -> None:
        stop.listen()
        self._begin_transactions()
        self._clear()
        self.consumer.subscribe(
            [self.source], on_assign=self._assigned, on_revoke=self._revoked, on_lost=end_when_lost("sink")
        )
        log.info("writing %s", self.results_topic)
        self.health.watch()
        while not stop.is_asked:
            self.health.beat()
            came = self.consumer.consume(FETCH, 0)
            self._take(came)
            if self._is_to_close(not came):
                self._close_transaction()
                if not came:
                    time.sleep(SETTLE_S)
            elif not came:  # `consume` would wait for a full batch, this comes back with the first block
                first = self.consumer.poll(self._wait_s())
                self._take([] if first is None else [first])
            self.producer.poll(0)
            if self.reporter is not None and self.reporter.is_due:
                self._report()
        self._close_transaction()
        self._report()
        if self.reporter is not None:
            self.reporter.producer.flush(10)
        self.consumer.close()
        log.info("stopped after %s results", f"{self.counts['rows_out']:,}")

    def _begin_transactions(self) -> None:
        try:
            self.producer.init_transactions(60)
        except KafkaException as error:
            prefix = f"{self.mesh.name}.{self.query}.sink-"
            raise refusal(self.mesh, error.args[0], prefix, "write with") or error from None

    def _is_to_close(self, nothing_waits: bool) -> bool:
        """A transaction ends as soon as nothing waits for it, but no sooner after the last one than that took."""
        if self.started is None:
            return False
        now = time.monotonic()
        full = self.pending >= TRANSACTION_RESULTS or now - self.started >= TRANSACTION_S
        return full or (nothing_waits and now >= self.closing.due)

    def _wait_s(self) -> float:
        return IDLE_S if self.started is None else max(0.0, self.closing.due - time.monotonic())

    def _clear(self) -> None:
        """End for good what an earlier transaction of this sink may have left open.

        A broker that is stopped at the wrong moment may take a transaction for complete without its markers in the log.
        The next commit would then commit its records too, after they were read and written again. An empty transaction
        over the same partitions, aborted, ends all of it together: results and offsets alike, so they are read and
        written again, once.
        """
        self.producer.begin_transaction()
        for partition in left_open(self.mesh, self.results_topic, self.mesh.partitions):
            log.warning(
                "%s partition %s holds records of a transaction that was never ended; ending it",
                self.results_topic,
                partition,
            )
            self.producer.produce(self.results_topic, b"", partition=partition)
        try:
            self.producer.flush(TRANSACTION_PATIENCE_S)
            self.producer.send_offsets_to_transaction(
                [TopicPartition(self.source, 0, 0)], self.consumer.consumer_group_metadata(), TRANSACTION_PATIENCE_S
            )
        except (
            KafkaException
        ) as error:  # refused, because the group still has the member that died; that the group takes part is enough
            log.debug("clearing: %s", error)
        self.producer.abort_transaction(TRANSACTION_PATIENCE_S)

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        stored = consumer.committed(places, timeout=30)
        for place in stored:
            low, _ = consumer.get_watermark_offsets(TopicPartition(place.topic, place.partition), timeout=30)
            start = place.offset if place.offset >= 0 else low
            if start < low:
                raise StateError(
                    f"{place.topic} partition {place.partition}: next block to write is {start}, but the topic now"
                    f" begins at {low}; blocks were deleted before the sink read them. Keep them longer (retention.ms)"
                    " and use a new mesh name to compute the results again"
                )
            seen = msgspec.json.decode(place.metadata, type=Seen) if place.offset >= 0 and place.metadata else Seen()
            self.filters[place.partition] = SequenceFilter(seen.sequence)
            self.next[place.partition] = start
        consumer.assign([TopicPartition(p.topic, p.partition, self.next[p.partition]) for p in stored])
        self.health.ready = True

    def _revoked(self, _: Consumer, places: list[TopicPartition]) -> None:
        self.health.ready = False
        self._close_transaction()
        for place in places:
            self.filters.pop(place.partition, None)
            self.next.pop(place.partition, None)

    def _fetch_error(self, error: KafkaError) -> None:
        raise_refused(self.mesh, error, self.source)
        if error.code() in (KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET):
            raise StateError(f"{self.source} no longer holds the next block to write: {error.str()}")
        if error.fatal() or error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID):
            raise KafkaException(error)
        log.warning("fetching: %s", error.str())

    def _take(self, messages: list[Message]) -> None:
        """Blocks of one fetch, those of a partition encoded together."""
        rows: dict[int, list[Rows]] = {}
        for message in messages:
            error = message.error()
            if error is not None:
                self._fetch_error(error)
                continue
            partition, offset = cast(int, message.partition()), cast(int, message.offset())
            if self.started is None:
                self.producer.begin_transaction()
                self.started = time.monotonic()
            self.next[partition] = offset + 1
            self.counts["blocks_in"] += 1
            block = self._decode(partition, offset, cast(bytes, message.value()))
            new = self.filters[partition].unseen(block) if block is not None else None
            if new is not None:
                rows.setdefault(partition, []).append(new)
                self.latency.add(time.time() * 1000 - message.timestamp()[1])
        for partition, blocks in rows.items():
            made = self.encoder.encode(Rows.concat(blocks))
            self.counts["rows_in"] += len(made)
            failpoint("sink.before_send")
            self._produce(made, partition)
            failpoint("sink.after_send")
            self.pending += len(made)

    def _decode(self, partition: int, offset: int, data: bytes) -> Block | None:
        try:
            block = decode_block(data)
            if block.header.epoch > self.epoch and self._newest is not None:  # the plan has changed since
                self.epoch = self._newest()
            check_epoch(block.header, self.epoch)
            if isinstance(block.header, NodeEnded):
                check_barrier(
                    block,
                    self.admission if block.header.node == self.admission.input.name else None,
                    self.mesh.partitions,
                )
            else:
                self.admission.check(block)
            return block
        except BlockError as error:
            self.counts["dead"] += 1
            letter = dead_letter(None, self.source, partition, offset, str(error), data)
            self.producer.produce(topics.dead(self.mesh.name), letter, partition=partition)
            log.error("block at %s:%s:%s set aside: %s", self.source, partition, offset, error)
            return None

    def _produce(self, made: Results, partition: int) -> None:
        produce, topic = self.producer.produce, self.results_topic
        for key, value, moment in zip(made.keys, made.values, made.times, strict=True):
            while True:
                try:
                    produce(topic, value, key, partition, timestamp=moment)
                    break
                except BufferError:
                    self.producer.poll(0.05)

    def _close_transaction(self) -> None:
        if self.started is None:
            return
        offsets = [
            TopicPartition(self.source, p, next, msgspec.json.encode(Seen(self.filters[p].last)).decode())
            for p, next in self.next.items()
        ]
        begun = time.monotonic()
        # May hang for longer than it is told when the broker was restarted; `Health.watch` ends the process then.
        self.producer.send_offsets_to_transaction(
            offsets, self.consumer.consumer_group_metadata(), TRANSACTION_PATIENCE_S
        )
        failpoint("sink.before_commit")
        self.producer.commit_transaction(TRANSACTION_PATIENCE_S)
        failpoint("sink.after_commit")
        self.counts["rows_out"] += self.pending
        self.counts["transactions"] += 1
        self.started, self.pending = None, 0
        self.closing.took(begun, time.monotonic())

    def _report(self) -> None:
        lag = 0
        for partition, next in self.next.items():
            try:
                _, high = self.consumer.get_watermark_offsets(
                    TopicPartition(self.source, partition), timeout=2, cached=not self.health.quiet
                )
            except KafkaException:
                continue
            lag += max(0, high - next)
        assert self.reporter is not None
        self.reporter.send(
            **self.counts,
            events_in=self.counts["blocks_in"],
            lag=lag,
            step_ms_p50=self.latency.percentile(0.5),
            step_ms_p99=self.latency.percentile(0.99),
            ready=self.health.ready,
        )
        self.health.observe(self.counts["blocks_in"], lag)
        self.health.check()
        self.reporter.producer.poll(0)
