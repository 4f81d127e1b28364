"""Many workers and one process for all, on a real broker: restarted or killed under load, proven by the audit."""

import subprocess
import sys
from pathlib import Path


def scale(bootstrap: str, name: str, folder: Path, *words: object) -> str:
    command = [sys.executable, "-m", "tests.benchmarks.scale", *map(str, words), "--bootstrap", bootstrap]
    command += ["--name", name, "--folder", str(folder), "--partitions", "4", "--rate", "1500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_rolling_restart_of_two_workers_each_changes_nothing(bootstrap: str, mesh_name: str, tmp_path: Path) -> None:
    said = scale(bootstrap, mesh_name, tmp_path, "rolling", "--events", 45_000, "--node", 2)
    assert "9 workers in 9 processes are ready" in said
    assert said.count(" back after ") == 9
    assert "audited equal" in said


def test_all_services_in_one_process_that_is_killed(bootstrap: str, mesh_name: str, tmp_path: Path) -> None:
    one = ("--node", 1, "--ingest", 1, "--sink", 1)
    said = scale(bootstrap, mesh_name, tmp_path, "kill", "--placement", "together", "--events", 24_000, *one)
    assert "5 workers in 1 processes are ready" in said
    assert said.count(" back after ") == 1
    assert "audited equal" in said
