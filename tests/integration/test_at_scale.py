"""300,000 events through chain, star and bushy joins, out of order, late and broken ones among them, proven by the
Spark audit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 4
streams:
  a: {{topic: {name}-a, event_time: ts, lateness: 2s, fields: {{x: int64, y: int64, v: int64, ts: timestamp}}}}
  b: {{topic: {name}-b, event_time: ts, lateness: 1s, fields: {{x: int64, y: int64, z: int64, ts: timestamp}}}}
  c: {{topic: {name}-c, event_time: ts, lateness: 3s, fields: {{x: int64, y: int64, w: string, ts: timestamp}}}}
  d: {{topic: {name}-d, event_time: ts, lateness: 2s, fields: {{x: int64, z: int64, u: float64, ts: timestamp}}}}
queries:
  chain: |
    SELECT a.v, b.z, c.w, a.v + b.z AS total
    FROM a [RANGE 10 SECONDS], b [RANGE 8 SECONDS], c [RANGE 15 SECONDS] WHERE a.x = b.x AND b.y = c.y
  chain_right: |
    SELECT a.v, b.z, c.w, a.v + b.z AS total
    FROM a [RANGE 10 SECONDS], b [RANGE 8 SECONDS], c [RANGE 15 SECONDS] WHERE a.x = b.x AND b.y = c.y
  star: |
    SELECT * FROM a [RANGE 12 SECONDS], b [RANGE 6 SECONDS], c [RANGE 9 SECONDS] WHERE a.x = b.x AND a.x = c.x
  bushy: |
    SELECT a.v, b.z, c.w, d.u
    FROM a [RANGE 9 SECONDS], b [RANGE 7 SECONDS], c [RANGE 11 SECONDS], d [RANGE 5 SECONDS]
    WHERE a.x = b.x AND c.x = d.x AND b.z = d.z AND (a.v < 900000 OR d.u > 0.5)
plans:
  chain: "((a b) c)"
  chain_right: "(a (b c))"
  bushy: "((a b) (c d))"
"""


def test_chain_star_and_bushy_pass_the_audit(
    bootstrap: str,
    mesh_name: str,
    tmp_path: Path,
    run: Callable[..., Any],
    read: Callable[[str], list[tuple[str, Any, int]]],
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap))
    run(
        "generate",
        "-f",
        file,
        "--create",
        4,
        "--count",
        75_000,
        "--keys",
        "uniform",
        "--key-count",
        20_000,
        "--event-rate",
        1_000,
        "--out-of-order",
        800,
        "--late",
        0.005,
        "--broken",
        0.01,
        "--null",
        0.01,
    )
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 2)
    audit = run("audit", "-f", file, "--report", tmp_path / "report")
    print(audit.stdout)
    left, right = read(f"{mesh_name}.chain.results"), read(f"{mesh_name}.chain_right.results")
    assert sorted(left, key=str) == sorted(right, key=str), "two plans of one query differ"
    assert len(left) > 20_000
    for query in ("star", "bushy"):
        assert len(read(f"{mesh_name}.{query}.results")) > 2_000
    reports = list((tmp_path / "report").rglob("*.json"))
    assert reports
    assert all("missing" in json.dumps(json.loads(p.read_text())) for p in reports)
