"""From a query's text to sqlglot's tree: SQL with one addition, `[RANGE n UNIT]` behind a stream's name.

Invariant: every error says where it is. The windows are taken out of the stream of tokens before sqlglot sees it, and
what is left keeps its positions; so a table of the tree finds its window by the position of its name, and any node
finds its line and column by the position of its leftmost token.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sqlglot import exp, parser, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokenizer_core import Token, TokenType

from schemas.errors import QueryError

UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "milliseconds": 1,
    "second": 1_000,
    "seconds": 1_000,
    "minute": 60_000,
    "minutes": 60_000,
    "hour": 3_600_000,
    "hours": 3_600_000,
    "day": 86_400_000,
    "days": 86_400_000,
}
LONGEST_WINDOW_MS = 36_500 * 86_400_000
EXAMPLE = "SELECT a.x, b.y FROM a [RANGE 10 MINUTES], b [RANGE 1 HOUR] WHERE a.id = b.id"


class _SyntaxError(ParseError):
    """A `ParseError` (sqlglot catches those while it tries alternatives) that knows its token."""

    def __init__(self, message: str, token: Token | None) -> None:
        super().__init__(message)
        self.token = token


class Cql(Dialect):
    """SQL without backslash escapes in text; names may be quoted by "…" or `…`."""

    class Tokenizer(tokens.Tokenizer):
        IDENTIFIERS = ['"', "`"]
        STRING_ESCAPES = ["'"]

    class Parser(parser.Parser):
        def raise_error(self, message: str, token: Any = None) -> None:
            raise _SyntaxError(message, token or self._curr or None)

        def expression(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
            """TRUE, FALSE and NULL are the only leaves that sqlglot leaves without a position."""
            made = super().expression(instance, *args, **kwargs)
            if isinstance(made, exp.Boolean | exp.Null) and self._prev:
                made.update_positions(self._prev)
            return made


@dataclass(frozen=True)
class Window:
    """A window and the token it belongs to."""

    length_ms: int
    start: int  # of its bracket
    owner: str


class QueryText:
    """A query's text, and the way to complain about a place in it."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def fail(self, message: str, at: exp.Expr | Token | int | None) -> QueryError:
        start = at if isinstance(at, int) else at.start if isinstance(at, Token) else _leftmost(at)
        if start is None:
            return QueryError(message, query=self.name)
        before = self.text[:start]
        column = start - (before.rfind("\n") + 1) + 1
        return QueryError(message, query=self.name, line=before.count("\n") + 1, column=column)

    def parse(self) -> tuple[exp.Select, dict[int, Window], list[Token]]:
        """The SELECT, its windows by where the name before each begins, and all tokens."""
        every = self._tokens()
        windows, rest = self._take_windows(every)
        if not rest:
            raise self.fail(f"is empty; write for example {EXAMPLE}", None)
        if rest[0].token_type is not TokenType.SELECT:
            more = (
                "WITH is not supported; write one SELECT"
                if rest[0].token_type is TokenType.WITH
                else "a query starts with SELECT"
            )
            raise self.fail(f"{more}, for example {EXAMPLE}", rest[0])
        try:
            trees = Cql().parser().parse(rest, self.text)
        except _SyntaxError as error:
            raise self._unexpected(error, rest) from None
        except RecursionError:
            raise self.fail("is nested too deeply; use fewer parentheses", rest[0]) from None
        if len(trees) != 1:
            raise self.fail("holds more than one statement; write one SELECT", _after_semicolon(rest))
        if not isinstance(trees[0], exp.Select):
            message = "UNION, INTERSECT and EXCEPT are not supported; write one SELECT, or one query for each part"
            raise self.fail(message, next((t for t in rest if t.token_type in _SET_OPERATIONS), rest[0]))
        return trees[0], windows, every

    def _tokens(self) -> list[Token]:
        try:
            return list(Cql().tokenize(self.text))
        except TokenError:
            quote = _open_quote(self.text)
            raise self.fail(f"text that begins with {self.text[quote]} is never closed", quote) from None

    def _take_windows(self, tokens: list[Token]) -> tuple[dict[int, Window], list[Token]]:
        windows: dict[int, Window] = {}
        rest: list[Token] = []
        i = 0
        while i < len(tokens):
            if tokens[i].token_type is not TokenType.L_BRACKET:
                rest.append(tokens[i])
                i += 1
                continue
            inside = tokens[i + 1 : next((j for j in range(i, len(tokens)) if tokens[j].text == "]"), len(tokens))]
            length_ms = self._window_ms(tokens[i], inside, closed=i + 1 + len(inside) < len(tokens))
            if not rest or rest[-1].start in windows:
                raise self.fail("a window stands behind a stream's name, as in orders [RANGE 10 MINUTES]", tokens[i])
            windows[rest[-1].start] = Window(length_ms, tokens[i].start, rest[-1].text)
            i += len(inside) + 2
        return windows, rest

    def _window_ms(self, bracket: Token, inside: list[Token], closed: bool) -> int:
        words = [token.text for token in inside]
        form = "write a window as [RANGE 10 MINUTES]; units are ms, seconds, minutes, hours, days"
        if not closed:
            raise self.fail(f"`[` is never closed; {form}", bracket)
        if not words or words[0].upper() != "RANGE":
            raise self.fail(f"[{' '.join(words)}] is not a window; {form}", bracket)
        number, unit = "".join(words[1:-1]), words[-1]
        if not re.fullmatch(r"\d+\.?\d*|\.\d+", number):
            raise self.fail(f"[{' '.join(words)}] is not a window; {form}", inside[1] if len(inside) > 1 else bracket)
        scale = UNITS_MS.get(unit.lower())
        if scale is None:
            raise self.fail(f"unknown unit `{unit}` of a window; {form}", inside[-1])
        length = Decimal(number) * scale
        if length != int(length):
            raise self.fail(f"a window of {number} {unit} is not a whole number of milliseconds", inside[1])
        if length > LONGEST_WINDOW_MS:
            raise self.fail("a window may be at most 36500 days", inside[1])
        return int(length)

    def _unexpected(self, error: _SyntaxError, tokens: list[Token]) -> QueryError:
        token = error.token
        if token is None:
            return self.fail(f"ends too early; write for example {EXAMPLE}", tokens[-1])
        return self.fail(f"`{token.text}` was not expected here; write for example {EXAMPLE}", token)


_SET_OPERATIONS = (TokenType.UNION, TokenType.INTERSECT, TokenType.EXCEPT)


def _leftmost(node: exp.Expr | None) -> int | None:
    if node is None:
        return None
    starts = [found.meta["start"] for found in node.walk() if "start" in found.meta]
    return min(starts, default=None)


def _after_semicolon(tokens: list[Token]) -> Token:
    end = next(i for i, token in enumerate(tokens) if token.token_type is TokenType.SEMICOLON)
    return tokens[min(end + 1, len(tokens) - 1)]


def _open_quote(text: str) -> int:
    """Where the quote that is never closed stands."""
    open_at, quote, i = 0, "", 0
    while i < len(text):
        if quote and text.startswith(quote * 2, i):
            i += 1  # a doubled quote is one quote inside the text
        elif quote:
            quote = "" if text[i] == quote else quote
        elif text.startswith("--", i):
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
        elif text[i] in "'\"`":
            open_at, quote = i, text[i]
        i += 1
    return open_at
