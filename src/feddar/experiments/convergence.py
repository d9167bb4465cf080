"""The paper's theorem in an experiment: Algorithm 2 with new noise-free samples in every request.

Rate: the distance of the representation from the truth in each round, compared with the bound
(1 - eta E0 sigma_min^2 / 2)^(t/2) dist(B_0, B*), with the largest step the theorem allows,
eta = 1 / (4 sigma_max^2).

Samples: the distance after a fixed number of rounds, by the number of clients n and the samples L of each client
per request. The theorem needs L of the order of d k^2 / n: with more clients, fewer samples each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from feddar.algorithm import algorithm2 as linear
from feddar.data.moments import Floats, Ints
from feddar.data.sources import synthetic_samples
from feddar.experiments import common
from feddar.experiments.common import ExperimentOptions
from feddar.report import plots
from feddar.report.markdown import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

D, K, DOMAINS, ALPHA = 20, 2, 5, 0.4
RATE_CLIENTS, RATE_SAMPLES = 100, 20

# After a hundred rounds the distance is near 1e-13, still above the level of rounding errors of about 1e-15.
RATE_ROUNDS, GRID_ROUNDS = 100, 40
TARGET = 1e-3
SEEDS = 10


@dataclass(frozen=True)
class Setting:
    """The grid of the second panel."""

    clients: tuple[int, ...]
    samples: tuple[int, ...]


SCALES = {
    "small": Setting(clients=(10, 40, 160), samples=(1, 4, 16)),
    "full": Setting(clients=(5, 10, 20, 40, 80, 160), samples=(1, 2, 4, 8, 16, 32, 64)),
}


def run(options: ExperimentOptions) -> pd.DataFrame:
    """Run the experiment; write `results.csv`, `table.md` and `figure.png`; return the results."""
    _, setting = common.pick(SCALES, options, "full")
    seeds = options.seeds or SEEDS
    options.say(f"rate: {RATE_CLIENTS} clients with {RATE_SAMPLES} samples, {RATE_ROUNDS} rounds, {seeds} seeds")
    parts = [follow("rate", RATE_CLIENTS, RATE_SAMPLES, seed, np.arange(RATE_ROUNDS + 1)) for seed in range(seeds)]
    for clients in setting.clients:
        options.say(f"samples: {clients} clients with {setting.samples} samples, {GRID_ROUNDS} rounds, {seeds} seeds")
        parts += [
            follow("samples", clients, samples, seed, np.array([0, GRID_ROUNDS]))
            for samples in setting.samples
            for seed in range(seeds)
        ]
    results = pd.concat(parts, ignore_index=True)
    return common.finish(options.out, results, table(results), draw_figure)


def follow(panel: str, clients: int, samples: int, seed: int, rounds: Ints) -> pd.DataFrame:
    """Run Algorithm 2 and return a row for each of `rounds`: the distance from the truth, and its bound."""
    rng = np.random.default_rng([seed, clients, samples])
    truth = synthetic_samples.make_truth(rng, d=D, k=K, domains=DOMAINS, clients=clients, alpha=ALPHA)
    first = synthetic_samples.draw(truth, samples, rng, noise=0.0)
    start = linear.moment_start(first.x, first.y, K)
    eta = 1 / (4 * truth.spectrum[0] ** 2)
    bases = linear.representations(lambda _: synthetic_samples.draw_moments(truth, samples, rng), start, eta)
    path = list(islice(bases, int(rounds.max()) + 1))
    return pd.DataFrame(
        {
            "panel": panel,
            "clients": clients,
            "samples": samples,
            "round": rounds,
            "bound": bound(linear.distance(start, truth.B), eta * truth.spectrum[-1] ** 2, rounds),
            "method": "feddar-sa",
            "seed": seed,
            "scope": "summary",
            "name": "representation",
            "metric": "distance",
            "value": [linear.distance(path[number], truth.B) for number in rounds],
            "count": clients * samples,
        }
    )


def bound(start: float, progress: float, rounds: Ints) -> Floats:
    """Return the theorem's bound after each of `rounds`; `progress` is eta sigma_min^2."""
    factor = 1 - progress * (1 - start**2) / 2
    return np.asarray(factor ** (rounds / 2) * start)


def rates(results: pd.DataFrame) -> pd.DataFrame:
    """Return statistics of the first panel for each seed: factor per round, the bound's factor, and so on."""
    rows = []
    for seed, run in results[results["panel"] == "rate"].groupby("seed"):
        value, ceiling, last = run["value"].to_numpy(), run["bound"].to_numpy(), run["round"].max()
        rows.append(
            {
                "seed": seed,
                "start": value[0],
                "end": value[-1],
                "factor": (value[-1] / value[0]) ** (1 / last),
                "bound_factor": (ceiling[-1] / ceiling[0]) ** (1 / last),
                "rounds_needed": np.argmax(value <= 1e-6) if value.min() <= 1e-6 else np.nan,
                "nearest_bound": (value[1:] / ceiling[1:]).max(),
            }
        )
    return pd.DataFrame(rows).set_index("seed")


def final(results: pd.DataFrame) -> pd.DataFrame:
    """Return the second panel's distances after the last round."""
    return results[(results["panel"] == "samples") & (results["round"] == GRID_ROUNDS)]


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """Return the second panel's median over seeds: a row per samples, a column per clients."""
    return final(results).groupby(["samples", "clients"])["value"].median().unstack("clients")


def needed(grid: pd.DataFrame) -> pd.Series[float]:
    """Return for each number of clients the least samples from which the median reaches the target, else NaN."""
    missed = (grid > TARGET).iloc[::-1].cummax().iloc[::-1]
    return (~missed).idxmax().astype(float).where(~missed.iloc[-1])


def verdict(results: pd.DataFrame) -> str:
    """Return a sentence on whether the first panel's runs stay below the bound."""
    rate = results[results["panel"] == "rate"]
    over = int((rate["value"] > rate["bound"]).sum())
    if over:
        return f"In {over} of {len(rate)} rounds the distance is above the bound."
    return f"The distance never exceeds the bound: {rate['seed'].nunique()} runs, every round."


def table(results: pd.DataFrame) -> str:
    """Return both panels as Markdown."""
    show = plots.power_of_ten
    runs, grid = rates(results), medians(results)
    rate_header = ["seed", "distance at start", "at end", "factor per round", "bound's factor"]
    rate_header += ["rounds to 10⁻⁶", "largest distance / bound"]
    rate_rows = [
        [seed, show(run.start), show(run.end), f"{run.factor:.3f}", f"{run.bound_factor:.3f}",
         f"{run.rounds_needed:.0f}", f"{run.nearest_bound:.2f}"]
        for seed, run in runs.iterrows()
    ]  # fmt: skip
    hits = (final(results).set_index(["samples", "clients"])["value"] <= TARGET).groupby(level=[0, 1]).mean()
    least = needed(grid)
    grid_rows = [
        [samples, *(f"{show(grid.loc[samples, n])} ({hits[samples, n]:.0%})" for n in grid.columns)]
        for samples in grid.index
    ]
    grid_rows.append(["least L on target", *(f"{n:.0f}" if n > 0 else "none" for n in least)])
    grid_rows.append(["n × least L", *(f"{n:.0f}" if n > 0 else "none" for n in least * least.index)])
    share = np.log(runs["bound_factor"].median()) / np.log(runs["factor"].median())
    return f"""# Linear convergence

Algorithm 2 without noise, with new samples in every request and as many for its start, and with the longest
step that the theorem allows, eta = 1 / (4 sigma_max²); d = {D}, k = {K}, {DOMAINS} domains, alpha = {ALPHA}.
The paper states the theorem and shows no measurement of it.

## Rate: {RATE_CLIENTS} clients, {RATE_SAMPLES} samples each, {RATE_ROUNDS} rounds

{markdown(rate_header, rate_rows)}

{verdict(results)}
The true heads have equal singular values, so without sampling error a round near the truth multiplies the
distance by 1 − eta sigma_min² = 0.75. The bound counts on {share:.0%} of the progress seen (in logarithms).
The runs stop before rounding would stop them, at about 10⁻¹⁵.

## Samples: median distance after {GRID_ROUNDS} rounds (share of seeds that reach {show(TARGET)})

{markdown(["samples per client, L", *(f"n = {n}" for n in grid.columns)], grid_rows)}

The theorem asks for L of the order of dk²/n = {D * K**2}/n, its constant unknown, and for enough samples
of every domain, which few clients may lack. Where samples are too few the distance stays near 1: there the
method does not converge.
"""


def draw_figure(results: pd.DataFrame, path: Path) -> None:
    """Draw the rate and the samples needed side by side."""
    with plots.canvas(path, width=10.2, height=4.5, panels=2, ratios=(1, 1.1)) as (figure, (left, right)):
        draw_rate(left, results)
        draw_grid(figure, right, medians(results))


def draw_rate(axes: Axes, results: pd.DataFrame) -> None:
    """Draw every run's distance over rounds, with the range of their bounds."""
    rate, runs = results[results["panel"] == "rate"], rates(results)
    distance = rate.pivot(index="round", columns="seed", values="value")
    ceiling = rate.pivot(index="round", columns="seed", values="bound")
    colour, middle = plots.COLOURS["feddar-sa"], RATE_ROUNDS // 2
    axes.set_yscale("log")
    axes.fill_between(ceiling.index, ceiling.min(axis=1), ceiling.max(axis=1), color=plots.FAINT, linewidth=0)
    axes.plot(ceiling.index, ceiling.median(axis=1), color=plots.INK, linestyle=(0, (4, 3)), linewidth=1.1)
    axes.plot(distance.index, distance, color=colour, linewidth=0.9, alpha=0.7)
    beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    axes.annotate("the theorem's bound", (middle, ceiling.loc[middle].max()), (0, 8), color=plots.INK, **beside)
    axes.annotate(
        f"FedDAR, {distance.shape[1]} runs", (middle, distance.loc[middle].median()), (-14, -6),
        ha="right", va="top", color=colour, fontweight="bold", **beside,
    )  # fmt: skip
    axes.grid(axis="y")
    axes.set_xlim(0, RATE_ROUNDS)
    axes.set_xlabel("round t")
    axes.set_ylabel(r"distance of $B_t$ from the truth, $\Vert B_{t\perp}^\top B^*\Vert_2$")
    axes.set_title(
        f"The distance shrinks by {1 - runs['factor'].median():.0%} a round;\n"
        f"the theorem promises {1 - runs['bound_factor'].median():.0%}"
    )


def draw_grid(figure: Figure, axes: Axes, grid: pd.DataFrame) -> None:
    """Draw the median distance as a map over clients and samples, with the least samples on target."""
    from matplotlib.colors import LogNorm

    columns, rows = np.log2(grid.columns.to_numpy(float)), np.log2(grid.index.to_numpy(float))
    shades = LogNorm(float(grid.min().min()), 1)
    cells = axes.pcolormesh(columns, rows, grid, norm=shades, cmap="cividis", edgecolors="white", linewidth=1.5)
    bar = figure.colorbar(cells, ax=axes, pad=0.02, label=f"median distance after {GRID_ROUNDS} rounds")
    bar.outline.set_visible(False)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    line = np.array([left, right])
    axes.plot(line, np.log2(D * K**2) - line, color="white", linestyle=(0, (4, 3)), label="L = dk² / n")
    least = needed(grid).dropna()
    axes.plot(
        np.log2(least.index.to_numpy(float)), np.log2(least), "o", color="white", markeredgecolor=plots.INK,
        markersize=8, label=f"least L that reaches {plots.power_of_ten(TARGET)}",
    )  # fmt: skip
    dark = cells.to_rgba(grid.min().min())
    axes.legend(loc="upper right", facecolor=dark, edgecolor="none", framealpha=1, labelcolor="white")
    axes.set(xlim=(left, right), ylim=(low, high), xlabel="clients, n", ylabel="samples per client and request, L")
    axes.set_xticks(columns, [str(n) for n in grid.columns])
    axes.set_yticks(rows, [str(n) for n in grid.index])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("The more clients, the fewer samples each needs\n(yellow: does not converge)")
