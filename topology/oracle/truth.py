"""The naive join: truth for tests. Nested loops over plain Python values; shares nothing with the engine but the query.

Invariant: `truth` is the definition of the answer (design 1) written down as directly as possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.mesh import Stream
from topology.oracle.evaluate import evaluate
from topology.query.expression import Expression, Value, columns_of
from topology.query.query import Query


@dataclass(frozen=True)
class Event:
    """One record of a source topic: where it is and what it says."""

    stream: str
    partition: int
    offset: int
    values: Mapping[str, Value]
    deletes: bool = False  # of a table: the record takes its key away

    @property
    def id(self) -> str:
        return f"{self.stream}:{self.partition}:{self.offset}"


def on_time(stream: Stream, events: Sequence[Event]) -> list[Event]:
    """The events of a stream that are not late."""
    largest: dict[int, int] = {}
    kept = []
    for event in sorted(events, key=lambda e: (e.partition, e.offset)):
        time = event.values[stream.event_time]
        assert isinstance(time, int)
        if event.partition not in largest or time >= largest[event.partition] - stream.lateness_ms:
            kept.append(event)
        largest[event.partition] = max(time, largest.get(event.partition, time))
    return kept


def table_rows(stream: Stream, events: Sequence[Event], cut: Mapping[int, int]) -> list[Event]:
    """The rows of a table: of each partition, before the cut, the last record of each key, unless that deletes it."""
    assert stream.table is not None
    last: dict[tuple[int, Value], Event] = {}
    for event in sorted(events, key=lambda e: (e.partition, e.offset)):
        if event.offset < cut[event.partition]:
            last[event.partition, event.values[stream.table]] = event
    return [event for event in last.values() if not event.deletes]


def truth(
    query: Query,
    streams: Mapping[str, Stream],
    events: Sequence[Event],
    cuts: Mapping[str, Mapping[int, int]] | None = None,
) -> dict[str, tuple[dict[str, Value], int]]:
    """Result id -> (selected columns, result time). `cuts`: where each table ends, per partition."""
    ready: dict[str, list[Event]] = {}
    for source in query.sources:
        stream, mine = streams[source.stream], [e for e in events if e.stream == source.stream]
        ready[source.alias] = (
            on_time(stream, mine) if stream.table is None else table_rows(stream, mine, (cuts or {})[stream.name])
        )
    conditions: list[Expression] = [c for conjuncts in query.selections.values() for c in conjuncts]
    conditions += query.residuals
    found: dict[str, tuple[dict[str, Value], int]] = {}

    def extend(depth: int, parts: list[Event], row: dict[str, Value], start: int, end: int) -> None:
        if depth == len(query.sources):
            chosen = {output.name: evaluate(output.expression, row) for output in query.outputs}
            found["|".join(part.id for part in parts)] = (chosen, start)
            return
        source = query.sources[depth]
        known = set(query.aliases[: depth + 1])
        for event in ready[source.alias]:
            first, last = start, end
            if not source.is_table:  # a table's row is valid always
                time = event.values[streams[source.stream].event_time]
                assert isinstance(time, int)
                first, last = max(start, time), min(end, time + source.window_ms)
            if first > last:
                continue
            longer = {**row, **{f"{source.alias}.{k}": v for k, v in event.values.items()}}
            if not _equal(query, known, longer):
                continue
            # A condition is checked at the step where its last column becomes known.
            due = [c for c in conditions if source.alias in (a := _aliases(c)) and a <= known]
            if all(evaluate(c, longer) is True for c in due):
                extend(depth + 1, [*parts, event], longer, first, last)

    extend(0, [], {}, -(2**62), 2**62)
    return found


def _aliases(expression: Expression) -> set[str]:
    return {column.alias for column in columns_of(expression)}


def _equal(query: Query, known: set[str], row: Mapping[str, Value]) -> bool:
    for group in query.equal:
        values = [row[str(column)] for column in group if column.alias in known]
        if any(v is None or v != v or v != values[0] for v in values):
            return False
    return True
