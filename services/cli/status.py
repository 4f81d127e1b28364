"""What the services last said about themselves: one line a service, one line a side of each join node's state, and
alarms.

Invariant: it only reads, so it works while services run and after they stopped; each line says how old its report is.
"""

import argparse
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from services.cli.common import add_mesh, duration, mesh_of, number, size, table

if TYPE_CHECKING:
    from services.supervisor.reports import Report

EXAMPLES = """examples:
  joinmesh status -f mesh.yaml
  joinmesh status -f mesh.yaml --watch     again every two seconds, until Ctrl-C
  joinmesh status -f mesh.yaml --json      everything the services report, for programs"""
WATCH_S = 2.0
STALE_MS = 15_000  # services report every second or so: an older report means that the service is not running
_COUNTS = ("events_in", "rows_in", "rows_out", "late", "dead", "null_keys", "filtered", "lag")
_FEEDBACK = (
    "suspended_here",
    "suspended_above",
    "rows_diverted",
    "pairs_avoided",
    "pairs_resumed",
    "values_suspended",
    "values_resumed",
    "blocks_sent",
    "bytes_sent",
    "sides_speaking",
)


_HERALDS = ("blocks", "rows_held", "composites_found", "not_made", "made_later")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_mesh(parser)
    parser.add_argument("--json", action="store_true", help="print the reports themselves")
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    from services.runtime.queries import parse_queries, services_of
    from services.supervisor.reports import ReportReader

    mesh = mesh_of(args)
    expected = [service.name for service in services_of(mesh, parse_queries(mesh))]
    reader = ReportReader(mesh)
    try:
        reports = reader.read_tail(expected)
        while True:
            now_ms = time.time() * 1000
            if args.json:
                print(json.dumps(reports, indent=None if args.watch else 2, sort_keys=True), flush=True)
            else:
                print(
                    ("\033[2J\033[H" if args.watch else "") + render(mesh.name, expected, reports, now_ms), flush=True
                )
            if not args.watch:
                return 0
            until = time.monotonic() + WATCH_S
            while (left := until - time.monotonic()) > 0:
                reader.poll(min(left, 0.2))
    finally:
        reader.close()


def render(mesh: str, expected: list[str], reports: "dict[str, Report]", now_ms: float) -> str:
    """The whole status as text. A service without any report gets its line too."""
    from services.supervisor.reports import instances

    rows: list[list[object]] = []
    states: list[list[object]] = []
    feedback: list[list[object]] = []
    heralds: list[list[object]] = []
    alarms: list[str] = []
    for service in [*expected, *sorted(_others(expected, reports))]:
        mine = sorted(instances(reports, service).items())
        if not mine:
            rows.append([service, "no report yet", *["-"] * (len(_COUNTS) + 3)])
        for instance, report in mine:
            rows.append(_service_row(instance, report, now_ms))
            states += [_state_row(instance, side) for side in report.get("state") or []]
            if report.get("feedback"):
                feedback.append(
                    [
                        instance,
                        *(
                            (size if name == "bytes_sent" else number)(report["feedback"].get(name))
                            for name in _FEEDBACK
                        ),
                    ]
                )
            for told in report.get("heralds") or []:
                heeded = f"{told.get('heeded', 0)} of {told.get('partitions', 0)}"
                heralds.append(
                    [instance, told.get("herald", "?"), heeded, *(number(told.get(name)) for name in _HERALDS)]
                )
            alarms += [f"{instance}: {text}" for text in report.get("alarms") or []]
    columns = [name.replace("_", " ") for name in _COUNTS]
    text = f"mesh {mesh}\n\n" + table(
        ["service", "reported", *columns, "watermark", "step p50", "step p99"],
        rows,
        right=[*columns, "step p50", "step p99"],
    )
    if states:
        header = ["node", "side", "rows", "bytes", "segments", "holds", "window"]
        text += "\n\n" + table(header, states, right=["rows", "bytes", "segments"])
    if feedback:
        words = [name.replace("_", " ") for name in _FEEDBACK]
        text += "\n\n" + table(["feedback", *words], feedback, right=words)
    if heralds:
        words = [name.replace("_", " ") for name in _HERALDS]
        text += "\n\n" + table(["heralds", "told of", "heeded in", *words], heralds, right=words)
    audit = next((report["audit"] for report in reports.values() if report.get("audit")), None)
    if audit:
        text += "\n\n" + _audit_line(audit, now_ms)
    if alarms:
        text += "\n\n" + "\n".join(f"alarm: {alarm}" for alarm in alarms)
    if not reports:
        text += f"\n\nno service of this mesh has reported yet; run: joinmesh up -f the mesh file (topic {mesh}.report)"
    return text


def _others(expected: list[str], reports: "dict[str, Report]") -> set[str]:
    """Services that report but are not in the mesh file any more."""
    names = {key if key in expected else key.rpartition("-")[0] or key for key in reports}
    return names - set(expected)


def _service_row(instance: str, report: "Report", now_ms: float) -> list[object]:
    at_ms = report.get("at_ms")
    age = now_ms - float(at_ms) if isinstance(at_ms, int | float) else None
    said = "?" if age is None else f"{duration(max(age, 0))} ago" + (" (not running?)" if age > STALE_MS else "")
    counts = [number(report.get(name)) for name in _COUNTS]
    p50, p99 = report.get("step_ms_p50"), report.get("step_ms_p99", report.get("p99"))
    return [instance, said, *counts, _moment(report.get("watermark_ms")), _ms(p50), _ms(p99)]


def _state_row(instance: str, side: dict[str, Any]) -> list[object]:
    oldest, newest, window = side.get("oldest_ms"), side.get("newest_ms"), side.get("window_ms")
    held = (
        newest - oldest
        if isinstance(oldest, int | float) and isinstance(newest, int | float) and newest >= oldest
        else None
    )
    name = f"{side.get('side', '?')} {side.get('name', '')}".strip()
    return [
        instance,
        name,
        number(side.get("rows")),
        size(side.get("bytes")),
        number(side.get("segments")),
        duration(held),
        duration(window),
    ]


def _audit_line(audit: dict[str, Any], now_ms: float) -> str:
    failed = [name for name, verdict in audit["queries"].items() if not verdict["passed"]]
    said = "passed" if audit["passed"] else f"FAILED: {', '.join(failed)}"
    return f"last audit, {duration(max(now_ms - audit['at_ms'], 0))} ago: {said}"


def _ms(value: Any) -> str:
    return f"{value:,.1f} ms" if isinstance(value, int | float) else "-"


def _moment(ms: Any) -> str:
    if not isinstance(ms, int | float) or not 0 < ms < 253_402_300_799_000:  # before any event, or after the last
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
