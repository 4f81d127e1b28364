"""A run: load, a seeded schedule of faults, drain, audit, a table of what was done and how long each recovery took.

Invariant: exit code 0 means that every fault was really done and that the audit found the results equal to the ground
truth, without duplicates. The same seed gives the same schedule.
"""

import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.chaos.faults import FAULTS, mount_state, unmount_state
from services.chaos.world import Say, World

RECOVER_S = 60.0


@dataclass(frozen=True)
class Done:
    fault: str
    target: str
    seconds: float | None  # from the end of the fault until every service is ready and a result has come


@dataclass(frozen=True)
class Plan:
    seed: int
    events: int  # over all four streams
    rate: int  # events a second, by the clock
    faults: dict[str, int]
    failpoints: str = ""  # as JOINMESH_FAILPOINT
    times: int = 20
    feedback: str = "off"
    secure: bool = False


def run_chaos(plan: Plan, folder: Path | None, say: Say) -> tuple[bool, list[Done], dict[str, Any]]:
    """Whether it passed, what was done, the audit's verdict. The folder is kept unless all went well or it was
    given."""
    world = World(folder or Path(tempfile.mkdtemp(prefix="joinmesh-chaos-")), say, plan.feedback, plan.secure)
    world.folder.mkdir(parents=True, exist_ok=True)
    passed = False
    try:
        passed, done, verdict = _run(plan, world, say)
        return passed, done, verdict
    finally:
        unmount_state(world)
        world.close()
        if passed and folder is None:
            shutil.rmtree(world.folder, ignore_errors=True)
        elif not passed:
            say(f"logs and state are in {world.folder}")


def _run(plan: Plan, world: World, say: Say) -> tuple[bool, list[Done], dict[str, Any]]:
    rng = random.Random(plan.seed)
    world.start_broker()
    if plan.faults.get("disk-full"):
        mount_state(world)
    deaths = world.folder / "failpoints"
    if plan.failpoints:
        deaths.mkdir(exist_ok=True)
        world.environment |= {
            "JOINMESH_FAILPOINT": plan.failpoints,
            "JOINMESH_FAILPOINT_LOG": str(deaths),
            "JOINMESH_FAILPOINT_TIMES": str(plan.times),
        }
    per_stream = plan.events // 4
    common = [
        "generate",
        "-f",
        world.file,
        "--keys",
        "uniform",
        "--key-count",
        4000,
        "--event-rate",
        250,
        "--out-of-order",
        500,
        "--late",
        0.005,
        "--broken",
        0.005,
        "--null",
        0.005,
        "--create",
        4,
        "--seed",
        plan.seed,
    ]
    world.command(*common, "--count", 4)  # the topics, and something to read at once
    start = 1_735_689_600_000 + 1_000
    generator = world.background(
        *common, "--count", per_stream, "--rate", plan.rate, "--start", start, log="generate.log"
    )
    world.start_mesh()
    # With failpoints, services die from the first blocks on; each start takes seconds on a busy machine.
    world.wait_for_results(RECOVER_S + (10 * plan.times if plan.failpoints else 0))
    schedule = [name for name, count in plan.faults.items() for _ in range(count)]
    rng.shuffle(schedule)
    turns = dict.fromkeys(plan.faults, 0)
    done: list[Done] = []
    begun, pause_s = time.monotonic(), per_stream * 4 / plan.rate * 0.95 / max(1, len(schedule))
    for number, name in enumerate(schedule, 1):
        target = FAULTS[name](world, rng, turns[name])
        turns[name] += 1
        # Kills follow one another while the mesh is still recovering from the last; only each fifth is watched to its
        # end.
        watched = generator.poll() is None and name != "migrate" and (name != "kill" or turns[name] % 5 == 0)
        seconds = world.seconds_to_work_again(target, time.time(), RECOVER_S) if watched else None
        while time.monotonic() < begun + number * pause_s and generator.poll() is None:
            time.sleep(0.1)
        done.append(Done(name, target, seconds))
        say(
            f"fault {number} of {len(schedule)}: {name} of {target}"
            + (f", all work again after {seconds:.1f} s" if seconds is not None else "")
        )
    while plan.failpoints and generator.poll() is None:
        time.sleep(1)
    if generator.wait() != 0:
        raise RuntimeError(f"the generator failed; see {world.folder / 'generate.log'}")
    say("faults done, draining")
    world.stop_mesh()
    world.environment.clear()
    if plan.faults.get("disk-full"):
        time.sleep(1)
    world.command("up", "-f", world.file, "--data", world.data, "--until-idle", 2, log="up.log")
    if plan.feedback != "off":
        said = world.feedback()
        say("feedback: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in said.items()))
        if plan.feedback == "on" and not said.get("values_suspended"):
            raise RuntimeError("no join gave any feedback, so nothing was shown; use more events")
    say("auditing")
    report = world.folder / "report"
    passed = world.command("audit", "-f", world.file, "--report", report, check=False, log="audit.log") == 0
    verdict = json.loads((report / "audit.json").read_text()) if (report / "audit.json").exists() else {}
    for path in sorted(deaths.glob("*")) if deaths.exists() else []:
        done.append(Done("failpoint", path.name.rpartition("-")[0].rpartition("-")[0], None))
    return passed, done, verdict


def summary(done: list[Done]) -> list[tuple[str, str, int, str, str]]:
    """fault, target, how often, median and worst time to the next result."""
    rows = []
    for fault, target in dict.fromkeys((d.fault, d.target) for d in done):
        mine = [d for d in done if (d.fault, d.target) == (fault, target)]
        times = sorted(d.seconds for d in mine if d.seconds is not None)
        rows.append(
            (
                fault,
                target,
                len(mine),
                f"{times[len(times) // 2]:.1f} s" if times else "-",
                f"{times[-1]:.1f} s" if times else "-",
            )
        )
    return rows
