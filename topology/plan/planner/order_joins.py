"""Which sources are joined first: the cheapest tree that the statistics know of, or a plain default without any.

Invariant: every tree chosen joins each source once and never by a cross product; the choice is a function of query and
statistics alone (ties go to the default's order), so every service that plans the same query gets the same tree.
"""

from itertools import combinations
from typing import TYPE_CHECKING

from topology.plan.planner.cost import estimate
from topology.plan.planner.statistics import Statistics
from topology.query.query import Query

if TYPE_CHECKING:  # a plan is described with the planner's estimates, so at run time the import goes the other way
    from topology.plan.plan import Tree


def default_order(query: Query) -> "Tree":
    """Left-deep in FROM order, always taking the next source that an equality links with what is joined already."""
    waiting = list(query.aliases)
    tree: Tree = waiting.pop(0)
    joined = frozenset(query.aliases[:1])
    while waiting:
        following = next(alias for alias in waiting if _linked(query, joined, frozenset((alias,))))
        waiting.remove(following)
        tree, joined = (tree, following), joined | {following}
    return tree


def cheapest_order(query: Query, statistics: Statistics) -> "Tree":
    """Dynamic programming over connected sets of sources: the best tree of a set is made of best trees of its halves.

    The cost of a tree is the sum over its inner results of `Estimate.cost`; sources and final result cost the same in
    every tree. Left-deep and bushy trees compete alike.
    """
    place = {alias: i for i, alias in enumerate(query.aliases)}
    best: dict[frozenset[str], tuple[float, tuple[int, ...], Tree]] = {
        frozenset((alias,)): (0.0, (i,), alias) for alias, i in place.items()
    }
    for size in range(2, len(place) + 1):
        for names in combinations(query.aliases, size):
            whole = frozenset(names)
            own = estimate(query, whole, statistics).cost if size < len(place) else 0.0
            for left, right in _halves(names):
                if left not in best or right not in best or not _linked(query, left, right):
                    continue
                cost = best[left][0] + best[right][0] + own
                # Rounded, so that equal costs are equal whatever the order of addition; then the smaller right side
                # (left-deep), then FROM order.
                rank = (
                    float(f"{cost:.9g}"),
                    (len(right), *best[left][1], *best[right][1]),
                    (best[left][2], best[right][2]),
                )
                if whole not in best or rank[:2] < best[whole][:2]:
                    best[whole] = rank
    return best[frozenset(query.aliases)][2]


def _halves(names: tuple[str, ...]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Every split in two; the left half has the larger part, or the first source if they are equal."""
    splits = []
    for size in range(1, len(names) // 2 + 1):
        for small in combinations(names, size):
            rest = tuple(name for name in names if name not in small)
            if len(rest) > size or rest[0] == names[0]:
                splits.append((frozenset(rest), frozenset(small)))
    return splits


def _linked(query: Query, left: frozenset[str], right: frozenset[str]) -> bool:
    for members in query.equal:
        held = {column.alias for column in members}
        if held & left and held & right:
            return True
    return False
