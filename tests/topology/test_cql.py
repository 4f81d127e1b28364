"""The query language: what is read, what is inferred, and every error with its place and its text."""

import re
from pathlib import Path

import pytest

from schemas.errors import QueryError
from schemas.mesh import FieldType, Stream
from topology.query.cql import parse_query
from topology.query.expression import Column, to_text
from topology.query.query import Query


def stream(name: str, **fields: str) -> Stream:
    return Stream(name, name, {field: FieldType(kind) for field, kind in fields.items()}, "ts")


STREAMS = {
    s.name: s
    for s in (
        stream(
            "orders", order_id="int64", user_id="int64", amount="float64", country="string", gift="bool", ts="timestamp"
        ),
        stream("payments", order_id="int64", amount="float64", method="string", ok="bool", ts="timestamp"),
        stream("shipments", order_id="int64", carrier="string", weight="float64", tracking="string", ts="timestamp"),
        Stream("users", "users", {"user_id": FieldType.INT64, "name": FieldType.STRING}, "", table="user_id"),
    )
}
FROM2 = "FROM orders [RANGE 10 MINUTES] AS o, payments [RANGE 10 MINUTES] AS p"
FROM3 = FROM2 + ", shipments [RANGE 1 HOUR] AS s"
ON2 = "o.order_id = p.order_id"
ON3 = ON2 + " AND o.order_id = s.order_id"


def parse(text: str) -> Query:
    return parse_query("q", text, STREAMS)


def where(condition: str, sources: str = FROM2, joined: str = ON2) -> Query:
    return parse(f"SELECT o.order_id {sources} WHERE {joined} AND {condition}")


def selections(query: Query) -> dict[str, list[str]]:
    return {alias: [to_text(c) for c in conditions] for alias, conditions in query.selections.items() if conditions}


def classes(query: Query) -> list[str]:
    return [" = ".join(map(str, members)) for members in query.equal]


def test_the_query_of_the_mesh_file() -> None:
    query = parse("""SELECT o.order_id, p.amount AS paid, s.carrier
        FROM orders [RANGE 10 MINUTES] AS o, payments [RANGE 10 MINUTES] AS p, shipments [RANGE 1 HOUR] AS s
        WHERE o.order_id = p.order_id AND o.order_id = s.order_id AND o.amount > 10""")
    assert [(s.alias, s.stream, s.window_ms) for s in query.sources] == [
        ("o", "orders", 600_000),
        ("p", "payments", 600_000),
        ("s", "shipments", 3_600_000),
    ]
    assert [(o.name, to_text(o.expression), o.type.value) for o in query.outputs] == [
        ("order_id", "o.order_id", "int64"),
        ("paid", "p.amount", "float64"),
        ("carrier", "s.carrier", "string"),
    ]
    assert classes(query) == ["o.order_id = p.order_id = s.order_id"]
    assert selections(query) == {"o": ["o.amount > 10"]}
    assert query.residuals == ()
    assert query.types[Column("o", "ts")] is FieldType.TIMESTAMP
    assert len(query.types) == 6 + 5 + 5


@pytest.mark.parametrize(
    ("window", "ms"),
    [
        ("[RANGE 10 MINUTES]", 600_000),
        ("[RANGE 1 MINUTE]", 60_000),
        ("[range 250 ms]", 250),
        ("[RANGE 250 Milliseconds]", 250),
        ("[RANGE 1 MILLISECOND]", 1),
        ("[Range 0 Seconds]", 0),
        ("[RANGE 1 second]", 1_000),
        ("[RANGE 1.5 HOURS]", 5_400_000),
        ("[RANGE .5 HOUR]", 1_800_000),
        ("[RANGE 2 days]", 172_800_000),
        ("[ RANGE\n1\nDAY ]", 86_400_000),
        ("[RANGE 10MINUTES]", 600_000),
        ("[RANGE 0.001 SECONDS]", 1),
        ("[RANGE 36500 DAYS]", 36_500 * 86_400_000),
    ],
)
@pytest.mark.parametrize("alias", ["AS o", "o"])
def test_windows(window: str, ms: int, alias: str) -> None:
    query = parse(
        f"SELECT o.order_id FROM orders {window} {alias}, payments [RANGE 1 DAY] WHERE o.order_id = payments.order_id"
    )
    assert [(s.alias, s.window_ms) for s in query.sources] == [("o", ms), ("payments", 86_400_000)]


@pytest.mark.parametrize(
    "text",
    [
        f"SELECT o.order_id {FROM3} WHERE {ON3} AND o.amount > 1",
        f"select o.order_id {FROM3} where (o.amount > 1 AND ({ON3}))",
        f"SELECT o.order_id {FROM3} WHERE s.order_id = p.order_id AND p.order_id = o.order_id AND TRUE "
        "AND o.amount > 1",
        (
            "SELECT o.order_id FROM orders [RANGE 10 MINUTES] o JOIN payments [RANGE 10 MINUTES] p ON o.order_id ="
            " p.order_id INNER JOIN shipments [RANGE 1 HOUR] AS s ON s.order_id = p.order_id WHERE o.amount > 1;"
        ),
        (
            'SELECT "o".`order_id` FROM orders [RANGE 10 MINUTES] AS "o" CROSS JOIN payments [RANGE 10 MINUTES] AS p,'
            " shipments [RANGE 1 HOUR] s -- a remark\n WHERE o.order_id = p.order_id AND s.order_id == o.order_id AND"
            " o.amount > 1"
        ),
    ],
)
def test_many_ways_to_say_one_thing(text: str) -> None:
    query = parse(text)
    assert query.aliases == ("o", "p", "s")
    assert classes(query) == ["o.order_id = p.order_id = s.order_id"]
    assert selections(query) == {"o": ["o.amount > 1"]}
    assert [o.name for o in query.outputs] == ["order_id"]


def test_sources_2_to_10_and_self_joins() -> None:
    for count in range(2, 11):
        sources = ", ".join(f"orders [RANGE {i + 1} SECONDS] AS o{i}" for i in range(count))
        chain = " AND ".join(f"o{i}.order_id = o{i + 1}.user_id" for i in range(count - 1))
        query = parse(f"SELECT o0.ts {'FROM ' + sources} WHERE {chain}")
        assert len(query.sources) == count
        assert classes(query) == [f"o{i}.order_id = o{i + 1}.user_id" for i in range(count - 1)]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("o.amount > 10", {"o": ["o.amount > 10"]}),
        ("o.amount >= 10 AND p.amount <> 2.5", {"o": ["o.amount >= 10"], "p": ["p.amount <> 2.5"]}),
        ("o.country IN ('DE', 'FR')", {"o": ["o.country = 'DE' OR o.country = 'FR'"]}),
        ("o.country IN ('DE')", {"o": ["o.country = 'DE'"]}),
        ("o.country NOT IN ('DE', 'FR')", {"o": ["NOT (o.country = 'DE' OR o.country = 'FR')"]}),
        ("o.amount BETWEEN 1 AND -2", {"o": ["o.amount >= 1 AND o.amount <= -2"]}),
        ("o.amount NOT BETWEEN 1 AND 2", {"o": ["NOT (o.amount >= 1 AND o.amount <= 2)"]}),
        ("o.country LIKE 'D%'", {"o": ["o.country LIKE 'D%'"]}),
        (r"o.country NOT LIKE '50\%\_\\'", {"o": [r"NOT o.country LIKE '50\%\_\\'"]}),
        ("o.country IS NULL", {"o": ["o.country IS NULL"]}),
        ("o.country IS NOT NULL", {"o": ["o.country IS NOT NULL"]}),
        ("o.gift", {"o": ["o.gift"]}),
        ("NOT o.gift", {"o": ["NOT o.gift"]}),
        ("gift = TRUE AND ok <> FALSE", {"o": ["o.gift = TRUE"], "p": ["p.ok <> FALSE"]}),
        (
            "(o.amount > 1 OR o.gift) AND NOT (p.ok OR p.amount < 2)",
            {"o": ["o.amount > 1 OR o.gift"], "p": ["NOT (p.ok OR p.amount < 2)"]},
        ),
        ("o.ts > 1700000000000", {"o": ["o.ts > 1700000000000"]}),
        ("o.ts - 1000 < o.ts", {"o": ["o.ts - 1000 < o.ts"]}),
        ("o.amount = o.user_id + 0.5", {"o": ["o.amount = o.user_id + 0.5"]}),
        ("o.user_id > o.amount", {"o": ["o.user_id > o.amount"]}),
        ("o.order_id = o.order_id", {"o": ["o.order_id = o.order_id"]}),
        ("o.user_id = -9223372036854775808", {"o": ["o.user_id = -9223372036854775808"]}),
        ("o.country = 'it''s'", {"o": ["o.country = 'it''s'"]}),
        ("o.country = 'a\\n'", {"o": ["o.country = 'a\\n'"]}),
        ("TRUE", {}),
        ("FALSE", {"o": ["FALSE"]}),
        ("1 > 2", {"o": ["1 > 2"]}),
    ],
)
def test_selections(condition: str, expected: dict[str, list[str]]) -> None:
    query = where(condition)
    assert selections(query) == expected
    assert query.residuals == ()


@pytest.mark.parametrize(
    ("condition", "residuals"),
    [
        ("o.amount < p.amount", ["o.amount < p.amount"]),
        ("(o.amount > 5 OR p.method IN ('a', 'b'))", ["o.amount > 5 OR p.method = 'a' OR p.method = 'b'"]),
        ("NOT (o.amount = p.amount)", ["NOT o.amount = p.amount"]),
        ("o.ts <= p.ts AND p.ts - o.ts < 500", ["o.ts <= p.ts", "p.ts - o.ts < 500"]),
        ("(o.user_id = p.order_id OR o.gift)", ["o.user_id = p.order_id OR o.gift"]),
        ("o.user_id + 1 = p.order_id", ["o.user_id + 1 = p.order_id"]),
        ("o.country || 'x' = p.method", ["o.country || 'x' = p.method"]),
        ("o.gift <> p.ok", ["o.gift <> p.ok"]),
    ],
)
def test_residuals(condition: str, residuals: list[str]) -> None:
    query = where(condition)
    assert [to_text(r) for r in query.residuals] == residuals
    assert classes(query) == ["o.order_id = p.order_id"]
    assert selections(query) == {}


@pytest.mark.parametrize(
    ("joined", "equal", "selected"),
    [
        ("o.order_id = p.order_id AND o.amount = p.amount", ["o.amount = p.amount", "o.order_id = p.order_id"], {}),
        (
            "o.order_id = p.order_id AND o.user_id = p.order_id",
            ["o.order_id = o.user_id = p.order_id"],
            {"o": ["o.order_id = o.user_id"]},
        ),
        (
            "o.user_id = o.order_id AND o.user_id = p.order_id",
            ["o.order_id = o.user_id = p.order_id"],
            {"o": ["o.user_id = o.order_id"]},
        ),
        (ON2 + " AND o.order_id = 5", ["o.order_id = p.order_id"], {"o": ["o.order_id = 5"], "p": ["p.order_id = 5"]}),
        (ON2 + " AND 5 = p.order_id", ["o.order_id = p.order_id"], {"o": ["o.order_id = 5"], "p": ["5 = p.order_id"]}),
        ("o.gift = p.ok", ["o.gift = p.ok"], {}),
        ("o.ts = p.ts AND o.country = p.method", ["o.country = p.method", "o.ts = p.ts"], {}),
    ],
)
def test_equalities_and_what_follows_from_them(joined: str, equal: list[str], selected: dict[str, list[str]]) -> None:
    query = parse(f"SELECT p.method {FROM2} WHERE {joined}")
    assert classes(query) == equal
    assert selections(query) == selected
    assert query.residuals == ()


def test_a_table_has_no_window_and_no_end() -> None:
    query = parse(
        "SELECT o.order_id, u.name FROM orders [RANGE 1 HOUR] AS o, users AS u WHERE o.user_id = u.user_id AND u.name"
        " LIKE 'A%'"
    )
    assert [(s.alias, s.is_table, s.window_ms) for s in query.sources] == [
        ("o", False, 3_600_000),
        ("u", True, 1 << 60),
    ]
    assert selections(query) == {"u": ["u.name LIKE 'A%'"]}
    assert query.is_static(["u"])
    assert not query.is_static(["o", "u"])


def test_a_class_within_one_source_joins_nothing() -> None:
    query = where("s.carrier = s.tracking", FROM3, ON3)
    assert classes(query) == ["o.order_id = p.order_id = s.order_id"]
    assert selections(query) == {"s": ["s.carrier = s.tracking"]}


@pytest.mark.parametrize(
    ("select", "outputs"),
    [
        ("o.order_id, p.amount AS paid", "order_id:int64 paid:float64"),
        ("country, method", "country:string method:string"),
        (
            "o.amount + 1 AS a, o.user_id * 2 b, o.user_id / 2 AS c, o.user_id % 2 AS d",
            "a:float64 b:int64 c:float64 d:int64",
        ),
        ("-o.user_id AS a, ABS(o.amount) AS b, (o.user_id - 1) AS c", "a:int64 b:float64 c:int64"),
        ("COALESCE(o.amount, 0) AS a, coalesce(o.country, p.method, 'none') AS b", "a:float64 b:string"),
        (
            "o.country || '-' || p.method AS a, 7 AS b, 'x' AS c, 1.5 AS d, TRUE AS e",
            "a:string b:int64 c:string d:float64 e:bool",
        ),
        ("o.ts, o.ts + 5 AS later, p.ts - o.ts AS gap", "ts:timestamp later:timestamp gap:int64"),
        ("o.amount > 10 AS big", "big:bool"),
        ("p.*", "p_order_id:int64 p_amount:float64 method:string ok:bool p_ts:timestamp"),
        (
            "*",
            (
                "o_order_id:int64 user_id:int64 o_amount:float64 country:string gift:bool o_ts:timestamp"
                " p_order_id:int64 p_amount:float64 method:string ok:bool p_ts:timestamp"
            ),
        ),
        (
            "p.*, o.order_id, o.ts AS t",
            "p_order_id:int64 p_amount:float64 method:string ok:bool p_ts:timestamp order_id:int64 t:timestamp",
        ),
    ],
)
def test_select(select: str, outputs: str) -> None:
    query = parse(f"SELECT {select} {FROM2} WHERE {ON2}")
    assert " ".join(f"{o.name}:{o.type.value}" for o in query.outputs) == outputs


EXAMPLE = "write for example SELECT a.x, b.y FROM a [RANGE 10 MINUTES], b [RANGE 1 HOUR] WHERE a.id = b.id"
WINDOW = "write a window as [RANGE 10 MINUTES]; units are ms, seconds, minutes, hours, days"
ANSWER = "every event may complete results at once"
USE = "comparisons, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL, + - * / % ||, ABS and COALESCE"
SUB = "subqueries are not supported; write the other stream into FROM and join it"
AGG = "aggregates are not supported; a query joins events, it does not summarise them"
ONLY_STREAMS = "FROM takes streams only; subqueries, functions and parentheses are not supported"
OUTER = "JOIN is not supported; joins are inner joins: write JOIN … ON, or a comma and WHERE"

# A query in which the place of the error is marked by ^ before it; {F} and {W} are a good FROM and WHERE.
ERRORS = [
    # the statement
    ("", None, f"is empty; write for example {EXAMPLE[18:]}"),
    ("^UPDATE x SET y = 1", "1:1", f"a query starts with SELECT, for example {EXAMPLE[18:]}"),
    ("^WITH x AS (SELECT 1) SELECT 1", "1:1", f"WITH is not supported; write one SELECT, for example {EXAMPLE[18:]}"),
    ("SELECT o.order_id {F} {W}; ^SELECT 1", "", "holds more than one statement; write one SELECT"),
    (
        "SELECT o.order_id {F} {W} ^UNION SELECT 1",
        "",
        "UNION, INTERSECT and EXCEPT are not supported; write one SELECT, or one query for each part",
    ),
    (
        "SELECT 1 AS ^x",
        "",
        "has no FROM; name the streams to join, such as FROM a [RANGE 10 MINUTES], b [RANGE 1 HOUR]",
    ),
    ("SELECT o.order_id {F} WHERE o.order_id ^=", "", f"ends too early; {EXAMPLE}"),
    ("SELECT o.order_id {F} {W} ^)", "", f"`)` was not expected here; {EXAMPLE}"),
    ("SELECT o.order_id {F} {W} AND o.country = ^'DE", "", "text that begins with ' is never closed"),
    ("SELECT o.order_id -- it's\n{F} {W} AND o.country = ^'D''E", "", "text that begins with ' is never closed"),
    # clauses
    (
        "SELECT ^DISTINCT o.order_id {F} {W}",
        "",
        f"DISTINCT is not supported; each combination of events is a result of its own, and {ANSWER}",
    ),
    (
        "SELECT o.order_id {F} {W} ^GROUP BY o.order_id",
        "",
        f"GROUP BY is not supported; a query joins events, it does not summarise them, and {ANSWER}",
    ),
    (
        "SELECT o.order_id {F} {W} ^HAVING o.order_id > 1",
        "",
        "HAVING is not supported; write conditions on events into WHERE",
    ),
    (
        "SELECT o.order_id {F} {W}\n ^ORDER BY o.order_id",
        "",
        "ORDER BY is not supported; results come as they are found, each with its time",
    ),
    ("SELECT o.order_id {F} {W} ^LIMIT 5", "", "LIMIT is not supported; a query stands for ever"),
    ("SELECT o.order_id {F} {W} ^OFFSET 5", "", "OFFSET is not supported; a query stands for ever"),
    (
        "SELECT o.order_id {F} {W} ^QUALIFY o.order_id > 1",
        "",
        "QUALIFY is not supported; a query has SELECT, FROM and WHERE only",
    ),
    # FROM
    (
        "SELECT o.order_id FROM ^ordres [RANGE 1 DAY] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        "no stream `ordres` in the mesh; did you mean `orders`?",
    ),
    (
        "SELECT o.order_id FROM ^orders AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        "orders has no window; write orders [RANGE 10 MINUTES]",
    ),
    (
        "SELECT o.order_id FROM orders AS o ^[RANGE 1 DAY], payments [RANGE 1 DAY] AS p {W}",
        "",
        "the window of orders goes right behind its name; write orders [RANGE …] AS o",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o, users ^[RANGE 1 DAY] AS u WHERE o.user_id = u.user_id",
        "",
        "users is a table, which is valid always and takes no window; write users AS u",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o, users AS u ^[RANGE 1 DAY] WHERE o.user_id = u.user_id",
        "",
        "users is a table, which is valid always and takes no window; write users AS u",
    ),
    (
        "SELECT u.user_id FROM ^users AS u, users AS v WHERE u.user_id = v.user_id",
        "",
        "u and v are tables, which never change; a query needs at least one stream with a window",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o, users AS u WHERE o.user_id = u.^id",
        "",
        "no field `id` in stream users; use one of `user_id`, `name`",
    ),
    (
        "SELECT o.order_id ^[RANGE 1 DAY] {F} {W}",
        "",
        "a window stands behind a stream's name in FROM, not behind `order_id`",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] ^[RANGE 1 DAY] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        "a window stands behind a stream's name, as in orders [RANGE 10 MINUTES]",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 ^FORTNIGHT] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        f"unknown unit `FORTNIGHT` of a window; {WINDOW}",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE ^-1 DAY] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        f"[RANGE - 1 DAY] is not a window; {WINDOW}",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE ^UNBOUNDED] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        f"[RANGE UNBOUNDED] is not a window; {WINDOW}",
    ),
    (
        "SELECT o.order_id FROM orders ^[ROWS 5] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        f"[ROWS 5] is not a window; {WINDOW}",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE ^5] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        f"[RANGE 5] is not a window; {WINDOW}",
    ),
    ("SELECT o.order_id FROM orders ^[] AS o, payments [RANGE 1 DAY] AS p {W}", "", f"[] is not a window; {WINDOW}"),
    ("SELECT o.order_id FROM orders ^[RANGE 5 DAYS AS o", "", f"`[` is never closed; {WINDOW}"),
    (
        "SELECT o.order_id FROM orders [RANGE ^0.5 MS] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        "a window of 0.5 MS is not a whole number of milliseconds",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE ^36501 DAYS] AS o, payments [RANGE 1 DAY] AS p {W}",
        "",
        "a window may be at most 36500 days",
    ),
    (
        "SELECT 1 AS x FROM orders [RANGE 1 DAY] AS o, payments [RANGE 1 DAY] AS ^o WHERE o.order_id = 1",
        "",
        "two sources are called `o`; give one of them another name, such as payments [RANGE 10 MINUTES] AS o2",
    ),
    (
        "SELECT 1 AS x FROM orders [RANGE 1 DAY], ^orders [RANGE 1 DAY] WHERE TRUE",
        "",
        "two sources are called `orders`; give one of them another name, such as orders [RANGE 10 MINUTES] AS orders2",
    ),
    (
        'SELECT 1 AS x FROM orders [RANGE 1 DAY] AS ^"o.x", payments [RANGE 1 DAY] AS p WHERE TRUE',
        "",
        "alias `o.x` must be a letter or _ followed by letters, digits or _",
    ),
    (
        "SELECT 1 AS x FROM ^orders [RANGE 1 DAY] AS j1, payments [RANGE 1 DAY] AS p WHERE TRUE",
        "",
        "`j1` is how join nodes are called; give the source another name with AS",
    ),
    (
        "SELECT o.order_id FROM ^orders [RANGE 1 DAY] AS o",
        "",
        "a join needs at least two sources, but FROM names only o",
    ),
    (
        "SELECT a.order_id FROM "
        + ", ".join(f"orders [RANGE 1 DAY] AS {c}" for c in "abcdefghij")
        + ", ^orders [RANGE 1 DAY] AS k",
        "",
        "a query joins at most 10 sources, but FROM names 11; split it into several queries",
    ),
    (
        "SELECT 1 AS x FROM ^shop.orders [RANGE 1 DAY] AS o, payments [RANGE 1 DAY] AS p",
        "",
        "a stream has a single name; `shop.orders AS o` has several parts",
    ),
    ("SELECT 1 AS x FROM (SELECT ^1) AS o, payments [RANGE 1 DAY] AS p", "", ONLY_STREAMS),
    (
        "SELECT 1 AS x FROM ^orders [RANGE 1 DAY] AS o(a, b), payments [RANGE 1 DAY] AS p",
        "",
        "`orders AS o(a, b)` is not supported in FROM; write orders [RANGE 10 MINUTES] AS o",
    ),
    (
        "SELECT 1 AS x FROM ^orders [RANGE 1 DAY] AS o TABLESAMPLE (5 PERCENT), payments [RANGE 1 DAY] AS p",
        "",
        "`orders AS o TABLESAMPLE (5 PERCENT)` is not supported in FROM; write orders [RANGE 10 MINUTES] AS o",
    ),
    (
        (
            "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o ^LEFT JOIN payments [RANGE 1 DAY] AS p ON o.order_id ="
            " p.order_id"
        ),
        "",
        f"LEFT {OUTER}",
    ),
    (
        (
            "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o ^FULL OUTER JOIN payments [RANGE 1 DAY] AS p ON"
            " o.order_id = p.order_id"
        ),
        "",
        f"FULL OUTER {OUTER}",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o ^NATURAL JOIN payments [RANGE 1 DAY] AS p",
        "",
        f"NATURAL {OUTER}",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] AS o JOIN payments [RANGE 1 DAY] AS p USING (^order_id)",
        "",
        "USING is not supported; write ON with an equality, such as ON a.id = b.id",
    ),
    # names
    ("SELECT o.^oder_id {F} {W}", "", "no field `oder_id` in stream orders; did you mean `order_id`?"),
    (
        "SELECT o.order_id\n{F}\nWHERE o.order_id = p.^zzz",
        "",
        "no field `zzz` in stream payments; use one of `order_id`, `amount`, `method`, `ok`, `ts`",
    ),
    ("SELECT ^x.order_id {F} {W}", "", "no source `x` in FROM; use one of `o`, `p`"),
    ("SELECT ^orders.order_id {F} {W}", "", "no source `orders` here: stream orders is called `o` in this query"),
    ("SELECT ^x.* {F} {W}", "", "no source `x` in FROM; use one of `o`, `p`"),
    ("SELECT ^order_id {F} {W}", "", "field `order_id` is in several sources; write `o.order_id` or `p.order_id`"),
    ("SELECT ^countri {F} {W}", "", "no field `countri` in any source; did you mean `country`?"),
    ("SELECT ^a.b.c {F} {W}", "", "a column is written alias.field; nested names are not supported"),
    # SELECT
    (
        "SELECT o.order_id, ^p.order_id {F} {W}",
        "",
        "two outputs are called `order_id`; give one another name, such as p.order_id AS p_order_id",
    ),
    (
        "SELECT o.order_id, ^1 AS order_id {F} {W}",
        "",
        "two outputs are called `order_id`; give one another name, such as … AS order_id2",
    ),
    ("SELECT ^o.amount + 1 {F} {W}", "", "an expression needs a name; write o.amount + 1 AS …"),
    ("SELECT ^TRUE {F} {W}", "", "an expression needs a name; write TRUE AS …"),
    ("SELECT ^* EXCEPT (ts) {F} {W}", "", "* takes no EXCEPT, REPLACE or RENAME; list the columns instead"),
    ("SELECT ^COUNT(*) AS n {F} {W}", "", AGG),
    ("SELECT ^sum(o.amount) AS n {F} {W}", "", AGG),
    ("SELECT ^SUM(o.amount) OVER (PARTITION BY o.user_id) AS n {F} {W}", "", AGG),
    ("SELECT ^frobnicate(o.amount) AS n {F} {W}", "", "unknown function FROBNICATE; use ABS or COALESCE"),
    ("SELECT ^UPPER(o.country) AS n {F} {W}", "", "unknown function UPPER; use ABS or COALESCE"),
    (
        "SELECT CAST(^o.amount AS INT) AS n {F} {W}",
        "",
        "CAST is not supported; give the field its type in the mesh file",
    ),
    ("SELECT CASE WHEN ^o.gift THEN 1 ELSE 2 END AS n {F} {W}", "", f"CASE is not supported; use {USE}"),
    ("SELECT (SELECT ^1) AS n {F} {W}", "", SUB),
    ("SELECT ^NULL AS n {F} {W}", "", "NULL can only be tested; write IS NULL or IS NOT NULL"),
    ("SELECT ^o.user_id & 1 AS n {F} {W}", "", f"`o.user_id & 1` is not supported; use {USE}"),
    (
        "SELECT ^9223372036854775808 AS n {F} {W}",
        "",
        "9223372036854775808 does not fit into int64; write 9223372036854775808.0 for a float64",
    ),
    ("SELECT ^1e999 AS n {F} {W}", "", "1e999 does not fit into float64"),
    # types
    ("SELECT ^o.country + 1 AS n {F} {W}", "", "+ needs numbers, but o.country is string; to join text write ||"),
    ("SELECT ^o.gift * 2 AS n {F} {W}", "", "* needs numbers, but o.gift is bool"),
    ("SELECT ^o.amount || 'x' AS n {F} {W}", "", "|| needs text, but o.amount is float64"),
    ("SELECT -^o.country AS n {F} {W}", "", "- needs numbers, but o.country is string"),
    ("SELECT ^ABS(o.country) AS n {F} {W}", "", "ABS needs numbers, but o.country is string"),
    (
        "SELECT ^COALESCE(o.amount, 'x') AS n {F} {W}",
        "",
        "COALESCE needs values of one type, but o.amount is float64, 'x' is string",
    ),
    (
        "SELECT ^COALESCE(o.amount, o.user_id) AS n {F} {W}",
        "",
        "COALESCE needs values of one type, but o.amount is float64, o.user_id is int64",
    ),
    (
        "SELECT o.order_id {F} WHERE ^o.order_id = p.amount",
        "",
        (
            "cannot compare int64 (o.order_id) with float64 (p.amount); both columns must have the same type in the"
            " mesh file's `fields`"
        ),
    ),
    (
        "SELECT o.order_id {F} WHERE ^o.ts = p.order_id",
        "",
        (
            "cannot compare timestamp (o.ts) with int64 (p.order_id); both columns must have the same type in the mesh"
            " file's `fields`"
        ),
    ),
    (
        "SELECT o.order_id {F} WHERE ^o.country = p.order_id",
        "",
        (
            "cannot compare string (o.country) with int64 (p.order_id); both columns must have the same type in the"
            " mesh file's `fields`"
        ),
    ),
    (
        "SELECT o.order_id {F} {W} AND (^o.order_id <> p.amount OR o.gift)",
        "",
        (
            "cannot compare int64 (o.order_id) with float64 (p.amount); both columns must have the same type in the"
            " mesh file's `fields`"
        ),
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.ts < o.user_id",
        "",
        (
            "cannot compare timestamp (o.ts) with int64 (o.user_id); compare a timestamp with a timestamp, or with a"
            " whole number of epoch milliseconds"
        ),
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.ts > '2024-01-01'",
        "",
        (
            "cannot compare timestamp (o.ts) with string ('2024-01-01'); compare a timestamp with a timestamp, or with"
            " a whole number of epoch milliseconds"
        ),
    ),
    ("SELECT o.order_id {F} {W} AND ^o.country > 5", "", "cannot compare string (o.country) with int64 (5)"),
    ("SELECT o.order_id {F} {W} AND ^o.gift < p.ok", "", "bool knows only = and <>, not <"),
    ("SELECT o.order_id {F} {W} AND o.country IN ('DE', ^5)", "", "cannot compare string (o.country) with int64 (5)"),
    (
        "SELECT o.order_id {F} {W} AND o.user_id BETWEEN 1 AND ^'x'",
        "",
        "cannot compare int64 (o.user_id) with string ('x')",
    ),
    # conditions
    (
        "SELECT o.order_id {F} WHERE ^o.amount",
        "",
        "WHERE needs conditions, but o.amount is float64; write a comparison such as o.amount > 0",
    ),
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] o JOIN payments [RANGE 1 DAY] p ON ^o.country",
        "",
        "ON needs conditions, but o.country is string",
    ),
    (
        "SELECT o.order_id {F} {W} AND (o.gift OR ^o.user_id)",
        "",
        "AND and OR needs conditions, but o.user_id is int64; write a comparison such as o.user_id > 0",
    ),
    ("SELECT o.order_id {F} {W} AND NOT ^o.country", "", "NOT needs conditions, but o.country is string"),
    ("SELECT o.order_id {F} {W} AND o.country = ^NULL", "", "NULL can only be tested; write IS NULL or IS NOT NULL"),
    (
        "SELECT o.order_id {F} {W} AND ^o.gift IS TRUE",
        "",
        "IS knows only NULL and NOT NULL; write the condition itself, or NOT in front of it",
    ),
    ("SELECT o.order_id {F} {W} AND ^o.user_id LIKE 'x%'", "", "LIKE needs text, but o.user_id is int64"),
    (
        "SELECT o.order_id {F} {W} AND o.country LIKE ^p.method",
        "",
        "the pattern of LIKE must be text in quotes, such as LIKE 'DE%'",
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.country LIKE 'a\\b'",
        "",
        "in LIKE 'a\\b' the escape \\ must stand before %, _ or \\; write \\\\ for a backslash",
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.country LIKE 'a\\'",
        "",
        "in LIKE 'a\\' the escape \\ must stand before %, _ or \\; write \\\\ for a backslash",
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.country LIKE 'a' ESCAPE '!'",
        "",
        "ESCAPE is not supported; the escape of LIKE is always \\",
    ),
    ("SELECT o.order_id {F} {W} AND ^o.user_id NOT LIKE 'a%'", "", "LIKE needs text, but o.user_id is int64"),
    (
        "SELECT o.order_id {F} {W} AND o.country LIKE ANY (^'a', 'b')",
        "",
        "the pattern of LIKE must be text in quotes, such as LIKE 'DE%'",
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.user_id BETWEEN SYMMETRIC 1 AND 2",
        "",
        "SYMMETRIC is not supported; write BETWEEN low AND high",
    ),
    ("SELECT o.order_id {F} {W} AND ^o.country ILIKE 'a'", "", "ILIKE is not supported; write LIKE"),
    (
        "SELECT o.order_id {F} {W} AND ^o.user_id <=> 5",
        "",
        "<=> is not supported; write =, and IS NULL where null should count",
    ),
    (
        "SELECT o.order_id {F} {W} AND ^o.user_id IN (SELECT 1)",
        "",
        "IN needs a list of values, such as IN (1, 2, 3); subqueries are not supported",
    ),
    ("SELECT o.order_id {F} {W} AND EXISTS (SELECT ^1)", "", SUB),
    # the graph
    (
        "SELECT o.order_id FROM orders [RANGE 1 DAY] o, ^payments [RANGE 1 DAY] p",
        "",
        "the join graph is not connected: nothing links {p} with {o}; add an equality such as o.order_id = p.order_id",
    ),
    (
        "SELECT o.order_id {F}, ^shipments [RANGE 1 DAY] AS s {W} AND o.amount > s.weight",
        "",
        (
            "the join graph is not connected: nothing links {s} with {o, p}; add an equality such as o.order_id ="
            " s.order_id"
        ),
    ),
    (
        "SELECT o.order_id {F}, ^shipments [RANGE 1 DAY] AS s {W} AND (o.order_id = s.order_id OR o.gift)",
        "",
        (
            "the join graph is not connected: nothing links {s} with {o, p}; add an equality such as o.order_id ="
            " s.order_id"
        ),
    ),
]


@pytest.mark.parametrize(("marked", "place", "message"), ERRORS)
def test_errors(marked: str, place: str | None, message: str) -> None:
    marked = marked.replace("{F}", FROM2).replace("{W}", "WHERE " + ON2)
    text = marked.replace("^", "", 1)
    with pytest.raises(QueryError) as caught:
        parse(text)
    if place is None:
        assert str(caught.value) == f"query q: {message}"
        return
    before = marked[: marked.index("^")]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    assert str(caught.value) == f"query q, line {line}, column {column}: {message}"
    assert (caught.value.query, caught.value.line, caught.value.column) == ("q", line, column)


def test_errors_in_the_table_are_all_of_one_line_and_start_in_lower_case_or_with_a_word_of_sql() -> None:
    for _, _, message in ERRORS:
        assert "\n" not in message
        assert re.match(r"[a-z`*+<\[|0-9-]|[A-Z]{2,}", message), message


def test_nesting_without_end_is_refused_not_crashed() -> None:
    with pytest.raises(QueryError, match="nested too deeply"):
        where("(" * 5_000 + "o.gift" + ")" * 5_000)


def test_every_example_of_the_guide_parses() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "query-language.md").read_text(encoding="utf-8")
    examples = re.findall(r"```sql\n(.*?)```", guide, flags=re.DOTALL)
    assert len(examples) >= 8
    for example in examples:
        assert parse(example).outputs
