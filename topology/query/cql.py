"""The query language: from a query's text to a `Query`, or a `QueryError` that names the place and what would be
accepted.

    SELECT o.order_id, p.amount AS paid
    FROM orders [RANGE 10 MINUTES] AS o, payments [RANGE 10 MINUTES] AS p
    WHERE o.order_id = p.order_id AND o.amount > 10

Invariant: the WHERE clause (and every ON) is taken apart into conjuncts, and each conjunct ends up in exactly one
place: a class of equal columns, the selection of one source, or the residuals. The language for users is described in
docs/query-language.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from schemas.errors import QueryError
from schemas.mesh import Stream, did_you_mean
from topology.query.cql_dialect import QueryText, Window
from topology.query.cql_equality import Facts, components, infer
from topology.query.cql_expression import Scope, flatten
from topology.query.expression import Column, Compare, Expression, Literal, columns_of, infer_type
from topology.query.query import ALWAYS_WINDOW_MS, Output, Query, Source

FEWEST_SOURCES, MOST_SOURCES = 2, 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
_NODE_NAME = re.compile(r"j[0-9]+\Z")
_ANSWER = "every event may complete results at once"
_CLAUSES = {  # what a SELECT may not have: the part of the tree, the token that begins it, what to say
    "distinct": (
        TokenType.DISTINCT,
        f"DISTINCT is not supported; each combination of events is a result of its own, and {_ANSWER}",
    ),
    "group": (
        TokenType.GROUP_BY,
        f"GROUP BY is not supported; a query joins events, it does not summarise them, and {_ANSWER}",
    ),
    "having": (TokenType.HAVING, "HAVING is not supported; write conditions on events into WHERE"),
    "order": (TokenType.ORDER_BY, "ORDER BY is not supported; results come as they are found, each with its time"),
    "limit": (TokenType.LIMIT, "LIMIT is not supported; a query stands for ever"),
    "offset": (TokenType.OFFSET, "OFFSET is not supported; a query stands for ever"),
}
_ALLOWED = {"expressions", "from_", "from", "joins", "where", "kind", "hint", "operation_modifiers"}


def parse_query(name: str, text: str, streams: Mapping[str, Stream]) -> Query:
    """Parse, resolve and check one query."""
    place = QueryText(name, text)
    select, windows, tokens = place.parse()
    _refuse_clauses(place, select, tokens)
    tables, conditions = _tables(place, select, tokens)
    sources = _sources(place, tables, windows, streams)
    scope = Scope(place, sources, streams)
    facts = Facts((), {source.alias: () for source in sources})
    residuals: list[Expression] = []
    for node, where in conditions:
        for term in flatten(node, exp.And):
            facts = _place_conjunct(scope.condition(term, where), facts, residuals)
    facts = infer(facts)
    _need_connected(scope, facts, tables)
    return Query(
        name, text, sources, _outputs(scope, select), facts.equal, facts.selections, tuple(residuals), scope.types
    )


def _refuse_clauses(place: QueryText, select: exp.Select, tokens: list[Token]) -> None:
    for part, (kind, message) in _CLAUSES.items():
        if select.args.get(part):
            raise place.fail(message, next((token for token in tokens if token.token_type is kind), None))
    for part, value in select.args.items():
        if value and part not in _ALLOWED:
            word = part.rstrip("_").upper()
            at = next((token for token in tokens if token.text.upper() == word), None)
            raise place.fail(f"{word} is not supported; a query has SELECT, FROM and WHERE only", at)
    if not select.args.get("from_") and not select.args.get("from"):
        raise place.fail(
            "has no FROM; name the streams to join, such as FROM a [RANGE 10 MINUTES], b [RANGE 1 HOUR]", tokens[-1]
        )


def _tables(
    place: QueryText, select: exp.Select, tokens: list[Token]
) -> tuple[list[exp.Table], list[tuple[exp.Expr, str]]]:
    """The entries of FROM in order, and every condition with the name of its clause."""
    start = select.args.get("from_") or select.args["from"]
    entries: list[exp.Expr] = [start.this]
    conditions: list[tuple[exp.Expr, str]] = []
    for join in select.args.get("joins") or ():
        entries.append(join.this)
        kinds = [join.args[part] for part in ("method", "side", "kind") if join.args.get(part)]
        if any(kind not in ("INNER", "CROSS") for kind in kinds):
            message = (
                f"{' '.join(kinds)} JOIN is not supported; joins are inner joins: write JOIN … ON, or a comma and WHERE"
            )
            raise place.fail(message, _last_before(tokens, kinds[0], join.this))
        if join.args.get("using"):
            raise place.fail(
                "USING is not supported; write ON with an equality, such as ON a.id = b.id", join.args["using"][0]
            )
        if join.args.get("on"):
            conditions.append((join.args["on"], "ON"))
    if select.args.get("where"):
        conditions.append((select.args["where"].this, "WHERE"))
    tables: list[exp.Table] = []
    for entry in entries:
        if not isinstance(entry, exp.Table) or entry.args.get("joins") or not isinstance(entry.this, exp.Identifier):
            raise place.fail("FROM takes streams only; subqueries, functions and parentheses are not supported", entry)
        if entry.args.get("db"):
            raise place.fail(f"a stream has a single name; `{entry.sql()}` has several parts", entry)
        extra = [part for part, value in entry.args.items() if value and part not in ("this", "alias")]
        if extra or (entry.args.get("alias") and entry.args["alias"].args.get("columns")):
            raise place.fail(
                f"`{entry.sql()}` is not supported in FROM; write {entry.name} [RANGE 10 MINUTES] AS"
                f" {entry.alias or 'x'}",
                entry,
            )
        tables.append(entry)
    return tables, conditions


def _last_before(tokens: list[Token], word: str, node: exp.Expr) -> Token | None:
    """The last token of that text in front of the node."""
    start = min((found.meta["start"] for found in node.walk() if "start" in found.meta), default=0)
    return next((t for t in reversed(tokens) if t.start < start and t.text.upper() == word.upper()), None)


def _sources(
    place: QueryText, tables: list[exp.Table], windows: dict[int, Window], streams: Mapping[str, Stream]
) -> tuple[Source, ...]:
    windows = dict(windows)
    sources: dict[str, Source] = {}
    for table in tables:
        alias = table.alias or table.name
        if table.name not in streams:
            raise place.fail(f"no stream `{table.name}` in the mesh{did_you_mean(table.name, streams)}", table.this)
        if not _NAME.match(alias):
            raise place.fail(
                f"alias `{alias}` must be a letter or _ followed by letters, digits or _", table.args["alias"]
            )
        if _NODE_NAME.match(alias):
            raise place.fail(f"`{alias}` is how join nodes are called; give the source another name with AS", table)
        if alias in sources:
            hint = f"give one of them another name, such as {table.name} [RANGE 10 MINUTES] AS {alias}2"
            raise place.fail(f"two sources are called `{alias}`; {hint}", table.args.get("alias") or table.this)
        sources[alias] = _source(place, alias, table, windows, streams[table.name])
    if windows:
        stray = min(windows.values(), key=lambda window: window.start)
        raise place.fail(f"a window stands behind a stream's name in FROM, not behind `{stray.owner}`", stray.start)
    if all(source.is_table for source in sources.values()):
        raise place.fail(
            f"{' and '.join(sources)} are tables, which never change; a query needs at least one stream with a window",
            tables[0].this,
        )
    if len(sources) < FEWEST_SOURCES:
        raise place.fail(f"a join needs at least two sources, but FROM names only {', '.join(sources)}", tables[0].this)
    if len(sources) > MOST_SOURCES:
        message = (
            f"a query joins at most {MOST_SOURCES} sources, but FROM names {len(sources)}; split it into several"
            " queries"
        )
        raise place.fail(message, tables[MOST_SOURCES].this)
    return tuple(sources.values())


def _source(place: QueryText, alias: str, table: exp.Table, windows: dict[int, Window], stream: Stream) -> Source:
    if stream.table is None:
        return Source(alias, table.name, _window(place, table, windows))
    for name in (table.this, table.args["alias"].this if table.args.get("alias") else None):
        if name is not None and name.meta["start"] in windows:
            message = (
                f"{table.name} is a table, which is valid always and takes no window; write {table.name} AS {alias}"
            )
            raise place.fail(message, windows[name.meta["start"]].start)
    return Source(alias, table.name, ALWAYS_WINDOW_MS, stream.table)


def _window(place: QueryText, table: exp.Table, windows: dict[int, Window]) -> int:
    window = windows.pop(table.this.meta["start"], None)
    if window is not None:
        return window.length_ms
    alias = table.args.get("alias")
    if alias is not None and alias.this.meta["start"] in windows:
        name, at = f"{table.name} [RANGE …] AS {table.alias}", windows[alias.this.meta["start"]].start
        raise place.fail(f"the window of {table.name} goes right behind its name; write {name}", at)
    raise place.fail(f"{table.name} has no window; write {table.name} [RANGE 10 MINUTES]", table.this)


def _place_conjunct(condition: Expression, facts: Facts, residuals: list[Expression]) -> Facts:
    match condition:
        case Literal(True):
            return facts
        case Compare("=", Column() as left, Column() as right) if left != right:
            facts = Facts((*facts.equal, (left, right)), facts.selections)
            return facts if left.alias != right.alias else facts.select(left.alias, condition)
    aliases = {column.alias for column in columns_of(condition)}
    if len(aliases) > 1:
        residuals.append(condition)
        return facts
    # A condition on no column at all holds for all events or for none: any one source can tell.
    return facts.select(aliases.pop() if aliases else next(iter(facts.selections)), condition)


def _need_connected(scope: Scope, facts: Facts, tables: list[exp.Table]) -> None:
    groups = components(facts.selections, facts.equal)
    if len(groups) == 1:
        return
    joined, lonely = groups[0], groups[1]
    at = next(table for table in tables if (table.alias or table.name) == lonely[0])
    message = f"the join graph is not connected: nothing links {{{', '.join(lonely)}}} with {{{', '.join(joined)}}}"
    raise scope.text.fail(f"{message}; add an equality such as {_suggest(scope, joined, lonely)}", at.this)


def _suggest(scope: Scope, joined: tuple[str, ...], lonely: tuple[str, ...]) -> str:
    """An equality that would type-check, of equal names if there are such."""
    pairs = [
        (one, other)
        for one in scope.types
        if one.alias in joined
        for other in scope.types
        if other.alias in lonely and scope.types[one] is scope.types[other]
    ]
    if not pairs:
        return f"{joined[0]}.… = {lonely[0]}.…"
    # An id in common is likelier meant than a time in common.
    one, other = min(pairs, key=lambda p: (p[0].name != p[1].name, scope.types[p[0]].value == "timestamp"))
    return f"{one} = {other}"


def _outputs(scope: Scope, select: exp.Select) -> tuple[Output, ...]:
    outputs: dict[str, Output] = {}
    for item in select.expressions:
        for name, expression in _selected(scope, item):
            if name in outputs:
                raise scope.text.fail(f"two outputs are called `{name}`; {_rename(name, expression)}", item)
            outputs[name] = Output(name, expression, infer_type(expression, scope.types))
    return tuple(outputs.values())


def _rename(name: str, expression: Expression) -> str:
    if isinstance(expression, Column):
        return f"give one another name, such as {expression} AS {expression.alias}_{expression.name}"
    return f"give one another name, such as … AS {name}2"


def _selected(scope: Scope, item: exp.Expr) -> Iterator[tuple[str, Expression]]:
    """The outputs that one entry of SELECT stands for, with their names."""
    table = item.args.get("table") if isinstance(item, exp.Column) else None
    star = item.this if isinstance(item, exp.Column) else item
    if isinstance(star, exp.Star):
        if any(star.args.values()):
            raise scope.text.fail("* takes no EXCEPT, REPLACE or RENAME; list the columns instead", item)
        yield from _starred(scope, [scope.alias(table.name, table)] if table is not None else scope.fields)
    elif isinstance(item, exp.Alias):
        if not item.alias:
            raise scope.text.fail("an output needs a name behind AS", item)
        yield item.alias, scope.expression(item.this)
    else:
        expression = scope.expression(item)
        if not isinstance(expression, Column):
            raise _nameless(scope, item)
        yield expression.name, expression


def _nameless(scope: Scope, item: exp.Expr) -> QueryError:
    start = min((found.meta["start"] for found in item.walk() if "start" in found.meta), default=None)
    return scope.text.fail(f"an expression needs a name; write {item.sql()} AS …", start)


def _starred(scope: Scope, aliases: Iterable[str]) -> Iterator[tuple[str, Expression]]:
    """All fields in FROM order; a field name that several sources have is told apart by its alias."""
    every = [name for fields in scope.fields.values() for name in fields]
    for alias in aliases:
        for name in scope.fields[alias]:
            yield (name if every.count(name) == 1 else f"{alias}_{name}"), Column(alias, name)
