"""Which points are run, and what the paper says of them: figures 10 to 17, then series of our own.

Invariant: a point that stands in several figures (the defaults do) is one `Case`, so it is run once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.benchmarks.jit.workload import DEFAULTS, Point, varied


@dataclass(frozen=True)
class Case:
    """A point as it is run: for how long, in blocks of which stretch, by which plan if not that of table II."""

    point: Point
    hours: float
    stretch_s: float
    tree: str | None = None

    @staticmethod
    def of(point: Point, hours: float, stretch_s: float | None, tree: str | None = None) -> "Case":
        """In blocks of a stretch, or else of a quarter of the window: as far as ingest lets streams run ahead of one
        another, so what it sends at full speed."""
        return Case(point, hours, stretch_s or point.window_s / 4, tree)

    def __str__(self) -> str:
        return f"{self.point}" + (f" plan={self.tree}" if self.tree else "")


@dataclass(frozen=True)
class Series:
    """What becomes one plot and one table."""

    name: str  # of its files
    title: str
    axis: str
    parameter: str  # the field of `Point` that varies
    cases: tuple[Case, ...]
    paper: str = ""  # what it says of the figure
    cpu_log: bool = False  # as the paper draws it

    def value(self, case: Case) -> float:
        found: float = getattr(case.point, self.parameter)
        return found / 60 if self.parameter == "window_s" else found


AXES = {
    "window_s": "window w (min)",
    "rate": "rate λ (events/s and source)",
    "sources": "sources N",
    "dmax": "largest value dmax",
}
# Axis ranges are those that can be read in the text we have of the paper; its curves cannot be read from it.
FIGURES: dict[int, tuple[str, str, str]] = {
    10: (
        "bushy",
        "window_s",
        (
            "JIT outperforms REF by more than an order of magnitude in CPU time and saves up to 62 % of memory; the"
            " gain grows with w. Memory axis 0 to 12,000 KB (approximate)."
        ),
    ),
    11: (
        "bushy",
        "rate",
        (
            "As for w: the faster the streams, the larger the savings. CPU axis 1 to 1,000 s, logarithmic; memory axis"
            " 0 to 12,000 KB (approximate)."
        ),
    ),
    12: (
        "bushy",
        "sources",
        (
            "JIT outperforms REF by large margins in both, and its overhead grows more slowly with N; REF's memory"
            " rises in steps (4 and 5, 6 and 7 alike). CPU axis 1 to 1,000 s, logarithmic (approximate)."
        ),
    ),
    13: (
        "bushy",
        "dmax",
        (
            "Both fall as dmax grows; JIT is stable beyond 200, where hardly any intermediate results are left. CPU"
            " axis 1 to 1,000 s, logarithmic; memory axis 2,000 to 9,000 KB (approximate)."
        ),
    ),
    14: (
        "left-deep",
        "window_s",
        (
            "Many intermediate results have partners, so the effect is less pronounced; JIT still has a clear"
            " advantage, more so for larger w."
        ),
    ),
    15: ("left-deep", "rate", "As for w: a clear advantage, more so for larger λ."),
    16: (
        "left-deep",
        "sources",
        (
            "JIT outperforms REF and scales more gracefully with N, especially in CPU time. CPU axis 0 to 600 s; memory"
            " axis 1,000 to 3,000 KB (approximate)."
        ),
    ),
    17: (
        "left-deep",
        "dmax",
        (
            "REF is expensive for dmax below 50; JIT handles even very low selectivity. Memory axis 1,000 to 4,500 KB"
            " (approximate)."
        ),
    ),
}
WORDS = {
    "window_s": "window size w",
    "rate": "stream rate λ",
    "sources": "number of sources N",
    "dmax": "largest value dmax",
}


def paper_series(hours: float, stretch_s: float | None) -> list[Series]:
    """Figures 10 to 17."""
    found = []
    for number, (shape, parameter, says) in FIGURES.items():
        cases = tuple(Case.of(point, hours, stretch_s) for point in varied(shape, parameter))
        found.append(
            Series(
                f"figure-{number}",
                f"Figure {number}: {WORDS[parameter]}, {shape} plan",
                AXES[parameter],
                parameter,
                cases,
                says,
                shape == "bushy",
            )
        )
    return found


SCALED_HOURS = 0.5
MIRRORED = {6: "((e f) ((a b) (c d)))", 7: "(((e f) g) ((a b) (c d)))"}


def own_series(hours: float, stretch_s: float | None) -> list[Series]:
    """Ours: rates at which composites, not steps, are the work; and bushy plans turned round."""
    bushy, deep = replace(DEFAULTS["bushy"], window_s=300), replace(DEFAULTS["left-deep"], window_s=300)
    return [
        _scaled(
            "scaled-bushy",
            "bushy plan, N = 6, w = 5 min, dmax = 400",
            replace(bushy, dmax=400),
            (10, 20, 30),
            stretch_s,
        ),
        _scaled(
            "scaled-bushy-4",
            "bushy plan, N = 4, w = 5 min, dmax = 100",
            replace(bushy, sources=4, dmax=100),
            (10, 20),
            stretch_s,
        ),
        _scaled("scaled-left-deep", "left-deep plan, N = 4, w = 5 min", deep, (10, 15, 20), stretch_s),
        _scaled(
            "scaled-left-deep-3", "left-deep plan, N = 3, w = 5 min", replace(deep, sources=3), (10, 20, 30), stretch_s
        ),
        Series(
            "mirrored-bushy",
            "Mirrored: number of sources N, bushy plan with the larger part on the right",
            AXES["sources"],
            "sources",
            tuple(
                Case.of(replace(DEFAULTS["bushy"], sources=n), hours, stretch_s, tree) for n, tree in MIRRORED.items()
            ),
            cpu_log=True,
        ),
    ]


def _scaled(name: str, title: str, point: Point, rates: Iterable[float], stretch_s: float | None) -> Series:
    cases = tuple(Case.of(replace(point, rate=rate), SCALED_HOURS, stretch_s) for rate in rates)
    return Series(name, f"Scaled: {title}", AXES["rate"], "rate", cases)


QUICK_HOURS = 1.0  # three windows of the bushy points


def quick_series(stretch_s: float | None) -> list[Series]:
    """A small subset: the ends and the middle of two figures, a plan turned round, and a scaled point that has
    results."""
    parts = {
        "figure-11": slice(None, None, 2),
        "figure-15": slice(None, None, 2),
        "mirrored-bushy": slice(1),
        "scaled-left-deep-3": slice(1, 2),
    }
    series = [*paper_series(QUICK_HOURS, stretch_s), *own_series(QUICK_HOURS, stretch_s)]
    return [replace(s, cases=s.cases[parts[s.name]]) for s in series if s.name in parts]


def cases_of(series: Iterable[Series]) -> list[Case]:
    """Every case once, in order."""
    return list(dict.fromkeys(case for one in series for case in one.cases))
