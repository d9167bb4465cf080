"""FedDAR beside FedAvg on the synthetic exam cohort, where domains differ (1) and where they do not (0): 5 folds.

Where domains agree, separate heads and re-weighting can only cost; FedDAR must not lose to FedAvg by more than noise.
Each fold's models are also scored on a fresh draw four times as large, which shows differences that a fold cannot.
"""

import os
from collections.abc import Iterator

import numpy as np
import pandas as pd

import feddar
from benchmarks.figures import Figure
from feddar.data.sources import BUILT_IN
from feddar.data.sources import exam_cases as exam
from feddar.data.sources.exam import exam_cohort

FOLDS, FRESH_SEED = 5, 1
VARIANTS = {"feddar": {}, "feddar-sa": {}, "fedavg": {}, "fedavg, re-weighted": {"method": "fedavg", "reweight": True}}


def auc(frame: pd.DataFrame) -> dict[str, float]:
    summary = frame.query("scope == 'summary' and metric == 'auc'")
    return dict(zip(summary["name"], summary["value"], strict=True))


def figures() -> Iterator[Figure]:
    source = BUILT_IN["exam"]
    for difference in (1.0, 0.0):
        cohort = source.load(source.options(data="exam", difference=difference), 0)
        fresh = exam_cohort(exam.draw_counts(exam.case_counts() * 4, FRESH_SEED, difference))
        rows = []
        for fold, (train, test) in enumerate(cohort.folds(FOLDS)):
            for name, options in VARIANTS.items():
                settings = {"method": name, "jobs": os.cpu_count() or 1} | source.settings | options
                run = feddar.train(train, test=test, **settings)
                for where, found in (("fold", auc(run.results())), ("fresh draw", auc(run.evaluate(fresh)))):
                    rows += [(where, summary, name, fold, value) for summary, value in found.items()]
        print(f"difference {difference:g}: AUC, mean of {FOLDS} folds; gain over fedavg and its standard error")
        table = pd.DataFrame(rows, columns=["where", "summary", "method", "fold", "auc"])
        table = table.pivot_table(index=["where", "summary", "method"], columns="fold", values="auc")
        for where, summary, name in table.index:
            values, base = table.loc[where, summary, name], table.loc[where, summary, "fedavg"]
            gain, error = (values - base).mean(), (values - base).std() / np.sqrt(FOLDS)
            print(f"  {where:10} {summary:10} {name:19} {values.mean():.3f}  {gain:+.4f} +- {error:.4f}", flush=True)
            if where == "fold" and name == "feddar" and summary in ("domain_avg", "domain_min"):
                what = f"feddar over fedavg, {summary} AUC on exam with difference {difference:g}, standard errors"
                yield Figure(what, gain / error, ">= -2", f"{gain:+.4f} +- {error:.4f} in {FOLDS} folds")
