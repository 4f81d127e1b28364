"""The mesh's topics as they should be and as the broker has them; `--create` makes the missing ones.

Invariant: exit code 0 only when every topic is there and fits.
"""

import argparse

from services.cli.common import add_mesh, duration, mesh_of, number, progress, table

EXAMPLES = """examples:
  joinmesh topics -f mesh.yaml            list and check
  joinmesh topics -f mesh.yaml --create   create the missing ones (as `joinmesh up` does)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument(
        "--create",
        action="store_true",
        help="create the missing ones (source topics excepted: their producers own them)",
    )


def run(args: argparse.Namespace) -> int:
    from services.runtime.kafka import describe_topics, ensure_topics, problems, topic_offsets
    from services.runtime.queries import parse_queries, topics_of

    mesh = mesh_of(args)
    wanted = topics_of(mesh, parse_queries(mesh))
    if args.create:
        ensure_topics(mesh, wanted, progress)
    sources = dict.fromkeys(stream.topic for stream in mesh.streams.values())
    found = describe_topics(mesh, [*sources, *(topic.name for topic in wanted)])
    offsets = topic_offsets(mesh, {name: topic.partitions for name, topic in found.items()})
    rows, wrong = [], []
    for name, needed in [*((name, None) for name in sources), *((topic.name, topic) for topic in wanted)]:
        if name not in found:
            rows.append([name, needed.partitions if needed else "-", "-", "-", "missing"])
            wrong.append(
                f"topic {name} is missing"
                + ("" if needed else f" (a source topic; `joinmesh generate -f {mesh.file} --create 4` makes one)")
            )
            continue
        faults = problems(needed, found[name], mesh.bootstrap) if needed else []
        wrong += faults
        records = sum(high - low for low, high in offsets[name])
        kept = int(found[name].config.get("retention.ms", "-1"))
        rows.append([name, found[name].partitions, number(records), duration(kept), "wrong" if faults else "ok"])
    print(table(["topic", "partitions", "records", "kept for", "verdict"], rows, right=["partitions", "records"]))
    for fault in wrong:
        progress(f"joinmesh: {fault}")
    return 1 if wrong else 0
