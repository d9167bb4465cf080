"""SGD and Adam, to the bit as torch.optim computes them on a CPU.

An optimiser here lives for one client, phase and round, often for a few steps on one small head. Making the first of
torch.optim takes two seconds in every process (it loads torch's compiler), and each step several times the
arithmetic; these take neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt

import torch
from torch import Tensor

Step = Callable[[], None]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def sgd(parameters: list[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by gradient descent with momentum."""
    velocity: dict[int, Tensor] = {}

    @torch.no_grad()
    def step() -> None:
        for index, (parameter, slope) in _moving(parameters, weight_decay):
            if momentum and index in velocity:
                velocity[index].mul_(momentum).add_(slope)
            elif momentum:
                velocity[index] = slope.clone()
            parameter.add_(velocity[index] if momentum else slope, alpha=-lr)

    return step


def adam(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by Adam (Kingma and Ba, 2015)."""
    mean = [torch.zeros_like(parameter) for parameter in parameters]
    square = [torch.zeros_like(parameter) for parameter in parameters]
    steps = [0] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        for index, (parameter, slope) in _moving(parameters, weight_decay):
            steps[index] += 1
            size, root = lr / (1 - BETA1 ** steps[index]), sqrt(1 - BETA2 ** steps[index])
            mean[index].lerp_(slope, 1 - BETA1)
            square[index].mul_(BETA2).addcmul_(slope, slope, value=1 - BETA2)
            parameter.addcdiv_(mean[index], (square[index].sqrt() / root).add_(EPSILON), value=-size)

    return step


def _moving(parameters: list[Tensor], weight_decay: float) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Give each parameter that the loss uses, its number, and its gradient with the decay's share."""
    for index, parameter in enumerate(parameters):
        slope = parameter.grad
        if slope is not None:
            yield index, (parameter, slope.add(parameter, alpha=weight_decay) if weight_decay else slope)
