"""The base class of objectives with classes: metrics, labels and tables. Losses are in ``logistic`` and ``softmax``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.errors import UserError
from feddar.lazy import pandas as pd
from feddar.objectives.areas import auc_from_counts, auprc_from_counts, mean_areas, mean_of_defined
from feddar.objectives.labels import LabelColumns, Scalar, class_numbers, classes_of, require_known
from feddar.objectives.objective import Metrics, Objective, Terms
from feddar.objectives.score_bins import EPSILON

MOST_NAMES = 10
"""The most classes that are named in a sentence."""


@dataclass(frozen=True)
class Classification(Objective):
    """Each sample has one of several classes."""

    names: tuple[Scalar, ...]

    @property
    def classes(self) -> tuple[Scalar, ...]:
        """The classes; of two, the positive one is last."""
        return self.names

    @property
    def kind(self) -> str:
        """The number of classes, as text."""
        return f"{len(self.names)} classes"

    def decisions(self, predicted: Tensor) -> Tensor:
        """Return the index of the most probable class of each sample."""
        return predicted.argmax(1)

    def measure_parts(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> Metrics:
        """Return the areas under the ROC and precision-recall curves, accuracy, log-loss and Brier score."""
        truth = np.eye(predicted.shape[-1])[y]
        given_to_truth = np.clip(np.take_along_axis(predicted, y[..., None], -1)[..., 0], EPSILON, 1 - EPSILON)
        squares = ((predicted - truth) ** 2).sum(-1).mean(-1)
        roc, precision = mean_areas(truth == 1, predicted)
        return {
            "auc": roc,
            "auprc": precision,
            "accuracy": (predicted.argmax(-1) == y).mean(-1),
            "log_loss": -np.log(given_to_truth).mean(-1),
            "brier": squares / self._squares_of_one_error,
        }

    @property
    def _squares_of_one_error(self) -> int:
        """The factor by which the Brier score is divided: 2 for two classes, whose errors are equal, else 1."""
        return 2 if len(self.names) == 2 else 1

    def terms(self, y: Tensor, predicted: Tensor) -> Terms:
        """Return 1, whether it is correct, log-loss and squares of each sample, and its probabilities."""
        one, truth = torch.ones(len(y), dtype=torch.float64), torch.nn.functional.one_hot(y, predicted.shape[1])
        given = predicted[torch.arange(len(y)), y].clamp(EPSILON, 1 - EPSILON)
        right, squares = (predicted.argmax(1) == y).double(), (predicted - truth).square().sum(1)
        shown = slice(1, 2) if len(self.names) == 2 else slice(None)  # for two classes, the positive one is enough
        numbers = torch.stack([one, right, -given.log(), squares], 1)
        return Terms(numbers, truth[:, shown], predicted[:, shown])

    def measure_sums(self, numbers: NDArray[Any], histogram: NDArray[Any] | None = None) -> Metrics:
        """Return the same metrics from these sums."""
        count, right, losses, squares = np.moveaxis(numbers, -1, 0)
        unknown = np.full_like(count, np.nan)
        return {
            "auc": unknown if histogram is None else mean_of_defined(auc_from_counts(histogram)),
            "auprc": unknown if histogram is None else mean_of_defined(auprc_from_counts(histogram)),
            "accuracy": right / count,
            "log_loss": losses / count,
            "brier": squares / count / self._squares_of_one_error,
        }

    @classmethod
    def claim(cls, labels: LabelColumns) -> Self | None:
        """Return the objective if the number of classes fits this kind, else None."""
        names = classes_of(labels)
        return cls(names) if cls._takes(len(names)) else None

    @classmethod
    def _takes(cls, classes: int) -> bool:
        raise NotImplementedError

    def read(self, labels: LabelColumns) -> NDArray[np.float64]:
        """Return the class indices of labels; NaN for a label that is none of the classes."""
        return class_numbers(labels.only, self.names).to_numpy()

    def require_read(self, labels: LabelColumns) -> Tensor:
        """Return the class indices of labels; another label is an error."""
        series = labels.known
        index = class_numbers(series, self.names)
        require_known(series, index, "label", self.names)
        return torch.tensor(index.to_numpy(dtype=np.int64))

    def as_labels(self, numbers: NDArray[np.float64]) -> Tensor:
        """Return class indices as integers."""
        return torch.from_numpy(numbers.astype(np.int64))

    def blank(self, n: int) -> Tensor:
        """Return n times the first class."""
        return torch.zeros(n, dtype=torch.long)

    def class_marks(self, y: Tensor) -> Tensor:
        """Return whether each sample has each class, [n, 1, classes]."""
        return torch.nn.functional.one_hot(y, len(self.names))[:, None] == 1

    def strata(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the classes: splits are stratified by them."""
        return y

    def aligned(self, y: Tensor, other: Objective) -> Tensor:
        """Return labels with the class indices of this objective; an unknown class is an error."""
        if other.classes is None:
            return super().aligned(y, other)
        known = {str(name): number for number, name in enumerate(self.names)}
        unknown = [name for name in other.classes if str(name) not in known]
        if unknown:
            raise UserError(f"class '{unknown[0]}' was not in training: there are {list(self.names)}.")
        return torch.tensor([known[str(name)] for name in other.classes])[y]

    @property
    def refusal(self) -> str:
        """The end of a sentence about a label that is none of the classes."""
        return f"is not in the study, which has {', '.join(map(str, self.names))}."

    def labels(self, predicted: NDArray[np.floating]) -> NDArray[Any]:
        """Return the most probable class of each sample."""
        kinds = {type(name) for name in self.names}
        named = np.array(self.names, dtype=None if len(kinds) == 1 else object)
        found: NDArray[Any] = named[predicted.argmax(1)]
        return found

    def columns(self, predicted: NDArray[np.floating]) -> dict[str, NDArray[Any]]:
        """Return ``class``, and ``probability_CLASS`` of each class."""
        by_class = zip(self.names, predicted.T, strict=True)
        return {"class": self.labels(predicted)} | {f"probability_{name}": column for name, column in by_class}

    def from_columns(self, table: pd.DataFrame) -> NDArray[np.floating]:
        """Return probabilities from their columns."""
        return table[[f"probability_{name}" for name in self.names]].to_numpy()

    def summary(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a 0/1 column for each class, which is 1 where it is predicted."""
        return pd.DataFrame({str(name): (table["class"] == name).astype(int) for name in self.names})

    def summary_ways(self) -> dict[str, str]:
        """Return "sum" for each class: the samples predicted to have it are counted."""
        return {str(name): "sum" for name in self.names}

    def summarised(self, totals: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return the number of samples predicted to have each class."""
        return {str(name): int(totals[str(name)]) for name in self.names}

    def written(self, y: NDArray[Any]) -> pd.DataFrame:
        """Return one column of classes."""
        return pd.DataFrame({"label": [self.names[number] for number in y.tolist()]})

    def described(self, y: NDArray[Any]) -> str:
        """Return a text with the first classes, each with its share of the samples."""
        counts = np.bincount(y, minlength=len(self.names))
        shown = [f"{name} {count / len(y):.1%}" for name, count in zip(self.names, counts, strict=True)]
        more = ["…"] if len(self.names) > MOST_NAMES else []
        return f"one of {len(self.names)} classes: {', '.join([*shown[:MOST_NAMES], *more])}"

    def rate_title(self) -> str:
        """Return the title of ``rate``."""
        return "most common"

    def rate(self, y: NDArray[Any]) -> str:
        """Return the most common class."""
        return str(self.names[np.bincount(y).argmax()])

    def only(self, y: NDArray[Any]) -> str | None:
        """Return the class of all these samples if they have only one, else None."""
        return str(self.names[int(y[0])]) if len(y) and (y == y[0]).all() else None
