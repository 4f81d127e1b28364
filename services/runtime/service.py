"""What every service process shares: its arguments, its log, and how it ends.

Invariant: a service that cannot ever work (wrong mesh file, wrong topic, state that does not fit) exits with code 78
and one clear last line, so that a supervisor does not restart it for nothing; anything else that goes wrong exits with
1 and may be tried again.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException

from schemas.errors import JoinmeshError, MachineError
from schemas.mesh import Mesh, load_mesh
from services.runtime.acls import check_rights
from services.runtime.health import Health
from services.runtime.security.refusals import said_by_kafka
from services.runtime.security.secrets import hide, hide_in_logs

EX_CONFIG = 78


@dataclass(frozen=True)
class Arguments:
    mesh: Mesh
    data: Path
    query: str | None
    node: str | None
    instance: int
    health: str | None = None

    def new_health(self) -> Health:
        """The service's health, served over HTTP when asked for."""
        health = Health()
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
    parser.add_argument("--query", help="the query this process works for")
    parser.add_argument("--node", help="the join node this process is, such as j1")
    parser.add_argument(
        "--instance", type=int, default=0, help="number of this worker among several of the same service"
    )
    parser.add_argument("--health", metavar="[HOST:]PORT", help="answer GET /live and GET /ready here")
    given = parser.parse_args()
    logging.basicConfig(
        level=os.environ.get("JOINMESH_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("faust", "mode", "aiokafka", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    hide_in_logs()
    os.umask(0o077)  # what a service writes is nobody else's business
    try:
        mesh = load_mesh(given.file).asked_by(service_name(what, given.query, given.node))
        check_rights(mesh)
        arguments = Arguments(mesh, Path(given.data), given.query, given.node, given.instance, given.health)
        code = serve(arguments) or 0
    except MachineError as error:
        print(hide(f"joinmesh {what}: {error}"), file=sys.stderr, flush=True)
        code = 1
    except JoinmeshError as error:
        print(hide(f"joinmesh {what}: {error}"), file=sys.stderr, flush=True)
        code = EX_CONFIG
    except KafkaException as error:
        print(hide(f"joinmesh {what}: {said_by_kafka(mesh, error)}"), file=sys.stderr, flush=True)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # library threads must not keep a stopped service alive
