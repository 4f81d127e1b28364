"""One audit from end to end: offsets, events, and for each query truth, comparison, verdict; then the report.

Invariant: nothing of the engine's code is used. What the audit knows of the mesh is its file, its topics' names, and
the log.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from schemas import topics
from schemas.errors import JoinmeshError
from schemas.mesh import Mesh, did_you_mean
from services.audit import compare
from services.audit.log import Range, control_history, end_tables, publish, take_range
from services.audit.notices import Streams, judge_streams, read_notices
from services.audit.report import table, write_report
from services.audit.scan import Scanned, scan
from services.audit.session import CONNECTOR, connector_settings, ship, start_session
from services.audit.truth import expected_results, idle_events, in_cut, read_events
from services.audit.verdict import Verdict
from services.runtime.security.for_java import token_url


def run(
    mesh: Mesh,
    query: str | None,
    *,
    cut: Mapping[str, Any] | None,
    report_dir: Path,
    master: str,
    memory: str,
    progress: Callable[[str], None],
) -> list[Verdict]:
    began = time.monotonic()
    if query is not None and query not in mesh.queries:
        raise JoinmeshError(f"no query `{query}` in {mesh.file}{did_you_mean(query, mesh.queries)}")
    queries = [scan(mesh, name) for name in ([query] if query is not None else mesh.queries)]
    streams = list(dict.fromkeys(source.stream for scanned in queries for source in scanned.sources))
    sources = [mesh.streams[name].topic for name in streams]
    results = [topics.results(mesh.name, scanned.name) for scanned in queries]
    optional = [topics.late(mesh.name), topics.dead(mesh.name), topics.control(mesh.name)]
    log = take_range(mesh, [*sources, *results], optional, cut)
    history = control_history(mesh, topics.control(mesh.name), log)
    log = end_tables(mesh, [name for name in streams if mesh.streams[name].table is not None], log, history)
    progress(
        f"auditing {', '.join(q.name for q in queries)}: {sum(log.records(t) for t in set(sources)):,} source records,"
        f" {sum(log.records(t) for t in results):,} offsets of results"
    )
    spark, own = _session(mesh, master, memory, report_dir, progress)
    try:
        verdicts = _judge(spark, mesh, log, queries, streams, progress)
        document = {
            "mesh": mesh.name,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "passed": all(v.passed for v in verdicts),
            "seconds": round(time.monotonic() - began, 1),
            "tool": {"spark": spark.version, "connector": CONNECTOR, "master": master},
            "cut": log.as_json(),
            "plans": history,
            "queries": {v.query: v.as_json() for v in verdicts},
        }
    finally:
        if own:
            spark.stop()
    for line in table(verdicts):
        progress(line)
    files = write_report(document, verdicts, report_dir)
    publish(mesh, topics.audit(mesh.name), _record(document, verdicts))
    progress(f"report: {files[1]} (and {files[0].name}); {document['seconds']} s")
    return verdicts


def _session(
    mesh: Mesh, master: str, memory: str, report_dir: Path, progress: Callable[[str], None]
) -> tuple[SparkSession, bool]:
    """The caller's session when there is one; otherwise our own, to be stopped by us."""
    ship()
    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    fetched = "spark.jars.packages" in connector_settings()
    progress(
        f"starting Spark on {master}" + (" (the first time, its Kafka connector is downloaded)" if fetched else "")
    )
    return start_session(master, memory, report_dir / "spark.log", token_url(mesh)), True


def _judge(
    spark: SparkSession,
    mesh: Mesh,
    log: Range,
    queries: list[Scanned],
    streams: list[str],
    progress: Callable[[str], None],
) -> list[Verdict]:
    kept: list[DataFrame] = []
    try:
        notices = read_notices(spark, mesh, log)
        kept += [frame for frame in (notices.late, notices.dead) if frame is not None]
        events: dict[str, DataFrame] = {}
        for name in streams:
            stream = mesh.streams[name]
            events[name] = read_events(spark, mesh, log, stream, idle_events(notices.late, stream)).persist()
            kept.append(events[name])
        progress(f"reading {len(streams)} streams: decoding, lateness, broken records")
        judged = judge_streams(spark, mesh, log, events, notices)
        verdicts = []
        for scanned in queries:
            progress(f"query {scanned.name}: computing what it must answer, and comparing")
            verdicts.append(_judge_query(spark, mesh, log, scanned, events, judged))
        return verdicts
    finally:
        for frame in kept:
            frame.unpersist()


def _judge_query(
    spark: SparkSession, mesh: Mesh, log: Range, scanned: Scanned, events: Mapping[str, DataFrame], judged: Streams
) -> Verdict:
    began = time.monotonic()
    names = list(dict.fromkeys(source.stream for source in scanned.sources))
    truth = expected_results(spark, scanned, events, {name: in_cut(log, mesh.streams[name].topic) for name in names})
    found = compare.read_results(spark, mesh, log, topics.results(mesh.name, scanned.name), scanned, truth)
    merged = compare.compare(truth.frame, found, truth.columns).persist()
    try:
        width = compare.interval_ms(judged.first_ms, judged.last_ms)
        total = compare.summarize(merged, width, judged.first_ms, judged.last_ms)
        return Verdict(
            query=scanned.name,
            text=scanned.text,
            expected=total.expected,
            found=total.found,
            missing=total.missing,
            extra=total.extra,
            duplicate=total.duplicate,
            wrong=total.wrong,
            outside=total.outside,
            wrong_columns=compare.wrong_columns(merged) if total.wrong else {},
            interval_ms=width,
            intervals=total.intervals,
            digest_expected=total.digest_expected,
            digest_found=total.digest_found,
            streams=tuple(judged.verdicts[name] for name in names),
            samples=compare.samples(merged, truth.frame, found) if total.differs else {},
            seconds=round(time.monotonic() - began, 1),
        )
    finally:
        merged.unpersist()


def _record(document: Mapping[str, Any], verdicts: list[Verdict]) -> dict[str, Any]:
    """What stands in the audit topic: the verdict and its proof, without samples and intervals."""
    kept = (
        "passed",
        "recall",
        "expected",
        "found",
        "missing",
        "extra",
        "duplicate",
        "wrong",
        "outside",
        "differences",
        "digest_expected",
        "digest_found",
    )
    short = {v.query: {key: v.as_json()[key] for key in kept} for v in verdicts}
    return {key: document[key] for key in ("mesh", "made", "passed", "seconds", "cut")} | {"queries": short}
