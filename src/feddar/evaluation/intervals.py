"""Statistics of a comparison: means over folds and seeds, and paired differences with bootstrap intervals.

Both are functions of ``results.csv`` alone (method, fold, seed, scope, name, metric, value, count), so every number
that a table or a page shows can be recomputed from that file.

A paired difference is taken within each (fold, seed), where all methods saw the same samples and the same initial
weights. Its interval is the percentile bootstrap of the mean difference over these pairs, with the quantiles moved
outwards so that few pairs do not give too narrow an interval (Hesterberg, *What Teachers Should Know About the
Bootstrap*, 2015: the "expanded percentile" interval). Two to four pairs are too few for a bootstrap; they get
Student's t interval, which is wide. So few pairs also cannot show how far such differences scatter, so nothing is
called clearly better or worse from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

UNIT = ["fold", "seed"]
FIGURE = ["scope", "name", "metric"]
RESULTS_COLUMNS = ["method", *UNIT, *FIGURE, "value", "count"]

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 5
"""With fewer values the interval is Student's, not a bootstrap, and no difference is called clear."""


def across(results: pd.DataFrame) -> pd.DataFrame:
    """Return mean and sd over folds and seeds by method, scope, name, metric; ``pairs`` is the number of values."""
    grouped = results.groupby(["method", *FIGURE], sort=False)["value"]
    return grouped.agg(mean="mean", sd="std", pairs="count").reset_index()


def paired_differences(results: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return the mean difference of each method from the reference, with an interval, for each scope, name and metric.

    Columns: method, scope, name, metric, difference, low, high, pairs. Undefined values leave their pair out; with
    fewer than two pairs there is no interval (NaN).
    """
    base = results[results["method"] == reference].set_index([*UNIT, *FIGURE])["value"]
    others = results[results["method"] != reference]
    paired = others.join(base.rename("base"), on=[*UNIT, *FIGURE])
    paired["difference"] = paired["value"] - paired["base"]
    rows = []
    for key, group in paired.groupby(["method", *FIGURE], sort=False):
        differences = group["difference"].dropna().to_numpy()
        mean = float(differences.mean()) if len(differences) else float("nan")
        rows.append((*key, mean, *bootstrap_interval(differences), len(differences)))
    return pd.DataFrame(rows, columns=["method", *FIGURE, "difference", "low", "high", "pairs"])


def is_clear(low: float, high: float, pairs: int) -> bool:
    """Return whether a difference may be called clear: of enough pairs, with an interval that leaves out zero."""
    return pairs >= FEWEST and (low > 0 or high < 0)


def kinds_of_intervals(pairs: Iterable[int]) -> str:
    """Return in words which kinds of intervals differences of so many pairs have; empty if none has one.

    >>> kinds_of_intervals([5, 5]), kinds_of_intervals([3, 2]), kinds_of_intervals([1])
    ('bootstrap', "Student's", '')
    >>> kinds_of_intervals([4, 5])
    "bootstrap (with fewer than five pairs, Student's)"
    """
    counted = [count for count in pairs if count > 1]
    few = [count < FEWEST for count in counted]
    if all(few):
        return "Student's" if few else ""
    return "bootstrap (with fewer than five pairs, Student's)" if any(few) else "bootstrap"


def bootstrap_interval(values: NDArray[np.floating] | Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95% interval of the mean of values (see above); the same values always give the same interval."""
    from scipy.special import ndtr, stdtrit  # scipy.stats has them too, and takes seconds to import

    sample = np.sort(np.asarray(values, dtype=np.float64))  # so that their order does not matter
    n = len(sample)
    if n < 2:
        return float("nan"), float("nan")
    quantile = stdtrit(n - 1, (1 + LEVEL) / 2)
    if n < FEWEST:
        half = quantile * sample.std(ddof=1) / np.sqrt(n)
        return float(sample.mean() - half), float(sample.mean() + half)
    resampled = sample[np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))].mean(1)
    tail = float(ndtr(-np.sqrt(n / (n - 1)) * quantile))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)
