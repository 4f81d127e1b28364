"""What is asked: a query over 2 to 10 sources, resolved and type-checked, as a frozen value.

Invariant: a `Query` that exists is answerable: every column is resolved to a source and a type, the equalities are
closed under transitivity, and the sources are connected by equalities.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.mesh import FieldType
from topology.query.expression import Column, Expression

ALWAYS_WINDOW_MS = 1 << 60  # the window of a table's rows: its end is behind that of any event


@dataclass(frozen=True)
class Source:
    """One entry of FROM: a stream under an alias, with its window, or a static table. The same stream may stand twice
    (self join)."""

    alias: str
    stream: str
    window_ms: int
    table: str | None = None  # the key field, if it is a table; then the window has no end

    @property
    def is_table(self) -> bool:
        return self.table is not None


@dataclass(frozen=True)
class Output:
    """One selected column."""

    name: str
    expression: Expression
    type: FieldType


@dataclass(frozen=True)
class Query:
    name: str
    text: str
    sources: tuple[Source, ...]  # in FROM order; result ids follow it
    outputs: tuple[Output, ...]
    equal: tuple[
        tuple[Column, ...], ...
    ]  # classes of columns that must be equal, each sorted, size >= 2, transitively closed
    selections: Mapping[
        str, tuple[Expression, ...]
    ]  # alias -> conjuncts over that source alone (col = col of one source included)
    residuals: tuple[Expression, ...]  # conjuncts over several sources that are not column equalities
    types: Mapping[Column, FieldType]  # every field of every source

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(source.alias for source in self.sources)

    def is_static(self, aliases: Iterable[str]) -> bool:
        """Whether rows of these sources hold nothing but parts of tables: then there is an end to them."""
        return all(self.source(alias).is_table for alias in aliases)

    def source(self, alias: str) -> Source:
        return next(source for source in self.sources if source.alias == alias)
