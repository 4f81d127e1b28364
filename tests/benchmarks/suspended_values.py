"""What a step costs with 1,000, 100,000 and 1,000,000 suspended values: CPU and bytes written, at the producer that
leaves them out (`j1` of a three-way join) and at the consumer that has told of them (`j2`).

A step of the producer is three records, as a busy edge sees them: a block of a few rows of which half wait, a suspend
of a few new values, a resume of a few old ones. One of the consumer is a block of rows without a partner, and a block
of partners of a few values that were told of. Values that rows show are as many whatever the size, so that the work is
the same but for what is remembered. Each record is made durable in a store in memory, which counts the bytes of tables
and memo.

    python -m tests.benchmarks.suspended_values
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.block import Block, Header, Position
from schemas.mesh import FieldType, Stream
from schemas.rows import U64, Rows
from services.runtime.store import Cache, NodeStore
from topology.join.mjoin import open_node
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.restraint.suspension.demand import NO_PARTNER
from topology.state.hashing import hash_key
from topology.state.lookup import entries_of, pack
from topology.state.window import HASH, part_id, part_time

SIZES = (1_000, 100_000, 1_000_000)
ROWS, FEW, HOT, WARM_UP, KEYS = 16, 4, 200, 200, 50
FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "ts": FieldType.TIMESTAMP}
STREAMS = {n: Stream(n, n, FIELDS, "ts", lateness_ms=5) for n in "abc"}
QUERY = parse_query(
    "q",
    """SELECT a.k FROM a [RANGE 60 SECONDS], b [RANGE 60 SECONDS], c [RANGE 60 SECONDS]
WHERE a.k = b.k AND a.m = c.m""",
    STREAMS,
)
PLAN = build_plan(QUERY, (("a", "b"), "c"))


@dataclass(frozen=True)
class Cost:
    values: int
    cpu_us: float  # of a step, the median
    cpu_mean_us: float  # with what is done now and then
    bytes_mean: float
    bytes_most: int


class Counting:
    """A `KeyValue` in memory that counts what is written."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.written = 0

    def get(self, key: bytes) -> bytes | None:
        return self.data.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        yield from [(k, self.data[k]) for k in sorted(self.data) if k.startswith(prefix)]

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        for key in deletes:
            self.data.pop(key, None)
        self.data.update(puts)
        self.written += sum(len(key) + len(value) for key, value in puts if key[:1] in b"mt")

    def close(self) -> None: ...


class Bench:
    """One node partition on its store; time stands nearly still, so that nothing ends."""

    def __init__(self, node: str) -> None:
        self.disk, self.offset, self.made, self.now = Counting(), 0, dict.fromkeys("abc", 0), 10_000_000
        self.said = 0  # blocks of other nodes
        self.store = NodeStore(self.disk, 0, Cache(), 1)
        sides = [self.store.side(i) for i in range(2)]
        self.node, self.sides, self.rng = (
            open_node(PLAN, node, 0, 1, stores=sides, feedback=True),
            sides,
            np.random.default_rng(1),
        )

    def take(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            effects = self.node.step(self.offset, block)
            self.offset += 1
            self.store.apply(effects, self.node.memo, [])
            for side in self.sides:
                side.settle()

    def source(self, alias: str, side: int, **columns: U64) -> Block:
        """Rows of a stream, in the order that ingest would give them."""
        count, first = len(next(iter(columns.values()))), self.made[alias]
        self.made[alias] += count
        self.now += 1
        key = self.node.node.inputs[side].key
        rows = {
            part_id(alias): np.arange(first, first + count),
            part_time(alias): np.full(count, self.now, np.int64),
            **{f"{alias}.{name}": values.astype(np.int64) for name, values in columns.items()},
        }
        rows[HASH] = hash_key([rows[str(c)] for c in key])
        position = Position(0, first, first + count, self.now)
        return Block(self.header("rows", alias, side, (position,)), Rows(rows))

    def about(self, kind: str, hashes: U64, ticket: int = 0) -> Block:
        """What the consumer says."""
        header = self.header(kind, "j2", self.node.node.target_side)
        return Block(header, pack([(self.shape, entries_of(np.sort(hashes)))], ticket))

    def composites(self, ks: U64, ms: U64) -> Block:
        """Rows of j1."""
        side, count, first = self.node.node.inputs[0], len(ms), self.said * 1_000
        self.now += 1
        rows = {part_id(a): np.arange(first, first + count) for a in side.aliases}
        rows |= {part_time(a): np.full(count, self.now, np.int64) for a in side.aliases}
        values = {"a.k": ks, "a.m": ms, "b.k": ks}
        rows |= {str(c): values[str(c)].astype(np.int64) for c in side.columns}
        rows[HASH] = hash_key([rows[str(c)] for c in side.key])
        return Block(self.header("rows", "j1", 0), Rows(rows))

    def header(self, kind: str, sender: str, side: int, positions: tuple[Position, ...] = ()) -> Header:
        self.said += 1
        return Header(
            kind=kind,  # type: ignore[arg-type]
            sender=sender,
            sender_partition=0,
            sender_partitions=1,
            incarnation=1,
            sequence=self.said,
            epoch=1,
            side=side,
            watermark=self.now - 1_000,
            positions=positions,
        )

    @property
    def shape(self) -> int:
        """The number of the shape `a.m`, at either end of the edge."""
        assert self.node.feedback is not None
        demand = self.node.feedback.demands[0]
        shapes = [t.shape for t in self.node.feedback.suspended.tables] if demand is None else demand.shapes
        return next(i for i, shape in enumerate(shapes) if shape.names == ("a.m",))


def hashed(values: U64) -> U64:
    return hash_key([values.astype(np.int64)])


def at_the_producer(bench: Bench, size: int) -> Iterator[list[Block]]:
    """Steps of j1 that has so many values suspended, of which some rows show a few."""
    for begin in range(0, size, 10_000):
        bench.take([bench.about("suspend", hashed(np.arange(begin, min(size, begin + 10_000))))])
    oldest, newest = HOT, size
    while True:
        rows = bench.source(
            "a", 0, k=bench.rng.integers(0, KEYS, ROWS), m=bench.rng.integers(-HOT, HOT, ROWS)
        )  # of these half wait
        begins = bench.about("suspend", hashed(np.arange(newest, newest + FEW)))
        ends = bench.about("resume", hashed(np.arange(oldest, oldest + FEW)), 1)
        yield [rows, begins, ends]
        oldest, newest = oldest + FEW, newest + FEW


def at_the_consumer(bench: Bench, size: int) -> Iterator[list[Block]]:
    """Steps of j2 that has told of so many values."""
    assert bench.node.feedback is not None
    demand = bench.node.feedback.demands[0]
    assert demand is not None
    hashes = np.sort(hashed(np.arange(size)))
    demand.say(bench.shape, entries_of(hashes), NO_PARTNER, np.ones(size, np.uint64))
    for _ in demand.take_unsent():
        pass
    bench.take([bench.source("c", 1, m=np.full(1, -1))])
    oldest, newest = 0, size
    while True:
        alone = bench.composites(bench.rng.integers(0, KEYS, FEW), np.arange(newest, newest + FEW))
        partners = bench.source("c", 1, m=np.arange(oldest, oldest + FEW))
        yield [alone, partners]
        bench.take([Block(bench.header("resume-done", "j1", 0), pack([], t.id)) for t in list(demand.tickets)])
        oldest, newest = oldest + FEW, newest + FEW


def measure(node: str, sizes: Sequence[int], steps: int) -> list[Cost]:
    """All sizes in turn, step by step, so that whatever else the machine does falls on all alike."""
    benches = [Bench(node) for _ in sizes]
    made = [STEPS[node](bench, size) for bench, size in zip(benches, sizes, strict=True)]
    times = np.zeros((len(sizes), WARM_UP + steps))
    written = np.zeros((len(sizes), WARM_UP + steps), np.int64)
    for k in range(WARM_UP + steps):
        for i, bench in enumerate(benches):
            blocks = next(made[i])
            before, begun = bench.disk.written, time.process_time()
            bench.take(blocks)
            times[i, k] = (time.process_time() - begun) * 1e6
            written[i, k] = bench.disk.written - before
    return [
        Cost(size, float(np.median(t)), float(t.mean()), float(w.mean()), int(w.max()))
        for size, t, w in zip(sizes, times[:, WARM_UP:], written[:, WARM_UP:], strict=True)
    ]


STEPS = {"j1": at_the_producer, "j2": at_the_consumer}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.suspended_values", description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="that are measured (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="(default: %(default)s)")
    arguments = parser.parse_args()
    for node in STEPS:
        print(f"{node}: suspended   us median    us mean   bytes mean   bytes most")
        for cost in measure(node, arguments.sizes, arguments.steps):
            print(
                f"{cost.values:>13,} {cost.cpu_us:>11,.0f} {cost.cpu_mean_us:>10,.0f} {cost.bytes_mean:>12,.0f}"
                f" {cost.bytes_most:>12,}"
            )


if __name__ == "__main__":
    main()
