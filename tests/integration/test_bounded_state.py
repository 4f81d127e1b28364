"""After 20 windows at a constant rate each node holds about one window, also of keys that fell silent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 4
streams:
  a: {{topic: {name}-a, event_time: ts, lateness: 200ms, fields: {{k: int64, ts: timestamp}}}}
  b: {{topic: {name}-b, event_time: ts, lateness: 200ms, fields: {{k: int64, m: int64, ts: timestamp}}}}
  c: {{topic: {name}-c, event_time: ts, lateness: 200ms, fields: {{m: int64, ts: timestamp}}}}
queries:
  q: |
    SELECT a.k, c.m FROM a [RANGE 5 SECONDS], b [RANGE 5 SECONDS], c [RANGE 5 SECONDS] WHERE a.k = b.k AND b.m = c.m
"""
RATE, WINDOW_S, WINDOWS = 1_000, 5, 20


def test_state_holds_about_one_window(bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap))
    # Sequential keys never come back: whatever stays of them is a key that fell silent.
    run(
        "generate",
        "-f",
        file,
        "--create",
        4,
        "--count",
        RATE * WINDOW_S * WINDOWS,
        "--event-rate",
        RATE,
        "--keys",
        "sequential",
        "--key-count",
        RATE * WINDOW_S * WINDOWS,
        "--out-of-order",
        100,
    )
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 2)
    status = run("status", "-f", file, "--json").stdout
    sides = [side for report in _nodes(json.loads(status)) for side in report["state"]]
    assert len(sides) == 4
    for side in sides:
        assert 0.8 * RATE * WINDOW_S <= side["rows"] <= 1.5 * RATE * WINDOW_S, side
        assert side["newest_ms"] - side["oldest_ms"] <= 1.5 * WINDOW_S * 1000, side
    print(run("status", "-f", file).stdout)


def _nodes(status: Any) -> list[dict[str, Any]]:
    if isinstance(status, dict) and status.get("service") == "join_node":
        return [status]
    nested = status.values() if isinstance(status, dict) else status if isinstance(status, list) else []
    return [report for part in nested for report in _nodes(part)]
