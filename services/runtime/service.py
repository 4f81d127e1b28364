"""What every service process shares: its arguments, its log, and how it ends.

Invariant: a service that cannot ever work (wrong mesh file, wrong topic, state that does not fit) exits with code 78
and one clear last line, so that a supervisor does not restart it for nothing; anything else that goes wrong exits with
1 and may be tried again.
"""

import argparse
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from confluent_kafka import KafkaError, KafkaException

from schemas.errors import JoinmeshError, MachineError
from schemas.mesh import Mesh, load_mesh
from services.runtime.acls import check_rights
from services.runtime.health import Health
from services.runtime.security.refusals import said_by_kafka
from services.runtime.security.secrets import hide, hide_in_logs

EX_CONFIG = 78


class Stop:
    """That a service is asked to stop: by SIGTERM for now, by SIGINT for good.

    A worker that stops for good leaves its consumer group, so that others have its partitions at once. One that comes
    back stays a member: its partitions wait for it.
    """

    def __init__(self) -> None:
        self._asked, self.for_good = threading.Event(), False

    def listen(self) -> None:
        """From now on signals ask; before, they end the process. A service in a thread leaves that to its host."""
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGTERM, signal.SIGINT):
                signal.signal(name, lambda number, _: self.ask(for_good=number == signal.SIGINT))

    def ask(self, for_good: bool = False) -> None:
        self.for_good = self.for_good or for_good
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        return self._asked.wait(seconds)


@dataclass(frozen=True)
class Arguments:
    mesh: Mesh
    data: Path
    query: str | None
    node: str | None
    instance: int
    health: str | None = None
    run: str | None = None  # of a host: which services
    stop: Stop = field(default_factory=Stop)
    healths: dict[str, Health] | None = None  # of a service in a host: where it puts its own

    def new_health(self) -> Health:
        """The service's health, served over HTTP when asked for."""
        health = Health()
        if self.healths is not None:
            self.healths[threading.current_thread().name] = health
        if self.health is not None:
            health.serve(self.health)
        return health

    @property
    def name(self) -> str:
        """What reports call this process."""
        role = ".".join(filter(None, [self.query, self.node]))
        return f"{role}-{self.instance}" if role else str(self.instance)


def end_when_fatal(what: str) -> Callable[[KafkaError], None]:
    """An `error_cb` for Kafka clients: one that can never work again (fenced, say) takes its process with it, to be
    started anew.

    A fatal error is not always handed out by `consume`; a service that does not look would wait for records for ever.
    """

    def on_error(error: KafkaError) -> None:
        if error.fatal() or error.code() == KafkaError._FATAL:
            print(
                f"joinmesh {what}: Kafka will not serve this client any more ({error.str()}); starting again",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    return on_error


def end_when_lost(what: str) -> Callable[[object, list[object]], None]:
    """An `on_lost`: a consumer whose partitions went to others while it was away must not go on as if it had them."""

    def on_lost(_: object, places: list[object]) -> None:
        print(
            f"joinmesh {what}: lost {len(places)} partitions while Kafka was away; starting again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    return on_lost


def service_name(what: str, query: str | None, node: str | None) -> str:
    """As `services_of` calls it.

    >>> service_name("join_node", "q", "j1"), service_name("sink", "q", None), service_name("ingest", None, None)
    ('q.j1', 'q.sink', 'ingest')
    """
    return ".".join(filter(None, [query, node or what]))


def run_service(what: str, serve: Callable[[Arguments], int | None]) -> None:
    """Parse the command line, run the service, end the process."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{what}", description=f"the {what} service of a mesh")
    parser.add_argument("-f", "--file", default="mesh.yaml", help="mesh file")
    parser.add_argument("--data", default=".joinmesh", help="directory for state")
    if what == "host":
        parser.add_argument("--run", metavar="NAME[,NAME…]", required=True, help="services to run here, or all")
    else:
        parser.add_argument("--query", help="the query this process works for")
        parser.add_argument("--node", help="the join node this process is, such as j1")
    parser.add_argument(
        "--instance",
        type=ordinal,
        default=os.environ.get("JOINMESH_INSTANCE", "0"),
        help="number of this worker among several of the same service, or a pod's name that ends in it",
    )
    parser.add_argument("--health", metavar="[HOST:]PORT", help="answer GET /live, /ready and /metrics here")
    parser.set_defaults(query=None, node=None, run=None)
    given = parser.parse_args()
    logging.basicConfig(
        level=os.environ.get("JOINMESH_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("faust", "mode", "aiokafka", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It warns whenever a group shares out anew; what goes wrong for good is an error, or ends the process.
    logging.getLogger("aiokafka.consumer.group_coordinator").setLevel(logging.ERROR)
    hide_in_logs()
    os.umask(0o077)  # what a service writes is nobody else's business
    mesh = None
    try:
        mesh = load_mesh(given.file).asked_by(service_name(what, given.query, given.node))
        if what != "host":  # whose services ask each for themselves
            check_rights(mesh)
        arguments = Arguments(mesh, Path(given.data), given.query, given.node, given.instance, given.health, given.run)
        code = serve(arguments) or 0
    except Exception as error:
        end(what, error, mesh)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # library threads must not keep a stopped service alive


def end(what: str, error: BaseException, mesh: Mesh | None = None) -> NoReturn:
    """End the process with the last line and the code that a failure calls for. `mesh`: as the service sees it, for
    what Kafka refused it."""
    if isinstance(error, JoinmeshError):
        print(hide(f"joinmesh {what}: {error}"), file=sys.stderr, flush=True)
        os._exit(1 if isinstance(error, MachineError) else EX_CONFIG)
    if isinstance(error, KafkaException) and mesh is not None:
        print(hide(f"joinmesh {what}: {said_by_kafka(mesh, error)}"), file=sys.stderr, flush=True)
        os._exit(1)
    logging.getLogger("joinmesh").error("%s failed", what, exc_info=error)
    sys.stderr.flush()
    os._exit(1)


def ordinal(text: str) -> int:
    """
    >>> ordinal("2"), ordinal("shop-orders-j1-2")
    (2, 2)
    """
    found = re.search(r"(?:\A|-)(\d+)\Z", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a name that ends in -<number>")
    return int(found[1])
