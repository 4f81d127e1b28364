"""Checks a running mesh: every service speaks; with --events, the results of a few events written now come out.

Invariant: exit code 0 only when all of that was seen. Without --events it only reads.
"""

import argparse

from services.cli.common import add_mesh, mesh_of

EXAMPLES = """examples:
  joinmesh check -f mesh.yaml              does every service run?
  joinmesh check -f mesh.yaml --events 50  and do events come out joined? (every reader of the topics sees them)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument(
        "--events", type=int, default=0, help="sample events to write to each source topic, at most 500 (default: 0)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="S", help="seconds to wait for all of it (default: 120)"
    )


def run(args: argparse.Namespace) -> int:
    from schemas.errors import JoinmeshError
    from services.check.check import check

    if not 0 <= args.events <= 500:
        raise JoinmeshError(f"--events is a number from 0 to 500, not {args.events}")
    check(mesh_of(args), args.events, args.timeout, lambda text: print(text, flush=True))
    return 0
