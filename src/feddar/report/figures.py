"""The figures of the page, made with Plotly: dots with intervals, and training curves.

Colours are those of the light theme; in the browser the page replaces them by those of the dark theme, which is why
each colour may have one name only. Names of methods go through ``label``, since Plotly interprets texts as HTML.
Plotly is an optional dependency and is imported only when a figure is drawn.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from feddar.report.plots import COLOURS

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
HUES = ("blue", "vermillion", "green", "purple", "sky", "orange", "indigo", "grey")
DASHES = ("solid", "dash", "dot", "dashdot")
ROW, LINE = 24, 15
WRAP = 18
WIDE = 30


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
    def over(cls, middles: Iterable[float], ends: Iterable[float], start: float | None = None) -> AxisScale:
        """Return the range of all values; it begins at ``start`` if that is given."""
        values = [value for value in middles if np.isfinite(value)] or [0.0]
        every = [*values, *(value for value in ends if np.isfinite(value))]
        if start is None and min(values) > 0 and max(values) > WIDE * min(values):
            return cls(min(values) / 1.5, max(every) * 1.5, log=True)
        low, high = min(every) if start is None else start, max(every)
        room = 0.04 * ((high - low) or abs(high) or 1.0)
        return cls(low - room if start is None else low, high + room)

    @property
    def axis(self) -> dict[str, Any]:
        """The range as the options of a Plotly axis."""
        if self.log:
            return {"type": "log", "range": [float(np.log10(self.low)), float(np.log10(self.high))], "dtick": 1}
        return {"type": "linear", "range": [self.low, self.high]}


def label(name: str) -> str:
    """Return a name escaped for Plotly, in lines short enough for a phone."""
    lines = textwrap.wrap(name, WRAP, break_on_hyphens=False, drop_whitespace=False) or [" "]
    return "<br>".join(escape(line, quote=False) for line in lines)


@dataclass(frozen=True)
class Dot:
    """A method's row in a figure: a value with an interval, its role (which sets the mark), and the hover text."""

    method: str
    middle: float
    low: float
    high: float
    role: str
    hover: str


def dots(rows: Sequence[Dot], guide: float | None, scale: AxisScale) -> dict[str, Any]:
    """Draw a row for each method, and a dotted line at ``guide`` if there is one."""
    import plotly.graph_objects as go

    labels = [label(row.method) for row in rows]
    lines = max(text.count("<br>") + 1 for text in labels)
    figure = go.Figure(layout=_layout(len(rows) * (ROW + LINE * (lines - 1)) + 34))
    for role, mark in MARKS.items():
        own = {place: row for place, row in enumerate(rows) if row.role == role}
        if not own:
            continue
        colour = LIGHT[mark["hue"]]
        figure.add_scatter(
            x=_plain(row.middle for row in own.values()),
            y=list(own),
            error_x={
                "type": "data",
                "symmetric": False,
                "array": _plain(row.high - row.middle for row in own.values()),
                "arrayminus": _plain(row.middle - row.low for row in own.values()),
                "color": colour,
                "thickness": 1.6,
                "width": 0,
            },
            mode="markers",
            cliponaxis=False,
            marker={
                "symbol": mark["symbol"],
                "size": mark["size"],
                "color": colour,
                "line": {"width": 1.6, "color": colour},
            },
            customdata=[escape(row.hover, quote=False) for row in own.values()],
            hovertemplate="%{customdata}<extra></extra>",
            meta=[row.method for row in own.values()],
        )
    if guide is not None and not np.isnan(guide):
        figure.add_vline(guide, line={"color": LIGHT["muted"], "width": 1, "dash": "dot"}, layer="below")
    figure.update_xaxes(scale.axis)
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=labels, range=[len(rows) - 0.5, -0.5], showgrid=False)
    return _as_json(figure)


MARKS: dict[str, dict[str, Any]] = {
    "other": {"symbol": "circle", "hue": "grey", "size": 8},
    "open": {"symbol": "circle-open", "hue": "grey", "size": 8},
    "reference": {"symbol": "square", "hue": "vermillion", "size": 9},
    "worse": {"symbol": "triangle-down", "hue": "vermillion", "size": 10},
    "better": {"symbol": "triangle-up", "hue": "blue", "size": 10},
    "best": {"symbol": "diamond", "hue": "blue", "size": 11},
}


def curves(
    curve: pd.DataFrame,
    drawn: dict[str, Stroke],
    scale: AxisScale,
    counted: int,
    marked: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Draw a line for each method (columns) over rounds (index).

    The last ``counted`` rounds, which are averaged, are shaded; a method's round in ``marked`` gets a diamond.
    """
    import plotly.graph_objects as go

    figure = go.Figure(layout=_layout(240))
    for method, line in drawn.items():
        figure.add_scatter(
            x=[int(number) for number in curve.index],
            y=_plain(curve[method]),
            mode="lines+markers" if method in (marked or {}) else "lines",
            line={"color": LIGHT[line.hue], "dash": line.dash, "width": 2},
            marker={
                "symbol": "diamond",
                "color": LIGHT[line.hue],
                "opacity": 1,
                "size": [11 if number == (marked or {}).get(method) else 0 for number in curve.index],
            },
            meta=method,
            customdata=[escape(method, quote=False)] * len(curve),
            hovertemplate="%{customdata}<br>round %{x}: %{y:.4~g}<extra></extra>",
        )
    first, last = int(curve.index.min()), int(curve.index.max())
    if counted:
        figure.add_vrect(last - counted + 0.5, last + 0.5, fillcolor=LIGHT["wash"], line_width=0, layer="below")
    figure.update_xaxes(title={"text": "round", "standoff": 6}, range=[min(first, last - 1), last + 0.5])
    figure.update_yaxes(scale.axis)
    return _as_json(figure)


def library() -> str:
    """Return plotly.js, escaped for a script element."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _layout(height: int) -> dict[str, Any]:
    axis = {
        "automargin": True,
        "fixedrange": True,
        "gridcolor": LIGHT["line"],
        "linecolor": LIGHT["faint"],
        "zeroline": False,
        "ticks": "",
        "tickangle": 0,
        "exponentformat": "power",
        "tickfont": {"color": LIGHT["ink"]},
    }
    return {
        "template": {},
        "height": height,
        "margin": {"l": 4, "r": 14, "t": 4, "b": 28},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": LIGHT["muted"]},
        "hoverlabel": {
            "bgcolor": LIGHT["paper"],
            "bordercolor": LIGHT["faint"],
            "font": {"color": LIGHT["ink"], "size": 13},
            "align": "left",
        },
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": axis,
        "yaxis": axis,
    }


def _plain(values: Iterable[float]) -> list[float | None]:
    """Return values with None in place of NaN, which JSON does not have."""
    return [None if np.isnan(value) else float(value) for value in values]


def _as_json(figure: Any) -> dict[str, Any]:
    plain = figure.to_plotly_json()
    return {"data": plain["data"], "layout": plain["layout"]}
