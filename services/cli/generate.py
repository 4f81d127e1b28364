"""Writes reproducible sample events for any mesh file to its source topics.

Invariant: the same mesh file, options and seed give the same values in the same partitions in the same order.
"""

import argparse
import time

from services.cli.common import add_mesh, mesh_of, number, progress, table

EXAMPLES = """keys:
  related      streams follow one another (orders, payments, shipments): the same key a little later, mostly one each
  uniform      any of --key-count keys, equally likely
  zipf         a few of them very often
  sequential   one after the other, beginning again after --key-count

examples:
  joinmesh generate -f mesh.yaml --create 4 --count 100000
  joinmesh generate -f mesh.yaml --keys zipf --key-count 1000 --out-of-order 2000 --late 0.01 --broken 0.01 --null 0.01
  joinmesh generate -f mesh.yaml --rate 10000 --start now      as if live"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument(
        "--stream", action="append", metavar="S", help="only this stream (may be given several times; default: all)"
    )
    parser.add_argument("--count", type=int, default=10_000, help="events per stream (default: 10000)")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same events (default: 1)")
    parser.add_argument(
        "--rate", type=float, help="events a second by the clock, all streams together (default: as fast as possible)"
    )
    parser.add_argument(
        "--event-rate",
        type=float,
        help="events per second of event time, per stream (default: 1000, or as --rate makes it)",
    )
    parser.add_argument(
        "--keys",
        choices=("uniform", "zipf", "related", "sequential"),
        default="related",
        help="see below (default: related)",
    )
    parser.add_argument(
        "--key-count", type=int, metavar="K", help="how many keys (default: 10000; related: as many as events)"
    )
    parser.add_argument(
        "--out-of-order",
        type=int,
        default=0,
        metavar="MS",
        help="events come up to so much after others that are younger",
    )
    parser.add_argument(
        "--late", type=float, default=0.0, metavar="SHARE", help="share of events later than the stream's lateness"
    )
    parser.add_argument(
        "--broken", type=float, default=0.0, metavar="SHARE", help="share of records that cannot be decoded"
    )
    parser.add_argument("--null", type=float, default=0.0, metavar="SHARE", help="share of events with one field null")
    parser.add_argument(
        "--start",
        default=None,
        metavar="EPOCH_MS",
        help="event time of the first event, or `now` (default: 2025-01-01T00:00:00Z)",
    )
    parser.add_argument(
        "--create", type=int, metavar="PARTITIONS", help="create missing source topics with so many partitions"
    )


def run(args: argparse.Namespace) -> int:
    from services.generator import Workload, generate
    from services.generator.workload import DEFAULT_START_MS

    mesh = mesh_of(args)
    work = Workload(
        count=args.count,
        seed=args.seed,
        rate=args.rate,
        event_rate=args.event_rate,
        keys=args.keys,
        key_count=args.key_count,
        out_of_order_ms=args.out_of_order,
        late=args.late,
        broken=args.broken,
        null=args.null,
        start_ms=DEFAULT_START_MS if args.start is None else _start(args.start),
    )
    done = generate(mesh, work, streams=args.stream, create=args.create, progress=progress)
    rows = [
        [s.stream, s.topic, s.partitions, number(s.events), number(s.late), number(s.broken), number(s.null)]
        for s in done.streams
    ]
    right = ["partitions", "events", "late", "broken", "null"]
    print(table(["stream", "topic", *right], rows, right))
    print(f"{done.events:,} events in {done.seconds:.1f} s ({done.events / max(done.seconds, 1e-9):,.0f}/s)")
    return 0


def _start(text: str) -> int:
    from schemas.errors import JoinmeshError

    if text == "now":
        return int(time.time() * 1000)
    if not text.isdigit():
        raise JoinmeshError(f"--start is a number of epoch milliseconds or `now`, not {text}")
    return int(text)
