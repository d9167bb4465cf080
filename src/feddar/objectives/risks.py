"""Figures of the predicted risks of a yes/no outcome: calibration, rates of decisions, and net benefit.

They are functions of how many samples without and with the outcome have each predicted risk: of one risk for each
sample, or of bins of risks, of which a site may send the counts. Counts [..., 2, bins] may have further axes in front,
such as many resamples of the same samples.

* Slope and intercept are those of logistic recalibration (Cox, 1958): the slope b of logit P(y) = a + b logit(risk),
  which is 1 if risks are neither too extreme nor too moderate, and the intercept a if b is held at 1 (calibration in
  the large), which is 0 if risks are right on average.
* The calibration curve has the observed share of each tenth of the samples by risk, and the expected calibration error
  (ECE) is the mean distance between observed share and mean risk over these groups.
* The net benefit of flagging risks above t is (true positives - false positives t / (1 - t)) / samples (Vickers and
  Elkin, 2006).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddar.objectives.areas import auc_from_counts, auprc_from_counts
from feddar.objectives.objective import Metrics
from feddar.objectives.score_bins import EPSILON

GROUPS = 10
STEPS = 30
"""The most steps of Newton's method; a slope that is not found by then is undefined, as where risks separate labels."""

Values = NDArray[np.floating]


@dataclass(frozen=True)
class Risks:
    """How many samples without and with an outcome have each predicted risk."""

    risk: Values
    """The risks [bins], ascending."""
    counts: NDArray[Any]
    """Samples without and with the outcome, [..., 2, bins]."""

    @classmethod
    def of(cls, positive: NDArray[np.bool_], risk: Values) -> Risks:
        """Return the risks of samples [n], with a bin for each risk that occurs."""
        found, place = np.unique(risk, return_inverse=True)
        cell = positive.astype(np.int64) * len(found) + place
        return cls(found, np.bincount(cell, minlength=2 * len(found)).reshape(2, len(found)))

    def parts(self) -> list[Risks]:
        """Return the risks of each of the first axis of the counts."""
        return [Risks(self.risk, counts) for counts in self.counts]

    @cached_property
    def _by_outcome(self) -> tuple[Values, Values]:
        counts = self.counts.astype(np.float64)
        return counts[..., 0, :], counts[..., 1, :]

    @cached_property
    def _held(self) -> Values:
        without, of_it = self._by_outcome
        return without + of_it

    def areas(self) -> Metrics:
        """Return AUC and AUPRC; risks in one bin are taken to be in random order."""
        return {"auc": auc_from_counts(self.counts), "auprc": auprc_from_counts(self.counts)}

    def losses(self) -> Metrics:
        """Return accuracy, log-loss and Brier score."""
        (without, of_it), risk = self._by_outcome, np.clip(self.risk, EPSILON, 1 - EPSILON)
        total = _defined(self._held.sum(-1))
        return {
            "accuracy": (without @ (risk <= 0.5) + of_it @ (risk > 0.5)) / total,
            "log_loss": -(without @ np.log1p(-risk) + of_it @ np.log(risk)) / total,
            "brier": (without @ risk**2 + of_it @ (1 - risk) ** 2) / total,
        }

    def calibration(self, groups: NDArray[np.int64]) -> Metrics:
        """Return slope, intercept and ECE; ``groups`` are those of ``tenths``."""
        observed, predicted, held = self.curve(groups)
        off = np.where(held > 0, held * np.abs(observed - predicted), 0).sum(-1) / _defined(held.sum(-1))
        slope, intercept = self._recalibrated()
        return {"calibration_slope": slope, "calibration_intercept": intercept, "ece": off}

    def tenths(self) -> NDArray[np.int64]:
        """Return the group of each bin: tenths of the samples by risk, with the edges that scikit-learn takes."""
        edges = np.quantile(np.repeat(self.risk, self._held.astype(np.int64)), np.linspace(0, 1, GROUPS + 1)[1:-1])
        return np.searchsorted(edges, self.risk)

    def curve(self, groups: NDArray[np.int64]) -> tuple[Values, Values, Values]:
        """Return observed share, mean risk and number of samples of each group, [..., groups]."""
        member = np.eye(GROUPS)[groups]
        held, of_it, risks = (
            (each[..., None, :] @ member)[..., 0, :]
            for each in (self._held, self._by_outcome[1], self._held * self.risk)
        )
        return of_it / _defined(held), risks / _defined(held), held

    def net_benefit(self, thresholds: Values) -> Values:
        """Return the net benefit of flagging risks above each threshold, [..., thresholds]."""
        above = self.risk[:, None] > thresholds
        false, true = (each @ above for each in self._by_outcome)
        benefit: Values = (true - false * thresholds / (1 - thresholds)) / _defined(self._held.sum(-1))[..., None]
        return benefit

    def benefit_of_flagging_all(self, thresholds: Values) -> Values:
        """Return the net benefit of flagging everybody, at each threshold."""
        share = (self._by_outcome[1].sum(-1) / _defined(self._held.sum(-1)))[..., None]
        everybody: Values = share - (1 - share) * thresholds / (1 - thresholds)
        return everybody

    def _recalibrated(self) -> tuple[Values, Values]:
        """Return slope and intercept of logistic recalibration, NaN where one outcome is missing."""
        score = _logit(np.clip(self.risk, EPSILON, 1 - EPSILON))
        _, of_it = self._by_outcome
        alone = _newton(np.ones((1, len(score))), score, self._held, of_it)
        both = _newton(np.stack([np.ones_like(score), score]), 0 * score, self._held, of_it)
        return both[..., 1], alone[..., 0]


def _newton(inputs: Values, offset: Values, held: Values, of_it: Values) -> Values:
    """Return the coefficients [..., k] of a logistic regression on inputs [k, bins], by Newton's method; else NaN."""
    start = np.zeros((*held.shape[:-1], len(inputs)))
    if len(inputs) == 2:
        start[..., 1] = 1.0
    outer = (inputs[:, None] * inputs[None]).reshape(-1, inputs.shape[1]).T
    found, done = start, np.zeros(held.shape[:-1], bool)
    for _ in range(STEPS):
        p = 0.5 + 0.5 * np.tanh((found @ inputs + offset) / 2)  # the logistic function, which never overflows
        slope = (of_it - held * p) @ inputs.T
        bend = ((held * p * (1 - p)) @ outer).reshape(*found.shape, len(inputs))
        singular = np.abs(np.linalg.det(bend)) < 1e-12 * np.maximum(held.sum(-1), 1) ** len(inputs)
        safe = np.where(singular[..., None, None], np.eye(len(inputs)), bend)
        step = np.where(singular[..., None], 0, np.linalg.solve(safe, slope[..., None])[..., 0])
        # From far away Newton's step overshoots; half of a long one still goes the right way.
        found = found + step * np.minimum(1, 2 / np.maximum(np.abs(step).max(-1, keepdims=True), 2))
        done = ~singular & (np.abs(step).max(-1) < 1e-10)
        if (done | singular).all():
            break
    return np.where(done[..., None], found, np.nan)


def _logit(risk: Values) -> Values:
    odds: Values = np.log(risk) - np.log1p(-risk)
    return odds


def _defined(values: Values) -> Values:
    """Return a denominator, with NaN in place of 0."""
    return np.where(values > 0, values, np.nan)
