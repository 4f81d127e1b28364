"""Prints the plan of each query: the tree, each node's key and topics, and the state it is expected to hold.

Invariant: nothing is read but the mesh file, so it works without a broker.
"""

import argparse

from schemas.errors import JoinmeshError, PlanError
from schemas.mesh import Mesh, did_you_mean
from services.cli.common import add_mesh, mesh_of
from topology.query.query import Query

EXAMPLES = """examples:
  joinmesh explain -f mesh.yaml
  joinmesh explain -f mesh.yaml --query paid_orders
  joinmesh explain -f mesh.yaml --nodes paid_orders=2   fail unless it has 2 join nodes (the Helm chart asks so)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--query", metavar="Q", help="only this query")
    parser.add_argument(
        "--nodes",
        action="append",
        default=[],
        metavar="Q=N",
        help="fail unless the plan of query Q has N join nodes; may be given several times",
    )


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
    for said in args.nodes:
        _compare(mesh, queries, said)
    return 0


def _compare(mesh: Mesh, queries: dict[str, Query], said: str) -> None:
    """Refuse a number of join nodes that is not the plan's."""
    from services.runtime.queries import plan_of

    name, _, count = said.partition("=")
    if name not in queries or not count.isdigit():
        raise JoinmeshError(f"--nodes {said} is not of the form QUERY=NUMBER{did_you_mean(name, mesh.queries)}")
    nodes = len(plan_of(mesh, queries[name]).nodes)
    if nodes != int(count):
        raise PlanError(
            f"the plan of {name} has {nodes} join nodes, but {count} were counted; write `nodes: {{{name}: {nodes}}}`"
            " into the chart's values"
        )
