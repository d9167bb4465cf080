"""The figures of one model on its test samples: by domain and over all, each with a 95 % interval.

They are the objective's metrics and, for yes/no outcomes, calibration (slope, intercept, expected calibration error and
curve), the rates of decisions at a threshold, and the decision curve (net benefit). Where all samples are on this
machine they are exact. Between sites they come from the histograms of scores that sites send in any case.

An interval has the middle 95 % of the figure's values in resamples (see ``tested``). It is moved so that their median
is the figure itself, since some figures are larger in almost every resample: calibration errors, gaps of domains.
Where all resamples are alike, they do not say how certain a figure is: shares of none or all of the samples then have
the exact interval of Clopper and Pearson (1934), if no patient is known to have several samples; others have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.evaluation.tested import Resampled, Tested, TestedCounts, TestedSamples, Values
from feddar.lazy import pandas as pd
from feddar.objectives import Objective
from feddar.objectives.objective import Metrics, Sums
from feddar.objectives.risks import GROUPS

TAILS = (2.5, 97.5)
EXACT = "exact"
"""The kind of the intervals of shares of none or all of the samples."""
THRESHOLDS = np.arange(1, 100) / 100
"""The thresholds of decision curves."""
RATES = ("sensitivity", "specificity", "ppv", "npv", "selection_rate")
GAP = "domain_gap"
SHARES = {"auc", "auprc", "accuracy", "brier", "ece", "tpr", "fpr", *RATES}
ERRORS = {"log_loss", "mse", "rmse", "mae"}

TABLE_COLUMNS = ["scope", "name", "metric", "value", "low", "high", "count", "positives", "interval"]
CALIBRATION_COLUMNS = ["scope", "name", "outcome", "group", "predicted", "observed", "low", "high", "count"]
DECISION_COLUMNS = ["scope", "name", "outcome", "threshold", "net_benefit", "low", "high", "flag_all"]


Rows = Iterator[tuple[str | float, ...]]


@dataclass(frozen=True)
class Figure:
    """A figure with its interval; what is unknown is NaN."""

    value: float
    low: float
    high: float
    count: int
    """The samples it is computed from; for a gap, the domains."""
    positives: float
    """The samples with the outcome among them; NaN if it is not of one yes/no outcome."""
    interval: str
    """How the interval was computed; empty if there is none."""


@dataclass(frozen=True)
class Figures:
    """The figures of one model, as three tables."""

    table: pd.DataFrame
    """One row for each figure: scope (domain, all, summary), name, metric, and the fields of ``Figure``.

    Differences between domains are in scope ``summary`` under the name ``domain_gap``. The figures of one of several
    outcomes have its name at the end: ``auc:NAME``.
    """
    calibration: pd.DataFrame
    """Of each tenth of the samples by risk: mean predicted risk, observed share with its interval, and samples."""
    decisions: pd.DataFrame
    """The net benefit at each threshold, with its interval, and that of flagging everybody."""

    @property
    def by_domain(self) -> dict[str, dict[str, Figure]]:
        """Each figure of each domain: domain -> metric -> figure."""
        rows = self.table[self.table["scope"] == "domain"]
        return {str(name): _by_metric(part) for name, part in rows.groupby("name", sort=False)}

    @property
    def overall(self) -> dict[str, Figure]:
        """Each figure over all samples, by metric."""
        return _by_metric(self.table[self.table["scope"] == "all"])

    @property
    def gaps(self) -> dict[str, Figure]:
        """The largest difference between domains of each metric that has one."""
        return _by_metric(self.table[self.table["name"].eq(GAP) & self.table["scope"].eq("summary")])


def _by_metric(rows: pd.DataFrame) -> dict[str, Figure]:
    columns = ["metric", *(field.name for field in fields(Figure))]
    return {str(metric): Figure(*values) for metric, *values in rows[columns].itertuples(index=False)}


def figures_from_scores(test: Cohort, scores: Tensor, thresholds: Values | None = None) -> Figures:
    """Return the figures of scores [n, outputs] of test samples; ``thresholds`` are by domain and outcome [M, O]."""
    return _figures(TestedSamples.of(test, scores, thresholds))


def figures_from_sums(
    objective: Objective,
    sums: Sequence[Sums],
    domains: Sequence[str],
    score_range: Tensor | None,
    thresholds: Values | None = None,
) -> Figures | None:
    """Return the figures of the sums that sites sent, whose bins are those of ``score_range``; None if none did."""
    names = sums[0] if sums else ()
    total = {name: np.sum([each[name].double().numpy() for each in sums], axis=0) for name in names}
    if not total or not total["numbers"][:, 0].any():
        return None
    return _figures(TestedCounts.of(objective, total, domains, score_range, thresholds))


class _Estimates(NamedTuple):
    """Figures of all parts; in front there may be an axis of resamples."""

    metrics: Metrics
    """The figures that have one number for a part, [..., parts], and gaps between domains, [..., 1]."""
    observed: Values
    """The observed shares of calibration curves, [..., parts, outcomes, groups]."""
    benefit: Values
    """Net benefits, [..., parts, outcomes, thresholds]."""


def _figures(tested: Tested) -> Figures:
    """Return the tables of figures and their intervals."""
    value, drawn = _estimates(tested), _resampled_estimates(tested)
    return Figures(
        pd.DataFrame(_table_rows(tested, value.metrics, _intervals(tested, value, drawn)), columns=TABLE_COLUMNS),
        pd.DataFrame(_curve_rows(tested, _interval(value.observed, drawn.observed, 0, 1)), columns=CALIBRATION_COLUMNS),
        pd.DataFrame(
            _decision_rows(tested, value.benefit, _interval(value.benefit, drawn.benefit)), columns=DECISION_COLUMNS
        ),
    )


def _estimates(tested: Tested) -> _Estimates:
    """Return the figures themselves."""
    outcomes = tested.objective.risk_outcomes
    shape = (len(tested.counts), len(outcomes))
    observed, benefit = np.empty((*shape, GROUPS)), np.empty((*shape, len(THRESHOLDS)))
    metrics = dict(tested.metrics)
    for o, outcome in enumerate(outcomes):
        found = []
        for part, risks in enumerate(each[o] for each in tested.risks):
            groups = risks.tenths()
            observed[part, o], benefit[part, o] = risks.curve(groups)[0], risks.net_benefit(THRESHOLDS)
            found.append(risks.calibration(groups))
        metrics |= {f"{name}{outcome}": np.array([float(each[name]) for each in found]) for name in found[0]}
    return _Estimates(_with_decisions(tested.objective, metrics, tested.flags), observed, benefit)


def _resampled_estimates(tested: Tested) -> _Estimates:
    """Return the figures of all resamples, in which the groups of calibration curves stay the same."""
    groups = [np.stack([part.tenths() for part in each.parts()]) for each in tested.coarse]
    drawn = [_of_resamples(tested.objective, each, groups) for each in tested.resamples()]
    metrics = {name: np.concatenate([each.metrics[name] for each in drawn]) for name in drawn[0].metrics}
    return _Estimates(metrics, *(np.concatenate(each) for each in zip(*(d[1:] for d in drawn), strict=True)))


def _of_resamples(objective: Objective, drawn: Resampled, groups: Sequence[NDArray[np.int64]]) -> _Estimates:
    metrics, shape = dict(drawn.metrics), (*drawn.flags.shape[:3],)
    observed, benefit = np.empty((*shape, GROUPS)), np.empty((*shape, len(THRESHOLDS)))
    for o, (outcome, risks) in enumerate(zip(objective.risk_outcomes, drawn.risks, strict=True)):
        metrics |= {f"{name}{outcome}": values for name, values in risks.calibration(groups[o]).items()}
        observed[:, :, o], benefit[:, :, o] = risks.curve(groups[o])[0], risks.net_benefit(THRESHOLDS)
    return _Estimates(_with_decisions(objective, metrics, drawn.flags), observed, benefit)


def _with_decisions(objective: Objective, metrics: Metrics, flags: Values) -> Metrics:
    """Return the metrics with the rates of decisions, and gaps between domains."""
    with np.errstate(invalid="ignore"):  # 0 / 0 is undefined
        rates = {name: hits / of for name, (hits, of) in _shares(objective, flags).items()}
    known = metrics | rates
    if "sensitivity" in known:
        known |= {"tpr": known["sensitivity"], "fpr": 1 - known["specificity"]}
    gaps = {f"{GAP}/{name}": _gap(known[name][..., :-1]) for name in objective.gaps if name in known}
    return metrics | rates | gaps


def _shares(objective: Objective, flags: Values) -> dict[str, tuple[Values, Values]]:
    """Return how many samples each rate of decisions counts, and among how many.

    They come from samples without and with each outcome, not flagged and flagged, [..., outcomes, 2, 2].
    """
    found: dict[str, tuple[Values, Values]] = {}
    for o, outcome in enumerate(objective.risk_outcomes):
        true, false = flags[..., o, 1, 1], flags[..., o, 0, 1]
        missed, cleared = flags[..., o, 1, 0], flags[..., o, 0, 0]
        shares = {
            "sensitivity": (true, true + missed),
            "specificity": (cleared, cleared + false),
            "ppv": (true, true + false),
            "npv": (cleared, cleared + missed),
            "selection_rate": (true + false, flags[..., o, :, :].sum((-2, -1))),
        }
        found |= {f"{name}{outcome}": counts for name, counts in shares.items()}
    return found


def _right(tested: Tested, metrics: Metrics, drawn: Metrics) -> dict[str, tuple[Values, Values]]:
    """Return how many samples are classified rightly, of each outcome, and among how many, if resamples have it."""
    names = [f"accuracy{outcome}" for outcome in tested.objective.risk_outcomes or ("",)]
    of = tested.counts.astype(np.float64)
    return {name: (metrics[name] * of, of) for name in names if name in drawn}


def _gap(values: Values) -> Values:
    """Return the largest difference between domains [..., domains], as [..., 1]; NaN if fewer than two are defined."""
    defined = ~np.isnan(values)
    span = np.where(defined, values, -np.inf).max(-1) - np.where(defined, values, np.inf).min(-1)
    return np.where(defined.sum(-1) > 1, span, np.nan)[..., None]


def bounds(name: str) -> tuple[float, float]:
    """Return between which numbers a figure lies."""
    kind = name.removeprefix(f"{GAP}/").split(":")[0]
    low = 0 if kind in SHARES | ERRORS or name.startswith(GAP) else -np.inf
    return low, 1 if kind in SHARES or kind == "r2" else np.inf


class _Intervals(NamedTuple):
    """The ends of the intervals of one figure, by part, and their kinds (empty where there is none)."""

    low: Values
    high: Values
    kinds: NDArray[np.str_]


def _intervals(tested: Tested, value: _Estimates, drawn: _Estimates) -> dict[str, _Intervals]:
    """Return the intervals of each figure."""
    shares = (
        _shares(tested.objective, tested.flags) | _right(tested, value.metrics, drawn.metrics)
        if tested.independent
        else {}
    )
    found = {}
    for name, values in value.metrics.items():
        low, high = _with_width(*_interval(values, drawn.metrics.get(name), *bounds(name)))
        kinds = np.where(np.isnan(low), "", tested.interval)
        if name in shares:
            hits, of = shares[name]
            low, high = _exact_at_ends(low, high, hits, of)
            kinds = np.where(_at_ends(hits, of), EXACT, kinds)
        found[name] = _Intervals(low, high, kinds)
    return found


def _with_width(low: Values, high: Values) -> tuple[Values, Values]:
    """Return intervals, NaN where all resamples were alike: they do not say how certain the figure is."""
    none = np.isclose(low, high, rtol=1e-9, atol=0)
    return np.where(none, np.nan, low), np.where(none, np.nan, high)


def _at_ends(hits: Values, of: Values) -> NDArray[np.bool_]:
    """Return whether a share is of none or all of some samples."""
    ends: NDArray[np.bool_] = (of > 0) & ((hits == 0) | (hits == of))
    return ends


def _exact_at_ends(low: Values, high: Values, hits: Values, of: Values) -> tuple[Values, Values]:
    """Return the intervals of shares, where none or all of the samples count the exact ones of Clopper and Pearson."""
    ends, every = _at_ends(hits, of), hits == of
    tail = (TAILS[0] / 100) ** (1 / np.maximum(of, 1))
    return np.where(ends, np.where(every, tail, 0), low), np.where(ends, np.where(every, 1, 1 - tail), high)


def _interval(
    value: Values, drawn: Values | None, least: float = -np.inf, most: float = np.inf
) -> tuple[Values, Values]:
    """Return the interval of figures from those of resamples; NaN where most of these are undefined."""
    if drawn is None or not value.size:
        return np.full_like(value, np.nan), np.full_like(value, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all resamples may be undefined
        low, middle, high = np.nanpercentile(drawn, (TAILS[0], 50, TAILS[1]), axis=0)
    enough = np.isnan(drawn).mean(0) < 0.5
    moved = (np.clip(np.where(enough, value + end - middle, np.nan), least, most) for end in (low, high))
    lower, upper = moved
    return lower, upper


def _parts(tested: Tested) -> list[tuple[str, str]]:
    """Return scope and name of each part."""
    return [*(("domain", name) for name in tested.names), ("all", "all")]


def _table_rows(tested: Tested, metrics: Metrics, intervals: dict[str, _Intervals]) -> Rows:
    """Yield the rows of the table of figures, part by part, and then the gaps."""
    ends = tested.objective.risk_outcomes
    positives = {end: tested.flags[:, o, 1].sum(-1) for o, end in enumerate(ends)}

    def row(metric: str, part: int) -> tuple[float, float, float, str]:
        low, high, kinds = intervals[metric]
        return float(metrics[metric][part]), float(low[part]), float(high[part]), str(kinds[part])

    for part, (scope, name) in enumerate(_parts(tested)):
        count = int(tested.counts[part])
        for metric in (each for each in metrics if not each.startswith(GAP)):
            end = next((end for end in ends if end and metric.endswith(end)), "")
            having = float(positives[end][part]) if end in positives else np.nan
            value, low, high, kind = row(metric, part)
            yield scope, name, metric, value, low, high, count, having, kind
        for o, end in enumerate(ends):
            at = float(tested.thresholds[part, o])
            yield scope, name, f"threshold{end}", at, np.nan, np.nan, count, float(positives[end][part]), ""
    for metric in (each for each in metrics if each.startswith(GAP)):
        value, low, high, kind = row(metric, 0)
        domains, of = len(tested.names), metric.removeprefix(f"{GAP}/")
        yield "summary", GAP, of, value, low, high, domains, np.nan, kind


def _curve_rows(tested: Tested, interval: tuple[Values, Values]) -> Rows:
    """Yield the rows of the table of calibration curves."""
    lows, highs = _with_width(*interval)
    for part, (scope, name) in enumerate(_parts(tested)):
        for o, outcome in enumerate(tested.objective.risk_outcomes):
            risks = tested.risks[part][o]
            observed, predicted, held = risks.curve(risks.tenths())
            low, high = lows[part, o], highs[part, o]
            if tested.independent:
                low, high = _exact_at_ends(low, high, observed * held, held)
            for g in np.flatnonzero(held).tolist():
                shares = (float(each[g]) for each in (predicted, observed, low, high))
                yield scope, name, outcome[1:], g + 1, *shares, int(held[g])


def _decision_rows(tested: Tested, benefit: Values, interval: tuple[Values, Values]) -> Rows:
    """Yield the rows of the table of decision curves."""
    low, high = _with_width(*interval)
    for part, (scope, name) in enumerate(_parts(tested)):
        for o, outcome in enumerate(tested.objective.risk_outcomes):
            everybody = tested.risks[part][o].benefit_of_flagging_all(THRESHOLDS)
            for t, at in enumerate(THRESHOLDS.tolist()):
                found = (float(each[part, o, t]) for each in (benefit, low, high))
                yield scope, name, outcome[1:], at, *found, float(everybody[t])
