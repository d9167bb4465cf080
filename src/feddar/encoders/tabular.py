"""Encoders for tables: the linear map of the paper's theory, and a small multi-layer perceptron."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from feddar.errors import UserError


class Standardise(nn.Module):
    """Shift and scale each column by fixed statistics, which the census sums over clients."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("scale", torch.ones(columns))

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns in standard units."""
        return (x - self.mean) / self.scale


def linear(columns: int, k: int | None) -> nn.Module:
    """Return B' x, the encoder of the linear theory; it needs k."""
    if k is None:
        raise UserError("encoder 'linear' needs k, the number of dimensions it maps to: give --k.")
    return nn.Linear(columns, k, bias=False)


def mlp(columns: int, hidden: int = 64, features: int = 32) -> nn.Module:
    """Return two hidden layers on standardised columns."""
    return nn.Sequential(
        Standardise(columns), nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU()
    )
