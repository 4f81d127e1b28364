"""The faults: each does one thing to a running mesh and says what it did. All choices come from the seeded generator.

Invariant: a fault ends what it began (a stopped worker goes on, a dead broker is started again), so that the next one
meets a whole mesh.
"""

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import psutil

from services.chaos.world import SERVICES, World

SESSION_S = 10.0  # the services' session timeout
NODES = ("four.j1", "four.j2", "four.j3")
Fault = Callable[[World, random.Random, int], str]


def kill(world: World, rng: random.Random, turn: int) -> str:
    """kill -9 of one service."""
    service = SERVICES[turn % len(SERVICES)]
    time.sleep(rng.uniform(0, 1.0))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in world.processes(service):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
            return service
        time.sleep(0.1)
    raise RuntimeError(f"{service} did not come back within 30 s")


def broker_kill(world: World, _: random.Random, __: int) -> str:
    """kill -9 of the broker, and its start."""
    world.broker.kill()
    world.broker.start()
    return "broker"


def broker_restart(world: World, _: random.Random, __: int) -> str:
    """A clean restart of the broker."""
    world.broker.stop()
    world.broker.start()
    return "broker"


def pause(world: World, rng: random.Random, turn: int) -> str:
    """SIGSTOP of a join worker past its session timeout while another worker takes over, then SIGCONT."""
    service = NODES[turn % 3]
    world.add_worker(service, 7)
    time.sleep(3)
    first = [p for p in world.processes(service) if "--instance" not in p.cmdline()]
    for process in first:
        process.send_signal(signal.SIGSTOP)
    time.sleep(SESSION_S + rng.uniform(2, 4))
    for process in first:
        process.send_signal(signal.SIGCONT)
    time.sleep(3)
    world.remove_workers()
    return service


def workers(world: World, _: random.Random, turn: int) -> str:
    """Workers of a join node: 1, then 3, then 1 again."""
    service = NODES[turn % 3]
    for instance in (1, 2):
        world.add_worker(service, instance)
    time.sleep(8)
    world.remove_workers()
    return service


def wipe(world: World, _: random.Random, turn: int) -> str:
    """The state directory of a join node deleted, the worker killed: rebuilt from its input topic."""
    service = NODES[turn % 3]
    node = service.split(".")[1]
    for process in world.processes(service):
        process.send_signal(signal.SIGSTOP)  # so that it cannot write between the deletion and its death
    shutil.rmtree(world.data / "four" / node, ignore_errors=True)
    for process in world.processes(service):
        process.kill()
    return service


def disk_full(world: World, _: random.Random, __: int) -> str:
    """The state's disk fills up, then has room again. Needs `mount_state` before the mesh starts."""
    folder = world.data / "four" / "j2"
    ballast = folder / "ballast"
    log = world.data / "logs" / "four.j2.log"
    before = log.read_text(errors="replace").count("the disk is full") if log.exists() else 0
    with ballast.open("wb", buffering=0) as file:  # or closing it would write, and fail, again
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
    deadline, said = time.monotonic() + 60, False
    while time.monotonic() < deadline and not said:
        said = log.read_text(errors="replace").count("the disk is full") > before
        time.sleep(0.2)
    ballast.unlink()
    if not said:
        raise RuntimeError("four.j2 never said that its disk is full")
    return "four.j2"


def mount_state(world: World, megabytes: int = 320) -> None:
    """A small tmpfs under the state of j2; needs root."""
    folder = world.data / "four" / "j2"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a full disk needs a small tmpfs, and that needs root: {done.stderr.strip()}")


def unmount_state(world: World) -> None:
    subprocess.run(["umount", "-l", str(world.data / "four" / "j2")], capture_output=True, check=False)


def migrate(world: World, _: random.Random, __: int) -> str:
    """The plan changes to one of the same tree, and is waited for; how long that took is in `migrations.log`."""
    if world.command("migrate", "-f", world.file, "--query", "four", log="migrations.log") != 0:
        raise RuntimeError(f"the old plan is not gone; see {world.folder / 'migrations.log'}")
    return "four"


FAULTS: dict[str, Fault] = {
    "migrate": migrate,
    "kill": kill,
    "broker-kill": broker_kill,
    "broker-restart": broker_restart,
    "pause": pause,
    "workers": workers,
    "wipe": wipe,
    "disk-full": disk_full,
}
