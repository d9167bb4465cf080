"""Several yes/no outcomes at once (multi-label), each with the logistic loss.

The loss of a sample is the sum over outputs of log(1 + e^s) - y s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from feddar.errors import RowError, UserError
from feddar.lazy import pandas as pd
from feddar.objectives.areas import areas, auc_from_counts, auprc_from_counts, mean_of_defined
from feddar.objectives.labels import TRUTH, LabelColumns, by_distinct, without_gaps, written
from feddar.objectives.logistic import Logistic
from feddar.objectives.objective import Curvature, Metrics, Terms, mean_by_sample
from feddar.objectives.score_bins import EPSILON

WORDS = TRUTH | {"0": 0.0, "1": 1.0}


@dataclass(frozen=True)
class MultiLabel(Logistic):
    """Several yes/no outcomes; ``names`` are their columns."""

    names: tuple[str, ...]

    task = "multilabel"
    gaps = ("auc",)
    default_curvature = "block"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics: means over outcomes (auc, ...), then those of each outcome (auc:NAME, ...)."""
        return (*_MEANS, *(f"{metric}:{name}" for name in self.names for metric in _MEANS))

    @property
    def risk_outcomes(self) -> tuple[str, ...]:
        """The outcomes, as the end of their metrics' names."""
        return tuple(f":{name}" for name in self.names)

    @property
    def outputs(self) -> int:
        """The number of outputs: the log-odds of each outcome."""
        return len(self.names)

    @property
    def kind(self) -> str:
        """The number of outcomes, as text."""
        return f"{len(self.names)} yes / no outcomes"

    @property
    def fingerprint(self) -> Any:
        """The names of the outcomes."""
        return self.names

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the sum over outputs of log(1 + e^s) - y s."""
        return self._losses(scores, y).sum(1)

    def weighted_loss(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return the same with a weight of each sample [n], or of each sample and output [n, outputs]."""
        if weight.dim() == 1:
            return super().weighted_loss(scores, y, weight)
        return (weight * self._losses(scores, y)).sum(1)

    def _losses(self, scores: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(scores, y.to(scores.dtype), reduction="none")

    def weighted_curvature(self, kind: Curvature, scores: Tensor, features: Tensor, weight: Tensor) -> Tensor:
        """Return the curvature of the weighted losses; in the Gram matrix a sample has the mean over its outputs."""
        if weight.dim() == 1 or kind == "gram":
            return super().weighted_curvature(kind, scores, features, mean_by_sample(weight))
        pairs = zip(scores.T, weight.sqrt().T, strict=True)
        blocks = torch.cat([self.curvature("block", each[:, None], root[:, None] * features) for each, root in pairs])
        return blocks if kind == "block" else torch.block_diag(*blocks)[None]

    def class_marks(self, y: Tensor) -> Tensor:
        """Return whether each outcome is no, and whether it is yes, [n, outputs, 2]."""
        return torch.stack([y == 0, y == 1], dim=2)

    def residual(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return p - y of each output."""
        return torch.sigmoid(scores) - y.to(scores.dtype)

    def predictions(self, scores: Tensor) -> Tensor:
        """Return the probability of each outcome, [n, outputs]."""
        return torch.sigmoid(scores)

    def scores_of(self, predicted: Tensor) -> Tensor:
        """Return log-odds."""
        return torch.logit(predicted)

    def decisions(self, predicted: Tensor) -> Tensor:
        """Return 1 where an outcome is more probable than not."""
        return (predicted > 0.5).long()

    def measure_parts(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> Metrics:
        """Return the areas under both curves, accuracy, log-loss and Brier score of each output, and their means."""
        given = np.clip(np.where(y == 1, predicted, 1 - predicted), EPSILON, 1 - EPSILON)
        found = [areas(y[..., k] == 1, predicted[..., k]) for k in range(self.outputs)]
        roc, precision = (np.stack(each, axis=-1) for each in zip(*found, strict=True))
        by_output = {
            "auc": roc,
            "auprc": precision,
            "accuracy": ((predicted > 0.5) == (y == 1)).mean(1),
            "log_loss": -np.log(given).mean(1),
            "brier": ((predicted - y) ** 2).mean(1),
        }
        return self._with_means(by_output)

    def _with_means(self, by_output: Mapping[str, NDArray[np.floating]]) -> Metrics:
        """Return the means over outcomes, then the metrics of each outcome, from metrics [..., outputs]."""
        means = {metric: mean_of_defined(values) for metric, values in by_output.items()}
        each = {
            f"{metric}:{n}": values[..., k] for k, n in enumerate(self.names) for metric, values in by_output.items()
        }
        return means | each

    def terms(self, y: Tensor, predicted: Tensor) -> Terms:
        """Return 1 of each sample; of each outcome whether it is correct, its log-loss, square and probability."""
        one, truth = torch.ones(len(y), 1, dtype=torch.float64), y == 1
        given = torch.where(truth, predicted, 1 - predicted).clamp(EPSILON, 1 - EPSILON)
        right, squares = ((predicted > 0.5) == truth).double(), (predicted - y).square()
        return Terms(torch.cat([one, right, -given.log(), squares], 1), y, predicted)

    def measure_sums(self, numbers: NDArray[Any], histogram: NDArray[Any] | None = None) -> Metrics:
        """Return the same metrics from these sums."""
        means = numbers[..., 1:] / numbers[..., :1]
        right, losses, squares = np.split(means, 3, axis=-1)
        roc = right * np.nan if histogram is None else auc_from_counts(histogram)
        precision = right * np.nan if histogram is None else auprc_from_counts(histogram)
        return self._with_means(
            {"auc": roc, "auprc": precision, "accuracy": right, "log_loss": losses, "brier": squares}
        )

    @classmethod
    def claim(cls, labels: LabelColumns) -> Self | None:
        """Return the objective if there are several columns of labels, else None."""
        if len(labels.columns) == 1:
            return None
        if labels.asked == "regression":
            raise UserError("several outcomes are yes or no, not numbers: name one target, or leave out the task.")
        if labels.positive is not None:
            raise UserError("of several outcomes the positive class is yes: leave out 'positive'.")
        for column in labels.columns:
            found = _truth(column)
            if found.notna().all() and found.nunique() == 1:
                raise UserError(f"the outcome '{column.name}' is the same in every row: there is nothing to learn.")
        return cls(tuple(str(column.name) for column in labels.columns))

    def read(self, labels: LabelColumns) -> NDArray[np.float64]:
        """Return 1 for yes and 0 for no, [n, outputs]; NaN for anything else."""
        return np.stack([_truth(column).to_numpy() for column in self._own(labels)], axis=1)

    def _own(self, labels: LabelColumns) -> tuple[pd.Series[Any], ...]:
        if len(labels.columns) != len(self.names):
            raise UserError(f"the labels need the columns {', '.join(self.names)}.")
        return labels.columns

    def require_read(self, labels: LabelColumns) -> Tensor:
        """Return 1 for yes and 0 for no; anything else is an error with column and row."""
        for column in self._own(labels):
            wrong = _truth(without_gaps(column, f"label '{column.name}'")).isna()
            if wrong.any():
                row = int(wrong.argmax())
                raise RowError(f"the label '{column.name}' is '{column.iloc[row]}', not yes or no.", row)
        return self.as_labels(self.read(labels))

    def as_labels(self, numbers: NDArray[np.float64]) -> Tensor:
        """Return the labels as whole numbers."""
        return torch.from_numpy(numbers.astype(np.int64))

    def blank(self, n: int) -> Tensor:
        """Return n times "no" for all outcomes."""
        return torch.zeros(n, self.outputs, dtype=torch.long)

    def strata(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the index of each sample's combination of outcomes: splits are stratified by it."""
        _, combination = np.unique(y, axis=0, return_inverse=True)
        return combination.reshape(-1)

    @property
    def refusal(self) -> str:
        """The end of a sentence about a label that is neither yes nor no."""
        return "is not yes or no."

    def labels(self, predicted: NDArray[np.floating]) -> NDArray[Any]:
        """Return 1 where an outcome is more probable than not, [n, outputs]."""
        return (predicted > 0.5).astype(np.int64)

    def columns(self, predicted: NDArray[np.floating]) -> dict[str, NDArray[Any]]:
        """Return ``predicted_NAME`` (1 or 0) and ``probability_NAME`` of each outcome."""
        decided = {
            f"predicted_{name}": column for name, column in zip(self.names, self.labels(predicted).T, strict=True)
        }
        return decided | {f"probability_{name}": column for name, column in zip(self.names, predicted.T, strict=True)}

    def from_columns(self, table: pd.DataFrame) -> NDArray[np.floating]:
        """Return probabilities from their columns."""
        return table[[f"probability_{name}" for name in self.names]].to_numpy()

    def summary(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a 0/1 column for each outcome, which is 1 where it is predicted."""
        return pd.DataFrame({name: table[f"predicted_{name}"] for name in self.names})

    def summary_ways(self) -> dict[str, str]:
        """Return "sum" for each outcome: the samples predicted to have it are counted."""
        return dict.fromkeys(self.names, "sum")

    def summarised(self, totals: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return the number of samples predicted to have each outcome."""
        return {name: int(totals[name]) for name in self.names}

    def written(self, y: NDArray[Any]) -> pd.DataFrame:
        """Return a column of 0 and 1 for each outcome."""
        return pd.DataFrame(y, columns=list(self.names))

    def described(self, y: NDArray[Any]) -> str:
        """Return a text with the outcomes, each with its share of the samples."""
        shares = ", ".join(f"{name} {share:.1%}" for name, share in zip(self.names, y.mean(0), strict=True))
        return f"{self.kind}: {shares}"

    def rate_title(self) -> str:
        """Return the title of ``rate``."""
        return f"% {' / '.join(self.names)}"

    def rate(self, y: NDArray[Any]) -> str:
        """Return the share of samples with each outcome in percent."""
        return " / ".join(f"{100 * share:.1f}" for share in y.mean(0))


_MEANS = ("auc", "auprc", "accuracy", "log_loss", "brier")


def _truth(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return 1 for yes, 0 for no and NaN for anything else, for all ways of writing them."""
    read = by_distinct(column, lambda distinct: distinct.map(lambda value: WORDS.get(_word(value))))
    return read.astype(float)


def _word(value: Any) -> str:
    """Return a value in the form of the keys of ``WORDS``: 1.0 and '1.0' are '1'."""
    return written(value).lower().removesuffix(".0")
