"""Expressions as SQL text, for plans and errors.

Invariant: the text parses back to the same tree.
"""

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
)

# How tightly each form binds; a looser child of a tighter parent needs parentheses.
_BINDING = {
    "OR": 1,
    "AND": 2,
    "NOT": 3,
    "COMPARE": 4,
    "||": 5,
    "+": 6,
    "-": 6,
    "*": 7,
    "/": 7,
    "%": 7,
    "NEGATE": 8,
    "ATOM": 9,
}


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
            return f"-{_inside(term, 9) if isinstance(term, Column | Call) else '(' + to_text(term) + ')'}", _BINDING[
                "NEGATE"
            ]
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
