"""What an outcome has to say of itself, so that nothing outside asks which kind it is.

An objective is a small object that knows, for labels y and scores S = X W' of linear heads W [outputs, p]:

* its loss, and the first and second derivatives of the loss by the scores (the curvature of heads follows from these);
* its link, from scores to what a person reads (a number, probabilities), and back;
* its metrics, from predictions and from sums over samples, which sites may send;
* how labels are read from a table, and how predictions are written into one;
* what a page calls it.

Everything that is a sum is a *sum* over samples, never a mean: contributions of clients then add up.

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

LOWER_IS_BETTER = {"mse", "log_loss", "brier", "loss"}


@dataclass(frozen=True)
class Objective(ABC):
    """One kind of outcome, with the names of its classes or outputs."""

    task: ClassVar[str]
    """What files and pages call it."""
    gaps: ClassVar[tuple[str, ...]]
    """The metrics whose largest difference between domains is reported."""
    default_curvature: ClassVar[Curvature] = "hessian"
    in_units: ClassVar[bool] = False
    """Whether labels have a unit of measurement, and can be learned in standard units."""

    # What is predicted

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Its metrics; the first is the one shown where there is room for one."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many numbers a head gives."""

    @property
    def classes(self) -> tuple[Scalar, ...] | None:
        """The classes, one of which a sample is of; None where it is of none or of several."""
        return None

    @property
    def positive(self) -> Scalar | None:
        """Of two classes, the one that is looked for."""
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
        """Multiply d2loss/dscore2 of each sample, as the kind of curvature has it, by a direction [n, outputs]."""

    @abstractmethod
    def curvature(self, kind: Curvature, scores: Tensor, features: Tensor) -> Tensor:
        """Return the curvature of the summed loss by a head over features X, as blocks, from the samples' scores."""

    def is_gram(self, kind: Curvature | None) -> bool:
        """Tell whether that curvature is the Gram matrix X'X."""
        return kind == "gram"

    # What a person reads

    @abstractmethod
    def predictions(self, scores: Tensor) -> Tensor:
        """Turn scores into what a user reads: numbers [n], or probabilities [n, ...]."""

    @abstractmethod
    def scores_of(self, predicted: Tensor) -> Tensor:
        """Undo ``predictions``: scores [n, outputs] that give these."""

    def decisions(self, predicted: Tensor) -> Tensor:
        """Return what is decided for each sample, as whole numbers; a number to predict needs no decision."""
        raise NotImplementedError

    # Metrics

    @abstractmethod
    def measure_parts(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> Metrics:
        """Return every metric of several parts of equal size, from labels [parts, n, ...] and predictions."""

    def measure(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> dict[str, float]:
        """Return every metric of one set of samples."""
        return {name: float(values[0]) for name, values in self.measure_parts(y[None], predicted[None]).items()}

    @abstractmethod
    def sums(self, scored: Scored) -> Sums:
        """Return the sums, by domain, that the metrics are made of."""

    @abstractmethod
    def measure_sums(self, numbers: NDArray[Any], histogram: NDArray[Any] | None = None) -> dict[str, float]:
        """Return every metric from sums over samples."""

    # Labels

    @classmethod
    @abstractmethod
    def claim(cls, labels: LabelColumns) -> Self | None:
        """Return the objective that these labels are of, if they are of this kind."""

    @abstractmethod
    def read(self, labels: LabelColumns) -> NDArray[np.float64]:
        """Return labels as numbers, [n, ...], with NaN where one is missing or is none of this outcome's."""

    @abstractmethod
    def require_read(self, labels: LabelColumns) -> Tensor:
        """Return labels to train with; a label that is none of this outcome's is an error that names its row."""

    @abstractmethod
    def as_labels(self, numbers: NDArray[np.float64]) -> Tensor:
        """Return what ``read`` gave, none of it missing, as labels to train or measure with."""

    @abstractmethod
    def blank(self, n: int) -> Tensor:
        """Return n labels that say nothing, of the right shape and type."""

    def strata(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return which samples are to be spread evenly over training and test, as equal numbers."""
        return np.zeros(len(y), np.int64)

    def aligned(self, y: Tensor, other: Objective) -> Tensor:
        """Return labels of another objective as this one's; what they cannot be is an error."""
        if self != other:
            raise UserError(f"one cohort has {self.kind} as labels and the other has {other.kind}: they must be alike.")
        return y

    @property
    def fingerprint(self) -> Any:
        """What tells it from others in a hash of a cohort."""
        return self.classes

    @property
    @abstractmethod
    def refusal(self) -> str:
        """Say what is wrong with a label that is none of this outcome's: "is not ..."."""

    # Tables and pages

    @abstractmethod
    def labels(self, predicted: NDArray[np.floating]) -> NDArray[Any]:
        """Return the predicted label of each sample: the most probable class by its name, or the number."""

    @abstractmethod
    def columns(self, predicted: NDArray[np.floating]) -> dict[str, NDArray[Any]]:
        """Return predictions as the columns of a table for people."""

    @abstractmethod
    def from_columns(self, table: pd.DataFrame) -> NDArray[np.floating]:
        """Undo ``columns``."""

    @abstractmethod
    def summary(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return, from the columns of predictions, what a summary adds up, or takes the least or greatest of."""

    @abstractmethod
    def summary_ways(self) -> dict[str, str]:
        """Say how each column of ``summary`` is put together: sum, min or max."""

    @abstractmethod
    def summarised(self, totals: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return what a summary shows, by its title, from these totals over rows."""

    @abstractmethod
    def written(self, y: NDArray[Any]) -> pd.DataFrame:
        """Return labels as a table has them: undo ``read``."""

    @abstractmethod
    def described(self, y: NDArray[Any]) -> str:
        """Say what is predicted, for a person who knows the table."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What is predicted, in a word or two."""

    @abstractmethod
    def rate_title(self) -> str:
        """Return what ``rate`` is called."""

    @abstractmethod
    def rate(self, y: NDArray[Any]) -> str:
        """Say what labels of a group of samples are like, in one word or number."""

    def only(self, y: NDArray[Any]) -> str | None:
        """Return the one label that all these samples have, if it is a class."""
        return None

    # Files

    def facts(self) -> dict[str, Any]:
        """Return what a file needs to say to make the objective again (``objectives.from_facts``)."""
        return {"task": self.task, **asdict(self)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Undo ``facts``, without the task."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()})
