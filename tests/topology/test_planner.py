"""The planner: the default order, the cost model on cases worked by hand, and that dynamic programming finds the best
tree.

`tests/plans/order_joins.txt` and `tests/plans/infer.txt` hold cases as `what is given ---- what comes out`.
"""

import random
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from schemas.mesh import FieldType, Stream
from topology.plan.plan import Tree, build_plan, tree_aliases, tree_text
from topology.plan.planner import Statistics, choose_tree
from topology.plan.planner.cost import HELD_ROW_COST, estimate
from topology.query.cql import parse_query
from topology.query.expression import to_text
from topology.query.query import Query

FIELDS = {"id": "int64", "x": "int64", "y": "int64", "z": "int64", "v": "float64", "ts": "timestamp"}
STREAMS = {name: Stream(name, name, {f: FieldType(k) for f, k in FIELDS.items()}, "ts") for name in "abcdefghij"}
PLANS = Path(__file__).parents[1] / "plans"


def query(where: str, sources: str) -> Query:
    """`sources`: names with windows in seconds, such as "a:10 b:60"."""
    listed = ", ".join("{} [RANGE {} SECONDS]".format(*part.split(":")) for part in sources.split())
    return parse_query("q", f"SELECT {sources[0]}.v FROM {listed} WHERE {where}", STREAMS)


def close(number: float) -> object:
    return pytest.approx(number, rel=1e-9)


def test_estimate_of_one_source_and_of_a_pair() -> None:
    asked = query("a.x = b.x", "a:10 b:60")
    known = Statistics({"a": 100, "b": 50}, {"a.x": 500, "b.x": 1_000})
    one = estimate(asked, ["a"], known)
    assert (one.rows_per_s, one.rows_held) == (100, 1_000)
    # Each a meets the 3,000 b's that are valid, each b the 1,000 a's; one in 1,000 pairs has the same key.
    both = estimate(asked, ["a", "b"], known)
    assert both.rows_per_s == close((100 * 3_000 + 50 * 1_000) / 1_000)
    assert both.rows_held == close(1_000 * 3_000 / 1_000)
    assert both.cost == close(350 + HELD_ROW_COST * 3_000)


def test_estimate_counts_selections_residuals_and_transitive_classes() -> None:
    known = Statistics({"a": 90, "b": 90, "c": 90}, {f"{s}.x": 100 for s in "abc"})
    plain = estimate(query("a.x = b.x AND b.x = c.x", "a:1 b:1 c:1"), "abc", known)
    assert plain.rows_held == close(90**3 / 100**2)
    filtered = estimate(query("a.x = b.x AND b.x = c.x AND a.v > 1 AND b.v < c.v", "a:1 b:1 c:1"), "abc", known)
    assert filtered.rows_held == close(30 * 90 * 90 / 100**2 / 3)
    # A constant pins the class: what is left of each source matches all of the others.
    pinned = estimate(query("a.x = b.x AND b.x = c.x AND a.x = 5", "a:1 b:1 c:1"), "abc", known)
    assert pinned.rows_held == close(0.9**3)


def test_a_window_of_zero_still_joins() -> None:
    known = Statistics({"a": 1_000, "b": 1_000}, {"a.x": 1, "b.x": 1})
    assert estimate(query("a.x = b.x", "a:0 b:0"), "ab", known).rows_held == close(1)


def test_unknown_statistics_are_guessed() -> None:
    known = Statistics({"a": 10, "b": 30})
    assert known.rate("zzz") == 20
    assert Statistics().rate("zzz") == 1_000
    assert known.distinct_values("a", "x", 60_000) == 600
    assert known.distinct_values("a", "x", 0) == 1


@pytest.mark.parametrize(
    ("rates", "distinct", "message"),
    [
        ({"a": -1.0}, {}, "the rate of a is -1.0"),
        ({}, {"a.x": 0.0}, "a.x has 0.0 distinct values"),
        ({"a": float("nan")}, {}, "the rate of a is nan"),
    ],
)
def test_nonsense_is_refused(rates: dict[str, float], distinct: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Statistics(rates, distinct)


def all_trees(aliases: tuple[str, ...]) -> Iterator[Tree]:
    if len(aliases) == 1:
        yield aliases[0]
    for size in range(1, len(aliases)):
        for left in combinations(aliases, size):
            if aliases[0] in left:
                right = tuple(a for a in aliases if a not in left)
                yield from ((one, other) for one in all_trees(left) for other in all_trees(right))


def linked(asked: Query, tree: Tree) -> bool:
    if isinstance(tree, str):
        return True
    left, right = (set(tree_aliases(side)) for side in tree)
    meets = any({c.alias for c in members} & left and {c.alias for c in members} & right for members in asked.equal)
    return meets and all(linked(asked, side) for side in tree)


def cost(asked: Query, tree: Tree, known: Statistics) -> float:
    if isinstance(tree, str):
        return 0.0
    inner = [side for side in tree if not isinstance(side, str)]
    return sum(estimate(asked, tree_aliases(side), known).cost + cost(asked, side, known) for side in inner)


SHAPES = [
    "a.x = b.x AND b.y = c.y AND c.z = d.z AND d.id = e.id",
    "a.x = b.x AND a.y = c.y AND a.z = d.z AND a.id = e.id",
    "a.x = b.x AND b.y = c.y AND c.z = d.z AND d.id = e.id AND e.x = a.y",
    "a.x = b.x AND b.x = c.x AND c.x = d.x AND d.x = e.x AND a.v < e.v",
]


@pytest.mark.parametrize("where", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_the_tree_chosen_is_the_cheapest_of_all(where: str, seed: int) -> None:
    draw = random.Random(seed)
    asked = query(where, " ".join(f"{s}:{draw.choice([0, 1, 60, 3600])}" for s in "abcde"))
    known = Statistics(
        {s: draw.choice([1, 50, 2_000]) for s in "abcde"},
        {f"{s}.{f}": draw.choice([2, 300, 40_000]) for s in "abcde" for f in FIELDS},
    )
    chosen = choose_tree(asked, known)
    build_plan(asked, chosen)
    best = min(cost(asked, tree, known) for tree in all_trees(asked.aliases) if linked(asked, tree))
    assert cost(asked, chosen, known) == pytest.approx(best, rel=1e-8)


def test_ten_sources_are_planned() -> None:
    letters = "abcdefghij"
    star = query(" AND ".join(f"a.x = {s}.x" for s in letters[1:]), " ".join(f"{s}:10" for s in letters))
    same = Statistics(dict.fromkeys(letters, 10), {f"{s}.x": 100 for s in letters})
    assert len(build_plan(star, choose_tree(star, same)).nodes) == 9
    assert tree_aliases(choose_tree(star, same)) == tree_aliases(choose_tree(star)) == tuple(letters)


def golden(name: str) -> list[tuple[str, str]]:
    cases = (PLANS / name).read_text(encoding="utf-8").strip("\n").split("\n\n")
    return [tuple(case.split("\n----\n")) for case in cases]  # type: ignore[misc]


@pytest.mark.parametrize(("given", "expected"), golden("order_joins.txt"))
def test_order_joins(given: str, expected: str) -> None:
    """`sources | where | rates | distinct`; without rates there are no statistics."""
    lines = [line for line in given.split("\n") if not line.startswith("#")]
    parts = dict(line.split(" ", 1) for line in lines)
    known = None
    if "rates" in parts or "distinct" in parts:
        read = [
            {k: float(v) for k, v in (w.split("=") for w in parts.get(p, "").split())} for p in ("rates", "distinct")
        ]
        known = Statistics(*read)
    assert tree_text(choose_tree(query(parts["where"], parts["from"]), known)) == expected


@pytest.mark.parametrize(("given", "expected"), golden("infer.txt"))
def test_infer(given: str, expected: str) -> None:
    where = "\n".join(line for line in given.split("\n") if not line.startswith("#"))
    asked = query(where, "a:1 b:1 c:1")
    lines = ["join   " + " = ".join(map(str, members)) for members in asked.equal]
    lines += [f"select {to_text(c)}" for conditions in asked.selections.values() for c in conditions]
    lines += [f"also   {to_text(c)}" for c in asked.residuals]
    assert "\n".join(lines) == expected
