"""One Kafka broker in one folder: format, start, wait until it answers, stop, kill.

Invariant: a process is only ever stopped if it is the broker of this folder: the pid file's process must have been
started when the file says and must be a Kafka that runs this folder's configuration. Records survive `stop` and `kill`;
a start in the same folder finds them.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from schemas.errors import MachineError
from schemas.mesh import Mesh
from services.broker.guard import HOST, Guard
from services.broker.jars import Progress, broker_jars, locked, require_disk
from services.broker.java import find_java
from services.runtime.tied import tied_command

_JVM = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true"]
_LOGGING = {
    "defaultLogLevel": "warn",
    "showDateTime": "true",
    "dateTimeFormat": "yyyy-MM-dd HH:mm:ss.SSS",
    "showThreadName": "false",
    "showShortLogName": "true",
    "log.kafka.server.BrokerServer": "info",
    "log.kafka.server.KafkaRaftServer": "info",
}


def silent(_: str) -> None:
    """A progress that says nothing."""


class LocalBroker:
    """A KRaft broker (and its controller) on 127.0.0.1. `port=0` takes a free port."""

    def __init__(
        self,
        folder: str | Path,
        port: int = 0,
        *,
        tied: bool = False,
        progress: Progress = silent,
        guard: Guard | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.guard = guard  # who may come in; without one, everybody on this machine
        self.port = port
        self.tied = tied  # die with this process, even if it is killed
        self.progress = progress
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def kafka(self) -> dict[str, str]:
        """The settings of a client that may do everything here."""
        if self.guard is not None:
            return self.guard.client_settings(self.folder, self.port)
        return {"bootstrap.servers": self.bootstrap}

    @property
    def log_file(self) -> Path:
        return self.folder / "broker.log"

    @property
    def _pid_file(self) -> Path:
        return self.folder / "broker.pid"

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def __enter__(self) -> "LocalBroker":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> "LocalBroker":
        """Start and wait until it answers; an already running broker of this folder is left as it is."""
        java = find_java()
        jars = broker_jars(java, self.progress)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"cannot create the broker's folder {self.folder}: {error.strerror}") from None
        with locked(self.folder / "lock", lambda: self.progress(f"waiting for another start in {self.folder}")):
            running = self.running()
            if running is not None:
                self._adopt()
                return self
            require_disk(self.folder)
            if self.guard is not None:
                self.guard.prepare(self.folder, java)
            self._choose_ports()
            classpath = f"{jars}/*"
            self._format(java, classpath)
            self._launch(java, classpath)
            self._await_ready()
            if self.guard is not None:
                self.guard.create_users(self.folder, self.port)
        return self

    def running(self) -> psutil.Process | None:
        """This folder's broker, if it runs."""
        try:
            note = json.loads(self._pid_file.read_text())
            process = psutil.Process(int(note["pid"]))
            ours = (
                abs(process.create_time() - float(note["created"])) < 2 and str(self._properties) in process.cmdline()
            )
            alive = process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            return None
        return process if ours and alive else None

    def _adopt(self) -> None:
        port = int(json.loads(self._pid_file.read_text())["port"])
        if self.port not in (0, port):
            raise MachineError(
                f"the broker in {self.folder} already runs, on port {port}; stop it first (joinmesh broker down) or use"
                " --dir"
            )
        self.port = port

    def stop(self, timeout_s: float = 30) -> bool:
        """Stop cleanly; says whether there was anything to stop."""
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> bool:
        """kill -9, as a crash would."""
        return self._end(signal.SIGKILL, 10)

    def _end(self, how: signal.Signals, timeout_s: float) -> bool:
        process = self.running()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)
            try:
                self._wait_gone(process, timeout_s)
            except psutil.TimeoutExpired:
                self.progress(f"the broker did not stop within {timeout_s:.0f} s; killing it")
                process.kill()
                self._wait_gone(process, 10)
        self._pid_file.unlink(missing_ok=True)
        self._child = None
        return process is not None

    def _wait_gone(self, process: psutil.Process, timeout_s: float) -> None:
        if self._child is not None and self._child.pid == process.pid:  # ours to reap
            try:
                self._child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise psutil.TimeoutExpired(timeout_s, process.pid) from None
        else:
            process.wait(timeout_s)

    def _choose_ports(self) -> None:
        if self.port == 0:
            self.port = free_port()
        elif not port_is_free(self.port):
            raise MachineError(
                f"port {self.port} on {HOST} is busy; choose another one, for example `joinmesh broker up --port"
                f" {free_port()}`, and write it into the mesh file as kafka.bootstrap"
            )
        controller = free_port(avoid=self.port)
        settings = _settings(self.port, controller, self.folder / "data")
        if self.guard is not None:
            settings |= self.guard.broker_properties(self.folder, self.port, controller, free_port(avoid=controller))
        self._properties.touch(mode=0o600)
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def _format(self, java: str, classpath: str) -> None:
        if (self.folder / "data" / "meta.properties").exists():
            return
        shutil.rmtree(self.folder / "data", ignore_errors=True)  # a format that was cut short
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        command = [
            java,
            *_JVM,
            "-cp",
            classpath,
            "kafka.tools.StorageTool",
            "format",
            "-t",
            cluster,
            "-c",
            str(self._properties),
            *(self.guard.format_arguments(self.folder) if self.guard is not None else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        (self.folder / "secrets" / "format").unlink(missing_ok=True)
        if done.returncode != 0:
            raise MachineError(
                f"the broker's storage in {self.folder} could not be formatted:"
                f" {_last_lines(done.stdout + done.stderr)}"
            )

    def _launch(self, java: str, classpath: str) -> None:
        options = [f"-Dorg.slf4j.simpleLogger.{key}={value}" for key, value in _LOGGING.items()]
        command = [java, *_JVM, *options, "-cp", classpath, "kafka.Kafka", str(self._properties)]
        with self.log_file.open("wb") as log:
            # An own session: Ctrl-C in the terminal must reach the services, which still need the broker to stop
            # cleanly.
            self._child = subprocess.Popen(
                tied_command(command) if self.tied else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )
        created = psutil.Process(self._child.pid).create_time()
        self._pid_file.write_text(json.dumps({"pid": self._child.pid, "created": created, "port": self.port}))

    def _await_ready(self, timeout_s: float = 90) -> None:
        assert self._child is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                self._pid_file.unlink(missing_ok=True)
                raise MachineError(
                    f"the broker died while starting: {_last_lines(self._log())} (whole log: {self.log_file})"
                )
            if not port_is_free(self.port) and answers(self.kafka):
                return
            time.sleep(0.1)
        self.kill()
        raise MachineError(
            f"the broker did not answer within {timeout_s:.0f} s: {_last_lines(self._log())} (whole log:"
            f" {self.log_file})"
        )

    def _log(self) -> str:
        return self.log_file.read_text(errors="replace")


def answers(kafka: str | Mapping[str, str], timeout_s: float = 5) -> bool:
    """Whether a broker is there and knows itself as a member of the cluster; by its address, or a client's settings."""
    from confluent_kafka import KafkaException

    from services.runtime.kafka import admin

    settings = {"bootstrap.servers": kafka} if isinstance(kafka, str) else kafka
    client = admin(Mesh("broker", settings, 1, {}, {}))
    try:
        return bool(client.list_topics(timeout=timeout_s).brokers)
    except KafkaException:
        return False


def free_port(avoid: int = 0) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port != avoid:
            return port


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    return " / ".join(line[:300] for line in lines[-count:]) or "no output"


def _settings(port: int, controller: int, data: Path) -> dict[str, str]:
    # No controlled shutdown: there is no other broker to hand over to, and while this one gives up its partitions it
    # may report a
    # transaction as complete whose markers it no longer writes.
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": f"{data}",
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "8",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "8",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "min.insync.replicas": "1",
        "default.replication.factor": "1",
        "group.initial.rebalance.delay.ms": "0",
        "controlled.shutdown.enable": "false",
    }
