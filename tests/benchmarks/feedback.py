"""What feedback saves on a real mesh: a four-way join whose last stream is sparse, from Kafka to Kafka, with feedback
off, on and auto.

Three streams of equal rate join into many composites; the fourth has a partner for about 1 % of them (`--values 10`:
for most, so that there is nothing to save). All runs read the same events from the same topics, and their results are
compared. Event time runs slowly beside the processing, as in a live mesh: a window takes seconds of real time.

    python -m tests.benchmarks.feedback
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Producer

from schemas.mesh import Mesh, parse_mesh
from services.broker import LocalBroker
from services.runtime.kafka import Topic, ensure_topics
from services.supervisor.reports import ReportReader
from tests.benchmarks.__main__ import Meter, committed, first_event, running, wait_for_results

PARTITIONS = 4
MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: {partitions}
streams:
  a: {{topic: sparse-a, event_time: ts, lateness: 1s, fields: {{k: int64, m: int64, z: int64, ts: timestamp}}}}
  b: {{topic: sparse-b, event_time: ts, lateness: 1s, fields: {{k: int64, ts: timestamp}}}}
  c: {{topic: sparse-c, event_time: ts, lateness: 1s, fields: {{m: int64, ts: timestamp}}}}
  d: {{topic: sparse-d, event_time: ts, lateness: 1s, fields: {{z: int64, ts: timestamp}}}}
queries:
  four: |
    SELECT a.k, a.z FROM a [RANGE {window} SECONDS], b [RANGE {window} SECONDS], c [RANGE {window} SECONDS],
         d [RANGE {window} SECONDS]
    WHERE a.k = b.k AND a.m = c.m AND a.z = d.z
plans: {{four: "(((a b) c) d)"}}
feedback: {{four: {feedback}}}
heralds: {{four: {heralds}}}
"""
MODES = {
    "off": ("off", "off"),
    "on": ("on", "on"),
    "auto": ("auto", "on"),
    "suspend": ("on", "off"),
}  # feedback, heralds
PARTNERED = 10  # values of a.z that have a partner at any time, about


def load(
    bootstrap: str, per_stream: int, window_ms: int, fan_out: int, different: int = 100 * PARTNERED
) -> tuple[int, int]:
    """Write the events, a, b and c at one a millisecond each; gives their number and that of the results."""
    names = Mesh(name="sparse", kafka={"bootstrap.servers": bootstrap}, partitions=PARTITIONS, streams={}, queries={})
    ensure_topics(names, [Topic(f"sparse-{s}", PARTITIONS) for s in "abcd"], lambda _: None)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 2_000_000})
    rng = np.random.default_rng(1)
    keys = 2 * window_ms // fan_out  # a row meets those of a window before and of one after it
    k, m, z = (
        rng.integers(0, keys, (2, per_stream)),
        rng.integers(0, keys, (2, per_stream)),
        rng.integers(0, different, (2, per_stream)),
    )
    every, count = 2 * window_ms // PARTNERED, 0
    sparse: list[int] = []
    for i in range(per_stream):
        ts = 1_700_000_000_000 + i
        values = {
            "a": b'{"k":%d,"m":%d,"z":%d,"ts":%d}' % (k[0, i], m[0, i], z[0, i], ts),
            "b": b'{"k":%d,"ts":%d}' % (k[1, i], ts),
            "c": b'{"m":%d,"ts":%d}' % (m[1, i], ts),
        }
        if (
            i % every == every // 2 or i >= per_stream - PARTITIONS
        ):  # and one in each partition at the end, so that time passes there too
            sparse.append(i)
            values["d"] = b'{"z":%d,"ts":%d}' % (z[1, i], ts)
        for stream, value in values.items():
            producer.produce(f"sparse-{stream}", value, partition=i % PARTITIONS)
            count += 1
        if i % 1000 == 0:
            producer.poll(0)
    producer.flush()
    return count, sum(_results(i, int(z[1, i]), k, m, z[0], window_ms) for i in sparse)


def _results(at: int, value: int, k: Any, m: Any, z: Any, window: int) -> int:
    """The join, by hand, for one row of d: all four within a window."""
    near = slice(max(0, at - window), at + window + 1)
    total = 0
    for a in (np.flatnonzero(z[near] == value) + near.start).tolist():
        low, high = max(0, max(a, at) - window), min(a, at) + window
        b = np.flatnonzero(k[1, low : high + 1] == k[0, a]) + low
        c = np.flatnonzero(m[1, low : high + 1] == m[0, a]) + low
        total += int((np.abs(b[:, None] - c[None, :]) <= window).sum())
    return total


def mesh_text(name: str, bootstrap: str, mode: str, window_s: int, partitions: int) -> str:
    feedback, heralds = MODES[mode]
    return MESH.format(
        name=name, bootstrap=bootstrap, window=window_s, feedback=feedback, heralds=heralds, partitions=partitions
    )


def measure(
    bootstrap: str, home: Path, mode: str, count: int, expected: int, window_s: int, partitions: int
) -> dict[str, Any]:
    file = home / f"{mode}.yaml"
    file.write_text(mesh_text(f"sparse{mode}", bootstrap, mode, window_s, partitions))
    with running(parse_mesh(file.read_text(), str(file)), file, home / mode) as (processes, _):
        meter = Meter(processes)
        begin = first_event(bootstrap, f"sparse{mode}")
        end = wait_for_results(bootstrap, f"sparse{mode}.four.results", expected, 900, partitions)
        meter.stop()
        made = composites(parse_mesh(file.read_text(), str(file)))
    return {
        "events/s": round(count / (end - begin)),
        "seconds": round(end - begin, 1),
        "CPU s": round(meter.cpu(begin, end), 1),
        "peak memory MB": round(meter.peak_mb()),
        "composites": made,
        "results": committed(bootstrap, f"sparse{mode}.four.results", partitions),
    }


def audit(home: Path, feedback: str) -> None:
    """Prove the results of a run by Spark; ends with an error if it does not pass."""
    command = [
        sys.executable,
        "-m",
        "services.audit",
        "-f",
        str(home / f"{feedback}.yaml"),
        "--report",
        str(home / f"{feedback}-audit"),
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"feedback {feedback}: the audit does not pass\n{done.stdout}{done.stderr}")
    proof = json.loads((home / f"{feedback}-audit" / "audit.json").read_text())["queries"]["four"]
    print(f"feedback {feedback}: audit passed, expected {proof['expected']:,}, found {proof['found']:,}", flush=True)


def composites(mesh: Mesh) -> int:
    """Rows that j1 and j2 made, as they report them."""
    time.sleep(1.5)  # a report comes once a second
    reader = ReportReader(mesh)
    try:
        reports = reader.read_tail([f"four.{node}" for node in ("j1", "j2")])
        return sum(report["rows_out"] for name, report in reports.items() if name.startswith(("four.j1", "four.j2")))
    finally:
        reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.feedback", description=__doc__)
    parser.add_argument(
        "--events", type=int, default=60_000, help="of each of the three full streams (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=20, help="seconds, of all streams (default: %(default)s)")
    parser.add_argument(
        "--fan-out", type=int, default=10, help="partners of a row in the next stream (default: %(default)s)"
    )
    parser.add_argument(
        "--values",
        type=int,
        default=100 * PARTNERED,
        help=(
            f"that a composite may have for the last join, of which about {PARTNERED} have a partner (default:"
            " %(default)s, so 1 %%)"
        ),
    )
    parser.add_argument("--partitions", type=int, default=1, help="of each join node (default: %(default)s)")
    parser.add_argument(
        "--modes",
        default="off,on,auto",
        help=f"in this order, of {', '.join(MODES)} (suspend: feedback on without heralds; default: %(default)s)",
    )
    parser.add_argument("--audit", action="store_true", help="prove the results of each run by Spark; takes minutes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="joinmesh-bench-") as folder,
        LocalBroker(Path(folder) / "broker", tied=True, progress=print) as broker,
    ):
        count, expected = load(broker.bootstrap, args.events, args.window * 1000, args.fan_out, args.values)
        figures = {
            feedback: measure(broker.bootstrap, Path(folder), feedback, count, expected, args.window, args.partitions)
            for feedback in args.modes.split(",")
        }
        for feedback in figures if args.audit else ():
            audit(Path(folder), feedback)
    for feedback, row in figures.items():
        print(f"feedback {feedback:8}" + "".join(f"{name} {value:,}  " for name, value in row.items()))
    for feedback in set(figures) - {"off"} if "off" in figures else ():
        print(f"throughput of {feedback} to off: {figures[feedback]['events/s'] / figures['off']['events/s']:.2f}")
    if any(row["results"] != expected for row in figures.values()):
        raise SystemExit(f"the truth is {expected:,} results")
    if args.json:
        args.json.write_text(json.dumps({"at": time.time(), **figures}, indent=2))


if __name__ == "__main__":
    main()
