"""What one small step costs, in CPU microseconds: of a node, of the sink, of ingest, and of a node that has many values
suspended. Prints one JSON object; run with the checkout to be measured first on PYTHONPATH.

Each measured thing is one function that sets it up and gives what is to be repeated. An older checkout has other names
for some modules, so they are looked up by a list of names.

Invariant: a measured step does what a service does for such a record, but for disk and network.
"""

import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import schemas.block as wire
from schemas.block import Block, decode_block, encode_block
from schemas.mesh import FieldType, Mesh, Stream
from schemas.rows import Rows

REPEATS, ROUNDS = 300, 7
FIELDS = {"id": FieldType.INT64, "x": FieldType.INT64, "name": FieldType.STRING, "ts": FieldType.INT64}
SELECT = {
    2: "SELECT a.id AS a_id, b.id AS b_id, b.name AS name FROM a [RANGE 60 SECONDS], b [RANGE 60 SECONDS]"
    " WHERE a.x = b.x",
    3: "SELECT a.id AS a_id, b.id AS b_id, c.id AS c_id FROM a [RANGE 60 SECONDS], b [RANGE 60 SECONDS],"
    " c [RANGE 60 SECONDS] WHERE a.x = b.x AND b.x = c.x",
}
START_MS = 1_700_000_000_000
Step = Callable[[], int]  # what is repeated; gives the bytes it would have written


def ours(name: str, *modules: str) -> Any:
    """Something of the core by its name, from the first of these modules that is there."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"topology.{module}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise SystemExit(f"{name} is in none of {', '.join(modules)}")


def streams() -> dict[str, Stream]:
    return {name: Stream(name, name, FIELDS, "ts", lateness_ms=1_000) for name in "abc"}


def plan_of(count: int) -> Any:
    query = ours("parse_query", "query.cql", "cql")("q", SELECT[count], streams())
    shape = ("a", "b") if count == 2 else (("a", "b"), "c")
    return ours("build_plan", "plan.plan", "plan")(query, shape)


def is_here(*modules: str) -> bool:
    """Whether the checkout has one of these modules."""
    return any(importlib.util.find_spec(f"topology.{module}") is not None for module in modules)


NOW = importlib.util.find_spec("topology.join") is not None and is_here("join.kernel")


def open_node(plan: Any, node: str, feedback: bool = False) -> Any:
    if not NOW:
        return ours("open_node", "join.mjoin", "mjoin")(plan, node, 0, 1, feedback=feedback)
    settings = ours("Settings", "join.settings")(feedback="on" if feedback else "off")
    return ours("Partition", "join.partition")(plan, node, 0, 1, settings=settings)


def composites(sequence: int) -> Any:
    """The header of rows that j1 made."""
    if NOW:
        return wire.Composites(1, "j1", 0, 1, 1, sequence, START_MS)
    return wire.Header("rows", "j1", 0, 1, 1, sequence, 1, 0, START_MS)  # type: ignore[call-arg]


def word(sequence: int, hashes: Any, side: int, ticket: int = 0) -> bytes:
    """A block of j2 that suspends values of the first shape at j1, or resumes them under a ticket."""
    if NOW:
        rows = ours("pack", "restraint.suspension.wire")([(0, ours("entries_of", "restraint.tables")(hashes))])
        given = (1, "j2", 0, 1, 1, sequence, START_MS)
        return encode_block(Block(wire.Resume(*given, ticket) if ticket else wire.Suspend(*given), rows))
    entries = ours("entries_of", "state.lookup", "subtuples")(hashes)
    rows = ours("pack", "state.lookup", "subtuples")([(0, entries)], ticket)
    kind = "resume" if ticket else "suspend"
    return encode_block(Block(wire.Header(kind, "j2", 0, 1, 1, sequence, 1, side, START_MS), rows))  # type: ignore[call-arg]


def encoded(sends: list[Any]) -> list[bytes]:
    """As a host sends them: those to one place together."""
    return [encode_block(send.block) for send in ours("bundled", "message.bundle", "bundle")(sends)]


def written(effects: Any) -> int:
    """Bytes of segments and tables that a step wants stored."""
    tables = sum(len(data or b"") for data in effects.tables.values())
    return sum(run.rows.nbytes for _, _, run in effects.puts) + tables


def event(number: int, x: int) -> bytes:
    return b'{"id":%d,"x":%d,"name":"name %d","ts":%d}' % (number, x, number % 10, START_MS + number)


class Source:
    """Ingest of one partition of one stream: records in, encoded blocks out."""

    def __init__(self, plan: Any, stream: str) -> None:
        self.reader = ours("StreamReader", "ingest.reading", "ingest")(streams()[stream], 1)
        self.reader.readings = {0: ours("Reading", "ingest.reading", "ingest")(0)}
        routers_of = ours("routers_of", "ingest.routing", "ingest.reading", "ingest")
        routers = routers_of(plan, 1, 1, False) if NOW else routers_of(plan, 1, 1, 1, False)
        self.router = next(r for r in routers if r.source.stream == stream)
        self.router.assign(0, 0)
        self.offset = 0

    def blocks(self, values: list[bytes]) -> list[bytes]:
        offsets = list(range(self.offset, self.offset + len(values)))
        self.offset += len(values)
        rows = self.reader.read(0, offsets, values).rows
        return [encode_block(send.block) for send in self.router.send(rows, self.reader)]


# -- what is measured: each gives an endless iterator of steps


def node_step() -> Iterator[Step]:
    """A block of one row at a 2-way node whose state is small: decode, step, encode what it sends."""
    plan, number = plan_of(2), 0
    node, a, b = open_node(plan, "j1"), Source(plan, "a"), Source(plan, "b")
    offset = 0
    while True:
        for source in (a, b):
            (data,) = source.blocks([event(number, number // 2 % 1_000)])

            def step(data: bytes = data, offset: int = offset) -> int:
                effects = node.step(offset, decode_block(data))
                return len(b"".join(encoded(effects.sends)))

            yield step
            number, offset = number + 1, offset + 1


def ingest_step() -> Iterator[Step]:
    """A few records as they were fetched, to encoded blocks."""
    source, number = Source(plan_of(2), "a"), 0
    while True:
        values = [event(number + k, number + k) for k in range(3)]

        def step(values: list[bytes] = values) -> int:
            return len(b"".join(source.blocks(values)))

        yield step
        number += len(values)


def sink_step() -> Iterator[Step]:
    """A block of a few results: decode, admit, make records, hand them to the producer (which does nothing here)."""
    from confluent_kafka import TopicPartition

    from schemas import topics
    from services.simulation.broker import Record, SimBroker, SimConsumer, SimMessage
    from services.sink.loop import Sink

    plan, made = plan_of(2), 0
    mesh = Mesh("m", {"bootstrap.servers": "none"}, 1, streams(), {"q": SELECT[2]})
    consumer = SimConsumer(SimBroker(), "sink", random.Random(1), eof=False)

    class Nowhere:
        def begin_transaction(self) -> None: ...

        def produce(self, _: str, value: str, *__: Any, **___: Any) -> None:
            nonlocal made
            made += len(value)

    sink = Sink(mesh, plan, 1, consumer, Nowhere(), None)
    place = (topics.query_out("m", "q"), 0)
    sink._assigned(consumer, [TopicPartition(*place)])  # type: ignore[arg-type]
    columns = {str(c): c.name for c in plan.root.columns}
    sequence = 0
    while True:
        sequence += 1
        ids = np.arange(3) + 3 * sequence
        rows: dict[str, Any] = {f"{mark}{alias}": ids + START_MS for alias in "ab" for mark in "#@"}
        for column, name in columns.items():
            rows[column] = texts(len(ids)) if FIELDS[name] is FieldType.STRING else ids
        message = SimMessage(place, sequence, Record(encode_block(Block(composites(sequence), Rows(rows)))))

        def step(message: Any = message) -> int:
            before = made
            sink._take([message])
            return made - before

        yield step


def texts(count: int) -> Any:
    import pyarrow as pa

    return pa.array([f"name {i}" for i in range(count)], pa.large_utf8())


def suspended_step(count: int) -> Callable[[], Iterator[Step]]:
    """A block of a few rows, one that suspends a few values more, and one that resumes these, at a node of whose values
    `count` are suspended."""

    def steps() -> Iterator[Step]:
        plan = plan_of(3)
        node, a, number, sequence = open_node(plan, "j1", feedback=True), Source(plan, "a"), 0, 0
        rng = np.random.default_rng(1)
        offset = 0

        def say(hashes: Any, ticket: int = 0) -> bytes:
            nonlocal sequence
            sequence += 1
            return word(sequence, hashes, plan.node("j1").target_side, ticket)

        def values(many: int) -> Any:
            return np.unique(rng.integers(0, 2**64 - 1, many, dtype=np.uint64))

        for begin in range(0, count, 50_000):
            node.step(offset, decode_block(say(values(min(50_000, count - begin)))))
            offset += 1
        while True:
            (rows,) = a.blocks([event(number + k, number + k) for k in range(3)])
            few = values(3)
            blocks = (rows, say(few), say(few, ticket=offset + 1))

            def step(blocks: tuple[bytes, ...] = blocks, offset: int = offset) -> int:
                size = 0
                for at, data in enumerate(blocks):
                    effects = node.step(offset + at, decode_block(data))
                    size += written(effects) + len(b"".join(encoded(effects.sends)))
                return size

            yield step
            number, offset = number + 3, offset + len(blocks)

    return steps


MEASURED: dict[str, Callable[[], Iterator[Step]]] = {
    "one-row step of a 2-way node": node_step,
    "block of 3 results in the sink": sink_step,
    "3 records in ingest": ingest_step,
    "step with 1,000 values suspended": suspended_step(1_000),
    "step with 100,000 values suspended": suspended_step(100_000),
    "step with 1,000,000 values suspended": suspended_step(1_000_000),
}


def cost(steps: Iterator[Step], repeats: int, rounds: int) -> tuple[float, float]:
    """CPU microseconds and bytes of one step: the median over rounds."""
    for _ in range(3):
        next(steps)()
    times, sizes = [], []
    for _ in range(rounds):
        ready = [next(steps) for _ in range(repeats)]
        begun = time.process_time()
        size = sum([step() for step in ready])
        times.append((time.process_time() - begun) / repeats * 1e6)
        sizes.append(size / repeats)
    return statistics.median(times), statistics.median(sizes)


def main() -> None:
    found = {}
    for name, measured in MEASURED.items():
        if len(sys.argv) > 1 and sys.argv[1] not in name:
            continue
        few = "suspended" in name  # its steps take milliseconds, and each suspends more
        found[name] = cost(measured(), 10 if few else REPEATS, 3 if few else ROUNDS)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
