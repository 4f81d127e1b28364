"""The audit's own reading of a query's text: sources with their windows, outputs, and the WHERE text for Spark SQL.

Invariant: this file knows tokens and the outline of a SELECT, never the meaning of an expression. Every predicate and
every output is handed to Spark SQL as it was written; only spelling is adapted (quotes, number suffixes), so the
engine's parser and the audit share no reading of a query.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from schemas.errors import QueryError
from schemas.mesh import Mesh, parse_duration_ms

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<string>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`)
      | (?P<window>\[[^\]]*\])
      | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign><=>|<>|!=|<=|>=|==|\|\||[-+*/%=<>(),.;])""",
    re.VERBOSE | re.DOTALL,
)
_AFTER_SELECT = ("DISTINCT",)
_REFUSED = (
    "GROUP",
    "HAVING",
    "ORDER",
    "LIMIT",
    "UNION",
    "INTERSECT",
    "EXCEPT",
    "LEFT",
    "RIGHT",
    "FULL",
    "OUTER",
    "NATURAL",
    "USING",
    "SEMI",
    "ANTI",
    "SELECT",
)
_OPERATORS = ("AND", "OR", "NOT", "IS", "LIKE", "IN", "BETWEEN", "ESCAPE")
_VALUES = ("NULL", "TRUE", "FALSE", "END")
_WINDOW = re.compile(r"\[\s*RANGE\s+(?:INTERVAL\s+)?([0-9.]+\s*[A-Za-z]+)\s*\]\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    at: int

    @property
    def upper(self) -> str:
        return self.text.upper() if self.kind == "word" else self.text

    @property
    def name(self) -> str | None:
        """The identifier this token is, or None."""
        if self.kind == "quoted":
            quote = self.text[0]
            return self.text[1:-1].replace(quote * 2, quote)
        return self.text if self.kind == "word" else None


@dataclass(frozen=True)
class Source:
    alias: str
    stream: str
    window_ms: int | None  # None: a static table, valid always


@dataclass(frozen=True)
class Scanned:
    """A query, ready for Spark: `outputs` are (name, Spark expression), `conditions` Spark expressions that must all
    hold."""

    name: str
    text: str
    sources: tuple[Source, ...]
    outputs: tuple[tuple[str, str], ...]
    conditions: tuple[str, ...]
    links: tuple[tuple[str, str], ...]  # pairs of aliases that some equality joins; only ever used to order the joins

    @property
    def join_order(self) -> tuple[Source, ...]:
        """The sources, each one (where possible) linked to an earlier one, so that Spark never builds a cross
        product."""
        rest, order = list(self.sources[1:]), [self.sources[0]]
        while rest:
            here = {source.alias for source in order}
            linked = (s for s in rest if any({a, b} & here and s.alias in (a, b) for a, b in self.links))
            following = next(linked, rest[0])
            rest.remove(following)
            order.append(following)
        return tuple(order)


def scan(mesh: Mesh, query: str) -> Scanned:
    """Read one query of the mesh."""
    return _Scanner(mesh, query).run()


def spark_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


class _Scanner:
    def __init__(self, mesh: Mesh, query: str) -> None:
        self.mesh, self.query, self.text = mesh, query, mesh.queries[query]
        self.fields: dict[str, Mapping[str, object]] = {}  # alias -> fields

    def fail(self, message: str, at: int | None = None) -> QueryError:
        if at is None:
            return QueryError(message, query=self.query)
        line = self.text.count("\n", 0, at) + 1
        return QueryError(message, query=self.query, line=line, column=at - (self.text.rfind("\n", 0, at) + 1) + 1)

    def tokens(self) -> list[Token]:
        found, at = [], 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise self.fail(f"the audit cannot read {self.text[at]!r}", at)
            if match.lastgroup != "space":
                found.append(Token(str(match.lastgroup), match[0], at))
            at = match.end()
        while found and found[-1].text == ";":
            found.pop()
        return found

    def run(self) -> Scanned:
        tokens = self.tokens()
        for before, token in pairwise(tokens):
            if token.upper in _REFUSED and before.text != ".":
                raise self.fail(f"the audit knows no {token.upper}; write SELECT … FROM … WHERE …", token.at)
        if not tokens or tokens[0].upper != "SELECT":
            raise self.fail("a query starts with SELECT", tokens[0].at if tokens else None)
        select, rest = _cut(tokens[1:], "FROM")
        if rest is None:
            raise self.fail("FROM is missing")
        source_tokens, where = _cut(rest, "WHERE")
        sources, conditions = self.sources(source_tokens)
        if where is not None:
            conditions.append(where)
        self.fields = {s.alias: self.mesh.streams[s.stream].fields for s in sources}
        conjuncts = [part for condition in conditions for part in _conjuncts(condition)]
        return Scanned(
            name=self.query,
            text=self.text,
            sources=tuple(sources),
            outputs=tuple(self.outputs(select)),
            conditions=tuple(self.spark(condition) for condition in conditions),
            links=tuple(link for part in conjuncts if (link := self.link(part)) is not None),
        )

    def sources(self, tokens: list[Token]) -> tuple[list[Source], list[list[Token]]]:
        """FROM a [RANGE …] AS x, b [RANGE …] y JOIN c [RANGE …] z ON …"""
        pieces: list[list[Token]] = [[]]
        depth = 0
        for token in tokens:
            depth += (token.text == "(") - (token.text == ")")
            if (depth == 0 and token.text == ",") or (depth == 0 and token.upper == "JOIN"):
                pieces.append([])
            elif not (depth == 0 and token.upper in ("INNER", "CROSS")):
                pieces[-1].append(token)
        found: list[Source] = []
        conditions: list[list[Token]] = []
        for piece in pieces:
            entry, on = _cut(piece, "ON")
            found.append(self.source(entry))
            if on is not None:
                conditions.append(on)
        aliases = [s.alias for s in found]
        if len(set(aliases)) < len(aliases):
            raise self.fail("an alias stands twice in FROM")
        return found, conditions

    def source(self, tokens: list[Token]) -> Source:
        windows = [t for t in tokens if t.kind == "window"]
        names = [t for t in tokens if t.kind != "window" and t.upper != "AS"]
        if len(windows) > 1 or not 1 <= len(names) <= 2 or any(t.name is None for t in names):
            raise self.fail("each source is written: stream [RANGE n unit] AS alias", tokens[0].at if tokens else None)
        stream = str(names[0].name)
        if stream not in self.mesh.streams:
            raise self.fail(f"no stream `{stream}` in the mesh file", names[0].at)
        if (self.mesh.streams[stream].table is None) != bool(windows):
            raise self.fail(
                "each source is written: stream [RANGE n unit] AS alias, a table without the window", names[0].at
            )
        if not windows:
            return Source(str(names[-1].name), stream, None)
        match = _WINDOW.match(windows[0].text)
        if match is None:
            raise self.fail(f"window {windows[0].text} is not of the form [RANGE 10 MINUTES]", windows[0].at)
        try:
            window_ms = parse_duration_ms(match[1])
        except ValueError as error:
            raise self.fail(str(error), windows[0].at) from None
        return Source(str(names[-1].name), stream, window_ms)

    def outputs(self, tokens: list[Token]) -> list[tuple[str, str]]:
        if tokens and tokens[0].upper in _AFTER_SELECT:
            raise self.fail(f"the audit knows no {tokens[0].upper}", tokens[0].at)
        found: list[tuple[str, str]] = []
        for item in _split(tokens, ","):
            found.extend(self.output(item))
        names = [name for name, _ in found]
        for name in names:
            if names.count(name) > 1:
                raise self.fail(f"two outputs are called `{name}`; rename one with AS")
        return found

    def output(self, item: list[Token]) -> list[tuple[str, str]]:
        if not item:
            raise self.fail("an output is empty; is there a comma too many?")
        if [t.text for t in item] == ["*"]:
            return [self.starred(alias, field) for alias, fields in self.fields.items() for field in fields]
        if len(item) == 3 and item[1].text == "." and item[2].text == "*":
            alias = item[0].name
            if alias not in self.fields:
                raise self.fail(f"no source is called `{alias}`", item[0].at)
            return [self.starred(alias, field) for field in self.fields[alias]]
        if len(item) > 2 and item[-2].upper == "AS" and item[-1].name is not None:
            return [(item[-1].name, self.spark(item[:-2]))]
        if len(item) in (1, 3) and item[-1].name is not None and (len(item) == 1 or item[1].text == "."):
            return [(item[-1].name, self.spark(item))]
        if len(item) > 1 and _is_bare_alias(item[-2], item[-1]):
            return [(str(item[-1].name), self.spark(item[:-1]))]
        raise self.fail("an output that is not a plain column needs a name: … AS name", item[0].at)

    def starred(self, alias: str, field: str) -> tuple[str, str]:
        shared = sum(field in fields for fields in self.fields.values()) > 1
        return (f"{alias}_{field}" if shared else field), f"{spark_name(alias)}.{spark_name(field)}"

    def spark(self, tokens: list[Token]) -> str:
        """The tokens as Spark SQL: standard strings, quoted identifiers, int64 and float64 (never decimal) numbers."""
        words: list[str] = []
        for i, token in enumerate(tokens):
            before = tokens[i - 1].text if i else ""
            after = tokens[i + 1].text if i + 1 < len(tokens) else ""
            if token.kind == "string":
                inner = token.text[1:-1].replace("''", "'")
                words.append("'" + inner.replace("\\", "\\\\").replace("'", "\\'") + "'")
            elif token.kind == "number":
                whole = token.text.isdigit() and int(token.text) <= 2**63
                words.append(token.text + ("L" if whole else "D"))
            elif token.kind == "quoted":
                words.append(spark_name(str(token.name)))
            elif token.kind == "word" and (
                before == "." or after == "." or (after != "(" and self.is_field(token.text))
            ):
                words.append(spark_name(token.text))
            elif token.kind == "window":
                raise self.fail("a window stands outside FROM", token.at)
            else:
                words.append(token.text)
        return " ".join(words).replace(" . ", ".")

    def is_field(self, word: str) -> bool:
        return any(word in fields for fields in self.fields.values())

    def link(self, part: list[Token]) -> tuple[str, str] | None:
        """The two aliases of `x.a = y.b` (or of bare columns), or None."""
        sides = _split(part, "=") if any(t.text == "=" for t in part) else _split(part, "==")
        if len(sides) != 2:
            return None
        owners = [self.owner(side) for side in sides]
        if owners[0] is None or owners[1] is None or owners[0] == owners[1]:
            return None
        return owners[0], owners[1]

    def owner(self, side: list[Token]) -> str | None:
        if len(side) == 3 and side[1].text == "." and side[0].name in self.fields:
            return side[0].name
        if len(side) == 1 and side[0].name is not None:
            having = [alias for alias, fields in self.fields.items() if side[0].name in fields]
            return having[0] if len(having) == 1 else None
        return None


def _is_bare_alias(before: Token, last: Token) -> bool:
    ends_a_value = before.kind in ("word", "quoted", "number", "string") or before.text == ")"
    return last.name is not None and ends_a_value and before.upper not in _OPERATORS and last.upper not in _VALUES


def _cut(tokens: list[Token], word: str) -> tuple[list[Token], list[Token] | None]:
    """What stands before and after a word outside parentheses."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0 and token.upper == word:
            return tokens[:i], tokens[i + 1 :]
    return tokens, None


def _split(tokens: list[Token], sign: str) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0 and token.upper == sign:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _conjuncts(tokens: list[Token]) -> list[list[Token]]:
    """Terms joined by AND, parentheses around them opened. BETWEEN's AND splits a term in two, which no equality link
    survives."""
    if len(tokens) > 2 and tokens[0].text == "(" and _closes(tokens) == len(tokens) - 1:
        return _conjuncts(tokens[1:-1])
    if len(_split(tokens, "OR")) > 1:
        return []
    parts = _split(tokens, "AND")
    return [tokens] if len(parts) == 1 else [term for part in parts for term in _conjuncts(part)]


def _closes(tokens: list[Token]) -> int:
    """Where the parenthesis that opens the tokens closes."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0:
            return i
    return len(tokens)
