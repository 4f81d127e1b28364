"""The trees that answer a query: which node joins which inputs on which key, and what follows from the tree alone
(which sub-tuples an edge may speak of: `shapes`; which streams a node is told of: `heralds`); the planner and its cost
model.

Knows the query. `plan.build_plan` is the way in.
"""
