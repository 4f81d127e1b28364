"""Metrics are numbers of reports, under names that Prometheus and its users expect; counters only rise."""

import re
from pathlib import Path
from typing import Any

import pytest

from services.runtime.figures import Figures
from services.runtime.metrics import BY_NAME, COMMON, METRICS, samples
from services.supervisor.watching import MeshWatch

ROOT = Path(__file__).parent.parent.parent
OTHERS = {"joinmesh_build_info"}  # of the process, not of a report
NODE = {
    "mesh": "shop",
    "service": "join_node",
    "instance": "paid.j1-2",
    "query": "paid",
    "node": "j1",
    "started_ms": 1_000,
    "at_ms": 2_500,
    "partitions": [0, 1],
    "epochs": {"0": [1], "1": [1, 2]},
    "events_in": 10,
    "rows_in": 100,
    "rows_out": 50,
    "dead": 0,
    "cpu_s": 1.5,
    "watermark_ms": None,
    "state": [
        {"side": "left", "name": "o", "rows": 5, "bytes": 50, "oldest_ms": 1000, "newest_ms": 4500, "window_ms": 3000},
        {"side": "right", "name": "t", "rows": 7, "bytes": 70, "oldest_ms": None, "newest_ms": None, "window_ms": -1},
    ],
    "feedback": None,
    "heralds": [{"herald": "s", "heeded": 1, "partitions": 2, "blocks": 3}],
    "ready": True,
}  # fmt: skip


def value(figures: Figures, name: str, **labels: str) -> float | None:
    """The one sample of this metric that has these labels."""
    found = [
        sample.value
        for family in figures.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_names_follow_the_conventions(metric: Any) -> None:
    assert re.fullmatch(r"joinmesh_[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.help
    assert not metric.help.endswith(".")
    assert not re.search(r"_(ms|milliseconds|kb|mb|minutes|percent|count|sum|bucket|counter|gauge)(_|$)", metric.name)
    assert (metric.unit == 1) or "_seconds" in metric.name
    if "timestamp" in metric.name or "start_time" in metric.name:
        assert metric.name.endswith("_seconds")
        assert "Unix time" in metric.help
    assert not {"le", "quantile", "job", "instance", "service", "pod", "namespace"} & set(metric.labels)


def test_no_name_twice() -> None:
    assert len(BY_NAME) == len(METRICS)
    seen = [(metric.of, role) for metric in METRICS for role in metric.roles]
    assert len(seen) == len(set(seen))  # nor a number under two names


def test_a_report_as_samples() -> None:
    found = {(metric.name, labels[len(COMMON) :]): value for metric, labels, value in samples(NODE)}
    assert found["joinmesh_start_time_seconds", ()] == 1
    assert found["joinmesh_report_timestamp_seconds", ()] == 2.5
    assert found["joinmesh_ready", ()] == 1
    assert found["joinmesh_partitions", ()] == 2
    assert found["joinmesh_epochs_alive", ()] == 2
    assert found["joinmesh_blocks_total", ()] == 10
    assert found["joinmesh_state_rows", ("right", "t")] == 7
    assert found["joinmesh_state_span_seconds", ("left", "o")] == 3.5
    assert found["joinmesh_state_window_seconds", ("left", "o")] == 3
    assert found["joinmesh_herald_blocks_total", ("s",)] == 3
    names = {name for name, _ in found}
    assert not {n for n in names if n.startswith(("joinmesh_feedback", "joinmesh_watermark", "joinmesh_block_age"))}
    assert ("joinmesh_state_window_seconds", ("right", "t")) not in found  # a table has no window
    assert {labels[: len(COMMON)] for _, labels, _ in samples(NODE)} == {("shop", "join_node", "paid", "j1", "2")}


def test_audits_have_the_label_of_their_query() -> None:
    verdict = {"passed": False, "recall": 0.5, "differences": 3}
    report = {
        "mesh": "shop",
        "service": "controller",
        "instance": "controller",
        "audit": {"passed": False, "at_ms": 7_000, "queries": {"paid": verdict}},
    }
    found = {(metric.name, labels[2]): value for metric, labels, value in samples(report)}
    assert found == {
        ("joinmesh_audit_passed", ""): 0,
        ("joinmesh_audit_timestamp_seconds", ""): 7,
        ("joinmesh_audit_query_passed", "paid"): 0,
        ("joinmesh_audit_recall_ratio", "paid"): 0.5,
        ("joinmesh_audit_differences", "paid"): 3,
    }
    assert not [metric for metric, _, _ in samples({**report, "audit": None}) if "audit" in metric.name]


# -- counters


def test_what_came_with_a_partition_is_no_work_done_here() -> None:
    figures = Figures()
    rows = lambda: value(figures, "joinmesh_rows_in_total")  # noqa: E731
    figures.take({**NODE, "partitions": [], "rows_in": 0})
    assert rows() == 0
    figures.take({**NODE, "rows_in": 1_000_000})  # assigned, with counts of years
    assert rows() == 0
    figures.take({**NODE, "rows_in": 1_000_250})
    assert rows() == 250
    figures.take({**NODE, "partitions": [0], "rows_in": 400_000})  # one went to another worker
    assert rows() == 250
    figures.take({**NODE, "partitions": [0], "rows_in": 400_001})
    assert rows() == 251
    figures.take({**NODE, "partitions": [0], "rows_in": 400_001, "started_ms": 9_000})  # as `up` sees a restart
    assert rows() == 251


def test_dead_blocks_and_cpu_begin_with_the_process() -> None:
    figures = Figures()
    figures.take({**NODE, "dead": 1})  # the first thing it read
    assert value(figures, "joinmesh_dead_blocks_total") == 1
    assert value(figures, "joinmesh_cpu_seconds_total") == 1.5
    figures.take({**NODE, "partitions": [0], "dead": 0})
    figures.take({**NODE, "partitions": [0, 1], "dead": 2})
    assert value(figures, "joinmesh_dead_blocks_total") == 3


def test_a_restart_goes_on_counting() -> None:
    figures = Figures()
    ingest = {"mesh": "shop", "service": "ingest", "instance": "ingest-0", "started_ms": 1}
    figures.take({**ingest, "streams": {"orders": {"events": 10, "late": 0, "dead": 0}}})
    figures.take({**ingest, "started_ms": 2, "streams": {"orders": {"events": 4, "late": 1, "dead": 0}}})
    assert value(figures, "joinmesh_events_total", stream="orders") == 14
    assert value(figures, "joinmesh_late_events_total", stream="orders") == 1


def test_gauges_are_those_of_the_newest_report() -> None:
    figures = Figures()
    figures.take(NODE)
    figures.take({**NODE, "state": [], "ready": False})
    assert value(figures, "joinmesh_ready") == 0
    assert value(figures, "joinmesh_state_rows", side="left") is None


# -- the whole mesh at one address


def test_only_reports_of_the_mesh_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    watch = MeshWatch("127.0.0.1:0", ["paid.j1", "ingest"])
    now = time.time() * 1000 + 1
    good = {**NODE, "at_ms": now}
    watch.take({"paid.j1-2": good, "other.j1-0": {**good, "node": "evil"}, "ingest-0": {"at_ms": "never"}})
    watch.take({"ingest-1": {**good, "service": "ingest", "streams": [1, 2]}, "ingest-2": {"service": "ingest"}})
    labels = [s.labels for f in watch.endpoint.figures.collect() for s in f.samples]
    assert {(found["node"], found["worker"]) for found in labels} == {("j1", "2")}
    assert not watch.is_ready
    ingest = {"mesh": "shop", "service": "ingest", "at_ms": now, "ready": True}
    watch.take({"ingest-0": ingest})
    assert watch.is_ready
    watch.take({"ingest-0": {**ingest, "ready": False}})
    assert not watch.is_ready
    watch.take({"ingest-0": {**ingest, "ready": True}})
    monkeypatch.setattr("services.supervisor.watching.STALE_S", -10.0)
    assert not watch.is_ready


# -- docs


def metric_table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | who | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        who = "all" if len(metric.roles) == 4 else ", ".join(metric.roles)
        more = ["query"] if metric.group == "audit.queries" else metric.labels[len(COMMON) :]
        lines.append(f"| `{metric.name}` | {who} | {', '.join(f'`{label}`' for label in more)} | {metric.help} |")
    return "\n".join(lines) + "\n"


def test_the_page_lists_exactly_the_metrics(request: pytest.FixtureRequest) -> None:
    page = ROOT / "docs" / "metrics.md"
    text = page.read_text()
    found = re.search(r"\| metric \| who \|.*?\n(?!\|)", text, re.DOTALL)
    assert found
    if request.config.getoption("--rewrite", default=False):
        page.write_text(text.replace(found[0], metric_table()))
    assert found[0] == metric_table(), "renew it: pytest tests/services/test_metrics.py --rewrite"


WRITTEN = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(p for p in (ROOT / "helm").rglob("*") if p.is_file())]


def test_every_metric_that_is_named_exists() -> None:
    named = {(n, page.name) for page in WRITTEN for n in re.findall(r"\bjoinmesh_[a-z0-9_]+", page.read_text())}
    known = BY_NAME.keys() | OTHERS
    assert len({n for n, _ in named}) >= len(METRICS)
    assert not {(n, page) for n, page in named if n not in known and not n.endswith("_")}
