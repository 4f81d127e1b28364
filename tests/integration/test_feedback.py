"""Feedback on a real mesh: much is not made, all results are there (audited), and people can see it at work."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.feedback import MESH, load

EVENTS, WINDOW_S, FAN_OUT = 8_000, 4, 8


def test_a_sparse_stream_suspends_its_producers(bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap, window=WINDOW_S, partitions=4, feedback="on"))
    count, expected = load(bootstrap, EVENTS, WINDOW_S * 1000, FAN_OUT)
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 3)
    audit = run("audit", "-f", file, "--report", tmp_path / "report").stderr
    proof = json.loads((tmp_path / "report" / "audit.json").read_text())["queries"]["four"]
    assert (proof["expected"], proof["found"], proof["passed"]) == (expected, expected, True), audit
    status = run("status", "-f", file).stdout
    print(f"{count:,} events, {expected:,} results\n{status}")
    table = status[status.index("feedback  ") :].splitlines()
    assert table[0].split("  ")[0] == "feedback"
    assert [line.split()[0] for line in table[1:4]] == ["four.j1-0", "four.j2-0", "four.j3-0"]
    counts = {line.split()[0]: [int(n.replace(",", "")) for n in line.split()[1:9]] for line in table[1:4]}
    assert counts["four.j3-0"][5] > 0  # values suspended; how much that saves depends on how fast the events come
    said = run("feedback", "tail", "-f", file, "--from-start", "-n", 40).stdout
    print(said)
    assert re.search(r"^j3/\d to four\.j2/\d: do not make \d+ values of a\.z \(my other side has reached \d\d:\d\d:\d\d\)$", said, re.MULTILINE)


def test_a_mesh_without_feedback_says_how_to_have_it(bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap, window=1, partitions=4, feedback="off"))
    run("topics", "-f", file, "--create", check=False)
    done = run("feedback", "tail", "-f", file, check=False)
    assert done.returncode == 1
    assert "runs with feedback; write `feedback: {four: on}` into" in done.stderr
