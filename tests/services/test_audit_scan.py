"""The audit's own reading of a query: sources, windows, outputs, and the text handed to Spark SQL. Tables, no Spark."""

import pytest

from schemas.errors import QueryError
from schemas.mesh import Mesh, parse_mesh
from services.audit.scan import scan


def mesh(query: str) -> Mesh:
    head = """
mesh: m
kafka: {bootstrap: "localhost:1"}
streams:
  a: {event_time: ts, fields: {ts: timestamp, k: int64, x: float64, name: string}}
  b: {event_time: ts, fields: {ts: timestamp, k: int64, y: int64, "left": int64}}
  c: {event_time: at, fields: {at: int64, y: int64, z: bool}}
  t: {table: k, fields: {k: int64, label: string}}
queries:
  q: |
"""
    return parse_mesh(head + "\n".join("    " + line for line in query.splitlines()))


def outputs(text: str) -> list[str]:
    return [name for name, _ in scan(mesh(text), "q").outputs]


@pytest.mark.parametrize(
    ("source", "alias", "window_ms"),
    [
        ("a [RANGE 10 MINUTES] AS o", "o", 600_000),
        ("a [range 1.5 hour] o", "o", 5_400_000),
        ("a[RANGE 250ms]", "a", 250),
        ("a [RANGE 0 s] AS o", "o", 0),
        ("a AS o [RANGE 2 DAYS]", "o", 172_800_000),
        ('"a" [ RANGE 1 m ] AS "o"', "o", 60_000),
        ("a /* , b */ [RANGE 1 S] -- as x\n o", "o", 1000),
    ],
)
def test_sources(source: str, alias: str, window_ms: int) -> None:
    found = scan(mesh(f"SELECT b.y FROM {source}, b [RANGE 3 s] b WHERE {alias}.k = b.k"), "q").sources
    assert [(s.alias, s.stream, s.window_ms) for s in found] == [(alias, "a", window_ms), ("b", "b", 3000)]


AB = "FROM a [RANGE 1 s] AS a, b [RANGE 1 s] AS b WHERE a.k = b.k"


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("*", ["a_ts", "a_k", "x", "name", "b_ts", "b_k", "y", "left"]),
        ("b.*, a.x", ["b_ts", "b_k", "y", "left", "x"]),
        ("a.x, y, b.y AS z", ["x", "y", "z"]),
        ("a.x * 2 AS double, b.y + 1 more, 'FROM, x' AS text", ["double", "more", "text"]),
        ('a.x AS "two words"', ["two words"]),
        ("coalesce(a.x, b.y) AS c, (a.k = b.k AND b.y IS NULL) t", ["c", "t"]),
    ],
)
def test_output_names(select: str, names: list[str]) -> None:
    assert outputs(f"SELECT {select} {AB}") == names


@pytest.mark.parametrize(
    ("written", "spark"),
    [
        ("a.name = 'it''s \\ [x]'", r"`a`.`name` = 'it\'s \\ [x]'"),
        ("a.x > 1.5", "`a`.`x` > 1.5D"),
        ("b.y < 10", "`b`.`y` < 10L"),
        ("b.y > -9223372036854775808", "`b`.`y` > - 9223372036854775808L"),
        ('"a"."name" LIKE \'a\\_%\'', r"`a`.`name` LIKE 'a\\_%'"),
        ("name = 'x'", "`name` = 'x'"),
        ("b.left IN (1, 2e3)", "`b`.`left` IN ( 1L , 2e3D )"),
        ("ABS(y) > 1", "ABS ( `y` ) > 1L"),
    ],
)
def test_conditions_are_only_respelled(written: str, spark: str) -> None:
    assert scan(mesh(f"SELECT a.x {AB} AND {written};"), "q").conditions == (f"`a`.`k` = `b`.`k` AND {spark}",)


def test_join_syntax_and_order() -> None:
    text = (
        "SELECT z FROM a [RANGE 1 s] JOIN c [RANGE 2 s] AS c ON (z AND a.x > c.at) INNER JOIN b [RANGE 3 s] ON ((a.k ="
        " b.k AND b.y = c.y)) WHERE a.x BETWEEN 1 AND 2"
    )
    found = scan(mesh(text), "q")
    assert [s.alias for s in found.sources] == ["a", "c", "b"]
    assert [s.alias for s in found.join_order] == ["a", "b", "c"]  # never a cross product of a and c
    assert len(found.conditions) == 3
    assert found.links == (("a", "b"), ("b", "c"))


def test_a_table_has_no_window() -> None:
    scanned = scan(mesh("SELECT a.x, label FROM t AS u, a [RANGE 1 s] WHERE a.k = u.k"), "q")
    assert [(s.alias, s.stream, s.window_ms) for s in scanned.sources] == [("u", "t", None), ("a", "a", 1000)]
    assert scanned.links == (("a", "u"),)


def test_an_equality_under_or_is_no_link() -> None:
    assert scan(mesh(f"SELECT a.x {AB.split(' WHERE')[0]} WHERE a.k = b.k OR a.x = b.y"), "q").links == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SELECT a.x FROM a, b [RANGE 1 s]", "line 1, column 17: each source is written"),
        ("SELECT a.x FROM nope [RANGE 1 s]", "no stream `nope`"),
        (
            "SELECT a.x FROM a [RANGE 1 s], t [RANGE 1 s] WHERE a.k = t.k",
            "line 1, column 32: each source is written: stream [RANGE n unit] AS alias, a table without the window",
        ),
        ("SELECT a.x\nFROM a [ROWS 5]", "line 2, column 8: window [ROWS 5]"),
        ("SELECT a.x FROM a [RANGE 5 weeks]", "unknown unit"),
        ("SELECT a.x + 1 FROM a [RANGE 1 s]", "needs a name"),
        ("SELECT a.k, b.k " + AB, "two outputs are called `k`"),
        ("SELECT DISTINCT a.k " + AB, "DISTINCT"),
        ("SELECT a.x FROM a [RANGE 1 s] LEFT JOIN b [RANGE 1 s] ON a.k = b.k", "LEFT"),
        ("SELECT a.x FROM a [RANGE 1 s], b [RANGE 1 s] a", "alias stands twice"),
        ("UPDATE a", "starts with SELECT"),
        ("SELECT a.x", "FROM is missing"),
        ("SELECT a.x ? FROM a [RANGE 1 s]", "cannot read '?'"),
    ],
)
def test_errors_say_where_and_what(text: str, says: str) -> None:
    with pytest.raises(QueryError) as error:
        scan(mesh(text), "q")
    assert says in str(error.value)
