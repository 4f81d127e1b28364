"""A real Kafka broker on this machine (KRaft, one process), for trying things out: `up`, `down`, `status`.

Invariant: `down` stops only the broker of the given folder; its records stay there until the folder is deleted.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.common import progress

if TYPE_CHECKING:
    from services.broker import LocalBroker
    from services.broker.guard import Guard

EXAMPLES = """examples:
  joinmesh broker up                  on 127.0.0.1:9092, records in .joinmesh/broker
  joinmesh broker up --port 19092     on another port
  joinmesh broker up --secure -f mesh.yaml   with TLS, a user for each service, and ACLs
  joinmesh broker status
  joinmesh broker down"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument(
        "--port", type=_port, default=9092, help="port on 127.0.0.1 (default: 9092; 0 takes a free one)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(".joinmesh/broker"), help="its folder (default: .joinmesh/broker)"
    )
    parser.add_argument(
        "--secure",
        action="store_true",
        help="with TLS, passwords and ACLs, and a user for each service of the mesh file",
    )
    parser.add_argument(
        "-f",
        "--file",
        default="mesh.yaml",
        metavar="MESH",
        help="the mesh file whose services get users, with --secure",
    )


def run(args: argparse.Namespace) -> int:
    from services.broker import LocalBroker

    guard = _guard(args)
    broker = LocalBroker(args.dir, 0 if args.action != "up" else args.port, progress=progress, guard=guard)
    if args.action == "up":
        already = broker.running() is not None
        broker.start()
        if guard is not None:
            _say_how_to_come_in(broker, args.file)
        print(f"the broker {'already runs' if already else 'is up'} at {broker.bootstrap} (log: {broker.log_file})")
        print(f"stop it with: joinmesh broker down --dir {args.dir}")
        return 0
    running = broker.running()
    if args.action == "down":
        print("the broker is stopped" if broker.stop() else f"no broker runs in {broker.folder}")
        return 0
    if running is None:
        print(f"no broker runs in {broker.folder}")
        return 1
    broker.start()  # adopts the running one: learns its port
    print(f"the broker runs at {broker.bootstrap} (process {running.pid}, log: {broker.log_file})")
    return 0


def _guard(args: argparse.Namespace) -> "Guard | None":
    if not args.secure or args.action != "up":
        return None
    from schemas.mesh import load_mesh
    from services.broker.guard import guard_of

    return guard_of(load_mesh(args.file))


def _say_how_to_come_in(broker: "LocalBroker", file: str) -> None:
    from schemas.mesh import load_mesh
    from services.broker.guard import kafka_lines

    print(f"write this into {file}, then run joinmesh acls -f {file} --create\n")
    print(kafka_lines(broker.folder, broker.port, load_mesh(file).name) + "\n")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text}")
    return port
