"""Whatever the query, plan, windows, events, interleaving and block sizes: the mesh's results are the oracle's, as ids
and as values.

Hypothesis draws everything. A failing case prints its seed and a `@reproduce_failure` line that replays it exactly.
"""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from schemas.mesh import FieldType, Stream
from services.simulation.case import binary_tree
from topology.oracle.truth import Event, truth
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.testing.driver import TopologyDriver

FIELDS = {
    "k": FieldType.INT64,
    "m": FieldType.INT64,
    "s": FieldType.STRING,
    "f": FieldType.FLOAT64,
    "b": FieldType.BOOL,
    "v": FieldType.INT64,
    "ts": FieldType.TIMESTAMP,
}
VALUES: dict[str, Any] = {
    "k": [0, 1, 2, 2**53 + 1, -(2**63), None],
    "m": [0, 1, None],
    "s": ["", "a", "aé", "long text beyond sixteen bytes", "long text beyond sixteen byteS", None],
    "f": [0.0, -0.0, 1.5, 1e300, None],
    "b": [True, False, None],
    "v": [0, 1, 2, 3, None],
}
NAMES = ["r0", "r1", "r2", "r3", "r4"]
JOINABLE = ["k", "m", "s", "f", "b"]


@dataclass(frozen=True)
class Case:
    text: str
    lateness: dict[str, int]
    tree: Any
    partitions: int
    source_partitions: int
    events: list[tuple[str, int, dict[str, Any]]]
    most: int


def edges_of(shape: str, n: int) -> list[tuple[int, int]]:
    chain = [(i, i + 1) for i in range(n - 1)]
    if shape == "star":
        return [(0, i) for i in range(1, n)]
    return chain + [(n - 1, 0)] if shape == "cycle" and n > 2 else chain


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(2, 5))
    shape = draw(st.sampled_from(["chain", "star", "cycle"]))
    self_join = n == 2 and draw(st.booleans())
    streams = [NAMES[0], NAMES[0]] if self_join else NAMES[:n]
    aliases = [f"a{i}" for i in range(n)]
    windows = [draw(st.sampled_from([0, 5, 20, 60, 200])) for _ in range(n)]
    where = []
    for left, right in edges_of(shape, n):
        for field in draw(st.lists(st.sampled_from(JOINABLE), min_size=1, max_size=2, unique=True)):
            where.append(f"a{left}.{field} = a{right}.{field}")
    extra = [
        "a0.v > 0",
        "a1.v IN (1, 2)",
        "a0.v BETWEEN 0 AND 2",
        "a0.s LIKE 'a%'",
        "a1.s IS NOT NULL",
        "NOT (a0.v = 1 OR a1.v = 2)",
        "a0.v < a1.v",
        "(a0.v > 1 OR a1.m IN (0, 1))",
        "a0.ts <= a1.ts",
        "a0.k = a0.m",
        "a1.b",
    ]
    where += draw(st.lists(st.sampled_from(extra), max_size=2, unique=True))
    last = aliases[-1]
    select = draw(
        st.sampled_from(
            [
                f"a0.k AS k, {last}.s AS s, a0.v + a1.v AS total",
                "a0.f, a1.ts AS t, a0.v * 2 - 1 AS x, 'fix' AS y",
                "*",
            ]
        )
    )
    sources = ", ".join(f"{s} [RANGE {w} MS] AS {a}" for s, w, a in zip(streams, windows, aliases, strict=True))
    text = f"SELECT {select} FROM {sources} WHERE {' AND '.join(where)}"
    count = draw(st.integers(0, 14 * n if n < 4 else 9 * n))
    source_partitions = draw(st.integers(1, 3))
    few = draw(st.booleans())  # few values: many matches
    time = 1_000
    events = []
    for _ in range(count):
        time += draw(st.sampled_from([0, 0, 1, 3, 10, 40]))
        values = {
            f: draw(st.sampled_from(choices[:2] if few and f in JOINABLE else choices)) for f, choices in VALUES.items()
        }
        back = draw(st.sampled_from([0, 0, 0, 2, 15, 60]))
        events.append(
            (
                draw(st.sampled_from(sorted(set(streams)))),
                draw(st.integers(0, source_partitions - 1)),
                {**values, "ts": max(1, time - back)},
            )
        )
    return Case(
        text=text,
        lateness={s: draw(st.sampled_from([0, 10, 50])) for s in set(streams)},
        tree=draw(st.randoms(use_true_random=False)),
        partitions=draw(st.integers(1, 3)),
        source_partitions=source_partitions,
        events=events,
        most=draw(st.sampled_from([1, 3, 20])),
    )


@settings(max_examples=600, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.randoms(use_true_random=False))
def test_results_are_the_oracles(case: Case, choice: Any) -> None:
    streams = {n: Stream(n, n, FIELDS, "ts", lateness_ms=late) for n, late in case.lateness.items()}
    query = parse_query("q", case.text, streams)
    plan = build_plan(query, binary_tree(query, case.tree))
    driver = TopologyDriver(plan, streams, partitions=case.partitions, source_partitions=case.source_partitions)
    events = [Event(s, p, driver.produce(s, p, values), values) for s, p, values in case.events]
    driver.run(lambda n: choice.randrange(n), most=case.most)
    found = {key: (value, time) for key, value, time in driver.results}
    assert len(found) == len(driver.results), "a result came twice"
    assert found == truth(query, streams, events)


def test_two_plans_of_one_query_give_the_same_keys_and_values() -> None:
    import random

    rng = random.Random(5)
    streams = {n: Stream(n, n, FIELDS, "ts", lateness_ms=20) for n in NAMES[:3]}
    text = (
        "SELECT a.v, c.s AS s FROM r0 [RANGE 40 MS] AS a, r1 [RANGE 90 MS] AS b, r2 [RANGE 200 MS] AS c WHERE a.k = b.k"
        " AND b.s = c.s"
    )
    query = parse_query("q", text, streams)
    events = []
    for i in range(400):
        values = {f: rng.choice(choices) for f, choices in VALUES.items()}
        events.append((rng.choice(NAMES[:3]), rng.randrange(2), {**values, "ts": 1000 + i - rng.randrange(30)}))
    found = []
    for tree in ((("a", "b"), "c"), ("a", ("b", "c"))):
        driver = TopologyDriver(build_plan(query, tree), streams)
        for stream, partition, values in events:
            driver.produce(stream, partition, values)
        driver.run(rng.randrange, most=20)
        found.append(sorted((k, sorted(v.items(), key=str), t) for k, v, t in driver.results))
    assert found[0] == found[1]
    assert len(found[0]) > 100
