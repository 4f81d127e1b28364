"""An audit for people and machines: the terminal table, `audit.json` (the proof file) and `audit.html`.

Invariant: all three say the same, because all are made from the same verdicts; files appear whole or not at all.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.audit.page import html_page
from services.audit.verdict import Verdict


def table(verdicts: list[Verdict]) -> list[str]:
    """The lines of the terminal table."""
    head = ["query", "verdict", "expected", "found", "missing", "extra", "duplicate", "wrong", "recall"]
    rows = [
        [
            v.query,
            "PASSED" if v.passed else "FAILED",
            f"{v.expected:,}",
            f"{v.found:,}",
            f"{v.missing:,}",
            f"{v.extra:,}",
            f"{v.duplicate:,}",
            f"{v.wrong:,}",
            f"{v.recall:.4%}",
        ]
        for v in verdicts
    ]
    lines = aligned([head, *rows])
    streams = {s.stream: s for v in verdicts for s in v.streams}
    counts = [
        [s.stream, f"{s.records:,}", f"{s.usable:,}", f"{s.late + s.idle:,}", f"{s.broken:,}"] for s in streams.values()
    ]
    lines += ["", *aligned([["stream", "records", "usable", "late", "broken"], *counts])]
    for verdict in verdicts:
        lines += [f"{verdict.query}: {count:,} {kind}" for kind, count in verdict.differences.items()]
        lines += [
            f"{verdict.query}: {count:,} with a wrong {columns}" for columns, count in verdict.wrong_columns.items()
        ]
        if verdict.outside:
            lines.append(
                f"{verdict.query}: {verdict.outside:,} results hold an event outside the cut and were not judged"
            )
    return lines


def aligned(rows: list[list[str]]) -> list[str]:
    """
    >>> aligned([["query", "n"], ["q", "10"]])
    ['query   n', 'q      10']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return lines


def write_report(document: Mapping[str, Any], verdicts: list[Verdict], report_dir: Path) -> tuple[Path, Path]:
    report_dir.mkdir(parents=True, exist_ok=True)
    proof, page = report_dir / "audit.json", report_dir / "audit.html"
    _replace(proof, json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")
    _replace(page, html_page(document, verdicts))
    return proof, page


def _replace(file: Path, text: str) -> None:
    fresh = file.with_suffix(file.suffix + ".new")
    fresh.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(fresh, file)
