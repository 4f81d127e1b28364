"""The Spark audit: is every answer of a mesh right? Recomputed from the log, compared with the results topic, reported.

Invariant: this package imports nothing of the engine (`topology`, the other services), only the shared definitions in
`schemas`. Importing it is cheap: Spark is loaded when an audit runs.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import MachineError
from schemas.mesh import Mesh

if TYPE_CHECKING:
    from services.audit.verdict import Verdict

DEFAULT_MEMORY = "2g"


def run_audit(
    mesh: Mesh,
    query: str | None = None,
    *,
    cut: Mapping[str, Any] | None = None,
    report_dir: Path,
    master: str = "local[*]",
    memory: str = DEFAULT_MEMORY,
    progress: Callable[[str], None] = print,
) -> "list[Verdict]":
    """Audit one query, or all of them, and write the report. `cut`: {"from": offsets, "to": offsets}, either may be
    left out."""
    _require_spark()
    from services.audit.run import run

    return run(
        mesh.asked_by("audit"), query, cut=cut, report_dir=report_dir, master=master, memory=memory, progress=progress
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `joinmesh audit`, apart from -f."""
    parser.add_argument("--query", metavar="Q", help="audit this query only (default: all of the mesh file)")
    parser.add_argument(
        "--report",
        metavar="DIR",
        type=Path,
        help="where audit.json and audit.html go (default: .joinmesh/audit beside the mesh file)",
    )
    parser.add_argument("--master", default="local[*]", help="Spark master (default: %(default)s, this machine)")
    parser.add_argument("--memory", default=DEFAULT_MEMORY, help="memory of Spark's driver (default: %(default)s)")
    parser.add_argument(
        "--from",
        dest="cut_from",
        metavar="FILE",
        type=Path,
        help="start of the cut: JSON {topic: {partition: offset}}, or an earlier audit.json",
    )
    parser.add_argument(
        "--to",
        dest="cut_to",
        metavar="FILE",
        type=Path,
        help="end of the cut, in the same form (default: the end of each topic now)",
    )


def main(args: argparse.Namespace, mesh: Mesh) -> int:
    """0 when every answer is right, 1 on any difference."""
    _require_spark()
    from services.audit.log import read_cut_file

    report_dir = args.report or Path(mesh.file).parent / ".joinmesh" / "audit"
    sides = {"from": args.cut_from, "to": args.cut_to}
    cut = {side: read_cut_file(file, side) for side, file in sides.items() if file is not None}
    verdicts = run_audit(mesh, args.query, cut=cut, report_dir=report_dir, master=args.master, memory=args.memory)
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _require_spark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise MachineError(
            "the audit runs on Spark, and the pyspark package is not here; in a container, use the image joinmesh-spark"
        )
