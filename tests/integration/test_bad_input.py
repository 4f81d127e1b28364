"""Bad records get a dead letter with the reason, null keys and late events are counted, and everything else still
joins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

MESH = """
mesh: {name}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 2
streams:
  l: {{topic: {name}-l, event_time: ts, lateness: 1s,
    fields: {{k: int64, s: string, ok: bool, f: float64, ts: timestamp}}}}
  r: {{topic: {name}-r, event_time: ts, lateness: 1s, fields: {{k: int64, s: string, ts: timestamp}}}}
queries:
  q: |
    SELECT l.k, l.s AS ls, r.s AS rs FROM l [RANGE 5 SECONDS], r [RANGE 5 SECONDS] WHERE l.k = r.k
"""
BAD: list[tuple[bytes | None, str]] = [
    (b'{"k": 1, "ts": 1700000000000', "truncated"),
    (b"not json", "malformed"),
    (b'{"k": "one", "ts": 1700000000000}', "Expected `int | null`, got `str`"),
    (b'{"k": 1.5, "ts": 1700000000000}', "got `float`"),
    (b'{"k": 9223372036854775808, "ts": 1700000000000}', "<= 9223372036854775807"),
    (b'{"k": 1, "ok": 1, "ts": 1700000000000}', "bool"),
    (b'{"k": 1, "f": 1e999, "ts": 1700000000000}', "out of range"),
    (b'{"k": 1}', "missing required field `ts`"),
    (b'{"k": 1, "ts": null}', "got `null`"),
    (b'{"k": 1, "ts": "yesterday"}', "RFC 3339"),
    (b'{"k": 1, "ts": "2024-05-01T10:00:00"}', "with an offset"),
    (b'{"k": 1, "ts": -5}', ">= 1"),
    (b'[{"k": 1, "ts": 1700000000000}]', "Expected `object`"),
    (b'{"k": 1, "s": "\xff", "ts": 1700000000000}', "UTF-8"),
    (b"", "empty"),
    (None, "empty"),
    (json.dumps({"k": 1, "s": "x" * 2_000_000, "ts": 1_700_000_000_000}).encode(), "at most 1,048,576"),
]


def test_each_bad_record_has_its_dead_letter_and_the_rest_joins(
    bootstrap: str,
    mesh_name: str,
    tmp_path: Path,
    run: Callable[..., Any],
    read: Callable[[str], list[tuple[str, Any, int]]],
    create_topics: Callable[..., None],
) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap))
    create_topics(f"{mesh_name}-l", f"{mesh_name}-r", partitions=1, config={"max.message.bytes": "4000000"})
    producer = Producer({"bootstrap.servers": bootstrap, "message.max.bytes": 4_000_000})
    base = 1_700_000_000_000
    for i, (value, _) in enumerate(BAD):
        producer.produce(f"{mesh_name}-l", value, partition=0)
        producer.produce(f"{mesh_name}-l", json.dumps({"k": i, "s": "é\n", "ts": base + i}), partition=0)
    producer.produce(f"{mesh_name}-l", json.dumps({"k": None, "ts": base + 20}), partition=0)
    producer.produce(f"{mesh_name}-l", json.dumps({"k": 2, "ts": base + 5_000}), partition=0)
    producer.produce(f"{mesh_name}-l", json.dumps({"k": 3, "ts": base}), partition=0)  # 5 s back: late
    for i in range(len(BAD)):
        time: Any = base + i if i % 2 else f"2023-11-14T22:13:20.{i:03}Z"
        producer.produce(f"{mesh_name}-r", json.dumps({"k": i, "s": str(2**60 + i), "ts": time}), partition=0)
    producer.flush()
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 2)
    dead = {record["offset"]: record for _, record, _ in read(f"{mesh_name}.dead")}
    assert len(dead) == len(BAD)
    for i, (value, reason) in enumerate(BAD):
        assert reason in dead[2 * i]["reason"], (value, dead[2 * i]["reason"])
        assert dead[2 * i]["topic"] == f"{mesh_name}-l"
    late = [record for _, record, _ in read(f"{mesh_name}.late")]
    assert [(r["stream"], r["ts"], r["reason"]) for r in late] == [("l", base, "late")]
    results = read(f"{mesh_name}.q.results")
    assert len(results) == len(BAD) + 1
    assert {v["k"] for _, v, _ in results} == set(range(len(BAD)))
    assert all(v["ls"] in ("é\n", None) for _, v, _ in results)
    status = json.loads(run("status", "-f", file, "--json").stdout)
    ingest = next(r for r in _reports(status) if r.get("service") == "ingest")
    assert (ingest["dead"], ingest["late"], ingest["null_keys"]) == (len(BAD), 1, 1)


def _reports(status: Any) -> list[dict[str, Any]]:
    if isinstance(status, dict) and "service" in status:
        return [status]
    nested = status.values() if isinstance(status, dict) else status if isinstance(status, list) else []
    return [report for part in nested for report in _reports(part)]
