"""`make bench-jit`: the experiments of the JIT paper (section VI) on our join nodes, in event time at full speed.

REF runs with feedback off, JIT with `auto`, ON with `on`, SUSPEND with the paper's messages alone, DOE with that of the
empty sub-tuple alone. Writes points.json, a plot for each figure and the tables of the page beside the folder. Ends
with an error if two modes give different results.
"""

import argparse
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.jit import report
from tests.benchmarks.jit.run import MODES, PAPER_MODES, Figures, run
from tests.benchmarks.jit.series import (
    QUICK_HOURS,
    SCALED_HOURS,
    Case,
    cases_of,
    own_series,
    paper_series,
    quick_series,
)
from tests.benchmarks.jit.workload import plan_of, stretches

ROOT = Path(__file__).parents[3]
ONCE_OVER_S = 15.0


def measure(case: Case, modes: list[str], repeat: int, seed: int, limit_s: float) -> dict[str, dict[str, Any]]:
    """A point in every mode, in turns, because the machine is never quiet; of each mode the run that took least."""
    plan = plan_of(case.point, case.tree)
    work = {
        heralds: list(stretches(case.point, plan, case.hours, seed, case.stretch_s, heralds))
        for heralds in {MODES[mode].heralds for mode in modes}
    }
    runs: dict[str, list[Figures]] = {mode: [] for mode in modes}
    for _ in range(repeat):
        for mode, done in runs.items():
            if not done or done[0].cpu_s <= ONCE_OVER_S:
                done.append(run(plan, mode, work[MODES[mode].heralds], limit_s))
                print(f"    {mode:5} {line(done[-1])}", flush=True)
    best = {mode: min(done, key=lambda f: f.cpu_s) for mode, done in runs.items()}
    return {mode: {**asdict(best[mode]), "cpu_runs_s": [f.cpu_s for f in runs[mode]]} for mode in modes}


def line(f: Figures) -> str:
    stopped = f"  stopped after {f.stopped:.0%} of the events" if f.stopped else ""
    return (
        f"{f.cpu_s:8.2f} CPU s  {f.composites:10,} composites  {f.peak_bytes / 1e6:8.2f} MB at most  {f.messages:7,}"
        f" messages  {f.comparisons / 1e6:9,.1f} M comparisons  {f.results:,} results{stopped}"
    )


def disagreement(rows: dict[str, dict[str, Any]]) -> str | None:
    """Whether two modes that ran to the end gave different results."""
    found = {mode: (row["results"], row["digest"]) for mode, row in rows.items() if not row["stopped"]}
    return (
        None
        if len(set(found.values())) <= 1
        else ", ".join(f"{mode} {results:,} (digest {digest:016x})" for mode, (results, digest) in found.items())
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-jit ARGS=…", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small subset, in under two minutes; written to .joinmesh/ unless --to says otherwise",
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=5.0,
        help="of event time a point; the paper's runs are of 5 (default: %(default)s)",
    )
    parser.add_argument(
        "--stretch",
        type=float,
        help="seconds of event time in a block (default: a quarter of the window, as ingest makes them at full speed)",
    )
    parser.add_argument("--repeat", type=int, default=2, help="runs of each mode (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="CPU seconds after which a run is stopped (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="names of series, such as figure-10,scaled-bushy (default: all)")
    parser.add_argument(
        "--modes",
        default=",".join(PAPER_MODES),
        help=f"of {', '.join(MODES)}; REF and JIT are always among them (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--to", type=Path, help="folder for JSON and plots (default: docs/benchmarks/jit)")
    args = parser.parse_args(arguments)
    if wrong_ones := [
        name
        for name in ("hours", "stretch", "repeat", "limit")
        if getattr(args, name) is not None and not getattr(args, name) > 0
    ]:
        parser.error(f"--{wrong_ones[0]} must be more than 0")
    series = (
        quick_series(args.stretch)
        if args.quick
        else [*paper_series(args.hours, args.stretch), *own_series(args.hours, args.stretch)]
    )
    names = [s.name for s in series]
    if unknown := [n for n in args.only.split(",") if n and n not in names]:
        parser.error(f"no series {', '.join(unknown)}; there are {', '.join(names)}")
    modes = [m for m in MODES if m in {"REF", "JIT", *args.modes.upper().split(",")}]
    if unknown := [m for m in args.modes.upper().split(",") if m not in MODES]:
        parser.error(f"no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    series = [s for s in series if not args.only or s.name in args.only.split(",")]
    folder = args.to or (ROOT / ".joinmesh" / "bench-jit" if args.quick else ROOT / "docs" / "benchmarks" / "jit")
    repeat = 1 if args.quick else args.repeat
    about = {
        "quick": args.quick,
        "at": time.strftime("%Y-%m-%d"),
        "machine": f"Python {platform.python_version()}, {platform.machine()}",
        "hours": QUICK_HOURS if args.quick else args.hours,
        "stretch_s": args.stretch,
        "seed": args.seed,
        "repeat": repeat,
        "limit_s": args.limit,
        "once_over_s": ONCE_OVER_S,
        "scaled_hours": SCALED_HOURS,
    }
    cases, measured, wrong, begin = cases_of(series), {}, 0, time.monotonic()
    for k, case in enumerate(cases, 1):
        print(f"[{k}/{len(cases)}, {time.monotonic() - begin:.0f} s] {case}", flush=True)
        measured[case] = measure(case, modes, repeat, args.seed, args.limit)
        if found := disagreement(measured[case]):
            wrong += 1
            print(f"WRONG: {case}: results differ: {found}", file=sys.stderr, flush=True)
        page = report.write(folder, about, series, measured)
    print(f"wrote {page} and {folder} in {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
