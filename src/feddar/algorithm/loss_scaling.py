"""Loss scaling: gradients in fp16 that would be too small for it are computed from a loss that is scaled up.

A scale that is too large makes gradients overflow; such a step is left out, and the scale is halved (Micikevicius et
al., 2018). Like an optimiser's state, a scale lasts for one client, phase and round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 2.0**16
"""The scale at the start; it is only ever halved, since a phase is short."""

Backward = Callable[[Tensor], bool]
"""Computes gradients of a loss, and returns whether they can be used."""


def backward_of(precision: torch.dtype | None, parameters: list[Tensor]) -> Backward:
    """Return how gradients of these parameters are computed; only fp16, whose range is small, needs a scale."""
    return ScaledLoss(parameters) if precision == torch.float16 else plain


def plain(loss: Tensor) -> bool:
    """Compute gradients; they are used as they are."""
    loss.backward()
    return True


class ScaledLoss:
    """Computes gradients from a scaled loss."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters, self.scale = parameters, LARGEST

    def __call__(self, loss: Tensor) -> bool:
        """Compute gradients; return whether all are finite, and halve the scale if not."""
        (loss * self.scale).backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        finite = bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())
        # A loss that is not finite itself is not mended by any scale: the step is taken, and training fails.
        if finite or self.scale <= 1:
            return True
        self.scale /= 2
        return False
