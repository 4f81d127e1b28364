"""Named places where a service can be made to die, so that tests can kill it at each point of the step protocol.

`JOINMESH_FAILPOINT=node.after_batch:7` kills the process (SIGKILL, nothing is cleaned up) the seventh time it passes that point. The simulation
sets `hook` instead, which may raise. Without either, a failpoint costs one comparison.

Invariant: a failpoint changes nothing but whether the process lives on.
"""

import os
import signal
from collections.abc import Callable

POINTS = (
    "node.before_batch", "node.after_batch", "node.after_send", "node.after_trim",
    "ingest.before_send", "ingest.after_send", "ingest.before_commit", "ingest.after_commit",
    "sink.before_send", "sink.after_send", "sink.before_commit", "sink.after_commit",
)  # fmt: skip

hook: Callable[[str], None] | None = None


def _armed() -> tuple[str, int]:
    name, _, count = os.environ.get("JOINMESH_FAILPOINT", "").partition(":")
    if name and name not in POINTS:
        raise ValueError(f"JOINMESH_FAILPOINT names no failpoint: {name}; there are {', '.join(POINTS)}")
    return name, int(count or 1)


_name, _left = _armed()


def failpoint(name: str) -> None:
    global _left
    if hook is not None:
        hook(name)
    if name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
