"""M-Joins, alone and within trees, with fixed paths and as an Eddy, with feedback and without: the results are the
oracle's, each once.

Each seed draws a query, a tree with or without M-Joins, partitions, sparse streams and an interleaving, and runs it
five times. A failing seed prints itself; `case(seed)` replays it. All runs see the same events, so their composites can
be compared: feedback makes fewer.
"""

import random
from collections import Counter

import pytest

from schemas.mesh import FieldType, Routing, Stream
from services.simulation.case import random_tree
from tests.drawn import check_results, say, work
from topology.join.settings import Settings
from topology.oracle.truth import Event, truth
from topology.plan.plan import build_plan, tree_text
from topology.query.cql import parse_query
from topology.restraint.heralding import heeding
from topology.restraint.suspension.policy import RESTLESS
from topology.testing.driver import TopologyDriver, with_modes

FIELDS = {
    "k": FieldType.INT64,
    "m": FieldType.INT64,
    "s": FieldType.STRING,
    "v": FieldType.INT64,
    "ts": FieldType.TIMESTAMP,
}
EXTRA = (
    "a0.v < a1.v",
    "a0.v + a2.v > a1.v",
    "a1.v <> a2.v",
    "a0.ts <= a2.ts",
    "a0.v > 0",
    "NOT (a0.v = 1 OR a1.v = 2)",
)
SEEDS, CHUNK = 240, 40
MODES: tuple[tuple[Routing, bool | str, bool], ...] = (  # routing, feedback, heralds
    ("fixed", False, False),
    ("fixed", True, False),
    ("eddy", False, False),
    ("eddy", True, False),
    ("fixed", "auto", False),
    ("fixed", False, True),
    ("eddy", True, True),
)
done: Counter[str] = Counter()


def draw_text(rng: random.Random, n: int) -> str:
    common = rng.sample("ks", 2)[
        : rng.choice([1, 1, 1, 2])
    ]  # equal in (nearly) all inputs: what an M-Join is partitioned by
    joined = rng.choice([n, n, max(3, n - 1)])
    where = [f"a{rng.randrange(i)}.{f} = a{i}.{f}" for f in common for i in range(1, joined)]
    where += [f"a{rng.randrange(i)}.m = a{i}.{rng.choice('mmv')}" for i in range(joined, n)]
    for _ in range(rng.choice([0, 0, 1, 2])):  # and some between a few of them only
        one, other = rng.sample(range(n), 2)
        where.append(f"a{one}.m = a{other}.{rng.choice('mmv')}")
    where += rng.sample(EXTRA, rng.choice([0, 0, 1]))
    sources = ", ".join(f"r{i} [RANGE {rng.choice([0, 20, 60, 60, 150, 400])} MS] AS a{i}" for i in range(n))
    return f"SELECT a0.ts AS t, a{n - 1}.s AS s, a1.v AS v FROM {sources} WHERE {' AND '.join(where)}"


def case(seed: int) -> Counter[str]:
    restless = Settings(weights=RESTLESS, heeding=(heeding.EAGER, heeding.RESTLESS)[seed % 2])
    rng = random.Random(seed)
    n = rng.choice([3, 3, 4, 4, 5])
    names = [f"r{i}" for i in range(n)]
    streams = {name: Stream(name, name, FIELDS, "ts", lateness_ms=rng.choice([0, 5, 30])) for name in names}
    query = parse_query("q", draw_text(rng, n), streams)
    plan = build_plan(query, random_tree(query, rng, flat=0.9))
    partitions, source_partitions = rng.choice([1, 2, 3, 4]), rng.choice([1, 2])
    values, sparse = (
        rng.choice([2, 3, 4, 6]),
        {name: rng.choice([0.6, 0.9]) for name in rng.sample(names, rng.choice([0, 1, 1, 2]))},
    )
    most, patience, burst = rng.choice([1, 3, 20]), rng.choice([0, 0.05, 0.3]), rng.choice([1, 5, 30])
    time, rows = 1_000, []
    for _ in range(rng.choice([12, 25]) * n):
        time += rng.choice([0, 1, 1, 2, 6])
        stream = rng.choice(names)
        if rng.random() < sparse.get(stream, 0):
            continue
        null = rng.choice(["k", "m", "s", "v"]) if rng.random() < 0.03 else None
        row = {
            "k": rng.randrange(values),
            "m": rng.randrange(values),
            "s": "x" * rng.randrange(values),
            "v": rng.randrange(4),
            "ts": time - rng.choice([0, 0, 0, 3, 10]),
        }
        rows.append((stream, rng.randrange(source_partitions), {**row, **({null: None} if null else {})}))
    counts: Counter[str] = Counter(
        flat_inputs=sum(len(node.inputs) for node in plan.nodes if node.is_flat), mixed=len(plan.nodes) > 1
    )
    wanted = None
    for routing, feedback, heralds in MODES:
        choice = random.Random(f"{seed} interleaving")
        driver = TopologyDriver(
            plan,
            streams,
            partitions=partitions,
            source_partitions=source_partitions,
            settings=with_modes(restless, feedback, routing, heralds),
        )
        events = []
        for i, (stream, partition, row) in enumerate(rows):
            events.append(Event(stream, partition, driver.produce(stream, partition, row), row))
            if i % burst == 0:
                work(driver, choice, patience, most, to_the_end=False)
        work(driver, choice, patience, most, to_the_end=True)
        wanted = wanted if wanted is not None else truth(query, streams, events)
        where = f"seed {seed}: {tree_text(plan.tree)}, {routing}, feedback {feedback}, heralds {heralds}"
        counts["results"] += check_results(driver, wanted, where)
        for node in driver.nodes.values():
            for told in node.memo.heralds.each:
                counts.update(
                    {
                        f"heralds of {'M-Joins' if node.node.is_flat else 'joins'} refused": told.refused,
                        "made for heralds": told.made,
                    }
                )
            memo = node.memo.feedback
            assert not any(memo.tickets), f"{where}: a resume was never answered"
            if node.node.is_flat:
                if feedback != "auto" and not heralds:
                    counts[f"composites {routing}{' with feedback' if feedback else ''}"] += node.memo.counts.composites
                for one in (memo, node.memo.hiding):
                    names = ("values_suspended", "values_resumed", "rows_diverted", "pairs_avoided", "pairs_resumed")
                    counts.update({name: getattr(one, name, 0) for name in names})
                if feedback:
                    counts["asked"] += memo.values_suspended > 0 and memo.blocks_sent > 0
                    counts["changes of mind"] += sum(w.changes for w in memo.weighed or ())
    return counts


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_results_are_the_oracles(first: int) -> None:
    for seed in range(first, first + CHUNK):
        done.update(case(seed))
        done["seeds"] += 1


def test_it_happened_often_and_feedback_saves(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "M-Joins", done)
    if done["seeds"] == SEEDS:
        assert done["flat_inputs"] > 2 * SEEDS
        assert done["mixed"] > SEEDS / 8
        assert min(done[what] for what in ("values_suspended", "values_resumed", "rows_diverted")) > 2_000
        assert done["pairs_avoided"] > 500
        assert min(done[what] for what in ("heralds of M-Joins refused", "made for heralds")) > 200
        assert (
            min(done[what] for what in ("pairs_resumed", "asked")) > 100
        )  # made later for a consumer; and told to a producer
        for routing in ("fixed", "eddy"):
            assert done[f"composites {routing} with feedback"] < done[f"composites {routing}"]
