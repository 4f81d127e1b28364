"""The short form of `make chaos`: kills, a broker crash, a lost volume, a takeover and plans that change under load,
proven by the audit at the end."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_faults_change_nothing(tmp_path: Path, run: Callable[..., Any]) -> None:
    done = run(
        "chaos",
        "--events",
        40_000,
        "--rate",
        800,
        "--seed",
        3,
        "--faults",
        "kill:6,broker-kill:1,wipe:1,workers:1",
        "--folder",
        tmp_path / "chaos",
        timeout=600,
    )
    print(done.stdout)
    assert "seed 3: PASSED" in done.stdout


def test_death_at_points_of_the_step_changes_nothing(tmp_path: Path, run: Callable[..., Any]) -> None:
    points = "node.after_batch:7,ingest.after_send:9,sink.before_commit:5"
    done = run(
        "chaos",
        "--events",
        24_000,
        "--rate",
        800,
        "--seed",
        4,
        "--faults",
        "none",
        "--failpoints",
        points,
        "--times",
        3,
        "--folder",
        tmp_path / "chaos",
        timeout=600,
    )
    print(done.stdout)
    assert "seed 4: PASSED" in done.stdout
    for point in points.split(","):
        assert point.partition(":")[0] in done.stdout, "the failpoint was never passed"


def test_faults_while_joins_give_feedback(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run(
        "chaos",
        "--events",
        24_000,
        "--rate",
        600,
        "--seed",
        8,
        "--faults",
        "kill:5,wipe:1,migrate:2",
        "--feedback",
        "on",
        "--folder",
        tmp_path / "chaos",
        timeout=600,
    )
    print(done.stdout)
    assert re.search(r"feedback: .*[1-9][\d,]* values suspended", done.stdout)
    assert "PASSED" in done.stdout
    assert len(re.findall(r"runs under epoch", (tmp_path / "chaos" / "migrations.log").read_text())) == 2
