"""The model that all methods use: encoder -> (projection) -> one linear head per key.

The encoder with its projection is one module (``body``); heads are plain matrices [outputs, width] outside of it,
since there is one for each key of their scope. The encoder's features are followed by one column for each domain if
the domain is an input, and by a constant 1 if heads have a bias; so a head is one matrix in training and aggregation.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddar.data.cohort import CHUNK, Cohort
from feddar.data.images import Scale
from feddar.errors import UserError
from feddar.models.encoders import build_encoder
from feddar.models.parameters import ALL, Parameters
from feddar.objectives import Objective
from feddar.settings import Settings


class Body(nn.Module):
    """The encoder, with the scaling of pixels before it and the projection to k dimensions after it."""

    def __init__(self, encoder: nn.Module, scale: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.scale = scale
        self.encoder = encoder
        self.projection = projection

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Return features [batch, width]."""
        features: Tensor = self.projection(self.encoder(self.scale(first), *others))
        return features


@dataclass
class Model:
    """The body, whose weights are loaded when needed, and the shape of the heads on top of it."""

    objective: Objective
    body: nn.Module
    width: int
    bias: bool
    dtype: torch.dtype = torch.float32
    domain_columns: int = 0

    @property
    def outputs(self) -> int:
        """The number of outputs of a head."""
        return self.objective.outputs

    def load(self, parameters: Parameters, key: str) -> None:
        """Load the encoder of that key into the body."""
        self.body.load_state_dict(parameters.encoder(key))

    def features(self, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
        """Return the inputs of heads [n, width]: the encoder's features, the domain's columns and the constant 1."""
        return self.with_constants(self.body(*x), domain)

    def with_constants(self, encoded: Tensor, domain: Tensor) -> Tensor:
        """Append the domain's columns and the constant 1 to the encoder's features [..., k]."""
        columns = [encoded]
        if self.domain_columns:
            columns.append(functional.one_hot(domain, self.domain_columns).to(self.dtype))
        if self.bias:
            columns.append(encoded.new_ones(*encoded.shape[:-1], 1))
        return torch.cat(columns, dim=-1) if len(columns) > 1 else encoded

    def frozen_features(self, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
        """Return features of the frozen encoder: in evaluation mode, without gradient, CHUNK samples at a time."""
        self.body.eval()
        chunks = [slice(i, i + CHUNK) for i in range(0, len(domain), CHUNK)]
        with torch.no_grad():
            found = [self.features(tuple(part[chunk] for part in x), domain[chunk]) for chunk in chunks]
        return torch.cat(found) if found else torch.zeros(0, self.width, dtype=self.dtype)

    def batch_norm_names(self) -> set[str]:
        """Return the names of the parameters and statistics of the body's batch-norm layers."""
        layers = {
            name: layer
            for name, layer in self.body.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        }
        return {f"{name}.{part}" for name, layer in layers.items() for part in layer.state_dict()}


def in_precision(x: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return inputs with floats in that precision; pixels and level numbers stay integers."""
    return tuple(part.to(dtype) if part.is_floating_point() else part for part in x)


def scores(features: Tensor, heads: Tensor, key: Tensor) -> Tensor:
    """Score each sample by its own head: features [n, p], heads [K, outputs, p], key [n] -> [n, outputs]."""
    count, outputs, width = heads.shape
    if count == 1:
        return features @ heads[0].T
    # One product for all heads, then a choice, is faster than gathering a head for every sample.
    every = (features @ heads.reshape(count * outputs, width).T).view(-1, count, outputs)
    return choose(every, key)


def choose(values: Tensor, key: Tensor) -> Tensor:
    """Select each sample's entry: values [n, K, ...], key [n] -> [n, ...]."""
    return values[torch.arange(key.shape[0]), key]


def build_model(cohort: Cohort, encoder: nn.Module | str | None, settings: Settings) -> tuple[Model, Parameters]:
    """Return the model for a cohort and its initial parameters, which are the same for every method with one seed."""
    k, bias, dtype = settings.k, settings.bias, getattr(torch, settings.dtype)
    example = in_precision(tuple(part[:2] for part in cohort.x), dtype)
    scale = nn.Identity() if cohort.scaling is None else Scale(cohort.scaling).to(dtype)
    with seeded(settings.seed, "initial weights"):
        module = build_encoder(encoder, cohort, k, settings.weights).to(dtype).eval()
        width = _feature_width(module, (scale(example[0]), *example[1:]))
        # An encoder that already has k features needs no projection.
        projection = nn.Linear(width, k) if k not in (None, width) else nn.Identity()
        body = Body(module, scale, projection).to(dtype)
        layer = nn.Linear(k or width, cohort.objective.outputs, bias=bias)
    # The domain's columns start at zero, so that all methods start from the same function.
    domains = len(cohort.domains) if settings.row().domain_input else 0
    columns = [layer.weight, torch.zeros(cohort.objective.outputs, domains), *([layer.bias[:, None]] if bias else [])]
    head = torch.cat(columns, dim=1)
    model = Model(cohort.objective, body, head.shape[1], bias, dtype, domains)
    initial = {name: value.clone() for name, value in body.state_dict().items()}
    return model, Parameters({ALL: initial}, {ALL: head.detach().to(dtype).clone()})


def _feature_width(encoder: nn.Module, example: tuple[Tensor, ...]) -> int:
    shapes = [tuple(part.shape[1:]) for part in example]
    try:
        with torch.no_grad():
            features = encoder(*example)
    except Exception as error:
        raise UserError(f"the encoder does not take inputs of shape {shapes}: {error}") from error
    if not isinstance(features, Tensor) or features.ndim != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"the encoder must give [batch, features], and gives {shape} for inputs of shape {shapes}.")
    return features.shape[1]


class seeded:  # noqa: N801 - reads as a verb: with seeded(...)
    """Run a block with torch's random generator seeded from the arguments, and restore the generator afterwards.

    What the block draws (initial weights, shuffles, dropout) depends only on the arguments: not on the order of
    clients, the number of workers or the engine. The generator is global, so one thread is in such a block at a time.
    """

    _generator = threading.RLock()

    def __init__(self, seed: int, *about: object) -> None:
        text = "/".join(map(str, (seed, *about)))
        self.seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def __enter__(self) -> None:
        self._generator.acquire()
        self.before = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed)  # torch.manual_seed takes a millisecond to look for devices

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.before)
        self._generator.release()
