"""SGD and Adam, to the bit as torch.optim computes them on a CPU.

An optimiser here lives for one client, phase and round, often for a few steps on one small head. Making the first of
torch.optim takes two seconds in every process (it loads torch's compiler), and each step several times the
arithmetic; these take neither. Parameters are moved as one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor

Step = Callable[[], None]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def sgd(parameters: list[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by gradient descent with momentum."""
    values, velocity = _Flat(parameters, keep=True), _Flat(parameters)
    started = [False] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        for together in _moving(parameters, started):
            slope = values.slope(together, weight_decay)
            if momentum:
                speed = velocity.of(together)
                # The first step has the gradient itself, as torch.optim has it.
                slope = speed.mul_(momentum).add_(slope) if started[together[0]] else speed.copy_(slope)
            values.of(together).add_(slope, alpha=-lr)
            for index in together:
                started[index] = True

    return step


def adam(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Step:
    """Return a function that moves the parameters along their ``.grad`` once, by Adam (Kingma and Ba, 2015)."""
    values, means, squares = _Flat(parameters, keep=True), _Flat(parameters), _Flat(parameters)
    steps = [0] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        for together in _moving(parameters, steps):
            slope = values.slope(together, weight_decay)
            number = steps[together[0]] + 1
            mean = means.of(together).lerp_(slope, 1 - BETA1)
            square = squares.of(together).mul_(BETA2).addcmul_(slope, slope, value=1 - BETA2)
            scale = (square.sqrt() / sqrt(1 - BETA2**number)).add_(EPSILON)
            values.of(together).addcdiv_(mean, scale, value=-lr / (1 - BETA1**number))
            for index in together:
                steps[index] = number

    return step


class _Flat:
    """Tensors like the parameters, side by side in one vector, so that one operation moves them all.

    With ``keep`` the parameters themselves become views of it.
    """

    def __init__(self, parameters: list[Tensor], keep: bool = False) -> None:
        self.parameters = parameters
        self.whole = torch.cat([p.detach().flatten() for p in parameters]) if parameters else torch.zeros(0)
        self.parts = list(self.whole.split([p.numel() for p in parameters]))
        for parameter, part in zip(parameters, self.parts, strict=True):
            if keep:
                parameter.data = part.view_as(parameter)
            else:
                part.zero_()

    def of(self, together: list[int]) -> Tensor:
        """Return all of it, or the one tensor of that number."""
        return self.whole if len(together) == len(self.parts) else self.parts[together[0]]

    def slope(self, together: list[int], weight_decay: float) -> Tensor:
        """Return the gradients, with the decay's share."""
        slopes = [slope.flatten() for index in together if (slope := self.parameters[index].grad) is not None]
        slope = slopes[0] if len(slopes) == 1 else torch.cat(slopes)
        return slope.add(self.of(together), alpha=weight_decay) if weight_decay else slope


def _moving(parameters: list[Tensor], steps: Sequence[int]) -> list[list[int]]:
    """Return the numbers of parameters to move at once: all, or where the loss uses only some, each of these alone."""
    moving = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
    if len(moving) == len(parameters) and len(set(steps)) == 1:
        return [moving]
    return [[index] for index in moving]
