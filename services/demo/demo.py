"""The whole of joinmesh in one command: broker, events, join, audit, and a table of what happened.

Invariant: it is the real thing (an own broker, the same services as `joinmesh up`, the same audit) in one folder that
it empties first, and exit code 0 means that the audit found every result right. Nothing of it is left running, unless
asked for with --keep.
"""

import argparse
import importlib.resources
import os
import re
import shutil
import sys
import time
from pathlib import Path

from schemas.errors import JoinmeshError, MachineError
from schemas.mesh import Mesh, load_mesh
from services.broker import LocalBroker
from services.broker.guard import guard_of, kafka_lines
from services.cli.common import duration, progress, table
from services.generator import Generated, Workload, generate
from services.runtime.grants import grant_all
from services.runtime.queries import parse_queries, services_of
from services.supervisor.reports import Report, ReportReader, instances
from services.supervisor.supervise import Supervisor

PARTITIONS = 4
QUIET_S = 2.0


def run_demo(folder: Path, events: int, keep: bool, mesh_file: str | None = None, secure: bool = False) -> int:
    if events < 3:
        raise JoinmeshError(f"--events must be 3 or more, not {events}")
    began = time.monotonic()
    folder = folder.absolute()
    clean_up(folder)
    folder.mkdir(parents=True)
    (folder / MARK).write_text("A folder of `joinmesh demo`; the next demo here empties it.\n")
    _step(f"a Kafka broker on a free port{', with TLS, one password a service, and ACLs' if secure else ''}")
    # Kept brokers must outlive this process; any other dies with it, even if it is killed.
    guard = guard_of(_write_mesh(folder, "kafka: {bootstrap: none}", mesh_file)) if secure else None
    broker = LocalBroker(folder / "broker", tied=not keep, progress=progress, guard=guard)
    try:
        broker.start()
        mesh = _write_mesh(folder, f'kafka: {{bootstrap: "{broker.bootstrap}"}}', mesh_file)
        if secure:
            mesh = _write_mesh(folder, kafka_lines(broker.folder, broker.port, mesh.name), mesh_file)
            grant_all(mesh)
        _step(f"events: {', '.join(mesh.streams)}, some of them late, broken or with nulls")
        generated = generate(mesh, _workload(events, len(mesh.streams)), create=PARTITIONS, progress=progress)
        _step("the join, one process a service")
        started = time.monotonic()
        supervisor = Supervisor(mesh, folder / "data", lambda text: progress(f"  {text}"), QUIET_S)
        supervisor.run()
        if supervisor.interrupted:
            raise KeyboardInterrupt
        join_s = time.monotonic() - started
        reports = _reports(mesh)
        _step("the audit: Spark joins the same events on its own and compares")
        report = folder / "audit"
        verdict = _audit(mesh, report)
        print(_summary(mesh, generated, reports, join_s, verdict, folder, time.monotonic() - began))
        if keep:
            print(
                f"\nthe broker still runs at {broker.bootstrap}; stop it with: {_command()} broker down --dir"
                f" {_near(broker.folder)}"
            )
        return verdict
    finally:
        if not keep:
            broker.stop()


MARK = "joinmesh-demo.txt"


def clean_up(folder: Path) -> None:
    """Remove what an earlier demo left, also one that was killed: its broker first, if that still runs."""
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / MARK).exists():
        raise MachineError(
            f"{folder} is not a folder of an earlier demo, so it is not emptied; choose another one with --dir"
        )
    if LocalBroker(folder / "broker").stop():
        progress("stopped the broker of an earlier demo")
    shutil.rmtree(folder)


def _write_mesh(folder: Path, kafka: str, mesh_file: str | None) -> Mesh:
    text = (
        Path(mesh_file).read_text()
        if mesh_file
        else importlib.resources.files("services.demo").joinpath("shop.yaml").read_text()
    )
    if mesh_file:
        load_mesh(mesh_file)
    file = folder / "mesh.yaml"
    file.write_text(re.sub(r"^kafka:.*(?:\n[ \t]+.*)*", lambda _: kafka, text, count=1, flags=re.MULTILINE))
    return load_mesh(file)


def _workload(events: int, streams: int) -> Workload:
    # The lateness of the shop's streams is 2 s and more, so up to 1.5 s of disorder is not late.
    return Workload(
        count=events // streams,
        seed=7,
        event_rate=max(100.0, events / streams / 200),
        keys="related",
        out_of_order_ms=1_500,
        late=0.01,
        broken=0.01,
        null=0.01,
    )


def _reports(mesh: Mesh) -> dict[str, Report]:
    reader = ReportReader(mesh)
    try:
        return reader.read_tail([service.name for service in services_of(mesh, parse_queries(mesh))])
    finally:
        reader.close()


def _audit(mesh: Mesh, report: Path) -> int:
    from services import audit

    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    return audit.main(parser.parse_args(["--report", str(report)]), mesh)


def _summary(
    mesh: Mesh,
    generated: Generated,
    reports: dict[str, Report],
    join_s: float,
    verdict: int,
    folder: Path,
    total_s: float,
) -> str:
    rows = [[s.stream, f"{s.events:,}", f"{s.late:,}", f"{s.broken:,}", f"{s.null:,}"] for s in generated.streams]
    ingest = list(instances(reports, "ingest").values())
    facts = [
        [
            "events generated",
            (
                f"{generated.events:,} in {generated.seconds:.1f} s"
                f" ({generated.events / max(generated.seconds, 1e-9):,.0f}/s)"
            ),
        ],
        [
            "events read",
            (
                f"{_sum(ingest, 'events_in'):,}, of them {_sum(ingest, 'late'):,} late and {_sum(ingest, 'dead'):,}"
                " undecodable"
            ),
        ],
    ]
    for query in mesh.queries:
        sink = list(instances(reports, f"{query}.sink").values())
        facts.append([f"results of {query}", f"{_sum(sink, 'rows_out'):,}"])
        if latency := _latency(sink):
            facts.append([f"latency of {query}", latency])
    facts += [
        [
            "throughput",
            (
                f"{generated.events / join_s:,.0f} events/s (start and {QUIET_S:g} s of quiet at the end included:"
                f" {join_s:.1f} s)"
            ),
        ],
        [
            "audit",
            (
                "PASSED: every result is there once, with the right values, and nothing else"
                if verdict == 0
                else "FAILED, see the report"
            ),
        ],
        ["the whole demo", duration(total_s * 1000)],
    ]
    me, file = _command(), _near(folder / "mesh.yaml")
    look = [
        ["the audit's report", _near(folder / "audit" / "audit.html")],
        ["the mesh file", file],
        ["logs", _near(folder / "data" / "logs")],
        ["the plan", f"{me} explain -f {file}"],
        ["look around with a live broker", f"{me} demo --keep, then {me} status -f {file}"],
        ["your own events", f"{me} broker up, copy the mesh file, {me} generate / up / audit -f mesh.yaml"],
    ]
    return "\n\n".join(
        [
            "\n"
            + table(["stream", "events", "late", "broken", "null"], rows, right=["events", "late", "broken", "null"]),
            _pairs(facts),
            "where to look next\n" + _pairs(look),
        ]
    )


def _latency(sink: list[Report]) -> str | None:
    pairs = [
        (r.get("latency_ms_p50", r.get("step_ms_p50")), r.get("latency_ms_p99", r.get("step_ms_p99"))) for r in sink
    ]
    values = [(p50, p99) for p50, p99 in pairs if p50 is not None and p99 is not None]
    return f"p50 {max(v[0] for v in values):,.0f} ms, p99 {max(v[1] for v in values):,.0f} ms" if values else None


def _sum(reports: list[Report], field: str) -> int:
    return sum(int(report.get(field) or 0) for report in reports)


def _pairs(pairs: list[list[str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in pairs)


def _step(text: str) -> None:
    progress(f"== {text}")


def _near(file: Path) -> str:
    """The path as one would type it here."""
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)


def _command() -> str:
    """How this joinmesh was called, so that the commands can be copied."""
    called = Path(sys.argv[0])
    return _near(called.absolute()) if called.name == "joinmesh" else "joinmesh"
