"""The frozen tree that answers a query: which node joins which inputs, on which key, and who gets its output.

Invariant: a `Plan` is a function of (query, tree) alone, so a control message carries the query's text and the tree's
text and every service derives the same plan. Nodes are named j1, j2, … in post-order of the tree; a node's inputs are
sources (aliases) or earlier nodes. A node of two inputs is a binary join, one of more an M-Join; across all inputs of a
node at least one class of equal columns meets: its key, by which rows find their partition (no cross products).

Rows on an edge carry, per part (alias): `#alias` the part's id (partition << 48 | offset, int64) and `@alias` its
event time; `alias.name` for each column still needed further down; and `#:key`, the hash of the receiver's key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from schemas import topics
from schemas.errors import PlanError
from schemas.mesh import did_you_mean
from topology.plan.planner.cost import estimate
from topology.plan.planner.statistics import Statistics
from topology.query.expression import Column, Expression, columns_of, to_text
from topology.query.query import Query

Tree = str | tuple["Tree", ...]  # an alias, or two or more trees that one node joins
Join = tuple[Tree, ...]


@dataclass(frozen=True)
class Input:
    """One input of a node: a side, if the node has two."""

    name: str  # an alias, or the id of the node that feeds it
    aliases: tuple[str, ...]  # the parts its rows hold, in FROM order
    columns: tuple[Column, ...]  # the columns its rows carry, sorted
    key: tuple[Column, ...]  # this side's join key; same length and order as the other sides'
    linked: tuple[Column, ...] = ()  # of an M-Join: columns that equal those of some other inputs, but not of all

    @property
    def is_source(self) -> bool:
        return len(self.aliases) == 1


@dataclass(frozen=True)
class Node:
    id: str  # j1, j2, …
    aliases: tuple[str, ...]  # the parts its output holds, in FROM order
    columns: tuple[Column, ...]  # the columns its output carries, sorted
    inputs: tuple[Input, ...]  # two, or more in an M-Join
    residuals: tuple[Expression, ...]  # predicates whose columns first meet here
    target: str  # the node its output goes to, or "out" for the root
    target_side: int  # the target's input that it feeds (0 for the root)
    equal: tuple[
        tuple[Column, ...], ...
    ] = ()  # of an M-Join: equalities beside the key, one column for each input that has one

    @property
    def is_flat(self) -> bool:
        """Whether it is an M-Join."""
        return len(self.inputs) > 2

    @property
    def left(self) -> Input:
        return self.inputs[0]

    @property
    def right(self) -> Input:
        assert not self.is_flat, "an M-Join has no right side"
        return self.inputs[1]


@dataclass(frozen=True)
class Route:
    """Where a source's rows go from ingest."""

    alias: str
    node: str
    side: int
    key: tuple[Column, ...]
    columns: tuple[Column, ...]
    selection: tuple[Expression, ...]
    non_null: tuple[Column, ...]  # every column of the alias in any equality: a null or NaN there joins nothing


@dataclass(frozen=True)
class Plan:
    query: Query
    tree: Tree
    nodes: tuple[Node, ...]  # post-order; the last is the root
    routes: tuple[Route, ...]  # one per source, in FROM order

    @property
    def root(self) -> Node:
        return self.nodes[-1]

    def node(self, id: str) -> Node:
        return next(node for node in self.nodes if node.id == id)


def tree_text(tree: Tree) -> str:
    """
    >>> tree_text((("a", "b"), "c", "d"))
    '((a b) c d)'
    """
    return tree if isinstance(tree, str) else f"({' '.join(map(tree_text, tree))})"


def tree_aliases(tree: Tree) -> tuple[str, ...]:
    """The sources of a tree, left to right."""
    return (tree,) if isinstance(tree, str) else tuple(alias for part in tree for alias in tree_aliases(part))


def parse_tree(text: str, query: Query) -> Tree:
    """The tree that a text such as `((orders payments) shipments)` stands for; more than two inputs in one pair of
    parentheses are an M-Join. Names are aliases or, where only one source has it, the name of a stream."""
    words = re.findall(r"[()]|[^\s(),]+", text)
    if not words:
        raise _refuse(query, text, f"is empty; write for example {_example(query)}")
    tree, rest = _read_tree(words, text, query)
    if rest:
        raise _refuse(query, text, f"goes on with `{rest[0]}` behind its end; write for example {_example(query)}")
    if isinstance(tree, str):
        raise _refuse(query, text, f"joins nothing; write for example {_example(query)}")
    return tree


def _read_tree(words: list[str], text: str, query: Query) -> tuple[Tree, list[str]]:
    if not words:
        raise _refuse(query, text, f"ends too early: a `)` or a name is missing; write for example {_example(query)}")
    word, rest = words[0], words[1:]
    if word == ")":
        raise _refuse(query, text, f"has a `)` where a name was expected; write for example {_example(query)}")
    if word != "(":
        return _named(word, text, query), rest
    parts: list[Tree] = []
    while rest[:1] != [")"] or len(parts) < 2:
        part, rest = _read_tree(rest, text, query)
        parts.append(part)
    return tuple(parts), rest[1:]


def _named(word: str, text: str, query: Query) -> str:
    if word in query.aliases:
        return word
    same = [source.alias for source in query.sources if source.stream == word]
    if len(same) > 1:
        raise _refuse(
            query, text, f"names stream {word}, which stands in FROM as {' and '.join(same)}; use those names"
        )
    if not same:
        choices = dict.fromkeys((*query.aliases, *(source.stream for source in query.sources)))
        raise _refuse(query, text, f"names `{word}`, which is no source of the query{did_you_mean(word, choices)}")
    return same[0]


def _example(query: Query) -> str:
    tree: Tree = query.aliases[0]
    for alias in query.aliases[1:]:
        tree = (tree, alias)
    return tree_text(tree)


def _refuse(query: Query, text: str, why: str) -> PlanError:
    return PlanError(f"plan of {query.name}: `{text}` {why}")


def build_plan(query: Query, tree: Tree) -> Plan:
    """The one plan for this query and this tree."""
    _check_sources(query, tree)
    joins = list(_post_order(tree))
    ids = {join: f"j{i}" for i, join in enumerate(joins, 1)}
    parents = {side: (join, number) for join in joins for number, side in enumerate(join)}
    nodes: dict[str, Node] = {}
    # From the root down, because what a node must pass on is what its receiver reads.
    for join in reversed(joins):
        parent = parents.get(join)
        target = nodes[ids[parent[0]]] if parent else None
        side = parent[1] if parent else 0
        columns = (
            target.inputs[side].columns
            if target
            else _sorted(c for o in query.outputs for c in columns_of(o.expression))
        )
        nodes[ids[join]] = _node(query, join, ids, columns, target.id if target else "out", side)
    ordered = tuple(nodes[ids[join]] for join in joins)
    return Plan(query, tree, ordered, tuple(_route(query, alias, ordered) for alias in query.aliases))


def _check_sources(query: Query, tree: Tree) -> None:
    held = tree_aliases(tree)
    if isinstance(tree, str):
        raise _refuse(query, tree, f"joins nothing; write for example {_example(query)}")
    for alias in held:
        if alias not in query.aliases:
            raise _refuse(query, tree_text(tree), f"names `{alias}`, which is no source of the query")
        if held.count(alias) > 1:
            raise _refuse(query, tree_text(tree), f"names {alias} twice; each source is joined once")
    missing = [alias for alias in query.aliases if alias not in held]
    if missing:
        raise _refuse(query, tree_text(tree), f"leaves out {', '.join(missing)}; each source must be joined once")


def _post_order(tree: Tree) -> Iterator[Join]:
    if not isinstance(tree, str):
        for part in tree:
            yield from _post_order(part)
        yield tree


def _node(
    query: Query, join: Join, ids: Mapping[Join, str], columns: tuple[Column, ...], target: str, side: int
) -> Node:
    sides = tuple(frozenset(tree_aliases(part)) for part in join)
    keys, equal = _equalities(query, sides)
    if not keys[0]:
        raise _refuse(query, tree_text(join), _no_key(query, join, sides))
    residuals = tuple(r for r in query.residuals if _meets_here({c.alias for c in columns_of(r)}, sides))
    read = (*columns, *(c for r in residuals for c in columns_of(r)))
    inputs = []
    for part, held, key in zip(join, sides, keys, strict=True):
        linked = _sorted(c for members in equal for c in members if c.alias in held)
        inputs.append(
            Input(
                name=part if isinstance(part, str) else ids[part],
                aliases=tuple(a for a in query.aliases if a in held),
                columns=_sorted((*key, *linked, *(c for c in read if c.alias in held))),
                key=key,
                linked=linked,
            )
        )
    aliases = tuple(a for a in query.aliases if any(a in held for held in sides))
    return Node(ids[join], aliases, columns, tuple(inputs), residuals, target, side, equal)


def _equalities(
    query: Query, sides: tuple[frozenset[str], ...]
) -> tuple[list[tuple[Column, ...]], tuple[tuple[Column, ...], ...]]:
    """The key of each side: one column for each class that has members on all, the smallest, as all members are equal
    anyway. And the classes that have members on several sides, but not on all."""
    keys, equal = [], []
    for members in query.equal:
        found = [min(mine) for held in sides if (mine := [column for column in members if column.alias in held])]
        if len(found) == len(sides):
            keys.append(found)
        elif len(found) > 1:
            equal.append(tuple(found))
    return [tuple(key[i] for key in keys) for i in range(len(sides))], tuple(equal)


def _no_key(query: Query, join: Join, sides: tuple[frozenset[str], ...]) -> str:
    if len(join) == 2:
        left, right = (_listed(query, s) for s in sides)
        return f"joins {{{left}}} with {{{right}}}, but no equality links them (a cross product); order it otherwise"
    tree, held, waiting = join[0], set(sides[0]), list(zip(join[1:], sides[1:], strict=True))
    while waiting:
        linked = {c.alias for members in query.equal if any(c.alias in held for c in members) for c in members}
        at = next((i for i, (_, side) in enumerate(waiting) if side & linked), 0)
        part, side = waiting.pop(at)
        tree, held = (tree, part), held | side
    return (
        f"joins {len(join)} inputs in one node, but no column of each equals one of every other, so their rows would"
        f" not meet in one partition; write {tree_text(tree)} instead"
    )


def _meets_here(aliases: set[str], sides: tuple[frozenset[str], ...]) -> bool:
    return aliases <= frozenset().union(*sides) and not any(aliases <= held for held in sides)


def _route(query: Query, alias: str, nodes: tuple[Node, ...]) -> Route:
    node, side, edge = next((n, i, e) for n in nodes for i, e in enumerate(n.inputs) if e.name == alias and e.is_source)
    non_null = _sorted(column for members in query.equal for column in members if column.alias == alias)
    return Route(alias, node.id, side, edge.key, edge.columns, query.selections.get(alias, ()), non_null)


def _sorted(columns: Iterable[Column]) -> tuple[Column, ...]:
    return tuple(sorted(set(columns)))


def _listed(query: Query, aliases: Iterable[str]) -> str:
    held = set(aliases)
    return ", ".join(alias for alias in query.aliases if alias in held)


def describe(plan: Plan, mesh: str = "mesh", statistics: Statistics | None = None) -> str:
    """The plan for people: the tree, then for each node its inputs, key, residuals, topics and the state to expect."""
    lines = [f"plan of {plan.query.name}: {tree_text(plan.tree)}", ""]
    lines += [*_drawn(plan, plan.root, "", ""), ""]
    for route in plan.routes:
        source = plan.query.source(route.alias)
        valid = f"static table by {source.table}" if source.is_table else f"window {duration_text(source.window_ms)}"
        lines.append(f"{source.stream} as {source.alias} -> {route.node}, {valid}")
        lines += [f"  keeps only    {to_text(condition)}" for condition in route.selection]
        lines.append(f"  not null      {', '.join(map(str, route.non_null))}")
    for node in plan.nodes:
        lines += ["", *_described(plan, node, mesh, statistics)]
    return "\n".join(lines) + "\n"


def _drawn(plan: Plan, node: Node, first: str, rest: str) -> list[str]:
    lines = [f"{first}{node.id}: {_key_text(node)}"]
    for edge in node.inputs:
        branch, indent = ("└─ ", "   ") if edge is node.inputs[-1] else ("├─ ", "│  ")
        if edge.is_source:
            stream = plan.query.source(edge.name).stream
            lines.append(f"{rest}{branch}{edge.name}" + (f" ({stream})" if stream != edge.name else ""))
        else:
            lines += _drawn(plan, plan.node(edge.name), rest + branch, rest + indent)
    return lines


def _key_text(node: Node) -> str:
    return " AND ".join(
        " = ".join(map(str, members)) for members in zip(*(edge.key for edge in node.inputs), strict=True)
    )


def _described(plan: Plan, node: Node, mesh: str, statistics: Statistics | None) -> list[str]:
    query = plan.query
    target = (
        topics.query_out(mesh, query.name) if node.target == "out" else topics.node_in(mesh, query.name, node.target)
    )
    names = [edge.name for edge in node.inputs]
    joins = f"{node.id} joins {', '.join(names[:-1])} {'with' if len(names) == 2 else 'and'} {names[-1]}" + (
        " at once (M-Join)" if node.is_flat else ""
    )
    lines = [joins, f"  key           {_key_text(node)}"]
    lines += [f"  also          {' = '.join(map(str, members))}" for members in node.equal]
    lines += [f"  also          {to_text(residual)}" for residual in node.residuals]
    lines.append(f"  reads         {topics.node_in(mesh, query.name, node.id)}")
    lines.append(f"  feedback      {topics.node_feedback(mesh, query.name, node.id)}")
    lines.append(f"  writes        {target}")
    lines.append(f"  passes on     {', '.join(map(str, node.columns)) or 'ids and times only'}")
    for side, edge in enumerate(node.inputs):
        lines.append(f"  {'state ' + side_name(node, side):<14}{_state_text(query, edge, statistics)}")
    if statistics is not None:
        lines.append(f"  output        about {estimate(query, node.aliases, statistics).rows_per_s:,.4g} rows/s")
    return lines


def _state_text(query: Query, edge: Input, statistics: Statistics | None) -> str:
    window = duration_text(min(query.source(alias).window_ms for alias in edge.aliases))
    if query.is_static(edge.aliases):
        words = f"static table {edge.name}, whole" if edge.is_source else f"static: all rows of {edge.name}"
    else:
        words = (
            f"one window of {edge.name} ({window})"
            if edge.is_source
            else f"rows of {edge.name} still valid (at most {window})"
        )
    return (
        words
        if statistics is None
        else f"about {estimate(query, edge.aliases, statistics).rows_held:,.0f} rows: {words}"
    )


def side_name(node: Node, side: int) -> str:
    """What people call an input: left and right, or its place in an M-Join."""
    return str(side + 1) if node.is_flat else ("left", "right")[side]


def duration_text(ms: int) -> str:
    """
    >>> duration_text(600_000), duration_text(1_500), duration_text(0), duration_text(5_400_000)
    ('10 min', '1500 ms', '0 ms', '90 min')
    """
    for unit, scale in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms and ms % scale == 0:
            return f"{ms // scale} {unit}"
    return f"{ms} ms"
