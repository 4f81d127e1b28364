"""The chart's pods as containers: 100,000 events are joined while every pod is killed once, and the audit's own pod
proves the results."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.mesh import Mesh, load_mesh
from services.broker import LocalBroker
from services.supervisor.reports import IdleWatch, ReportReader
from tests.containers.conftest import ROOT, Render
from tests.containers.pods import Cluster, Pod

EVENTS, RATE = 100_000, 2_000
FIELDS = {
    "orders": {"order_id": "int64", "amount": "float64", "country": "string", "ts": "timestamp"},
    "payments": {"order_id": "int64", "paid": "float64", "ts": "timestamp"},
    "shipments": {"order_id": "int64", "carrier": "string", "ts": "timestamp"},
}
QUERY = """SELECT o.order_id, p.paid, s.carrier
FROM orders [RANGE 30 SECONDS] AS o, payments [RANGE 20 SECONDS] AS p, shipments [RANGE 60 SECONDS] AS s
WHERE o.order_id = p.order_id AND o.order_id = s.order_id
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path / "broker", tied=True, progress=print) as broker:
        yield broker


def mesh_of(kafka: dict[str, str]) -> dict[str, Any]:
    streams = {name: {"event_time": "ts", "lateness": "2s", "fields": fields} for name, fields in FIELDS.items()}
    return {"mesh": "pods", "kafka": kafka, "partitions": 4, "streams": streams, "queries": {"paid_orders": QUERY}}


def generate(file: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "services.cli.main", "generate", "-f", str(file), *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT)


def await_idle(mesh: Mesh, services: list[str], timeout_s: float = 120) -> None:
    reader, idle = ReportReader(mesh).from_end(), IdleWatch(services, 3)
    deadline = time.monotonic() + timeout_s
    try:
        while not idle.idle(reader.latest):
            assert time.monotonic() < deadline, idle.waiting_for(reader.latest)
            reader.poll(0.2)
    finally:
        reader.close()


def prove(cluster: Cluster) -> dict[str, Any]:
    """The verdict of the audit's own pod."""
    audit = cluster.job("audit")
    code, output = audit.run()
    print(output)
    assert code == 0, output
    report = cluster.folder / audit.name / "reports" / "audit" / "audit.json"
    return dict(json.loads(report.read_text())["queries"]["paid_orders"])


def test_pods_join_while_each_is_killed_and_the_audit_agrees(
    broker: LocalBroker, render: Render, tmp_path: Path
) -> None:
    kafka = {"bootstrap": broker.bootstrap}
    cluster = render({"mesh": mesh_of(kafka)})
    file = tmp_path / "mesh.yaml"
    file.write_text(yaml.safe_dump(mesh_of(kafka)))
    assert generate(file, "--create", 4, "--count", 0).wait() == 0
    code, output = cluster.job("topics").run()
    assert code == 0, output
    pods = [pod.start() for pod in cluster.services()]
    ready = {pod.service: pod.await_ready() for pod in pods}
    time.sleep(5)
    for pod in pods:
        print(f"{pod.service}: ready after {ready[pod.service]:.1f} s, {pod.memory_bytes() / 1e6:.0f} MB idle")
    source = generate(
        file,
        "--count",
        EVENTS // 3 + 1,
        "--rate",
        RATE,
        "--event-rate",
        1000,
        "--out-of-order",
        500,
        "--late",
        0.01,
        "--broken",
        0.01,
    )
    for pod in pods:
        time.sleep(2)
        restart_killed(pod)
    lose_pod(next(pod for pod in pods if pod.service == "paid_orders.j1"))
    assert source.wait() == 0
    await_idle(load_mesh(file), [pod.service for pod in pods])
    verdict = prove(cluster)
    assert verdict["passed"]
    assert verdict["expected"] == verdict["found"] > EVENTS / 10
    for pod in cluster.running.copy():
        assert pod.stop(timeout_s=pod.spec["terminationGracePeriodSeconds"]) == 0, f"{pod.name}:\n{pod.logs()}"


def restart_killed(pod: Pod) -> None:
    pod.kill()
    pod.restart()
    print(f"{pod.service}: killed, ready again after {pod.await_ready():.1f} s")


def lose_pod(pod: Pod) -> None:
    """Its machine is gone; it starts elsewhere with its claimed volume alone."""
    pod.delete()
    pod.start()
    print(f"{pod.service}: lost, ready again after {pod.await_ready():.1f} s")
