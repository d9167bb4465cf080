"""Parameters by the key of who shares them: encoders, heads, and the units of a number to predict.

A key is ``all`` for the global scope, the domain's number for the domain scope, and ``own`` for what stays with a
client.
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
    """What predicts: encoders and heads by key."""

    encoders: Mapping[str, Tensors] = field(default_factory=dict)
    """Parameters and statistics of each key's encoder, by their names in it."""
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Each key's head, [outputs, width]."""
    target: Tensor | None = None
    """Mean and scale of a number to predict, by which it is learned in standard units."""

    def encoder(self, key: str) -> Tensors:
        """Return the encoder of a key; where it has no parameters, flat names do not tell of it, and it is empty."""
        return self.encoders.get(key, {})

    def with_own(self, own: Parameters) -> Parameters:
        """Return these with what is a client's own in place of what is common; of an encoder, that may be a part."""
        keys = {**self.encoders, **own.encoders}
        encoders = {key: {**self.encoder(key), **own.encoder(key)} for key in keys}
        return replace(self, encoders=encoders, heads={**self.heads, **own.heads})

    def changed(self, encoders: Mapping[str, Tensors], heads: Mapping[str, Tensor]) -> Parameters:
        """Return these with new values of some encoders' parameters and of some heads."""
        return self.with_own(Parameters(encoders, heads))

    def without(self, *groups: str) -> Parameters:
        """Return these without encoders, or without heads, as the groups say."""
        return replace(
            self,
            encoders={} if "encoders" in groups else self.encoders,
            heads={} if "heads" in groups else self.heads,
        )

    def domains(self) -> int:
        """Return how many domains have a head of their own."""
        return sum(key.isdigit() for key in self.heads)


def keys(scope: Scope, domains: int) -> list[str]:
    """Name the keys of a scope."""
    return {"global": [ALL], "client": [OWN], "domain": [str(m) for m in range(domains)]}[scope]


def key_of(scope: Scope, domain: int) -> str:
    """Name the key that a domain's samples belong to."""
    return {"global": ALL, "client": OWN, "domain": str(domain)}[scope]


def key_index(scope: Scope, domain: Tensor) -> Tensor:
    """Return which of the scope's keys each sample belongs to."""
    return domain if scope == "domain" else torch.zeros_like(domain)
