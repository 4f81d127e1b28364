"""What an M-Join costs beside a tree of two-way joins: time of all steps of one partition, without a broker, for each
routing, with feedback and without.

Three streams of equal rate and a rare fourth, all joined on one column. The results of all runs must be the same in
number.

    python -m tests.benchmarks.mjoin
"""

import argparse
import random
import time

from schemas.block import decode_block
from schemas.mesh import FieldType, Routing, Stream
from topology.plan.plan import Tree, build_plan, tree_text
from topology.query.cql import parse_query
from topology.testing.driver import TopologyDriver

FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "ts": FieldType.TIMESTAMP}
STREAMS = {name: Stream(name, name, FIELDS, "ts", lateness_ms=100) for name in "abcd"}
WINDOW_S, BATCH = 10, 500
TEXT = (
    f"SELECT a.k, d.m AS m FROM {', '.join(f'{name} [RANGE {WINDOW_S} SECONDS]' for name in 'abcd')} "
    "WHERE a.k = b.k AND b.k = c.k AND c.k = d.k AND a.m = c.m"
)
FLAT: Tree = ("a", "b", "c", "d")
RUNS: tuple[tuple[Tree, Routing, bool], ...] = (
    (((("a", "b"), "c"), "d"), "fixed", False),
    (FLAT, "fixed", False),
    (FLAT, "fixed", True),
    (FLAT, "eddy", False),
    (FLAT, "eddy", True),
)


def measure(
    tree: Tree, routing: Routing, feedback: bool, events: int, keys: int, rare: float
) -> tuple[float, int, int, int]:
    """Seconds in steps, results, composites, and bytes of tables written."""
    rng = random.Random(1)
    driver = TopologyDriver(
        build_plan(parse_query("q", TEXT, STREAMS), tree),
        STREAMS,
        partitions=1,
        source_partitions=1,
        feedback=feedback,
        routing=routing,
    )
    seconds, written = 0.0, 0
    for i in range(events):
        for name in "abcd":
            row = {"k": rng.randrange(keys), "m": rng.randrange(4), "ts": 1_000 + i}
            if name != "d" or rng.random() < rare:
                driver.produce(name, 0, row)
        if i % BATCH and i < events - 1:
            continue
        for actor in driver.ready():
            driver.advance(actor, BATCH)
        for key, node in driver.nodes.items():  # in post-order: a node's output is worked off with it
            log = driver.inputs[key]
            for offset in range(log.read, len(log.records)):
                block = decode_block(log.records[offset])
                begun = time.process_time()
                effects = node.step(offset, block)
                seconds += time.process_time() - begun
                written += sum(len(record) for record in effects.tables.values() if record is not None)
                driver._deliver(effects.sends)
            log.read = len(log.records)
    made = sum(
        node.memo.counts.composites if node.node.is_flat else node.memo.counts.rows_out
        for node in driver.nodes.values()
    )
    results = driver.nodes[driver.plan.root.id, 0].memo.counts.rows_out
    return seconds, results, made if tree == FLAT else made - results, written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.mjoin", description=__doc__)
    parser.add_argument("--events", type=int, default=15_000, help="of each full stream (default: %(default)s)")
    args = parser.parse_args()
    for keys, rare in ((3_000, 0.02), (600, 0.005)):
        print(f"{keys} keys, {rare:.1%} of the fourth stream")
        found = set()
        for tree, routing, feedback in RUNS:
            seconds, results, made, written = measure(tree, routing, feedback, args.events, keys, rare)
            found.add(results)
            words = f"{tree_text(tree)} {routing if tree == FLAT else ''}{', feedback' if feedback else ''}"
            print(
                f"  {words:26} {seconds:5.2f} s  results {results:,}  composites {made:,}  tables written"
                f" {written / 1e6:.1f} MB"
            )
        if len(found) > 1:
            raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
