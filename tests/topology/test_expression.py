"""Expressions: whole-column evaluation equals the row evaluator, text parses back, and the rules users rely on hold."""

import math
from collections.abc import Mapping

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.mesh import FieldType, Stream
from topology.oracle.evaluate import evaluate, holds
from topology.query.cql import parse_query
from topology.query.expression import (
    And,
    Arithmetic,
    Call,
    Column,
    Compare,
    Expression,
    ExpressionTypeError,
    IsNull,
    Like,
    Literal,
    Negate,
    Not,
    Or,
    Value,
    columns_of,
    compile_expression,
    infer_type,
    to_text,
)

INT = FieldType.INT64
FLOAT = FieldType.FLOAT64
BOOL = FieldType.BOOL
STRING = FieldType.STRING
TIME = FieldType.TIMESTAMP
DTYPES = {INT: pl.Int64, FLOAT: pl.Float64, BOOL: pl.Boolean, STRING: pl.String, TIME: pl.Int64}
TYPES = {Column(alias, f"{kind.value}{i}"): kind for alias in "ab" for kind in FieldType for i in (1, 2)}

ints = st.one_of(
    st.sampled_from([0, 1, -1, 2, 7, -7, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)]), st.integers(-(2**63), 2**63 - 1)
)
floats = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.5, 1e20, -1e-20, 1e308, -1e308, 5e-324, float(2**53), float(2**63)]),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(
    st.sampled_from(["", "a", "ab", "a\nb", "é", "\U0001f600", "%", "a_b", "\\", "\uffff"]),
    st.text(st.sampled_from("ab%_\\\né"), max_size=4),
)
VALUES: dict[FieldType, st.SearchStrategy[Value]] = {
    INT: ints,
    FLOAT: floats,
    BOOL: st.booleans(),
    STRING: texts,
    TIME: ints,
}
patterns = st.lists(
    st.sampled_from(["a", "b", "%", "_", "\\%", "\\_", "\\\\", "é", "\n", ".", "*", "("]), max_size=5
).map("".join)


def leaf(kind: FieldType) -> st.SearchStrategy[Expression]:
    columns = st.sampled_from([column for column, held in TYPES.items() if held is kind])
    return st.one_of(columns, columns, VALUES[kind].map(Literal)) if kind is not TIME else columns


def expressions(kind: FieldType, depth: int = 3) -> st.SearchStrategy[Expression]:
    """Well-typed expressions of that type."""
    if depth == 0 or kind is TIME:
        return leaf(kind)
    numbers = st.sampled_from([INT, FLOAT, TIME]).flatmap(lambda k: expressions(k, depth - 1))
    own = expressions(kind, depth - 1)
    same = st.tuples(own, own)
    options = [leaf(kind), st.lists(own, min_size=1, max_size=3).map(lambda args: Call("COALESCE", tuple(args)))]
    if kind is INT:
        whole = st.sampled_from([INT, TIME]).flatmap(lambda k: expressions(k, depth - 1))
        options.append(st.builds(Arithmetic, st.sampled_from(["*", "%"]), whole, whole))
        options.append(st.builds(Arithmetic, st.sampled_from(["+", "-"]), own, own))
    if kind is FLOAT:
        options.append(st.builds(Arithmetic, st.just("/"), numbers, numbers))
        options.append(
            st.builds(lambda op, x, y: Arithmetic(op, x, y), st.sampled_from(["+", "-", "*", "%"]), own, numbers)
        )
    if kind in (INT, FLOAT):
        options += [own.filter(lambda e: not isinstance(e, Literal)).map(Negate), own.map(lambda e: Call("ABS", (e,)))]
    if kind is STRING:
        options.append(same.map(lambda pair: Arithmetic("||", *pair)))
    if kind is BOOL:
        options += [
            st.lists(own, min_size=2, max_size=3).map(lambda terms: flat(And, terms)),
            st.lists(own, min_size=2, max_size=3).map(lambda terms: flat(Or, terms)),
            own.map(Not),
            st.sampled_from(list(FieldType)).flatmap(lambda k: expressions(k, depth - 1)).map(IsNull),
            st.builds(Like, expressions(STRING, depth - 1), patterns),
            comparisons(depth - 1),
            comparisons(depth - 1),
        ]
    return st.one_of(options)


def flat(kind: type[And] | type[Or], terms: list[Expression]) -> Expression:
    return kind(tuple(part for term in terms for part in (term.terms if isinstance(term, kind) else (term,))))


def comparisons(depth: int) -> st.SearchStrategy[Expression]:
    def of(kinds: tuple[FieldType, FieldType]) -> st.SearchStrategy[Expression]:
        ops = ["=", "<>"] if kinds[0] is BOOL else ["=", "<>", "<", "<=", ">", ">="]
        return st.builds(Compare, st.sampled_from(ops), expressions(kinds[0], depth), expressions(kinds[1], depth))

    pairs = [(kind, kind) for kind in FieldType] + [(INT, FLOAT), (FLOAT, INT)]
    return st.sampled_from(pairs).flatmap(of).filter(well_typed)


def well_typed(expression: Expression) -> bool:
    try:
        infer_type(expression, TYPES)
    except ExpressionTypeError:
        return False
    return True


rows = st.fixed_dictionaries({str(column): st.one_of(st.none(), VALUES[kind]) for column, kind in TYPES.items()})
any_type = st.sampled_from([INT, FLOAT, BOOL, BOOL, BOOL, STRING]).flatmap(expressions)


def frame(data: list[Mapping[str, Value]]) -> pl.DataFrame:
    return pl.DataFrame(data, schema={str(column): DTYPES[kind] for column, kind in TYPES.items()})


def same(one: Value, other: Value) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or one == other
    return type(one) is type(other) and one == other


@settings(max_examples=400, deadline=None)
@given(any_type, st.lists(rows, min_size=1, max_size=5))
def test_columns_equal_rows(expression: Expression, data: list[Mapping[str, Value]]) -> None:
    got = frame(data).with_columns(compile_expression(expression).alias("got"))["got"]
    assert got.dtype == DTYPES[infer_type(expression, TYPES)]
    for row, value in zip(data, got.to_list(), strict=True):
        assert same(value, evaluate(expression, row)), (to_text(expression), row, value, evaluate(expression, row))


@settings(max_examples=100, deadline=None)
@given(expressions(BOOL), st.lists(rows, max_size=5))
def test_a_filter_keeps_what_is_true(expression: Expression, data: list[Mapping[str, Value]]) -> None:
    kept = frame(data).with_row_index("#").filter(compile_expression(expression))["#"].to_list()
    assert kept == [i for i, row in enumerate(data) if holds(expression, row)]


STREAMS = {
    alias: Stream(alias, alias, {c.name: k for c, k in TYPES.items() if c.alias == alias}, "timestamp1")
    for alias in "ab"
}


@settings(max_examples=200, deadline=None)
@given(any_type)
def test_text_parses_back_to_the_expression(expression: Expression) -> None:
    text = f"SELECT {to_text(expression)} AS x FROM a [RANGE 1 DAY], b [RANGE 1 DAY] WHERE a.int641 = b.int641"
    output = parse_query("q", text, STREAMS).outputs[0]
    assert (to_text(output.expression), output.type) == (to_text(expression), infer_type(expression, TYPES))
    assert output.expression == expression


A, B = Column("a", "x"), Column("a", "y")
M = -(2**63)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expression", "x", "y", "value"),
    [
        (Arithmetic("/", A, B), 7, 2, 3.5),
        (Arithmetic("/", A, B), 7, 0, None),
        (Arithmetic("/", A, B), 7.0, -0.0, None),
        (Arithmetic("/", A, B), None, 2, None),
        (Arithmetic("/", A, B), 1e308, 1e-308, INF),
        (Arithmetic("%", A, B), 7, 3, 1),
        (Arithmetic("%", A, B), -7, 3, -1),
        (Arithmetic("%", A, B), 7, -3, 1),
        (Arithmetic("%", A, B), -7, -3, -1),
        (Arithmetic("%", A, B), 7, 0, None),
        (Arithmetic("%", A, B), M, -1, 0),
        (Arithmetic("%", A, B), -1e-20, 1.0, -1e-20),
        (Arithmetic("%", A, B), 1e20, 3.0, 1.0),
        (Arithmetic("%", A, B), 5.5, 0.0, None),
        (Arithmetic("%", A, B), None, 1.0, None),
        (Arithmetic("%", A, B), -7.5, 2, -1.5),
        (Arithmetic("+", A, B), 2**63 - 1, 1, M),
        (Arithmetic("-", A, B), M, 1, 2**63 - 1),
        (Arithmetic("*", A, B), 2**62, 4, 0),
        (Arithmetic("+", A, B), 2**53 + 1, 0.0, float(2**53)),
        (Negate(A), M, 0, M),
        (Call("ABS", (A,)), M, 0, M),
        (Call("ABS", (A,)), -2.5, 0, 2.5),
        (Arithmetic("||", A, B), "a", "b", "ab"),
        (Arithmetic("||", A, B), "a", None, None),
        (Compare("=", A, B), 0.0, -0.0, True),
        (Compare("=", A, B), 2**53 + 1, float(2**53), True),
        (Compare("<", A, B), "z", "é", True),
        (Compare("<", A, B), "\uffff", "\U00010000", True),
        (Compare("=", A, B), None, None, None),
        (Compare("<>", A, B), True, False, True),
        (And((A, B)), None, False, False),
        (And((A, B)), None, True, None),
        (Or((A, B)), None, True, True),
        (Or((A, B)), None, False, None),
        (Not(A), None, True, None),
        (IsNull(A), None, 1, True),
        (IsNull(Compare("=", A, B)), 1, None, True),
        (Call("COALESCE", (A, B)), None, 3, 3),
        (Call("COALESCE", (A, B)), 2, 3, 2),
        (Like(A, "a_b"), "a\nb", 0, True),
        (Like(A, "a%"), "ba", 0, False),
        (Like(A, "%"), "", 0, True),
        (Like(A, "_"), "", 0, False),
        (Like(A, "_"), "\U0001f600", 0, True),
        (Like(A, r"50\%"), "50%", 0, True),
        (Like(A, r"50\%"), "501", 0, False),
        (Like(A, "a.c"), "abc", 0, False),
        (Like(A, "%a%b"), "xxaxab", 0, True),
        (Like(A, "a"), None, "", None),
        (Like(A, "a"), "a\n", 0, False),
        (Like(A, "ß^$"), "ß^$", 0, True),
    ],
)
def test_rules_of_the_language(expression: Expression, x: Value, y: Value, value: Value) -> None:
    row = {"a.x": x, "a.y": y}
    assert same(evaluate(expression, row), value)
    kinds = {"a.x": x if x is not None else y, "a.y": y if y is not None else x}
    dtypes = {bool: pl.Boolean, int: pl.Int64, float: pl.Float64, str: pl.String, type(None): pl.Int64}
    data = pl.DataFrame([row], schema={name: dtypes[type(v)] for name, v in kinds.items()})
    assert same(data.select(compile_expression(expression)).item(), value)


@pytest.mark.parametrize("op", ["=", "<>", "<", "<=", ">", ">="])
def test_nan_is_largest_and_equal_to_itself(op: str) -> None:
    data = pl.DataFrame({"a.x": [NAN, NAN, 1.0, INF], "a.y": [NAN, 1.0, NAN, NAN]})
    expression = Compare(op, A, B)  # type: ignore[arg-type]
    expected = {
        "=": [1, 0, 0, 0],
        "<>": [0, 1, 1, 1],
        "<": [0, 0, 1, 1],
        "<=": [1, 0, 1, 1],
        ">": [0, 1, 0, 0],
        ">=": [1, 1, 0, 0],
    }[op]
    assert data.select(compile_expression(expression)).to_series().to_list() == [bool(b) for b in expected]
    assert [evaluate(expression, row) for row in data.to_dicts()] == [bool(b) for b in expected]


def test_constants_and_empty_frames() -> None:
    constant = Arithmetic("%", Literal(7), Literal(4))
    data = pl.DataFrame({"a.x": [1, 2, 3]}, schema={"a.x": pl.Int64})
    assert data.with_columns(compile_expression(constant).alias("c"))["c"].to_list() == [3, 3, 3]
    assert data.filter(compile_expression(Compare("=", constant, Literal(3)))).height == 3
    for expression in (constant, Arithmetic("%", A, Literal(2)), Arithmetic("/", Literal(1), A)):
        assert data.clear().with_columns(compile_expression(expression).alias("c")).height == 0
    assert data.filter(compile_expression(Literal(False))).height == 0


def test_columns_of() -> None:
    assert list(columns_of(And((Compare("<", A, Arithmetic("+", B, A)), IsNull(B))))) == [A, B, A, B]
