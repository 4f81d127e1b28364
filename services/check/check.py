"""Checks a running mesh from end to end: every service speaks, and the results of a few events written now come out.

Invariant: it passes only if all expected results were read as a `read_committed` reader sees them. Without events it
only looks, and changes nothing.
"""

import time
from collections.abc import Callable

from confluent_kafka import Consumer, TopicPartition

from schemas import topics
from schemas.errors import MachineError
from schemas.mesh import Mesh
from services.check.events import expected_results, write_events
from services.runtime.kafka import REPORT_READER, client_config, describe_topics, topic_offsets
from services.runtime.queries import parse_queries, services_of
from services.supervisor.reports import ReportReader, instances

FRESH_MS = 15_000  # services report every second or so
Say = Callable[[str], None]


def check(mesh: Mesh, events: int, timeout_s: float, say: Say) -> None:
    """Returns when the mesh is seen to work; raises otherwise."""
    deadline = time.monotonic() + timeout_s
    _everyone_speaks(mesh, deadline, say)
    if events:
        _results_come(mesh, events, deadline, say)


def _everyone_speaks(mesh: Mesh, deadline: float, say: Say) -> None:
    services = [service.name for service in services_of(mesh, parse_queries(mesh))]
    reader = ReportReader(mesh)
    try:
        reader.read_tail(services)
        while silent := _silent(services, reader):
            if time.monotonic() > deadline:
                raise MachineError(
                    f"{', '.join(silent)} of mesh {mesh.name}: no report of the last {FRESH_MS // 1000} s, or not"
                    " ready; look at its log"
                )
            reader.poll(0.5)
    finally:
        reader.close()
    say(f"all {len(services)} services of mesh {mesh.name} run and are ready")


def _silent(services: list[str], reader: ReportReader) -> list[str]:
    """The services without a worker that is ready and has reported lately."""
    since_ms = time.time() * 1000 - FRESH_MS
    return [
        name
        for name in services
        if not any(
            float(report.get("at_ms", 0)) >= since_ms and report.get("ready") is not False
            for report in instances(reader.latest, name).values()
        )
    ]


def _results_come(mesh: Mesh, count: int, deadline: float, say: Say) -> None:
    queries = parse_queries(mesh)
    query_of = {topics.results(mesh.name, name): name for name in queries}
    reader = _Reader(mesh, [*query_of, topics.late(mesh.name)])
    try:
        events = write_events(mesh, count)
        wanted = expected_results(mesh, queries, events)
        started = time.monotonic()
        say(f"{len(events)} events written; expected: " + ", ".join(f"{len(ids)} of {q}" for q, ids in wanted.items()))
        while True:
            late = reader.keys[topics.late(mesh.name)]
            missing = {
                query: ids
                for topic, query in query_of.items()
                if (ids := {i for i in wanted.get(query, ()) if late.isdisjoint(i.split("|"))} - reader.keys[topic])
            }
            if not missing:
                break
            if time.monotonic() > deadline:
                query, ids = next(iter(missing.items()))
                raise MachineError(
                    f"{len(ids)} of {len(wanted[query])} results of {query} did not come, such as {min(ids)}; look at"
                    " the lag of each service (`joinmesh status`)"
                )
            reader.poll(0.2)
    finally:
        reader.close()
    ours = late & {event.id for event in events}
    if ours and all(not late.isdisjoint(i.split("|")) for ids in wanted.values() for i in ids):
        raise MachineError(
            f"{len(ours)} of {len(events)} sample events were late, because the source topics hold events with later"
            " times than now; no result could be expected"
        )
    say(f"all of them came within {time.monotonic() - started:.1f} s")


class _Reader:
    """The keys of what is committed to some topics from now on."""

    def __init__(self, mesh: Mesh, names: list[str]) -> None:
        self.keys: dict[str, set[str]] = {name: set() for name in names}
        found = describe_topics(mesh, names)
        ends = topic_offsets(mesh, {name: topic.partitions for name, topic in found.items()})
        self._consumer = Consumer(
            client_config(
                mesh,
                group_id=f"{mesh.name}.{REPORT_READER}",
                enable_auto_commit=False,
                isolation_level="read_committed",
                log_level=0,
            )
        )
        self._consumer.assign(
            [TopicPartition(name, p, end) for name, places in ends.items() for p, (_, end) in enumerate(places)]
        )

    def poll(self, timeout_s: float) -> None:
        for message in self._consumer.consume(1000, timeout_s):
            key, topic = message.key(), message.topic()
            if message.error() is None and key is not None and topic is not None:
                self.keys[topic].add(key.decode() if isinstance(key, bytes) else key)

    def close(self) -> None:
        self._consumer.close()
