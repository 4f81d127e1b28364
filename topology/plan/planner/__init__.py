"""The planner: from a query and what is known about its streams to the tree that joins them.

Invariant: the planner chooses among right answers only; every tree gives the same result set.
"""

from typing import TYPE_CHECKING

from topology.plan.planner.order_joins import cheapest_order, default_order
from topology.plan.planner.statistics import Statistics
from topology.query.query import Query

if TYPE_CHECKING:
    from topology.plan.plan import Tree

__all__ = ["Statistics", "choose_tree"]


def choose_tree(query: Query, statistics: Statistics | None = None) -> "Tree":
    """The cheapest tree by the statistics; without any, left-deep in FROM order along the equalities."""
    return default_order(query) if statistics is None else cheapest_order(query, statistics)
