"""Expressions over rows: a small frozen tree, its types, its columns, and its evaluation on whole columns.

Invariant: evaluation is SQL's three-valued logic (null is "unknown"; a filter keeps only what is true) and is the
same for every block size: `compile_expression` turns a tree into one polars expression, never into a loop over rows.

Rules that users may rely on (docs/query-language.md): `/` is float64 division and gives null on a zero divisor; `%`
keeps the sign of the dividend and gives null on a zero divisor; int64 arithmetic wraps; text compares by the bytes of
its UTF-8; LIKE knows `%`, `_` and the escape `\\`; `||` joins text; an int64 beside a float64 is read as float64; -0.0
equals 0.0; a NaN that arithmetic makes equals itself and is larger than every number. The same rules one row at a time:
`topology.oracle.evaluate`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from topology.query.expression_text import to_text
from topology.query.expression_tree import (
    And,
    Arithmetic,
    ArithmeticOp,
    Call,
    Column,
    Compare,
    CompareOp,
    Expression,
    IsNull,
    Like,
    Literal,
    Negate,
    Not,
    Or,
    Value,
    children,
    columns_of,
    like_parts,
)
from topology.query.expression_types import ExpressionTypeError, infer_type

__all__ = [
    "And",
    "Arithmetic",
    "ArithmeticOp",
    "Call",
    "Column",
    "Compare",
    "CompareOp",
    "Expression",
    "ExpressionTypeError",
    "IsNull",
    "Like",
    "Literal",
    "Negate",
    "Not",
    "Or",
    "Value",
    "children",
    "columns_of",
    "compile_expression",
    "infer_type",
    "like_parts",
    "to_text",
]


def compile_expression(expression: Expression) -> pl.Expr:
    """One polars expression over a frame whose columns are called `alias.name`."""
    match expression:
        case Column():
            return pl.col(str(expression))
        case Literal(value):
            return pl.lit(value, dtype=pl.Int64) if type(value) is int else pl.lit(value)
        case Compare(op, left, right):
            return _compare(op, compile_expression(left), compile_expression(right))
        case And(terms):
            return pl.all_horizontal([compile_expression(term) for term in terms])
        case Or(terms):
            return pl.any_horizontal([compile_expression(term) for term in terms])
        case Not(term):
            return ~compile_expression(term)
        case IsNull(term):
            return compile_expression(term).is_null()
        case Like(term, pattern):
            return compile_expression(term).str.contains(_regex(pattern))
        case Arithmetic("/" | "%" as op, left, right):
            return _by_series(_quotients if op == "/" else _remainders, (left, right), op)
        case Arithmetic(op, left, right):
            return _arithmetic(op, compile_expression(left), compile_expression(right))
        case Negate(term):
            return -compile_expression(term)
        case Call("ABS", (term,)):
            return compile_expression(term).abs()
        case Call(_, args):
            return _by_series(_first_known, args, "COALESCE")


def _compare(op: CompareOp, left: pl.Expr, right: pl.Expr) -> pl.Expr:
    match op:
        case "=":
            return left == right
        case "<>":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case ">=":
            return left >= right


def _arithmetic(op: ArithmeticOp, left: pl.Expr, right: pl.Expr) -> pl.Expr:
    match op:
        case "+" | "||":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    raise AssertionError(f"no such operator: {op}")


def _by_series(function: Callable[[list[pl.Series]], pl.Series], args: Sequence[Expression], op: str) -> pl.Expr:
    """An operation written on whole series of equal length.

    Not `pl.when` or `pl.coalesce`: when all rows take a literal's branch, polars keeps the result as a scalar, and a
    comparison of that with another literal has length one.
    """
    sides = [compile_expression(arg) for arg in args]
    dtype = pl.Float64 if op == "/" else pl.dtype_of(sides[0]) if op == "COALESCE" else pl.dtype_of(sides[0] + sides[1])
    constant = not any(column for arg in args for column in columns_of(arg))
    return pl.map_batches(sides, lambda given: function(_aligned(given)), return_dtype=dtype, returns_scalar=constant)


def _aligned(given: Sequence[pl.Series]) -> list[pl.Series]:
    """A literal arrives as a series of length one; repeat it to the others' length, which may be zero."""
    length = next((len(series) for series in given if len(series) != 1), 1)
    return [series if len(series) == length else series.new_from_index(0, length) for series in given]


def _first_known(values: list[pl.Series]) -> pl.Series:
    first = values[0]
    for value in values[1:]:
        first = first.zip_with(first.is_not_null(), value)
    return first


def _quotients(sides: list[pl.Series]) -> pl.Series:
    left, right = (side.cast(pl.Float64) for side in sides)
    return _null_where(left / right, right == 0)


def _remainders(sides: list[pl.Series]) -> pl.Series:
    """With the dividend's sign. polars' own remainder is a floored one and, on floats, not exact."""
    left, right = sides
    unknown = left.is_null() | right.is_null() | (right == 0)
    numbers, divisors = left.fill_null(0).to_numpy(), right.fill_null(1).to_numpy()
    with np.errstate(all="ignore"):
        rest = np.fmod(numbers, np.where(unknown.to_numpy(), np.ones(1, divisors.dtype), divisors))
    return _null_where(pl.Series(left.name, rest), unknown)


def _null_where(values: pl.Series, mask: pl.Series) -> pl.Series:
    return values.zip_with(
        ~mask.fill_null(True), pl.Series(values.name, [None], dtype=values.dtype).new_from_index(0, len(values))
    )


def _regex(pattern: str) -> str:
    """LIKE as a regular expression over the whole text, where `.` is any one character, line ends included."""
    parts = ("(?s:.*)" if part is None else "(?s:.)" if part == "" else _quoted(part) for part in like_parts(pattern))
    return r"\A" + "".join(parts) + r"\z"


def _quoted(char: str) -> str:
    return "\\" + char if char in r"\.+*?()|[]{}^$" else char
