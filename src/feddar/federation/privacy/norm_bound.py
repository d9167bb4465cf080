"""The bound of changes: no phase moves a tensor of the model by more than a multiple of its own length.

Training from a model that is somewhere near does not. So the bound says nothing about honest sites, and limits what one
that is not honest can do, also where nobody sees its reply: sums are over numbers of a known size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.processors import Processor
from feddar.algorithm.protocol import Reply, Request
from feddar.models.parameters import Tensors


def bound_of(sent: Tensor, factor: float) -> float:
    """Return by how much a tensor that was sent may be moved: ``factor`` (1 + its length)."""
    return factor * (1 + length(sent))


def length(value: Tensor) -> float:
    """Return the Euclidean norm of a tensor's finite values; an encoder may hold infinite constants."""
    return float(torch.linalg.vector_norm(value.double().nan_to_num(nan=0, posinf=0, neginf=0)))


@dataclass(frozen=True)
class NormBound(Processor):
    """The processor that shortens changes which are longer than the bound."""

    factor: float

    @property
    def promise(self) -> str:
        """A sentence that says what holds for everything that leaves the site."""
        return f"In a phase, no tensor of the model is moved by more than {self.factor:g} times 1 + its length."

    def process(self, request: Request, reply: Reply, rows: Tensor) -> Reply:
        """Return the reply with changes of at most the bound."""
        sent = request.parameters
        encoders = {
            key: replace(part, tensors=self._shortened(part.tensors, sent.encoder(key)))
            for key, part in reply.encoders.items()
        }
        heads = {
            key: replace(part, head=self._shorter(part.head, sent.heads[key])) for key, part in reply.heads.items()
        }
        return replace(reply, encoders=encoders, heads=heads)

    def _shortened(self, trained: Tensors, sent: Tensors) -> Tensors:
        return {name: self._shorter(value, sent[name]) for name, value in trained.items()}

    def _shorter(self, trained: Tensor, sent: Tensor) -> Tensor:
        moved, most = length(trained.double() - sent.double()), bound_of(sent, self.factor)
        # Without a change of a bit where the bound is kept: that is how it is, but for a training that diverges.
        return trained if moved <= most else sent.lerp(trained, most / moved)
