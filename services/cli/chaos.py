"""Runs a four-way join under load with faults done to it, and audits the results at the end.

Invariant: exit code 0 only if every fault was done and the audit passed.
"""

import argparse
import time
from pathlib import Path

from services.cli.common import table

EXAMPLES = """faults: migrate, kill, broker-kill, broker-restart, pause, workers, wipe, disk-full (needs root)

examples:
  joinmesh chaos                                                   a short run
  joinmesh chaos --events 300000 --rate 4000 --faults kill:50      fifty kills of random services
  joinmesh chaos --faults none --failpoints node.after_batch:9,sink.before_commit:5"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="same seed, same schedule (default: 1)")
    parser.add_argument("--events", type=int, default=60_000, help="events over all four streams (default: 60000)")
    parser.add_argument("--rate", type=int, default=3_000, help="events a second (default: 3000)")
    parser.add_argument(
        "--faults", default="kill:6,broker-kill:1,wipe:1", help="what and how often (default: %(default)s)"
    )
    parser.add_argument(
        "--failpoints", default="", metavar="POINT:N,…", help="die at these points of the step, every N-th time"
    )
    parser.add_argument("--times", type=int, default=20, help="deaths per failpoint (default: 20)")
    parser.add_argument(
        "--feedback",
        choices=("on", "off", "auto"),
        default="off",
        help="whether the joins give feedback (default: off)",
    )
    parser.add_argument("--secure", action="store_true", help="a broker with TLS, one password a service, and ACLs")
    parser.add_argument(
        "--folder", type=Path, help="keep broker, state, logs and report here (default: a temporary folder)"
    )


def run(args: argparse.Namespace) -> int:
    from schemas.errors import JoinmeshError
    from services.chaos.faults import FAULTS
    from services.chaos.run import Plan, run_chaos, summary

    faults = {}
    for text in filter(None, args.faults.split(",")) if args.faults != "none" else []:
        name, _, count = text.partition(":")
        if name not in FAULTS:
            raise JoinmeshError(f"no fault `{name}`; use {', '.join(FAULTS)}, or none")
        faults[name] = int(count or 1)
    plan = Plan(args.seed, args.events, args.rate, faults, args.failpoints, args.times, args.feedback, args.secure)
    passed, done, verdict = run_chaos(
        plan, args.folder, lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
    )
    print(
        table(
            ["fault", "target", "times", "median recovery", "worst"],
            [list(map(str, row)) for row in summary(done)],
            ["times"],
        )
    )
    for query, counts in verdict.get("queries", {}).items():
        keys = ("expected", "found", "missing", "extra", "duplicate", "wrong")
        print(f"{query}: " + ", ".join(f"{key} {counts[key]:,}" for key in keys))
    print(f"seed {args.seed}: {'PASSED' if passed else 'FAILED'}")
    return 0 if passed else 1
