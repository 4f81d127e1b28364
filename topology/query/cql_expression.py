"""From sqlglot's expressions to ours: columns resolved to their sources, types checked where they are written.

Invariant: what comes out has a type (`infer_type` succeeds) and means what the text says under SQL's three-valued
logic; whatever has no such translation is refused at its place in the text with what would be accepted.
"""

import math
from collections.abc import Mapping

from sqlglot import exp

from schemas.mesh import FieldType, Stream, did_you_mean
from topology.query.cql_dialect import QueryText
from topology.query.expression import (
    And,
    Arithmetic,
    ArithmeticOp,
    Call,
    Column,
    Compare,
    CompareOp,
    Expression,
    ExpressionTypeError,
    IsNull,
    Like,
    Literal,
    Negate,
    Not,
    Or,
    infer_type,
)
from topology.query.query import Source

_COMPARE: dict[type[exp.Expr], CompareOp] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_ARITHMETIC: dict[type[exp.Expr], ArithmeticOp] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
    exp.DPipe: "||",
}
_SUPPORTED = "comparisons, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL, + - * / % ||, ABS and COALESCE"
# Parts of a sqlglot node that the translation reads, or that say nothing here; any other part would be dropped in
# silence.
_KNOWN_PARTS = {
    "this",
    "expression",
    "expressions",
    "table",
    "db",
    "catalog",
    "low",
    "high",
    "negate",
    "is_string",
    "safe",
}
_INSTEAD: dict[type[exp.Expr], str] = {
    exp.Subquery: "subqueries are not supported; write the other stream into FROM and join it",
    exp.Select: "subqueries are not supported; write the other stream into FROM and join it",
    exp.Exists: "subqueries are not supported; write the other stream into FROM and join it",
    exp.AggFunc: "aggregates are not supported; a query joins events, it does not summarise them",
    exp.Window: "aggregates are not supported; a query joins events, it does not summarise them",
    exp.Null: "NULL can only be tested; write IS NULL or IS NOT NULL",
    exp.NullSafeEQ: "<=> is not supported; write =, and IS NULL where null should count",
    exp.ILike: "ILIKE is not supported; write LIKE",
    exp.Escape: "ESCAPE is not supported; the escape of LIKE is always \\",
    exp.Cast: "CAST is not supported; give the field its type in the mesh file",
    exp.Case: f"CASE is not supported; use {_SUPPORTED}",
    exp.IntDiv: "DIV is not supported; / divides as float64, % gives the remainder",
}


class Scope:
    """The sources of one query, and how names resolve among them."""

    def __init__(self, text: QueryText, sources: tuple[Source, ...], streams: Mapping[str, Stream]) -> None:
        self.text, self.sources = text, sources
        self.fields = {source.alias: streams[source.stream].fields for source in sources}
        self.types = {
            Column(alias, name): kind for alias, fields in self.fields.items() for name, kind in fields.items()
        }

    def expression(self, node: exp.Expr) -> Expression:
        """Our expression for sqlglot's, with its types checked."""
        made = self._translate(node)
        try:
            infer_type(made, self.types)
        except ExpressionTypeError as error:
            raise self.text.fail(str(error), node) from None
        return made

    def condition(self, node: exp.Expr, where: str) -> Expression:
        made = self.expression(node)
        try:
            infer_type(And((made,)), self.types)
        except ExpressionTypeError as error:
            raise self.text.fail(str(error).replace("a condition", where, 1), node) from None
        return made

    def alias(self, name: str, at: exp.Expr) -> str:
        """The alias, if there is such a source."""
        if name in self.fields:
            return name
        called = [source.alias for source in self.sources if source.stream == name]
        if called:
            raise self.text.fail(f"no source `{name}` here: stream {name} is called `{called[0]}` in this query", at)
        raise self.text.fail(f"no source `{name}` in FROM{did_you_mean(name, self.fields)}", at)

    def column(self, node: exp.Column) -> Column:
        if node.args.get("db") is not None:
            raise self.text.fail("a column is written alias.field; nested names are not supported", node)
        if node.table:
            alias = self.alias(node.table, node.args["table"])
            if node.name not in self.fields[alias]:
                stream = next(source.stream for source in self.sources if source.alias == alias)
                hint = did_you_mean(node.name, self.fields[alias])
                raise self.text.fail(f"no field `{node.name}` in stream {stream}{hint}", node.this)
            return Column(alias, node.name)
        holders = [alias for alias, fields in self.fields.items() if node.name in fields]
        if not holders:
            every = dict.fromkeys(name for fields in self.fields.values() for name in fields)
            raise self.text.fail(f"no field `{node.name}` in any source{did_you_mean(node.name, every)}", node)
        if len(holders) > 1:
            choices = " or ".join(f"`{alias}.{node.name}`" for alias in holders)
            raise self.text.fail(f"field `{node.name}` is in several sources; write {choices}", node)
        return Column(holders[0], node.name)

    def _translate(self, node: exp.Expr) -> Expression:
        kind = type(node)
        if any(value and part not in _KNOWN_PARTS for part, value in node.args.items()):
            raise self._refuse(node)
        if kind in _COMPARE:
            return Compare(_COMPARE[kind], self.expression(node.this), self.expression(node.args["expression"]))
        if kind in _ARITHMETIC:
            return Arithmetic(_ARITHMETIC[kind], self.expression(node.this), self.expression(node.args["expression"]))
        match node:
            case exp.Column() if not isinstance(node.this, exp.Star):
                return self.column(node)
            case exp.Paren():
                return self.expression(node.this)
            case exp.And() | exp.Or():
                return _chain(
                    And if isinstance(node, exp.And) else Or,
                    [self.condition(t, "AND and OR") for t in flatten(node, kind)],
                )
            case exp.Not():
                return Not(self.expression(node.this))
            case exp.Is() if isinstance(node.args["expression"], exp.Null):
                return IsNull(self.expression(node.this))
            case exp.Boolean():
                return Literal(bool(node.this))
            case exp.Literal():
                return self._literal(node, sign=1)
            case exp.Neg() if isinstance(node.this, exp.Literal) and not node.this.is_string:
                return self._literal(node.this, sign=-1)
            case exp.Neg():
                return Negate(self.expression(node.this))
            case exp.In() if node.expressions:
                return self._in(node)
            case exp.Between() if not node.args.get("symmetric"):
                return self._between(node)
            case exp.Like():
                return self._like(node)
            case exp.Abs():
                return Call("ABS", (self.expression(node.this),))
            case exp.Coalesce():
                return self._coalesce([node.this, *node.expressions])
        raise self._refuse(node)

    def _literal(self, node: exp.Literal, sign: int) -> Literal:
        if node.is_string:
            return Literal(str(node.this))
        if str(node.this).isdigit():
            whole = sign * int(node.this)
            if not -(2**63) <= whole < 2**63:
                raise self.text.fail(f"{whole} does not fit into int64; write {whole}.0 for a float64", node)
            return Literal(whole)
        number = sign * float(node.this)
        if math.isinf(number):
            raise self.text.fail(f"{node.this} does not fit into float64", node)
        return Literal(number)

    def _in(self, node: exp.In) -> Expression:
        left = self.expression(node.this)
        equal = [self._checked(Compare("=", left, self.expression(item)), item) for item in node.expressions]
        return equal[0] if len(equal) == 1 else Or(tuple(equal))

    def _between(self, node: exp.Between) -> Expression:
        low, high = node.args["low"], node.args["high"]
        middle = self.expression(node.this)
        above = self._checked(Compare(">=", middle, self.expression(low)), low)
        return And((above, self._checked(Compare("<=", middle, self.expression(high)), high)))

    def _checked(self, made: Expression, at: exp.Expr) -> Expression:
        try:
            infer_type(made, self.types)
        except ExpressionTypeError as error:
            raise self.text.fail(str(error), at) from None
        return made

    def _like(self, node: exp.Like) -> Expression:
        pattern = node.args["expression"]
        if isinstance(pattern, exp.Literal) and pattern.is_string:
            like = Like(self.expression(node.this), str(pattern.this))
            return Not(self._checked(like, node)) if node.args.get("negate") else like
        raise self.text.fail("the pattern of LIKE must be text in quotes, such as LIKE 'DE%'", pattern)

    def _coalesce(self, nodes: list[exp.Expr]) -> Expression:
        """COALESCE(a.price, 0) over a float64 means 0.0: a whole literal takes the type it stands beside."""
        args = [self.expression(node) for node in nodes]
        if any(infer_type(arg, self.types) is FieldType.FLOAT64 for arg in args):
            args = [Literal(float(a.value)) if isinstance(a, Literal) and type(a.value) is int else a for a in args]
        return Call("COALESCE", tuple(args))

    def _refuse(self, node: exp.Expr) -> Exception:
        if isinstance(node, exp.Column | exp.Star):
            return self.text.fail("* stands alone in SELECT; inside an expression name a column", node)
        if isinstance(node, exp.Is):
            return self.text.fail(
                "IS knows only NULL and NOT NULL; write the condition itself, or NOT in front of it", node
            )
        if isinstance(node, exp.In):
            return self.text.fail("IN needs a list of values, such as IN (1, 2, 3); subqueries are not supported", node)
        if isinstance(node, exp.Between):
            return self.text.fail("SYMMETRIC is not supported; write BETWEEN low AND high", node)
        for kind, message in _INSTEAD.items():
            if isinstance(node, kind):
                return self.text.fail(message, node)
        if isinstance(node, exp.Func):
            name = node.name if isinstance(node, exp.Anonymous) else node.sql_name()
            return self.text.fail(f"unknown function {name.upper()}; use ABS or COALESCE", node)
        return self.text.fail(f"`{node.sql()}` is not supported; use {_SUPPORTED}", node)


def _chain(kind: type[And] | type[Or], terms: list[Expression]) -> Expression:
    """AND (or OR) of the terms, where a term that is such a chain itself (as IN and BETWEEN are) joins in."""
    return kind(tuple(part for term in terms for part in (term.terms if isinstance(term, kind) else (term,))))


def flatten(node: exp.Expr, kind: type[exp.Expr]) -> list[exp.Expr]:
    """The terms of a chain of ANDs (or ORs), parentheses around parts of the chain removed."""
    inner = node
    while isinstance(inner, exp.Paren):
        inner = inner.this
    if isinstance(inner, kind):
        return flatten(inner.this, kind) + flatten(inner.args["expression"], kind)
    return [node]
