"""The figures of the page as plain data: dots with intervals, and curves (training, calibration, decisions).

The template draws them as SVG. Places are per cent of the width or height, so that a figure fits any screen without a
script, and colours are names of the theme's, so that a figure follows the theme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd

from feddar.report.plots import COLOURS, power_of_ten

LIGHT = {
    "paper": "#ffffff",
    "wash": "#f4f6f8",
    "ink": "#1d2126",
    "muted": "#59616b",
    "line": "#dfe3e8",
    "faint": "#c3c9d1",
    "blue": COLOURS["feddar-sa"],
    "indigo": COLOURS["feddar"],
    "vermillion": COLOURS["fedavg"],
    "green": COLOURS["fedrep"],
    "purple": COLOURS["local"],
    "sky": COLOURS["feddar-wa"],
    "orange": COLOURS["fedavg-mh"],
    "grey": "#6c757f",
}
DARK = {
    "paper": "#15181c",
    "wash": "#1e2227",
    "ink": "#e7eaee",
    "muted": "#a4acb6",
    "line": "#31373f",
    "faint": "#4d5660",
    "blue": "#4ba3e3",
    "indigo": "#9a9aff",
    "vermillion": "#f0803c",
    "green": "#2fbf95",
    "purple": "#e29cc4",
    "sky": "#a5d8f7",
    "orange": "#f2b632",
    "grey": "#949da8",
}
HUES = ("blue", "vermillion", "green", "purple", "orange", "sky", "indigo", "grey")
DASHES = ("solid", "dash", "dot", "dashdot")
WIDE = 30
MOST_TICKS = 5
MOST_POINTS = 60


@dataclass(frozen=True)
class Stroke:
    """The colour and dash of a method's curve."""

    hue: str
    dash: str


def strokes(methods: Sequence[str]) -> dict[str, Stroke]:
    """Return a colour and dash for every method; neighbours differ in both.

    Methods that have a fixed colour in all figures of the project (``COLOURS``) get it.
    """
    hues = {colour: name for name, colour in LIGHT.items()}
    dashes = {method: DASHES[index % len(DASHES)] for index, method in enumerate(methods)}
    drawn = {name: Stroke(hues[COLOURS[name]], dashes[name]) for name in methods if COLOURS.get(name) in hues}
    for method in methods:
        if method not in drawn:
            used = Counter(stroke.hue for stroke in drawn.values())
            same = {stroke.hue for stroke in drawn.values() if stroke.dash == dashes[method]}
            drawn[method] = Stroke(min(HUES, key=lambda hue: (hue in same, used[hue])), dashes[method])
    return {method: drawn[method] for method in methods}


@dataclass(frozen=True)
class AxisScale:
    """The common range of several figures; logarithmic if positive values differ by orders of magnitude."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(
        cls,
        middles: Iterable[float],
        ends: Iterable[float],
        start: float | None = None,
        limits: tuple[float, float] = (-np.inf, np.inf),
    ) -> AxisScale:
        """Return the range of all values; it begins at ``start`` if that is given, and room stays within limits."""
        values = [value for value in middles if np.isfinite(value)] or [0.0]
        every = [*values, *(value for value in ends if np.isfinite(value))]
        if start is None and min(values) > 0 and max(values) > WIDE * min(values):
            return cls(min(values) / 1.5, max(every) * 1.5, log=True)
        low, high = min(every) if start is None else start, max(every)
        room = 0.04 * ((high - low) or abs(high) or 1.0)
        if start is None:
            start = max(low - room, limits[0]) if low >= limits[0] else low - room
        return cls(start, min(high + room, limits[1]) if high <= limits[1] else high + room)

    def place(self, value: float) -> float:
        """Return where a value is, in per cent of the range; values beyond it are at its ends."""
        inside = min(max(value, self.low), self.high)
        low, high, at = np.log10((self.low, self.high, inside)) if self.log else (self.low, self.high, inside)
        return round(100 * float((at - low) / (high - low)), 2)

    def ticks(self, factor: int = 1) -> list[Tick]:
        """Return at most five marks at round numbers; texts are ``factor`` times the value (100 for per cent)."""
        if self.log:
            powers = np.arange(np.ceil(np.log10(self.low)), np.floor(np.log10(self.high)) + 1)
            every = max(1, -(-len(powers) // MOST_TICKS))
            return [Tick(self.place(10.0**power), power_of_ten(factor * 10.0**power)) for power in powers[::every]]
        step = _step(self.high - self.low)
        first, last = np.ceil(self.low / step - 1e-9), np.floor(self.high / step + 1e-9)
        values = [float(n * step) + 0.0 for n in np.arange(first, last + 1)]  # no negative zero
        return [Tick(self.place(value), _mark(factor * value)) for value in values]


def _mark(value: float) -> str:
    """Return the text of a mark, written as numbers in tables are."""
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.6g}").replace("-", "−")


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: its place in per cent, and its text."""

    at: float
    text: str


def _step(span: float) -> float:
    """Return the smallest of 1, 2, 2.5 or 5 times a power of ten that divides a range into at most four parts."""
    power = 10.0 ** np.floor(np.log10(span / MOST_TICKS))
    return float(next(power * n for n in (1, 2, 2.5, 5, 10, 20) if span / (power * n) < MOST_TICKS - 0.5))


@dataclass(frozen=True)
class Dot:
    """A method's row in a figure: a value with an interval, its role (which sets the mark), and the hover text."""

    method: str
    middle: float
    low: float
    high: float
    role: str
    hover: str
    more: str = ""
    """A smaller text below the name."""


@dataclass(frozen=True)
class PlacedDot:
    """A row as it is drawn; an undefined value has no places, and no mark."""

    name: str
    hover: str
    mark: str
    hue: str
    at: tuple[float, float, float] | None
    """The places of the value and of the ends of its interval."""
    more: str = ""


@dataclass(frozen=True)
class Dots:
    """A figure with a row for each method and a line at ``guide``, if there is one."""

    kind: ClassVar[str] = "dots"
    square: ClassVar[bool] = False
    rows: list[PlacedDot]
    ticks: list[Tick]
    guide: float | None


MARKS = {
    "other": ("circle", "grey"),
    "open": ("open", "grey"),
    "reference": ("square", "vermillion"),
    "worse": ("down", "vermillion"),
    "better": ("up", "blue"),
    "best": ("diamond", "blue"),
}
"""The shape and colour of each role."""


def dots(rows: Sequence[Dot], guide: float | None, scale: AxisScale, factor: int = 1) -> Dots:
    """Place a row for each method, and a line at ``guide`` if there is one."""
    drawn = []
    for row in rows:
        ends = (row.middle, row.low, row.high)
        at = None if np.isnan(row.middle) else (scale.place(ends[0]), scale.place(ends[1]), scale.place(ends[2]))
        drawn.append(PlacedDot(row.method, row.hover, *MARKS[row.role], at, row.more))
    line = None if guide is None or np.isnan(guide) else scale.place(guide)
    return Dots(drawn, scale.ticks(factor), line)


@dataclass(frozen=True)
class Line:
    """A curve with its name: points in per cent of width and (from the top) height, and the texts of its values."""

    method: str
    stroke: Stroke
    points: str
    texts: str
    marked: tuple[float, float] | None


@dataclass(frozen=True)
class Curves:
    """A figure with lines, over rounds or thresholds; the part from ``counted`` (in per cent) on is tinted."""

    kind: ClassVar[str] = "curves"
    lines: list[Line]
    steps: list[float]
    """The rounds or thresholds that lines have values at."""
    span: tuple[float, float]
    """The steps at the left and right ends."""
    across: list[Tick]
    up: list[Tick]
    counted: float | None = None
    step: str = "round"
    """What the steps are, below the axis."""
    height: str = ""
    """What the values are, above the axis on the left."""
    band: str = ""
    """The outline of an interval around a line."""
    points: tuple[tuple[float, float, float, float], ...] = ()
    """Single points with intervals: place from the left and, from the top, those of the value and of both ends."""
    square: bool = False

    @property
    def longest(self) -> str:
        """The longest text of the marks on the left, which all of them have room for."""
        return max((tick.text for tick in self.up), key=len, default="")


def curves(
    curve: pd.DataFrame,
    drawn: dict[str, Stroke],
    scale: AxisScale,
    counted: int,
    text: Callable[[float], str],
    factor: int = 1,
    marked: Mapping[str, int] | None = None,
) -> Curves:
    """Place a line for each method (columns) over rounds (index); ``text`` writes the values.

    The last ``counted`` rounds, which are averaged, are tinted; a method's round in ``marked`` gets a diamond. Of many
    rounds some are left out, evenly, which nobody could see in a small figure.
    """
    evenly = np.linspace(0, len(curve) - 1, min(MOST_POINTS, len(curve))).round().astype(int)
    curve = curve[curve.index.isin([*curve.index[evenly], *(marked or {}).values()])]
    rounds = [int(number) for number in curve.index]
    across = AxisScale(min(rounds[0], rounds[-1] - 1), rounds[-1] + 0.5)
    lines = []
    for method, stroke in drawn.items():
        points = {
            number: (across.place(number), round(100 - scale.place(value), 2))
            for number, value in zip(rounds, curve[method], strict=True)
            if not np.isnan(value)
        }
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points.values())
        texts = " ".join(text(value) for value in curve[method])
        lines.append(Line(method, stroke, path, texts, points.get((marked or {}).get(method, -1))))
    whole = [tick for tick in across.ticks() if "." not in tick.text]
    start = across.place(rounds[-1] - counted + 0.5) if counted else None
    return Curves(lines, [*rounds], (across.low, across.high), whole, _upwards(scale, factor), start)


def _upwards(scale: AxisScale, factor: int = 1) -> list[Tick]:
    return [Tick(_from_top(tick.at), tick.text) for tick in scale.ticks(factor)]


def _from_top(place: float) -> float:
    return round(100 - place, 2)


SHARES = AxisScale(0.0, 1.0)


def calibration(shares: Sequence[tuple[float, ...]]) -> Curves:
    """Place points (predicted, observed, low, high) about the diagonal, where both shares are the same."""
    diagonal = Line("as predicted", Stroke("muted", "dash"), "0,100 100,0", "", None)
    placed = []
    for predicted, *heights in shares:
        observed, low, high = (_from_top(SHARES.place(heights[0] if np.isnan(at) else at)) for at in heights)
        placed.append((SHARES.place(predicted), observed, low, high))
    up = _upwards(SHARES)
    return Curves(
        [diagonal], [], (0.0, 1.0), SHARES.ticks(), up, step="predicted risk", height="observed share",
        points=tuple(placed), square=True,
    )  # fmt: skip


BENEFITS = (Stroke("blue", "solid"), Stroke("vermillion", "dash"), Stroke("muted", "dot"))


def decision_curve(rows: pd.DataFrame, lines: Mapping[str, str], scale: AxisScale) -> Curves:
    """Place lines (their names, and the columns of ``rows`` they are of) over thresholds; the first has a band.

    Every second threshold is drawn. A line ends where it is below the scale: flagging everybody falls without end.
    """
    rows = rows.iloc[1::2]
    across = [SHARES.place(at) for at in rows["threshold"]]
    drawn = []
    for (name, column), stroke in zip(lines.items(), BENEFITS, strict=True):
        seen = [(x, at) for x, at in zip(across, rows[column], strict=True) if at >= scale.low]
        path = " ".join(f"{x:.1f},{_from_top(scale.place(at)):.1f}" for x, at in seen)
        drawn.append(Line(name, stroke, path, " ".join(f"{at:.3f}" for at in rows[column]), None))
    ends = [(x, end) for column in ("low", "high") for x, end in _edge(across, rows[column], column == "high")]
    band = " ".join(f"{x:.1f},{_from_top(scale.place(end)):.1f}" for x, end in ends)
    steps = [round(float(at), 2) for at in rows["threshold"]]
    return Curves(
        drawn, steps, (0.0, 1.0), SHARES.ticks(), _upwards(scale), step="threshold", height="net benefit", band=band
    )


def _edge(across: Sequence[float], ends: Iterable[float], back: bool) -> list[tuple[float, float]]:
    """Return the points of one edge of a band, from left to right or back; those that are undefined are left out."""
    points = [(x, end) for x, end in zip(across, ends, strict=True) if not np.isnan(end)]
    return points[::-1] if back else points


@dataclass(frozen=True)
class Panel:
    """A figure with its heading, a note, and its content in words (for screen readers)."""

    key: str
    title: str
    note: str
    words: str
    figure: Dots | Curves
