"""The rights that each service of a mesh needs at Kafka, one principal a service, and no more; `--create` grants them.

Invariant: what is printed is what is granted. Nothing is ever taken away, and no secret is needed to print the list.
"""

import argparse

from services.cli.common import add_mesh, mesh_of, progress, table

EXAMPLES = """examples:
  joinmesh acls -f mesh.yaml                    the list, as `principal resource name pattern operations`
  joinmesh acls -f mesh.yaml --create           grant them; needs a principal that may change ACLs
  joinmesh acls -f mesh.yaml --principal 'User:CN=shop-${service},O=Example'   names of certificates"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--create", action="store_true", help="grant what is listed")
    parser.add_argument(
        "--principal",
        metavar="NAME",
        help="how Kafka calls a service, with ${service} in it (default: kafka.sasl.username if that has ${service},"
        " else User:<mesh>-${service})",
    )


def run(args: argparse.Namespace) -> int:
    from schemas.errors import JoinmeshError
    from services.runtime.grants import grant, named_rights, principal_form

    mesh = mesh_of(args)
    form = args.principal or principal_form(mesh)
    if "${service}" not in form:
        raise JoinmeshError(f"--principal {form} must hold ${{service}}: each service has a name of its own")
    rights = named_rights(mesh, form)
    rows = [
        [
            principal,
            right.resource,
            right.name,
            "prefixed" if right.is_prefix else "literal",
            ",".join(right.operations),
        ]
        for principal, found in rights.items()
        for right in found
    ]
    print(table(["principal", "resource", "name", "pattern", "operations"], rows))
    if args.create:
        count = grant(mesh, rights)
        progress(f"granted: {count} ACLs for {len(rights)} principals at {mesh.bootstrap}")
    return 0
