"""SGD and Adam, to the bit as torch.optim computes them on a CPU.

An optimiser here lives for one client, phase and round, often for a few steps on one small head. Making the first of
torch.optim takes two seconds in every process (it loads torch's compiler), and each step several times the
arithmetic; these take neither.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

Step = Callable[[], None]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def sgd(parameters: list[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by gradient descent with momentum."""
    velocity: list[Tensor] = []

    @torch.no_grad()
    def step() -> None:
        slopes = _slopes(parameters, weight_decay)
        if momentum and not velocity:
            velocity.extend(slope.clone() for slope in slopes)
        elif momentum:
            for moving, slope in zip(velocity, slopes, strict=True):
                moving.mul_(momentum).add_(slope)
        for parameter, move in zip(parameters, velocity or slopes, strict=True):
            parameter.add_(move, alpha=-lr)

    return step


def adam(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by Adam (Kingma and Ba, 2015)."""
    mean = [torch.zeros_like(parameter) for parameter in parameters]
    square = [torch.zeros_like(parameter) for parameter in parameters]
    steps = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps
        steps += 1
        size, root = lr / (1 - BETA1**steps), sqrt(1 - BETA2**steps)
        for parameter, m, v, slope in zip(parameters, mean, square, _slopes(parameters, weight_decay), strict=True):
            m.lerp_(slope, 1 - BETA1)
            v.mul_(BETA2).addcmul_(slope, slope, value=1 - BETA2)
            parameter.addcdiv_(m, (v.sqrt() / root).add_(EPSILON), value=-size)

    return step


def _slopes(parameters: list[Tensor], weight_decay: float) -> list[Tensor]:
    """Gradients with the decay's share; a parameter that the loss does not use does not move."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.add(p, alpha=weight_decay) if weight_decay else p.grad
        for p in parameters
    ]
