"""Expressions over rows: a small frozen tree, its types, its columns, and its evaluation on whole columns.

Invariant: evaluation is SQL's three-valued logic (null is "unknown"; a filter keeps only what is true) and is the
same for every block size: `compile_expression` turns a tree into one polars expression, never into a loop over rows.

Rules that users may rely on (docs/query-language.md): `/` is float64 division and gives null on a zero divisor; `%` keeps the sign of the
dividend and gives null on a zero divisor; int64 arithmetic wraps; text compares by the bytes of its UTF-8; LIKE knows
`%`, `_` and the escape `\\`; `||` joins text; an int64 beside a float64 is read as float64; -0.0 equals 0.0; a NaN that
arithmetic makes equals itself and is larger than every number. The same rules one row at a time: `topology.evaluate`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as Lit

import numpy as np
import polars as pl

from schemas.mesh import FieldType

Value = int | float | str | bool | None
CompareOp = Lit["=", "<>", "<", "<=", ">", ">="]
ArithmeticOp = Lit["+", "-", "*", "/", "%", "||"]


@dataclass(frozen=True, order=True)
class Column:
    """A column of one source of the query: `alias.name`."""

    alias: str
    name: str

    def __str__(self) -> str:
        return f"{self.alias}.{self.name}"


@dataclass(frozen=True)
class Literal:
    value: Value


@dataclass(frozen=True)
class Compare:
    op: CompareOp
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True)
class And:
    terms: tuple["Expression", ...]


@dataclass(frozen=True)
class Or:
    terms: tuple["Expression", ...]


@dataclass(frozen=True)
class Not:
    term: "Expression"


@dataclass(frozen=True)
class IsNull:
    term: "Expression"


@dataclass(frozen=True)
class Like:
    term: "Expression"
    pattern: str


@dataclass(frozen=True)
class Arithmetic:
    op: ArithmeticOp
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True)
class Negate:
    term: "Expression"


@dataclass(frozen=True)
class Call:
    """ABS(x) or COALESCE(x, y, …)."""

    function: Lit["ABS", "COALESCE"]
    args: tuple["Expression", ...]


# IN and BETWEEN are parsed into Or/And of Compare, so that null has one meaning.
Expression = Column | Literal | Compare | And | Or | Not | IsNull | Like | Arithmetic | Negate | Call


def children(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Compare() | Arithmetic():
            return (expression.left, expression.right)
        case And() | Or():
            return expression.terms
        case Not() | IsNull() | Like() | Negate():
            return (expression.term,)
        case Call():
            return expression.args
        case _:
            return ()


def columns_of(expression: Expression) -> Iterator[Column]:
    """Every column the expression reads, repeats included."""
    if isinstance(expression, Column):
        yield expression
    for child in children(expression):
        yield from columns_of(child)


class ExpressionTypeError(ValueError):
    """An expression puts types together that do not fit; the message says which and what to write."""


_INT, _FLOAT, _BOOL, _STRING, _TIME = (
    FieldType.INT64, FieldType.FLOAT64, FieldType.BOOL, FieldType.STRING, FieldType.TIMESTAMP,
)  # fmt: skip
_NUMERIC = (_INT, _FLOAT, _TIME)


def infer_type(expression: Expression, types: Mapping[Column, FieldType]) -> FieldType:
    """The type of the expression's value.

    >>> infer_type(Arithmetic("/", Literal(1), Literal(2)), {}).value
    'float64'
    """
    match expression:
        case Column():
            return types[expression]
        case Literal(value):
            return _literal_type(value)
        case Compare(op, left, right):
            _check_compare(op, left, infer_type(left, types), right, infer_type(right, types))
            return _BOOL
        case And(terms) | Or(terms):
            return _need_all(terms, types, _BOOL, "AND and OR" if len(terms) > 1 else "a condition")
        case Not(term):
            return _need_all((term,), types, _BOOL, "NOT")
        case IsNull(term):
            infer_type(term, types)
            return _BOOL
        case Like(term, pattern):
            check_pattern(pattern)
            _need_all((term,), types, _STRING, "LIKE")
            return _BOOL
        case Arithmetic("||", left, right):
            return _need_all((left, right), types, _STRING, "||")
        case Arithmetic(op, left, right):
            return _arithmetic_type(op, _number(op, left, types), _number(op, right, types))
        case Negate(term):
            return _as_int(_number("-", term, types))
        case Call("ABS", args):
            if len(args) != 1:
                raise ExpressionTypeError("ABS takes one number, such as ABS(a.x)")
            return _as_int(_number("ABS", args[0], types))
        case Call(_, args):
            return _coalesce_type(args, types)


def _literal_type(value: Value) -> FieldType:
    match value:
        case bool():
            return _BOOL
        case int():
            return _INT
        case float():
            return _FLOAT
        case str():
            return _STRING
        case None:
            raise ExpressionTypeError("a bare NULL has no type; to test for null write IS NULL or IS NOT NULL")


def _as_int(kind: FieldType) -> FieldType:
    """A negated or absolute moment is a plain number."""
    return _INT if kind is _TIME else kind


def _number(op: str, term: Expression, types: Mapping[Column, FieldType]) -> FieldType:
    kind = infer_type(term, types)
    if kind not in _NUMERIC:
        hint = "; to join text write ||" if op == "+" and kind is _STRING else ""
        raise ExpressionTypeError(f"{op} needs numbers, but {to_text(term)} is {kind.value}{hint}")
    return kind


def _arithmetic_type(op: str, left: FieldType, right: FieldType) -> FieldType:
    """A timestamp moved by a whole number is a timestamp; the distance of two is a number of milliseconds."""
    if op == "/" or _FLOAT in (left, right):
        return _FLOAT
    if op == "-" and left is _TIME and right is _INT:
        return _TIME
    return _TIME if op == "+" and (left is _TIME) != (right is _TIME) else _INT


def _need_all(
    terms: tuple[Expression, ...], types: Mapping[Column, FieldType], need: FieldType, what: str
) -> FieldType:
    for term in terms:
        kind = infer_type(term, types)
        if kind is not need:
            wanted = {"bool": "conditions", "string": "text"}[need.value]
            hint = f"; write a comparison such as {to_text(term)} > 0" if need is _BOOL and kind in _NUMERIC else ""
            raise ExpressionTypeError(f"{what} needs {wanted}, but {to_text(term)} is {kind.value}{hint}")
    return need


def _check_compare(op: str, left: Expression, left_type: FieldType, right: Expression, right_type: FieldType) -> None:
    pair = {left_type, right_type}
    equality = op in ("=", "<>")
    if pair == {_BOOL} and not equality:
        raise ExpressionTypeError(f"bool knows only = and <>, not {op}")
    if len(pair) == 1:
        return
    columns = isinstance(left, Column) and isinstance(right, Column)
    if pair == {_INT, _FLOAT} and not (columns and equality):
        return
    constant = right if left_type is _TIME else left
    if pair == {_TIME, _INT} and not any(columns_of(constant)):
        return
    hint = ""
    if columns and equality:
        hint = "; both columns must have the same type in the mesh file's `fields`"
    elif _TIME in pair:
        hint = "; compare a timestamp with a timestamp, or with a whole number of epoch milliseconds"
    sides = f"{left_type.value} ({to_text(left)}) with {right_type.value} ({to_text(right)})"
    raise ExpressionTypeError(f"cannot compare {sides}{hint}")


def _coalesce_type(args: tuple[Expression, ...], types: Mapping[Column, FieldType]) -> FieldType:
    if not args:
        raise ExpressionTypeError("COALESCE takes one or more values, such as COALESCE(a.x, 0)")
    kinds = [infer_type(arg, types) for arg in args]
    if set(kinds) == {_TIME, _INT} and not any(columns_of(a) for a, k in zip(args, kinds, strict=True) if k is _INT):
        return _TIME
    if len(set(kinds)) > 1:
        listed = ", ".join(f"{to_text(a)} is {k.value}" for a, k in zip(args, kinds, strict=True))
        raise ExpressionTypeError(f"COALESCE needs values of one type, but {listed}")
    return kinds[0]


def check_pattern(pattern: str) -> None:
    """Refuse a LIKE pattern whose escape stands before something that needs none."""
    for part in re.findall(r"\\(.?)", pattern, flags=re.DOTALL):
        if part not in ("%", "_", "\\"):
            raise ExpressionTypeError(
                f"in LIKE '{pattern}' the escape \\ must stand before %, _ or \\; write \\\\ for a backslash"
            )


def like_parts(pattern: str) -> Iterator[str | None]:
    """The pattern as single characters; `""` stands for `_` (any one) and None for `%` (any number).

    >>> list(like_parts("a_%")), list(like_parts(r"50\\%"))
    (['a', '', None], ['5', '0', '%'])
    """
    escaped = False
    for char in pattern:
        if escaped or char not in "\\%_":
            yield char
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            yield None if char == "%" else ""


# How tightly each form binds; a looser child of a tighter parent needs parentheses.
_BINDING = {"OR": 1, "AND": 2, "NOT": 3, "COMPARE": 4, "||": 5, "+": 6, "-": 6, "*": 7, "/": 7, "%": 7, "NEGATE": 8, "ATOM": 9}


def to_text(expression: Expression) -> str:
    """The expression as SQL that parses back to itself, with no more parentheses than needed.

    >>> to_text(And((Or((Column("a", "x"), Column("b", "y"))), Not(Like(Column("a", "s"), "it's%")))))
    "(a.x OR b.y) AND NOT a.s LIKE 'it''s%'"
    """
    return _text(expression)[0]


def _text(expression: Expression) -> tuple[str, int]:
    match expression:
        case Column():
            return str(expression), _BINDING["ATOM"]
        case Literal(value):
            return _literal_text(value), _BINDING["ATOM"]
        case Compare(op, left, right):
            return f"{_inside(left, 5)} {op} {_inside(right, 5)}", _BINDING["COMPARE"]
        case And(terms):
            return " AND ".join(_inside(term, 3) for term in terms), _BINDING["AND"]
        case Or(terms):
            return " OR ".join(_inside(term, 2) for term in terms), _BINDING["OR"]
        case Not(IsNull(term)):
            return f"{_inside(term, 5)} IS NOT NULL", _BINDING["COMPARE"]
        case Not(term):
            return f"NOT {_inside(term, 4)}", _BINDING["NOT"]
        case IsNull(term):
            return f"{_inside(term, 5)} IS NULL", _BINDING["COMPARE"]
        case Like(term, pattern):
            return f"{_inside(term, 5)} LIKE {_literal_text(pattern)}", _BINDING["COMPARE"]
        case Arithmetic(op, left, right):
            level = _BINDING[op]
            return f"{_inside(left, level)} {op} {_inside(right, level + 1)}", level
        case Negate(term):
            return f"-{_inside(term, 9) if isinstance(term, Column | Call) else '(' + to_text(term) + ')'}", _BINDING["NEGATE"]
        case Call(function, args):
            return f"{function}({', '.join(map(to_text, args))})", _BINDING["ATOM"]


def _inside(expression: Expression, least: int) -> str:
    text, binding = _text(expression)
    return text if binding >= least else f"({text})"


def _literal_text(value: Value) -> str:
    match value:
        case None:
            return "NULL"
        case bool():
            return "TRUE" if value else "FALSE"
        case str():
            return "'" + value.replace("'", "''") + "'"
        case _:
            return repr(value)


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
        case Arithmetic("%", left, right):
            return _remainder(compile_expression(left), compile_expression(right), constant=not any(columns_of(expression)))
        case Arithmetic(op, left, right):
            return _arithmetic(op, compile_expression(left), compile_expression(right))
        case Negate(term):
            return -compile_expression(term)
        case Call("ABS", (term,)):
            return compile_expression(term).abs()
        case Call(_, args):
            return _coalesce([compile_expression(arg) for arg in args])


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
        case "/":
            divisor = right.cast(pl.Float64)
            return left.cast(pl.Float64) / pl.when(divisor != 0).then(divisor)
    raise AssertionError(f"no such operator: {op}")


def _coalesce(args: list[pl.Expr]) -> pl.Expr:
    """Not `pl.coalesce`: that gives a single value instead of a column if all before a literal is null."""
    value = args[-1]
    for arg in reversed(args[:-1]):
        value = pl.when(arg.is_not_null()).then(arg).otherwise(value)
    return value


def _remainder(left: pl.Expr, right: pl.Expr, constant: bool) -> pl.Expr:
    """The remainder with the dividend's sign. polars' own is a floored one and, on floats, not exact."""
    return pl.map_batches([left, right], _remainders, return_dtype=pl.dtype_of(left + right), returns_scalar=constant)


def _remainders(sides: Sequence[pl.Series]) -> pl.Series:
    left, right = sides
    unknown = (left.is_null() | right.is_null() | (right == 0)).to_numpy()
    numbers, divisors = left.fill_null(0).to_numpy(), right.fill_null(1).to_numpy()
    with np.errstate(all="ignore"):
        rest = np.fmod(numbers, np.where(unknown, np.ones(1, divisors.dtype), divisors))
    return pl.Series(left.name, rest).set(pl.Series(unknown), None)


def _regex(pattern: str) -> str:
    """LIKE as a regular expression over the whole text, where `.` is any one character, line ends included."""
    parts = ("(?s:.*)" if part is None else "(?s:.)" if part == "" else _quoted(part) for part in like_parts(pattern))
    return r"\A" + "".join(parts) + r"\z"


def _quoted(char: str) -> str:
    return "\\" + char if char in r"\.+*?()|[]{}^$" else char
