"""Named places where a service can be made to die, so that tests can kill it at each point of the step protocol.

`JOINMESH_FAILPOINT=node.after_batch:7` kills the process (SIGKILL, nothing is cleaned up) the seventh time it passes
that point; several are separated by commas. With `JOINMESH_FAILPOINT_LOG=DIR` each death leaves a file there, and after
`JOINMESH_FAILPOINT_TIMES` (default 20) deaths at a point it is disarmed, so that a supervised mesh gets through. The
simulation sets `hook` instead, which may raise.

Invariant: a failpoint changes nothing but whether the process lives on; unarmed it costs one comparison.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

POINTS = (
    "node.before_batch",
    "node.after_batch",
    "node.after_send",
    "node.after_trim",
    "ingest.before_send",
    "ingest.after_send",
    "ingest.before_commit",
    "ingest.after_commit",
    "sink.before_send",
    "sink.after_send",
    "sink.before_commit",
    "sink.after_commit",
)

hook: Callable[[str], None] | None = None


def _armed() -> dict[str, int]:
    armed = {}
    for text in filter(None, os.environ.get("JOINMESH_FAILPOINT", "").split(",")):
        name, _, count = text.partition(":")
        if name not in POINTS:
            raise ValueError(f"JOINMESH_FAILPOINT names no failpoint: {name}; there are {', '.join(POINTS)}")
        armed[name] = int(count or 1)
    return armed


_left = _armed()


def failpoint(name: str) -> None:
    if hook is not None:
        hook(name)
    if name in _left:
        _left[name] -= 1
        if _left[name] == 0 and _may_die(name):
            os.kill(os.getpid(), signal.SIGKILL)


def _may_die(name: str) -> bool:
    folder = os.environ.get("JOINMESH_FAILPOINT_LOG")
    if folder is None:
        return True
    if len(list(Path(folder).glob(f"{name}-*"))) >= int(os.environ.get("JOINMESH_FAILPOINT_TIMES", "20")):
        return False
    (Path(folder) / f"{name}-{os.getpid()}-{time.time_ns()}").touch()
    return True
