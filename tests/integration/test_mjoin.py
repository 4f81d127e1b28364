"""An M-Join on a real mesh: as an Eddy with feedback, feeding a two-way join; fewer services than a tree has, and all
results (audited)."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from schemas.mesh import parse_mesh
from services.runtime.kafka import Topic, ensure_topics

EVENTS = 6_000
MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 2
streams:
  a: {{topic: {name}-a, event_time: ts, lateness: 1s, fields: {{k: int64, m: int64, ts: timestamp}}}}
  b: {{topic: {name}-b, event_time: ts, lateness: 1s, fields: {{k: int64, v: string, ts: timestamp}}}}
  c: {{topic: {name}-c, event_time: ts, lateness: 1s, fields: {{k: int64, m: int64, ts: timestamp}}}}
  d: {{topic: {name}-d, event_time: ts, lateness: 1s, fields: {{v: string, ts: timestamp}}}}
queries:
  four: |
    SELECT a.k, b.v, d.ts AS at FROM a [RANGE 4 SECONDS], b [RANGE 4 SECONDS], c [RANGE 4 SECONDS], d [RANGE 4 SECONDS]
    WHERE a.k = b.k AND b.k = c.k AND a.m = c.m AND b.v = d.v
plans: {{four: "((a b c) d)"}}
routing: {{four: eddy}}
feedback: {{four: on}}
"""


def test_an_m_join_gives_all_results(bootstrap: str, mesh_name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap))
    load(file)
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 3)
    audit = run("audit", "-f", file, "--report", tmp_path / "report").stderr
    proof = json.loads((tmp_path / "report" / "audit.json").read_text())["queries"]["four"]
    assert proof["passed"], audit
    assert proof["expected"] == proof["found"] > 100
    status = run("status", "-f", file).stdout
    print(f"{proof['found']:,} results\n{status}")
    assert "four.j2-0" in status
    assert "four.j3" not in status
    assert re.findall(r"^four\.j1-0 +(\d \w) ", status, re.MULTILINE) == ["1 a", "2 b", "3 c"]  # what each state holds
    counts = status[status.index("feedback  ") :].splitlines()[1].split()
    assert counts[0] == "four.j1-0"
    assert int(counts[6].replace(",", "")) > 0  # values suspended, in the node itself


def load(file: Path) -> None:
    """a, b and d at one a millisecond; c is rare."""
    mesh = parse_mesh(file.read_text())
    ensure_topics(mesh, [Topic(stream.topic, 2) for stream in mesh.streams.values()], lambda _: None)
    producer, rng = Producer({"bootstrap.servers": mesh.bootstrap, "linger.ms": 20}), random.Random(7)
    for i in range(EVENTS):
        for name, stream in mesh.streams.items():
            if name != "c" or i % 20 == 0 or i >= EVENTS - 2:
                row = {
                    "k": rng.randrange(500),
                    "m": rng.randrange(4),
                    "v": f"v{rng.randrange(800)}",
                    "ts": 1_700_000_000_000 + i,
                }
                producer.produce(
                    stream.topic, json.dumps({field: row[field] for field in stream.fields}), partition=i % 2
                )
        producer.poll(0)
    producer.flush()
