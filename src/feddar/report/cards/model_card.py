"""The model card of a run: everything that its folder says, in sections named after the items of TRIPOD+AI.

TRIPOD+AI (Collins et al., BMJ 2024;385:e078378) lists what a report of a prediction model should say. What a folder
cannot know is a question to the author, and what an older folder does not hold is named with the way to get it.
"""

from __future__ import annotations

from pathlib import Path

from feddar.report.cards.content import Card
from feddar.report.cards.data_sections import data_sections
from feddar.report.cards.result_sections import result_sections
from feddar.report.cards.trained_run import TrainedRun, tested_in, with_interval
from feddar.report.cards.use_sections import use_sections
from feddar.report.folders import is_synthetic
from feddar.report.numbers import counted, metric_name, number


def read_card(folder: Path) -> Card:
    """Return the model card of the run in a folder, with all questions open."""
    run = TrainedRun.read(folder)
    positive = run.objective.positive
    what = run.role("target") or (run.objective.kind if positive is None else str(positive))
    synthetic = f"Synthetic data. The cohort “{run.files.data}” is made by a computer: no patient stands behind it."
    return Card(
        f"Model card: {what} by {run.files.method}",
        f"{_model(run)} {_findings(run)}",
        synthetic if is_synthetic(run.files.data) else "",
        (*data_sections(run), *result_sections(run), *use_sections(run)),
    )


def _model(run: TrainedRun) -> str:
    """Return a sentence on what the model is."""
    columns = run.cohort.columns
    inputs = counted(columns, "column") if columns else "its inputs"
    where = f" at {counted(run.sites, 'site')}" if run.sites else " at several sites" if run.between_sites else ""
    samples = f"{sum(run.trained.values()):,} samples{where}, in {counted(run.cohort.domains, 'domain')}"
    return f"This model predicts {run.outcome} from {inputs}, by the method {run.files.method}, trained on {samples}."


def _findings(run: TrainedRun) -> str:
    """Return a sentence on how good it is."""
    if not run.overall:
        return "How good it is, this folder does not say."
    metric = run.files.metric
    ends = [f"{number(figure.value, metric=metric)} ({domain})" for domain, figure in run.ranked.items()]
    by_domain = f"by domain it goes from {ends[0]} to {ends[-1]}" if ends else "it is undefined in every domain"
    value = with_interval(run.overall[metric], metric, "95 % interval ")
    return f"On {tested_in(run.overall):,} held-out samples its {metric_name(metric)} is {value}; {by_domain}."
