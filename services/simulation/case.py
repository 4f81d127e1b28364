"""What one seed asks of the mesh: a query, a plan, source records, and the answer they must give.

Invariant: a case is a function of the random numbers it draws; broken, late and null-keyed records are among its
events, and the expected results, late and dead records come from the oracle and the log alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from schemas.control import PlanPublished
from schemas.mesh import Feedback, FieldType, Mesh, Routing, Stream
from services.runtime.control import plan_digest
from topology.oracle.truth import Event, on_time, truth
from topology.plan.plan import Plan, Tree, build_plan, tree_text
from topology.query.cql import parse_query
from topology.query.query import Query

FIELDS = {"k": FieldType.INT64, "s": FieldType.STRING, "v": FieldType.INT64, "ts": FieldType.TIMESTAMP}
VALUES: Mapping[str, list[Any]] = {
    "k": [0, 1, 2**53 + 1, None],
    "s": ["a", "aé", "longer than sixteen bytes", None],
    "v": [0, 1, 2, None],
}
EXTRA = (
    "a0.v > 0",
    "a1.v IN (1, 2)",
    "a0.v < a1.v",
    "a0.ts <= a1.ts",
    "a1.s IS NOT NULL",
    "NOT (a0.v = 1 OR a1.v = 2)",
)
SELECT = ("a0.k AS k, a1.s AS s, a0.v + a1.v AS total", "a0.v, a1.ts AS t, 'fix' AS y", "*")
BROKEN = (b"", b"{", None, b'{"k": 1}', b'{"k": "x", "ts": 5}', b'{"ts": -4}', b"\xff\xfe", b"JMB\x01")


SourceRecord = tuple[
    str, int, bytes | None, bytes | None
]  # stream, partition, value, key; offsets follow from the order


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    plan: Plan
    published: PlanPublished
    counts: dict[str, int]  # stream -> source partitions
    records: list[SourceRecord]
    expected: dict[str, tuple[dict[str, Any], int]]
    late: set[str]  # stream:partition:offset
    dead: set[str]

    @property
    def talks(self) -> bool:
        """Whether joins give feedback here; then records must come slowly enough for it to be heard."""
        return self.published.feedback != "off" and (len(self.plan.nodes) > 1 or self.plan.root.is_flat)


def draw_case(rng: Random) -> Case:
    n = rng.choice((2, 2, 3, 3, 3, 4))
    scale = rng.choice((1, 100))  # at 100 partitions drift further apart than ingest's slack
    names = ["r0", "r0"] if n == 2 and rng.random() < 0.2 else [f"r{i}" for i in range(n)]
    windows = [rng.choice((5, 20, 60, 200)) * scale for _ in range(n)]
    streams = {
        name: Stream(name, name, FIELDS, "ts", lateness_ms=rng.choice((0, 10, 50)) * scale)
        for name in dict.fromkeys(names)
    }
    # From numbers of its own, so that the cases without a table stay what they were.
    apart = Random(repr((names, windows, streams)))
    table = apart.choice(names) if len(streams) > 1 and apart.random() < 0.35 else None
    if table is not None:
        streams[table] = Stream(table, table, FIELDS, "", table=apart.choice(("k", "s")))
    edges = [(0, i) for i in range(1, n)] if rng.random() < 0.4 else [(i, i + 1) for i in range(n - 1)]
    where = [f"a{i}.{f} = a{j}.{f}" for i, j in edges for f in rng.choice((("k",), ("k",), ("s",), ("k", "s")))]
    where += rng.sample(EXTRA, rng.choice((0, 0, 1)))
    sources = ", ".join(
        f"{s} AS a{i}" if s == table else f"{s} [RANGE {w} MS] AS a{i}"
        for i, (s, w) in enumerate(zip(names, windows, strict=True))
    )
    text = f"SELECT {rng.choice(SELECT)} FROM {sources} WHERE {' AND '.join(where)}"
    query = parse_query("q", text, streams)
    tree = binary_tree(query, rng)
    own = Random(text)  # so that a seed without an M-Join asks for what it always did
    if n > 2 and own.random() < 0.6:
        tree = random_tree(query, own)
    routing: Routing = own.choice(("fixed", "eddy"))
    plan = build_plan(query, tree)
    feedback: Feedback = rng.choice(("on", "on", "auto", "off", "off"))
    partitions = rng.choice((1, 1, 2) if feedback != "off" else (1, 2, 2, 3))
    mesh = Mesh("m", {"bootstrap.servers": "none"}, partitions, streams, {"q": text})
    counts = {name: rng.choice((1, 1, 2)) for name in streams}
    flowing = {name: stream for name, stream in streams.items() if name != table}
    records, events, dead = _draw_records(rng, flowing, counts, scale, sparse=feedback != "off" and n > 2)
    late = {e.id for e in events} - {
        e.id for s in flowing.values() for e in on_time(s, [e for e in events if e.stream == s.name])
    }
    cuts: dict[str, dict[int, int]] = {}
    if table is not None:
        cuts[table] = _add_table(apart, streams[table], counts[table], records, events, dead)
    published = PlanPublished(
        "q",
        1,
        text,
        tree_text(tree),
        plan_digest(mesh, plan),
        0,
        counts,
        feedback,
        cuts,
        routing,
        own.random() < (0.2 if feedback == "off" else 0.5),
    )
    return Case(mesh, plan, published, counts, records, truth(query, streams, events, cuts), late, dead)


def _add_table(
    rng: Random, stream: Stream, partitions: int, records: list[SourceRecord], events: list[Event], dead: set[str]
) -> dict[int, int]:
    """Records of a table: those before the cut come first, others among those of the streams. Gives the cut."""
    lengths, key = dict.fromkeys(range(partitions), 0), str(stream.table)

    def draw(joined: bool) -> SourceRecord:
        partition = rng.randrange(partitions)
        offset, roll = lengths[partition], rng.random()
        lengths[partition] += 1
        values = {field: rng.choice(choices[:3]) for field, choices in VALUES.items()}
        if roll < 0.08:
            if joined:
                dead.add(f"{stream.name}:{partition}:{offset}")
            return (
                stream.name,
                partition,
                *rng.choice(((b"", None), (b"{", b"0"), (None, None), (b'{"v": 1}', b"1"), (None, b"\xff"))),
            )
        if roll < 0.22:
            events.append(Event(stream.name, partition, offset, {key: values[key]}, deletes=True))
            return stream.name, partition, None, str(values[key]).encode()
        events.append(Event(stream.name, partition, offset, {**values, "ts": 7}))
        return stream.name, partition, json.dumps({**values, "ts": 7}).encode(), None

    before = [draw(True) for _ in range(rng.choice((0, 8, 16, 30)))]
    cut = dict(lengths)
    for _ in range(rng.choice((0, 4))):
        records.insert(rng.randint(0, len(records)), (stream.name, -1, None, None))
    records[:] = before + [draw(False) if record[1] < 0 else record for record in records]
    return cut


def _draw_records(
    rng: Random, streams: Mapping[str, Stream], counts: Mapping[str, int], scale: int, sparse: bool
) -> tuple[list[SourceRecord], list[Event], set[str]]:
    names, few = list(streams), rng.choice((2, 3) if sparse else (1, 2, 3))
    rare = rng.choice(names) if sparse else None  # what it has no partner for is suspended
    next_offset: dict[tuple[str, int], int] = {}
    records: list[SourceRecord] = []
    events: list[Event] = []
    dead: set[str] = set()
    time = 1_000 * scale
    for _ in range(rng.randint(40, 40 + 10 * len(names)) if sparse else rng.randint(15, 20 + 10 * len(names))):
        time += rng.choice((0, 1, 2, 5) if sparse else (0, 1, 3, 10, 30)) * scale
        stream = rng.choice(names)
        if stream == rare and rng.random() < 0.7:
            continue
        partition = rng.randrange(counts[stream])
        offset = next_offset.get((stream, partition), 0)
        next_offset[stream, partition] = offset + 1
        if rng.random() < 0.05:
            records.append((stream, partition, rng.choice(BROKEN), None))
            dead.add(f"{stream}:{partition}:{offset}")
            continue
        values = {f: choices[-1] if rng.random() < 0.06 else rng.choice(choices[:few]) for f, choices in VALUES.items()}
        if sparse and rng.random() < 0.9:
            values |= {"k": rng.randrange(5), "s": "x" * rng.randrange(5)}
        values["ts"] = time - rng.choice((0, 0, 0, 2, 15, 60)) * scale
        records.append((stream, partition, json.dumps(values).encode(), None))
        events.append(Event(stream, partition, offset, values))
    return records, events, dead


def binary_tree(query: Query, rng: Random) -> Tree:
    """Any tree without cross products: join two connected pieces until one is left."""
    pieces: list[tuple[Tree, set[str]]] = [(alias, {alias}) for alias in query.aliases]
    while len(pieces) > 1:
        pairs = [
            (i, j)
            for i in range(len(pieces))
            for j in range(len(pieces))
            if i != j
            and any({c.alias for c in g} & pieces[i][1] and {c.alias for c in g} & pieces[j][1] for g in query.equal)
        ]
        i, j = pairs[rng.randrange(len(pairs))]
        joined: tuple[Tree, set[str]] = ((pieces[i][0], pieces[j][0]), pieces[i][1] | pieces[j][1])
        pieces = [p for k, p in enumerate(pieces) if k not in (i, j)] + [joined]
    return pieces[0][0]


def random_tree(query: Query, rng: Random, flat: float = 0.7) -> Tree:
    """Any tree without cross products, often with M-Joins: join pieces that have a class of equal columns in common
    until one is left."""
    pieces: list[tuple[Tree, set[str]]] = [(alias, {alias}) for alias in query.aliases]
    while len(pieces) > 1:
        groups = [
            [i for i, (_, held) in enumerate(pieces) if any(c.alias in held for c in members)]
            for members in query.equal
        ]
        meeting = rng.choice([group for group in groups if len(group) > 1])
        many = len(meeting) > 2 and rng.random() < flat
        chosen = rng.sample(meeting, rng.randint(3, len(meeting)) if many else 2)
        joined = (tuple(pieces[i][0] for i in chosen), set().union(*(pieces[i][1] for i in chosen)))
        pieces = [p for i, p in enumerate(pieces) if i not in chosen] + [joined]
    return pieces[0][0]
