"""The mesh that faults are done to: a broker of its own, a four-way join (three join nodes), a generator, `joinmesh
up`.

Invariant: everything is a real process that this one started and ends; the folder holds all of its state, so that two
runs never meet.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas.mesh import Mesh, load_mesh, parse_mesh
from services.broker import LocalBroker
from services.broker.guard import guard_of, kafka_lines
from services.runtime.grants import grant_all
from services.runtime.kafka import client_config
from services.runtime.queries import services_of
from services.runtime.tied import tied_command
from services.supervisor.reports import Report, ReportReader, instances

Say = Callable[[str], None]
MESH = """\
mesh: chaos
{kafka}
partitions: 4
streams:
  a: {{event_time: ts, lateness: 2s, fields: {{k: int64, m: int64, v: int64, ts: timestamp}}}}
  b: {{event_time: ts, lateness: 1s, fields: {{k: int64, n: int64, ts: timestamp}}}}
  c: {{event_time: ts, lateness: 1s, fields: {{n: int64, o: int64, w: string, ts: timestamp}}}}
  d: {{event_time: ts, lateness: 2s, fields: {{o: int64, u: float64, ts: timestamp}}}}
queries:
  four: |
    SELECT a.v, c.w, d.u
    FROM a [RANGE 20 SECONDS], b [RANGE 15 SECONDS], c [RANGE 25 SECONDS], d [RANGE 20 SECONDS]
    WHERE a.k = b.k AND b.n = c.n AND c.o = d.o
feedback: {{four: {feedback}}}
"""
SERVICES = ("ingest", "four.j1", "four.j2", "four.j3", "four.sink", "controller")


class World:
    def __init__(self, folder: Path, say: Say, feedback: str = "off", secure: bool = False) -> None:
        folder = folder.absolute()  # services are known by the path of their mesh file, which they are given whole
        self.folder, self.say, self._feedback, self._secure = folder, say, feedback, secure
        self.file, self.data = folder / "mesh.yaml", folder / "data"
        guard = guard_of(parse_mesh(MESH.format(kafka="kafka: {bootstrap: none}", feedback=feedback)))
        self.broker = LocalBroker(folder / "broker", tied=True, progress=say, guard=guard if secure else None)
        self.up: subprocess.Popen[bytes] | None = None
        self.extra: list[subprocess.Popen[bytes]] = []
        self.environment: dict[str, str] = {}

    def start_broker(self) -> None:
        self.broker.start()
        kafka = f'kafka: {{bootstrap: "{self.broker.bootstrap}"}}'
        if self._secure:
            kafka = kafka_lines(self.broker.folder, self.broker.port, "chaos")
        self.file.write_text(MESH.format(kafka=kafka, feedback=self._feedback))
        if self._secure:
            grant_all(self.mesh)

    @property
    def mesh(self) -> Mesh:
        return load_mesh(self.file)

    def command(self, *arguments: object, check: bool = True, log: str = "commands.log") -> int:
        """Run a joinmesh command to its end."""
        with open(self.folder / log, "ab") as out:
            done = subprocess.run(
                [sys.executable, "-m", "services.cli.main", *map(str, arguments)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env(),
                check=False,
            )
        if check and done.returncode != 0:
            raise RuntimeError(f"joinmesh {' '.join(map(str, arguments))} failed; see {self.folder / log}")
        return done.returncode

    def background(self, *arguments: object, log: str) -> "subprocess.Popen[bytes]":
        with open(self.folder / log, "ab") as out:
            command = tied_command([sys.executable, "-m", "services.cli.main", *map(str, arguments)])
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=self._env())

    def start_mesh(self) -> None:
        self.up = self.background("up", "-f", self.file, "--data", self.data, log="up.log")

    def stop_mesh(self) -> None:
        if self.up is not None:
            self.up.send_signal(signal.SIGTERM)
            self.up.wait(60)
            self.up = None

    def _env(self) -> dict[str, str]:
        return {**os.environ, "JOINMESH_RESTART_MOST_S": "1", "POLARS_MAX_THREADS": "1", **self.environment}

    def processes(self, service: str) -> list[psutil.Process]:
        """The running processes of one service."""
        wanted = next(s for s in services_of_mesh(self.mesh) if s[0] == service)
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            here = str(self.file) in line and wanted[1] in line and "-m" in line
            if here and (wanted[2] is None or wanted[2] in line) and "tied.py" not in " ".join(line[:4]):
                found.append(process)
        return found

    def add_worker(self, service: str, instance: int) -> None:
        _, module, node, query = next(s for s in services_of_mesh(self.mesh) if s[0] == service)
        command = [
            sys.executable,
            "-m",
            module,
            "-f",
            str(self.file),
            "--data",
            str(self.data),
            "--query",
            str(query),
            "--node",
            str(node),
        ]
        with open(self.folder / f"worker-{service}-{instance}.log", "ab") as out:
            self.extra.append(
                subprocess.Popen(
                    tied_command([*command, "--instance", str(instance)]),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self._env(),
                )
            )

    def remove_workers(self) -> None:
        for worker in self.extra:
            worker.terminate()
        for worker in self.extra:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(10)
        self.extra = []

    def results(self) -> int | None:
        """End of the results topic, over its partitions; None while the broker is away."""
        consumer = Consumer(client_config(self.mesh, group_id="chaos-ends", log_level=0))
        try:
            return sum(
                consumer.get_watermark_offsets(TopicPartition("chaos.four.results", p), timeout=3)[1] for p in range(4)
            )
        except KafkaException:
            return None
        finally:
            consumer.close()

    def wait_for_results(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self.results():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no result within {limit_s:.0f} s; see {self.folder / 'up.log'}")
            time.sleep(0.2)

    def seconds_to_work_again(self, target: str, since: float, limit_s: float) -> float:
        """From `since` until every service says it is ready (the target as a new process, unless it was the broker) and
        a result has come."""
        reader = ReportReader(self.mesh).from_end()
        before = self.results()
        try:
            while time.time() - since < limit_s:
                reader.poll(0.1)
                now = self.results()
                if (
                    all(self._works(name, reader.latest, since) for name in SERVICES if name != "controller")
                    and now
                    and now > (before or 0)
                ):
                    return time.time() - since
            raise RuntimeError(
                f"after the fault at {target} the mesh did not work again within {limit_s:.0f} s; see"
                f" {self.folder / 'up.log'}"
            )
        finally:
            reader.close()

    def feedback(self) -> dict[str, int]:
        """What the nodes did with feedback, as they last reported it."""
        reader, total = ReportReader(self.mesh), dict[str, int]()
        try:
            for report in reader.read_tail().values():
                for name, count in (report.get("feedback") or {}).items():
                    total[name] = total.get(name, 0) + count
        finally:
            reader.close()
        return total

    @staticmethod
    def _works(service: str, reports: dict[str, Report], since: float) -> bool:
        mine = [r for r in instances(reports, service).values() if r["at_ms"] >= since * 1000]
        return any(r.get("ready") for r in mine)

    def close(self) -> None:
        for process in [*self.extra, *([self.up] if self.up else [])]:
            process.kill()
            process.wait(10)
        self.broker.stop()


def services_of_mesh(mesh: Mesh) -> list[tuple[str, str, str | None, str | None]]:
    from services.runtime.queries import parse_queries

    return [(s.name, s.module, s.node, s.query) for s in services_of(mesh, parse_queries(mesh))]
