"""The type of an expression, or why it has none.

Invariant: what passes here can be evaluated on any row of those types without an error, and gives null or a value of
the type inferred.
"""

import re
from collections.abc import Mapping

from schemas.mesh import FieldType
from topology.query.expression_text import to_text
from topology.query.expression_tree import (
    And,
    Arithmetic,
    Call,
    Column,
    Compare,
    Expression,
    IsNull,
    Like,
    Literal,
    Negate,
    Not,
    Or,
    Value,
    columns_of,
)


class ExpressionTypeError(ValueError):
    """An expression puts types together that do not fit; the message says which and what to write."""


_INT = FieldType.INT64
_FLOAT = FieldType.FLOAT64
_BOOL = FieldType.BOOL
_STRING = FieldType.STRING
_TIME = FieldType.TIMESTAMP
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
