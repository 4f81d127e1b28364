"""`make bench-steps`: CPU microseconds of small steps, and the bytes a step asks to be written or sent.

    python -m tests.benchmarks.steps --before DIR

also measures the code of another checkout with the same program, and prints both in one table. Each checkout is
measured in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
Costs = dict[str, tuple[float, float]]  # what -> microseconds, bytes


def measure(checkout: Path, only: str) -> Costs:
    command = [sys.executable, str(Path(__file__).with_name("measure.py")), *([only] if only else [])]
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "POLARS_MAX_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    costs: Costs = json.loads(done.stdout)
    return costs


def table(columns: dict[str, Costs]) -> str:
    lines = [f"{'':40}" + "".join(f"{f'{name} us':>14}{'bytes':>14}" for name in columns)]
    for what in next(iter(columns.values())):
        lines.append(f"{what:40}" + "".join(f"{c[what][0]:>14,.0f}{c[what][1]:>14,.0f}" for c in columns.values()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-steps", description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, measured beside this one")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    checkouts = ({"before": args.before} if args.before else {}) | {"now": ROOT}
    columns = {name: measure(checkout, args.only) for name, checkout in checkouts.items()}
    print(table(columns))
    if args.json:
        args.json.write_text(json.dumps(columns, indent=2))


if __name__ == "__main__":
    main()
