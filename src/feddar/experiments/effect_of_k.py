"""The paper's figure of k: accuracy of second-order aggregation over the dimension of the representation.

Age groups of FairFace, alpha = 1. The weighted average with the same projection is shown for reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.comparison.cells import Cell
from feddar.experiments import common, controlled, faces
from feddar.experiments.common import LABELS, ExperimentOptions
from feddar.experiments.controlled import SUMMARIES, Data, Setting
from feddar.report import plots
from feddar.report.markdown import markdown

ALPHA = 1.0
METHODS = ("feddar-wa", "feddar-sa")
KS = (2, 4, 8, 16, 32, 64)
SCALES = {scale: replace(setting, alphas=(ALPHA,)) for scale, setting in faces.SCALES.items()}


def run(options: ExperimentOptions) -> pd.DataFrame:
    """Run the experiment; write `results.csv`, `table.md` and `figure.png`; return the results."""
    scale, setting = controlled.pick(SCALES, options, in_parts=False)
    parts, encoder = faces.samples("age", scale, setting, options)
    setting = replace(setting, training={**setting.training, "encoder": encoder})
    return controlled.train_and_write(cells(setting, parts, options.out), options, partial(table, setting), draw_figure)


def cells(setting: Setting, data: Data, out: Path) -> list[Cell]:
    """Return every training: all k and both methods share the samples of a seed."""
    return [
        Cell(
            {"k": k, "method": method, "seed": seed},
            {**setting.training, "method": method, "k": k, "seed": seed},
            parts,
            out / "runs" / f"k-{k}" / method / f"seed-{seed}",
        )
        for seed in range(setting.seeds)
        for parts in [partial(data, ALPHA, seed)]
        for k in KS
        for method in METHODS
    ]


def table(setting: Setting, results: pd.DataFrame, failures: Sequence[str] = ()) -> str:
    """Return accuracy by k as Markdown."""
    found = controlled.accuracies(results).groupby(["method", "k", "name"])["value"]
    cell = {key: common.percent(values) for key, values in found}
    header = ["k", *(f"{LABELS[method]} {label}" for method in METHODS for label in SUMMARIES.values())]
    rows = [[k, *(cell.get((method, k, name), "–") for method in METHODS for name in SUMMARIES)] for k in KS]
    return f"""# Effect of k

Largest, smallest and mean test accuracy (%) over {faces.DOMAINS}, age groups, α = {ALPHA:g}.
{controlled.protocol(setting, results["seed"].nunique())}

{markdown(header, rows)}

**The paper** shows a figure without numbers, and says that FedDAR-SA gains with a properly chosen k.

**What differs from the paper.** {" ".join((*setting.differs, *faces.DIFFERS, *failures))}
"""


def draw_figure(results: pd.DataFrame, path: Path) -> None:
    """Draw mean accuracy over domains by k, with every seed as a dot."""
    shown = controlled.accuracies(results)
    shown = shown[shown["name"] == "domain_avg"]
    with plots.canvas(path, width=6.4, height=4.2) as (_, (axes,)):
        axes.set_xscale("log", base=2)
        ends: dict[str, float] = {}
        for method in METHODS:
            by_k = shown[shown["method"] == method].groupby("k")["value"]
            mean = 100 * by_k.mean()
            look: dict[str, Any] = {"color": plots.COLOURS[method]}
            axes.plot(mean.index, mean, marker="o", ms=6, lw=1.8, **look)
            each = shown[shown["method"] == method]
            axes.scatter(each["k"], 100 * each["value"], s=12, alpha=0.5, linewidths=0, **look)
            ends[method] = float(mean.iloc[-1])
        low, high = axes.get_ylim()
        for place, method in zip(plots.spread(list(ends.values()), gap=0.07 * (high - low)), ends, strict=True):
            where = (max(KS) * 1.15, place)
            axes.annotate(LABELS[method], where, color=plots.COLOURS[method], va="center", fontweight="bold")
        axes.set_xticks(KS, [str(k) for k in KS])
        axes.minorticks_off()
        axes.set(xlim=(min(KS) / 1.2, max(KS) * 2.4), xlabel="dimension of the representation, k")
        axes.set_ylabel("test accuracy, mean over domains, %")
        axes.grid(axis="y")
        seeds = results["seed"].nunique()
        repeated = f"small dots are the {seeds} seeds" if seeds > 1 else "one seed"
        axes.set_title(f"Age on FairFace by k, α = {ALPHA:g}; {repeated}")
