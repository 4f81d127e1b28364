"""Prints the plan of each query: the tree, each node's key and topics, and the state it is expected to hold.

Invariant: nothing is read but the mesh file, so it works without a broker.
"""

import argparse

from schemas.errors import JoinmeshError
from schemas.mesh import did_you_mean
from services.cli.common import add_mesh, mesh_of

EXAMPLES = """examples:
  joinmesh explain -f mesh.yaml
  joinmesh explain -f mesh.yaml --query paid_orders"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--query", metavar="Q", help="only this query")


def run(args: argparse.Namespace) -> int:
    mesh = mesh_of(args)
    if args.query is not None and args.query not in mesh.queries:
        raise JoinmeshError(f"no query `{args.query}` in {mesh.file}{did_you_mean(args.query, mesh.queries)}")
    from services.runtime.queries import explain, parse_queries
    from services.runtime.security.settings import check_settings

    check_settings(mesh)
    queries = parse_queries(mesh)
    texts = [explain(mesh, query) for name, query in queries.items() if args.query in (None, name)]
    print("\n\n".join(text.rstrip() for text in texts))
    return 0
