"""Plans: the tree's text, what each node joins on and carries, and every refusal.

`tests/plans/describe.txt` holds cases of `query, tree ---- description`; `pytest --rewrite` renews what stands behind
the dashes.
"""

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import PlanError
from schemas.mesh import FieldType, Stream
from topology.plan.plan import Plan, Tree, build_plan, describe, duration_text, parse_tree, tree_aliases, tree_text
from topology.plan.planner import Statistics
from topology.query.cql import parse_query
from topology.query.expression import Column, columns_of
from topology.query.query import Query

FIELDS = {"id": "int64", "x": "int64", "y": "int64", "v": "float64", "s": "string", "ts": "timestamp"}
STREAMS = {
    name: Stream(name, name, {field: FieldType(kind) for field, kind in FIELDS.items()}, "ts")
    for name in ("orders", "payments", "shipments", *"abcdefghij")
}
GOLDEN = Path(__file__).parents[1] / "plans" / "describe.txt"


def query(where: str, select: str = "a.v", sources: str = "a b c") -> Query:
    listed = ", ".join(f"{name} [RANGE 10 MINUTES]" for name in sources.split())
    return parse_query("q", f"SELECT {select} FROM {listed} WHERE {where}", STREAMS)


CHAIN = query("a.x = b.x AND b.y = c.y")


def names(columns: tuple[Column, ...]) -> str:
    return " ".join(map(str, columns))


def test_tree_text_and_back() -> None:
    four = query("a.x = b.x AND b.x = c.x AND c.x = d.x", sources="a b c d")
    for text in (
        "(((a b) c) d)",
        "((a b) (c d))",
        "(a (b (c d)))",
        "((d a) (c b))",
        "(a b c d)",
        "((a b c) d)",
        "(d (b c) a)",
    ):
        assert tree_text(parse_tree(text, four)) == text
    assert parse_tree(" ( (a,b)\n c)", CHAIN) == (("a", "b"), "c")


def test_trees_may_name_streams() -> None:
    text = (
        "SELECT o.v FROM orders [RANGE 1 DAY] AS o, payments [RANGE 1 DAY] AS p, orders [RANGE 1 DAY] AS o2 WHERE o.x ="
        " p.x AND p.x = o2.x"
    )
    named = parse_query("q", text, STREAMS)
    assert parse_tree("((o payments) o2)", named) == (("o", "p"), "o2")
    with pytest.raises(PlanError) as caught:
        parse_tree("((orders payments) o2)", named)
    assert (
        str(caught.value)
        == "plan of q: `((orders payments) o2)` names stream orders, which stands in FROM as o and o2; use those names"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`` is empty; write for example ((a b) c)"),
        ("a", "`a` joins nothing; write for example ((a b) c)"),
        ("((a b) c", "`((a b) c` ends too early: a `)` or a name is missing; write for example ((a b) c)"),
        (
            "(a c b)",
            (
                "`(a c b)` joins 3 inputs in one node, but no column of each equals one of every other, so their rows"
                " would not meet in one partition; write ((a b) c) instead"
            ),
        ),
        ("((a) c)", "`((a) c)` has a `)` where a name was expected; write for example ((a b) c)"),
        ("((a b) ", "`((a b) ` ends too early: a `)` or a name is missing; write for example ((a b) c)"),
        ("((a b) c) d", "`((a b) c) d` goes on with `d` behind its end; write for example ((a b) c)"),
        ("((a b) zz)", "`((a b) zz)` names `zz`, which is no source of the query; use one of `a`, `b`, `c`"),
        ("(a b)", "`(a b)` leaves out c; each source must be joined once"),
        ("((a b) b)", "`((a b) b)` names b twice; each source is joined once"),
        ("((a c) b)", "`(a c)` joins {a} with {c}, but no equality links them (a cross product); order it otherwise"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        build_plan(CHAIN, parse_tree(text, CHAIN))
    assert str(caught.value) == f"plan of q: {message}"


def test_nodes_keys_and_columns_of_a_chain() -> None:
    asked = query("a.x = b.x AND b.y = c.y AND a.v < c.v AND b.v > 1 AND a.id + b.id > 3", "a.s, c.id AS cid")
    plan = build_plan(asked, (("a", "b"), "c"))
    j1, j2 = plan.nodes
    assert (j1.id, j2.id, plan.root) == ("j1", "j2", j2)
    assert (j1.target, j1.target_side, j2.target, j2.target_side) == ("j2", 0, "out", 0)
    assert (names(j1.left.key), names(j1.right.key)) == ("a.x", "b.x")
    assert (names(j2.left.key), names(j2.right.key)) == ("b.y", "c.y")
    # a.x is the key of j1 only; a.id is for the residual of j1; a.v for that of j2; a.s for the output.
    assert names(j1.left.columns) == "a.id a.s a.v a.x"
    assert names(j1.right.columns) == "b.id b.x b.y"
    assert names(j1.columns) == "a.s a.v b.y" == names(j2.left.columns)
    assert names(j2.right.columns) == "c.id c.v c.y"
    assert names(j2.columns) == "a.s c.id"
    assert [len(n.residuals) for n in plan.nodes] == [1, 1]
    assert [(r.alias, r.node, r.side, names(r.non_null)) for r in plan.routes] == [
        ("a", "j1", 0, "a.x"),
        ("b", "j1", 1, "b.x b.y"),
        ("c", "j2", 1, "c.y"),
    ]
    assert [len(r.selection) for r in plan.routes] == [0, 1, 0]
    assert (j1.left.is_source, j2.left.is_source, j2.left.name, j2.left.aliases) == (True, False, "j1", ("a", "b"))


def test_bushy_plans_and_several_keys() -> None:
    asked = query("a.x = b.x AND a.y = b.y AND c.x = d.x AND b.x = c.x AND a.s = d.s", "b.id", "a b c d")
    plan = build_plan(asked, (("b", "a"), ("c", "d")))
    assert [(n.id, names(n.left.key), names(n.right.key), n.target, n.target_side) for n in plan.nodes] == [
        ("j1", "b.x b.y", "a.x a.y", "j3", 0),
        ("j2", "c.x", "d.x", "j3", 1),
        ("j3", "a.s a.x", "d.s c.x", "out", 0),
    ]
    assert plan.root.aliases == ("a", "b", "c", "d")
    assert plan.nodes[0].aliases == ("a", "b")
    assert names(plan.root.columns) == "b.id"


def all_trees(asked: Query, aliases: tuple[str, ...]) -> Iterator[Tree]:
    if len(aliases) == 1:
        yield aliases[0]
    for size in range(1, len(aliases)):
        for left in combinations(aliases, size):
            right = tuple(a for a in aliases if a not in left)
            for one, other in product(all_trees(asked, left), all_trees(asked, right)):
                yield (one, other)
                if not isinstance(other, str):
                    yield (one, *other)  # an M-Join


QUERIES = [
    query("a.x = b.x AND b.y = c.y AND c.id = d.id AND a.v < d.v", "a.s, d.v", "a b c d"),
    query("a.x = b.x AND a.y = c.y AND a.id = d.id AND b.v + c.v > d.v AND (b.s = 'x' OR c.s = 'y')", "b.s", "a b c d"),
    query("a.x = b.x AND b.y = c.y AND c.id = d.id AND d.x = a.y AND a.x = c.x", "*", "a b c d"),
    query("a.x = b.x AND b.x = c.x AND c.x = d.x AND a.y = c.y AND c.y = d.id AND a.v < d.v", "b.s", "a b c d"),
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_plan_keeps_the_invariants(data: st.DataObject) -> None:
    asked = data.draw(st.sampled_from(QUERIES))
    tree = data.draw(st.sampled_from(list(all_trees(asked, asked.aliases))))
    if linked(asked, tree):
        check(build_plan(asked, tree))
    else:
        with pytest.raises(PlanError, match=r"cross product|inputs in one node"):
            build_plan(asked, tree)


def linked(asked: Query, tree: Tree) -> bool:
    if isinstance(tree, str):
        return True
    sides = [set(tree_aliases(side)) for side in tree]
    meets = any(all({c.alias for c in members} & side for side in sides) for members in asked.equal)
    return meets and all(linked(asked, side) for side in tree)


def check(plan: Plan) -> None:
    """What any plan must satisfy, told without the builder's own way of thinking."""
    asked = plan.query
    assert [node.id for node in plan.nodes] == [f"j{i}" for i in range(1, len(plan.nodes) + 1)]
    assert sum(len(node.inputs) - 1 for node in plan.nodes) == len(asked.sources) - 1
    assert sorted(map(str, (r for n in plan.nodes for r in n.residuals))) == sorted(map(str, asked.residuals))
    met = [
        members
        for node in plan.nodes
        for members in (*zip(*(side.key for side in node.inputs), strict=True), *node.equal)
    ]
    joined = {frozenset(pair) for members in met for pair in combinations(members, 2)}
    for members in asked.equal:  # the keys of all nodes together imply every class
        reached = {members[0]}
        inner = [(a, b) for a, b in combinations(members, 2) if frozenset((a, b)) in joined or a.alias == b.alias]
        for _ in members:
            reached |= {column for pair in inner if reached & set(pair) for column in pair}
        assert reached == set(members)
    for node in plan.nodes:
        assert {len(side.key) for side in node.inputs} == {len(node.left.key)} != {0}
        assert not node.equal or node.is_flat
        for side in node.inputs:
            own = {
                c
                for c in (*node.columns, *(c for r in node.residuals for c in columns_of(r)))
                if c.alias in side.aliases
            }
            assert set(side.columns) == own | set(side.key) | set(side.linked)
            assert set(side.linked) == {c for members in node.equal for c in members if c.alias in side.aliases}
            assert list(side.columns) == sorted(side.columns)
            if not side.is_source:
                feeder = plan.node(side.name)
                assert (feeder.columns, feeder.aliases, feeder.target) == (side.columns, side.aliases, node.id)
                assert node.inputs[feeder.target_side] is side
        for residual in node.residuals:
            used = {c.alias for c in columns_of(residual)}
            assert used <= set(node.aliases)
            assert not any(used <= set(side.aliases) for side in node.inputs)
    assert set(plan.root.columns) == {c for o in asked.outputs for c in columns_of(o.expression)}
    for route in plan.routes:
        edge = plan.node(route.node).inputs[route.side]
        assert (edge.name, edge.key, edge.columns) == (route.alias, route.key, route.columns)
    assert parse_tree(tree_text(plan.tree), asked) == plan.tree
    assert sorted(tree_aliases(plan.tree)) == sorted(asked.aliases)


def test_durations() -> None:
    assert [duration_text(ms) for ms in (1, 61_000, 7_200_000, 172_800_000)] == ["1 ms", "61 s", "2 h", "2 d"]


def test_descriptions(request: pytest.FixtureRequest) -> None:
    renewed = []
    for case in GOLDEN.read_text(encoding="utf-8").split("\n====\n"):
        asked = case.split("\n----", 1)[0]
        *lines, tree = asked.split("\n")
        statistics = (
            Statistics({"orders": 100, "payments": 90, "shipments": 50}) if tree.endswith(" with statistics") else None
        )
        parsed = parse_query("paid", "\n".join(lines), STREAMS)
        plan = build_plan(parsed, parse_tree(tree.removesuffix(" with statistics"), parsed))
        renewed.append(f"{asked}\n----\n{describe(plan, 'shop', statistics)}")
    text = "\n====\n".join(renewed)
    if request.config.getoption("--rewrite", default=False):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
