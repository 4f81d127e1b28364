"""A worker's membership of its consumer group, which outlives its process: how long, and how it ends.

Workers are static members: one that is killed or restarted finds its partitions as they were, and nobody else is
disturbed. So a worker that goes for good has to say so; until then, or until its session ends, its partitions have
nobody.

Invariant: leaving takes a member out by its name, whatever process held it last; the group then shares out its
partitions.
"""

import asyncio
import logging

from schemas.mesh import Mesh

log = logging.getLogger("joinmesh.membership")
SESSION_MS = 10_000  # after which a member that says nothing is taken for dead
HEARTBEAT_MS = 1_000  # how soon a member hears that the group shares out anew: all wait for the last one
PATIENCE_S = 5.0


def leave(mesh: Mesh, group: str, member: str) -> None:
    """End a static membership. If that fails, its session ends it soon."""
    from services.runtime.leave_group import leave_group  # Faust's client takes a while to import

    try:
        asyncio.run(asyncio.wait_for(leave_group(mesh, group, member), PATIENCE_S))
        log.info("%s has left %s", member, group)
    except Exception as error:
        log.warning("%s could not leave %s (%r); others take over in %s s", member, group, error, SESSION_MS // 1000)
