"""Runs all services of a mesh in the foreground, restarts those that die, and stops cleanly on Ctrl-C or SIGTERM.

Invariant: started again on the same data folder it carries on where it was; the first time it reads source topics from
their beginning.
"""

import argparse
import time
from pathlib import Path

from services.cli.common import add_mesh, mesh_of

EXAMPLES = """examples:
  joinmesh up -f mesh.yaml
  joinmesh up -f mesh.yaml --data /var/lib/joinmesh/shop
  joinmesh up -f mesh.yaml --until-idle 3   stop when everything is processed
  joinmesh up -f mesh.yaml --health 9464    metrics of the whole mesh on http://127.0.0.1:9464/metrics"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="state and logs (default: .joinmesh/<mesh> beside the mesh file)"
    )
    parser.add_argument(
        "--until-idle",
        type=float,
        metavar="SECONDS",
        help="stop when all events are processed and nothing moved for so long",
    )
    parser.add_argument(
        "--health",
        metavar="[HOST:]PORT",
        help="answer GET /live, /ready and /metrics for the whole mesh here (default host: 127.0.0.1)",
    )


def run(args: argparse.Namespace) -> int:
    from services.supervisor.supervise import Supervisor, data_dir

    mesh = mesh_of(args)
    return Supervisor(mesh, args.data or data_dir(mesh), say, args.until_idle, args.health).run()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
