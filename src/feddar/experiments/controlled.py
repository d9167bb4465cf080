"""The common protocol, table and figure of the paper's experiments with controlled mixtures.

Five clients have 500 samples each, with domain mixtures pi_i ~ Dir(alpha p) for several alpha; the smaller alpha, the
fewer domains a client has samples of. Every method gets the same draw, initial weights and seeds, and starts with some
rounds of FedAvg. The test samples of each domain belong to no client. Accuracies are averaged over the last rounds;
reported are their maximum, minimum and mean over domains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.comparison.cells import Cell, Parts
from feddar.data.cohort import Cohort
from feddar.data.sources.image_pool import Pool
from feddar.errors import UserError
from feddar.evaluation.intervals import paired_differences
from feddar.experiments import common
from feddar.experiments.common import LABELS, ExperimentOptions
from feddar.experiments.regret import missing_section
from feddar.methods import find
from feddar.report import plots
from feddar.report.markdown import markdown

METHODS = tuple(LABELS)
PAPER_METHODS = tuple(name for name in LABELS if find(name).in_paper)
NARROW = "fedavg-narrow"
"""FedAvg with the projection of second order; it separates the effect of a small k from that of domain heads."""
TITLES = LABELS | {NARROW: "FedAvg, k as SA's"}
CLIENTS = 5
SUMMARIES = {"domain_max": "Max", "domain_min": "Min", "domain_avg": "Avg"}

Numbers = Mapping[str, Mapping[float, tuple[float, ...]]]
"""The paper's table: method -> alpha -> (max, min, avg), in per cent."""


@dataclass(frozen=True)
class Setting:
    """The settings of an experiment at one scale."""

    alphas: tuple[float, ...]
    seeds: int
    training: Mapping[str, Any]
    """The options of training that all methods have."""
    second_order: Mapping[str, Any] = field(default_factory=dict)
    """Further options of second-order aggregation only: it needs a small dimension k."""
    samples: int = 500
    """Samples per client."""
    test: int | None = None
    """The number of test samples of each domain; None is all."""
    differs: tuple[str, ...] = ()
    """How it differs from the paper's own settings, as sentences."""


@dataclass(frozen=True)
class Task:
    """One table of the paper: its title, its domains and its numbers."""

    title: str
    domains: str
    paper: Numbers
    differs: tuple[str, ...]
    """How data and our reading differ from the paper at any scale, as sentences."""


Data = Callable[[float, int], Parts]
"""Draws the training and test part for alpha and a seed."""


def pick(scales: Mapping[str, Setting], options: ExperimentOptions, *, in_parts: bool = True) -> tuple[str, Setting]:
    """Return the scale that was asked for, and its setting with the number of seeds that was asked for.

    An experiment can be run ``in_parts``, alphas and methods of the setting, or refuses that.
    """
    scale, setting = common.pick(scales, options, parts=METHODS if in_parts else ())
    common.chosen_parts(options, _parts(setting))
    training = {**setting.training, "device": options.device}
    return scale, replace(setting, seeds=options.seeds or setting.seeds, training=training)


def _parts(setting: Setting) -> list[str]:
    """Return the parts that can be asked for: alphas, and methods."""
    return [*(f"{alpha:g}" for alpha in setting.alphas), *TITLES]


def run(task: Task, setting: Setting, data: Data, options: ExperimentOptions) -> pd.DataFrame:
    """Train every method for every alpha and seed; write results, table and figure; return the results.

    With ``only``, these alphas or methods are trained; the table has all that is finished in the folder.
    """
    every = cells(setting, data, options.out)
    asked = [] if options.only is None else common.chosen_parts(options, _parts(setting))
    chosen = [cell for cell in every if _is_asked_for(cell, asked)]
    if not chosen:
        raise UserError(f"this experiment trains nothing of {options.only}: name other parts.")
    planned = pd.DataFrame([cell.labels for cell in every])
    return train_and_write(chosen, options, partial(table, task, setting, planned), partial(draw_figure, task), every)


def _is_asked_for(cell: Cell, parts: Sequence[str]) -> bool:
    """Return whether a cell is of these parts; where no alpha, or no method, is among them, it is of all."""
    methods = [part for part in parts if part in TITLES]
    alphas = [part for part in parts if part not in TITLES]
    return (not methods or cell.labels["method"] in methods) and (not alphas or f"{cell.labels['alpha']:g}" in alphas)


def train_and_write(
    cells: Sequence[Cell],
    options: ExperimentOptions,
    table: Callable[[pd.DataFrame, Sequence[str]], str],
    draw: Callable[[pd.DataFrame, Path], None],
    every: Sequence[Cell] | None = None,
) -> pd.DataFrame:
    """Train the cells; write results, figure and table, which also lists failures; return the results.

    Results are of all cells that are finished in the folder: of ``every`` cell of the experiment, if it is given. A
    cell that results.csv has, and whose own folder is gone, is finished, too.
    """
    every = cells if every is None else every
    earlier = common.earlier_results(every, options)
    trained = common.train_cells(common.pending(cells, earlier), options)
    results = tested(common.finished(every, earlier))
    failures = [f"{cell} failed: {why}" for cell, why in trained.failures]
    return common.finish(options.out, results, table(results, failures), draw, trained)


def draw(pool: Pool, setting: Setting, alpha: float, seed: int) -> Cohort:
    """Draw the clients of an alpha and seed from a pool; the result's input is the samples' numbers there."""
    return Cohort.mixture(pool.samples, clients=CLIENTS, samples=setting.samples, alpha=alpha, seed=seed)


def cells(setting: Setting, data: Data, out: Path) -> list[Cell]:
    """Return every training: all methods share the samples of an alpha and seed."""
    return [
        Cell(
            {"alpha": alpha, "method": method, "seed": seed},
            options(setting, method) | {"seed": seed},
            parts,
            out / "runs" / f"alpha-{alpha:g}" / method / f"seed-{seed}",
        )
        for alpha in setting.alphas
        for seed in range(setting.seeds)
        for parts in [partial(data, alpha, seed)]
        for method in (*METHODS, *([NARROW] if setting.second_order else []))
    ]


def options(setting: Setting, method: str) -> dict[str, Any]:
    """Return the options of training of a method."""
    own = setting.second_order if method in ("feddar-sa", NARROW) else {}
    return {**setting.training, **own, "method": "fedavg" if method == NARROW else method}


def tested(results: pd.DataFrame) -> pd.DataFrame:
    """Return the results without those by client, since test samples belong to no client."""
    return results[(results["scope"] != "client") & (results["name"] != "client_avg")].reset_index(drop=True)


def accuracies(results: pd.DataFrame) -> pd.DataFrame:
    """Return only the summaries of accuracy over domains."""
    return results[(results["metric"] == "accuracy") & results["name"].isin(list(SUMMARIES))]


def table(
    task: Task, setting: Setting, planned: pd.DataFrame, results: pd.DataFrame, failures: Sequence[str] = ()
) -> str:
    """Return the results in the layout of the paper's table, with the paper's own numbers below ours.

    ``planned`` has the labels of all trainings; those without results are listed.
    """
    alphas, seeds = list(dict.fromkeys(results["alpha"])), results["seed"].nunique()
    found = accuracies(results).groupby(["method", "alpha", "name"])["value"]
    ours = {key: common.percent(values) for key, values in found}
    header = ["Method", *(f"α={alpha:g} {label}" for alpha in alphas for label in SUMMARIES.values())]
    rows = []
    for method in _shown(results):
        rows.append([TITLES[method], *(ours.get((method, alpha, name), "–") for alpha in alphas for name in SUMMARIES)])
        if method not in PAPER_METHODS:
            continue
        paper = task.paper.get(method, {})
        numbers = [number for alpha in alphas for number in paper.get(alpha, ("–",) * 3)]
        rows.append(["*the paper's*", *(f"*{number}*" for number in numbers)])
    return f"""# {task.title}

Largest, smallest and mean test accuracy (%) over the domains ({task.domains}).
{protocol(setting, seeds)}

{markdown(header, rows)}

{differences(results)}With small α some domains have few training samples or none. A domain that no client holds gets \
the mean of the other domains' heads, weighted by their samples; in `feddar`, which is what we recommend and not the \
paper's, heads of domains with little evidence are drawn towards it (`credibility`).

**What differs from the paper.** {" ".join((*setting.differs, *task.differs, *failures))}

{_missing(results, planned)}
"""


def _missing(results: pd.DataFrame, planned: pd.DataFrame) -> str:
    """Return which of the planned trainings the table lacks."""

    def by_alpha(cells: pd.DataFrame) -> pd.DataFrame:
        return cells.assign(cohort=[f"α = {alpha:g}" for alpha in cells["alpha"]], fold=0)

    return missing_section(by_alpha(results), by_alpha(planned))


def _shown(results: pd.DataFrame) -> list[str]:
    """Return the methods in the table's order."""
    return [*METHODS, *([NARROW] if NARROW in set(results["method"]) else [])]


def protocol(setting: Setting, seeds: int) -> str:
    """Return a sentence on what a number in the table is."""
    spread = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    rounds = f"the last {setting.training['last']} of {setting.training['rounds']} rounds"
    return f"{CLIENTS} clients with {setting.samples} samples each; {spread}, each the mean of {rounds}."


def differences(results: pd.DataFrame) -> str:
    """Return a table of each method's mean accuracy minus FedAvg's, paired by seed; empty for a single seed."""
    if results["seed"].nunique() < 2:
        return ""
    shown, alphas = accuracies(results).assign(fold=0), list(dict.fromkeys(results["alpha"]))
    found = pd.concat(
        [paired_differences(shown[shown["alpha"] == alpha], "fedavg").assign(alpha=alpha) for alpha in alphas]
    )
    known = found[(found["name"] == "domain_avg") & (found["pairs"] > 1)]
    average = known.set_index(["method", "alpha"])[["difference", "low", "high"]] * 100
    written = ["{:+.1f} ({:+.1f} to {:+.1f})".format(*row) for row in average.to_numpy()]
    cell = dict(zip(average.index, written, strict=True))
    rows = [[TITLES[method], *(cell.get((method, alpha), "–") for alpha in alphas)] for method in _shown(results)[1:]]
    header = ["Avg less FedAvg's", *(f"α={alpha:g}" for alpha in alphas)]
    return f"""{markdown(header, rows)}

Differences are paired by seed, with their interval of 95 % (Student's, for so few).

"""


def draw_figure(task: Task, results: pd.DataFrame, path: Path) -> None:
    """Draw mean accuracy by alpha with bars from the worst to the best domain: ours, and the paper's beside it."""
    alphas, seeds = list(dict.fromkeys(results["alpha"])), results["seed"].nunique()
    means = accuracies(results).groupby(["method", "alpha", "name"])["value"].mean().unstack("name")[list(SUMMARIES)]
    ours = {
        method: {float(alpha): tuple(100 * row) for alpha, row in zip(part.index, part.to_numpy(), strict=True)}
        for method, part in ((method, means.loc[method]) for method in METHODS if method in means.index)
    }
    with plots.canvas(path, width=9.2, height=4.4, panels=2) as (figure, panels):
        ends = [_draw_panel(axes, numbers, alphas) for axes, numbers in zip(panels, (ours, task.paper), strict=True)]
        low, high = (pick(axes.get_ylim()[i] for axes in panels) for i, pick in enumerate((min, max)))
        for axes, named in zip(panels, ends, strict=True):
            axes.set(ylim=(low, high), xlabel="α, from clients of one domain to clients that are alike")
            for place, method in zip(plots.spread(list(named.values()), gap=0.055 * (high - low)), named, strict=True):
                where = (len(alphas) - 1 + 0.24, place)
                axes.annotate(SHORT.get(method, LABELS[method]), where, color=plots.COLOURS[method], **_NAME)
        panels[0].set_title(f"here, {seeds} seed{'s' if seeds > 1 else ''}")
        panels[0].set_ylabel("test accuracy, %")
        panels[1].set_title("the paper")
        figure.suptitle(f"{task.title}: mean over domains, bars from the worst to the best", x=0.01, ha="left")


SHORT = {"fedavg-mh": "FedAvg + MH"}
_NAME: dict[str, Any] = {"va": "center", "fontweight": "bold", "fontsize": 8.5}


def _draw_panel(axes: Any, numbers: Numbers, alphas: Sequence[float]) -> dict[str, float]:
    """Draw every method's line and return where the lines end."""
    ends = {}
    for rank, method in enumerate(METHODS):
        known = {
            place: numbers[method][alpha] for place, alpha in enumerate(alphas) if alpha in numbers.get(method, {})
        }
        if known:
            aside = [place + 0.09 * (rank - 2) for place in known]
            best, worst, mean = zip(*known.values(), strict=True)
            axes.vlines(aside, worst, best, alpha=0.35, linewidth=3.5, color=plots.COLOURS[method])
            axes.plot(aside, mean, marker="o", ms=5.5, lw=1.6, color=plots.COLOURS[method])
            ends[method] = mean[-1]
    axes.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set_xlim(-0.4, len(alphas) + 0.35)
    axes.grid(axis="y")
    return ends
