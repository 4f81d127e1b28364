"""What a mesh of several queries costs when all services share a process, and when each has its own.

Memory is the proportional set size of all its processes (shared pages counted once), `joinmesh up` included; CPU is in
percent of one core, over some seconds without events and over some at a steady rate.

    python -m tests.benchmarks.placement --queries 3
"""

import argparse
import tempfile
import time
from pathlib import Path

import psutil

from schemas.mesh import parse_mesh
from services.broker import LocalBroker
from tests.benchmarks.live import feed, make_topics, mesh_text
from tests.benchmarks.scale import Run, stop

SETTLE_S, IDLE_S, BUSY_S = 5.0, 15.0, 20


def cost(up: psutil.Process) -> tuple[float, float, int]:
    """Megabytes, CPU seconds so far, and how many processes."""
    all_of_it = [up, *up.children(recursive=True)]
    memory = sum(p.memory_full_info().pss for p in all_of_it) / 2**20
    return memory, sum(sum(p.cpu_times()[:2]) for p in all_of_it), len(all_of_it)


def measure(bootstrap: str, folder: Path, placement: str, queries: int, rate: int) -> str:
    name = f"placed-{placement}"
    args = argparse.Namespace(name=name, placement=placement, partitions=4)
    one = Run(args, folder / placement, bootstrap)
    one.folder.mkdir()
    text = mesh_text(name, bootstrap, "ab")
    joined = text[text.index("  joined: |") : text.index("plans:")]
    more = "".join(joined.replace("joined", f"joined{k}") for k in range(1, queries))
    one.file.write_text(text.replace("plans:", f"{more}placement: {placement}\nplans:"))
    make_topics(bootstrap, [s.topic for s in parse_mesh(one.file.read_text()).streams.values()])
    begun = time.time()
    one.start()
    try:
        one.wait_ready(one.workers(), begun)
        assert one.up is not None
        up = psutil.Process(one.up.pid)
        time.sleep(SETTLE_S)
        idle_mb, before, count = cost(up)
        time.sleep(IDLE_S)
        idle = (cost(up)[1] - before) / IDLE_S
        before = cost(up)[1]
        feed(bootstrap, [f"{name}-a", f"{name}-b"], rate, BUSY_S)
        busy_mb, after, _ = cost(up)
        return (
            f"{placement}: {count} processes with `up`; idle {idle_mb:,.0f} MB, {idle:.0%} of a core;"
            f" at {rate:,} events/s {busy_mb:,.0f} MB, {(after - before) / BUSY_S:.0%} of a core"
        )
    finally:
        stop(one)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.placement")
    parser.add_argument("--queries", type=int, default=3, help="two-way joins over the same streams (default: 3)")
    parser.add_argument("--rate", type=int, default=10_000, help="events a second (default: 10,000)")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="joinmesh-placement-") as home,
        LocalBroker(Path(home) / "broker", tied=True) as broker,
    ):
        for placement in ("together", "per-service"):
            print(measure(broker.bootstrap, Path(home), placement, args.queries, args.rate), flush=True)


if __name__ == "__main__":
    main()
