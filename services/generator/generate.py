"""Writes a workload to the mesh's source topics.

Invariant: within a partition, records are produced in the sequence's order and exactly once (idempotent producer);
streams advance together in event time, so a reader that starts in the middle sees them as they would have come.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, Producer

from schemas.errors import JoinmeshError, MachineError
from schemas.mesh import Mesh, did_you_mean
from schemas.topics import Topic
from services.generator.encode import Encoder, Message
from services.generator.sequence import Sequence, sequence
from services.generator.workload import Workload, shape_of
from services.runtime.kafka import client_config, ensure_topics, source_partitions, topic_offsets
from services.runtime.queries import parse_queries

SLICE = 20_000
QUEUE = 400_000
Progress = Callable[[str], None]
Delivered = Callable[[str, int, int, bytes], None]  # topic, partition, offset, value


@dataclass(frozen=True)
class GeneratedStream:
    """What was written to one stream. `late` and `broken` are what a reader of these records alone will find."""

    stream: str
    topic: str
    partitions: int
    events: int
    late: int
    broken: int
    null: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True)
class Generated:
    streams: tuple[GeneratedStream, ...]
    seconds: float

    @property
    def events(self) -> int:
        return sum(stream.events for stream in self.streams)


def generate(
    mesh: Mesh,
    work: Workload | None = None,
    *,
    streams: Iterable[str] | None = None,
    create: int | None = None,
    progress: Progress = lambda _: None,
    delivered: Delivered | None = None,
) -> Generated:
    """Write the workload; `create` makes missing source topics with that many partitions; `delivered` is told of each
    record where it went."""
    work = work or Workload()
    queries = parse_queries(mesh)
    shape = shape_of(mesh, queries)
    tables = [name for name, stream in mesh.streams.items() if stream.table is not None]
    chosen = list(streams) if streams else [name for name in shape.order if name not in tables]
    for name in chosen:
        if name not in mesh.streams:
            raise JoinmeshError(f"no stream `{name}` in {mesh.file}{did_you_mean(name, mesh.streams)}")
        if name in tables:
            raise JoinmeshError(
                f"`{name}` is a table: generate writes events of streams only; write its records yourself"
            )
    if tables and not streams:
        progress(f"tables are yours to write, before the mesh first starts: {', '.join(tables)}")
    if create is not None:
        ensure_sources(mesh, chosen, create, progress)
    partitions = source_partitions(mesh, [mesh.streams[name] for name in chosen])
    _warn_of_older_records(mesh, partitions, progress)
    event_rate = work.event_rate or (work.rate / len(chosen) if work.rate else 1000.0)
    sequences: dict[str, Sequence] = {}
    encoders: dict[str, Encoder] = {}
    for name in chosen:
        domains = {
            field: shape.domains[name, field] for field in mesh.streams[name].fields if (name, field) in shape.domains
        }
        distinct = list(dict.fromkeys(domains.values()))
        place = shape.order.index(name)
        sequences[name] = sequence(mesh.streams[name], place, distinct, shape, work, event_rate, partitions[name])
        encoders[name] = Encoder(mesh.streams[name], domains, shape, work)
    seconds = _produce(mesh, work, sequences, encoders, progress, delivered)
    return Generated(tuple(_summary(mesh, name, partitions[name], rows) for name, rows in sequences.items()), seconds)


def ensure_sources(mesh: Mesh, streams: Iterable[str], partitions: int, progress: Progress) -> None:
    """Create the source topics that are missing. One that is there is left as it is, whatever its settings: it is its
    owner's."""
    from services.runtime.kafka import describe_topics

    topics = {mesh.streams[name].topic for name in streams}
    missing = sorted(topics - set(describe_topics(mesh, topics)))
    ensure_topics(mesh, [Topic(name, partitions, {"retention.ms": "-1"}) for name in missing], progress)


def _produce(
    mesh: Mesh,
    work: Workload,
    sequences: dict[str, Sequence],
    encoders: dict[str, Encoder],
    progress: Progress,
    delivered: Delivered | None,
) -> float:
    errors: list[str] = []

    def failed(error: KafkaError | None, message: Any) -> None:
        if error is not None and len(errors) < 1:
            errors.append(str(error))
        if error is None and delivered is not None:
            delivered(message.topic(), message.partition(), message.offset(), message.value())

    producer = Producer(
        client_config(
            mesh,
            enable_idempotence=True,
            linger_ms=20,
            batch_size=1_000_000,
            queue_buffering_max_messages=2 * QUEUE,
            queue_buffering_max_kbytes=1_000_000,
            delivery_report_only_error=delivered is None,
            log_level=3,
        )
    )
    # Encoded in slices of one size whatever the pace, because the slices decide in which order random values are drawn.
    piece = SLICE if work.rate is None else max(1, min(SLICE, int(work.rate / len(sequences) / 20)))
    total = work.count * len(sequences)
    done, started, said = 0, time.monotonic(), time.monotonic()
    for begin in range(0, work.count, SLICE):
        end = min(begin + SLICE, work.count)
        batches = {
            mesh.streams[name].topic: encoders[name].messages(rows, begin, end) for name, rows in sequences.items()
        }
        for at in range(0, end - begin, piece):
            for topic, messages in batches.items():
                _send(producer, topic, messages[at : at + piece], failed)
                done += min(piece, len(messages) - at)
            if errors:
                raise MachineError(f"events could not be written to {mesh.bootstrap}: {errors[0]}")
            if work.rate is not None:
                _keep_pace(producer, started + done / work.rate)
            if time.monotonic() - said >= 2:
                said = time.monotonic()
                progress(f"{done:,} of {total:,} events ({done / (said - started):,.0f}/s)")
    left = producer.flush(60)
    if errors or left:
        raise MachineError(
            f"events could not be written to {mesh.bootstrap}:"
            f" {errors[0] if errors else f'{left} not acknowledged within 60 s'}"
        )
    return time.monotonic() - started


def _send(
    producer: Producer, topic: str, messages: list[Message], failed: Callable[[KafkaError | None, Any], None]
) -> None:
    while (
        len(producer) > QUEUE
    ):  # never into a full queue: a refused message between accepted ones would change the order
        producer.poll(0.05)
    # A call per partition: produce_batch (2.16) ignores the partition that a single message asks for.
    by_partition: dict[int, list[dict[str, Any]]] = {}
    for partition, message in messages:
        by_partition.setdefault(partition, []).append(message)
    for partition, batch in by_partition.items():
        if producer.produce_batch(topic, batch, partition=partition, on_delivery=failed) != len(batch):
            refused = next(message["_error"] for message in batch if "_error" in message)
            raise MachineError(f"an event for topic {topic} was refused: {refused}")
    producer.poll(0)


def _keep_pace(producer: Producer, due: float) -> None:
    while (wait := due - time.monotonic()) > 0:
        producer.poll(min(wait, 0.1))


def _warn_of_older_records(mesh: Mesh, partitions: dict[str, int], progress: Progress) -> None:
    offsets = topic_offsets(mesh, {mesh.streams[name].topic: count for name, count in partitions.items()})
    for topic, places in offsets.items():
        older = sum(high - low for low, high in places)
        if older:
            progress(
                f"topic {topic} already holds {older:,} records; new events with older times than theirs are late (see"
                " --start)"
            )


def _summary(mesh: Mesh, name: str, partitions: int, rows: Sequence) -> GeneratedStream:
    return GeneratedStream(
        stream=name,
        topic=mesh.streams[name].topic,
        partitions=partitions,
        events=len(rows.ts),
        late=int(rows.late.sum()),
        broken=int(rows.broken.sum()),
        null=int(rows.null.sum()),
        first_ms=int(rows.ts.min()) if len(rows.ts) else 0,
        last_ms=int(rows.ts.max()) if len(rows.ts) else 0,
    )
