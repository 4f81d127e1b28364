"""Stuck is told from idle and from slow, and a stuck process ends with a line that says where it was."""

import subprocess
import sys

import pytest

from schemas.errors import MachineError
from services.runtime.health import Health


def test_idle_and_slow_are_not_stuck() -> None:
    now = [0.0]
    health = Health(limit_s=30, clock=lambda: now[0])
    health.observe(1, lag=5)
    now[0] = 29
    assert health.quiet
    health.check()
    health.observe(2, lag=5)  # a step, however late
    assert not health.quiet
    now[0] = 70
    health.observe(2, lag=0)  # nothing to read
    health.check()
    now[0] = 99
    health.observe(2, lag=7)
    health.check()
    now[0] = 101
    with pytest.raises(
        MachineError, match="7 records to read and no step for 31 s; ending, to be started again from what is stored"
    ):
        health.check()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def test_a_loop_that_stands_still_ends_its_process() -> None:
    done = run(
        "import time\nfrom services.runtime.health import Health\nh = Health(limit_s=1)\nh.watch()\ndef stuck():"
        " time.sleep(20)\nstuck()"
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        "joinmesh: the service's loop has not moved for 1 s (it is where the lines above say); starting again\n"
    )
    assert " in stuck" in done.stderr


def test_a_loop_that_moves_goes_on() -> None:
    done = run(
        "import time\nfrom services.runtime.health import Health\nh = Health(limit_s=2)\nh.watch()\nfor _ in"
        " range(40):\n  h.beat(); time.sleep(0.1)"
    )
    assert (done.returncode, done.stderr) == (0, "")
