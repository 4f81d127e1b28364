"""A static table on a real mesh: its cut outlives restarts, what comes behind it is said and not joined, and the audit
agrees."""

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
  orders: {{topic: {name}-orders, event_time: ts, lateness: 1s,
    fields: {{order_id: int64, user: string, ts: timestamp}}}}
  payments: {{topic: {name}-payments, event_time: ts, lateness: 1s,
    fields: {{order_id: int64, paid: float64, ts: timestamp}}}}
  users: {{topic: {name}-users, table: user, fields: {{user: string, level: int64}}}}
  levels: {{topic: {name}-levels, table: level, fields: {{level: int64, name: string}}}}
queries:
  who_paid: |
    SELECT o.order_id, p.paid, u.level
    FROM orders [RANGE 5 SECONDS] AS o, payments [RANGE 5 SECONDS] AS p, users AS u
    WHERE o.order_id = p.order_id AND o.user = u.user
  named: |
    SELECT l.name, o.order_id FROM levels AS l, users AS u, orders [RANGE 0 SECONDS] AS o
    WHERE u.level = l.level AND o.user = u.user AND l.level >= o.order_id % 2
feedback: {{who_paid: on, named: on}}
heralds: {{who_paid: off}}
"""
BASE = 1_700_000_000_000


def write(bootstrap: str, name: str, first: int, count: int) -> None:
    """Orders of users 0 to 29, each paid half a second later."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for i in range(first, first + count):
        producer.produce(
            f"{name}-orders", json.dumps({"order_id": i, "user": f"u{i % 30}", "ts": BASE + 10 * i}), partition=i % 2
        )
        producer.produce(
            f"{name}-payments", json.dumps({"order_id": i, "paid": i / 2, "ts": BASE + 10 * i + 500}), partition=i % 2
        )
    producer.flush()


def put(bootstrap: str, topic: str, *records: tuple[int, str | None, str | dict[str, Any] | None]) -> None:
    """(partition, key, value)."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition, key, value in records:
        producer.produce(topic, json.dumps(value) if isinstance(value, dict) else value, key=key, partition=partition)
    producer.flush()


def test_a_table_is_what_it_was_when_the_mesh_first_started(
    bootstrap: str,
    mesh_name: str,
    tmp_path: Path,
    run: Callable[..., Any],
    read: Callable[[str], list[tuple[str, Any, int]]],
    create_topics: Callable[..., None],
) -> None:
    file, users = tmp_path / "mesh.yaml", f"{mesh_name}-users"
    file.write_text(MESH.format(name=mesh_name, bootstrap=bootstrap))
    create_topics(f"{mesh_name}-orders", f"{mesh_name}-payments", users, f"{mesh_name}-levels", partitions=2)
    put(bootstrap, users, *[(i % 2, f"u{i}", {"user": f"u{i}", "level": 0}) for i in range(20)])
    put(bootstrap, users, *[(i % 2, f"u{i}", {"user": f"u{i}", "level": 1 + i % 3}) for i in range(10)])  # replaced
    put(
        bootstrap,
        users,
        (0, "u4", None),
        (1, "u5", None),
        (1, "u5", {"user": "u5", "level": 2}),
        (0, "u6", "no json"),
        (0, None, None),
    )
    put(
        bootstrap,
        f"{mesh_name}-levels",
        *[(0, str(i), {"level": i, "name": f"level {i}"}) for i in range(4)],
        (0, "3", None),
    )
    assert "users as u -> j2, static table by user" in run("explain", "-f", file).stdout
    write(bootstrap, mesh_name, 0, 600)
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 2)
    before = {key: value for key, value, _ in read(f"{mesh_name}.who_paid.results")}
    assert {value["level"] for value in before.values()} == {0, 1, 2, 3}
    assert len(before) == 600 // 30 * 19  # users 0 to 19 but 4

    put(
        bootstrap, users, (0, "u0", None), (1, "u25", {"user": "u25", "level": 2}), (0, "u6", "no json either")
    )  # behind the cut
    write(bootstrap, mesh_name, 600, 300)
    run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 2)
    after = {key: value for key, value, _ in read(f"{mesh_name}.who_paid.results")}
    assert len(after) == 900 // 30 * 19
    named = read(f"{mesh_name}.named.results")
    assert {value["name"] for _, value, _ in named} == {"level 0", "level 1", "level 2"}
    assert {(BASE + 10 * value["order_id"], key.split("|")[0].split(":")[0]) for key, value, _ in named} == {
        (t, "levels") for _, _, t in named
    }
    status = run("status", "-f", file).stdout
    assert "table users partition 0: 2 records came after the mesh first started and are not joined" in status, status
    assert status.count("came after the mesh first started") == 2
    dead = {key: letter for key, letter, _ in read(f"{mesh_name}.dead")}
    assert sorted(letter["stream"] for letter in dead.values()) == ["users", "users"]

    audit = run("audit", "-f", file, "--report", tmp_path / "report")
    proof = json.loads((tmp_path / "report" / "audit.json").read_text())["queries"]
    print(audit.stdout)
    for query, count in (("who_paid", len(after)), ("named", len(named))):
        assert (proof[query]["passed"], proof[query]["expected"], proof[query]["found"]) == (
            True,
            count,
            count,
        ), audit.stdout
    # A deleted user, a version that was replaced, and a row behind the cut: none of these may be part of a result.
    topic, value = f"{mesh_name}.who_paid.results", {"order_id": 0, "paid": 0.0, "level": 0}
    forged = [f"orders:0:0|payments:0:0|users:0:{offset}" for offset in (2, 0, 18)]
    producer = Producer({"bootstrap.servers": bootstrap})
    for id in forged:
        producer.produce(topic, json.dumps(value), key=id, partition=0, timestamp=BASE + 500)
    producer.flush()
    damaged = run("audit", "-f", file, "--query", "who_paid", "--report", tmp_path / "damaged", check=False)
    proof = json.loads((tmp_path / "damaged" / "audit.json").read_text())["queries"]["who_paid"]
    assert (damaged.returncode, proof["extra"], proof["outside"], proof["missing"]) == (
        1,
        len(forged),
        0,
        0,
    ), damaged.stdout
    said = run("feedback", "tail", "-f", file, "--from-start", "-n", 3).stdout
    assert "do not make" in said
    assert "(my other side has reached its end)" in said
    assert "make again" not in run("feedback", "tail", "-f", file, "--from-start", "-n", 3).stdout

    changed = file.read_text().replace(
        "feedback:",
        "  again: |\n    SELECT o.order_id FROM orders [RANGE 0 SECONDS] AS o, users AS u WHERE o.user ="
        " u.user\nfeedback:",
    )
    file.write_text(changed)
    refused = run("up", "-f", file, "--data", tmp_path / "data", "--until-idle", 2, check=False)
    assert refused.returncode == 1
    assert (
        "reads table users, which this mesh has read already and does not read again" in refused.stdout + refused.stderr
    )
