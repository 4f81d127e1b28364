"""With static tables among the sources, whatever the query, plan, cut, interleaving and with or without feedback: the
results are the oracle's, each once.

Tables are drawn with several versions of a key, deletions, broken records and records behind the cut; they are read
before, among or after the streams. A failing seed prints itself; `case(seed)` replays it.
"""

import random
from collections import Counter
from typing import Any

import pytest

from schemas.mesh import FieldType, Stream
from services.simulation.case import binary_tree
from tests.drawn import check_often, check_results, say
from tests.topology.test_mesh_equals_oracle import edges_of
from topology.oracle.truth import Event, truth
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.testing.driver import TopologyDriver

FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "s": FieldType.STRING, "ts": FieldType.TIMESTAMP}
TABLE_FIELDS = {name: kind for name, kind in FIELDS.items() if name != "ts"}
SEEDS, CHUNK = 400, 50
AT_LEAST = {
    "results": 4_000,
    "replaced or deleted": 1_000,
    "behind the cut": 1_500,
    "broken": 100,
    "values suspended": 600,
    "values resumed": 100,
    "pairs avoided": 500,
    "tables": 500,
    "refused by heralds": 500,
    "made for heralds": 80,
}
done: Counter[str] = Counter()


def draw_text(rng: random.Random, names: list[str], tables: set[str]) -> str:
    n, shape = len(names), rng.choice(["chain", "star", "cycle", "mixed"])
    edges = edges_of(shape, n) if shape != "mixed" else [(rng.randrange(i), i) for i in range(1, n)]
    where = []
    for left, right in edges:
        for field in rng.sample("kms", rng.choice([1, 1, 1, 2])):
            other = rng.choice("km") if field != "s" and rng.random() < 0.3 else field
            where.append(f"a{left}.{field} = a{right}.{other}")
    where += rng.sample([f"a0.m < a{n - 1}.k + 2", "a1.k > 0", f"a{n - 1}.s <> 'x'"], rng.choice([0, 0, 1]))
    sources = ", ".join(
        f"{name} AS a{i}" if name in tables else f"{name} [RANGE {rng.choice([0, 10, 40, 100, 250])} MS] AS a{i}"
        for i, name in enumerate(names)
    )
    return f"SELECT a0.k AS k, a1.s AS s, a{n - 1}.m AS m FROM {sources} WHERE {' AND '.join(where)}"


def draw_table(
    rng: random.Random, stream: Stream, driver: TopologyDriver, partitions: int, values: int
) -> tuple[list[Event], int]:
    """Records of a table, some beyond its cut; gives its events and how many records are broken."""
    events, broken = [], 0
    for _ in range(rng.choice([0, 5, 15, 40])):
        partition = rng.randrange(partitions)
        row: dict[str, Any] = {"k": rng.randrange(values), "m": rng.randrange(values), "s": "x" * rng.randrange(values)}
        roll = rng.random()
        if roll < 0.05:
            bad = rng.choice([b"", b"{", b'{"k": null, "s": null}', b"[]"])
            broken += driver.produce(stream.name, partition, bad) < driver.readers[stream.name].cut[partition]  # type: ignore[attr-defined]
        elif roll < 0.08:
            broken += (
                driver.delete(stream.name, partition, rng.choice([None, b"\xff"]))
                < driver.readers[stream.name].cut[partition]
            )  # type: ignore[attr-defined]
        elif roll < 0.25:
            key = row[stream.table or ""]
            events.append(
                Event(
                    stream.name,
                    partition,
                    driver.delete(stream.name, partition, str(key).encode()),
                    {str(stream.table): key},
                    deletes=True,
                )
            )
        else:
            if rng.random() < 0.1:
                row[rng.choice([name for name in row if name != stream.table])] = None
            events.append(Event(stream.name, partition, driver.produce(stream.name, partition, row), row))
    return events, broken


def case(seed: int) -> Counter[str]:
    rng, choice = random.Random(seed), random.Random(f"{seed} interleaving")
    n = rng.choice([2, 3, 3, 4, 4, 5])
    names = [f"r{i}" for i in range(n)]
    tables = set(rng.sample(names, rng.choice([1, 1, min(2, n - 1), n - 1])))
    streams = {
        name: Stream(name, name, TABLE_FIELDS, "", table=rng.choice("ks"))
        if name in tables
        else Stream(name, name, FIELDS, "ts", lateness_ms=rng.choice([0, 5, 30]))
        for name in names
    }
    query = parse_query("q", draw_text(rng, names, tables), streams)
    plan = build_plan(query, binary_tree(query, rng))
    source_partitions, most, patience, burst = (
        rng.choice([1, 2]),
        rng.choice([1, 3, 20]),
        rng.choice([0, 0.05, 0.3]),
        rng.choice([1, 5, 30]),
    )
    cuts = {name: {p: rng.choice([0, 3, 10, 20]) for p in range(source_partitions)} for name in sorted(tables)}
    feedback, values = rng.random() < 0.7, rng.choice([2, 3, 4, 6])
    driver = TopologyDriver(
        plan,
        streams,
        partitions=rng.choice([1, 2, 3]),
        source_partitions=source_partitions,
        feedback=feedback,
        cuts=cuts,
        heralds=choice.random() < 0.5,
    )
    events: list[Event] = []
    counts: Counter[str] = Counter(tables=len(tables))
    tables_first = rng.choice([0.0, 0.5, 1.0])
    for name in sorted(tables):
        found, broken = draw_table(rng, streams[name], driver, source_partitions, values)
        events += found
        counts["broken"] += broken
        for p in range(source_partitions):  # a cut is an end that the topic once had
            cuts[name][p] = min(cuts[name][p], len(driver.sources[name, p].records))

    def run(to_the_end: bool) -> None:
        while ready := driver.ready():
            loading = [actor for actor in ready if actor[0] == "ingest" and actor[1][0] in tables]
            inner = [actor for actor in ready if actor[0] != "ingest"]
            if loading and choice.random() < tables_first:
                ready = loading
            elif inner and choice.random() > patience:
                ready = inner
            driver.advance(ready[choice.randrange(len(ready))], 1 + choice.randrange(most))
            if not to_the_end and choice.random() < 0.02:
                return

    time, sparse = 1_000, rng.choice([name for name in names if name not in tables])
    for i in range(rng.choice([20, 40]) * n):
        time += rng.choice([0, 1, 1, 2, 6])
        stream = rng.choice([name for name in names if name not in tables])
        if stream == sparse and n > 2 and rng.random() < 0.6:
            continue
        row = {
            "k": rng.randrange(values + 1),
            "m": rng.randrange(values),
            "s": "x" * rng.randrange(values),
            "ts": time - rng.choice([0, 0, 0, 3, 10]),
        }
        partition = rng.randrange(source_partitions)
        events.append(Event(stream, partition, driver.produce(stream, partition, row), row))
        if i % burst == 0:
            run(to_the_end=False)
    run(to_the_end=True)
    where = f"seed {seed}: {query.text} {plan.tree}"
    counts["results"] = check_results(driver, truth(query, streams, events, cuts), where)
    assert len(driver.broken) == counts["broken"]
    before = [e for e in events if e.stream in tables and e.offset < cuts[e.stream][e.partition]]
    counts["replaced or deleted"] = len(before) - sum(
        len({(e.partition, e.values[str(streams[t].table)]) for e in before if e.stream == t}) for t in tables
    )
    counts["behind the cut"] = sum(e.stream in tables for e in events) - len(before)
    for node in driver.nodes.values():
        for told in node.memo.heralds.each if node.memo.heralds is not None else ():
            counts["refused by heralds"] += told.refused
            counts["made for heralds"] += told.made
        if node.memo.feedback is not None:
            assert not any(node.memo.feedback.tickets), f"{where}: a resume was never answered"
            counts["values resumed"] += node.memo.feedback.values_resumed
            counts["values suspended"] += node.memo.feedback.values_suspended
            counts["pairs avoided"] += node.memo.feedback.pairs_avoided
    return counts


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_results_are_the_oracles(first: int) -> None:
    for seed in range(first, first + CHUNK):
        done.update(case(seed))
        done["seeds"] += 1


def test_tables_really_did_something(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "tables", done)
    check_often(done, SEEDS, AT_LEAST)
