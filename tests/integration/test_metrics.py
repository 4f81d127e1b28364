"""A running mesh as Prometheus sees it: each service's own endpoint and that of `joinmesh up` give the numbers of the
reports, and every number of a report is given."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas import topics
from schemas.mesh import Mesh, load_mesh
from services.broker.local import free_port
from services.runtime.metrics import LEFT_OUT, METRICS

ROOT = Path(__file__).parent.parent.parent
Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]
LABELS = {"mesh", "service", "instance", "query", "node", "side", "name", "herald"}  # and `events` of a stream, below
EXAMINED = {"alarms", "epochs", "partitions", "streams", "state", "feedback", "heralds", "audit", "queries"}


@contextmanager
def started(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def scrape(port: int) -> Scraped:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if v))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(scraped: Scraped, name: str, **labels: str) -> float:
    return sum(value for (n, found), value in scraped.items() if n == name and labels.items() <= dict(found).items())


def wait_until(port: int, good: Callable[[Scraped], bool], patience_s: float = 90) -> Scraped:
    deadline, scraped = time.monotonic() + patience_s, Scraped()
    while time.monotonic() < deadline:
        try:
            scraped = scrape(port)
            if good(scraped):
                return scraped
        except OSError:
            pass
        time.sleep(0.3)
    pytest.fail(f"never came: {sorted(scraped.items())}")


def fields(report: Any) -> set[str]:
    """The names of everything that a report holds, at any depth, but names of streams, queries and partitions."""
    found: set[str] = set()
    for key, value in report.items() if isinstance(report, dict) else ():
        found.add(key)
        members = value.values() if key in ("streams", "queries") else value if isinstance(value, list) else [value]
        if key not in ("epochs", "plans"):
            found = found.union(*(fields(member) for member in members))
    return found


def test_a_mesh_is_watched(shop_file: Path, mesh_name: str, run: Any, tmp_path: Path) -> None:
    shop_file.write_text(shop_file.read_text() + "feedback: {paid_orders: on}\n")
    mesh = load_mesh(shop_file)
    run("generate", "-f", shop_file, "--create", "4", "--count", "3000")
    broken = produce_broken(mesh, mesh.streams["orders"].topic)
    port = free_port()
    with started("services.cli.main", "up", "-f", shop_file, "--data", tmp_path / "data", "--health", str(port)):
        wait_until(port, lambda s: total(s, "joinmesh_events_total") >= 9000 + broken and has_no_lag(s))
        time.sleep(3)  # every service has reported since
        done = wait_until(port, has_no_lag)
        publish_audit(mesh)
        failed = wait_until(port, lambda s: any(n == "joinmesh_audit_passed" for n, _ in s))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            assert answer.status == 200
        reports = json.loads(run("status", "-f", shop_file, "--json").stdout)
        assert "FAILED: paid_orders" in run("status", "-f", shop_file).stdout
    assert total(failed, "joinmesh_audit_passed") == 0
    assert total(failed, "joinmesh_audit_differences", query="paid_orders") == 5
    check_numbers(done, reports, mesh_name, broken)
    check_every_field(failed, reports)
    check_one_service(shop_file, tmp_path, done)


def produce_broken(mesh: Mesh, topic: str) -> int:
    from confluent_kafka import Producer

    producer = Producer(dict(mesh.kafka))
    for partition in range(4):
        producer.produce(topic, b"{no event", partition=partition)
    producer.flush(30)
    return 4


def publish_audit(mesh: Mesh) -> None:
    """A record as an audit writes it, of one that failed."""
    from services.audit.log import publish

    short = {"passed": False, "recall": 0.9, "differences": {"missing": 3, "wrong value": 2}}
    made = "2026-01-02T03:04:05+00:00"
    publish(mesh, topics.audit(mesh.name), {"made": made, "passed": False, "queries": {"paid_orders": short}})


def has_no_lag(scraped: Scraped) -> bool:
    return total(scraped, "joinmesh_lag_records") == 0 < total(scraped, "joinmesh_rows_out_total", role="sink")


def check_numbers(scraped: Scraped, reports: dict[str, Any], mesh_name: str, broken: int) -> None:
    """A service that had to start again on a busy machine reports since then, and its metrics count on."""
    ingest, sink = reports["ingest-0"], reports["paid_orders.sink-0"]
    assert {dict(labels).get("mesh") for (name, labels) in scraped if name == "joinmesh_ready"} == {mesh_name}
    assert total(scraped, "joinmesh_ready") == len(reports) == 5
    assert total(scraped, "joinmesh_dead_records_total", stream="orders") >= broken
    assert total(scraped, "joinmesh_dead_records_total") == total(
        scraped, "joinmesh_dead_records_total", stream="orders"
    )
    assert total(scraped, "joinmesh_late_events_total") >= ingest["late"]
    assert total(scraped, "joinmesh_rows_out_total", role="sink", worker="0") >= sink["rows_out"]
    assert total(scraped, "joinmesh_transactions_total") >= sink["transactions"]
    for node in ("j1", "j2"):
        report = reports[f"paid_orders.{node}-0"]
        assert 0 < total(scraped, "joinmesh_rows_in_total", node=node) <= report["rows_in"]
        assert total(scraped, "joinmesh_state_rows", node=node) == sum(side["rows"] for side in report["state"])
        assert total(scraped, "joinmesh_watermark_timestamp_seconds", node=node) == report["watermark_ms"] / 1000
        assert total(scraped, "joinmesh_partitions", node=node) == 4
        assert 0 < total(scraped, "joinmesh_disk_free_bytes", node=node) < total(scraped, "joinmesh_disk_size_bytes")


def check_every_field(scraped: Scraped, reports: dict[str, Any]) -> None:
    """Everything that services report is a metric, a label, or left out for a reason; and every metric comes."""
    known = {metric.field for metric in METRICS} | LABELS | EXAMINED | LEFT_OUT.keys()
    assert set().union(*(fields(report) for report in reports.values())) - known == set()
    assert {metric.name for metric in METRICS} - {name for name, _ in scraped} == set()


def check_one_service(shop_file: Path, tmp_path: Path, before: Scraped) -> None:
    """A service by itself: the same names; counts of the state that it takes over are no work of its own."""
    port = free_port()
    arguments = ("-f", shop_file, "--data", tmp_path / "data", "--query", "paid_orders", "--node", "j1")
    with started("services.join_node", *arguments, "--health", f"127.0.0.1:{port}"):
        scraped = wait_until(port, lambda s: total(s, "joinmesh_partitions") == 4)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            assert answer.status == 200
    mine = {name for name, labels in before if dict(labels).get("node") == "j1"}
    steps = {"joinmesh_step_duration_p50_seconds", "joinmesh_step_duration_p99_seconds"}  # it has taken none
    assert mine - {name for name, _ in scraped} == steps
    assert total(scraped, "joinmesh_rows_in_total") == 0
    assert total(scraped, "joinmesh_state_rows") > 0
