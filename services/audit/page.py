"""The audit as one self-contained HTML page: verdict, counts, plots, samples, proof. No script, no outside resource.

Invariant: everything that came from the log or the mesh file is escaped; the page reads the same on paper, in light and
in dark.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from services.audit.verdict import Interval, Verdict

STYLE = """
:root{--bg:#fff;--ink:#1b1f24;--soft:#5c6670;--line:#d9dee3;--card:#f6f8fa;--good:#1a7f4b;--bad:#c0352b;--warn:#b7791f;--bar:#3b6fb6;--mark:#9db8dc}
@media (prefers-color-scheme:dark){:root{--bg:#14181d;--ink:#e6e9ec;--soft:#9aa5b1;--line:#303842;--card:#1c2229;--good:#4cc38a;--bad:#ff7b72;--warn:#e3b341;--bar:#6ea0e6;--mark:#36506f}}
@media print{:root{--bg:#fff;--ink:#000;--soft:#444;--line:#bbb;--card:#fff}details>*{display:block!important}section{break-inside:avoid}}
*{box-sizing:border-box}body{margin:0 auto;max-width:62rem;padding:2rem 1.25rem 4rem;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;margin:0 0 .2rem}h2{font-size:1.25rem;margin:2.4rem 0 .6rem}h3{font-size:1rem;margin:1.4rem 0 .4rem}
.soft{color:var(--soft)}.tag{display:inline-block;padding:.1rem .6rem;border-radius:1rem;font-weight:600;font-size:.85rem;color:#fff;background:var(--good);vertical-align:middle}.tag.bad{background:var(--bad)}
@media (prefers-color-scheme:dark){.tag{color:#14181d}}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(7.5rem,1fr));gap:.6rem;margin:.8rem 0}.card{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.5rem .7rem}
.card b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}.card.bad b{color:var(--bad)}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}th,td{text-align:right;padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child,td.text,th.text{text-align:left}th{color:var(--soft);font-weight:600}td.bad{color:var(--bad);font-weight:600}
pre,code{font:13px/1.45 ui-monospace,monospace}pre{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem .9rem;overflow-x:auto;margin:.4rem 0}td code{word-break:break-all}
svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}.axis{stroke:var(--line)}.good{fill:var(--good)}.miss{fill:var(--bad)}.wrong{fill:var(--warn)}.bar{fill:var(--bar)}.mark{fill:var(--mark)}
summary{cursor:pointer;font-weight:600;margin:.8rem 0 .3rem}
"""
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 190, 56, 24


def html_page(document: Mapping[str, Any], verdicts: list[Verdict]) -> str:
    mesh, passed = escape(str(document["mesh"])), bool(document["passed"])
    sections = "".join(_query(v) for v in verdicts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Audit of {mesh}: {"passed" if passed else "failed"}</title><style>{STYLE}</style></head><body>
<h1>Audit of mesh {mesh} {_tag(passed)}</h1>
<p class="soft">Made {escape(str(document["made"]))} in {document["seconds"]} s with Spark {escape(str(document["tool"]["spark"]))} on {escape(str(document["tool"]["master"]))}.
The answer was recomputed from the source topics between the offsets below and compared with the results by id, value and time.</p>
{sections}
<section><h2>Streams</h2>{_streams(verdicts)}</section>
<section><h2>Plans on record</h2>{_plans(document["plans"])}</section>
<section><h2>Offset cut</h2><p class="soft">Pass <code>audit.json</code> to <code>--from</code> and <code>--to</code> to audit exactly this cut again.</p>{_cut(document["cut"])}</section>
</body></html>
"""


def _tag(passed: bool) -> str:
    return f'<span class="tag{"" if passed else " bad"}">{"passed" if passed else "failed"}</span>'


def _query(v: Verdict) -> str:
    cards = [("expected", v.expected, False), ("found", v.found, False)]
    cards += [
        ("missing", v.missing, True),
        ("extra", v.extra, True),
        ("duplicate", v.duplicate, True),
        ("wrong value", v.wrong, True),
    ]
    cells = "".join(
        f'<div class="card{" bad" if fault and n else ""}"><b>{n:,}</b><span class="soft">{name}</span></div>'
        for name, n, fault in cards
    )
    recall = (
        f'<div class="card{" bad" if v.recall < 1 else ""}"><b>{_percent(v.recall)}</b><span'
        ' class="soft">recall</span></div>'
    )
    outside = (
        f'<p class="soft">{v.outside:,} results hold an event outside the cut and were not judged.</p>'
        if v.outside
        else ""
    )
    wrong = "".join(
        f"<li>{n:,} differ in <code>{escape(columns)}</code></li>" for columns, n in v.wrong_columns.items()
    )
    return f"""<section><h2>Query {escape(v.query)} {_tag(v.passed)}</h2><div class="cards">{cells}{recall}</div>{outside}
{f"<ul>{wrong}</ul>" if wrong else ""}<pre>{escape(v.text.strip())}</pre>
<h3>Recall per {_duration(v.interval_ms)} of result time</h3>{_recall_plot(v)}
<h3>Results per {_duration(v.interval_ms)}</h3>{_count_plot(v)}
{_samples(v)}
<h3>Proof</h3><table><tr><th>set</th><th class="text">digest (order does not matter)</th></tr>
<tr><td>expected</td><td class="text"><code>{v.digest_expected}</code></td></tr><tr><td>found</td><td class="text"><code>{v.digest_found}</code></td></tr></table></section>"""


def _recall_plot(v: Verdict) -> str:
    return _plot(
        v,
        1.0,
        lambda i: [("good" if i.recall == 1 else "miss", i.recall)] if i.recall is not None else [],
        ("100%", "50%", "0%"),
    )


def _count_plot(v: Verdict) -> str:
    top = max([i.expected + i.extra for i in v.intervals], default=0) or 1

    def bars(i: Interval) -> list[tuple[str, float]]:
        return [
            ("bar", i.right / top),
            ("miss", i.missing / top),
            ("wrong", i.wrong / top),
            ("mark", i.extra / top),
        ]

    key = '<p class="soft">blue: right · red: missing · amber: wrong value · pale: extra</p>'
    return _plot(v, float(top), bars, (f"{top:,}", f"{top / 2:,.0f}", "0")) + key


def _plot(v: Verdict, top: float, bars: Any, labels: tuple[str, str, str]) -> str:
    """Stacked bars over time; each is named by a tooltip, the axis by three values and the first and last time."""
    if not v.intervals:
        return '<p class="soft">No results, none expected.</p>'
    first, last = v.intervals[0].start_ms, v.intervals[-1].start_ms
    slots = (last - first) // v.interval_ms + 1
    step, plot = (WIDTH - LEFT) / slots, HEIGHT - BOTTOM - 10
    shapes = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{10 + plot * f}" y2="{10 + plot * f}"/>' for f in (0, 0.5, 1)
    ]
    shapes += [
        f'<text x="{LEFT - 6}" y="{14 + plot * f}" text-anchor="end">{label}</text>'
        for f, label in zip((0, 0.5, 1), labels, strict=True)
    ]
    for interval in v.intervals:
        x, y = LEFT + (interval.start_ms - first) // v.interval_ms * step, 10.0 + plot
        for name, share in bars(interval):
            y -= share * plot
            if share > 0:
                shapes.append(
                    f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{max(step - 1, 0.7):.1f}"'
                    f' height="{share * plot:.1f}"><title>{escape(_tip(interval))}</title></rect>'
                )
    shapes.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">{_time(first)}</text>')
    shapes.append(f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{_time(last + v.interval_ms)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="per interval, at most'
        f' {top:g}">{"".join(shapes)}</svg>'
    )


def _tip(i: Interval) -> str:
    return (
        f"{_time(i.start_ms)}: {i.expected:,} expected, {i.right:,} right, {i.missing:,} missing, {i.wrong:,} wrong,"
        f" {i.extra:,} extra"
    )


def _samples(v: Verdict) -> str:
    blocks = []
    for kind, rows in v.samples.items():
        body = "".join(
            f"<tr><td><code>{escape(row['id'])}</code></td><td"
            f' class="text"><code>{_json(row["expected"])}</code></td><td'
            f' class="text"><code>{_json(row["found"])}</code></td><td'
            f' class="text">{escape(row["differs"] or "")}</td></tr>'
            for row in rows
        )
        head = (
            '<tr><th>id</th><th class="text">expected</th><th class="text">found</th><th class="text">differs'
            " in</th></tr>"
        )
        blocks.append(
            f"<details open><summary>{escape(kind)}: the first {len(rows)}</summary><div"
            f' class="scroll"><table>{head}{body}</table></div></details>'
        )
    return "".join(blocks)


def _streams(verdicts: Iterable[Verdict]) -> str:
    rows = []
    for s in {s.stream: s for v in verdicts for s in v.streams}.values():
        faults = [
            f"{n:,} {kind}" + (f" ({', '.join(s.samples[kind][:3])} …)" if kind in s.samples else "")
            for kind, n in s.differences.items()
            if n
        ]
        reasons = ", ".join(f"{escape(reason)} ({n:,})" for reason, n in s.reasons.items())
        rows.append(
            f"<tr><td>{escape(s.stream)}</td><td>{s.records:,}</td><td>{s.usable:,}</td><td>{s.late:,}</td><td>{s.idle:,}</td><td>{s.broken:,}</td>"
            f'<td class="text">{reasons}</td><td'
            f' class="text{" bad" if faults else ""}">{escape("; ".join(faults)) or "all on record"}</td></tr>'
        )
    head = (
        "<tr><th>stream</th><th>records</th><th>usable</th><th>late</th><th>idle</th><th>broken</th><th"
        ' class="text">why broken</th><th class="text">late and dead topics</th></tr>'
    )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _plans(history: list[dict[str, Any]]) -> str:
    if not history:
        return '<p class="soft">The control topic holds none.</p>'
    rows = "".join(
        f"<tr><td>{_time(e['time'])}</td><td>{escape(str(e.get('epoch', '')))}</td><td"
        f' class="text">{escape(str(e.get("query", "")))}</td><td'
        f' class="text"><code>{_json(e["tree"]) if "tree" in e else _json(e["message"])}</code></td></tr>'
        for e in history
    )
    return (
        '<div class="scroll"><table><tr><th>written</th><th>epoch</th><th class="text">query</th><th'
        f' class="text">tree</th></tr>{rows}</table></div>'
    )


def _cut(cut: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(topic)}</td><td>{escape(str(p))}</td><td>{cut['from'][topic][p]:,}</td><td>{to:,}</td></tr>"
        for topic, partitions in cut["to"].items()
        for p, to in partitions.items()
    )
    return (
        "<details><summary>offsets of every"
        f" partition</summary><table><tr><th>topic</th><th>partition</th><th>from</th><th>to</th></tr>{rows}</table></details>"
    )


def _json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return escape(text if len(text) <= 600 else text[:600] + " …")


def _percent(share: float) -> str:
    """Never rounds a fault away.

    >>> _percent(1.0), _percent(0.999999), _percent(0.5)
    ('100%', '99.99%', '50.00%')
    """
    return "100%" if share == 1 else f"{int(share * 10_000) / 100:.2f}%"


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def _duration(ms: int) -> str:
    """
    >>> _duration(1500), _duration(60_000), _duration(7_200_000)
    ('1500 ms', '1 min', '2 h')
    """
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms % size == 0 and ms:
            return f"{ms // size} {unit}"
    return f"{ms} ms"
