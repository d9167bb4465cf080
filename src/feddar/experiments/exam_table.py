"""The paper's table on EXAM: AUC of every method by race group, worst and mean group, and mean client (5 folds).

EXAM is private. This runs the same protocol on the synthetic `exam` cohort (`feddar.data.sources.exam_cases`), which
has the published shares of race groups and label rates at six hospitals, and says so wherever numbers are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import product
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from feddar.comparison.cells import Cell, Trained
from feddar.data.sources import BUILT_IN, resolve_options
from feddar.evaluation.intervals import across, paired_differences
from feddar.experiments import common
from feddar.experiments.common import ExperimentOptions
from feddar.report import plots
from feddar.report.markdown import markdown
from feddar.report.numbers import UNDEFINED, paper_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDS = 5
SEEDS = 1
COLUMNS = ("White", "Black", "Asian", "Latino", "Other", "domain_min", "domain_avg", "client_avg")
TITLES = {"domain_min": "Min", "domain_avg": "Avg", "client_avg": "Client avg"}

LABELS = {
    "local": "Local",
    "separate": "separate FedAvg",
    "fedavg": "FedAvg",
    "fedavg-ft": "FedAvg + FT",
    "fedavg-separate-ft": "FedAvg + separate FT",
    "fedprox": "FedProx",
    "fedprox-ft": "FedProx + FT",
    "fedminmax": "FedMinMax",
    "fedrep": "FedRep",
    "fedper": "FedPer",
    "lg-fedavg": "LG-FedAvg",
    "feddar-wa": "FedDAR-WA",
    "feddar-sa": "FedDAR-SA",
    "feddar": "feddar (ours)",
}
OURS = ("feddar-wa", "feddar-sa", "feddar")

# The paper's means and standard deviations over five folds, in thousandths, in the order of COLUMNS.
PAPER = {
    "local": "761 23  815 55  838 39  889 76  840 38  759 26  829 32  795 23",
    "separate": "796 22  694 15  788 47  649 133  826 46  606 80  751 26  759 27",
    "fedavg": "830 27  854 45  887 22  834 102  900 38  773 49  861 19  856 20",
    "fedavg-ft": "783 44  835 25  892 15  817 136  892 48  727 93  844 24  845 16",
    "fedavg-separate-ft": "832 32  846 43  903 25  869 99  911 26  784 54  872 17  863 24",
    "fedprox": "834 17  864 56  903 35  880 85  912 30  808 30  879 23  868 12",
    "fedprox-ft": "806 23  842 49  910 25  925 85  898 31  798 25  876 10  858 14",
    "fedminmax": "839 27  867 54  894 39  916 53  903 34  823 32  884 20  872 16",
    "fedrep": "837 20  869 50  888 42  913 83  910 28  812 28  884 25  867 13",
    "fedper": "835 25  865 73  909 37  916 36  911 31  813 47  887 21  873 11",
    "lg-fedavg": "830 29  858 52  906 32  902 50  903 33  814 34  880 19  867 17",
    "feddar-wa": "884 7  896 17  902 34  952 41  928 22  872 15  912 4  898 6",
    "feddar-sa": "888 4  895 38  928 32  939 46  948 16  868 20  919 14  912 1",
}

SCALES: dict[str, dict[str, Any]] = {
    # What `feddar compare exam` uses: a rate at which a network that starts at random learns in 20 rounds.
    "small": {"rounds": 20, "lr": 1e-3, "last": 5},
    "full": {"rounds": 20, "lr": 1e-4, "last": 5, "mu": 0.1, "head_epochs": 5, "weight_decay": 0.0},
}
SECOND_ORDER_K = {"small": None, "full": 16}

COHORT = (
    "Ours are on a **synthetic** cohort with the published site and race shares and label rates, since EXAM is "
    "private: compare the order of methods, not the numbers. Its labels depend on factors that all groups share, with "
    "weights that differ between groups, which is what FedDAR assumes; data made otherwise may favour other methods."
)
DIFFERS = {
    "small": "lr 0.001 (theirs: 0.0001 from a pretrained model; ours start at random), and weight decay 0.001",
    "full": "the paper's own settings (Adam 0.0001, fine-tuning 0.00005, 5 head epochs, mu 0.1), "
    "but models start at random, not from a pretrained one, so 20 rounds at this rate leave them under-trained",
}


def run(options: ExperimentOptions) -> pd.DataFrame:
    """Run the experiment; write `results.csv`, `table.md` and `figure.png`; return the results."""
    scale, settings = common.pick(SCALES, options)
    variants: dict[str, dict[str, Any]] = {name: {"method": name} for name in LABELS}
    variants["feddar-sa"]["k"] = SECOND_ORDER_K[scale]
    trained = train_folds(variants, settings, options)
    text = table(trained.results, scale, options.seeds or SEEDS)
    return common.finish(options.out, trained.results, text, draw_figure, trained)


def train_folds(
    variants: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    options: ExperimentOptions,
    labels: Mapping[str, Mapping[str, str]] | None = None,
) -> Trained:
    """Train named variants (options of `train`) on the same folds of the exam cohort; `labels` add columns."""
    source = BUILT_IN["exam"]
    cohort = source.load(resolve_options(source, "exam", {}), 0)
    repetitions = product(range(FOLDS), range(options.seeds or SEEDS))
    parts = {(fold, seed): partial(cohort.fold, fold, FOLDS, seed) for fold, seed in repetitions}
    cells = [
        Cell(
            {**(labels or {}).get(name, {}), "method": name, "fold": fold, "seed": seed},
            {**source.settings, **settings, **own, "seed": seed},
            data,
            options.out / "runs" / name.replace(" ", "") / f"seed-{seed}-fold-{fold}",
        )
        for name, own in variants.items()
        for (fold, seed), data in parts.items()
    ]
    return common.train_cells(cells, options)


def _beside_paper(ours: tuple[float, float], method: str, column: str) -> str:
    """Return our mean and, if the paper has the method, the paper's, as text."""
    return with_sd(*ours) + (f" / {with_sd(*paper_value(method, column))}" if method in PAPER else "")


def paper_value(method: str, column: str) -> tuple[float, float]:
    """Return the paper's mean and standard deviation."""
    numbers = [int(word) / 1000 for word in PAPER[method].split()]
    place = 2 * COLUMNS.index(column)
    return numbers[place], numbers[place + 1]


def auc_by_column(results: pd.DataFrame) -> dict[tuple[str, str], tuple[float, float]]:
    """Return mean and sd over folds and seeds by (method, column); NaN where all trainings failed."""
    found = across(results[(results["metric"] == "auc") & results["name"].isin(COLUMNS)])
    values = {(row["method"], row["name"]): (row["mean"], row["sd"]) for row in found.to_dict("records")}
    return defaultdict(lambda: (float("nan"), float("nan")), values)


def table(results: pd.DataFrame, scale: str, seeds: int) -> str:
    """Return the Markdown of `table.md`: the paper's layout, ours above the paper's in each cell."""
    ours, k = auc_by_column(results), SECOND_ORDER_K[scale]
    rows = []
    for method, label in LABELS.items():
        rows.append([label, *(_beside_paper(ours[method, column], method, column) for column in COLUMNS)])
    body = markdown(["Methods", *[TITLES.get(column, column) for column in COLUMNS]], rows)
    return f"""# AUC on the synthetic EXAM cohort: ours / the paper's on EXAM

Mean ± standard deviation over {FOLDS} folds{f" and {seeds} seeds" if seeds > 1 else ""}, averaged over the last \
{SCALES[scale]["last"]} of {SCALES[scale]["rounds"]} rounds.

{body}

## FedDAR less each other method

{differences_table(results)}

Mean over paired folds with its 95 % bootstrap interval. {verdict(results)}

## What differs

{COHORT} The encoder is a small network for 32 x 32 images and 20 values, not the paper's. Scale `{scale}`: \
{DIFFERS[scale]}; second order has {"no projection" if k is None else f"a projection to k = {k}"}. `feddar` is what we \
recommend: FedDAR-WA with weights, heads and corrections by evidence (`feddar methods`); it is not the paper's. \
All methods share data, folds, seeds and settings, apart from that.
"""


def differences_table(results: pd.DataFrame) -> str:
    """Return the gains of our rows over each baseline in the three summaries, as Markdown."""
    rows = []
    for method, label in LABELS.items():
        if method not in OURS:
            gains = [gain(results, ours, method, column) for ours in OURS for column in TITLES]
            rows.append([label, *[f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" for mean, low, high in gains]])
    return markdown(["over", *[f"{_short(ours)} {title}" for ours in OURS for title in TITLES.values()]], rows)


def _short(ours: str) -> str:
    return ours.removeprefix("feddar-").upper() if "-" in ours else ours


def gain(results: pd.DataFrame, method: str, reference: str, column: str) -> tuple[float, float, float]:
    """Return the mean difference of a method's AUC from the reference's, and its interval."""
    both = results[results["method"].isin([method, reference]) & (results["metric"] == "auc")]
    for row in paired_differences(both[both["name"] == column], reference).to_dict("records"):
        return row["difference"], row["low"], row["high"]
    return (float("nan"),) * 3


def verdict(results: pd.DataFrame) -> str:
    """Return sentences on how many baselines FedDAR is above, and for how many that is clear."""
    said = []
    for ours in OURS:
        for column in ("domain_avg", "domain_min"):
            gains = {name: gain(results, ours, name, column) for name in LABELS if name not in OURS}
            above = [name for name, (mean, _, _) in gains.items() if mean > 0]
            clear = [name for name, (_, low, _) in gains.items() if low > 0]
            rest = ", ".join(LABELS[name] for name in gains if name not in above)
            said.append(
                f"{LABELS[ours]} is above {len(above)} of {len(gains)} baselines in {TITLES[column]}, for {len(clear)} "
                f"of them by more than the interval{f'; not above {rest}' if rest else ''}."
            )
    return " ".join(said)


def with_sd(mean: float, sd: float) -> str:
    """Return an AUC in the paper's format: .861 ± .019."""
    return UNDEFINED if isnan(mean) else f"{paper_number('auc', mean)} ± {paper_number('auc', sd)}"


def draw_figure(results: pd.DataFrame, path: Path) -> None:
    """Draw our means with standard deviations and the paper's, by method, in three panels."""
    ours = auc_by_column(results)
    methods = list(LABELS)[::-1]
    with plots.canvas(path, width=9.5, height=4.6, panels=3) as (figure, panels):
        for axes, column in zip(panels, TITLES, strict=True):
            for place, method in enumerate(methods):
                mean, sd = ours[method, column]
                paper = paper_value(method, column)[0] if method in PAPER else None
                mark(axes, place, mean, sd, paper, method in OURS)
            names = [LABELS[method] for method in methods]
            label_rows(axes, names if axes is panels[0] else None, len(names), column)
        explain_marks(figure)


def mark(axes: Axes, place: int, mean: float, sd: float, paper: float | None, ours: bool) -> None:
    """Draw one row: our mean and standard deviation, and the paper's mean, if it has one."""
    colour = plots.COLOURS["feddar-sa"] if ours else plots.INK
    axes.plot([mean - sd, mean + sd], [place, place], color=colour, linewidth=2, solid_capstyle="round")
    axes.plot(mean, place, "o", color=colour, markersize=6)
    if paper is not None:
        axes.plot(paper, place, "D", markersize=5, markerfacecolor="none", markeredgecolor=plots.MUTED)


def label_rows(axes: Axes, names: list[str] | None, count: int, column: str) -> None:
    """Label the rows of the first panel, and set the title of a panel."""
    axes.set_yticks(range(count), names or [""] * count)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    titles = {"domain_min": "Worst domain", "domain_avg": "Mean over domains", "client_avg": "Mean over clients"}
    axes.set(title=titles[column], xlabel="AUC")


def explain_marks(figure: Figure) -> None:
    """Add a line that explains the marks."""
    text = f"●  synthetic cohort, mean ± sd of {FOLDS} folds      ◇  the paper, on EXAM"
    figure.suptitle(text, x=0.01, horizontalalignment="left", color=plots.MUTED, fontsize=8)
