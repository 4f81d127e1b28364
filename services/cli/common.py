"""What the commands share: the mesh file option, progress lines, tables, and numbers a person can read.

Invariant: results go to stdout, progress to stderr, so that output can be piped.
"""

import argparse
import sys
from collections.abc import Sequence

from schemas.mesh import Mesh, load_mesh


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", default="mesh.yaml", metavar="MESH", help="the mesh file (default: mesh.yaml)")


def mesh_of(args: argparse.Namespace) -> Mesh:
    return load_mesh(args.file)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> str:
    """
    >>> print(table(["name", "rows"], [["a", 10], ["bcd", 5]], right=["rows"]))
    name  rows
    a       10
    bcd      5
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = []
    for row in [list(header), *cells]:
        padded = [c.rjust(w) if h in right else c.ljust(w) for c, w, h in zip(row, widths, header, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def duration(ms: float | None) -> str:
    """
    >>> duration(850), duration(61_000), duration(3_600_000), duration(90_061_000), duration(None), duration(-1)
    ('850 ms', '1 min 1 s', '1 h', '1 d 1 h', '-', 'ever')
    """
    if ms is None:
        return "-"
    if ms < 0:
        return "ever"
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = int(ms // 1000)
    if seconds < 60:
        return f"{ms / 1000:.1f}".removesuffix(".0") + " s"
    parts = [(seconds // 86400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    return " ".join(f"{number} {unit}" for number, unit in [p for p in parts if p[0]][:2])


def size(count: float | None) -> str:
    """
    >>> size(999), size(1536), size(5 * 1024**3), size(None)
    ('999 B', '1.5 KiB', '5.0 GiB', '-')
    """
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(value: object) -> str:
    """
    >>> number(12345), number(1.25), number(None)
    ('12,345', '1.2', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
