"""How soon results come at a steady rate, and what services that have nothing to do cost.

Events are made as they are sent, so a result's time (the largest of its events') is when its last event was made, and
its latency ends in the hands of a read_committed reader. The same feed and the same reader serve our 2-way join, our
3-way chain of two nodes and Kafka Streams, so that only what stands between them differs.

Invariant: every figure is of results that were read; those of the first `WARM_S` seconds (connections, caches, a broker
that was just started and is still being compiled) are not counted, whoever is measured.
"""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from confluent_kafka import Consumer, Producer, TopicPartition

from schemas.mesh import Mesh
from schemas.topics import Topic
from services.runtime.kafka import ensure_topics

PARTITIONS = 4
WARM_S = 15
MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 4
streams:
{streams}
queries:
  joined: |
    SELECT {columns} FROM {sources} WHERE {equalities}
plans:
  joined: "{plan}"
"""
EXACTLY_ONCE = "c.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);"


def mesh_text(name: str, bootstrap: str, streams: str) -> str:
    """A mesh that joins some streams on `x`, from left to right."""
    plan = streams[0]
    for stream in streams[1:]:
        plan = f"({plan} {stream})"
    field = "event_time: ts, lateness: 1s, fields: {id: int64, ts: int64, x: int64}"
    return MESH.format(
        name=name,
        bootstrap=bootstrap,
        streams="\n".join(f"  {s}: {{topic: {name}-{s}, {field}}}" for s in streams),
        columns=", ".join(f"{s}.id AS {s}_id" for s in streams),
        sources=", ".join(f"{s} [RANGE 60 SECONDS]" for s in streams),
        equalities=" AND ".join(f"{streams[0]}.x = {s}.x" for s in streams[1:]),
        plan=plan,
    )


def make_topics(bootstrap: str, topics: list[str]) -> None:
    mesh = Mesh(name="live", kafka={"bootstrap.servers": bootstrap}, partitions=PARTITIONS, streams={}, queries={})
    ensure_topics(mesh, [Topic(topic, PARTITIONS) for topic in topics], lambda _: None)


def feed(bootstrap: str, topics: list[str], rate: int, seconds: int) -> int:
    """Send events to the topics in turn, each with the time it is made; how many."""
    producer, rng = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5}), np.random.default_rng(3)
    values, begun, sent = rate // len(topics) * seconds, time.time(), 0  # about one result per event of a topic at last
    while (passed := time.time() - begun) < seconds:
        due = int(passed * rate) - sent
        now = int(time.time() * 1000)
        for k, x in enumerate(rng.integers(0, values, due).tolist()):
            event = b'{"id":%d,"ts":%d,"x":%d}' % (sent + k, now, x)
            producer.produce(topics[k % len(topics)], event, b"%d" % x, x % PARTITIONS, timestamp=now)
        sent += due
        producer.poll(0)
        time.sleep(0.002)
    producer.flush()
    return sent


@contextlib.contextmanager
def reading(bootstrap: str, topic: str) -> Iterator[list[tuple[float, float]]]:
    """The time of each result and when a read_committed reader gets it, in milliseconds."""
    waits: list[tuple[float, float]] = []
    done = threading.Event()

    def read() -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "live",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.assign([TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
        while not done.is_set():
            first = consumer.poll(0.1)  # `consume` alone would wait for a full batch
            for message in [] if first is None else [first, *consumer.consume(5_000, 0)]:
                if message.error() is None:
                    waits.append((message.timestamp()[1], time.time() * 1000))
        consumer.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield waits
        time.sleep(1.5)
    finally:
        done.set()
        thread.join()


def measure(bootstrap: str, topics: list[str], results: str, rate: int, seconds: int) -> dict[str, float]:
    """Feed topics that somebody joins; gives the latency of what comes once all are warm."""
    with reading(bootstrap, results) as waits:
        begun = time.time()
        sent = feed(bootstrap, topics, rate, WARM_S + seconds)
    made, read = np.array(waits).reshape(-1, 2).T
    steady = (read - made)[made >= (begun + WARM_S) * 1000]
    if not len(steady):
        raise SystemExit(f"{results}: no result came")
    return {
        "events/s": round(sent / (WARM_S + seconds)),
        "results": len(steady),
        "p50 ms": float(np.percentile(steady, 50)),
        "p99 ms": float(np.percentile(steady, 99)),
    }


def idle_cpu(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """Percent of a core that each process takes while nothing comes."""

    def used(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before = {name: used(process) for name, process in processes.items()}
    time.sleep(seconds)
    return {name: (used(process) - before[name]) / seconds * 100 for name, process in processes.items()}


def build_kafka_streams(source: Path, home: Path) -> list[str]:
    """Compile the program with exactly-once; gives its command. The folder given is only read."""
    shutil.copy(source / "pom.xml", home / "pom.xml")
    text = (source / "KStreamsJoin.java").read_text()
    place = text.index("    c.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG")
    (home / "KStreamsJoin.java").write_text(f"{text[:place]}    {EXACTLY_ONCE}\n{text[place:]}")
    copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={home / 'libs'}"]
    subprocess.run(["mvn", "-q", "-B", "-f", str(home / "pom.xml"), *copy], check=True)
    compile = ["javac", "-nowarn", "-d", str(home), "-cp", f"{home / 'libs'}/*", str(home / "KStreamsJoin.java")]
    subprocess.run(compile, check=True)
    return ["java", "-Xmx1g", "-cp", f"{home}:{home / 'libs'}/*", "KStreamsJoin", "rocksdb"]


def kafka_streams(
    bootstrap: str, source: Path, home: Path, rate: int, seconds: int, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Latency of Kafka Streams' 2-way join with exactly_once_v2 at its default commit interval."""
    folder = home / "kstreams"
    (folder / "state").mkdir(parents=True)
    say("building the Kafka Streams program")
    command = build_kafka_streams(source, folder)
    topics, out = ["kstreams-a", "kstreams-b"], "kstreams-out"
    make_topics(bootstrap, [*topics, out])
    peer = {
        "BOOTSTRAP": bootstrap,
        "WORKLOAD": "w1",
        "TOPICS": ",".join(topics),
        "OUT": out,
        "GROUP": "kstreams",
        "STATE": str(folder / "state"),
        "WINDOW_MS": "60000",
    }
    with open(folder / "log", "wb") as log:
        env = {**os.environ, **{f"PEER_{name}": value for name, value in peer.items()}}
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder / "state", env=env)
    try:
        time.sleep(12)  # it has made its topics and joined its group
        if child.poll() is not None:
            raise SystemExit(f"Kafka Streams ended: {(folder / 'log').read_text()[-2000:]}")
        return measure(bootstrap, topics, out, rate, seconds)
    finally:
        child.terminate()
        child.wait(30)
