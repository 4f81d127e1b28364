"""Recomputes the results with Spark from the source topics alone and compares them with what the mesh wrote.

Invariant: exit code 0 only when every result is there once, with the right values, and nothing else.
"""

import argparse

from services.cli.common import add_mesh, mesh_of

EXAMPLES = """examples:
  joinmesh audit -f mesh.yaml
  joinmesh audit --help"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from services import audit

    add_mesh(parser)
    audit.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from services import audit

    return audit.main(args, mesh_of(args))
