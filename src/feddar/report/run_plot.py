"""The figure of one run: its main metric by domain, and its losses, by round."""

from __future__ import annotations

from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

from feddar.errors import UserError
from feddar.evaluation.validation import LOSS
from feddar.lazy import pandas as pd
from feddar.report import plots
from feddar.report.numbers import metric_title, percent
from feddar.results.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = tuple(plots.COLOURS[name] for name in ("feddar-sa", "fedavg", "fedrep", "local", "feddar", "fedavg-mh"))
"""The colours of curves; neighbours differ."""


def run_plot(run: Run, metric: str | None = None) -> Figure:
    """Return a figure of a metric by domain, if there were test samples, and of the losses; notebooks show it."""
    history = run.history
    if history.empty:
        raise UserError("this run has no metrics of its rounds, so there is nothing to plot.")
    name = run.model.objective.headline(run.settings.metric if metric is None else metric)
    tested = history.query("split == 'test' and scope == 'domain' and metric == @name")
    losses = history[(history["split"] != "test") & (history["scope"] == "all") & (history["metric"] == LOSS)]
    panels = 1 if tested.empty else 2
    with plots.drawing(width=4.6 * panels, height=3.4, panels=panels) as (figure, axes):
        if not tested.empty:
            few = tested["name"].nunique() <= len(HUES)
            by_domain = tested.pivot_table(index="round", columns="name", values="value", sort=False) * percent(name)
            unit = ", %" if percent(name) == 100 else ""
            _draw(axes[0], by_domain, f"{metric_title(name)}{unit}, by domain", run, labelled=few)
        _draw(axes[-1], losses.pivot_table(index="round", columns="split", values="value", sort=False), "loss", run)
    setattr(figure, "_repr_png_", partial(_png, figure))  # noqa: B010 - what notebooks ask for
    return figure


def _draw(axes: Axes, curves: pd.DataFrame, title: str, run: Run, labelled: bool = True) -> None:
    """Draw a curve for each column by round, with its name at its end, and mark the round in use."""
    ends: dict[str, float] = {}
    for place, name in enumerate(curves):
        values = curves[name].dropna()
        colour = HUES[place % len(HUES)] if labelled else plots.MUTED
        axes.plot(values.index, values, lw=1.6 if labelled else 0.8, color=colour, marker="o", ms=3 if labelled else 0)
        ends[str(name)] = float(values.iloc[-1])
    low, high = axes.get_ylim()
    last = int(curves.index.max())
    if labelled:
        for number, (name, height) in enumerate(
            zip(ends, plots.spread(list(ends.values()), gap=0.075 * (high - low)), strict=True)
        ):
            axes.annotate(name, (last, height), (6, 0), textcoords="offset points", va="center",
                          color=HUES[number % len(HUES)], annotation_clip=False)  # fmt: skip
    if run.choice() is not None:
        axes.axvline(run.round, color=plots.MUTED, lw=0.8, ls=":", zorder=0)
        axes.annotate("in use", (run.round, high), (3, 0), textcoords="offset points", color=plots.MUTED, fontsize=8)
    axes.grid(axis="y")
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="round", title=title)


def _png(figure: Figure) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120, facecolor="white")
    return picture.getvalue()
