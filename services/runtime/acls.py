"""Who may do what at Kafka: the least that each service of a mesh needs, as a list.

Invariant: the list follows from the mesh file alone, and a mesh runs with just these rights on a broker that refuses
all others. Source topics are read only; the control topic is written by the controller, and by the administrator who
changes a plan.
"""

from collections.abc import Iterator

from schemas import topics
from schemas.mesh import ADMIN, Mesh
from services.runtime.kafka import AUDIT_READER, CONTROL_READER, REPORT_READER, TAIL, admin, reach
from services.runtime.queries import parse_queries, plan_of, streams_used, topics_of
from services.runtime.security.rights import Right, require
from services.runtime.security.settings import is_secured
from topology.plan.plan import Node, Plan


def rights_of(mesh: Mesh) -> dict[str, list[Right]]:
    """Service (as `${service}` calls it) -> what it may do."""
    queries = parse_queries(mesh)
    plans = {name: plan_of(mesh, query) for name, query in queries.items()}
    sources = list(dict.fromkeys(mesh.streams[name].topic for name in streams_used(queries)))
    found = {
        ADMIN: [*_admin(mesh, sources, [topic.name for topic in topics_of(mesh, queries)])],
        "controller": [*_controller(mesh, sources)],
        "ingest": [*_ingest(mesh, sources, plans)],
    }
    for name, plan in plans.items():
        for node in plan.nodes:
            found[f"{name}-{node.id}"] = [*_node(mesh, name, node)]
        found[f"{name}-sink"] = [*_sink(mesh, name)]
    found["audit"] = [*_audit(mesh, sources, list(plans))]
    return found


def check_rights(mesh: Mesh) -> None:
    """Whether Kafka grants the asking service what it needs; where everybody may do everything, nothing is asked."""
    if is_secured(mesh):
        client = admin(mesh)
        reach(mesh, client)  # a wrong password is said here
        require(mesh, rights_of(mesh).get(mesh.service, []), client)


def _topic(name: str, *operations: str) -> Right:
    return Right("topic", name, operations)  # type: ignore[arg-type]


def _group(mesh: Mesh, name: str, operation: str) -> Right:
    return Right("group", f"{mesh.name}.{name}", (operation,))  # type: ignore[arg-type]


def _admin(mesh: Mesh, sources: list[str], own: list[str]) -> Iterator[Right]:
    for topic in sources:
        yield _topic(topic, "Describe", "DescribeConfigs")
    for topic in own:
        more = ("Read", "Write") if topic == topics.control(mesh.name) else ()
        read = ("Read",) if topic == topics.report(mesh.name) or topic.endswith(".feedback") else ()
        yield _topic(topic, "Create", "Describe", "DescribeConfigs", *more, *read)
    for group in (CONTROL_READER, REPORT_READER, TAIL):
        yield _group(mesh, group, "Describe")


def _common(mesh: Mesh) -> Iterator[Right]:
    yield _topic(topics.control(mesh.name), "Read")
    yield _group(mesh, CONTROL_READER, "Describe")
    yield _topic(topics.report(mesh.name), "Write")


def _controller(mesh: Mesh, sources: list[str]) -> Iterator[Right]:
    yield _topic(topics.control(mesh.name), "Read", "Write")
    yield _group(mesh, CONTROL_READER, "Describe")
    yield _topic(topics.report(mesh.name), "Write")
    for topic in sources:
        yield _topic(topic, "Describe")
    yield _group(mesh, "ingest", "Describe")
    yield _topic(topics.audit(mesh.name), "Read")  # the last verdict is one of its metrics
    yield _group(mesh, AUDIT_READER, "Describe")


def _ingest(mesh: Mesh, sources: list[str], plans: dict[str, Plan]) -> Iterator[Right]:
    yield from _common(mesh)
    for topic in sources:
        yield _topic(topic, "Read")
    yield _group(mesh, "ingest", "Read")
    for name in (topics.late(mesh.name), topics.dead(mesh.name)):
        yield _topic(name, "Write")
    for query, plan in plans.items():
        for node in plan.nodes:
            yield _topic(topics.node_in(mesh.name, query, node.id), "Write")
        if mesh.feedback.get(query, "off") != "off":
            yield _group(mesh, f"{query}.places", "Describe")


def _node(mesh: Mesh, query: str, node: Node) -> Iterator[Right]:
    talks = mesh.feedback.get(query, "off") != "off"
    yield from _common(mesh)
    yield _group(mesh, f"{query}.{node.id}", "Read")
    # What it hears on its feedback topic it appends to its input.
    yield _topic(topics.node_in(mesh.name, query, node.id), "Read", *(("Write",) if talks else ()))
    root = node.target == "out"
    target = topics.query_out(mesh.name, query) if root else topics.node_in(mesh.name, query, node.target)
    yield _topic(target, "Write")
    yield _topic(topics.dead(mesh.name), "Write")
    if talks:
        yield _topic(topics.node_feedback(mesh.name, query, node.id), "Read")
        yield _group(mesh, f"{query}.places", "Read")
        for producer in (side.name for side in node.inputs if not side.is_source):
            yield _topic(topics.node_feedback(mesh.name, query, producer), "Write")


def _sink(mesh: Mesh, query: str) -> Iterator[Right]:
    yield from _common(mesh)
    yield _topic(topics.query_out(mesh.name, query), "Read")
    yield _group(mesh, f"{query}.sink", "Read")
    yield _topic(topics.results(mesh.name, query), "Write")
    yield _topic(topics.dead(mesh.name), "Write")
    yield Right("transactional-id", f"{mesh.name}.{query}.sink-", ("Write",), is_prefix=True)


def _audit(mesh: Mesh, sources: list[str], queries: list[str]) -> Iterator[Right]:
    own = [topics.late(mesh.name), topics.dead(mesh.name), topics.control(mesh.name)]
    for topic in [*sources, *(topics.results(mesh.name, query) for query in queries), *own]:
        yield _topic(topic, "Read")
    yield _topic(topics.audit(mesh.name), "Write")
    yield _group(mesh, "audit", "Describe")
