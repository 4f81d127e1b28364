"""The log as the audit sees it: which offsets it covers, and the topics between those offsets as Spark frames.

Invariant: the offsets are asked for once, at the start; everything after reads exactly that range, so a report names
the data it is about and can be repeated. Only committed records are read.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession

from schemas import topics
from schemas.errors import JoinmeshError, MachineError, TopicError
from schemas.mesh import Mesh
from services.audit.session import reader_settings
from services.runtime.security.for_confluent import confluent_settings
from services.runtime.security.refusals import Refusals, refusal
from services.runtime.security.rights import Right, require
from services.runtime.security.settings import is_secured

Offsets = dict[str, dict[int, int]]  # topic -> partition -> offset
TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Range:
    """What is read of each topic: [begin, end). Of a source topic `cut_from` may be later than `begin`: events before
    it are read because lateness depends on them, but they join nothing."""

    begin: Offsets
    cut_from: Offsets
    end: Offsets

    def of(self, topic: str) -> dict[int, tuple[int, int]]:
        return {p: (self.cut_from[topic][p], self.end[topic][p]) for p in self.begin.get(topic, {})}

    def records(self, topic: str) -> int:
        return sum(end - begin for begin, end in self.of(topic).values())

    def as_json(self) -> dict[str, Any]:
        return {"from": self.cut_from, "to": self.end, "log_start": self.begin}


def client_settings(mesh: Mesh, **settings: Any) -> dict[str, Any]:
    """Of a client of librdkafka that reads what is committed and keeps quiet; `_` in a keyword stands for `.`."""
    return {
        **confluent_settings(mesh),
        "log_level": 0,
        "error_cb": Refusals(mesh, settings),
        **{key.replace("_", "."): value for key, value in settings.items()},
    }


def reader(mesh: Mesh, **settings: Any) -> Consumer:
    group = f"{mesh.name}.audit"
    return Consumer(
        client_settings(mesh, group_id=group, enable_auto_commit=False, isolation_level="read_committed", **settings)
    )


def check_rights(mesh: Mesh, read: Iterable[str]) -> None:
    """Before Spark starts: may we read these topics, and write the audit's?"""
    if is_secured(mesh):
        rights = [Right("topic", topic, ("Read",)) for topic in dict.fromkeys(read)]
        rights.append(Right("topic", topics.audit(mesh.name), ("Write",)))
        require(mesh, rights, AdminClient(client_settings(mesh)))


def take_range(mesh: Mesh, needed: Iterable[str], optional: Iterable[str], cut: Mapping[str, Any] | None) -> Range:
    """Ask the broker once for the offsets of every topic. A needed topic that is not there is an error.

    A cut taken from an earlier report may name results of other queries: those are not this audit's business.
    """
    consumer = reader(mesh)
    try:
        known = _known_topics(consumer)
        needed, optional = list(needed), list(optional)
        check_rights(mesh, [*needed, *(topic for topic in optional if topic in known)])
        begin: Offsets = {}
        end: Offsets = {}
        required = list(dict.fromkeys(needed))
        for topic in [*required, *optional]:
            if topic not in known or known[topic].error is not None:
                if topic in required:
                    raise TopicError(f"topic {topic} is not on {mesh.bootstrap}: there is nothing to audit until it is")
                continue
            bounds = {
                p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=TIMEOUT_S)
                for p in known[topic].partitions
            }
            begin[topic] = {p: low for p, (low, _) in sorted(bounds.items())}
            end[topic] = {p: high for p, (_, high) in sorted(bounds.items())}
    except KafkaException as error:
        raise refusal(mesh, error.args[0]) or MachineError(
            f"no answer from Kafka at {mesh.bootstrap}: {error.args[0].str()}"
        ) from None
    finally:
        consumer.close()
    cut = {
        side: {t: o for t, o in offsets.items() if t in begin or not t.startswith(f"{mesh.name}.")}
        for side, offsets in (cut or {}).items()
    }
    return Range(begin, _within(begin, end, cut.get("from"), begin), _within(begin, end, cut.get("to"), end))


def _known_topics(consumer: Consumer) -> Mapping[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return dict(consumer.list_topics(timeout=1.0).topics)
        except KafkaException:
            consumer.poll(0)  # hands out what went wrong: a refusal is raised here
            if time.monotonic() > deadline:
                raise


def end_tables(mesh: Mesh, tables: Iterable[str], log: Range, history: Iterable[Mapping[str, Any]]) -> Range:
    """The range with each static table from its beginning to the cut on record in the control topic, whatever cut was
    asked for."""
    recorded: dict[str, Mapping[str, int]] = {}
    for entry in history:
        for table, cut in (entry["message"].get("table_cuts") or {}).items():
            recorded.setdefault(table, cut)
    start, end = dict(log.cut_from), dict(log.end)
    for table in tables:
        topic = mesh.streams[table].topic
        if table not in recorded:
            raise TopicError(
                f"no plan in {mesh.name}.control says where table {table} ends: run the mesh before it is audited"
            )
        start[topic] = dict(log.begin[topic])
        end[topic] = {p: max(begin, int(recorded[table][str(p)])) for p, begin in log.begin[topic].items()}
    return Range(log.begin, start, end)


def _within(begin: Offsets, end: Offsets, asked: Mapping[str, Mapping[Any, int]] | None, default: Offsets) -> Offsets:
    """The asked offsets where there are some, the default elsewhere; outside the log is an error."""
    found = {topic: dict(offsets) for topic, offsets in default.items()}
    for topic, offsets in (asked or {}).items():
        for partition, offset in offsets.items():
            p = int(partition)
            if topic not in found or p not in found[topic]:
                raise TopicError(f"the cut names {topic} partition {p}, which is not there")
            if not begin[topic][p] <= offset <= end[topic][p]:
                raise TopicError(
                    f"the cut asks for offset {offset} of {topic} partition {p}, but the log holds {begin[topic][p]} to"
                    f" {end[topic][p]}"
                )
            found[topic][p] = offset
    return found


def read_cut_file(file: Path, side: str) -> dict[str, dict[str, int]]:
    """Offsets from a file {topic: {partition: offset}}, or from the report of an earlier audit."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        offsets = data["cut"][side] if "cut" in data else data
        return {
            str(topic): {str(int(p)): int(o) for p, o in partitions.items()} for topic, partitions in offsets.items()
        }
    except OSError as error:
        raise JoinmeshError(f"cannot read the cut file {file}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise JoinmeshError(
            f'{file} is no offset cut: write {{"topic": {{"0": 17}}}}, or pass an earlier report'
        ) from None


def read_topic(spark: SparkSession, mesh: Mesh, log: Range, topic: str) -> DataFrame | None:
    """Spark's Kafka frame of the topic between its offsets, one task per partition in offset order; None when it is not
    there or empty."""
    if topic not in log.begin or all(log.begin[topic][p] >= end for p, end in log.end[topic].items()):
        return None
    offsets = {"startingOffsets": log.begin[topic], "endingOffsets": log.end[topic]}
    options = {key: json.dumps({topic: {str(p): o for p, o in value.items()}}) for key, value in offsets.items()}
    assigned = json.dumps({topic: sorted(log.begin[topic])})
    return spark.read.format("kafka").options(**reader_settings(mesh), **options).option("assign", assigned).load()


def control_history(mesh: Mesh, topic: str, log: Range) -> list[dict[str, Any]]:
    """The distinct JSON values of the control topic in time order: it is written whole to every partition, so each
    stands there several times."""
    if topic not in log.begin:
        return []
    consumer = reader(mesh, enable_partition_eof=True)
    seen: dict[str, dict[str, Any]] = {}
    try:
        waiting = {p for p in log.begin[topic] if log.begin[topic][p] < log.end[topic][p]}
        consumer.assign([TopicPartition(topic, p, log.begin[topic][p]) for p in waiting])
        while waiting:
            message = consumer.poll(TIMEOUT_S)
            if message is None:
                raise MachineError(f"no answer from Kafka at {mesh.bootstrap} while reading {topic}")
            partition, offset = int(message.partition() or 0), int(message.offset() or 0)
            if message.error() is not None or offset + 1 >= log.end[topic][partition]:
                waiting.discard(partition)
            if message.error() is None and offset < log.end[topic][partition]:
                _remember(seen, message.value(), message.timestamp()[1])
    finally:
        consumer.close()
    return sorted(seen.values(), key=lambda entry: entry["time"])


def _remember(seen: dict[str, dict[str, Any]], value: bytes | None, time: int) -> None:
    try:
        document = json.loads(value or b"")
    except ValueError:
        return
    key = json.dumps(document, sort_keys=True)
    if isinstance(document, dict) and (key not in seen or time < seen[key]["time"]):
        seen[key] = {
            "time": time,
            **{k: document[k] for k in ("epoch", "query", "tree") if k in document},
            "message": document,
        }


def publish(mesh: Mesh, topic: str, record: Mapping[str, Any]) -> None:
    """One record in the audit topic, which is made if a mesh never ran here."""
    failures: list[str] = []
    producer = Producer(client_settings(mesh, message_timeout_ms=15_000))
    if topic not in producer.list_topics(timeout=TIMEOUT_S).topics:
        admin = AdminClient(client_settings(mesh))
        made = admin.create_topics([NewTopic(topic, 1, config={"retention.ms": "-1"})])
        made[topic].result(TIMEOUT_S)
    producer.produce(
        topic, json.dumps(record).encode(), on_delivery=lambda error, _: failures.append(error.str()) if error else None
    )
    if producer.flush(TIMEOUT_S) > 0 or failures:
        raise MachineError(f"the audit's record did not reach {topic}: {(failures or ['no answer'])[0]}")
