"""The value of an expression for one row, in plain Python: the reference that whole-column evaluation is held against.

Invariant: independent of polars and numpy, and the same rules as `topology.query.expression`: null is "unknown" and
spreads, except through AND, OR, IS NULL and COALESCE as SQL says. A row gives `alias.name` -> value, with float64
fields as Python floats and int64 and timestamp fields as ints, because the kind of number decides between wrapping and
rounding.
"""

import math
from collections.abc import Mapping

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
    like_parts,
)


def evaluate(expression: Expression, row: Mapping[str, Value]) -> Value:
    """
    >>> evaluate(Arithmetic("%", Literal(-7), Column("a", "x")), {"a.x": 3})
    -1
    """
    match expression:
        case Column():
            return row[str(expression)]
        case Literal(value):
            return value
        case And(terms):
            return _all([evaluate(term, row) for term in terms])
        case Or(terms):
            return _not(_all([_not(evaluate(term, row)) for term in terms]))
        case Not(term):
            return _not(evaluate(term, row))
        case IsNull(term):
            return evaluate(term, row) is None
        case Call("COALESCE", args):
            return next((value for arg in args if (value := evaluate(arg, row)) is not None), None)
        case Compare(op, left, right):
            sides = evaluate(left, row), evaluate(right, row)
            return None if None in sides else _compare(op, *sides)
        case Arithmetic(op, left, right):
            sides = evaluate(left, row), evaluate(right, row)
            return None if None in sides else _arithmetic(op, *sides)
        case Like(term, pattern):
            text = evaluate(term, row)
            return None if text is None else _like(str(text), list(like_parts(pattern)))
        case Negate(term):
            number = evaluate(term, row)
            return None if number is None else _wrap(-_number(number))
        case Call("ABS", args):
            number = evaluate(args[0], row)
            return None if number is None else _wrap(abs(_number(number)))
    raise AssertionError(f"no such expression: {expression!r}")


def holds(expression: Expression, row: Mapping[str, Value]) -> bool:
    """Whether a filter keeps the row: only what is true, not what is unknown."""
    return evaluate(expression, row) is True


def _all(terms: list[Value]) -> Value:
    if any(term is False for term in terms):
        return False
    return None if any(term is None for term in terms) else True


def _not(term: Value) -> Value:
    return None if term is None else not term


def _number(value: Value) -> int | float:
    assert isinstance(value, int | float), f"{value!r} is no number; the type check let it through"
    return value


def _wrap(number: int | float) -> int | float:
    """What int64 keeps of a whole number.

    >>> _wrap(2**63) == -(2**63), _wrap(1.5)
    (True, 1.5)
    """
    return number if isinstance(number, float) else (number + 2**63) % 2**64 - 2**63


def _order(left: Value, right: Value) -> int:
    """-1, 0 or 1. NaN is largest and equal to itself; text goes by its UTF-8 bytes; int meets float as float."""
    if isinstance(left, str) and isinstance(right, str):
        a, b = left.encode(), right.encode()
        return (a > b) - (a < b)
    x, y = _number(left), _number(right)
    if isinstance(x, float) or isinstance(y, float):
        x, y = float(x), float(y)
        if math.isnan(x) or math.isnan(y):
            return math.isnan(x) - math.isnan(y)
    return (x > y) - (x < y)


def _compare(op: CompareOp, left: Value, right: Value) -> bool:
    order = _order(left, right)
    return {"=": order == 0, "<>": order != 0, "<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0}[op]


def _arithmetic(op: ArithmeticOp, left: Value, right: Value) -> Value:
    if op == "||":
        return f"{left}{right}"
    x, y = _number(left), _number(right)
    if op == "/" or isinstance(x, float) or isinstance(y, float):
        return _float_arithmetic(op, float(x), float(y))
    match op:
        case "+":
            return _wrap(x + y)
        case "-":
            return _wrap(x - y)
        case "*":
            return _wrap(x * y)
    if y == 0:
        return None
    return abs(x) % abs(y) * (1 if x >= 0 else -1)


def _float_arithmetic(op: ArithmeticOp, x: float, y: float) -> float | None:
    match op:
        case "+":
            return x + y
        case "-":
            return x - y
        case "*":
            return x * y
    if y == 0:
        return None
    if op == "/":
        return x / y
    return math.nan if math.isinf(x) else math.fmod(x, y)


def _like(text: str, parts: list[str | None]) -> bool:
    """Which prefixes of the pattern match what was read so far; no regular expression, so that this is a second
    opinion."""
    reached = [True] + [False] * len(parts)
    _skip_any(reached, parts)
    for char in text:
        following = [False] * len(reached)
        for i, part in enumerate(parts):
            if part is None:
                following[i] = following[i] or reached[i]
            elif reached[i] and part in ("", char):
                following[i + 1] = True
        _skip_any(following, parts)
        reached = following
    return reached[-1]


def _skip_any(reached: list[bool], parts: list[str | None]) -> None:
    """`%` may match nothing."""
    for i, part in enumerate(parts):
        if part is None and reached[i]:
            reached[i + 1] = True
