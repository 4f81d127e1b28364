"""Every topic of a mesh: its name, how many partitions, how long it keeps records. One row a topic.

Invariant: an internal topic keeps its records at least as long as the state that might have to be rebuilt from it: the
longest window + lateness + a margin. The results topic keeps everything unless the user changes it, because its record
timestamps are event times and a broker would delete results of old events at once.
"""

from dataclasses import dataclass, field

from schemas.mesh import Mesh

MARGIN_MS = 24 * 3_600_000
MAX_RECORD_BYTES = 16 << 20  # blocks are cut to 512 KiB, but one row of ten large events travels alone


@dataclass(frozen=True)
class Topic:
    name: str
    partitions: int
    config: dict[str, str] = field(default_factory=dict)


def node_in(mesh: str, query: str, node: str) -> str:
    return f"{mesh}.{query}.{node}.in"


def node_feedback(mesh: str, query: str, node: str) -> str:
    return f"{mesh}.{query}.{node}.feedback"


def query_out(mesh: str, query: str) -> str:
    return f"{mesh}.{query}.out"


def results(mesh: str, query: str) -> str:
    return f"{mesh}.{query}.results"


def control(mesh: str) -> str:
    return f"{mesh}.control"


def allocation(mesh: str) -> str:
    return f"{mesh}.allocation"


def report(mesh: str) -> str:
    return f"{mesh}.report"


def late(mesh: str) -> str:
    return f"{mesh}.late"


def dead(mesh: str) -> str:
    return f"{mesh}.dead"


def audit(mesh: str) -> str:
    return f"{mesh}.audit"


def mesh_topics(mesh: Mesh, nodes: dict[str, int], keep_ms: int) -> list[Topic]:
    """Every topic the mesh owns. `nodes`: query -> number of join nodes; `keep_ms`: longest window + lateness."""
    n = mesh.partitions
    large = {"cleanup.policy": "delete", "max.message.bytes": str(MAX_RECORD_BYTES)}
    kept = {**large, "retention.ms": str(keep_ms + MARGIN_MS)}
    forever = {**large, "retention.ms": "-1"}
    event_time = {**forever, "message.timestamp.type": "CreateTime", "message.timestamp.after.max.ms": str(2**63 - 1)}
    topics = [
        Topic(control(mesh.name), n, forever),  # written whole to every partition: one more ordered input of each step
        Topic(allocation(mesh.name), n, kept),
        Topic(report(mesh.name), 1, kept),
        Topic(late(mesh.name), n, forever),
        Topic(dead(mesh.name), n, forever),
        Topic(audit(mesh.name), 1, forever),
    ]
    for query, count in nodes.items():
        for i in range(1, count + 1):
            topics.append(Topic(node_in(mesh.name, query, f"j{i}"), n, kept))
            topics.append(Topic(node_feedback(mesh.name, query, f"j{i}"), n, kept))
        topics.append(Topic(query_out(mesh.name, query), n, kept))
        topics.append(Topic(results(mesh.name, query), n, event_time))
    return topics
