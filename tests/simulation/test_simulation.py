"""A thousand meshes under a thousand schedules of faults: the committed results are the oracle's, each once.

A failing seed prints itself and its last actions; `JOINMESH_SIM_SEED=<seed>` runs that one alone, action by action the
same.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.runtime.failpoints import POINTS
from services.simulation.processes import Disk
from services.simulation.world import World, run_seed
from tests.drawn import check_often, say

SEEDS, CHUNK = 1_000, 100
ONLY = os.environ.get("JOINMESH_SIM_SEED")
CHUNKS = [[int(ONLY)]] if ONLY else [list(range(first, first + CHUNK)) for first in range(0, SEEDS, CHUNK)]
AT_LEAST = {
    "crash between actions": 5_000,
    "records lost under way": 3_000,
    "arrived from the dead": 1_500,
    "resent from outbox": 1_500,
    "steps committed together": 5_000,
    "rows repeated": 10_000,
    "rebuilt from the input topic": 2_000,
    "state deleted": 500,
    "moved to no state": 500,
    "moved to old state": 250,
    "successor on a copy": 250,
    "zombie node": 500,
    "zombie ingest": 200,
    "zombie sink": 200,
    "zombie steps": 4_000,
    "refused ingest": 60,
    "refused sink": 40,
    "results": 12_000,
    "with a table": 200,
    "values suspended": 600,
    "values resumed": 200,
    "pairs resumed": 30,
    "composites not made for want of a herald": 120,
    "composites made for a herald": 25,
    "heralds heeded or let be": 200,
    **{f"crash at {point}": 20 for point in POINTS},
}
done: Counter[str] = Counter()


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda s: f"{s[0]}-{s[-1]}")
def test_results_are_the_oracles(seeds: list[int]) -> None:
    for seed in seeds:
        done.update(run_seed(seed).stats)
        done["seeds"] += 1


def test_every_kind_of_fault_happened_often(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "simulated", done)
    check_often(done, SEEDS, AT_LEAST)


def test_old_state_comes_back_after_a_rebuilt_one_spoke() -> None:
    """Worker A dies with an undelivered outbox, B rebuilds the partition, sends a little and dies, A takes over again:
    all by the step protocol."""
    lost = 0
    for seed in range(40):
        world = World(seed)
        if len(world.case.plan.nodes) < 2:
            continue
        world.calm, old = True, world.disks["j1", 0]
        with world.patched():
            world.append(len(world.coming))
            world.start("ingest").drain()
            lost += _run_and_lose(world, delivered=0)
            world.disks["j1", 0] = Disk(strict=True)
            _run_and_lose(world, delivered=1)
            world.disks["j1", 0] = old
            world.drain()
        world.audit()
    assert lost > 100


def _run_and_lose(world: World, delivered: int) -> int:
    """Partition 0 of j1 takes all its input; so many of its records arrive in each partition, then it dies. Returns how
    many did not arrive."""
    process = world.start("j1.0")
    process.drain()
    for place in process.sender.waiting:
        process.sender.deliver(place, delivered)
    left = sum(len(queue) for queue in process.sender.queues.values())
    process.sender.queues.clear()
    world.alive["j1.0"] = None
    return left


def test_a_seed_replays_exactly() -> None:
    for seed in (3, 14, 27):
        first, second = run_seed(seed), run_seed(seed)
        assert first.trace == second.trace
        assert first.broker.logs == second.broker.logs
        assert first.stats == second.stats


def test_a_seed_replays_in_another_process() -> None:
    """Nothing hangs on the order of a set or on the machine's clock."""
    code = (
        "from services.simulation.world import run_seed\nimport zlib\nw = run_seed(14)\nprint(zlib.crc32(repr((w.trace,"
        " w.broker.logs)).encode()))"
    )
    root = str(Path(__file__).parents[2])
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in ("1", "2")
    }
    assert len(seen) == 1
