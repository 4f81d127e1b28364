"""Feedback on a real mesh: much is not made, all results are there (audited), and people can see it at work."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.feedback import load, mesh_text

EVENTS, WINDOW_S, FAN_OUT = 8_000, 4, 8


def audited(mode: str, bootstrap: str, mesh_name: str, folder: Path, run: Callable[..., Any]) -> tuple[Path, str]:
    """A mesh run to its end and proven; gives its file and its status."""
    file = folder / "mesh.yaml"
    file.write_text(mesh_text(mesh_name, bootstrap, mode, WINDOW_S, partitions=4))
    count, least = load(
        bootstrap, EVENTS, WINDOW_S * 1000, FAN_OUT
    )  # the topics may hold another test's events before these
    run("up", "-f", file, "--data", folder / "data", "--until-idle", 3)
    audit = run("audit", "-f", file, "--report", folder / "report").stderr
    proof = json.loads((folder / "report" / "audit.json").read_text())["queries"]["four"]
    assert proof["passed"] and proof["expected"] == proof["found"] >= least, audit  # noqa: PT018
    status = run("status", "-f", file).stdout
    print(f"{count:,} events, {proof['found']:,} results\n{status}")
    return file, status


def rows_of(status: str, table: str) -> list[list[str]]:
    """The rows of a table of `status`, in cells."""
    text = status[status.index(f"\n{table}  ") + 1 :].partition("\n\n")[0]
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()[1:]]


def test_a_sparse_stream_suspends_its_producers(
    bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    file, status = audited("suspend", bootstrap, mesh_name, tmp_path, run)
    found = {row[0]: [int(n.replace(",", "")) for n in row[1:8]] for row in rows_of(status, "feedback")}
    assert list(found) == ["four.j1-0", "four.j2-0", "four.j3-0"]
    assert found["four.j3-0"][5] > 0  # values suspended; how much that saves depends on how fast the events come
    said = run("feedback", "tail", "-f", file, "--from-start", "-n", 40).stdout
    print(said)
    assert re.search(
        r"^j3/\d to four\.j2/\d: do not make \d+ values of a\.z \(my other side has reached \d\d:\d\d:\d\d\)$",
        said,
        re.MULTILINE,
    )


def test_a_sparse_stream_is_heralded(bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    file, status = audited("auto", bootstrap, mesh_name, tmp_path, run)
    heralds = {(row[0], row[1]): row[2:] for row in rows_of(status, "heralds")}
    assert list(heralds) == [
        ("four.j1-0", "c by a.m = c.m"),
        ("four.j1-0", "d by a.z = d.z"),
        ("four.j2-0", "d by a.z = d.z"),
    ]
    heeded, _, _, found, not_made, _ = heralds["four.j1-0", "d by a.z = d.z"]
    assert heeded == "4 of 4"
    assert int(not_made.replace(",", "")) > 0.8 * int(found.replace(",", "")) > 1_000
    assert "heralds: what each join is told" in run("explain", "-f", file).stdout


def test_a_mesh_without_feedback_says_how_to_have_it(
    bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(mesh_text(mesh_name, bootstrap, "off", 1, partitions=4))
    run("topics", "-f", file, "--create", check=False)
    done = run("feedback", "tail", "-f", file, check=False)
    assert done.returncode == 1
    assert "runs with feedback; write `feedback: {four: on}` into" in done.stderr
