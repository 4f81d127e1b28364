"""The controller: plans each query once, publishes the plan to every partition of the control topic, and keeps watch.

Invariant: a query's plan changes only by a new epoch. A mesh file that asks for another query text or tree than the one
that runs is refused, because states and topics were built for that one.
"""

import logging
import time

from schemas.control import PlanPublished
from schemas.errors import StateError
from schemas.mesh import Mesh, Stream
from services.controller.audits import AuditWatch
from services.runtime.control import plan_digest, publish, read_plans
from services.runtime.kafka import read_before, source_partitions, topic_offsets
from services.runtime.producer import Sender
from services.runtime.queries import parse_queries, plan_of
from services.runtime.report import Reporter
from services.runtime.service import Arguments
from topology.plan.plan import Plan, tree_text

log = logging.getLogger("joinmesh.controller")


def serve(arguments: Arguments) -> None:
    mesh, stop = arguments.mesh, arguments.stop
    stop.listen()
    health, sender = arguments.new_health(), Sender(mesh)
    plans = publish_plans(mesh, sender)
    reporter, audits = Reporter(mesh, sender.producer, "controller", "controller"), AuditWatch(mesh)
    health.ready = True
    health.watch()
    while not stop.wait(1.0):
        health.beat()
        reporter.send(
            epoch=max(p.epoch for p in plans),
            plans={p.query: p.tree for p in plans},
            lag=0,
            events_in=len(plans),
            audit=audits.look(),
            ready=health.ready,
        )
        sender.check()
        health.observe(0, lag=0)
    audits.close()
    sender.flush(10)


def publish_plans(mesh: Mesh, sender: Sender) -> list[PlanPublished]:
    """Publish what is new; refuse what contradicts a running plan."""
    running = read_plans(mesh)
    cuts = {table: cut for plan in running.values() for table, cut in plan.table_cuts.items()}
    published = []
    for name, query in parse_queries(mesh).items():
        plan = plan_of(mesh, query)
        if name in running:
            _check_same(mesh, plan, running[name])
            published.append(running[name])
            continue
        used = [mesh.streams[s] for s in {source.stream for source in plan.query.sources}]
        message = PlanPublished(
            query=name,
            epoch=1,
            text=mesh.queries[name],
            tree=tree_text(plan.tree),
            digest=plan_digest(mesh, plan),
            at_ms=int(time.time() * 1000),
            source_partitions=source_partitions(mesh, used),
            feedback=mesh.feedback.get(name, "off"),
            table_cuts=_cuts(mesh, name, used, cuts),
            routing=mesh.routing.get(name, "fixed"),
            heralds=mesh.is_heralded(name),
        )
        cuts |= message.table_cuts
        log.info("query %s runs as %s", name, message.tree)
        publish(mesh, sender, message)
        published.append(message)
    sender.flush()
    return published


def _cuts(mesh: Mesh, query: str, used: list[Stream], known: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
    """Where each table of a new query ends: one cut a table for the whole mesh, taken when it is first needed."""
    tables = [stream for stream in used if stream.table is not None]
    counts = source_partitions(mesh, tables)
    for table in tables:
        if table.name in known and read_before(mesh, f"{mesh.name}.ingest", table.topic, counts[table.name]):
            raise StateError(
                f"query {query} is new and reads table {table.name}, which this mesh has read already and does not read"
                " again; use a new mesh name for it"
            )
    ends = topic_offsets(mesh, {t.topic: counts[t.name] for t in tables if t.name not in known})
    return {t.name: known.get(t.name) or {p: end for p, (_, end) in enumerate(ends[t.topic])} for t in tables}


def _check_same(mesh: Mesh, plan: Plan, running: PlanPublished) -> None:
    if plan_digest(mesh, plan) == running.digest:
        name = plan.query.name
        for what, wanted, runs in (
            ("feedback", mesh.feedback.get(name, "off"), running.feedback),
            ("routing", mesh.routing.get(name, "fixed"), running.routing),
            ("heralds", "on" if mesh.is_heralded(name) else "off", "on" if running.heralds else "off"),
        ):
            if wanted != runs:
                raise StateError(
                    f"query {name}: the mesh file wants {what} {wanted}, but this mesh runs it with {what} {runs}, and"
                    " its states were built for that; change it back, or use a new mesh name"
                )
        return
    what = "tree" if tree_text(plan.tree) != running.tree else "query text or its streams"
    raise StateError(
        f"query {plan.query.name}: the mesh file's {what} is not what this mesh runs ({running.tree}, epoch"
        f" {running.epoch}); change it back, or use a new mesh name for the changed query"
    )
