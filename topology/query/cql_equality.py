"""What equalities imply: classes of equal columns, selections that follow from them, and whether all sources hang
together.

Invariant: everything added here already follows from what was written, so the result set is unchanged; it only lets
joins and filters happen earlier. `RULES` are small and independent: facts in, facts out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from topology.query.expression import Column, Compare, Expression, Literal

Classes = tuple[tuple[Column, ...], ...]


@dataclass(frozen=True)
class Facts:
    """The WHERE clause taken apart. `equal` is any set of groups until `close_equalities` has joined them."""

    equal: Classes
    selections: Mapping[str, tuple[Expression, ...]]  # one entry for every alias

    def select(self, alias: str, *more: Expression) -> "Facts":
        held = self.selections[alias]
        new = tuple(m for m in more if m not in held and _turned(m) not in held)
        return replace(self, selections={**self.selections, alias: held + new})


def close_equalities(facts: Facts) -> Facts:
    """Groups that share a column become one class: a.x = b.x AND b.x = c.x puts a.x, b.x and c.x together."""
    leader: dict[Column, Column] = {}

    def find(column: Column) -> Column:
        while leader.setdefault(column, column) != column:
            column = leader[column]
        return column

    for group in facts.equal:
        for one, other in pairwise(group):
            first, second = sorted((find(one), find(other)))
            leader[second] = first
    classes: dict[Column, list[Column]] = {}
    for column in sorted(leader):
        classes.setdefault(find(column), []).append(column)
    return replace(facts, equal=tuple(sorted(tuple(members) for members in classes.values())))


def select_within_source(facts: Facts) -> Facts:
    """A class that holds two columns of one source filters that source: a.x = b.z AND a.y = b.z gives a.x = a.y."""
    for members in facts.equal:
        for one, other in pairwise(members):
            if one.alias == other.alias:
                facts = facts.select(one.alias, Compare("=", one, other))
    return facts


def spread_constants(facts: Facts) -> Facts:
    """What one column of a class must equal, all must: a.x = b.x AND a.x = 5 gives b.x = 5."""
    for members in facts.equal:
        constants = [
            literal
            for alias in dict.fromkeys(column.alias for column in members)
            for column, literal in map(_constant, facts.selections[alias])
            if column in members and literal is not None
        ]
        for column in members:
            for literal in dict.fromkeys(constants):
                facts = facts.select(column.alias, Compare("=", column, literal))
    return facts


def drop_inner_classes(facts: Facts) -> Facts:
    """A class within one source joins nothing; its selection has been added already."""
    return replace(facts, equal=tuple(c for c in facts.equal if len({column.alias for column in c}) > 1))


RULES: tuple[Callable[[Facts], Facts], ...] = (
    close_equalities,
    select_within_source,
    spread_constants,
    drop_inner_classes,
)


def infer(facts: Facts) -> Facts:
    for rule in RULES:
        facts = rule(facts)
    return facts


def components(aliases: Iterable[str], equal: Classes) -> list[tuple[str, ...]]:
    """The groups of sources that equalities hold together, each in the given order.

    >>> components("abc", ((Column("a", "x"), Column("c", "x")),))
    [('a', 'c'), ('b',)]
    """
    names = tuple(aliases)
    group = {alias: i for i, alias in enumerate(names)}
    for members in equal:
        joined = {group[column.alias] for column in members}
        group = {alias: min(joined) if g in joined else g for alias, g in group.items()}
    return [tuple(a for a in names if group[a] == g) for g in sorted(set(group.values()))]


def _constant(condition: Expression) -> tuple[Column | None, Literal | None]:
    match condition:
        case Compare("=", Column() as column, Literal() as literal) | Compare(
            "=", Literal() as literal, Column() as column
        ):
            return column, literal
    return None, None


def _turned(condition: Expression) -> Expression:
    return (
        Compare("=", condition.right, condition.left)
        if isinstance(condition, Compare) and condition.op == "="
        else condition
    )
