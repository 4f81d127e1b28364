"""Line plots as SVG, written by hand: panels side by side, one line a mode, linear or logarithmic.

Invariant: every number given is drawn inside its panel; a value that is only a lower bound (a run that was stopped) has
a hollow mark.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, TOP, BOTTOM, LEFT, GAP = 290, 210, 74, 46, 56, 26
STYLES = {  # colour, dashes, mark
    "REF": ("#3d405b", "", "square"),
    "JIT": ("#d1495b", "", "circle"),
    "ON": ("#3a7d44", "2 3", "diamond"),
    "SUSPEND": ("#e09f3e", "8 3", "diamond"),
    "DOE": ("#2a7fb8", "5 4", "triangle"),
    "HERALD": ("#8a5fa8", "3 3", "circle"),
    "TYPE1": ("#7a7a7a", "8 3", "diamond"),
}
MARKS = {
    "square": "M{0} {1}m-4 -4h8v8h-8z",
    "circle": "M{0} {1}m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "triangle": "M{0} {1}m0 -5l5 9h-10z",
    "diamond": "M{0} {1}m0 -6l5 6l-5 6l-5 -6z",
}


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    bound: bool = False  # at least this


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Mapping[str, Sequence[Mark]]  # mode -> its values
    log: bool = False


class Scale:
    """From values to places along one axis."""

    def __init__(self, values: Sequence[float], begin: float, end: float, log: bool = False) -> None:
        self.begin, self.end, self.log = begin, end, log
        low, high = min(values, default=0), max(values, default=1)
        if log:
            low = min((v for v in values if v > 0), default=1)
            self.low, self.high = (
                math.floor(math.log10(low)),
                max(math.ceil(math.log10(max(high, low))), math.floor(math.log10(low)) + 1),
            )
            self.ticks = [10.0**e for e in range(self.low, self.high + 1)]
        else:
            step = nice_step(high)
            self.low, self.high = 0, math.ceil(high / step - 1e-9) * step or 1  # type: ignore[assignment]
            self.ticks = [step * i for i in range(round(self.high / step) + 1)]

    def __call__(self, value: float) -> float:
        at = math.log10(max(value, 10.0**self.low)) if self.log else value
        return self.begin + (self.end - self.begin) * (at - self.low) / (self.high - self.low)


def nice_step(high: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides 0..high into at most five.

    >>> nice_step(23), nice_step(5), nice_step(0.7), nice_step(0)
    (5.0, 1.0, 0.2, 1.0)
    """
    if high <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(high / 5))
    return next(round(power * m, 12) for m in (1, 2, 5, 10) if high / (power * m) <= 5 + 1e-9)


def short(value: float) -> str:
    """
    >>> short(1_200_000), short(25_000), short(0.5), short(3), short(0)
    ('1.2M', '25k', '0.5', '3', '0')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def draw(title: str, axis: str, panels: Sequence[Panel]) -> str:
    """The whole picture."""
    width = LEFT + len(panels) * (WIDTH + GAP) + (len(panels) - 1) * (LEFT - GAP) + 6
    height = TOP + HEIGHT + BOTTOM
    modes = list(dict.fromkeys(mode for panel in panels for mode in panel.lines))
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            ' font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT - 40}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
        *_legend(modes, width),
    ]
    for k, panel in enumerate(panels):
        parts += _panel(panel, axis, LEFT + k * (WIDTH + LEFT), TOP)
    return "\n".join([*parts, "</svg>\n"])


def _legend(modes: Sequence[str], width: int) -> list[str]:
    parts, widths = [], [46 + 9 * len(mode) for mode in modes]
    for k, mode in enumerate(modes):
        x = width - 24 - sum(widths[k:])
        colour, dashes, mark = STYLES[mode]
        parts.append(f'<path d="M{x} 22h30" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        parts.append(f'<path d="{MARKS[mark].format(x + 15, 22)}" fill="{colour}"/>')
        parts.append(f'<text x="{x + 36}" y="26">{escape(mode)}</text>')
    return parts


def _panel(panel: Panel, axis: str, left: float, top: float) -> list[str]:
    marks = [m for line in panel.lines.values() for m in line]
    xs = sorted({m.x for m in marks})
    margin = 16
    across = _Across(xs, left + margin, left + WIDTH - margin)
    up = Scale([m.y for m in marks], top + HEIGHT, top, panel.log)
    parts = [
        f'<text x="{left}" y="{top - 14}"'
        f' font-weight="bold">{escape(panel.title)}{" (logarithmic)" if panel.log else ""}</text>'
    ]
    for tick in up.ticks:
        y = up(tick)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    parts.append(f'<path d="M{left} {top}v{HEIGHT}h{WIDTH}" fill="none" stroke="#888888"/>')
    for x in xs:
        parts.append(f'<path d="M{across(x):.1f} {top + HEIGHT}v4" stroke="#888888"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{top + HEIGHT + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{top + HEIGHT + 37}" text-anchor="middle">{escape(axis)}</text>')
    for mode, line in panel.lines.items():
        colour, dashes, mark = STYLES[mode]
        places = [(across(m.x), up(m.y), m.bound) for m in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        for x, y, bound in places:
            fill = "#ffffff" if bound else colour
            parts.append(
                f'<path d="{MARKS[mark].format(f"{x:.1f}", f"{y:.1f}")}" fill="{fill}" stroke="{colour}"'
                ' stroke-width="1.5"/>'
            )
    return parts


class _Across:
    """The horizontal axis: from the smallest to the largest value, not from zero."""

    def __init__(self, xs: Sequence[float], begin: float, end: float) -> None:
        self.low, self.high, self.begin, self.end = xs[0], xs[-1], begin, end

    def __call__(self, x: float) -> float:
        share = (x - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.begin + share * (self.end - self.begin)
