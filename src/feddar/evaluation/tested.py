"""What the figures of a model are computed from: test samples on this machine, or counts of sites; and their resamples.

A *part* is a domain, or all samples; the latter is the last one. Patients (samples, where no column says which are of
one patient) are drawn again with replacement. Of sites only counts are known: there the count of each bin of risks is
drawn again, from a Poisson distribution. For the sake of speed, resamples have risks in ``BINS`` bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.objectives import Objective
from feddar.objectives.areas import auc_from_counts, auprc_from_counts, mean_of_defined
from feddar.objectives.objective import Metrics
from feddar.objectives.risks import Risks
from feddar.objectives.score_bins import middles_of_bins

RESAMPLES = 400
BINS = 200
"""The bins of risks in resamples, each with about equally many samples."""
AT_ONCE = 2**21
"""The numbers that are resampled at once: few enough for memory."""
USUAL = 0.5
"""The threshold if nobody has chosen one."""

Values = NDArray[np.floating]


class Resampled(NamedTuple):
    """Resamples of every part: each array begins with [resamples, parts]."""

    metrics: Metrics
    """The objective's metrics, as far as they can be resampled."""
    risks: list[Risks]
    """The risks of each outcome."""
    flags: Values
    """Samples without and with each outcome that are not flagged, and that are, [..., outcomes, 2, 2]."""


@dataclass(frozen=True)
class Tested(ABC):
    """What figures are computed from."""

    objective: Objective
    names: tuple[str, ...]
    """The domains that have samples."""
    counts: NDArray[np.int64]
    """The number of samples of each part."""
    metrics: Metrics
    """The objective's metrics of each part."""
    risks: list[list[Risks]]
    """The risks of each outcome, by part."""
    flags: Values
    """Samples without and with each outcome that are not flagged, and that are, [parts, outcomes, 2, 2]."""
    thresholds: Values
    """The threshold of each part and outcome; NaN for all samples if domains have different ones."""
    coarse: list[Risks]
    """The risks of each outcome in the bins of resamples, with counts [parts, 2, bins]."""

    @property
    @abstractmethod
    def interval(self) -> str:
        """The kind of the intervals."""

    @property
    @abstractmethod
    def independent(self) -> bool:
        """Whether samples are of different patients, as far as is known."""

    @abstractmethod
    def resamples(self) -> Iterator[Resampled]:
        """Yield ``RESAMPLES`` resamples, some at a time."""


@dataclass(frozen=True)
class TestedSamples(Tested):
    """Test samples on this machine."""

    terms: Values
    """The terms of metrics, and of flags, of each sample, [n, k + 4 outcomes]; samples are sorted by domain."""
    cells: NDArray[np.int64]
    """The cell of each sample in a histogram [domains, 2, bins], by class, [n, C]."""
    first: NDArray[np.int64]
    """The first sample of each domain."""
    patient: NDArray[np.int64]
    grouped: bool
    """Whether a column says which samples are of one patient."""

    @classmethod
    def of(cls, test: Cohort, scores: Tensor, thresholds: Values | None) -> Self:
        """Return scored test samples; ``thresholds`` are by domain and outcome [M, O], and 1/2 if left out."""
        objective, outcomes = test.objective, len(test.objective.risk_outcomes)
        present, domain = np.unique(test.domain.numpy(), return_inverse=True)
        order = np.argsort(domain, kind="stable")
        domain, y = domain[order], test.y.numpy()[order]
        predicted = objective.predictions(scores.double())[order]
        terms = objective.terms(test.y[order], predicted)
        empty = np.zeros((len(y), 0))
        truth, risk = (empty if each is None else each.numpy() for each in (terms.truth, terms.risks))
        truth = truth.astype(np.int64)
        at = _thresholds(thresholds, len(test.domains), outcomes)[present]
        flagged = (risk[:, :outcomes] > at[domain]).astype(np.int64)
        flags = np.eye(4)[truth[:, :outcomes] * 2 + flagged].reshape(len(y), -1)
        first = np.searchsorted(domain, np.arange(len(present)))
        rows = [slice(a, b) for a, b in zip(first, [*first[1:], len(y)], strict=True)] + [slice(None)]
        measured = [objective.measure(y[each], predicted.numpy()[each]) for each in rows]
        cells, mean_risks = np.zeros(truth.shape, np.int64), []
        for c in range(truth.shape[1]):
            values, place, held = np.unique(risk[:, c], return_inverse=True, return_counts=True)
            bins, means = _merged(values, held)
            cells[:, c] = (domain * 2 + truth[:, c]) * BINS + bins[place]
            mean_risks.append(means)
        once = np.ones((1, len(y)))
        histograms = [_with_all(_histogram(cells[:, c], once, len(present)))[0] for c in range(outcomes)]
        return cls(
            objective,
            tuple(test.domains[m] for m in present),
            np.array([len(y[each]) for each in rows]),
            {name: np.array([each[name] for each in measured]) for name in objective.metrics},
            [[Risks.of(truth[each, o] == 1, risk[each, o]) for o in range(outcomes)] for each in rows],
            _with_all(np.add.reduceat(flags, first)[None])[0].reshape(len(rows), outcomes, 2, 2),
            _of_parts(at),
            [Risks(means, counts) for means, counts in zip(mean_risks, histograms, strict=False)],
            np.hstack([terms.numbers.numpy(), flags]),
            cells,
            first,
            np.unique(order if test.group is None else test.group.numpy()[order], return_inverse=True)[1],
            test.group is not None,
        )

    @property
    def interval(self) -> str:
        """The kind of the intervals."""
        return "bootstrap by patient" if self.grouped else "bootstrap by sample"

    @property
    def independent(self) -> bool:
        """Whether no column says which samples are of one patient."""
        return not self.grouped

    def resamples(self) -> Iterator[Resampled]:
        """Yield resamples of the patients."""
        rng, patients = np.random.default_rng(0), int(self.patient.max()) + 1
        outcomes, classes = len(self.coarse), self.cells.shape[1]
        for number in _batches(max(self.terms.size, len(self.counts) * classes * 2 * BINS)):
            drawn = rng.multinomial(patients, np.full(patients, 1 / patients), number)[:, self.patient].astype(float)
            sums = _with_all(np.add.reduceat(drawn[..., None] * self.terms, self.first, axis=1))
            numbers, flags = np.split(sums, [sums.shape[-1] - 4 * outcomes], axis=-1)
            by_class = [_with_all(_histogram(cells, drawn, len(self.names))) for cells in self.cells.T]
            with np.errstate(invalid="ignore", divide="ignore"):  # a resample may leave out a domain
                metrics = self.objective.measure_sums(numbers, np.stack(by_class, 2) if classes else None)
            risks = [Risks(each.risk, counts) for each, counts in zip(self.coarse, by_class, strict=False)]
            yield Resampled(metrics, risks, flags.reshape(*flags.shape[:2], outcomes, 2, 2))


@dataclass(frozen=True)
class TestedCounts(Tested):
    """Counts of sites: how many samples of each domain have which risk."""

    histogram: Values
    """Samples without and with each class, [domains, C, 2, bins]; C is 0 if there are no risks."""

    @classmethod
    def of(
        cls,
        objective: Objective,
        total: Mapping[str, NDArray[Any]],
        domains: Sequence[str],
        score_range: Tensor | None,
        thresholds: Values | None,
    ) -> Self:
        """Return the sums over sites; ``thresholds`` are by domain and outcome [M, O], and 1/2 if left out."""
        present, outcomes = np.flatnonzero(total["numbers"][:, 0]), len(objective.risk_outcomes)
        at = _thresholds(thresholds, len(domains), outcomes)[present]
        numbers = _with_all(total["numbers"][None, present])[0]
        told = total["histogram"][present] if "histogram" in total else np.zeros((len(present), 0, 2, 1))
        risk = middles_of_bins(score_range, told.shape[1]).sigmoid().numpy()
        every = _with_all(told[None])[0]
        metrics = objective.measure_sums(numbers, every if told.size else None)
        above = risk[:outcomes] > at[..., None]
        flagged = told[:, :outcomes] @ np.stack([~above, above], -1).astype(float)
        histogram = np.zeros((*told.shape[:3], BINS))
        means = []
        for c, counts in enumerate(told.sum((0, 2))):
            bins, merged_risk = _merged(risk[c], counts)
            histogram[:, c] = told[:, c] @ np.eye(BINS)[bins]
            means.append(merged_risk)
        coarse = _with_all(histogram[None])[0]
        return cls(
            objective,
            tuple(domains[m] for m in present.tolist()),
            numbers[:, 0].astype(np.int64),
            metrics,
            [[Risks(risk[o], part[o]) for o in range(outcomes)] for part in every],
            _with_all(flagged[None])[0],
            _of_parts(at),
            [Risks(means[o], coarse[:, o]) for o in range(outcomes)],
            histogram,
        )

    @property
    def interval(self) -> str:
        """The kind of the intervals."""
        return "bootstrap of counts"

    @property
    def independent(self) -> bool:
        """Counts do not say which samples are of one patient."""
        return True

    def resamples(self) -> Iterator[Resampled]:
        """Yield resamples of the counts."""
        rng, domains = np.random.default_rng(0), len(self.names)
        for number in _batches(self.histogram.size):
            counts = _with_all(rng.poisson(self.histogram, (number, *self.histogram.shape)).astype(float))
            flags = _with_all(rng.poisson(self.flags[:domains], (number, *self.flags[:domains].shape)).astype(float))
            risks = [Risks(each.risk, counts[:, :, o]) for o, each in enumerate(self.coarse)]
            yield Resampled(self._metrics(counts, risks), risks, flags)

    def _metrics(self, counts: Values, risks: Sequence[Risks]) -> Metrics:
        """Return the metrics that follow from counts: those of each outcome with their means, or areas of classes."""
        outcomes = self.objective.risk_outcomes
        if not outcomes:
            areas = {"auc": auc_from_counts, "auprc": auprc_from_counts}
            return {name: mean_of_defined(of(counts)) for name, of in areas.items()} if counts.shape[2] else {}
        found = [each.areas() | each.losses() for each in risks]
        means = {name: mean_of_defined(np.stack([each[name] for each in found], -1)) for name in found[0]}
        each = {
            f"{name}{end}": values for end, one in zip(outcomes, found, strict=True) for name, values in one.items()
        }
        return means | each


def _batches(size: int) -> Iterator[int]:
    """Yield how many resamples, each of ``size`` numbers, are drawn at once."""
    number = max(1, AT_ONCE // max(size, 1))
    for start in range(0, RESAMPLES, number):
        yield min(number, RESAMPLES - start)


def _thresholds(given: Values | None, domains: int, outcomes: int) -> Values:
    return np.full((domains, outcomes), USUAL) if given is None else given


def _of_parts(thresholds: Values) -> Values:
    """Return the thresholds [domains, outcomes] with those of all samples."""
    same = (thresholds == thresholds[:1]).all(0)
    return np.vstack([thresholds, np.where(same, thresholds[0], np.nan)])


def _with_all(values: Values) -> Values:
    """Return sums [resamples, domains, ...] with the sum over domains as a last part."""
    return np.concatenate([values, values.sum(1, keepdims=True)], axis=1)


def _histogram(cells: NDArray[np.int64], weights: Values, domains: int) -> Values:
    """Return the summed weights [resamples, n] of the samples in each cell, [resamples, domains, 2, bins]."""
    shape = (len(weights), domains, 2, BINS)
    place = cells + np.arange(len(weights))[:, None] * (domains * 2 * BINS)
    counts: Values = np.bincount(place.ravel(), weights.ravel(), int(np.prod(shape))).reshape(shape).astype(float)
    return counts


def _merged(risk: Values, held: NDArray[Any]) -> tuple[NDArray[np.int64], Values]:
    """Return which of ``BINS`` bins each of many ascending risks is in, and the mean risk of these bins.

    Bins have about equally many of the ``held`` samples.
    """
    bins = np.minimum((held.cumsum() - held / 2) / max(held.sum(), 1) * BINS, BINS - 1).astype(np.int64)
    sizes = np.bincount(bins, held, BINS)
    return bins, np.bincount(bins, held * risk, BINS) / np.maximum(sizes, 1)
