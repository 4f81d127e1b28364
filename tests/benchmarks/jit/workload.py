"""The workload of the JIT paper (section VI): N streams, a clique join, the plans of table II, the parameters of table
III.

There is one equality between each pair of sources, over a column that only these two have; every value is uniform in
1..dmax. Each source sends `rate` events a second (Poisson arrivals). In the left-deep series stream D (C when N = 3)
draws from 1..100 dmax. A point is one setting of all this.

Invariant: a point's events are a function of the point and its seed, so every mode of a run reads the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from schemas.block import encode_block
from schemas.mesh import FieldType, Stream
from schemas.rows import Rows
from topology.ingest.reading import Reading, StreamReader
from topology.ingest.routing import routers_of
from topology.plan.plan import Plan, build_plan, parse_tree
from topology.query.cql import parse_query

BUSHY = {
    4: "((a b) (c d))",
    5: "(((a b) (c d)) e)",
    6: "(((a b) (c d)) (e f))",
    7: "(((a b) (c d)) ((e f) g))",
    8: "(((a b) (c d)) ((e f) (g h)))",
}
LEFT_DEEP = {3: "((a b) c)", 4: "(((a b) c) d)", 5: "((((a b) c) d) e)", 6: "(((((a b) c) d) e) f)"}
PLANS = {"bushy": BUSHY, "left-deep": LEFT_DEEP}
WIDE = 100  # how many times wider the domain of stream D is in the left-deep series
_BEGIN_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Point:
    """One setting of the parameters of table III."""

    shape: str  # "bushy" or "left-deep"
    window_s: float
    rate: float  # events a second and source
    sources: int
    dmax: int

    def __post_init__(self) -> None:
        if self.sources not in PLANS[self.shape]:
            raise ValueError(
                f"table II has no {self.shape} plan of {self.sources} sources, only of"
                f" {', '.join(map(str, PLANS[self.shape]))}"
            )

    @property
    def tree(self) -> str:
        return PLANS[self.shape][self.sources]

    @property
    def aliases(self) -> str:
        return "abcdefgh"[: self.sources]

    @property
    def wide(self) -> str | None:
        """The stream that draws from a hundred times the range."""
        return None if self.shape == "bushy" else "c" if self.sources == 3 else "d"

    def domain(self, alias: str) -> int:
        return self.dmax * (WIDE if alias == self.wide else 1)

    def __str__(self) -> str:
        return f"{self.shape} N={self.sources} w={self.window_s / 60:g} min rate={self.rate:g}/s dmax={self.dmax}"


# Table III. The bold type of its defaults is lost in the text we have; section VI states dmax (200 and 50), the others
# are the middle ones. Left-deep N has no
# middle; 4 is the smallest that has a stream D.
DEFAULTS = {"bushy": Point("bushy", 20 * 60, 1, 6, 200), "left-deep": Point("left-deep", 10 * 60, 1, 4, 50)}
RANGES: dict[str, dict[str, tuple[float, ...]]] = {
    "bushy": {
        "window_s": (600, 900, 1200, 1500, 1800),
        "rate": (0.4, 0.7, 1, 1.3, 1.6),
        "sources": (4, 5, 6, 7, 8),
        "dmax": (100, 150, 200, 250, 300),
    },
    "left-deep": {
        "window_s": (300, 450, 600, 750, 900),
        "rate": (0.4, 0.7, 1, 1.3, 1.6),
        "sources": (3, 4, 5, 6),
        "dmax": (30, 40, 50, 60, 70),
    },
}


def varied(shape: str, parameter: str) -> list[Point]:
    """The points of one figure: one parameter over its range, the others at their defaults."""
    return [_with(DEFAULTS[shape], parameter, value) for value in RANGES[shape][parameter]]


def _with(point: Point, parameter: str, value: float) -> Point:
    return replace(point, **{parameter: int(value) if parameter in ("sources", "dmax") else value})  # type: ignore[arg-type]


def columns_of(point: Point) -> dict[str, tuple[str, str]]:
    """Column -> the two sources that share it: x1 of a and b, x2 of a and c, … as the paper numbers them."""
    return {f"x{i}": pair for i, pair in enumerate(combinations(point.aliases, 2), 1)}


def streams_of(point: Point) -> dict[str, Stream]:
    """The streams, each with a column for every other source."""
    columns = columns_of(point)
    return {
        a: Stream(
            a, a, {**{c: FieldType.INT64 for c, pair in columns.items() if a in pair}, "ts": FieldType.TIMESTAMP}, "ts"
        )
        for a in point.aliases
    }


def plan_of(point: Point, tree: str | None = None) -> Plan:
    sources = ", ".join(f"{a} [RANGE {round(point.window_s)} SECONDS]" for a in point.aliases)
    where = " AND ".join(f"{left}.{c} = {right}.{c}" for c, (left, right) in columns_of(point).items())
    query = parse_query("clique", f"SELECT a.x1 FROM {sources} WHERE {where}", streams_of(point))
    return build_plan(query, parse_tree(tree or point.tree, query))


def events_of(point: Point, hours: float, seed: int) -> dict[str, Rows]:
    """The events of each source, in order of time: its columns and `ts`."""
    found = {}
    for number, (alias, stream) in enumerate(streams_of(point).items()):
        rng = np.random.default_rng([seed, number])
        gaps = rng.exponential(1000 / point.rate, int(hours * 3600 * point.rate * 1.2) + 100)
        times = np.cumsum(gaps)
        times = times[times < hours * 3_600_000]
        values = {c: rng.integers(1, point.domain(alias) + 1, len(times)) for c in stream.fields if c != "ts"}
        found[alias] = Rows({**values, "ts": _BEGIN_MS + times.astype(np.int64)}, len(times))
    return found


def stretches(
    point: Point, plan: Plan, hours: float, seed: int, stretch_s: float, heralds: bool = False
) -> Iterator[list[tuple[str, bytes]]]:
    """What ingest would send: for each stretch of event time, (node, block) of every source that has events in it; with
    heralds, behind them what tells of them."""
    streams, events = streams_of(point), events_of(point, hours, seed)
    readers = {a: StreamReader(streams[a], 1) for a in events}
    routers = routers_of(plan, 1, 1, heralds)
    grid = _BEGIN_MS + np.arange(1, int(np.ceil(hours * 3600 / stretch_s)) + 1) * round(stretch_s * 1000)
    places = {a: np.searchsorted(rows.ints("ts"), grid).tolist() for a, rows in events.items()}
    done = dict.fromkeys(events, 0)
    for router in routers:
        router.assign(0, 0)
    for a in events:
        readers[a].readings[0] = Reading(0)
    for k in range(len(grid)):
        pieces = {}
        for alias, rows in events.items():
            start, stop = done[alias], places[alias][k]
            if stop > start:
                done[alias] = stop
                piece = rows.slice(start, stop)
                reading = readers[alias].readings[0]
                reading.next, reading.max_time = stop, int(piece.ints("ts")[-1])
                pieces[alias] = Rows({**piece.columns, "#": np.arange(start, stop), "@": piece["ts"]}, len(piece))
        sends = [
            send
            for r in routers
            if r.route.alias in pieces
            for send in r.send(pieces[r.route.alias], readers[r.route.alias])
        ]
        yield [(send.target, encode_block(send.block)) for send in sends]
