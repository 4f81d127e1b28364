"""The mesh file: what runs. Text in, one frozen `Mesh` out, or a `MeshFileError` that names the line.

Invariant: a `Mesh` that exists is usable as far as the file alone can tell: names are legal, durations and types
are parsed, every stream has an event-time field and every table a key. Whether the *queries* make sense is the parser's
business (`topology.query.cql`), not this file's.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from schemas.errors import MeshFileError


class FieldType(Enum):
    """The type of a stream's field. A timestamp is an int64 of epoch milliseconds everywhere inside the mesh."""

    INT64 = "int64"
    FLOAT64 = "float64"
    BOOL = "bool"
    STRING = "string"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True)
class Stream:
    """One source topic and how to read it: a stream of events, or a table of the last record of each key."""

    name: str
    topic: str
    fields: Mapping[str, FieldType]
    event_time: str  # empty for a table, which is valid always
    lateness_ms: int = 0
    idle_after_ms: int | None = None
    format: str = "json"
    table: str | None = None  # of a table: its key field

    @property
    def needed(self) -> str:
        """The one field that every record must have: the event time, or a table's key."""
        return self.table or self.event_time


Feedback = Literal["on", "off", "auto"]
Routing = Literal["fixed", "eddy"]
ADMIN = "admin"  # who runs commands: makes topics, changes plans, reads reports


@dataclass(frozen=True)
class Mesh:
    """A parsed mesh file."""

    name: str
    # librdkafka settings as written, with references to secrets; "bootstrap" is already "bootstrap.servers"
    kafka: Mapping[str, str] = field(repr=False)
    partitions: int
    streams: Mapping[str, Stream]
    queries: Mapping[str, str]
    plans: Mapping[str, str] = field(default_factory=dict)
    feedback: Mapping[str, Feedback] = field(
        default_factory=dict
    )  # query -> whether its joins say what not to make; off if not named
    heralds: Mapping[str, bool] = field(
        default_factory=dict
    )  # query -> whether joins are told of streams further down; with feedback, if not named
    routing: Mapping[str, Routing] = field(
        default_factory=dict
    )  # query -> in which order rows of an M-Join meet its inputs; fixed if not named
    file: str = "mesh.yaml"
    query_lines: Mapping[str, int] = field(default_factory=dict)  # line of each query's first text line in the file
    service: str = ADMIN  # who asks Kafka with it: what `${service}` stands for

    def asked_by(self, service: str) -> "Mesh":
        """The mesh as a service of it sees it, which has its own name at Kafka: `paid_orders.j1` is `paid_orders-j1`
        there."""
        return replace(self, service=service.replace(".", "-"))

    @property
    def bootstrap(self) -> str:
        return self.kafka["bootstrap.servers"]

    def is_heralded(self, query: str) -> bool:
        return self.heralds.get(query, self.feedback.get(query, "off") != "off")


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
_MESH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")
_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "milliseconds": 1,
    "s": 1_000,
    "sec": 1_000,
    "second": 1_000,
    "seconds": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "minutes": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "hours": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "days": 86_400_000,
}
REFERENCE = re.compile(r"\$\{(?:(service)|(file|env):([^{}]+))\}")  # in a value of `kafka:`
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def parse_duration_ms(text: str | int | float) -> int:
    """
    >>> parse_duration_ms("5s"), parse_duration_ms("10 MINUTES"), parse_duration_ms("1.5h"), parse_duration_ms(0)
    (5000, 600000, 5400000, 0)
    """
    match = _DURATION.match(str(text))
    if match is None or isinstance(text, bool):
        raise ValueError(f"{text!r} is not a duration; write a number and a unit, such as 500ms, 5s, 10 minutes, 1h")
    number, unit = match.groups()
    if not unit and float(number) != 0:
        raise ValueError(f"duration {text!r} has no unit; write for example {number}s or {number}ms")
    scale = _UNITS_MS.get(unit.lower()) if unit else 1
    if scale is None:
        raise ValueError(f"unknown unit {unit!r} in {text!r}; use ms, s, m, h or d")
    return round(float(number) * scale)


def did_you_mean(word: str, choices: object) -> str:
    """
    >>> did_you_mean("oder_id", ["order_id", "amount"])
    '; did you mean `order_id`?'
    """
    names = [str(c) for c in choices] if hasattr(choices, "__iter__") else []
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; use one of {', '.join(f'`{n}`' for n in names)}" if 0 < len(names) <= 12 else ""


def load_mesh(file: str | Path) -> Mesh:
    """Read and check a mesh file."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MeshFileError(
            "no such file; write one (see README, 'The mesh file') or pass -f", file=str(file)
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MeshFileError(f"cannot be read: {error}", file=str(file)) from None
    return parse_mesh(text, file=str(file))


def parse_mesh(text: str, file: str = "mesh.yaml") -> Mesh:
    """Parse a mesh file's text. Every error names the line it was found on."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise MeshFileError(f"is not YAML: {error.problem}", file=file, line=line) from None
    return _Reader(file).mesh(root)


class _Reader:
    """Walks YAML nodes rather than values, because nodes know their lines."""

    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, message: str, node: yaml.Node | None) -> MeshFileError:
        return MeshFileError(message, file=self.file, line=node.start_mark.line + 1 if node is not None else None)

    def table(self, node: yaml.Node | None, what: str, known: tuple[str, ...] | None = None) -> dict[str, yaml.Node]:
        """A mapping's items; with `known`, any other key is an error that says what was meant."""
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(f"{what} must be a table of `name: value` lines", node)
        items: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if known is not None and name not in known:
                raise self.fail(f"unknown key `{name}` in {what}{did_you_mean(name, known)}", key)
            if name in items:
                raise self.fail(f"`{name}` stands twice in {what}", key)
            items[name] = value
        return items

    def value(self, node: yaml.Node) -> Any:
        return yaml.SafeLoader("").construct_object(node, deep=True)

    def text(self, node: yaml.Node, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.value == "":
            raise self.fail(f"{what} must be a text", node)
        return str(node.value)

    def name(self, text: str, what: str, node: yaml.Node) -> str:
        if not _NAME.match(text):
            raise self.fail(f"{what} `{text}` must be a letter or _ followed by letters, digits or _", node)
        return text

    def one_of(self, node: yaml.Node, what: str, *choices: str) -> str:
        text = self.text(node, what)
        if text not in choices:
            raise self.fail(f"{what} is `{text}`; write {', '.join(choices[:-1])} or {choices[-1]}", node)
        return text

    def of_queries(self, top: dict[str, yaml.Node], what: str, queries: dict[str, yaml.Node]) -> dict[str, yaml.Node]:
        """A table that says something about queries of the file."""
        items = self.table(top[what], f"`{what}`") if what in top else {}
        for key, value in items.items():
            if key not in queries:
                raise self.fail(f"`{what}` names a query `{key}` that is not there{did_you_mean(key, queries)}", value)
        return items

    def duration(self, node: yaml.Node, what: str) -> int:
        try:
            return parse_duration_ms(self.text(node, what))
        except ValueError as error:
            raise self.fail(f"{what}: {error}", node) from None

    def mesh(self, root: yaml.Node | None) -> Mesh:
        if root is None:
            raise MeshFileError("is empty; it needs mesh, kafka, streams and queries", file=self.file)
        top = self.table(
            root,
            "the mesh file",
            ("mesh", "kafka", "partitions", "streams", "queries", "plans", "feedback", "heralds", "routing"),
        )
        for needed in ("mesh", "kafka", "streams", "queries"):
            if needed not in top:
                raise self.fail(f"`{needed}:` is missing", root)
        name = self.text(top["mesh"], "`mesh`")
        if not _MESH_NAME.match(name):
            raise self.fail(
                f"mesh name `{name}` may hold letters, digits, - and _ only (it begins every topic)", top["mesh"]
            )
        streams = {
            key: self.stream(self.name(key, "stream", value), value)
            for key, value in self.table(top["streams"], "`streams`").items()
        }
        if not streams:
            raise self.fail("`streams` is empty; a join needs at least two inputs", top["streams"])
        for table in (s for s in streams.values() if s.table is not None):
            for other in streams.values():
                if other.topic == table.topic and other.name != table.name:
                    raise self.fail(
                        f"table `{table.name}` and `{other.name}` read the same topic `{table.topic}`; give each"
                        " its own",
                        top["streams"],
                    )
        queries = self.table(top["queries"], "`queries`")
        if not queries:
            raise self.fail("`queries` is empty; write at least one", top["queries"])
        plans = self.of_queries(top, "plans", queries)
        feedback, heralds, routing = (self.of_queries(top, key, queries) for key in ("feedback", "heralds", "routing"))
        return Mesh(
            name=name,
            kafka=self.kafka(top["kafka"]),
            partitions=self.partitions(top.get("partitions")),
            streams=streams,
            queries={self.name(k, "query", v): self.text(v, f"query `{k}`") for k, v in queries.items()},
            plans={k: self.text(v, f"plan of `{k}`") for k, v in plans.items()},
            feedback={
                k: cast(Feedback, self.one_of(v, f"feedback of `{k}`", "on", "off", "auto"))
                for k, v in feedback.items()
            },
            heralds={k: self.one_of(v, f"heralds of `{k}`", "on", "off") == "on" for k, v in heralds.items()},
            routing={
                k: cast(Routing, self.one_of(v, f"routing of `{k}`", "fixed", "eddy")) for k, v in routing.items()
            },
            file=self.file,
            query_lines={
                k: v.start_mark.line + (2 if getattr(v, "style", None) in ("|", ">") else 1) for k, v in queries.items()
            },
        )

    def kafka(self, node: yaml.Node) -> dict[str, str]:
        settings = {k: self.value(v) for k, v in self.table(node, "`kafka`").items()}
        bootstrap = settings.pop("bootstrap", None) or settings.pop("bootstrap.servers", None)
        if not isinstance(bootstrap, str) or not bootstrap:
            raise self.fail('`kafka` needs `bootstrap: "host:port"`', node)
        plain = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in settings.items()}
        kafka = {"bootstrap.servers": bootstrap, **plain}
        for key, text in kafka.items():
            if "${" in REFERENCE.sub("", text.replace("${service}", "")):
                raise self.fail(
                    f"`kafka.{key}` holds a `${{` that is no reference; write ${{file:/path}}, ${{env:NAME}} or"
                    " ${service}, and put a value that really holds it into a file",
                    node,
                )
        return kafka

    def partitions(self, node: yaml.Node | None) -> int:
        if node is None:
            return 4
        count = self.value(node)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1024:
            raise self.fail(f"`partitions` must be a whole number from 1 to 1024, not {count!r}", node)
        return count

    def stream(self, name: str, node: yaml.Node) -> Stream:
        what = f"stream `{name}`"
        keys = ("topic", "format", "event_time", "lateness", "idle_after", "table", "fields")
        items = self.table(node, what, keys)
        if "fields" not in items or ("event_time" not in items and "table" not in items):
            raise self.fail(f"{what} needs `fields` and `event_time` (or `table`, if it is a table)", node)
        if "table" in items:
            for other in ("event_time", "lateness", "idle_after"):
                if other in items:
                    raise self.fail(
                        f"{what} is a table (`table:`), which is valid always: take out `{other}`, or `table`",
                        items[other],
                    )
        fields: dict[str, FieldType] = {}
        for key, value in self.table(items["fields"], f"`fields` of {what}").items():
            kind = self.text(value, f"type of `{key}`")
            if kind not in FieldType._value2member_map_:
                choices = [t.value for t in FieldType]
                raise self.fail(f"unknown type `{kind}` of field `{key}` in {what}{did_you_mean(kind, choices)}", value)
            fields[self.name(key, f"field of {what}", value)] = FieldType(kind)
        role = "table" if "table" in items else "event_time"
        needed = self.text(items[role], f"`{role}` of {what}")
        if needed not in fields:
            raise self.fail(f"`{role}` of {what} names no field: `{needed}`{did_you_mean(needed, fields)}", items[role])
        if role == "event_time" and fields[needed] not in (FieldType.TIMESTAMP, FieldType.INT64):
            raise self.fail(f"event time `{needed}` of {what} must be of type timestamp or int64", items[role])
        if role == "table" and fields[needed] not in (FieldType.STRING, FieldType.INT64):
            raise self.fail(f"the key `{needed}` of table `{name}` must be of type int64 or string", items[role])
        form = self.text(items["format"], f"`format` of {what}") if "format" in items else "json"
        if form != "json":
            raise self.fail(f"format `{form}` of {what} is not known; use `json`", items["format"])
        return Stream(
            name=name,
            topic=self.text(items["topic"], f"`topic` of {what}") if "topic" in items else name,
            fields=fields,
            event_time=needed if role == "event_time" else "",
            table=needed if role == "table" else None,
            lateness_ms=self.duration(items["lateness"], f"`lateness` of {what}") if "lateness" in items else 0,
            idle_after_ms=(
                self.duration(items["idle_after"], f"`idle_after` of {what}") if "idle_after" in items else None
            ),
            format=form,
        )
