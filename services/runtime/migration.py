"""Asking for a new plan of a running query, and seeing it through.

Invariant: a migration is done when every partition of every node has said that the new epoch is the only one it runs.
"""

import time
from dataclasses import dataclass, field

from schemas.control import PlanPublished
from schemas.errors import JoinmeshError, PlanError, StateError
from schemas.mesh import Mesh, did_you_mean
from services.runtime.control import derive_plan, plan_digest, publish, read_history
from services.runtime.producer import Sender
from services.runtime.queries import parse_queries, plan_of
from services.supervisor.reports import ReportReader, instances


def ask(mesh: Mesh, query: str, to: str | None = None) -> PlanPublished:
    """Publish the next epoch of a query."""
    import msgspec

    from topology.plan.plan import build_plan, parse_tree, tree_text

    queries = parse_queries(mesh)
    if query not in queries:
        raise JoinmeshError(f"no query `{query}` in {mesh.file}{did_you_mean(query, queries)}")
    running = read_history(mesh).get(query)
    if not running:
        raise StateError(f"query {query} does not run yet; start it with joinmesh up -f {mesh.file}")
    parsed, newest = queries[query], running[-1]
    plan = plan_of(mesh, parsed) if to is None else build_plan(parsed, parse_tree(to, parsed))
    if plan_digest(mesh, plan) != newest.digest:
        if tree_text(plan.tree) == newest.tree:
            raise StateError(
                f"query {query}: its text or its streams are not what runs; change them back, or use a new mesh name"
                " for the changed query"
            )
        raise PlanError(
            f"query {query} runs as {newest.tree}; this version changes a running plan only to the same tree, not to"
            f" {tree_text(plan.tree)}: its intermediate results are not there"
        )
    message = msgspec.structs.replace(newest, epoch=newest.epoch + 1, at_ms=int(time.time() * 1000))
    sender = Sender(mesh)
    publish(mesh, sender, message)
    sender.flush()
    counts = next((p for p in read_history(mesh)[query] if p.epoch == message.epoch), None)
    if counts != message:
        raise StateError(
            f"query {query}: another plan of epoch {message.epoch} was asked for at the same moment; try again"
        )
    return message


@dataclass
class Progress:
    """Follows the nodes' reports until all of them run the new plan alone."""

    mesh: Mesh
    message: PlanPublished
    reader: ReportReader = field(init=False)
    waits_for: str = "waiting for reports"
    is_done: bool = False

    def __post_init__(self) -> None:
        self.nodes = [node.id for node in derive_plan(self.mesh, self.message).nodes]
        self.reader = ReportReader(self.mesh)
        self.reader.read_tail()

    def poll(self) -> None:
        self.reader.poll(0.1)
        waiting = []
        for node in self.nodes:
            done: set[int] = set()
            for report in instances(self.reader.latest, f"{self.message.query}.{node}").values():
                done |= {
                    int(p)
                    for p, epochs in dict(report.get("epochs") or {}).items()
                    if report.get("at_ms", 0) >= self.message.at_ms and min(epochs, default=0) >= self.message.epoch
                }
            left = sorted(set(range(self.mesh.partitions)) - done)
            if left:
                waiting.append(f"{node} partition{'s' if len(left) > 1 else ''} {', '.join(map(str, left))}")
        self.waits_for = f"waiting for {'; '.join(waiting)}" if waiting else ""
        if not waiting:
            self.is_done = True
            self.reader.close()
