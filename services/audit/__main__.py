"""`python -m services.audit -f mesh.yaml`: the audit by itself, as a Spark job of its own."""

import argparse
import sys

from schemas.errors import JoinmeshError
from schemas.mesh import load_mesh
from services.audit import add_arguments, main


def run() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.audit", description="Prove a mesh's results from the log."
    )
    parser.add_argument("-f", "--file", default="mesh.yaml", help="the mesh file (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args()
    try:
        return main(args, load_mesh(args.file))
    except JoinmeshError as error:
        print(f"joinmesh: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run())
