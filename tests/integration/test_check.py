"""`joinmesh check` passes on a mesh that works, and names what is missing on one that does not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 2
streams:
  l: {{topic: {name}-l, event_time: ts, lateness: 1s, fields: {{k: int64, s: string, ts: timestamp}}}}
  r: {{topic: {name}-r, event_time: ts, lateness: 1s, fields: {{k: int64, s: string, ts: timestamp}}}}
queries:
  q: |
    SELECT l.k, l.s AS ls, r.s AS rs FROM l [RANGE 1 MINUTE], r [RANGE 1 MINUTE] WHERE l.k = r.k
"""


def test_check_sees_results_come_or_says_what_is_missing(
    bootstrap: str,
    mesh_name: str,
    tmp_path: Path,
    run: Callable[..., Any],
    read: Callable[[str], list[tuple[str, Any, int]]],
    create_topics: Callable[..., None],
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap))
    create_topics(f"{mesh_name}-l", f"{mesh_name}-r", partitions=2)
    up = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "up", "-f", file, "--data", tmp_path / "data"],
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_topics(run, file)
        passed = run("check", "-f", file, "--events", 40)
        assert f"all 4 services of mesh {mesh_name} run and are ready" in passed.stdout
        expected = int(passed.stdout.partition("expected: ")[2].partition(" of q")[0])
        assert expected > 10
        assert len(read(f"{mesh_name}.q.results")) == expected
        sink = next(c for c in psutil.Process(up.pid).children(recursive=True) if "services.sink" in c.cmdline())
        os.kill(sink.pid, signal.SIGSTOP)
        stuck = run("check", "-f", file, "--events", 40, "--timeout", 4, check=False)
        os.kill(sink.pid, signal.SIGCONT)
        assert stuck.returncode == 1
        assert "results of q did not come, such as l:" in stuck.stderr
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
    time.sleep(15)  # until what they last said is old
    silent = run("check", "-f", file, "--timeout", 1, check=False)
    assert silent.returncode == 1
    assert f"controller, ingest, q.j1, q.sink of mesh {mesh_name}: no report of the last 15 s" in silent.stderr


def _wait_for_topics(run: Callable[..., Any], file: Path) -> None:
    deadline = time.monotonic() + 60
    while run("topics", "-f", file, check=False).returncode != 0:
        assert time.monotonic() < deadline
