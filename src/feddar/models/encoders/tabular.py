"""Encoders for tables: the linear map of the paper's theory, a small multi-layer perceptron, and a network that has
logistic regression inside it.

Preprocessing is part of the encoder, so it is stored and sent with the model. Its statistics are sums over clients (the
census); each client then fills in, scales and encodes its own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn

from feddar.data.cohort import Cohort
from feddar.data.columns import Column
from feddar.errors import UserError


class Standardise(nn.Module):
    """Shift and scale each column by fixed statistics, which the census sums over clients.

    A missing value (NaN) becomes the column's mean; for the columns in ``gaps``, a 0/1 column says that it was missing.
    """

    mean: Tensor
    scale: Tensor
    gaps: Tensor

    def __init__(self, columns: int, gaps: Sequence[int] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("scale", torch.ones(columns))
        # A list would be copied to the device with every batch.
        self.register_buffer("gaps", torch.tensor(list(gaps), dtype=torch.long), persistent=False)
        self.features = columns + len(self.gaps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised columns, followed by the 0/1 columns of missing values."""
        standard = (x - self.mean) / self.scale
        filled = standard.nan_to_num(0.0, inf, -inf)  # ten times faster than torch.where with isnan()
        return torch.cat([filled, standard[:, self.gaps].isnan().to(filled.dtype)], dim=1) if len(self.gaps) else filled


class CountedEmbedding(nn.Module):
    """An embedding of a category's levels that knows how many samples each level has, which the census sums up.

    A level with n samples is drawn to 0, the place of a missing value, as if by ``PRIOR`` samples: what few patients
    have says little. When encoders are averaged, each level is weighted by its own samples at each client
    (``local_training.weighed_by_levels``): else a level that few clients have would hardly be learned.
    """

    PRIOR = 10.0
    START = 0.1
    counts: Tensor
    total: Tensor

    def __init__(self, levels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.START * torch.randn(levels + 1, size))
        with torch.no_grad():
            self.weight[0] = 0
        self.register_buffer("counts", torch.zeros(levels + 1))
        self.register_buffer("total", torch.zeros(1))

    def forward(self, codes: Tensor) -> Tensor:
        """Return the vector of each level, [batch, size]."""
        known = self.counts / (self.counts + self.PRIOR)
        return nn.functional.embedding(codes, self.weight) * known[codes][:, None]


class TableInput(nn.Module):
    """Standardised numbers, and an embedding for the levels of each category."""

    def __init__(self, numbers: int, gaps: Sequence[int], levels: Sequence[int], counted: bool = False) -> None:
        """If ``counted``, embeddings know how many samples a level has."""
        super().__init__()
        self.numbers = Standardise(numbers, gaps)
        # Level 0 is a missing value. Rule of thumb for the embedding size: half the number of levels, at most 16.
        sizes = [min(16, (count + 2) // 2) for count in levels]
        make = CountedEmbedding if counted else _embedding
        self.levels = nn.ModuleList(make(n, size) for n, size in zip(levels, sizes, strict=True))
        self.features = self.numbers.features + sum(sizes)

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> Tensor:
        """Return one row of numbers [batch, features] for each sample."""
        columns = [self.numbers(numbers)]
        if codes is not None:
            columns += [embedding(codes[:, i].long()) for i, embedding in enumerate(self.levels)]
        return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]


def _embedding(levels: int, size: int) -> nn.Embedding:
    """Return an embedding; row 0, for missing values, starts at 0 and stays there if training has no missing values."""
    embedding = nn.Embedding(levels + 1, size)
    with torch.no_grad():
        embedding.weight[0] = 0
    return embedding


def linear(columns: int, k: int | None) -> nn.Module:
    """Return the encoder B' x of the paper's linear theory, with k outputs."""
    if k is None:
        raise UserError("encoder 'linear' needs k, the number of dimensions it maps to: give --k.")
    return nn.Linear(columns, k, bias=False)


class MLP(nn.Module):
    """Two hidden layers on the inputs of a table."""

    def __init__(self, inputs: TableInput, hidden: int = 64, features: int = 32) -> None:
        super().__init__()
        self.inputs = inputs
        self.layers = nn.Sequential(
            nn.Linear(inputs.features, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU()
        )

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> Tensor:
        """Return features [batch, features]."""
        features: Tensor = self.layers(self.inputs(numbers, codes))
        return features


class Waves(nn.Module):
    """Learned waves of each number, each mixed into a few features (PBLD of RealMLP, Holzmüller et al., 2024).

    A hidden layer bends a number at few places; waves of random length let it follow any smooth curve.
    """

    def __init__(self, numbers: int, waves: int = 16, features: int = 4) -> None:
        super().__init__()
        self.frequency = nn.Parameter(0.5 * torch.randn(numbers, waves))
        self.phase = nn.Parameter(torch.pi * (2 * torch.rand(numbers, waves) - 1))
        self.mix = nn.Parameter(0.5 * torch.randn(numbers, waves, features) / waves**0.5)
        self.bias = nn.Parameter(torch.zeros(numbers, features))
        self.features = numbers * features

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, numbers x features] of standardised numbers [batch, numbers]."""
        waves = torch.cos(2 * torch.pi * self.frequency * x[:, :, None] + self.phase)
        return torch.relu(torch.einsum("npw,pwf->npf", waves, self.mix) + self.bias).flatten(1)


class Ramps(nn.Module):
    """Each number as ramps between fixed places: 0 below, 1 above (piecewise-linear encoding, Gorishniy et al., 2022).

    A linear model of ramps follows any curve with bends at these places, which are in standard deviations.
    """

    knots: Tensor
    KNOTS = (-2.5, -1.5, -1.0, -0.67, -0.33, 0.0, 0.33, 0.67, 1.0, 1.5, 2.0, 3.0)

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.register_buffer("knots", torch.tensor(self.KNOTS), persistent=False)
        self.features = numbers * (len(self.KNOTS) - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, numbers x ramps] of standardised numbers [batch, numbers]."""
        low, high = self.knots[:-1], self.knots[1:]
        return ((x[:, :, None] - low) / (high - low)).clamp(0, 1).flatten(1)


class WideAndDeep(nn.Module):
    """Two hidden layers with a linear path beside them, so that a linear model is inside it and needs no layers.

    Numbers are also given as waves and ramps. Far from the mean they are flattened smoothly (within 3 standard
    deviations).
    """

    real: Tensor

    def __init__(self, inputs: TableInput, real: Sequence[int], hidden: int = 128, features: int = 32) -> None:
        """``real`` are the places of numbers that are not truth values."""
        super().__init__()
        self.inputs = inputs
        self.register_buffer("real", torch.tensor(list(real), dtype=torch.long), persistent=False)
        made = (Waves(len(self.real)), Ramps(len(self.real))) if len(self.real) else ()
        self.curves = nn.ModuleList(made)
        width = inputs.features + sum(curves.features for curves in made)
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU())
        self.linear = nn.Linear(width, features, bias=False)

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> Tensor:
        """Return features [batch, features]."""
        x = self.inputs(numbers, codes)
        x = x * torch.rsqrt(1 + (x / 3).square())
        x = torch.cat([x, *(curves(x[:, self.real]) for curves in self.curves)], dim=1)
        features: Tensor = self.layers(x) + self.linear(x)
        return features


def table_input(cohort: Cohort, counted: bool = False) -> TableInput:
    """Return the input layer for the numbers and categories of a cohort."""
    columns = cohort.columns or ()
    gaps = [place for place, column in enumerate(_measured(cohort)) if column.gaps]
    levels = [len(column.levels) for column in columns if column.kind == "category"]
    return TableInput(0 if cohort.numbers is None else cohort.numbers.shape[1], gaps, levels, counted)


def wide_and_deep(cohort: Cohort) -> WideAndDeep:
    """Return the network for the numbers and categories of a cohort."""
    inputs = table_input(cohort, counted=True)
    if cohort.columns is None:
        return WideAndDeep(inputs, range(inputs.numbers.features))
    return WideAndDeep(inputs, [i for i, column in enumerate(_measured(cohort)) if column.kind != "boolean"])


def _measured(cohort: Cohort) -> list[Column]:
    return [column for column in cohort.columns or () if column.is_numeric]
