"""Many workers under load: what happens to them in the middle, how long results stop for it, and an audit at the end.

A three-way join with several workers of every service. While events come in at a steady rate, one of these is done:

    rolling   every worker of every service is stopped (SIGTERM) and comes back, one after the other
    scale     every service has one worker, then four, then one again (SIGHUP to `joinmesh up`)
    drain     the last worker of every service goes for good, its partitions are others' from then on
    kill      every process is killed (SIGKILL), one after the other

A reader of committed results notes when they come. The longest pause is that of the partition of the results topic that
was silent longest, from the first result on until the last event is sent.

    python -m tests.benchmarks.scale --events 2000000

Invariant: exit code 0 means that everything was done and that the audit found the results equal to the truth.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from confluent_kafka import Consumer, TopicPartition

from schemas.mesh import Mesh, load_mesh
from services.broker import LocalBroker
from services.runtime.kafka import topic_offsets
from services.runtime.placement import Process, processes_of
from services.runtime.queries import parse_queries, services_of
from services.runtime.tied import tied_command
from services.supervisor.reports import ReportReader

READY_S = 90.0
MORE = 10  # times as many events are at hand, so that they are not over before what is done in the middle
MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: {partitions}
streams:
  orders: {{topic: {name}-orders, event_time: ts, lateness: 2s,
    fields: {{order_id: int64, amount: float64, country: string, ts: timestamp}}}}
  payments: {{topic: {name}-payments, event_time: ts, lateness: 2s,
    fields: {{order_id: int64, paid: float64, ts: timestamp}}}}
  shipments: {{topic: {name}-shipments, event_time: ts, lateness: 2s,
    fields: {{order_id: int64, carrier: string, ts: timestamp}}}}
queries:
  paid_orders: |
    SELECT o.order_id, p.paid, s.carrier
    FROM orders [RANGE 30 SECONDS] AS o, payments [RANGE 30 SECONDS] AS p, shipments [RANGE 30 SECONDS] AS s
    WHERE o.order_id = p.order_id AND o.order_id = s.order_id
placement: {placement}
workers: {workers}
"""


class Pauses:
    """Follows committed results and keeps the longest silence of each partition between two of them."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.longest = self.stood_still = 0.0
        self.results = 0
        self._last: dict[int, float] = {}
        self._done = threading.Event()
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "pauses", "isolation.level": "read_committed"}
        )
        self._consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        now = time.monotonic()
        while not self._done.is_set():
            before, first = now, self._consumer.poll(0.05)
            now = time.monotonic()
            self.stood_still = max(self.stood_still, now - before)
            came = [] if first is None else [first, *self._consumer.consume(10_000, 0)]
            for partition in {m.partition() for m in came if m.error() is None}:
                assert partition is not None
                self.longest = max(self.longest, now - self._last.get(partition, now))
                self._last[partition] = now
            self.results += sum(m.error() is None for m in came)

    def take(self) -> str:
        """The longest since it was last asked; and for how long this reader itself, which does next to nothing, did not
        run: on a busy machine that is no pause of the mesh."""
        said = (
            f"longest pause {self.longest:.1f} s (the reader itself stood still for {self.stood_still:.1f} s at most)"
        )
        self.longest = self.stood_still = 0.0
        return said

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._consumer.close()


class Run:
    def __init__(self, args: argparse.Namespace, folder: Path, bootstrap: str) -> None:
        self.args, self.folder, self.file = args, folder, folder / "mesh.yaml"
        self.bootstrap, self.name = bootstrap, args.name
        self.up: subprocess.Popen[bytes] | None = None

    def write(self, **workers: int) -> None:
        text = ", ".join(f"{name}: {count}" for name, count in workers.items())
        self.file.write_text(
            MESH.format(
                name=self.name,
                bootstrap=self.bootstrap,
                partitions=self.args.partitions,
                placement=self.args.placement,
                workers=f"{{{text}}}",
            )
        )

    @property
    def mesh(self) -> Mesh:
        return load_mesh(self.file)

    def command(self, *words: object, log: str = "commands.log") -> "subprocess.Popen[bytes]":
        line = tied_command([sys.executable, "-m", "services.cli.main", *map(str, words)])
        with open(self.folder / log, "ab") as out:
            env = {**os.environ, "JOINMESH_RESTART_MOST_S": "1"}
            return subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, env=env)

    def do(self, *words: object, log: str = "commands.log") -> int:
        return self.command(*words, log=log).wait()

    def start(self) -> None:
        self.up = self.command("up", "-f", self.file, "--data", self.folder / "data", log="up.log")

    def workers(self) -> list[str]:
        return [name for process in self.processes() for name in process.workers]

    def wait_ready(self, workers: list[str], since: float) -> float:
        """Until these have started since a moment and are ready; seconds."""
        reader = ReportReader(self.mesh).from_end()
        try:
            while time.time() - since < READY_S:
                reader.poll(0.1)
                said = [reader.latest.get(name, {}) for name in workers]
                if all(r.get("started_ms", 0) >= since * 1000 and r.get("ready", True) for r in said):
                    return time.time() - since
            raise RuntimeError(f"{workers} are not ready within {READY_S:.0f} s; see {self.folder / 'up.log'}")
        finally:
            reader.close()

    def events(self) -> int:
        """How many there are in the source topics."""
        topics = {stream.topic: self.args.partitions for stream in self.mesh.streams.values()}
        return sum(high for ends in topic_offsets(self.mesh, topics).values() for _, high in ends)

    def processes(self) -> list[Process]:
        mesh = self.mesh
        return processes_of(mesh, services_of(mesh, parse_queries(mesh)))

    def running(self, wanted: Process) -> psutil.Process | None:
        """The child that runs as this process of the mesh now."""
        assert self.up is not None
        for child in psutil.Process(self.up.pid).children():
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if all(word in line for word in wanted.command()) and ("--instance" in line) == (wanted.instance > 0):
                    return child
        return None

    def running_now(self) -> int:
        assert self.up is not None
        return len(psutil.Process(self.up.pid).children())

    # -- what is done in the middle

    def each(self, how: signal.Signals) -> list[str]:
        told = []
        for process in self.processes():
            child, since = self.running(process), time.time()
            if child is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(how)
            told.append(f"{', '.join(process.workers)} back after {self.wait_ready(process.workers, since):.1f} s")
        return told

    def scale(self) -> list[str]:
        told = []
        for count in (4, 1):
            before, since = set(self.workers()), time.time()
            self.write(ingest=count, j1=count, j2=count, sink=count)
            told.append(self.rescale(before, since, f"{count} workers of each"))
        return told

    def drain(self) -> list[str]:
        before, since = set(self.workers()), time.time()
        args = self.args
        self.write(ingest=args.ingest - 1, j1=args.node - 1, j2=args.node - 1, sink=args.sink - 1)
        return [self.rescale(before, since, "one worker fewer of each")]

    def rescale(self, before: set[str], since: float, what: str) -> str:
        assert self.up is not None
        self.up.send_signal(signal.SIGHUP)
        wanted = len(self.processes())
        self.wait_ready(sorted(set(self.workers()) - before), since)
        while self.running_now() != wanted:
            if time.time() - since > READY_S:
                raise RuntimeError(f"{what}: not within {READY_S:.0f} s; see {self.folder / 'up.log'}")
            time.sleep(0.1)
        return f"{what} after {time.time() - since:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", default=["rolling"], help="rolling, scale, drain, kill (default: rolling)")
    parser.add_argument("--events", type=int, default=2_000_000, help="over all streams, at least (default: 2,000,000)")
    parser.add_argument("--rate", type=int, default=10_000, help="events a second (default: 10,000)")
    parser.add_argument("--node", type=int, default=3, help="workers of each join node (default: 3)")
    parser.add_argument("--ingest", type=int, default=2, help="ingest workers (default: 2)")
    parser.add_argument("--sink", type=int, default=2, help="sink workers (default: 2)")
    parser.add_argument("--partitions", type=int, default=6, help="of every topic (default: 6)")
    parser.add_argument("--placement", default="per-service")
    parser.add_argument("--bootstrap", help="a broker that runs (default: an own one)")
    parser.add_argument("--name", default="scale", help="name of the mesh")
    parser.add_argument("--folder", type=Path, help="for state and logs (default: a temporary one)")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="joinmesh-scale-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.bootstrap:
        return run(args, folder, args.bootstrap)
    with LocalBroker(folder / "broker", tied=True) as broker:
        return run(args, folder, broker.bootstrap)


def run(args: argparse.Namespace, folder: Path, bootstrap: str) -> int:
    one = Run(args, folder, bootstrap)
    if "scale" in args.what:
        one.write(ingest=1, j1=1, j2=1, sink=1)
    else:
        one.write(ingest=args.ingest, j1=args.node, j2=args.node, sink=args.sink)
    per_stream = args.events // 3
    one.do("generate", "-f", one.file, "--create", args.partitions, "--count", 0)
    begun = time.time()
    one.start()
    pauses: Pauses | None = None
    try:
        one.wait_ready(one.workers(), begun)
        print(f"{len(one.workers())} workers in {one.running_now()} processes are ready", flush=True)
        many = MORE * per_stream
        feed = one.command("generate", "-f", one.file, "--count", many, "--rate", args.rate, "--start", "now",
                           "--out-of-order", 500, "--late", 0.002, "--broken", 0.002, log="generate.log")  # fmt: skip
        fed = time.time()
        pauses = Pauses(bootstrap, f"{one.name}.paid_orders.results", args.partitions)
        time.sleep(min(10.0, per_stream * 3 / args.rate / 4))
        print(f"before: {pauses.take()}", flush=True)
        for what in args.what:
            todo = {"rolling": lambda: one.each(signal.SIGTERM), "kill": lambda: one.each(signal.SIGKILL),
                    "scale": one.scale, "drain": one.drain}[what]  # fmt: skip
            for line in todo():
                print(f"{what}: {line}", flush=True)
            time.sleep(3)
            if feed.poll() is not None:
                raise RuntimeError(f"{what}: the events were over before it was; see {folder / 'generate.log'}")
            print(f"{what}: {pauses.take()}", flush=True)
        time.sleep(max(0.0, fed + args.events / args.rate - time.time()))
        feed.terminate()
        feed.wait()
        took = time.time() - begun
        stop(one)
        one.do("up", "-f", one.file, "--data", folder / "data", "--until-idle", 3, log="up.log")
        print(f"{one.events():,} events in {took:.0f} s; auditing", flush=True)
        passed = one.do("audit", "-f", one.file, "--report", folder / "report", log="audit.log") == 0
    finally:
        stop(one)
        if pauses is not None:
            pauses.close()
    verdict = json.loads((folder / "report" / "audit.json").read_text())
    counts = {key: n for q in verdict["queries"].values() for key, n in q.items() if isinstance(n, int)}
    print(", ".join(f"{name} {n:,}" for name, n in counts.items()))
    print("audited equal" if passed else f"NOT EQUAL; see {folder}", flush=True)
    return 0 if passed else 1


def stop(one: Run) -> None:
    if one.up is not None and one.up.poll() is None:
        one.up.send_signal(signal.SIGTERM)
        one.up.wait(60)


if __name__ == "__main__":
    sys.exit(main())
