"""Runs join nodes: each an independent Faust app with its own topics, group, state and offsets, all on one event loop.

Invariant: one step runs at a time, whichever node it is of; and when a node fails, the process ends, because its memory
may be ahead of its disk.
"""

import asyncio
from collections.abc import Sequence

from schemas.errors import JoinmeshError, MachineError
from services.join_node.app import NodeWorker
from services.runtime.control import wait_for_history
from services.runtime.membership import leave
from services.runtime.service import Arguments, Stop

LOOK_S = 0.05  # how often it is looked whether to stop


def serve(arguments: Arguments) -> None:
    if arguments.query is None or arguments.node is None:
        raise JoinmeshError("a join node needs --query and --node")
    mesh, node = arguments.mesh, (arguments.query, arguments.node)
    health, history = arguments.new_health(), wait_for_history(mesh, arguments.query)
    run_nodes([NodeWorker(mesh, node, arguments.instance, arguments.data, health, history)], arguments.stop)


def run_nodes(workers: Sequence[NodeWorker], stop: Stop) -> None:
    """Until asked to stop. Nothing is left to do then that a killed worker would not have left undone, so Faust is not
    asked to unwind."""
    stop.listen()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_run(workers, stop))
    for worker in workers:
        worker.close()
    if stop.for_good:
        asyncio.set_event_loop(None)
        for worker in workers:
            leave(worker.mesh, worker.group, worker.member)


async def _run(workers: Sequence[NodeWorker], stop: Stop) -> None:
    starting = asyncio.gather(*(worker.app.start() for worker in workers))
    while not stop.is_asked:
        if starting.done():
            starting.result()
        for worker in workers:
            if worker.app.should_stop:
                raise MachineError(f"{worker.member} stopped ({worker.app.crash_reason!r}); starting again")
        await asyncio.sleep(LOOK_S)
