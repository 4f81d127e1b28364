"""What to generate, and which fields are keys.

Invariant: two fields that some query equates are of one *domain*: the same index always stands for the same value in
both, so generated events join. Fields that no query equates are plain values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from schemas.errors import JoinmeshError
from schemas.mesh import FieldType, Mesh
from topology.query.expression import And, Column, Compare, Expression, Or, children
from topology.query.expression import Literal as Constant
from topology.query.query import Query

KEYS = ("uniform", "zipf", "related", "sequential")
DEFAULT_START_MS = 1_735_689_600_000  # 2025-01-01T00:00:00Z: fixed, so that a seed alone decides the events


@dataclass(frozen=True)
class Workload:
    """How many events and of what kind; `count` and `event_rate` are per stream."""

    count: int = 10_000
    seed: int = 1
    rate: float | None = (
        None  # events a second by the clock on the wall, all streams together; None: as fast as possible
    )
    event_rate: float | None = None  # events per second of event time; default 1000, or what `rate` makes of it
    keys: str = "related"
    key_count: int | None = None
    out_of_order_ms: int = 0
    late: float = 0.0
    broken: float = 0.0
    null: float = 0.0
    start_ms: int = DEFAULT_START_MS

    def __post_init__(self) -> None:
        if self.keys not in KEYS:
            raise JoinmeshError(f"unknown --keys {self.keys}; use one of {', '.join(KEYS)}")
        for name in ("late", "broken", "null"):
            if not 0 <= getattr(self, name) <= 1:
                raise JoinmeshError(f"--{name} is a share from 0 to 1, not {getattr(self, name)}")
        for name, least in (("count", 0), ("out_of_order_ms", 0), ("start_ms", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise JoinmeshError(f"--{name.replace('_', '-')} must be {least} or more, not {getattr(self, name)}")
        for name in ("rate", "event_rate", "key_count"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise JoinmeshError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class Domain:
    """One set of equal columns."""

    number: int
    kind: Literal["int", "float", "text", "bool", "time"]


@dataclass(frozen=True)
class Shape:
    """What the queries say about the streams."""

    order: tuple[str, ...]  # streams in the order the queries name them; unused ones last
    domains: dict[tuple[str, str], Domain]  # (stream, field) -> domain
    constants: dict[
        tuple[str, str], tuple[int | float | str, ...]
    ]  # what a field is compared with: worth generating around
    window_ms: int  # the shortest window: related events must meet within it


def shape_of(mesh: Mesh, queries: dict[str, Query]) -> Shape:
    """
    Fields linked by equalities of any query, over all queries together, share a domain. An event-time field is never a
    key: its value is the event's time.
    """
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(field: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(field, field)
        while parent[field] != field:
            field = parent[field]
        return field

    constants: dict[tuple[str, str], list[int | float | str]] = {}
    for query in queries.values():
        stream_of = {source.alias: source.stream for source in query.sources}
        for columns in query.equal:
            fields = [(stream_of[c.alias], c.name) for c in columns]
            fields = [f for f in fields if mesh.streams[f[0]].event_time != f[1]]
            for other in fields[1:]:
                parent[root(other)] = root(fields[0])
            if fields:
                root(fields[0])
        for selection in (*(e for es in query.selections.values() for e in es), *query.residuals):
            for column, value in _compared(selection):
                constants.setdefault((stream_of[column.alias], column.name), []).append(value)
    members: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for field in parent:
        members.setdefault(root(field), []).append(field)
    domains: dict[tuple[str, str], Domain] = {}
    for number, fields in enumerate(sorted(sorted(group) for group in members.values())):
        domain = Domain(number, _kind({mesh.streams[s].fields[f] for s, f in fields}))
        domains.update(dict.fromkeys(fields, domain))
    used = dict.fromkeys(source.stream for query in queries.values() for source in query.sources)
    windows = [source.window_ms for query in queries.values() for source in query.sources if not source.is_table]
    return Shape(
        order=tuple(used) + tuple(name for name in mesh.streams if name not in used),
        domains=domains,
        constants={field: tuple(dict.fromkeys(values)) for field, values in constants.items()},
        window_ms=min(windows, default=60_000),
    )


def _kind(types: set[FieldType]) -> Literal["int", "float", "text", "bool", "time"]:
    """The narrowest values that every type of a domain can hold."""
    if FieldType.TIMESTAMP in types:
        return "time"
    if FieldType.STRING in types:
        return "text"
    if FieldType.BOOL in types:
        return "bool"
    return "float" if FieldType.FLOAT64 in types and len(types) == 1 else "int"


def _compared(expression: Expression) -> Iterator[tuple[Column, int | float | str]]:
    if isinstance(expression, Compare):
        for one, other in ((expression.left, expression.right), (expression.right, expression.left)):
            plain = isinstance(other, Constant) and other.value is not None and not isinstance(other.value, bool)
            if isinstance(one, Column) and isinstance(other, Constant) and plain:
                assert other.value is not None
                yield one, other.value
    for child in children(expression):
        if isinstance(expression, And | Or | Compare) or not isinstance(child, Column):
            yield from _compared(child)
