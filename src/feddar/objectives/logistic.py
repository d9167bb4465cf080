"""The logistic loss: the base class of outcomes with it, and the objective of two classes.

The loss is log(1 + e^s) - y s; its derivatives by the score are p - y and p (1 - p), with p = 1 / (1 + e^-s). Several
outputs share the features and nothing else, so the curvature of a head has one block p (1 - p) x x' for each of them,
and is zero between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from feddar.objectives.classification import Classification
from feddar.objectives.labels import Scalar
from feddar.objectives.objective import Curvature, Objective


@dataclass(frozen=True)
class Logistic(Objective):
    """The base class of objectives whose outputs are log-odds, each of a yes/no outcome."""

    def bend(self, kind: Curvature, scores: Tensor, along: Tensor) -> Tensor:
        """Return p (1 - p) times the direction; with the Gram matrix, the direction itself."""
        if kind == "gram":
            return along
        p = torch.sigmoid(scores)
        return p * (1 - p) * along

    def curvature(self, kind: Curvature, scores: Tensor, features: Tensor) -> Tensor:
        """Return X' diag(p (1 - p)) X of each output, as blocks or as one matrix; or X'X."""
        if kind == "gram":
            return (features.T @ features)[None]
        p = torch.sigmoid(scores)
        blocks = torch.stack([features.T @ ((q * (1 - q))[:, None] * features) for q in p.T])
        return blocks if kind == "block" else torch.block_diag(*blocks)[None]


@dataclass(frozen=True)
class Binary(Logistic, Classification):
    """Each sample has one of two classes; the last is the positive one."""

    names: tuple[Scalar, ...] = (0, 1)

    task = "binary"
    metrics = ("auc", "auprc", "accuracy", "log_loss", "brier")
    risk_outcomes = ("",)
    gaps = ("auc", "tpr", "fpr", "selection_rate")

    @classmethod
    def _takes(cls, classes: int) -> bool:
        return classes == 2

    @property
    def outputs(self) -> int:
        """The number of outputs, 1: the log-odds of the positive class."""
        return 1

    @property
    def positive(self) -> Scalar:
        """The positive class: the last one."""
        return self.names[1]

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return log(1 + e^s) - y s."""
        return functional.binary_cross_entropy_with_logits(scores[:, 0], y.to(scores.dtype), reduction="none")

    def residual(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return p - y."""
        return torch.sigmoid(scores) - y[:, None].to(scores.dtype)

    def predictions(self, scores: Tensor) -> Tensor:
        """Return the probabilities of both classes, [n, 2]."""
        positive = torch.sigmoid(scores[:, 0])
        return torch.stack([1 - positive, positive], dim=1)

    def scores_of(self, predicted: Tensor) -> Tensor:
        """Return the log-odds of the positive class."""
        return torch.logit(predicted[:, 1:])

    def described(self, y: NDArray[Any]) -> str:
        """Return a text with both classes."""
        return f"two classes, {self.names[0]!r} and the positive class {self.positive!r}"

    def rate_title(self) -> str:
        """Return the title of ``rate``."""
        return f"% {self.positive}"

    def rate(self, y: NDArray[np.int64]) -> str:
        """Return the share of positives in percent."""
        return f"{100 * y.mean():.1f}"
