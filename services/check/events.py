"""A few sample events of now, and the results that they alone must give.

Invariant: an event is known by the partition and offset that Kafka gave it, so what other producers write at the same
time is not taken for ours; and the expected results are those of the naive join, which shares nothing with the engine.
"""

import json
import time

from schemas.mesh import FieldType, Mesh, Stream
from services.generator import Workload, generate
from topology.ingest.decode import parse_time
from topology.oracle.truth import Event, truth
from topology.query.expression import Value
from topology.query.query import Query


def write_events(mesh: Mesh, count: int) -> list[Event]:
    """Write so many events to each source topic, with times of now."""
    stream_of = {stream.topic: stream for stream in mesh.streams.values() if stream.table is None}
    events: list[Event] = []

    def delivered(topic: str, partition: int, offset: int, value: bytes) -> None:
        stream = stream_of[topic]
        events.append(Event(stream.name, partition, offset, _values(stream, value)))

    now_ms = int(time.time() * 1000)
    generate(mesh, Workload(count=count, seed=now_ms, start_ms=now_ms), delivered=delivered)
    return events


def _values(stream: Stream, value: bytes) -> dict[str, Value]:
    read = json.loads(value)
    is_time = {name for name, kind in stream.fields.items() if kind is FieldType.TIMESTAMP}
    return {name: parse_time(read.get(name)) if name in is_time else read.get(name) for name in stream.fields}


def expected_results(mesh: Mesh, queries: dict[str, Query], events: list[Event]) -> dict[str, set[str]]:
    """Query -> ids of the results that these events must give. Queries over tables are left out: what a table held when
    the mesh first started is not known here."""
    return {
        name: set(truth(query, mesh.streams, events))
        for name, query in queries.items()
        if not any(source.is_table for source in query.sources)
    }
