"""The supervisor, with real processes: restarts what dies, gives up where that is of no use, and leaves nothing
behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.supervisor.child import next_backoff
from services.supervisor.reports import IdleWatch, Report

CreateTopics = Callable[..., None]

# `up` as a process of its own, with other programs in the place of the services.
RUN = """
import sys
from pathlib import Path
import services.supervisor.supervise as supervise
from schemas.mesh import load_mesh
from services.runtime.queries import Service
supervise.services_of = lambda mesh, queries: [Service(name, name) for name in sys.argv[3:]]
supervise.STOP_S = 2.0
from services.cli.main import main
sys.exit(main(["up", "-f", sys.argv[1], "--data", sys.argv[2]]))
"""
STEADY = (
    "import signal, sys, time\n"
    "for name in (signal.SIGTERM, signal.SIGINT): signal.signal(name, lambda *_: sys.exit(0))\n"
    "while True: time.sleep(0.05)\n"
)
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(0.05)\n"
FRAIL = "import sys, time\nprint('2026-01-01 ERROR frail: out of luck', flush=True)\ntime.sleep(0.1)\nsys.exit(3)\n"
HOPELESS = "import sys\nprint('joinmesh hopeless: the topic is wrong; change it', flush=True)\nsys.exit(78)\n"


class Up:
    """A running `joinmesh up` and what it says."""

    def __init__(self, shop_file: Path, folder: Path, **programs: str) -> None:
        modules = folder / "modules"
        modules.mkdir()
        for name, text in programs.items():
            (modules / f"{name}.py").write_text(textwrap.dedent(text))
        self.data = folder / "data"
        self.log = folder / "up.log"
        path = os.pathsep.join([str(modules), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, str(shop_file), str(self.data), *programs],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
            )

    def wait_for(self, text: str, timeout_s: float = 30) -> str:
        deadline = time.monotonic() + timeout_s
        while text not in (said := self.log.read_text()):
            assert time.monotonic() < deadline, f"never said {text!r}:\n{said}"
            assert self.process.poll() is None or text in self.log.read_text(), said
            time.sleep(0.05)
        return said

    def children(self, count: int = 2) -> dict[str, psutil.Process]:
        """Children by the program that their command line names; waits until there are so many."""
        deadline = time.monotonic() + 15
        while True:
            found = {}
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    command = child.cmdline()
                    if len(command) > 2 and command[1] == "-m":
                        found[command[2]] = child
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_new(self, name: str, old: int, timeout_s: float = 15) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (process := self.children(1).get(name)) is not None and process.pid != old:
                return True
            time.sleep(0.05)
        return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(20)
        return code, self.log.read_text()


@pytest.fixture
def up(shop_file: Path, mesh_name: str, tmp_path: Path, create_topics: CreateTopics) -> Iterator[Callable[..., Up]]:
    create_topics(*(f"{mesh_name}-{stream}" for stream in ("orders", "payments", "shipments")))
    running: list[Up] = []

    def start(**programs: str) -> Up:
        running.append(Up(shop_file, tmp_path, **programs))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_restarts_what_dies_and_says_so(up: Callable[..., Up]) -> None:
    mesh = up(steady=STEADY, frail=FRAIL)
    said = mesh.wait_for("starting again in 0.2 s")
    assert "frail: 2026-01-01 ERROR frail: out of luck" in said
    assert "frail ended with exit code 3: 2026-01-01 ERROR frail: out of luck; starting again in 0.1 s (log: " in said
    assert "frail started again (restart 1)" in said
    mesh.wait_for("frail started again (restart 2)")
    steady = mesh.children(1)["steady"]
    steady.send_signal(signal.SIGKILL)
    mesh.wait_for("steady was killed by SIGKILL; starting again in 0.1 s")
    mesh.wait_for("steady started again (restart 1)")
    assert mesh.wait_for_new("steady", steady.pid)
    code, said = mesh.stop()
    assert code == 0
    assert said.rstrip().endswith("stopped cleanly")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stops_everything_on_a_signal_also_who_does_not_want_to(up: Callable[..., Up], how: signal.Signals) -> None:
    mesh = up(steady=STEADY, stubborn=STUBBORN)
    mesh.wait_for("started 2 services")
    children = mesh.children()
    time.sleep(0.5)  # the stubborn one must have had time to become so
    assert "--data" in children["steady"].cmdline()
    code, said = mesh.stop(how)
    assert code == 0
    assert f"got {how.name}; stopping 2 services" in said
    assert "stubborn did not stop within 2 s; killing it" in said
    assert not any(child.is_running() for child in children.values())


def test_takes_more_and_fewer_workers_from_the_mesh_file(up: Callable[..., Up], shop_file: Path) -> None:
    text = shop_file.read_text()
    shop_file.write_text(text + "workers: {ingest: 2}\n")
    mesh = up(controller=STEADY, ingest=STEADY, stubborn=STEADY)
    mesh.wait_for("started 4 services of mesh")
    mesh.wait_for(": controller, ingest, ingest-1, stubborn")
    for count, said in (
        (1, "again: -ingest-1"),
        (3, "again: +ingest-1, +ingest-2"),
        (3, "again: as many workers as before"),
    ):
        shop_file.write_text(f"{text}workers: {{ingest: {count}}}\n")
        mesh.process.send_signal(signal.SIGHUP)
        mesh.wait_for(said)
    assert "ingest-1 has left" in mesh.wait_for("ingest-1 has left")
    shop_file.write_text(text + "workers: {ingst: 2}\n")
    mesh.process.send_signal(signal.SIGHUP)
    mesh.wait_for("workers stay as they are: ")
    code, said = mesh.stop()
    assert code == 0
    assert "stopping 5 services" in said


def test_gives_up_when_restarting_is_of_no_use(up: Callable[..., Up]) -> None:
    mesh = up(steady=STEADY, hopeless=HOPELESS)
    assert mesh.process.wait(30) == 1
    said = mesh.log.read_text()
    assert "joinmesh: hopeless cannot run: the topic is wrong; change it" in said
    assert "Traceback" not in said


def test_children_die_with_a_killed_supervisor(up: Callable[..., Up]) -> None:
    mesh = up(steady=STEADY, stubborn=STUBBORN)
    mesh.wait_for("started 2 services")
    children = list(mesh.children().values())
    assert len(children) == 2
    mesh.process.kill()
    mesh.process.wait()
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert len(gone) == 2
    assert not alive


def test_one_supervisor_per_data_folder(up: Callable[..., Up], shop_file: Path) -> None:
    mesh = up(steady=STEADY)
    mesh.wait_for("started 1 services")
    command = [sys.executable, "-m", "services.cli.main", "up", "-f", str(shop_file), "--data", str(mesh.data)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1
    assert second.stderr.startswith(
        f"joinmesh: {mesh.data} is in use by a running `joinmesh up` (process {mesh.process.pid})"
    )
    assert second.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("last", "healthy", "next_s"), [(None, 0, 0.1), (0.5, 1, 1.0), (16.0, 1, 30.0), (30.0, 59, 30.0), (30.0, 60, 0.1)]
)
def test_backoff(last: float | None, healthy: float, next_s: float) -> None:
    assert next_backoff(last, healthy) == next_s


def test_idle_is_lag_zero_and_counters_at_rest_in_every_service() -> None:
    def reports(at: int, **lags: int) -> dict[str, Report]:
        return {f"{name}-0": {"at_ms": at, "lag": lag, "events_in": 7} for name, lag in lags.items()}

    watch = IdleWatch(["controller", "ingest", "q.j1"], 2.0, now_ms=lambda: 1_000.0)
    assert not watch.idle({})
    assert not watch.idle(reports(500, ingest=0))  # of an earlier run
    assert not watch.idle(reports(2_000, ingest=0))  # q.j1 has said nothing yet
    assert not watch.idle(reports(3_000, **{"ingest": 0, "q.j1": 5}))
    assert not watch.idle(reports(9_000, **{"ingest": 0, "q.j1": 0}))  # quiet only now
    assert not watch.idle(reports(10_000, **{"ingest": 0, "q.j1": 0}))
    assert not watch.idle({**reports(11_500, ingest=0), **reports(10_000, **{"q.j1": 0})})  # one has not reported since
    assert watch.idle(reports(11_500, **{"ingest": 0, "q.j1": 0}))


def test_a_service_that_has_no_partitions_yet_is_not_idle() -> None:
    """On a busy machine an assignment may take longer than the quiet time; before it nothing lags."""
    watch = IdleWatch(["ingest"], 2.0, now_ms=lambda: 1_000.0)
    for at in range(2_000, 9_000, 1_000):
        assert not watch.idle({"ingest-0": {"at_ms": at, "lag": 0, "events_in": 0, "ready": False}})
    assert not watch.idle({"ingest-0": {"at_ms": 9_000, "lag": 0, "events_in": 0, "ready": True}})
    assert watch.idle({"ingest-0": {"at_ms": 11_500, "lag": 0, "events_in": 0, "ready": True}})
