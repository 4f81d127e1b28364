"""Expressions as data: a small frozen tree, its columns, and the parts of a LIKE pattern.

Invariant: a tree says what is computed and nothing of how; equal trees mean the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal as Lit

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
