"""A number to predict (regression), with the squared loss (s - y)^2 / 2, whose curvature is X'X for any scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.errors import RowError, UserError
from feddar.lazy import pandas as pd
from feddar.objectives.labels import LabelColumns, is_measured, numbers_of
from feddar.objectives.objective import Curvature, Metrics, Objective, Terms


@dataclass(frozen=True)
class Regression(Objective):
    """A number to predict."""

    task = "regression"
    metrics = ("mse", "rmse", "mae", "r2")
    gaps = ("mse",)
    in_units = True

    @property
    def outputs(self) -> int:
        """The number of outputs, 1: the number itself."""
        return 1

    @property
    def kind(self) -> str:
        """What is predicted, in a few words."""
        return "a number"

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return (s - y)^2 / 2."""
        return 0.5 * (scores[:, 0] - y).square()

    def residual(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return s - y."""
        return scores - y[:, None]

    def bend(self, kind: Curvature, scores: Tensor, along: Tensor) -> Tensor:
        """Return the direction itself: the second derivative is 1."""
        return along

    def curvature(self, kind: Curvature, scores: Tensor, features: Tensor) -> Tensor:
        """Return X'X, which is the Hessian."""
        return (features.T @ features)[None]

    def is_gram(self, kind: Curvature | None) -> bool:
        """Return whether curvature is asked for at all, since every kind of it is X'X."""
        return kind is not None

    def predictions(self, scores: Tensor) -> Tensor:
        """Return the numbers, [n]."""
        return scores[:, 0]

    def scores_of(self, predicted: Tensor) -> Tensor:
        """Return the numbers as scores, [n, 1]."""
        return predicted[:, None]

    def measure_parts(self, y: NDArray[Any], predicted: NDArray[np.floating]) -> Metrics:
        """Return mean squared error, its root, mean absolute error, and R2 = 1 - error / variance of the labels."""
        error, spread = ((y - predicted) ** 2).mean(-1), y.var(-1)
        return {
            "mse": error,
            "rmse": np.sqrt(error),
            "mae": np.abs(y - predicted).mean(-1),
            "r2": 1 - error / np.where(spread > 0, spread, np.nan),
        }

    def terms(self, y: Tensor, predicted: Tensor) -> Terms:
        """Return 1, squared and absolute error, label and squared label of each sample."""
        label = y.double()
        one, errors = torch.ones(len(label), dtype=torch.float64), label - predicted
        return Terms(torch.stack([one, errors.square(), errors.abs(), label, label.square()], 1))

    def measure_sums(self, numbers: NDArray[Any], histogram: NDArray[Any] | None = None) -> Metrics:
        """Return the same metrics from these sums."""
        errors, distances, mean, squares = np.moveaxis(numbers[..., 1:] / numbers[..., :1], -1, 0)
        spread = squares - mean**2
        varies = spread > 1e-12 * (1 + mean**2)
        explained = 1 - errors / np.where(varies, spread, np.nan)
        return {"mse": errors, "rmse": np.sqrt(errors), "mae": distances, "r2": explained}

    @classmethod
    def claim(cls, labels: LabelColumns) -> Self | None:
        """Return the objective if the user asked for regression or the labels look like measurements, else None."""
        measured = labels.asked == "auto" and labels.known_classes is None and labels.positive is None
        if labels.asked != "regression" and not (measured and is_measured(labels.known)):
            return None
        if len(labels.known) > 1 and labels.known.nunique() == 1:
            raise UserError(f"the label is {labels.known.iloc[0]} in every row: there is nothing to learn.")
        return cls()

    def read(self, labels: LabelColumns) -> NDArray[np.float64]:
        """Return the numbers; NaN for a missing, infinite or invalid one."""
        numbers = numbers_of(labels.only)
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def require_read(self, labels: LabelColumns) -> Tensor:
        """Return the numbers, all of which must be finite."""
        try:
            numbers = labels.known.to_numpy(dtype=np.float64)
        except ValueError as error:
            raise UserError(f"the label must be a number for regression: {error}.") from None
        if not np.isfinite(numbers).all():
            raise RowError("the label is not finite.", int((~np.isfinite(numbers)).argmax()))
        return torch.tensor(numbers)

    def as_labels(self, numbers: NDArray[np.float64]) -> Tensor:
        """Return the numbers."""
        return torch.from_numpy(numbers)

    def blank(self, n: int) -> Tensor:
        """Return zeros."""
        return torch.zeros(n)

    @property
    def refusal(self) -> str:
        """The end of a sentence about a label that is not a number."""
        return "is not a number."

    def labels(self, predicted: NDArray[np.floating]) -> NDArray[Any]:
        """Return the numbers."""
        return predicted

    def columns(self, predicted: NDArray[np.floating]) -> dict[str, NDArray[Any]]:
        """Return one column, ``prediction``."""
        return {"prediction": predicted}

    def from_columns(self, table: pd.DataFrame) -> NDArray[np.floating]:
        """Undo ``columns``."""
        return table["prediction"].to_numpy()

    def summary(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the numbers three times: for their minimum, their sum and their maximum."""
        return pd.DataFrame(dict.fromkeys(self.summary_ways(), table["prediction"]))

    def summary_ways(self) -> dict[str, str]:
        """Return how each column of ``summary`` is aggregated."""
        return {"least": "min", "total": "sum", "greatest": "max"}

    def summarised(self, totals: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return the minimum, the mean and the maximum."""
        return {"least": totals["least"], "mean": totals["total"] / rows, "greatest": totals["greatest"]}

    def written(self, y: NDArray[Any]) -> pd.DataFrame:
        """Return one column of numbers."""
        return pd.DataFrame({"label": y})

    def described(self, y: NDArray[Any]) -> str:
        """Return a text with the range of the numbers."""
        return f"a number, from {float(y.min()):.4g} to {float(y.max()):.4g}"

    def rate_title(self) -> str:
        """Return the title of ``rate``."""
        return "mean label"

    def rate(self, y: NDArray[Any]) -> str:
        """Return the mean of the labels."""
        return f"{y.mean():.3g}"
