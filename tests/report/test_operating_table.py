"""The table of the operating point on the terminal."""

from io import StringIO

import numpy as np
import torch
from rich.console import Console

from feddar.data.cohort import Cohort
from feddar.evaluation.figures import figures_from_scores
from feddar.report.operating_point import show_operating_point


def printed(threshold):
    rng = np.random.default_rng(0)
    scores = rng.normal(-1, 1.5, 400)
    y = (rng.random(400) < 1 / (1 + np.exp(-scores))).astype(int)
    domain = np.where(np.arange(400) < 380, "large", "small")
    cohort = Cohort.from_arrays(scores[:, None], y, domain=domain, client=["x"] * 400)
    figures = figures_from_scores(cohort, torch.from_numpy(scores)[:, None], np.full((2, 1), threshold))
    console = Console(width=160, record=True, file=StringIO())
    show_operating_point(console, figures)
    return console.export_text(), figures


def test_it_has_intervals_and_their_kind_and_marks_few_positives():
    text, figures = printed(0.3)
    assert "with 95 % intervals (bootstrap by sample)" in text and "mean nothing" not in text
    found = figures.by_domain["large"]["sensitivity"]
    assert f"{found.value:.2f}"[1:] in text and f"{found.low:.2f}"[1:] in text
    assert figures.by_domain["small"]["sensitivity"].positives < 10 and "* fewer than 10 positives" in text


def test_where_nobody_is_flagged_it_says_that_gaps_mean_nothing():
    assert "Nobody is flagged at this operating point" in " ".join(printed(0.9999)[0].split())
