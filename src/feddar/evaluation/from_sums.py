"""Evaluation between sites: each sends sums over its test samples by domain, and never single predictions.

The objective defines the sums and the metrics from them (``Objective.sums`` and ``measure_sums``); this module adds
the sums of sites.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from feddar.evaluation.metrics import COLUMNS, summarise
from feddar.lazy import pandas as pd
from feddar.objectives import Objective
from feddar.objectives.objective import Sums
from feddar.objectives.score_bins import next_score_range

ENOUGH = 30
"""With fewer test samples of a domain at a site, its AUC from sums is too low by more than 0.006 on average: bins hold
at least five patients."""


def metrics_from_sums(objective: Objective, sums: Mapping[str | None, Sums], domains: tuple[str, ...]) -> pd.DataFrame:
    """Return the frame that ``metrics.evaluate`` would for all predictions, from the sums of each client.

    Of clients whose sums come added up, under None, there are no metrics of their own.
    """
    if not sums:
        return pd.DataFrame(columns=COLUMNS)
    by_client = {name: np.stack([each[name].numpy() for each in sums.values()]) for name in next(iter(sums.values()))}
    parts = {
        ("all", "all"): {name: values.sum((0, 1)) for name, values in by_client.items()},
        **{("domain", domain): {n: v[:, m].sum(0) for n, v in by_client.items()} for m, domain in enumerate(domains)},
        **{
            ("client", client): {n: v[i].sum(0) for n, v in by_client.items()}
            for i, client in enumerate(sums)
            if client
        },
    }
    rows = []
    for (scope, name), part in parts.items():
        count = int(part["numbers"][0])
        if count:
            found = objective.measure_sums(**part)
            rows += [(scope, name, metric, float(found[metric]), count) for metric in objective.metrics]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return pd.concat([frame, summarise(frame)], ignore_index=True)


def about_coarse_bins(results: pd.DataFrame, sites: int) -> str | None:
    """Return a sentence on domains of which sites have too few test samples for histograms; None if there are none."""
    areas = results[(results["scope"] == "domain") & (results["metric"] == "auc") & results["value"].notna()]
    coarse = areas[areas["count"] < ENOUGH * sites]
    if coarse.empty:
        return None
    listed = ", ".join(f"{name} ({count:,})" for name, count in zip(coarse["name"], coarse["count"], strict=True))
    return (
        f"Test samples of {listed} are few for {sites} sites: sites send bins of neighbouring scores that hold several "
        f"patients each, and with fewer than {ENOUGH} samples a site these are so wide that AUC may be much too low."
    )


def refined_score_range(sums: Mapping[str | None, Sums], score_range: Tensor | None) -> Tensor | None:
    """Return the score range in which the next round's bins are narrow, from this round's histograms."""
    counts = [each["histogram"].sum((0, 2)).double() for each in sums.values() if "histogram" in each]
    return next_score_range(torch.stack(counts).sum(0), score_range) if counts else score_range
