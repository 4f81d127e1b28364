"""`make bench`: a 2-way join of JSON events, Kafka to Kafka, beside a hand-written join in the same run.

The work: two streams, 60 s windows, about 60,000 events a side in a window, about one match per event. Printed:
events/s (from the first event read to the last result written), CPU seconds per million events over all services, peak
memory; then p50 and p99 latency at a fixed 10,000 events/s (from an event's creation to its result in the hands of a
read_committed reader) of the 2-way join and of a 3-way chain, and what the services take of a core while nothing comes.
Every run's results are counted against the truth; a wrong count is an error, not a figure.

`--kstreams DIR` feeds a Kafka Streams program (a folder with pom.xml and KStreamsJoin.java) at the same rate on the
same broker, with exactly_once_v2 at its default commit interval, and prints its latency beside ours.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from schemas.mesh import Mesh, parse_mesh
from schemas.topics import Topic
from services.broker import LocalBroker
from services.runtime.kafka import ensure_topics
from services.runtime.queries import parse_queries, services_of, topics_of
from services.supervisor.reports import ReportReader, instances
from tests.benchmarks import live

WINDOW_MS, KEYS, PARTITIONS = 60_000, 60_000, 4
MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 4
streams:
  a: {{topic: {a}, event_time: ts, lateness: 1s, fields: {{id: int64, ts: int64, x: int64}}}}
  b: {{topic: {b}, event_time: ts, lateness: 1s, fields: {{id: int64, ts: int64, x: int64}}}}
queries:
  pairs: |
    SELECT a.id AS a_id, b.id AS b_id FROM a [RANGE 60 SECONDS], b [RANGE 60 SECONDS] WHERE a.x = b.x
"""


def make_events(side: int, count: int, start_ms: int = 1_700_000_000_000) -> pl.DataFrame:
    rng = np.random.default_rng(side + 1)
    times = start_ms + np.arange(count) - rng.integers(0, 500, count)
    return pl.DataFrame(
        {"id": np.arange(count), "ts": times, "x": rng.integers(0, KEYS, count), "y": rng.integers(0, KEYS, count)}
    )


def load(bootstrap: str, topic: str, events: pl.DataFrame) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    lines = events.with_columns(v=pl.lit("payload-of-no-interest")).write_ndjson().split("\n")
    for begin in range(0, len(events), 50_000):
        part = lines[begin : begin + 50_000]
        keys = events["x"][begin : begin + 50_000].to_list()
        for line, key in zip(part, keys, strict=False):
            producer.produce(topic, line, partition=key % PARTITIONS)
        producer.flush()


def count_pairs(a: pl.DataFrame, b: pl.DataFrame) -> int:
    """The truth: on-time events of each side, pairs of equal x within the window."""

    def on_time(events: pl.DataFrame) -> pl.DataFrame:
        largest = pl.col("ts").cum_max().shift(1).over(pl.col("x") % PARTITIONS).fill_null(0)
        return events.filter(pl.col("ts") >= largest - 1000)

    pairs = on_time(a).join(on_time(b), on="x", suffix="_b")
    return int(pairs.select(((pl.col("ts") - pl.col("ts_b")).abs() <= WINDOW_MS).sum()).item())


class Meter:
    """CPU and memory of some processes over time."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self.processes, self.samples, self._stop = processes, [], threading.Event()  # type: ignore[var-annotated]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            cpu, memory = 0.0, 0
            for process in self.processes:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    cpu += times.user + times.system
                    memory += process.memory_info().rss
            self.samples.append((time.time(), cpu, memory))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def cpu(self, begin: float, end: float) -> float:
        inside = [cpu for at, cpu, _ in self.samples if begin - 0.1 <= at <= end + 0.1]
        return inside[-1] - inside[0]

    def peak_mb(self) -> float:
        return max(memory for _, _, memory in self.samples) / 1e6


def wait_for_results(
    bootstrap: str, topic: str, expected: int, limit_s: float = 180, partitions: int = PARTITIONS
) -> float:
    """Time at which the topic held its last record (transaction markers count as records, so at least `expected`)."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench-ends"})
    last, since, begun = -1, time.time(), time.time()
    while time.time() - begun < limit_s:
        try:
            total = sum(
                consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=10)[1] for p in range(partitions)
            )
        except KafkaException:  # the topic is not there yet
            time.sleep(0.2)
            continue
        now = time.time()
        if total != last:
            last, since = total, now
        elif last >= expected and now - since > 1.5:
            consumer.close()
            return since
        time.sleep(0.05)
    raise SystemExit(f"only {last:,} of {expected:,} results after {limit_s:.0f} s")


def committed(bootstrap: str, topic: str, partitions: int = PARTITIONS) -> int:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench-count",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    found = ended = 0
    while ended < partitions:
        for message in consumer.consume(20_000, 1.0):
            if message.error() is None:
                found += 1
            else:
                ended += 1
    consumer.close()
    return found


@contextlib.contextmanager
def running(mesh: Mesh, file: Path, data: Path) -> Iterator[tuple[list[psutil.Process], Path]]:
    """All services of the mesh as processes, as the supervisor starts them; ingest last, so that start-up is not in the
    figures."""
    queries = parse_queries(mesh)
    ensure_topics(mesh, topics_of(mesh, queries), lambda _: None)
    logs = data / "logs"
    logs.mkdir(parents=True)
    children: list[subprocess.Popen[bytes]] = []
    services = sorted(services_of(mesh, queries), key=lambda service: service.name == "ingest")
    for service in services:
        if service.name == "ingest":
            wait_until_ready(mesh, [s.name for s in services if s.query])
        command = [sys.executable, "-m", service.module, "-f", str(file), "--data", str(data)]
        command += ["--query", service.query] if service.query else []
        command += ["--node", service.node] if service.node else []
        with open(logs / f"{service.name}.log", "wb") as log:
            env = {**os.environ, "POLARS_MAX_THREADS": "1"}
            children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        yield [psutil.Process(child.pid) for child in children], logs
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_until_ready(mesh: Mesh, names: list[str], limit_s: float = 60) -> None:
    reader = ReportReader(mesh).from_end()
    deadline = time.time() + limit_s
    while not all(any(r.get("ready") for r in instances(reader.latest, name).values()) for name in names):
        reader.poll(0.1)
        if time.time() > deadline:
            raise SystemExit(f"{', '.join(names)} were not ready within {limit_s:.0f} s")
    reader.close()


def first_event(bootstrap: str, mesh: str, limit_s: float = 60) -> float:
    """When ingest read its first event, by its own report."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench-report", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(f"{mesh}.report", 0, 0)])
    deadline = time.time() + limit_s
    while time.time() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            first = json.loads(message.value() or b"{}").get("first_event_ms")
            if first:
                consumer.close()
                return float(first) / 1000
    raise SystemExit("ingest never reported an event")


def throughput(bootstrap: str, home: Path, count: int) -> dict[str, dict[str, Any]]:
    a, b = make_events(0, count // 2), make_events(1, count // 2)
    expected = count_pairs(a, b)
    print(f"loading {count:,} events; they have {expected:,} pairs", flush=True)
    plain_mesh = Mesh(
        name="bench", kafka={"bootstrap.servers": bootstrap}, partitions=PARTITIONS, streams={}, queries={}
    )
    ensure_topics(
        plain_mesh,
        [Topic("bench-a", PARTITIONS), Topic("bench-b", PARTITIONS), Topic("bench-plain", PARTITIONS)],
        lambda _: None,
    )
    load(bootstrap, "bench-a", a)
    load(bootstrap, "bench-b", b)
    figures = {}
    print("running the hand-written join", flush=True)
    child = subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("plain_join.py")),
            bootstrap,
            "bench-a",
            "bench-b",
            "bench-plain",
            str(WINDOW_MS),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    meter = Meter([psutil.Process(child.pid)])
    assert child.stdout is not None
    begin = float(child.stdout.readline().split()[1])
    end = wait_for_results(bootstrap, "bench-plain", int(expected * 0.99))
    meter.stop()
    child.terminate()
    child.wait(10)
    figures["hand-written, no recovery"] = _figures(
        count, begin, end, meter, committed(bootstrap, "bench-plain"), expected
    )
    print("running the mesh", flush=True)
    file = home / "bench.yaml"
    file.write_text(MESH.format(name="bench", bootstrap=bootstrap, a="bench-a", b="bench-b"))
    with running(parse_mesh(file.read_text(), str(file)), file, home / "data") as (processes, _):
        meter = Meter(processes)
        begin = first_event(bootstrap, "bench")
        end = wait_for_results(bootstrap, "bench.pairs.results", expected, 60)
        meter.stop()
    found = committed(bootstrap, "bench.pairs.results")
    if found != expected:
        raise SystemExit(f"the mesh wrote {found:,} results, the truth is {expected:,}")
    figures["joinmesh, exactly once"] = _figures(count, begin, end, meter, found, expected)
    return figures


def _figures(count: int, begin: float, end: float, meter: Meter, found: int, expected: int) -> dict[str, Any]:
    seconds, cpu = end - begin, meter.cpu(begin, end)
    return {
        "events/s": round(count / seconds),
        "CPU s per 1M events": round(cpu / count * 1e6, 2),
        "peak memory MB": round(meter.peak_mb()),
        "results": found,
        "of": expected,
    }


def latency(bootstrap: str, home: Path, streams: str, rate: int, seconds: int, idle_s: float) -> dict[str, Any]:
    """Of a join of some streams at a fixed rate; before it, what its services take while nothing comes."""
    name = f"live{len(streams)}"
    topics_in = [f"{name}-{stream}" for stream in streams]
    live.make_topics(bootstrap, topics_in)
    file = home / f"{name}.yaml"
    file.write_text(live.mesh_text(name, bootstrap, streams))
    mesh = parse_mesh(file.read_text(), str(file))
    with running(mesh, file, home / name) as (processes, _):
        time.sleep(6)
        idle = live.idle_cpu({service_of(process): process for process in processes}, idle_s)
        figures: dict[str, Any] = live.measure(bootstrap, topics_in, f"{name}.joined.results", rate, seconds)
    return figures | {"idle % of a core": {service: round(percent, 1) for service, percent in idle.items()}}


def service_of(process: psutil.Process) -> str:
    """`join_node j1`, from the command line it was started with."""
    words = process.cmdline()
    node = words[words.index("--node") + 1] if "--node" in words else ""
    return f"{words[words.index('-m') + 1].split('.')[1]} {node}".strip()


def recovery(bootstrap: str, home: Path, rows: int) -> float:
    """Seconds from kill -9 of a join node that holds `rows` rows to the first result of an event made after the
    kill."""
    names = Mesh(name="again", kafka={"bootstrap.servers": bootstrap}, partitions=PARTITIONS, streams={}, queries={})
    ensure_topics(names, [Topic("again-a", PARTITIONS), Topic("again-b", PARTITIONS)], lambda _: None)
    load(bootstrap, "again-a", make_events(0, rows // 2))
    load(bootstrap, "again-b", make_events(1, rows // 2))
    file = home / "again.yaml"
    file.write_text(
        MESH.format(name="again", bootstrap=bootstrap, a="again-a", b="again-b").replace("60 SECONDS", "1 HOUR")
    )
    up = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "up", "-f", str(file), "--data", str(home / "again")],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "POLARS_MAX_THREADS": "1"},
    )
    begin_ms = 1_700_000_000_000 + rows // 2
    begun, done, found = time.time(), threading.Event(), threading.Event()
    killed_ms = 1 << 62

    def now_ms() -> int:
        return begin_ms + int((time.time() - begun) * 1000)

    def produce() -> None:
        producer, key = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1}), 10_000_000
        while not done.wait(0.05):
            for partition in range(PARTITIONS):  # a pair in each partition, and time moves in all of them
                for topic in ("again-a", "again-b"):
                    value = b'{"id":%d,"ts":%d,"x":%d}' % (key, now_ms(), key + partition)
                    producer.produce(topic, value, partition=partition)
            key += PARTITIONS
            producer.poll(0)
        producer.flush()

    def read() -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "again",
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 10,
            }
        )
        places = [TopicPartition("again.pairs.results", p) for p in range(PARTITIONS)]
        for place in places:  # only what comes now: reading the million before it would be measured too
            place.offset = consumer.get_watermark_offsets(place, timeout=10)[1]
        consumer.assign(places)
        while not done.is_set():
            for message in consumer.consume(10_000, 0.05):
                if message.error() is None and message.timestamp()[1] > killed_ms:
                    found.set()
        consumer.close()

    try:
        wait_for_results(bootstrap, "again.pairs.results", rows, 240)
        threads = [threading.Thread(target=target) for target in (produce, read)]
        for thread in threads:
            thread.start()
        time.sleep(15)
        node = next(p for p in psutil.Process(up.pid).children(recursive=True) if "services.join_node" in p.cmdline())
        node.kill()
        at, killed_ms = time.time(), now_ms() + 50
        if not found.wait(120):
            raise SystemExit("no result within 120 s after the kill")
        return time.time() - at
    finally:
        done.set()
        up.terminate()
        up.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--latency-seconds", type=int, default=20)
    parser.add_argument(
        "--recovery",
        action="store_true",
        help="only: time to the next result after kill -9 of a node with 1M rows of state",
    )
    parser.add_argument("--latency-only", action="store_true", help="leave out the throughput")
    parser.add_argument("--rate", type=int, default=10_000, help="events/s at which latency is measured")
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument(
        "--kstreams", type=Path, metavar="DIR", help="also measure the Kafka Streams program of this folder; needs mvn"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="joinmesh-bench-") as folder:
        home = Path(folder)
        with LocalBroker(home / "broker", tied=True, progress=print) as broker:
            if args.recovery:
                print(
                    f"next result {recovery(broker.bootstrap, home, 1_000_000):.1f} s after kill -9 of a node with"
                    " 1,000,000 rows of state"
                )
                return
            figures = {} if args.latency_only else throughput(broker.bootstrap, home, args.events)
            soon = latencies(broker.bootstrap, home, args)
    if figures:
        print_throughput(figures)
    print_latencies(soon)
    if args.json:
        args.json.write_text(json.dumps({"throughput": figures, "latency": soon}, indent=2))


def latencies(bootstrap: str, home: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    found = {}
    for who, streams in (("joinmesh, 2-way", "ab"), ("joinmesh, 3-way chain", "abc")):
        print(f"measuring latency at {args.rate:,} events/s for {args.latency_seconds} s: {who}", flush=True)
        found[who] = latency(bootstrap, home, streams, args.rate, args.latency_seconds, args.idle_seconds)
    if args.kstreams:
        print(f"measuring Kafka Streams at {args.rate:,} events/s for {args.latency_seconds} s", flush=True)
        found["Kafka Streams, 2-way"] = live.kafka_streams(
            bootstrap, args.kstreams, home, args.rate, args.latency_seconds
        )
    return found


def print_throughput(figures: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':28}" + "".join(f"{name:>22}" for name in next(iter(figures.values()))))
    for who, row in figures.items():
        print(f"{who:28}" + "".join(f"{value:>22,}" for value in row.values()))
    ours, plain = figures["joinmesh, exactly once"], figures["hand-written, no recovery"]
    print(f"\nratio of throughput: {ours['events/s'] / plain['events/s']:.2f}")


def print_latencies(soon: dict[str, dict[str, Any]]) -> None:
    names = ("events/s", "results", "p50 ms", "p99 ms")
    print(f"\n{'latency, exactly once':28}" + "".join(f"{name:>12}" for name in names))
    for who, row in soon.items():
        print(f"{who:28}" + "".join(f"{row[name]:>12,.0f}" for name in names))
    for who, row in soon.items():
        for service, percent in row.get("idle % of a core", {}).items():
            print(f"{f'{who}, idle':34}{service:>14}{percent:>8} % of a core")


if __name__ == "__main__":
    main()
