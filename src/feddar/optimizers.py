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
    velocity: list[Tensor | None] = [None] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        moving, values, slopes = _moving(parameters, weight_decay)
        if momentum:
            for index, slope in zip(moving, slopes, strict=True):
                before = velocity[index]
                velocity[index] = slope.clone() if before is None else before.mul_(momentum).add_(slope)
            slopes = [found for index in moving if (found := velocity[index]) is not None]
        if moving:
            torch._foreach_add_(values, slopes, alpha=-lr)

    return step


def adam(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by Adam (Kingma and Ba, 2015)."""
    means = [torch.zeros_like(parameter) for parameter in parameters]
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    steps = [0] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        moving, values, slopes = _moving(parameters, weight_decay)
        if not moving:
            return
        for index in moving:
            steps[index] += 1
        mean, square = [means[index] for index in moving], [squares[index] for index in moving]
        torch._foreach_lerp_(mean, slopes, 1 - BETA1)
        torch._foreach_mul_(square, BETA2)
        torch._foreach_addcmul_(square, slopes, slopes, 1 - BETA2)
        scale = torch._foreach_sqrt(square)
        torch._foreach_div_(scale, [sqrt(1 - BETA2 ** steps[index]) for index in moving])
        torch._foreach_add_(scale, EPSILON)
        torch._foreach_addcdiv_(values, mean, scale, [-lr / (1 - BETA1 ** steps[index]) for index in moving])

    return step


def _moving(parameters: list[Tensor], weight_decay: float) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Return the parameters that the loss uses: their numbers, values, and gradients with the decay's share."""
    moving = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
    values = [parameters[index] for index in moving]
    slopes = [value.grad for value in values if value.grad is not None]
    if weight_decay and moving:
        slopes = list(torch._foreach_add(slopes, values, alpha=weight_decay))
    return moving, values, slopes
