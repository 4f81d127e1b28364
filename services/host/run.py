"""Several services in one process: join nodes on one event loop in the main thread, the others in a thread each.

Every service is what it is in a process of its own: its topics, its consumer group, its state and its offsets. Only
memory and the interpreter are shared.

Invariant: when one of them fails, the process ends and all start again from what is stored; nobody works beside a
service that is gone.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from schemas.errors import JoinmeshError, MachineError
from schemas.mesh import Mesh, did_you_mean
from services.runtime.acls import check_rights
from services.runtime.control import wait_for_histories
from services.runtime.health import Health
from services.runtime.queries import Service, parse_queries, services_of
from services.runtime.service import Arguments, end
from services.runtime.store import CACHE_BYTES

STOP_S = 25.0
CACHE_LEAST = 32 << 20


def serve(arguments: Arguments) -> None:
    services = chosen(arguments.mesh, arguments.run or "all")
    healths: dict[str, Health] = {}
    threads = [_start(arguments, service, healths) for service in services if service.node is None]
    nodes = [service for service in services if service.node is not None]
    if arguments.health is not None:
        Together(healths, [service.name for service in services if service.name != "controller"]).serve(
            arguments.health
        )
    _run_nodes(arguments, nodes, healths)
    for thread in threads:
        thread.join(STOP_S)
        if thread.is_alive():
            raise MachineError(f"{thread.name} did not stop within {STOP_S:.0f} s")


def chosen(mesh: Mesh, names: str) -> list[Service]:
    """The services of the mesh that are named, in the order they are started."""
    services = services_of(mesh, parse_queries(mesh))
    wanted = [service.name for service in services] if names == "all" else names.split(",")
    known = [service.name for service in services]
    for name in wanted:
        if name not in known:
            raise JoinmeshError(f"--run names `{name}`, which is no service of {mesh.file}{did_you_mean(name, known)}")
    return [service for service in services if service.name in wanted]


class Together(Health):
    """Alive and ready if all are."""

    def __init__(self, healths: dict[str, Health], names: Sequence[str]) -> None:
        self._healths, self._names = healths, names
        super().__init__()

    @property
    def is_ready(self) -> bool:
        return all(name in self._healths and self._healths[name].ready for name in self._names)

    @property
    def alive(self) -> bool:
        return all(health.alive for health in self._healths.values())

    @property
    def stuck_s(self) -> float:
        return max((health.stuck_s for health in self._healths.values()), default=0.0)


def _loop_of(service: Service) -> Callable[[Arguments], None]:
    """Imported when wanted: what a process does not run, it does not load."""
    if service.module == "services.controller":
        from services.controller.loop import serve as controller

        return controller
    if service.module == "services.ingest":
        from services.ingest.loop import serve as ingest

        return ingest
    from services.sink.loop import serve as sink

    return sink


def _start(arguments: Arguments, service: Service, healths: dict[str, Health]) -> threading.Thread:
    mesh = arguments.mesh.asked_by(service.name)
    mine = replace(arguments, mesh=mesh, query=service.query, health=None, healths=healths)
    run = _loop_of(service)

    def guarded() -> None:
        try:
            check_rights(mesh)
            run(mine)
        except BaseException as error:
            end(service.name, error, mesh)
        if not arguments.stop.is_asked:
            end(service.name, MachineError("ended by itself; starting again"))

    thread = threading.Thread(target=guarded, name=service.name, daemon=True)
    thread.start()
    return thread


def _run_nodes(arguments: Arguments, nodes: Sequence[Service], healths: dict[str, Health]) -> None:
    if not nodes:
        arguments.stop.listen()
        while not arguments.stop.wait(1.0):
            pass
        return
    from services.join_node.app import NodeWorker
    from services.join_node.run import run_nodes

    mesh, instance = arguments.mesh, arguments.instance
    meshes = {service.name: mesh.asked_by(service.name) for service in nodes}
    for asking in meshes.values():
        check_rights(asking)
    histories = wait_for_histories(meshes[nodes[0].name], {str(service.query) for service in nodes})
    workers = []
    for service in nodes:
        healths[service.name] = Health()
        where = (str(service.query), str(service.node))
        cache = max(CACHE_LEAST, CACHE_BYTES // len(nodes))
        health, history = healths[service.name], histories[where[0]]
        workers.append(NodeWorker(meshes[service.name], where, instance, arguments.data, health, history, cache))
    run_nodes(workers, arguments.stop)
