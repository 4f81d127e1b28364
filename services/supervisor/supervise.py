"""Runs a mesh in the foreground: topics, one child per service, restarts, a clean stop.

Invariant: one supervisor per data folder (a lock the kernel holds), and when `run` returns no child is alive. The order
of stopping is the order of the data: ingest first, so that what is on its way can still be taken in.
"""

import fcntl
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from schemas.errors import JoinmeshError, MachineError
from schemas.mesh import Mesh
from services.runtime.kafka import ensure_topics, source_partitions
from services.runtime.queries import parse_queries, plan_of, services_of, streams_used, topics_of
from services.supervisor.child import NO_USE_RESTARTING, Child, how_it_ended
from services.supervisor.reports import IdleWatch, ReportReader

STOP_S = 30.0
SAY_EVERY_S = 5.0
_PREFIX = re.compile(r"^joinmesh[ a-z_]*: ")
Say = Callable[[str], None]


def data_dir(mesh: Mesh) -> Path:
    """Where state is kept unless --data says otherwise: `.joinmesh/<mesh>` beside the mesh file."""
    return Path(mesh.file).absolute().parent / ".joinmesh" / mesh.name


class Supervisor:
    def __init__(self, mesh: Mesh, data: Path, say: Say, until_idle_s: float | None = None) -> None:
        self.mesh, self.data, self.say, self.until_idle_s = mesh, data.absolute(), say, until_idle_s
        self.queries = parse_queries(mesh)
        for query in self.queries.values():
            plan_of(mesh, query)  # a pinned plan that does not fit is said here, once, not by every service
        self.services = services_of(mesh, self.queries)
        self.children: list[Child] = []
        self._stop: str | None = None
        self._failed: str | None = None
        self.interrupted = False  # a signal, not idleness, ended it
        self._said = time.monotonic()
        self._reports: ReportReader | None = None
        self._idle: IdleWatch | None = None

    def run(self) -> int:
        """Until a signal, idleness, or a service that cannot be helped; 0 unless the last."""
        with _lock(self.data):
            source_partitions(self.mesh, [self.mesh.streams[name] for name in streams_used(self.queries)])
            ensure_topics(self.mesh, topics_of(self.mesh, self.queries), self.say)
            before = {how: signal.signal(how, self._on_signal) for how in (signal.SIGINT, signal.SIGTERM)}
            try:
                self._start()
                while self._stop is None:
                    self._watch()
                    time.sleep(0.05)
                self.say(f"{self._stop}; stopping {sum(child.alive for child in self.children)} services")
            finally:
                clean = self._stop_children()
                for how, handler in before.items():
                    signal.signal(how, handler)
                if self._reports is not None:
                    self._reports.close()
        if self._failed is not None:
            raise JoinmeshError(self._failed)
        self.say("stopped cleanly" if clean else "stopped, not cleanly; the next start carries on from stored state")
        return 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.interrupted = True
        self._stop = self._stop or f"got {signal.Signals(number).name}"

    def _start(self) -> None:
        if self.until_idle_s is not None:
            self._reports = ReportReader(self.mesh).from_end()
            self._idle = IdleWatch([service.name for service in self.services], self.until_idle_s)
        for service in self.services:
            child = Child(service, os.path.abspath(self.mesh.file), self.data)
            self.children.append(child)
            child.start()
        self.say(
            f"started {len(self.children)} services of mesh {self.mesh.name}:"
            f" {', '.join(c.name for c in self.children)}"
        )
        self.say(f"state and logs in {self.data}; Ctrl-C stops")

    def _watch(self) -> None:
        for child in self.children:
            for line in child.loud_lines():
                self.say(f"{child.name}: {line}")
            code = child.ended()
            if code is not None:
                self._on_end(child, code)
            elif child.restart_if_due():
                self.say(f"{child.name} started again (restart {child.restarts})")
        if self._reports is not None and self._idle is not None:
            self._reports.poll()
            if (
                self._stop is None
                and all(child.alive for child in self.children)
                and self._idle.idle(self._reports.latest)
            ):
                self._stop = f"everything is processed and quiet since {self.until_idle_s:g} s"
            elif time.monotonic() - self._said >= SAY_EVERY_S:
                self._said = time.monotonic()
                self.say(self._idle.waiting_for(self._reports.latest))

    def _on_end(self, child: Child, code: int) -> None:
        for line in child.loud_lines():
            self.say(f"{child.name}: {line}")
        last = f": {_PREFIX.sub('', child.last_line)}" if child.last_line else ""
        if code == NO_USE_RESTARTING:
            self._failed = f"{child.name} cannot run{last}"
            self._stop = f"{child.name} says that starting it again is of no use"
            return
        wait_s = child.schedule_restart()
        self.say(f"{child.name} {how_it_ended(code)}{last}; starting again in {wait_s:g} s (log: {child.log_file})")

    def _stop_children(self) -> bool:
        """SIGTERM to all, then wait; SIGKILL for who does not go. Says whether all went by themselves."""
        for child in sorted(self.children, key=lambda c: c.name != "ingest"):
            child.signal(signal.SIGTERM)
        deadline, clean = time.monotonic() + STOP_S, True
        for child in self.children:
            if not child.wait(deadline - time.monotonic()):
                clean = False
                self.say(f"{child.name} did not stop within {STOP_S:.0f} s; killing it (log: {child.log_file})")
                child.signal(signal.SIGKILL)
                child.wait(10)
            for line in child.loud_lines():
                self.say(f"{child.name}: {line}")
        return clean


class _lock:
    """Holds `DIR/lock` as long as the supervisor lives."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.file: IO[str] | None = None

    def __enter__(self) -> None:
        try:
            self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file = (self.data / "lock").open("a+")
        except OSError as error:
            raise MachineError(
                f"cannot use the data folder {self.data}: {error.strerror}; choose another one with --data"
            ) from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            owner = self.file.read().strip() or "another process"
            raise MachineError(
                f"{self.data} is in use by a running `joinmesh up` (process {owner}); stop that one, or choose another"
                " folder with --data"
            ) from None
        self.file.truncate(0)
        self.file.write(str(os.getpid()))
        self.file.flush()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()
