"""What every service and command asks of Kafka beside reading and writing: client settings, topics, offsets.

Invariant: a topic that joinmesh accepts would lose nothing it needs: as many partitions as asked for, records kept at
least as long, the same cleanup policy. Anything else is a `TopicError` that says what was found, what is needed and
what to do.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ClusterMetadata,
    ConfigResource,
    NewTopic,
    OffsetSpec,
)

from schemas.errors import MachineError, TopicError
from schemas.mesh import Mesh, Stream
from schemas.topics import Topic
from services.runtime.security.for_confluent import confluent_settings
from services.runtime.security.refusals import Refusals, refusal

REACH_TIMEOUT_S = 8.0
METADATA_MS = 5_000
# Groups without members: readers that assign themselves what they read. Rights on them are granted by these names.
CONTROL_READER, REPORT_READER, AUDIT_READER, TAIL = "control-reader", "report-reader", "audit-reader", "feedback-tail"
_AT_LEAST = ("retention.ms", "message.timestamp.after.max.ms", "message.timestamp.before.max.ms", "max.message.bytes")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A topic as the broker has it."""

    name: str
    partitions: int
    config: Mapping[str, str]


def client_config(mesh: Mesh, **settings: Any) -> dict[str, Any]:
    """The mesh file's `kafka:` settings, with more of librdkafka's; `_` in a keyword stands for its `.` (but for the
    two spelt with it).

    Metadata is refreshed every few seconds: after a broker's restart a client may hold partitions without a leader and
    would ask again after minutes only. What Kafka refuses is raised where the client is polled.
    """
    return {
        "topic.metadata.refresh.interval.ms": METADATA_MS,
        **confluent_settings(mesh),
        **{key if key == "log_level" else key.replace("_", "."): v for key, v in settings.items() if key != "error_cb"},
        "error_cb": Refusals(mesh, settings, then=settings.get("error_cb")),
    }


def admin(mesh: Mesh) -> AdminClient:
    """An admin client that keeps quiet: what goes wrong is raised, not printed."""
    return AdminClient({"log_level": 0, "logger": _quiet(), **client_config(mesh)})


def reach(mesh: Mesh, client: AdminClient | None = None) -> ClusterMetadata:
    """The cluster's metadata, or a `MachineError` with the address after eight seconds; sooner, if it refuses us."""
    client = client or admin(mesh)
    deadline = time.monotonic() + REACH_TIMEOUT_S
    while True:
        try:
            return client.list_topics(timeout=min(1.0, REACH_TIMEOUT_S))
        except KafkaException as error:
            client.poll(0)  # hands out what went wrong: a refusal is raised here
            if time.monotonic() > deadline:
                raise MachineError(
                    f"no Kafka broker answers at {mesh.bootstrap} within {REACH_TIMEOUT_S:.0f} s ({_said(error)});"
                    " start one (joinmesh broker up), or correct kafka.bootstrap or kafka.security.protocol in"
                    f" {mesh.file}"
                ) from None


def ensure_topics(mesh: Mesh, topics: Iterable[Topic], progress: Progress) -> list[str]:
    """Create the topics that are missing, check the others; gives the names of the created ones."""
    client, wanted = admin(mesh), list(topics)
    found = describe_topics(mesh, [topic.name for topic in wanted], client)
    wrong = [
        problem
        for topic in wanted
        if topic.name in found
        for problem in problems(topic, found[topic.name], mesh.bootstrap)
    ]
    if wrong:
        raise TopicError("; ".join(wrong))
    missing = [topic for topic in wanted if topic.name not in found]
    if missing:
        progress(f"creating {len(missing)} topics: {', '.join(topic.name for topic in missing)}")
        _create(mesh, client, missing)
        topic_offsets(
            mesh, {topic.name: topic.partitions for topic in missing}
        )  # waits until every partition has a leader that answers
    return [topic.name for topic in missing]


def _create(mesh: Mesh, client: AdminClient, topics: list[Topic]) -> None:
    # -1: the cluster's own default replication, which one local broker and a real cluster both have right.
    new = [NewTopic(t.name, num_partitions=t.partitions, replication_factor=-1, config=dict(t.config)) for t in topics]
    for name, future in client.create_topics(new, operation_timeout=30).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another `up` was faster: fine
                raise refusal(mesh, error.args[0], name, "create") or TopicError(
                    f"topic {name} could not be created: {_said(error)}"
                ) from None


def describe_topics(mesh: Mesh, names: Iterable[str], client: AdminClient | None = None) -> dict[str, Found]:
    """The topics of these names that exist, with their settings."""
    client = client or admin(mesh)
    there = reach(mesh, client).topics
    present = [name for name in names if name in there and there[name].error is None]
    if not present:
        return {}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in present]
    found: dict[str, Found] = {}
    for resource, future in client.describe_configs(resources, request_timeout=30).items():
        try:
            config = {key: str(entry.value) for key, entry in future.result().items()}
        except KafkaException as error:
            raise refusal(mesh, error.args[0], resource.name, "describe") or TopicError(
                f"the settings of topic {resource.name} could not be read: {_said(error)}"
            ) from None
        found[resource.name] = Found(resource.name, len(there[resource.name].partitions), config)
    return found


def problems(needed: Topic, found: Found, bootstrap: str) -> list[str]:
    """What keeps an existing topic from being used, one sentence each; empty when it fits."""
    texts = []
    if found.partitions != needed.partitions:
        texts.append(
            f"topic {needed.name} has {found.partitions} partitions, {needed.partitions} needed: set `partitions:"
            f" {found.partitions}` in the mesh file, use another mesh name, or delete it (kafka-topics.sh"
            f" --bootstrap-server {bootstrap} --delete --topic {needed.name})"
        )
    for key, value in needed.config.items():
        has = found.config.get(key, "unset")
        if not _fits(key, has, value):
            texts.append(
                f"topic {needed.name} has {key}={has},"
                f" {value}{' or more' if key in _AT_LEAST and value != '-1' else ''} needed: run kafka-configs.sh"
                f" --bootstrap-server {bootstrap} --alter --entity-type topics --entity-name {needed.name} --add-config"
                f" {key}={value}"
            )
    return texts


def _fits(key: str, has: str, needed: str) -> bool:
    """
    >>> _fits("retention.ms", "-1", "5000"), _fits("retention.ms", "4999", "5000"), _fits("retention.ms", "9", "-1")
    (True, False, False)
    >>> _fits("cleanup.policy", "compact", "delete")
    False
    """
    if key not in _AT_LEAST or not has.lstrip("-").isdigit():
        return has == needed
    return int(has) == -1 or (int(needed) != -1 and int(has) >= int(needed))


def source_partitions(mesh: Mesh, streams: Iterable[Stream] | None = None) -> dict[str, int]:
    """Stream -> number of partitions of its topic; a topic that is not there is an error, because its producers own
    it."""
    client = admin(mesh)
    there = reach(mesh, client).topics
    counts: dict[str, int] = {}
    for stream in streams if streams is not None else mesh.streams.values():
        metadata = there.get(stream.topic)
        if metadata is None or metadata.error is not None or not metadata.partitions:
            refuse_hidden(mesh, client, stream.topic)
            raise TopicError(
                f"source topic {stream.topic} of stream {stream.name} is not on {mesh.bootstrap}; joinmesh does not"
                " create source topics: let its producer do so, or write sample events with `joinmesh generate -f"
                f" {mesh.file} --create {mesh.partitions}`"
            )
        counts[stream.name] = len(metadata.partitions)
    return counts


def refuse_hidden(mesh: Mesh, client: AdminClient, topic: str) -> None:
    """A topic that we may not even describe is not among all topics, as if it were not there; asked for by its name, it
    is refused."""
    error = client.list_topics(topic, timeout=REACH_TIMEOUT_S).topics[topic].error
    if error is not None and (found := refusal(mesh, error, topic, "describe")) is not None:
        raise found


def topic_offsets(mesh: Mesh, partitions: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Topic -> (first, next) offset of each partition."""
    places = [TopicPartition(topic, p) for topic, count in partitions.items() for p in range(count)]
    if not places:
        return {}
    client, spec = admin(mesh), cast(Any, OffsetSpec)
    low = _list_offsets(mesh, client, {place: spec.earliest() for place in places})
    high = _list_offsets(mesh, client, {place: spec.latest() for place in places})
    return {t: [(low[t, p], high[t, p]) for p in range(count)] for t, count in partitions.items()}


def read_before(mesh: Mesh, group: str, topic: str, partitions: int) -> bool:
    """Whether a group has committed any offset of a topic."""
    consumer = Consumer(client_config(mesh, group_id=group, enable_auto_commit=False, log_level=0))
    try:
        places = consumer.committed([TopicPartition(topic, p) for p in range(partitions)], timeout=30)
        return any(place.offset >= 0 for place in places)
    finally:
        consumer.close()


def left_open(mesh: Mesh, topic: str, partitions: int) -> list[int]:
    """Partitions whose end is behind an open transaction: its records are there, and `read_committed` readers wait
    before them."""
    client, spec = admin(mesh), cast(Any, OffsetSpec)
    places = {TopicPartition(topic, p): spec.latest() for p in range(partitions)}
    end = _list_offsets(mesh, client, places)
    stable = _list_offsets(mesh, client, places, isolation_level=IsolationLevel.READ_COMMITTED)
    return [p for p in range(partitions) if stable[topic, p] < end[topic, p]]


def _list_offsets(
    mesh: Mesh, client: AdminClient, wanted: dict[TopicPartition, Any], patience_s: float = 15, **settings: Any
) -> dict[tuple[str, int], int]:
    """Asks again while a new topic's leaders are still being told of it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            answers = {
                place: future.result()
                for place, future in client.list_offsets(wanted, request_timeout=10, **settings).items()
            }
            return {(place.topic, place.partition): int(answer.offset) for place, answer in answers.items()}
        except KafkaException as error:
            refused = refusal(mesh, error.args[0], ", ".join(sorted({place.topic for place in wanted})), "describe")
            if refused is not None:
                raise refused from None
            if (
                time.monotonic() > deadline
            ):  # leaders, epochs, connections: what is wrong a moment after a change is right soon
                raise MachineError(f"offsets could not be read from {mesh.bootstrap}: {_said(error)}") from None
        time.sleep(0.05)


def _said(error: KafkaException) -> str:
    cause = error.args[0] if error.args else error
    return str(cause.str()) if isinstance(cause, KafkaError) else str(cause)


def _quiet() -> Any:
    import logging

    logger = logging.getLogger("joinmesh.kafka.admin")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
