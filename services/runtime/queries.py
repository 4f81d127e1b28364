"""From a mesh to what its queries need: parsed queries, plans, topics and the names of its services.

Invariant: every command and service derives these from the mesh file alone, so they agree without talking to each
other.
"""

from dataclasses import dataclass

from schemas.errors import PlanError
from schemas.mesh import Mesh
from schemas.topics import Topic, mesh_topics
from topology.plan.plan import Plan
from topology.query.query import Query


@dataclass(frozen=True)
class Service:
    """One process of the mesh. `name` is what its log, its reports and messages about it are called."""

    name: str  # controller, ingest, <query>.j1, <query>.sink
    module: str
    query: str | None = None
    node: str | None = None


def parse_queries(mesh: Mesh) -> dict[str, Query]:
    from topology.query.cql import parse_query  # sqlglot takes a while to import

    return {name: parse_query(name, text, mesh.streams) for name, text in mesh.queries.items()}


def keep_ms(mesh: Mesh, queries: dict[str, Query]) -> int:
    """How long an internal topic must keep what state may have to be rebuilt from: longest window + lateness."""
    windows = [source.window_ms for query in queries.values() for source in query.sources if not source.is_table]
    used = {source.stream for query in queries.values() for source in query.sources}
    return max(windows, default=0) + max((mesh.streams[name].lateness_ms for name in used), default=0)


def topics_of(mesh: Mesh, queries: dict[str, Query]) -> list[Topic]:
    nodes = {name: len(plan_of(mesh, query).nodes) for name, query in queries.items()}
    return mesh_topics(mesh, nodes, keep_ms(mesh, queries))


def services_of(mesh: Mesh, queries: dict[str, Query]) -> list[Service]:
    """Every process of the mesh, in the order they are started. n sources mean n-1 join nodes, or fewer with an M-Join
    in the plan."""
    services = [Service("controller", "services.controller"), Service("ingest", "services.ingest")]
    for name, query in queries.items():
        for node in plan_of(mesh, query).nodes:
            services.append(Service(f"{name}.{node.id}", "services.join_node", name, node.id))
        services.append(Service(f"{name}.sink", "services.sink", name))
    return services


def streams_used(queries: dict[str, Query]) -> list[str]:
    """The streams that some query reads, in order of first use."""
    return list(dict.fromkeys(source.stream for query in queries.values() for source in query.sources))


def plan_of(mesh: Mesh, query: Query) -> Plan:
    """The plan that the mesh file pins, else the planner's default."""
    from topology.plan.plan import build_plan, parse_tree, tree_text
    from topology.plan.planner import choose_tree

    pinned = mesh.plans.get(query.name)
    plan = build_plan(query, parse_tree(pinned, query) if pinned is not None else choose_tree(query))
    if mesh.routing.get(query.name) == "eddy" and not any(node.is_flat for node in plan.nodes):
        raise PlanError(
            f"routing of {query.name} is eddy, but its plan {tree_text(plan.tree)} joins two inputs in every node;"
            " write `plans:` with three or more inputs in one pair of parentheses, such as"
            f" ({' '.join(query.aliases)}), or leave `routing` out"
        )
    return plan


def explain(mesh: Mesh, query: Query) -> str:
    from topology.plan.heralds import heralds_of
    from topology.plan.plan import describe

    plan = plan_of(mesh, query)
    text = describe(plan, mesh.name)
    if mesh.is_heralded(query.name):
        told = [f"{node.id:<14}  {herald}\n" for node in plan.nodes for herald in heralds_of(plan, node)]
        text += "\nheralds: what each join is told of streams that its rows meet further down\n" + (
            "".join(f"  {line}" for line in told) or "  none\n"
        )
    return text
