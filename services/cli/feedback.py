"""The live feedback between joins, in words: who tells whom what not to make, and what is wanted again.

Invariant: it only reads; a record that is no feedback is named as such and passed over.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence

from services.cli.common import add_mesh, mesh_of, progress

EXAMPLES = """examples:
  joinmesh feedback tail -f mesh.yaml                    from now on, until Ctrl-C
  joinmesh feedback tail -f mesh.yaml --from-start -n 5  the first five messages the topics still hold"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("tail",))
    add_mesh(parser)
    parser.add_argument("--query", help="only this query")
    parser.add_argument(
        "--from-start", action="store_true", help="begin with what the topics hold, not with what comes now"
    )
    parser.add_argument("-n", "--count", type=int, help="stop after so many messages (default: Ctrl-C stops)")


def run(args: argparse.Namespace) -> int:
    from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, TopicPartition

    from schemas import topics
    from schemas.errors import JoinmeshError
    from services.runtime.control import derive_plan, read_plans
    from services.runtime.kafka import TAIL, client_config
    from topology.plan.shapes import shapes_of

    mesh = mesh_of(args)
    if args.query is not None and args.query not in mesh.queries:
        raise JoinmeshError(f"no query `{args.query}` in {mesh.file}; there is {', '.join(mesh.queries)}")
    running = {
        name: plan for name, plan in read_plans(mesh).items() if plan.feedback != "off" and args.query in (None, name)
    }
    if not running:
        raise JoinmeshError(
            f"no query of mesh {mesh.name} runs with feedback; write `feedback:"
            f" {{{args.query or next(iter(mesh.queries))}: on}}` into {mesh.file}"
        )
    shapes: dict[str, list[str]] = {}
    for name, published in running.items():
        for node, said in shapes_of(derive_plan(mesh, published)).items():
            shapes[topics.node_feedback(mesh.name, name, node)] = [str(shape) for shape in said]
    if not any(shapes.values()):
        raise JoinmeshError(
            f"no two nodes of {', '.join(running)} talk to one another: an M-Join keeps its feedback to itself; see"
            f" joinmesh status -f {mesh.file}"
        )
    consumer = Consumer(client_config(mesh, group_id=f"{mesh.name}.{TAIL}", enable_auto_commit=False))
    start = OFFSET_BEGINNING if args.from_start else OFFSET_END
    consumer.assign([TopicPartition(topic, p, start) for topic in shapes for p in range(mesh.partitions)])
    progress(f"listening to {', '.join(shapes)}")
    seen = 0
    try:
        while args.count is None or seen < args.count:
            for message in consumer.consume(100, 0.2):
                if message.error() is None and (args.count is None or seen < args.count):
                    seen += 1
                    topic = str(message.topic())
                    print(in_words(message.value(), topic, message.partition() or 0, shapes), flush=True)
    finally:
        consumer.close()
    return 0


def in_words(value: bytes | None, topic: str, partition: int, shapes: Mapping[str, Sequence[str]]) -> str:
    """One message as a sentence."""
    from datetime import UTC, datetime

    from schemas.block import OF_CONSUMER, decode_block
    from schemas.errors import BlockError
    from topology.restraint.suspension.wire import SHAPE
    from topology.state.window import COMPLETE

    target = topic.removesuffix(".feedback").partition(".")[2]
    try:
        block = decode_block(value)
    except BlockError as error:
        return f"{target}/{partition}: not feedback ({error})"
    header, known = block.header, shapes[topic]
    if not isinstance(header, OF_CONSUMER):
        return f"{target}/{partition}: not feedback ({header.kind} of {header.sender})"
    time = "its end" if header.reached == COMPLETE else "its beginning"
    if 0 < header.reached < COMPLETE:
        time = datetime.fromtimestamp(header.reached / 1000, UTC).strftime("%H:%M:%S")
    who = f"{header.node}/{header.partition} to {target}/{partition}"
    if block.rows is None:
        return f"{who}: my other side has reached {time}"
    counts = Counter(int(i) for i in block.rows[SHAPE].tolist())
    what = [
        known[i] if known[i] == "everything" else f"{count} value{'s' if count > 1 else ''} of {known[i]}"
        for i, count in sorted(counts.items())
        if 0 <= i < len(known)
    ]
    verb = {"suspend": "do not make", "resume": "make again"}.get(header.kind, header.kind)
    return f"{who}: {verb} {', '.join(what)} (my other side has reached {time})"
