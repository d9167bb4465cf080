"""The paper's ablation: re-weighting, multi-head, domain as input, alternating, projection and aggregation, one by one.

Every row is FedAvg with some of the options that make it FedDAR, trained on the same folds of the synthetic `exam`
cohort with the same settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.experiments import common
from feddar.experiments import exam_table as exam
from feddar.experiments.common import ExperimentOptions
from feddar.experiments.exam_table import FOLDS, TITLES, gain, train_folds
from feddar.report import plots
from feddar.report.markdown import markdown
from feddar.report.numbers import paper_number

PROJECTION = 16
MARK = "✓"


@dataclass(frozen=True)
class Variant:
    """One row of the table: its components, and the paper's domain average, worst domain and client average."""

    parts: str
    aggregation: str
    paper: tuple[float, float, float]

    @property
    def name(self) -> str:
        """FedAvg and the components added to it, as text."""
        added = [*self.parts.split(), *([] if self.aggregation == "N/A" else [self.aggregation])]
        return " + ".join(["FedAvg", *added])

    def has(self, part: str) -> bool:
        """Whether it has the component."""
        return part in self.parts.split()

    def options(self) -> dict[str, Any]:
        """Return the options of `train`."""
        return {
            "method": "fedavg",
            "reweight": self.has("RW"),
            "multi_head": self.has("MH"),
            "domain_input": self.has("DI"),
            "alternating": self.has("Alter"),
            "k": PROJECTION if self.has("Proj") else None,
            "aggregation": "second-order" if self.aggregation == "SA" else "average",
        }


PARTS = ("RW", "MH", "DI", "Alter", "Proj")
VARIANTS = (
    Variant("", "N/A", (0.861, 0.773, 0.856)),
    Variant("RW", "N/A", (0.881, 0.824, 0.873)),
    Variant("RW DI", "N/A", (0.880, 0.825, 0.866)),
    Variant("RW MH", "WA", (0.885, 0.834, 0.870)),
    Variant("RW MH Proj", "WA", (0.877, 0.817, 0.870)),
    Variant("RW MH Proj", "SA", (0.878, 0.826, 0.871)),
    Variant("RW DI Alter", "N/A", (0.867, 0.806, 0.852)),
    Variant("RW MH Alter", "WA", (0.912, 0.872, 0.898)),
    Variant("RW MH Alter Proj", "WA", (0.918, 0.863, 0.904)),
    Variant("RW MH Alter Proj", "SA", (0.919, 0.868, 0.912)),
)
SUMMARIES = ("domain_avg", "domain_min", "client_avg")

CLAIMS = (
    ("re-weighting raises the worst domain", 1, 0, "domain_min", "higher"),
    ("multi-head alone adds nothing to re-weighting", 3, 1, "domain_avg", "alike"),
    ("alternating raises multi-head", 7, 3, "domain_avg", "higher"),
    ("the domain as input is below multi-head with alternating", 2, 7, "domain_avg", "lower"),
    ("alternating does not suit the domain as input", 6, 2, "domain_avg", "lower"),
    ("second order is above the average, with projection", 9, 8, "domain_avg", "higher"),
)
"""The paper's claims about its rows: the first minus the second is above zero, below zero, or about zero."""


def run(options: ExperimentOptions) -> pd.DataFrame:
    """Run the experiment; write `results.csv`, `table.md` and `figure.png`; return the results."""
    scale, settings = common.pick(exam.SCALES, options)
    variants = {variant.name: variant.options() for variant in VARIANTS}
    labels = {variant.name: columns(variant) for variant in VARIANTS}
    trained = train_folds(variants, settings, options, labels)
    return common.finish(options.out, trained.results, table(trained.results, scale), draw_figure, trained)


def columns(variant: Variant) -> dict[str, str]:
    """Return the first columns of the results: yes or no for each component, and how heads are aggregated."""
    return {part: "yes" if variant.has(part) else "no" for part in PARTS} | {"AGG": variant.aggregation}


def table(results: pd.DataFrame, scale: str) -> str:
    """Return the Markdown of `table.md`: the paper's layout with its numbers beside ours, then its claims."""
    ours = exam.auc_by_column(results)
    rows = []
    for variant in VARIANTS:
        marks = [MARK if variant.has(part) else "" for part in PARTS]
        found = [exam.with_sd(*ours[variant.name, column]) for column in SUMMARIES]
        paper = [paper_number("auc", value) for value in variant.paper]
        rows.append([*marks, variant.aggregation, *found, *paper])
    titles = [TITLES[column] for column in SUMMARIES]
    body = markdown([*PARTS, "AGG", *titles, *[f"{title}, paper" for title in titles]], rows)
    return f"""# What each component adds, on the synthetic EXAM cohort

AUC, mean ± standard deviation over {FOLDS} folds, averaged over the last {exam.SCALES[scale]["last"]} of \
{exam.SCALES[scale]["rounds"]} rounds. RW: re-weighting, MH: a head for each domain, DI: the domain as an input of the \
head, Alter: heads and encoder in turn, Proj: projection to k = {PROJECTION}, AGG: how heads are combined.

{body}

## What the paper says of these rows, and what is seen here

{claims_table(results)}

Each figure is the first row less the second, over paired folds, with its 95 % bootstrap interval.

Read DI with care: the domain as an input of a linear head is a constant for each domain, which moves all risks of a
domain alike and so cannot change the order of its samples; its AUC changes through the encoder alone.

## What differs

{exam.COHORT} Scale `{scale}`: {exam.DIFFERS[scale]}.
"""


def claims_table(results: pd.DataFrame) -> str:
    """Return, for each claim, the difference it is about, here and in the paper, as Markdown."""
    rows = []
    for claim, first, second, column, expected in CLAIMS:
        a, b = VARIANTS[first], VARIANTS[second]
        mean, low, high = gain(results, a.name, b.name, column)
        found = "higher" if low > 0 else "lower" if high < 0 else "alike"
        seen = "yes" if found == expected else "not clear" if found == "alike" else f"no: it is {found}"
        place = SUMMARIES.index(column)
        paper = a.paper[place] - b.paper[place]
        rows.append([claim, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", seen, f"{paper:+.3f}", TITLES[column]])
    return markdown(["the paper says", "here", "seen here", "in the paper", "in"], rows)


def draw_figure(results: pd.DataFrame, path: Path) -> None:
    """Draw domain average and worst domain of each row, ours and the paper's."""
    ours = exam.auc_by_column(results)
    with plots.canvas(path, width=9, height=4.2, panels=2) as (figure, panels):
        for axes, column in zip(panels, SUMMARIES[:2], strict=True):
            for place, variant in enumerate(VARIANTS[::-1]):
                mean, sd = ours[variant.name, column]
                exam.mark(axes, place, mean, sd, variant.paper[SUMMARIES.index(column)], variant.has("Alter"))
            names = [variant.name for variant in VARIANTS[::-1]]
            exam.label_rows(axes, names if axes is panels[0] else None, len(names), column)
        exam.explain_marks(figure)
