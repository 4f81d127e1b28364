"""The chart's pods as containers: 100,000 events are joined while every pod is killed once, and the audit's own pod
proves the results."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from schemas.mesh import Mesh, load_mesh
from services.broker import LocalBroker
from services.broker.guard import guard_of, password_file
from services.runtime.acls import rights_of
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


def mesh_of(kafka: dict[str, str]) -> dict[str, Any]:
    streams = {name: {"event_time": "ts", "lateness": "2s", "fields": fields} for name, fields in FIELDS.items()}
    return {"mesh": "pods", "kafka": kafka, "partitions": 4, "streams": streams, "queries": {"paid_orders": QUERY}}


def joinmesh(command: str, file: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "services.cli.main", command, "-f", str(file), *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT)


def await_idle(mesh: Mesh, pods: list[Pod], timeout_s: float = 120) -> None:
    reader, idle = ReportReader(mesh).from_end(), IdleWatch([pod.service for pod in pods], 3)
    deadline = time.monotonic() + timeout_s
    try:
        while not idle.idle(reader.latest):
            assert time.monotonic() < deadline, idle.waiting_for(reader.latest)
            reader.poll(0.2)
            for pod in pods:
                pod.tend()
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


def test_pods_join_while_each_is_killed_and_the_audit_agrees(render: Render, tmp_path: Path) -> None:
    """A broker without a password."""
    with LocalBroker(tmp_path / "broker", tied=True, progress=print) as broker:
        mesh = mesh_of({"bootstrap": broker.bootstrap})
        cluster = render({"mesh": mesh})
        file = tmp_path / "mesh.yaml"
        file.write_text(yaml.safe_dump(mesh))
        join_and_prove(cluster, load_mesh(file))


def test_pods_with_a_principal_each(render: Render, tmp_path: Path) -> None:
    """TLS, SCRAM and ACLs: every pod has the password of its own service alone, and the rights of `joinmesh acls`."""
    secured = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "ssl.ca.location": "/etc/joinmesh/kafka/ca.crt",
        "sasl.username": "${file:/etc/joinmesh/kafka/username}",
        "sasl.password": "${file:/etc/joinmesh/kafka/password}",
    }
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(mesh_of({"bootstrap": "127.0.0.1:1"})))
    guard = guard_of(load_mesh(plan))
    with LocalBroker(tmp_path / "broker", tied=True, progress=print, guard=guard) as broker:
        outside = tmp_path / "mesh.yaml"  # what people outside of the cluster use: the administrator, the producers
        outside.write_text(yaml.safe_dump(mesh_of(broker.kafka)))
        mesh = load_mesh(outside)
        assert joinmesh("acls", outside, "--create").wait() == 0
        names = {service.replace("-", "."): f"{mesh.name}-{service}" for service in rights_of(mesh)}
        secrets = {
            user: {"username": user.encode(), "password": password_file(broker.folder, user).read_bytes()}
            for user in names.values()
        }
        secrets["kafka-ca"] = {"ca.crt": (broker.folder / "ca.pem").read_bytes()}
        values = {
            "mesh": mesh_of({"bootstrap": broker.bootstrap, **secured}),
            "kafka": {"caSecret": "kafka-ca", "secrets": names},
        }
        join_and_prove(render(values, secrets), mesh)


def join_and_prove(cluster: Cluster, mesh: Mesh) -> None:
    """From an empty broker to an audited result, with every pod killed once and one lost."""
    file = Path(mesh.file)
    assert joinmesh("generate", file, "--create", 4, "--count", 0).wait() == 0
    code, output = cluster.job("topics").run()
    assert code == 0, output
    pods = [pod.start() for pod in cluster.services()]
    ready = {pod.service: pod.await_ready() for pod in pods}
    time.sleep(5)
    for pod in pods:
        print(f"{pod.service}: ready after {ready[pod.service]:.1f} s, {pod.memory_bytes() / 1e6:.0f} MB idle")
    work = f"--count {EVENTS // 3 + 1} --rate {RATE} --event-rate 1000 --out-of-order 500 --late 0.01 --broken 0.01"
    source = joinmesh("generate", file, *work.split())
    for pod in pods:
        time.sleep(2)
        restart_killed(pod)
    lose_pod(next(pod for pod in pods if pod.service == "paid_orders.j1"))
    assert source.wait() == 0
    await_idle(mesh, pods)
    verdict = prove(cluster)
    assert verdict["passed"]
    assert verdict["expected"] == verdict["found"] > EVENTS / 10
    for pod in pods:
        assert pod.stop(timeout_s=pod.spec["terminationGracePeriodSeconds"]) == 0, f"{pod.name}:\n{pod.logs()}"


def restart_killed(pod: Pod) -> None:
    pod.tend()
    pod.kill()
    pod.restart()
    print(f"{pod.service}: killed, ready again after {pod.await_ready():.1f} s")


def lose_pod(pod: Pod) -> None:
    """Its machine is gone; it starts elsewhere with its claimed volume alone."""
    pod.delete()
    pod.start()
    print(f"{pod.service}: lost, ready again after {pod.await_ready():.1f} s")
