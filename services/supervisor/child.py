"""One service as a child process: start, watch, restart with backoff, stop, and what its log says.

Invariant: a child never outlives the supervisor (the kernel kills it, see `services.runtime.tied`), its output is
written to its log file by itself (nothing is lost when the supervisor stalls), and between two starts of a child that
keeps dying there is a growing pause.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from services.runtime.queries import Service
from services.runtime.tied import tied_command

BACKOFF_FIRST_S, HEALTHY_S = 0.1, 60.0
BACKOFF_MOST_S = float(os.environ.get("JOINMESH_RESTART_MOST_S", "30"))
NO_USE_RESTARTING = 78  # EX_CONFIG: the same start would fail the same way
LOG_BYTES_MOST = 50_000_000
_LOUD = re.compile(r"\b(WARN|WARNING|ERROR|CRITICAL|FATAL)\b|^joinmesh[ a-z_]*: ")

_NOISE = re.compile(r"%\d\|[^|]*\|TERMINATE\|")  # librdkafka's good-bye, after the line that says why


def next_backoff(last_s: float | None, healthy_s: float) -> float:
    """
    >>> next_backoff(None, 1), next_backoff(0.5, 1), next_backoff(20, 1), next_backoff(20, 61)
    (0.1, 1.0, 30.0, 0.1)
    """
    if last_s is None or healthy_s >= HEALTHY_S:
        return BACKOFF_FIRST_S
    return min(last_s * 2, BACKOFF_MOST_S)


class Child:
    def __init__(self, service: Service, mesh_file: str, data: Path) -> None:
        self.service = service
        self.command = [sys.executable, "-m", service.module, "-f", mesh_file, "--data", str(data)]
        if service.query is not None:
            self.command += ["--query", service.query]
        if service.node is not None:
            self.command += ["--node", service.node]
        self.log_file = data / "logs" / f"{service.name}.log"
        self.restarts = 0
        self.last_line = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._backoff: float | None = None
        self._due: float | None = None
        self._read = 0
        self._rest = b""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        self.log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.log_file.exists() and self.log_file.stat().st_size > LOG_BYTES_MOST:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("ab") as log:
            self._read, self._rest = log.tell(), b""
            # An own session: Ctrl-C reaches the supervisor alone, which then stops the services in good order.
            self._process = subprocess.Popen(
                tied_command(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    "POLARS_MAX_THREADS": "1",
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                },  # blocks are small: threads cost more than they give
            )
        self._started, self._due = time.monotonic(), None

    def ended(self) -> int | None:
        """The exit code, once, when it has just ended by itself; negative for a signal."""
        if self._process is None or self._due is not None:
            return None
        return self._process.poll()

    def schedule_restart(self) -> float:
        """Say when it starts again, in seconds from now."""
        self._backoff = next_backoff(self._backoff, time.monotonic() - self._started)
        self._due = time.monotonic() + self._backoff
        return self._backoff

    def restart_if_due(self) -> bool:
        if self._due is None or time.monotonic() < self._due:
            return False
        self.restarts += 1
        self.start()
        return True

    def signal(self, how: signal.Signals) -> None:
        if self._process is not None and self.alive:
            self._process.send_signal(how)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is gone within this time."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(timeout_s, 0.01))
        except subprocess.TimeoutExpired:
            return False
        return True

    def loud_lines(self) -> list[str]:
        """New log lines a person should see: warnings, errors, and a traceback's last line."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(self._read)
                new = log.read(1_000_000)
        except OSError:
            return []
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        loud = []
        for raw in lines:
            line = raw.decode(errors="replace").rstrip()
            if line.strip() and not _NOISE.match(line):
                self.last_line = line.strip()
            if _LOUD.search(line):
                loud.append(line.strip())
        return loud


def how_it_ended(code: int) -> str:
    """
    >>> how_it_ended(-9), how_it_ended(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
