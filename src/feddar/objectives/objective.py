"""The interface of an objective: everything that depends on the kind of outcome, so that no other code asks for it.

For labels y and scores S = X W' of linear heads W [outputs, p], an objective has:

* its loss, and the first and second derivatives of the loss in the scores (the curvature of heads follows from these);
* its link, from scores to predictions (a number, probabilities), and back;
* its metrics, from predictions and from sums over samples, which sites may send;
* how labels are read from a table, and how predictions are written into one;
* its names and texts on pages and the terminal.

Sums are always *sums* over samples, never means, so that contributions of clients can be added.

Curvature comes in three forms, all as a batch of square blocks H [blocks, q, q] that act on a head in block form
[blocks, q, r] (``models.heads.as_blocks``):

* ``hessian``: the exact one, [1, outputs p, outputs p];
* ``block``: its diagonal blocks, one per output, [outputs, p, p];
* ``gram``: X'X alone, [1, p, p], the same for all outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddar.errors import UserError
from feddar.lazy import pandas as pd
from feddar.objectives.labels import LabelColumns, Scalar
from feddar.objectives.scored import Scored

Curvature = Literal["hessian", "block", "gram"]
CURVATURES: tuple[Curvature, ...] = get_args(Curvature)

Metrics = dict[str, NDArray[np.floating]]
Sums = dict[str, Tensor]
"""Sums by domain, [domain, ...]; the first of ``numbers`` is how many samples there are."""

_ERRORS = {"mse", "rmse", "mae", "log_loss", "brier", "loss", "ece"}


@dataclass(frozen=True)
class Terms:
    """What each sample adds to the sums that metrics come from."""

    numbers: Tensor
    """Numbers of each sample, [n, k]; the first is 1."""
    truth: Tensor | None = None
    """Whether each sample has each class or outcome, [n, C]; None if there is none."""
    risks: Tensor | None = None
    """The predicted probability of each class or outcome, [n, C]."""


def mean_by_sample(weight: Tensor) -> Tensor:
    """Return weights of samples [n] from weights [n] or [n, outputs]."""
    return weight if weight.dim() == 1 else weight.mean(1)


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of a metric are better; the metric may be of one outcome (log_loss:died)."""
    return metric_kind(metric) in _ERRORS


def metric_kind(metric: str) -> str:
    """Return the kind of a metric without the outcome it belongs to: log_loss for log_loss:died."""
    return metric.partition(":")[0]


@dataclass(frozen=True)
class Objective(ABC):
    """One kind of outcome; subclasses have the names of its classes or outcomes."""

    task: ClassVar[str]
    """The name of the kind in files and on pages."""
    gaps: ClassVar[tuple[str, ...]]
    """The metrics whose largest difference between domains is reported."""
    default_curvature: ClassVar[Curvature] = "hessian"
    in_units: ClassVar[bool] = False
    """Whether labels are numbers with a unit, which can be standardised for training."""

    # What is predicted

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The names of its metrics; the first is the main one."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The number of outputs of a head."""

    @property
    def classes(self) -> tuple[Scalar, ...] | None:
        """The classes, of which each sample has one; None if the outcome is not one class."""
        return None

    @property
    def positive(self) -> Scalar | None:
        """The positive one of two classes; None for other outcomes."""
        return None

    # The loss and its derivatives

    @abstractmethod
    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [n], from scores [n, outputs]."""

    @abstractmethod
    def residual(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return dloss/dscore of each sample, [n, outputs]."""

    @abstractmethod
    def bend(self, kind: Curvature, scores: Tensor, along: Tensor) -> Tensor:
        """Return d2loss/dscore2 of each sample, approximated as ``kind`` says, times a direction [n, outputs]."""

    @abstractmethod
    def curvature(self, kind: Curvature, scores: Tensor, features: Tensor) -> Tensor:
        """Return the curvature of the summed loss in a head over features X, as blocks, from the samples' scores."""

    def weighted_loss(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the loss of each sample times its weight, [n]; of several outcomes weights may be [n, outputs]."""
        return weight * self.loss(scores, y)

    def weighted_curvature(self, kind: Curvature, scores: Tensor, features: Tensor, weight: Tensor) -> Tensor:
        """Return the curvature of the weighted sum of losses; weights are as in ``weighted_loss``."""
        return self.curvature(kind, scores, weight.sqrt()[:, None] * features)

    def class_marks(self, y: Tensor) -> Tensor | None:
        """Return whether each sample has each class, [n, questions, classes]; None if there are no classes.

        There is one question, which class it is, or one for each of several yes/no outcomes.
        """
        return None

    def scores_of_factors(self, factors: Tensor) -> Tensor:
        """Return what is added to scores [..., outputs] where probabilities of classes get factors.

        ``factors`` [..., questions, classes] are their logarithms; here of outputs that have two classes each.
        """
        return factors[..., 1] - factors[..., 0]

    def is_gram(self, kind: Curvature | None) -> bool:
        """Return whether that curvature is the Gram matrix X'X."""
        return kind == "gram"

    # Predictions

    @abstractmethod
    def predictions(self, scores: Tensor) -> Tensor:
        """Return predictions from scores: numbers [n], or probabilities [n, ...]."""

    @abstractmethod
    def scores_of(self, predicted: Tensor) -> Tensor:
        """Undo ``predictions``: return scores [n, outputs] that give these predictions."""

    def decisions(self, predicted: Tensor) -> Tensor:
        """Return the decision for each sample as integers (class indices, or 0/1); not defined for a number."""
        raise NotImplementedError

    # Metrics

    @abstractmethod
    def measure_parts(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> Metrics:
        """Return every metric [parts] of several parts of equal size, from labels [parts, n, ...] and predictions."""

    def headline(self, asked: str | None) -> str:
        """Return the main metric: the one that was asked for, or the first; another than it has is refused."""
        if asked is None:
            return self.metrics[0]
        name = asked.strip().lower().replace("-", "_").removeprefix("macro_")
        if name not in self.metrics:
            raise UserError(f"there is no metric '{asked}' of this outcome: choose one of {', '.join(self.metrics)}.")
        return name

    def measure(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> dict[str, float]:
        """Return every metric of one set of samples."""
        return {name: float(values[0]) for name, values in self.measure_parts(y[None], predicted[None]).items()}

    @abstractmethod
    def terms(self, y: Tensor, predicted: Tensor) -> Terms:
        """Return what each sample adds to the sums from which ``measure_sums`` computes the metrics."""

    def sums(self, scored: Scored) -> Sums:
        """Return the sums of the terms by domain, and histograms of the probabilities if there are any."""
        terms = self.terms(scored.y, scored.predicted)
        sums = {"numbers": scored.total(terms.numbers)}
        if terms.truth is not None and terms.risks is not None:
            sums["histogram"] = scored.histogram(terms.truth, terms.risks)
        return sums

    @abstractmethod
    def measure_sums(self, numbers: NDArray[Any], histogram: NDArray[Any] | None = None) -> Metrics:
        """Return every metric from sums over samples, [..., k] and [..., C, 2, bins]."""

    @property
    def risk_outcomes(self) -> tuple[str, ...]:
        """The yes/no outcomes whose risks are predicted, as the end of their metrics' names ("" if it is the only one).

        They are in the order of the histograms; without any there are no figures of calibration.
        """
        return ()

    # Labels

    @classmethod
    @abstractmethod
    def claim(cls, labels: LabelColumns) -> Self | None:
        """Return the objective of this kind that fits the labels; None if they are of another kind."""

    @abstractmethod
    def read(self, labels: LabelColumns) -> NDArray[np.float64]:
        """Return labels as numbers [n, ...], with NaN for a missing or invalid label."""

    @abstractmethod
    def require_read(self, labels: LabelColumns) -> Tensor:
        """Return labels to train with; an invalid label is an error with its row."""

    @abstractmethod
    def as_labels(self, numbers: NDArray[np.float64]) -> Tensor:
        """Return the numbers of ``read``, none of them NaN, as labels to train or measure with."""

    @abstractmethod
    def blank(self, n: int) -> Tensor:
        """Return n placeholder labels of the right shape and type."""

    def strata(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the stratum [n] of each sample, by which splits are stratified."""
        return np.zeros(len(y), np.int64)

    def aligned(self, y: Tensor, other: Objective) -> Tensor:
        """Return labels of another objective as labels of this one; if that is not possible, it is an error."""
        if self != other:
            raise UserError(f"one cohort has {self.kind} as labels and the other has {other.kind}: they must be alike.")
        return y

    @property
    def fingerprint(self) -> Any:
        """What identifies the objective in ``Cohort.fingerprint``."""
        return self.classes

    @property
    @abstractmethod
    def refusal(self) -> str:
        """The end of a sentence about an invalid label: "is not ..."."""

    # Tables and pages

    @abstractmethod
    def labels(self, predicted: NDArray[np.floating]) -> NDArray[Any]:
        """Return the predicted label of each sample: the most probable class by its name, or the number."""

    @abstractmethod
    def columns(self, predicted: NDArray[np.floating]) -> dict[str, NDArray[Any]]:
        """Return predictions as the columns of a table."""

    @abstractmethod
    def from_columns(self, table: pd.DataFrame) -> NDArray[np.floating]:
        """Undo ``columns``."""

    @abstractmethod
    def summary(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the columns that a summary of predictions aggregates, from the columns of predictions."""

    @abstractmethod
    def summary_ways(self) -> dict[str, str]:
        """Return how each column of ``summary`` is aggregated: sum, min or max."""

    @abstractmethod
    def summarised(self, totals: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return the values of a summary by title, from the aggregated columns and the number of rows."""

    @abstractmethod
    def written(self, y: NDArray[Any]) -> pd.DataFrame:
        """Return labels as columns of a table: undo ``read``."""

    @abstractmethod
    def described(self, y: NDArray[Any]) -> str:
        """Return a text on what is predicted."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What is predicted, in a few words."""

    @abstractmethod
    def rate_title(self) -> str:
        """Return the title of ``rate``."""

    @abstractmethod
    def rate(self, y: NDArray[Any]) -> str:
        """Return a summary of the labels of a group of samples, in one word or number."""

    def only(self, y: NDArray[Any]) -> str | None:
        """Return the class of all these samples if they have only one, else None."""
        return None

    # Files

    def facts(self) -> dict[str, Any]:
        """Return a description for a file, from which ``objectives.from_facts`` makes the objective again."""
        return {"task": self.task, **asdict(self)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Undo ``facts``, without the task."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()})
