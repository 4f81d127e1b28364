"""The benchmark's workload is that of the JIT paper's section VI, and all its modes give the same results."""

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from schemas.block import decode_block
from tests.benchmarks.jit.__main__ import disagreement, main, measure
from tests.benchmarks.jit.plot import STYLES, Mark, Panel, draw
from tests.benchmarks.jit.report import BEGIN, END, keys_table, write
from tests.benchmarks.jit.run import MODES, Mesh
from tests.benchmarks.jit.series import Case, Series, cases_of, own_series, paper_series, quick_series
from tests.benchmarks.jit.workload import DEFAULTS, PLANS, Point, events_of, plan_of, streams_of, stretches
from tests.drawn import restraint_of
from topology.oracle.truth import Event, truth
from topology.plan.plan import tree_text
from topology.restraint.suspension.suspension import Suspension

TINY = replace(DEFAULTS["left-deep"], window_s=60, rate=2, dmax=8)


@pytest.mark.parametrize(
    "point", [Point(shape, 600, 1, n, 50) for shape, plans in PLANS.items() for n in plans], ids=str
)
def test_one_equality_between_each_pair_of_sources(point: Point) -> None:
    """Reference: VI. Every source has N-1 columns, each shared with one other source; table II names the plan."""
    plan = plan_of(point)
    assert tree_text(plan.tree) == point.tree
    assert sorted(tuple(sorted(c.alias for c in members)) for members in plan.query.equal) == sorted(
        combinations(point.aliases, 2)
    )
    assert all(len({c.name for c in members}) == 1 and len(members) == 2 for members in plan.query.equal)
    assert {source.window_ms for source in plan.query.sources} == {600_000}
    assert all(
        len(stream) - 1 == point.sources - 1
        for stream in (events.columns for events in events_of(point, 0.01, 1).values())
    )


def test_the_columns_are_numbered_as_in_the_paper() -> None:
    """Reference: VI, the predicate of four sources."""
    text = plan_of(DEFAULTS["left-deep"]).query.text
    assert re.findall(r"(\w)\.(\w+) = (\w)\.\2", text) == [
        ("a", "x1", "b"),
        ("a", "x2", "c"),
        ("a", "x3", "d"),
        ("b", "x4", "c"),
        ("b", "x5", "d"),
        ("c", "x6", "d"),
    ]


def test_plans_are_those_of_table_two() -> None:
    joins = {shape: {n: len(re.findall(r"\(", tree)) for n, tree in plans.items()} for shape, plans in PLANS.items()}
    assert joins == {"bushy": {n: n - 1 for n in range(4, 9)}, "left-deep": {n: n - 1 for n in range(3, 7)}}
    assert all(tree.startswith("(" * (n - 1) + "a b)") for n, tree in PLANS["left-deep"].items())
    assert PLANS["bushy"][8] == "(((a b) (c d)) ((e f) (g h)))"
    with pytest.raises(ValueError, match="no bushy plan of 3 sources"):
        Point("bushy", 600, 1, 3, 50)


@pytest.mark.parametrize(("sources", "wide"), [(3, "c"), (4, "d"), (6, "d")])
def test_left_deep_stream_d_draws_from_a_hundred_times_the_range(sources: int, wide: str) -> None:
    """Reference: VI, "feed stream D (C when N = 3) with values from [1..10^2 dmax]"."""
    for alias, rows in events_of(replace(DEFAULTS["left-deep"], sources=sources), 3, 1).items():
        values = np.concatenate([column for name, column in rows.columns.items() if name != "ts"])
        assert values.min() >= 1
        top = 5_000 if alias == wide else 50
        assert top * 0.99 <= values.max() <= top
        assert abs(values.mean() / ((top + 1) / 2) - 1) < 0.02
    assert all(rows["x1"].max() <= 200 for rows in events_of(DEFAULTS["bushy"], 1, 1).values() if "x1" in rows.columns)


def test_arrivals_are_poisson_at_the_rate() -> None:
    for rate in (0.4, 1.6):
        for rows in events_of(replace(DEFAULTS["bushy"], rate=rate), 5, 1).values():
            gaps = np.diff(rows.ints("ts")) / 1000
            assert abs(len(rows) / (5 * 3600 * rate) - 1) < 0.05
            assert abs(gaps.std() / gaps.mean() - 1) < 0.05  # as of an exponential distribution


def test_blocks_hold_every_event_once_in_stretches_of_event_time() -> None:
    plan, hours = plan_of(TINY), 0.05
    work = list(stretches(TINY, plan, hours, 1, 10))
    assert len(work) == 18
    counts = dict.fromkeys(TINY.aliases, 0)
    for blocks in work:
        times = []
        for _, data in blocks:
            block = decode_block(data)
            assert block.rows is not None
            counts[block.header.sender] += len(block.rows)
            times += block.rows[f"@{block.header.sender}"].tolist()
        assert max(times) - min(times) < 10_000
    assert counts == {a: len(rows) for a, rows in events_of(TINY, hours, 1).items()}


def test_the_figures_vary_one_parameter_around_the_defaults() -> None:
    """Reference: table III."""
    series = paper_series(1, 30)
    assert [s.name for s in series] == [f"figure-{n}" for n in range(10, 18)]
    assert [[s.value(c) for c in s.cases] for s in series] == [
        [10, 15, 20, 25, 30],
        [0.4, 0.7, 1, 1.3, 1.6],
        [4, 5, 6, 7, 8],
        [100, 150, 200, 250, 300],
        [5, 7.5, 10, 12.5, 15],
        [0.4, 0.7, 1, 1.3, 1.6],
        [3, 4, 5, 6],
        [30, 40, 50, 60, 70],
    ]
    assert len(cases_of(series)) == sum(len(s.cases) for s in series) - 6  # each default stands in four figures
    assert all(DEFAULTS["bushy" if "bushy" in s.title else "left-deep"] in [c.point for c in s.cases] for s in series)
    assert len(cases_of(quick_series(30))) < 10
    assert all(plan_of(c.point, c.tree) for c in cases_of(own_series(1, 30)))


@pytest.mark.parametrize(
    ("point", "seed", "share", "some"),
    [
        (TINY, 1, 0.1, False),
        (Point("bushy", 30, 2, 4, 8), 1, 0.9, True),
        (Point("left-deep", 5, 20, 3, 2), 10, 0.2, True),
    ],
    ids=["left-deep 4", "bushy 4", "left-deep 3"],
)
def test_all_modes_give_the_same_results_and_feedback_avoids_composites(
    point: Point, seed: int, share: float, some: bool
) -> None:
    """At most a share of REF's composites is built with feedback; where stream D is wide, few results are there at
    all."""
    rows = measure(Case(point, 0.03, 1 if point.rate > 10 else 5), list(MODES), 1, seed, 60)
    assert (rows["REF"]["results"] > 0) == some
    assert disagreement(rows) is None
    assert len({row["digest"] for row in rows.values()}) == 1
    assert rows["SUSPEND"]["suspended"] > 0
    assert rows["SUSPEND"]["pairs_avoided"] > 0
    assert rows["SUSPEND"]["composites"] < rows["REF"]["composites"] * share
    for mode in ("JIT", "ON", "HERALD"):
        assert rows[mode]["composites"] < rows["REF"]["composites"]
    assert rows["REF"]["messages"] == rows["REF"]["suspended"] == rows["REF"]["table_bytes"] == 0
    assert rows["DOE"]["suspended"] <= rows["SUSPEND"]["suspended"]
    assert all(row["peak_bytes"] >= row["state_bytes"] > 0 for row in rows.values())


def test_the_results_are_the_naive_join() -> None:
    point = Point("bushy", 20, 1, 4, 3)
    plan, streams = plan_of(point), events_of(point, 0.02, 3)
    events = [
        Event(alias, 0, i, {name: int(column[i]) for name, column in rows.columns.items()})
        for alias, rows in streams.items()
        for i in range(len(rows))
    ]
    expected = truth(plan.query, streams_of(point), events)
    assert len(expected) > 20
    for mode in MODES.values():
        mesh = Mesh(plan, mode)
        for blocks in stretches(point, plan, 0.02, 3, 5, mode.heralds):
            mesh.take(blocks)
        assert mesh.finish().results == len(expected)


def test_doe_speaks_of_everything_or_nothing() -> None:
    plan = plan_of(DEFAULTS["left-deep"])
    shapes = {
        mode: [
            s.columns
            for n in Mesh(plan, MODES[mode]).nodes.values()
            if (suspension := restraint_of(n, Suspension))
            for t in suspension.suspended.tables
            for s in [t.shape]
        ]
        for mode in ("SUSPEND", "DOE")
    }
    assert set(shapes["DOE"]) == {()}
    assert len(shapes["SUSPEND"]) > len(shapes["DOE"])


def test_a_difference_is_found() -> None:
    same = {"results": 3, "digest": 7, "stopped": 0.0}
    assert disagreement({"REF": same, "JIT": same}) is None
    assert disagreement({"REF": same, "JIT": {**same, "digest": 8}}) is not None
    assert disagreement({"REF": same, "JIT": {**same, "results": 2, "stopped": 0.5}}) is None


def test_the_report_keeps_the_prose(tmp_path: Path) -> None:
    case = Case(TINY, 0.02, 10)
    one = Series("figure-99", "Figure 99: a <test>", "rate", "rate", (case,), "says so")
    about = dict.fromkeys(("hours", "scaled_hours", "stretch_s", "seed", "repeat", "once_over_s", "limit_s"), 1) | {
        "at": "today",
        "machine": "m",
        "quick": False,
    }
    (tmp_path / "jit.md").write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\nbehind\n")
    page = write(tmp_path / "jit", about, [one], {case: measure(case, list(MODES), 1, 1, 60)}).read_text()
    assert page.startswith("# Mine\n")
    assert page.endswith("\nbehind\n")
    assert "old" not in page
    assert "The paper: says so" in page
    assert json.loads((tmp_path / "jit" / "points.json").read_text())["points"][0]["modes"]["JIT"]["results"] >= 0
    ElementTree.fromstring((tmp_path / "jit" / "figure-99.svg").read_text())
    assert any("8 (over 4)" in line for line in keys_table())


def test_every_mode_can_be_drawn() -> None:
    assert set(MODES) <= set(STYLES)


def test_a_plot_holds_every_mark_inside() -> None:
    lines = {"REF": [Mark(1, 0), Mark(2, 1_000)], "JIT": [Mark(1, 3, bound=True), Mark(2, 7)]}
    for log in (False, True):
        text = draw("t", "x", [Panel("p", lines, log)])
        height = float(ElementTree.fromstring(text).attrib["height"])
        places = [float(y) for y in re.findall(r'd="M[\d.]+ ([\d.]+)m', text)]
        assert places
        assert all(0 <= y <= height for y in places)


def test_a_run_is_stopped_at_its_limit() -> None:
    rows = measure(Case(TINY, 0.1, 5), ["REF", "JIT"], 1, 1, 0.0)
    assert all(0 < row["stopped"] < 1 for row in rows.values())


@pytest.mark.parametrize(
    "arguments",
    [["--hours", "0"], ["--repeat", "0"], ["--stretch", "-1"], ["--only", "figure-9"], ["--modes", "REF,NONE"]],
    ids=" ".join,
)
def test_arguments_without_sense_are_refused_before_anything_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "must be more than 0" in (said := capsys.readouterr().err) or "there are" in said
