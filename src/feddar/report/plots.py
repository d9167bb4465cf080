"""The common style of all Matplotlib figures: fonts, colours, and labels beside the data instead of legends.

Matplotlib is an optional dependency and is imported only when a figure is drawn; pyplot and its global state are
never used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddar.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#6b6b6b", "#e3e3e3"

# After Okabe and Ito: distinguishable with all common kinds of colour blindness.
COLOURS = {
    "feddar": "#1a1a80",
    "feddar-sa": "#0072b2",
    "feddar-wa": "#4a9fd8",
    "fedrep": "#009e73",
    "fedavg": "#d55e00",
    "fedavg-mh": "#c98500",
    "local": "#cc79a7",
}

_LOOK: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
}


@contextmanager
def drawing(
    *, width: float, height: float, panels: int = 1, ratios: Sequence[float] | None = None
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure with panels side by side (sizes in inches), to draw on within the block."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("Figures need Matplotlib: pip install 'feddar[plots]'.") from error
    with rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, width_ratios=ratios)
        yield figure, list(axes[0])


@contextmanager
def canvas(
    path: Path, *, width: float, height: float, panels: int = 1, ratios: Sequence[float] | None = None
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure as ``drawing`` does, and save it to `path` when the block ends."""
    with drawing(width=width, height=height, panels=panels, ratios=ratios) as (figure, axes):
        yield figure, axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, facecolor="white")


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Return positions moved apart so that neighbours are at least `gap` from each other; their order is kept.

    Each cluster that would overlap is spaced evenly about its own centre.
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    clusters: list[list[float]] = []
    for index in order:
        clusters.append([positions[index]])
        while len(clusters) > 1 and _low(clusters[-1], gap) - _high(clusters[-2], gap) < gap:
            last = clusters.pop()
            clusters[-1] += last
    placed = [_low(cluster, gap) + gap * rank for cluster in clusters for rank in range(len(cluster))]
    moved = list(positions)
    for index, position in zip(order, placed, strict=True):
        moved[index] = position
    return moved


def _low(cluster: list[float], gap: float) -> float:
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def _high(cluster: list[float], gap: float) -> float:
    return _low(cluster, gap) + gap * (len(cluster) - 1)


def power_of_ten(value: float) -> str:
    """Return a positive number with two digits as text: 9.2·10⁻⁸, or 0.35 if it is between 0.01 and 1000."""
    if 0.01 <= value < 1000:
        return f"{float(f'{value:.2g}'):g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if mantissa == "1.0" else f"{mantissa}·{power}"
