"""The metrics of a mesh, as a table: name, kind, help, who has it, and the field of a report that it shows.

Invariant: a metric is a number that a report holds, in base units (seconds, bytes); nothing is counted for metrics
alone. Names are stable: dashboards and alerts of users hang on them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMMON = ("mesh", "role", "query", "node", "worker")
EXTRA = {"streams": ("stream",), "state": ("side", "input"), "heralds": ("herald",)}  # labels of what a group holds
ALL = ("controller", "ingest", "join_node", "sink")
READERS, TAKERS, NODES = ALL[1:], ALL[2:], ("join_node",)
MS = 0.001
LEFT_OUT = {  # fields of reports that are no metrics, and why
    "late": "the sum over streams",
    "plans": "text",
    "rounds": "how ingest is built",
    "blocks_in": "the same as events_in",
    "first_event_ms": "for benchmarks",
    "oldest_ms": "see the span",
    "newest_ms": "see the span",
    "partitions": "of a herald: those of the node",
}


@dataclass(frozen=True)
class Metric:
    """`of` is where a report has it: a field, or a field of a group of them (`state.rows`)."""

    name: str
    of: str
    help: str
    roles: tuple[str, ...] = ALL
    unit: float = 1  # what one of the report's is in the metric's

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    @property
    def labels(self) -> tuple[str, ...]:
        return (*COMMON, *EXTRA.get(self.group, ()))

    @property
    def group(self) -> str:
        return self.of.rpartition(".")[0]

    @property
    def field(self) -> str:
        return self.of.rpartition(".")[2]


def _of(roles: tuple[str, ...], *rows: tuple[str, str, str] | tuple[str, str, str, float]) -> tuple[Metric, ...]:
    return tuple(Metric(f"joinmesh_{row[0]}", row[1], row[2], roles, *row[3:]) for row in rows)


METRICS = (
    *_of(
        ALL,
        ("start_time_seconds", "started_ms", "When the service started (Unix time). A change is a restart", MS),
        ("report_timestamp_seconds", "at_ms", "When the service last measured itself (Unix time)", MS),
        ("ready", "ready", "1 if the service has its partitions and their state is restored, else 0"),
        ("cpu_seconds_total", "cpu_s", "CPU time of the service's process"),
        ("resident_memory_bytes", "rss_bytes", "Memory of the service's process"),
    ),
    *_of(
        READERS,
        ("lag_records", "lag", "Kafka records left to read: of source topics for ingest, blocks for nodes and sinks"),
        ("rows_out_total", "rows_out", "Rows sent by ingest, rows joined by nodes, results committed by sinks"),
    ),
    *_of(
        ("ingest", "join_node"),
        (
            "watermark_timestamp_seconds",
            "watermark_ms",
            "The event time before which nothing more is expected (Unix time). Absent until it is known",
            MS,
        ),
    ),
    *_of(
        ("ingest",),
        ("events_total", "streams.events", "Source records read, late and broken ones included"),
        ("late_events_total", "streams.late", "Events set aside because they came too late"),
        ("dead_records_total", "streams.dead", "Source records set aside because they cannot be read"),
        ("null_key_events_total", "null_keys", "Events dropped because a join column is null or NaN, once per query"),
        ("filtered_events_total", "filtered", "Events dropped by a selection, once per query"),
        ("alarms", "alarms", "Alarms that stand. `joinmesh status` has their words"),
    ),
    *_of(
        TAKERS,
        ("blocks_total", "events_in", "Blocks read"),
        ("dead_blocks_total", "dead", "Blocks set aside: damaged, or not what the plan says. Any is a serious fault"),
        ("rows_in_total", "rows_in", "Rows taken"),
    ),
    *_of(
        ("sink",),
        ("transactions_total", "transactions", "Transactions committed"),
        ("block_age_p50_seconds", "step_ms_p50", "Age of blocks when the sink takes them, recent median", MS),
        ("block_age_p99_seconds", "step_ms_p99", "The same, 99th percentile", MS),
    ),
    *_of(
        ("controller", "join_node"),
        ("epoch", "epoch", "The newest epoch of the plans"),
    ),
    *_of(
        NODES,
        ("epochs_alive", "epochs", "The most epochs that one partition runs at once. Above 1 while a plan changes"),
        ("partitions", "partitions", "Partitions that this worker has"),
        ("rows_repeated_total", "rows_repeated", "Rows dropped because they had been taken before"),
        ("blocks_fenced_total", "blocks_fenced", "Blocks dropped because their sender has a newer incarnation"),
        ("step_duration_p50_seconds", "step_ms_p50", "Duration of steps, recent median", MS),
        ("step_duration_p99_seconds", "step_ms_p99", "The same, 99th percentile", MS),
        ("state_rows", "state.rows", "Rows that a side holds"),
        ("state_bytes", "state.bytes", "Bytes that a side holds"),
        ("state_segments", "state.segments", "Segments that a side holds"),
        ("state_span_seconds", "state.span_ms", "Event time between the oldest and the newest row of a side", MS),
        ("state_window_seconds", "state.window_ms", "The window of a side: about what its span should be", MS),
        ("cache_bytes", "cache_bytes", "State that is held in memory too"),
        ("disk_free_bytes", "disk_free_bytes", "Free space on the disk that holds the state"),
        ("disk_size_bytes", "disk_size_bytes", "Size of the disk that holds the state"),
        ("feedback_suspended_values", "feedback.suspended_here", "Values suspended at this node now"),
        ("feedback_suspended_above_values", "feedback.suspended_above", "Values suspended at its producers now"),
        ("feedback_sides_speaking", "feedback.sides_speaking", "Sides, over partitions, that tell their producers"),
        ("feedback_rows_diverted_total", "feedback.rows_diverted", "Rows that waited for what is suspended"),
        ("feedback_pairs_avoided_total", "feedback.pairs_avoided", "Pairs that were found and not made"),
        ("feedback_pairs_resumed_total", "feedback.pairs_resumed", "Of these, pairs made later"),
        ("feedback_values_suspended_total", "feedback.values_suspended", "Values that it suspended at its producers"),
        ("feedback_values_resumed_total", "feedback.values_resumed", "Values that it asked its producers for again"),
        ("feedback_blocks_sent_total", "feedback.blocks_sent", "Blocks sent about demand"),
        ("feedback_sent_bytes_total", "feedback.bytes_sent", "Bytes of these"),
        ("herald_heeded_partitions", "heralds.heeded", "Partitions in which a herald is heeded"),
        ("herald_rows", "heralds.rows_held", "Heralded rows that are held"),
        ("herald_blocks_total", "heralds.blocks", "Blocks of heralds received"),
        ("herald_composites_found_total", "heralds.composites_found", "Composites that were looked up among its rows"),
        ("herald_not_made_total", "heralds.not_made", "Of these, composites that nothing fitted"),
        ("herald_made_later_total", "heralds.made_later", "Of these, composites made when something did"),
    ),
    *_of(
        ("controller",),
        ("audit_passed", "audit.passed", "1 if the last audit passed, 0 if it failed. Absent before the first"),
        ("audit_timestamp_seconds", "audit.at_ms", "When the last audit was made (Unix time)", MS),
        ("audit_query_passed", "audit.queries.passed", "The same as joinmesh_audit_passed for each query"),
        ("audit_recall_ratio", "audit.queries.recall", "Share of the expected results that are there and right"),
        ("audit_differences", "audit.queries.differences", "Results and notices that are missing, extra or wrong"),
    ),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}


def samples(report: Mapping[str, Any]) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    """(metric, values of its labels, value) of everything that a report holds; what is no number is left out."""
    role, common = report.get("service"), _common(report)
    groups: dict[str, list[Metric]] = {}
    for metric in METRICS:
        if role in metric.roles:
            groups.setdefault(metric.group, []).append(metric)
    for group, metrics in groups.items():
        for labels, held in _held(report, group):
            values = tuple(str(labels.get(name, common.get(name, ""))) for name in metrics[0].labels)
            for metric in metrics:
                value = held.get(metric.field)
                if isinstance(value, bool | int | float):
                    yield metric, values, round(value * metric.unit, 6)


def _common(report: Mapping[str, Any]) -> dict[str, Any]:
    _, _, worker = str(report.get("instance", "")).rpartition("-")
    return {
        "mesh": report.get("mesh", ""),
        "role": report.get("service", ""),
        "query": report.get("query", ""),
        "node": report.get("node", ""),
        "worker": worker if worker.isdigit() else "0",
    }


def _held(report: Mapping[str, Any], group: str) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """(more labels, numbers) of each member of a group."""
    if group == "":
        lists = {name: len(report[name]) for name in ("alarms", "partitions") if name in report}
        epochs = {"epochs": max(map(len, report["epochs"].values()), default=0)} if "epochs" in report else {}
        yield {}, {**report, **lists, **epochs}
    elif group == "streams":
        yield from (({"stream": name}, counts) for name, counts in report.get("streams", {}).items())
    elif group == "state":
        for held in report.get("state", []):
            ends = (held["oldest_ms"], held["newest_ms"])
            span = {"span_ms": max(0, ends[1] - ends[0])} if None not in ends else {}
            window = {"window_ms": held["window_ms"] if held["window_ms"] >= 0 else None}  # a table has none
            yield {"side": held["side"], "input": held["name"]}, {**held, **span, **window}
    elif group == "heralds":
        yield from (({"herald": told["herald"]}, told) for told in report.get("heralds", []))
    elif group == "audit.queries":
        queries = (report.get("audit") or {}).get("queries", {})
        yield from (({"query": name}, verdict) for name, verdict in queries.items())
    else:
        yield {}, report.get(group) or {}
