"""Runs all services of a mesh in the foreground, restarts those that die, and stops cleanly on Ctrl-C or SIGTERM.

Invariant: started again on the same data folder it carries on where it was; the first time it reads source topics from
their beginning.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from schemas.errors import JoinmeshError
from schemas.mesh import Mesh
from services.cli.common import add_mesh, mesh_of

EXAMPLES = """examples:
  joinmesh up -f mesh.yaml
  joinmesh up -f mesh.yaml --data /var/lib/joinmesh/shop
  joinmesh up -f mesh.yaml --until-idle 3   stop when everything is processed
  joinmesh up -f mesh.yaml --health 9464    metrics of the whole mesh on http://127.0.0.1:9464/metrics
  joinmesh up -f mesh.yaml --workers j1=3 --workers ingest=2
  joinmesh up -f mesh.yaml --placement together   all services in one process"""


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
    parser.add_argument(
        "--workers",
        action="append",
        default=[],
        metavar="SERVICE=N",
        help="workers of a service (ingest, sink, j1, QUERY.j1, …), whatever the mesh file says; repeatable",
    )
    parser.add_argument(
        "--placement",
        choices=["per-service", "together"],
        help="a process for each worker, or one for all services (default: what the mesh file says)",
    )


def run(args: argparse.Namespace) -> int:
    from services.supervisor.supervise import Supervisor, data_dir

    mesh = _as_asked(args)
    folder = args.data or data_dir(mesh)
    return Supervisor(mesh, folder, say, args.until_idle, lambda: _as_asked(args), args.health).run()


def _as_asked(args: argparse.Namespace) -> Mesh:
    """The mesh file with what the command line says instead."""
    from services.runtime.placement import with_workers

    mesh = mesh_of(args)
    try:
        mesh = with_workers(mesh, args.workers)
    except ValueError as error:
        raise JoinmeshError(str(error)) from None
    return replace(mesh, placement=args.placement) if args.placement else mesh


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
