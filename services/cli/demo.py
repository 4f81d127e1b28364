"""A small shop, end to end: a broker, orders, payments and shipments, the join, and the audit that proves it.

Invariant: exit code 0 only if the audit passes.
"""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  joinmesh demo
  joinmesh demo --events 600000    ten times as many
  joinmesh demo --secure           with TLS, passwords and ACLs
  joinmesh demo --keep             leave the broker running, to look around"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=60_000, help="events over all three streams (default: 60000)")
    parser.add_argument("--keep", action="store_true", help="leave the broker running afterwards")
    parser.add_argument("--secure", action="store_true", help="a broker with TLS, one password a service, and ACLs")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(".joinmesh/demo"),
        help="the demo's folder, emptied first (default: .joinmesh/demo)",
    )
    parser.add_argument(
        "-f",
        "--file",
        default=None,
        metavar="MESH",
        help="another mesh file than the shop (its kafka address is replaced)",
    )


def run(args: argparse.Namespace) -> int:
    from services.demo.demo import run_demo

    return run_demo(args.dir, args.events, args.keep, args.file, args.secure)
