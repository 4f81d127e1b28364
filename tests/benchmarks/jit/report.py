"""Figures as tables and plots: what the run measured beside what the paper says.

The page's prose is written by hand; what stands between its two marks is made anew by each run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.jit.plot import Mark, Panel, draw
from tests.benchmarks.jit.series import Case, Series
from tests.benchmarks.jit.workload import DEFAULTS, PLANS, Point, plan_of
from topology.plan.shapes import OWN_COLUMNS_MOST, shapes_of

BEGIN, END = "<!-- begin: made by make bench-jit -->", "<!-- end: made by make bench-jit -->"
Row = Mapping[str, Any]  # the figures of one mode: those of `Figures`, and `cpu_runs_s`
Measured = Mapping[Case, Mapping[str, Row]]


def write(folder: Path, about: Mapping[str, Any], series: Sequence[Series], measured: Measured) -> Path:
    """Write JSON, plots and tables; gives the page. Points that are not measured yet are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder.with_suffix(".md")
    (folder / "points.json").write_text(json.dumps({**about, "points": points(series, measured)}, indent=1) + "\n")
    text = ["", _about(about), "", "### In short", "", *summary(series, measured), ""]
    for one in series:
        cases = [case for case in one.cases if case in measured]
        if cases:
            (folder / f"{one.name}.svg").write_text(picture(one, cases, measured))
            text += [f"### {one.title}", "", *([f"The paper: {one.paper}", ""] if one.paper else [])]
            text += [f"![{one.title}]({folder.name}/{one.name}.svg)", "", *table(one, cases, measured), ""]
    text += ["### How the keys fall", "", *keys_table(), ""]
    old = page.read_text() if page.exists() else f"# The JIT paper's experiments\n\n{BEGIN}\n{END}\n"
    before, _, rest = old.partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + "\n".join(text) + END + rest.partition(END)[2])
    return page


def points(series: Sequence[Series], measured: Measured) -> list[dict[str, Any]]:
    return [
        {
            "in": [one.name for one in series if case in one.cases],
            "shape": case.point.shape,
            "sources": case.point.sources,
            "window_s": case.point.window_s,
            "rate": case.point.rate,
            "dmax": case.point.dmax,
            "plan": case.tree or case.point.tree,
            "hours": case.hours,
            "stretch_s": case.stretch_s,
            "modes": modes,
        }
        for case, modes in measured.items()
    ]


def picture(one: Series, cases: Sequence[Case], measured: Measured) -> str:
    """CPU, composites and peak state against the parameter."""

    def lines(field: str, scale: float = 1) -> dict[str, list[Mark]]:
        modes = measured[cases[0]]
        return {
            m: [Mark(one.value(c), measured[c][m][field] / scale, bool(measured[c][m]["stopped"])) for c in cases]
            for m in modes
        }

    spread = [row["composites"] for c in cases for row in measured[c].values() if row["composites"]]
    return draw(
        one.title,
        one.axis,
        [
            Panel("CPU seconds", lines("cpu_s"), one.cpu_log),
            Panel("composites built", lines("composites"), bool(spread) and max(spread) > 8 * min(spread)),
            Panel("peak state, MB", lines("peak_bytes", 1e6)),
        ],
    )


def table(one: Series, cases: Sequence[Case], measured: Measured) -> list[str]:
    """One row a point; in each cell the modes in order."""
    modes = list(measured[cases[0]])
    order = " / ".join(modes)
    head = [
        one.axis,
        f"CPU s, {order}",
        "REF/JIT",
        "nested loops, M comparisons, REF / JIT (ratio)",
        f"composites, {order}",
        f"peak MB, {order}",
        "of JIT's: state, tables, indexes",
        "messages, JIT / ON",
        "results",
    ]
    found = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case in cases:
        rows = measured[case]
        ref, jit = rows["REF"], rows["JIT"]

        def each(field: str, form: str, scale: float = 1, rows: Mapping[str, Row] = rows) -> str:
            return " / ".join(
                ("> " if row["stopped"] and field == "cpu_s" else "")
                + format(row[field] / scale, form)
                + ("*" if row["stopped"] else "")
                for row in rows.values()
            )

        cells = [
            f"{one.value(case):g}",
            each("cpu_s", ".2f"),
            ratio(ref, jit),
            comparisons(ref, jit),
            each("composites", ",.0f"),
            each("peak_bytes", ".2f", 1e6),
            f"{jit['state_bytes'] / 1e6:.2f}, {jit['table_bytes'] / 1e6:.2f}, {jit['index_bytes'] / 1e6:.2f}",
            " / ".join(f"{rows[mode]['messages']:,}" for mode in ("JIT", "ON") if mode in rows),
            f"{ref['results']:,}",
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found


def summary(series: Sequence[Series], measured: Measured) -> list[str]:
    """One row a figure: JIT beside REF, the least, the middle and the most of its points."""
    head = ["", "CPU, of REF's", "peak state, of REF's", "composites, of REF's", "nested loops' comparisons, REF/JIT"]
    found = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for one in series:
        pairs = [
            (measured[c]["REF"], measured[c]["JIT"])
            for c in one.cases
            if c in measured and not any(measured[c][m]["stopped"] for m in ("REF", "JIT"))
        ]
        if pairs:
            shares = [
                _spread([jit[field] / max(1e-9, ref[field]) for ref, jit in pairs])
                for field in ("cpu_s", "peak_bytes", "composites")
            ]
            fewer = _spread([ref["comparisons"] / max(1, jit["comparisons"]) for ref, jit in pairs], ".1f")
            found.append(f"| {one.title} | {' | '.join([*shares, fewer])} |")
    return found


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    ordered = sorted(values)
    return " … ".join(format(v, form) for v in dict.fromkeys((ordered[0], ordered[len(ordered) // 2], ordered[-1])))


def ratio(ref: Row, jit: Row) -> str:
    if not jit["cpu_s"] or ref["stopped"]:
        return "?"
    return ("< " if jit["stopped"] else "") + f"{ref['cpu_s'] / jit['cpu_s']:.2f}"


def comparisons(ref: Row, jit: Row) -> str:
    if ref["stopped"] or jit["stopped"]:
        return "?"
    return (
        f"{ref['comparisons'] / 1e6:,.1f} / {jit['comparisons'] / 1e6:,.1f}"
        f" ({ref['comparisons'] / max(1, jit['comparisons']):.1f})"
    )


def keys_table() -> list[str]:
    """For each join of the paper's plans: how wide its key is, and what it may speak of to which side."""
    found = ["| plan | join | key columns | may suspend on its left | on its right |", "|---|---|---|---|---|"]
    for shape, plans in PLANS.items():
        for count, tree in plans.items():
            plan = plan_of(Point(shape, 600, 1, count, DEFAULTS[shape].dmax))
            shapes = shapes_of(plan)
            for node in plan.nodes:
                if all(side.is_source for side in node.inputs):
                    continue
                spoken = []
                for side in node.inputs:
                    own = [s for s in shapes.get(side.name, ()) if s.opposite is not None]
                    parts = sorted({len(s.columns) for s in own})
                    words = (
                        "a source"
                        if side.is_source
                        else (
                            f"{len(own)} kinds of sub-tuple, of {', '.join(map(str, parts))} columns"
                            if own
                            else "nothing"
                        )
                    )
                    spoken.append(words)
                width = len(node.left.key)
                found.append(
                    f"| {shape} {count}: `{tree}` | {node.id} |"
                    f" {width}{' (over ' + str(OWN_COLUMNS_MOST) + ')' if width > OWN_COLUMNS_MOST else ''} |"
                    f" {' | '.join(spoken)} |"
                )
    return found


def _about(about: Mapping[str, Any]) -> str:
    few = (
        "This is the quick subset (`make bench-jit ARGS=--quick`): too short for more than a first look. "
        if about["quick"]
        else ""
    )
    return (
        f"{few}Measured on {about['at']} ({about['machine']}): {about['hours']:g} h of event time a point"
        f" ({about['scaled_hours']:g} h in the scaled series), blocks of"
        f" {'a quarter of the window' if about['stretch_s'] is None else str(about['stretch_s']) + ' s'}, seed"
        f" {about['seed']}. CPU is the least of up to {about['repeat']} runs of each mode, taken in turns; a mode whose"
        f" run took more than {about['once_over_s']:g} s was run once. A run is stopped after {about['limit_s']:g} CPU"
        " seconds; what is marked * is of a stopped run and covers only its part of the events."
    )
