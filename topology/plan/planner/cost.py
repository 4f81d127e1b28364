"""The cost model: how many rows a set of joined sources makes a second, and how many of them are valid at a time.

Invariant: an estimate depends on the *set* of sources alone, not on the tree that joins it, so that dynamic programming
over sets finds the cheapest tree.

A source of rate r (events/s, after its selections) and window w (s) has r*w events valid at a time; a static table has
rate 0 and holds all its rows. A combination of one event per source is valid at a moment iff each event is, so of a set
S

    rows_held(S)  = f(S) * product of (r_i * w_i)
    rows_per_s(S) = f(S) * sum over i of (r_i * product of the other (r_j * w_j))      i brings the newest part

where f(S) is the share of combinations that the predicates within S keep: for each class of equal columns 1/d for every
member's distinct count d but the smallest, and 1/3 for each residual. A selection keeps 1/d if it is `column = value`
(its class then matches all that is left), 1/3 otherwise. A join costs what it takes in and puts out, rows_per_s, plus
what it holds: `HELD_ROW_COST` a row, because a row in state is merged, probed and purged while it is there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from topology.plan.planner.statistics import Statistics
from topology.query.expression import Column, Compare, Expression, Literal, columns_of
from topology.query.query import Query, Source

OTHER_PREDICATE_KEEPS = 1 / 3
HELD_ROW_COST = 0.001
SHORTEST_WINDOW_S = 0.001  # a window of zero still joins what has the same millisecond


@dataclass(frozen=True)
class Estimate:
    rows_per_s: float
    rows_held: float

    @property
    def cost(self) -> float:
        """Of making these rows and holding them at the next join."""
        return self.rows_per_s + HELD_ROW_COST * self.rows_held


def estimate(query: Query, aliases: Collection[str], statistics: Statistics) -> Estimate:
    """What the join of these sources is expected to give."""
    sources = [source for source in query.sources if source.alias in aliases]
    rates = [_rate(query, source, statistics) for source in sources]
    held = [_held(query, source, rate, statistics) for rate, source in zip(rates, sources, strict=True)]
    share = _share(query, {source.alias for source in sources}, statistics)
    newest = [rate * prod(held[:i] + held[i + 1 :]) for i, rate in enumerate(rates)]
    return Estimate(rows_per_s=share * sum(newest), rows_held=share * prod(held))


def _held(query: Query, source: Source, rate: float, statistics: Statistics) -> float:
    if source.is_table:
        return statistics.table_rows(source.stream, str(source.table)) * _keeps(query, source, statistics)
    return rate * max(source.window_ms / 1_000, SHORTEST_WINDOW_S)


def _rate(query: Query, source: Source, statistics: Statistics) -> float:
    return 0.0 if source.is_table else statistics.rate(source.stream) * _keeps(query, source, statistics)


def _keeps(query: Query, source: Source, statistics: Statistics) -> float:
    keeps = (_selection_keeps(query, condition, statistics) for condition in query.selections.get(source.alias, ()))
    return prod(keeps)


def _selection_keeps(query: Query, condition: Expression, statistics: Statistics) -> float:
    column = _pinned(condition)
    return OTHER_PREDICATE_KEEPS if column is None else 1 / _distinct(query, column, statistics)


def _pinned(condition: Expression) -> Column | None:
    """The column that the condition sets to one value."""
    match condition:
        case Compare("=", Column() as column, Literal()) | Compare("=", Literal(), Column() as column):
            return column
    return None


def _share(query: Query, aliases: Collection[str], statistics: Statistics) -> float:
    share = 1.0
    pinned = {_pinned(condition) for conditions in query.selections.values() for condition in conditions}
    for members in query.equal:
        if pinned.intersection(members):
            continue
        # Two columns of one source in a class are a selection of that source; they join once.
        counts: dict[str, float] = {}
        for column in members:
            if column.alias in aliases:
                counts[column.alias] = max(counts.get(column.alias, 1.0), _distinct(query, column, statistics))
        share /= prod(sorted(counts.values())[1:])
    met = (r for r in query.residuals if {column.alias for column in columns_of(r)} <= set(aliases))
    return share * prod(OTHER_PREDICATE_KEEPS for _ in met)


def _distinct(query: Query, column: Column, statistics: Statistics) -> float:
    source = query.source(column.alias)
    if source.is_table:
        return statistics.distinct.get(f"{source.stream}.{column.name}") or statistics.table_rows(
            source.stream, str(source.table)
        )
    return statistics.distinct_values(source.stream, column.name, source.window_ms)
