"""The model that all methods use: encoder -> (projection) -> one linear head per key.

The encoder with its projection is one module (``body``); heads are plain matrices [outputs, width] outside of it,
since there is one for each key of their scope. The encoder's features are followed by one column for each domain if
the domain is an input, and by a constant 1 if heads have a bias; so a head is one matrix in training and aggregation.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, channels_last, nn

from feddar.data.cohort import CHUNK, Cohort
from feddar.data.images import BYTES_AT_ONCE, Scale
from feddar.errors import UserError
from feddar.models.compiled import Compiled
from feddar.models.devices import CPU, fed, find_device, move_module, seed_devices
from feddar.models.encoders import build_encoder
from feddar.models.parameters import ALL, Parameters
from feddar.objectives import Objective
from feddar.settings import Settings

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions lower than that of parameters."""
IMAGE = 4
"""The number of dimensions of a batch of images."""


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
    device: torch.device = CPU
    """Where clients work with it; the body gets there when work begins (``place``)."""
    precision: torch.dtype | None = None
    """The precision of the body in training mode, where that is lower (bf16, fp16); None: as ``dtype``."""
    compiled: bool = False
    """Whether the body in training mode is compiled."""
    _compiled: Compiled | None = field(default=None, init=False)

    @property
    def outputs(self) -> int:
        """The number of outputs of a head."""
        return self.objective.outputs

    def place(self) -> None:
        """Move the body to the device; not when it is made, since workers get it from a process that uses none."""
        move_module(self.body, self.device)

    def load(self, parameters: Parameters, key: str) -> None:
        """Load the encoder of that key into the body."""
        self.body.load_state_dict(parameters.encoder(key))

    def features(self, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
        """Return the inputs of heads [n, width]: the encoder's features, the domain's columns and the constant 1."""
        return self.with_constants(self._encoded(fed(x, self.device)), domain)

    def _encoded(self, x: tuple[Tensor, ...]) -> Tensor:
        """Return the encoder's features; in training compiled, or in lower precision, if that is asked for."""
        if not self.body.training:
            encoded: Tensor = self.body(*x)
            return encoded
        if self.precision is None:
            return self._network(*x)
        if self.device.type == "cuda":  # in lower precision its convolutions want channels last
            x = tuple(part.contiguous(memory_format=channels_last) if part.ndim == IMAGE else part for part in x)
        with torch.autocast(self.device.type, self.precision):
            return self._network(*x).to(self.dtype)

    @property
    def _network(self) -> Callable[..., Tensor]:
        """The body, compiled if that is asked for."""
        if not self.compiled:
            return self.body
        if self._compiled is None or self._compiled.module is not self.body:
            self._compiled = Compiled(self.body)
        return self._compiled

    def with_constants(self, encoded: Tensor, domain: Tensor) -> Tensor:
        """Append the domain's columns and the constant 1 to the encoder's features [..., k]."""
        columns = [encoded]
        if self.domain_columns:
            every = torch.arange(self.domain_columns, device=domain.device)
            columns.append((domain[..., None] == every).to(self.dtype))
        if self.bias:
            columns.append(encoded.new_ones(*encoded.shape[:-1], 1))
        return torch.cat(columns, dim=-1) if len(columns) > 1 else encoded

    def frozen_features(self, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
        """Return features of the frozen encoder: in evaluation mode, without gradient, some samples at a time."""
        self.body.eval()
        step = _rows_at_once(x)
        chunks = [slice(i, i + step) for i in range(0, len(domain), step)]
        with torch.no_grad():
            found = [self.features(tuple(part[chunk] for part in x), domain[chunk]) for chunk in chunks]
        return torch.cat(found) if found else torch.zeros(0, self.width, dtype=self.dtype, device=domain.device)

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


def _rows_at_once(x: tuple[Tensor, ...]) -> int:
    """Return for how many samples features are computed at a time: ``CHUNK``, or fewer of large images."""
    each = sum(part[0].nbytes for part in x if len(part))
    return max(1, min(CHUNK, BYTES_AT_ONCE // max(each, 1)))


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
    return values[torch.arange(key.shape[0], device=key.device), key]


def build_model(cohort: Cohort, encoder: nn.Module | str | None, settings: Settings) -> tuple[Model, Parameters]:
    """Return the model for a cohort and its initial parameters, which are the same for every method with one seed."""
    k, bias, dtype = settings.k, settings.bias, getattr(torch, settings.dtype)
    example = in_precision(tuple(part[:2] for part in cohort.x), dtype)
    scale = nn.Identity() if cohort.scaling is None else Scale(cohort.scaling).to(dtype)
    with seeded(settings.seed, "initial weights"):
        module = build_encoder(encoder, cohort, k, settings.weights).to(dtype).eval()
        width = _feature_width(module, (scale(example[0]), *example[1:]))
        _require_gaps_taken(module, cohort, (scale(example[0]), *example[1:]))
        # An encoder that already has k features needs no projection.
        projection = nn.Linear(width, k) if k not in (None, width) else nn.Identity()
        body = Body(module, scale, projection).to(dtype)
        layer = nn.Linear(k or width, cohort.objective.outputs, bias=bias)
    # The domain's columns start at zero, so that all methods start from the same function.
    domains = len(cohort.domains) if settings.row().domain_input else 0
    columns = [layer.weight, torch.zeros(cohort.objective.outputs, domains), *([layer.bias[:, None]] if bias else [])]
    head = torch.cat(columns, dim=1)
    device = find_device(settings.device, dtype)
    how = device, LOWER.get(settings.precision), settings.compile
    model = Model(cohort.objective, body, head.shape[1], bias, dtype, domains, *how)
    initial = {name: value.clone() for name, value in body.state_dict().items()}
    return model, Parameters({ALL: initial}, {ALL: head.detach().to(dtype).clone()})


def _feature_width(encoder: nn.Module, example: tuple[Tensor, ...]) -> int:
    shapes = [tuple(part.shape[1:]) for part in example]
    try:
        with torch.no_grad():
            features = encoder(*example)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the encoder does not take inputs of shape {shapes}: {reason}") from error
    if (
        not isinstance(features, Tensor)
        or features.ndim != 2
        or len(features) != len(example[0])
        or not len(features.T)
    ):
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(f"the encoder must give [batch, features], and gives {shape} for inputs of shape {shapes}.")
    return features.shape[1]


def _require_gaps_taken(encoder: nn.Module, cohort: Cohort, example: tuple[Tensor, ...]) -> None:
    """Refuse an encoder whose features are not finite where a number is missing, if the table has such gaps."""
    measured = [column for column in cohort.columns or () if column.is_numeric]
    gaps = torch.tensor([column.gaps for column in measured], dtype=torch.bool)
    if not gaps.any():
        return
    parts = (
        part.masked_fill(gaps, torch.nan) if each.kind == "numbers" else part
        for part, each in zip(example, cohort.layout, strict=True)
    )
    with torch.no_grad():
        finite = bool(encoder(*parts).isfinite().all())
    if not finite:
        names = ", ".join(f"'{column.name}'" for column in measured if column.gaps)
        raise UserError(
            f"the encoder's features are not finite where a value is missing (NaN), and there are gaps in {names}: "
            "fill them in, let the encoder do so, or choose a named encoder, such as mlp."
        )


def seeds_of(shared: Iterable[object], each: Iterable[object]) -> Iterator[int]:
    """Yield the seed of ``seeded(*shared, one)`` for each one; what they share is hashed once."""
    before = hashlib.blake2b("".join(f"{part}/" for part in shared).encode(), digest_size=8)
    for one in each:
        whole = before.copy()
        whole.update(str(one).encode())
        yield int.from_bytes(whole.digest(), "big") >> 1


class seeded:  # noqa: N801 - reads as a verb: with seeded(...)
    """Run a block with torch's random generator seeded from the arguments, and restore the generator afterwards.

    What the block draws (initial weights, shuffles, dropout) depends only on the arguments: not on the order of
    clients, the number of workers or the engine. The generator is global, so one thread is in such a block at a time.
    """

    _generator = threading.RLock()

    def __init__(self, seed: int, *about: object) -> None:
        *shared, last = seed, *about
        self.seed = next(seeds_of(shared, [last]))

    def __enter__(self) -> None:
        self._generator.acquire()
        self.before = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed)  # torch.manual_seed takes a millisecond to look for devices
        seed_devices(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.before)
        self._generator.release()
