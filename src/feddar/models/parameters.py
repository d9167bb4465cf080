"""Parameters of the model: encoders and heads by key, and mean and scale of a number to predict.

The key says who shares them: ``all`` for the global scope, the domain's index for the domain scope, and ``own`` for the
client scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from feddar.methods import Scope

Tensors = dict[str, Tensor]
"""Tensors by name."""

ALL, OWN = "all", "own"


@dataclass(frozen=True)
class Parameters:
    """Encoders and heads by key."""

    encoders: Mapping[str, Tensors] = field(default_factory=dict)
    """The state dict of each key's encoder."""
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Each key's head, [outputs, width]."""
    target: Tensor | None = None
    """Mean and scale [2] by which a number to predict is standardised; None if it is not."""

    def encoder(self, key: str) -> Tensors:
        """Return the encoder of a key; empty if unknown, since an encoder without parameters has no flat names."""
        return self.encoders.get(key, {})

    def with_own(self, own: Parameters) -> Parameters:
        """Return these with a client's own parameters in place of common ones; its encoders may be partial."""
        keys = {**self.encoders, **own.encoders}
        encoders = {key: {**self.encoder(key), **own.encoder(key)} for key in keys}
        return replace(self, encoders=encoders, heads={**self.heads, **own.heads})

    def changed(self, encoders: Mapping[str, Tensors], heads: Mapping[str, Tensor]) -> Parameters:
        """Return these with new values of some encoder parameters and some heads."""
        return self.with_own(Parameters(encoders, heads))

    def moved_to(self, other: Parameters, share: float) -> Parameters:
        """Return the parameters this share (0 to 1) of the way to others with the same keys."""
        encoders = {key: _moved(tensors, other.encoders[key], share) for key, tensors in self.encoders.items()}
        return replace(other, encoders=encoders, heads=_moved(self.heads, other.heads, share))

    def without(self, *groups: str) -> Parameters:
        """Return these without the given groups: ``encoders``, ``heads`` or both."""
        return replace(
            self,
            encoders={} if "encoders" in groups else self.encoders,
            heads={} if "heads" in groups else self.heads,
        )

    def domains(self) -> int:
        """Return the number of domains that have their own head."""
        return sum(key.isdigit() for key in self.heads)


def _moved(tensors: Mapping[str, Tensor], to: Mapping[str, Tensor], share: float) -> Tensors:
    """Return tensors moved a share of the way; counters, and what is not finite, are those where it leads."""

    def moved(start: Tensor, end: Tensor) -> Tensor:
        if not start.is_floating_point():
            return end.clone()
        between = start.lerp(end, share)
        return torch.where(between.isfinite(), between, end)

    return {name: moved(value, to[name]) for name, value in tensors.items()}


def with_heads(parameters: Parameters, heads: Tensor) -> Parameters:
    """Return parameters with these heads of domains, [M, outputs, width]."""
    return replace(parameters, heads={str(m): head for m, head in enumerate(heads)})


def keys(scope: Scope, domains: int) -> list[str]:
    """Return the keys of a scope."""
    return {"global": [ALL], "client": [OWN], "domain": [str(m) for m in range(domains)]}[scope]


def key_of(scope: Scope, domain: int) -> str:
    """Return the key in a scope of samples of a domain."""
    return {"global": ALL, "client": OWN, "domain": str(domain)}[scope]


def key_index(scope: Scope, domain: Tensor) -> Tensor:
    """Return for each sample the index of its key in ``keys(scope, domains)``."""
    return domain if scope == "domain" else torch.zeros_like(domain)
