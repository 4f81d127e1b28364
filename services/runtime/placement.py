"""From the services of a mesh to the processes that run them: how many workers each has, and who shares a process.

A worker is one instance of a service; workers of a service divide its partitions through its consumer group.
`per-service`: one process a worker. `together`: worker k of every service that has so many is in one process, so a mesh
without `workers` is a single one.

Invariant: a worker is called by its service and number wherever it runs, so its membership of the group, its reports
and its state are the same under either placement.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.errors import MeshFileError
from schemas.mesh import Mesh, checked_workers, did_you_mean
from services.runtime.queries import Service

HOST = "host"


@dataclass(frozen=True)
class Process:
    """One process of the mesh. `name` is what its log and messages about it are called."""

    name: str
    services: tuple[Service, ...]
    instance: int

    def command(self) -> list[str]:
        """What follows `python`, but for the mesh file and the data folder."""
        if self.name.partition("-")[0] == HOST:
            line = ["-m", "services.host", "--run", ",".join(service.name for service in self.services)]
        else:
            (service,) = self.services
            line = ["-m", service.module]
            line += ["--query", service.query] if service.query is not None else []
            line += ["--node", service.node] if service.node is not None else []
        return line + (["--instance", str(self.instance)] if self.instance else [])

    @property
    def workers(self) -> list[str]:
        """What their reports are called."""
        return [worker_name(service.name, self.instance) for service in self.services]


def worker_name(service: str, instance: int) -> str:
    return service if service == "controller" else f"{service}-{instance}"


def processes_of(mesh: Mesh, services: Sequence[Service]) -> list[Process]:
    """Every process of the mesh, in the order they are started."""
    check_workers(mesh, services)
    counts = {service.name: mesh.workers_of(service.name) for service in services}
    if mesh.placement == "together":
        return [
            Process(_numbered(HOST, k), tuple(s for s in services if counts[s.name] > k), k)
            for k in range(max(counts.values()))
        ]
    return [Process(_numbered(s.name, k), (s,), k) for s in services for k in range(counts[s.name])]


def _numbered(name: str, instance: int) -> str:
    """The first has the service's own name, so that it keeps it when others come and go."""
    return f"{name}-{instance}" if instance else name


def check_workers(mesh: Mesh, services: Sequence[Service]) -> None:
    """That `workers` names services that the plans have."""
    known = {name for s in services for name in (s.name, s.name.rpartition(".")[2])}
    for name in mesh.workers:
        if name not in known:
            raise MeshFileError(
                f"`workers` names `{name}`, but no plan has such a service{did_you_mean(name, sorted(known))}",
                file=mesh.file,
            )


def with_workers(mesh: Mesh, given: Iterable[str]) -> Mesh:
    """The mesh with other numbers of workers, as a command line says them: `j1=3`."""
    counts: dict[str, int] = {}
    for text in given:
        service, equals, count = text.partition("=")
        if not equals or not count.isdigit():
            raise ValueError(f"--workers {text}: write a service and a number, such as j1=3")
        counts[service] = checked_workers(service, int(count), mesh.queries, mesh.partitions)
    return replace(mesh, workers=_overridden(mesh.workers, counts))


def _overridden(there: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
    """`j1=3` of a command line speaks for every query's j1, also for those that the mesh file names.

    >>> _overridden({"q.j1": 2, "q.sink": 4}, {"j1": 3})
    {'q.sink': 4, 'j1': 3}
    """
    return {**{name: n for name, n in there.items() if name.rpartition(".")[2] not in given}, **given}
