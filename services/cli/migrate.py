"""Changes the plan of a running query, without a stop or a loss; returns when the old plan is gone.

Invariant: a plan changes only by a new epoch on the control topic; everything else follows from it. A plan that this
version cannot change to is refused before anything is written.
"""

import argparse
import time

from services.cli.common import add_mesh, mesh_of, progress

EXAMPLES = """examples:
  joinmesh migrate -f mesh.yaml --query paid_orders          to what the mesh file says, and wait until it is done
  joinmesh migrate -f mesh.yaml --query paid_orders --no-wait   ask for it and return"""
PATIENCE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--query", required=True, help="the query whose plan changes")
    parser.add_argument(
        "--to", metavar="TREE", help='the new tree, such as "((a b) c)" (default: what the mesh file says)'
    )
    parser.add_argument("--no-wait", action="store_true", help="return once it is asked for, before it is done")


def run(args: argparse.Namespace) -> int:
    from services.runtime.migration import Progress, ask

    mesh = mesh_of(args)
    begun = time.monotonic()
    message = ask(mesh, args.query, args.to)
    progress(f"{args.query}: plan {message.tree} of epoch {message.epoch} is asked for")
    if args.no_wait:
        return 0
    watch = Progress(mesh, message)
    said = ""
    while not watch.is_done:
        watch.poll()
        if watch.waits_for != said:
            said = watch.waits_for
            progress(f"  {time.monotonic() - begun:5.1f} s  {said or 'done'}")
        if time.monotonic() - begun > PATIENCE_S:
            progress(f"joinmesh: the old plan is not gone after {PATIENCE_S:.0f} s: {said}; see joinmesh status")
            return 1
    print(f"{args.query} runs under epoch {message.epoch}, {message.tree}, after {time.monotonic() - begun:.1f} s")
    return 0
