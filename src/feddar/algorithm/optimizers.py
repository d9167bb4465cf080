"""SGD and Adam, bit for bit as torch.optim computes them on a CPU.

An optimiser here lasts for one client, phase and round, often for a few steps on one small head. The first optimiser
of torch.optim takes two seconds to make in every process (it loads torch's compiler), and its steps take several times
as long as the arithmetic; these avoid both. Small sets of parameters are updated as one vector, large ones one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor

Step = Callable[[], None]

GATHERED = 1 << 18
"""Up to so many numbers are updated as one vector, which saves calls; with more, gathering gradients costs more."""

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def sgd(parameters: list[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Step:
    """Return a function that takes one step of gradient descent with momentum, by the parameters' ``.grad``."""
    values, velocity = _FlatTensors(parameters, keep=True), _FlatTensors(parameters if momentum else [])
    started = [False] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        for group in values.groups(started):
            gradient = values.gradient(group, weight_decay)
            if momentum:
                speed = velocity.of(group)
                # As in torch.optim, the velocity starts as the first gradient.
                gradient = speed.mul_(momentum).add_(gradient) if started[group[0]] else speed.copy_(gradient)
            values.of(group).add_(gradient, alpha=-lr)
            for index in group:
                started[index] = True

    return step


def adam(parameters: list[Tensor], lr: float, weight_decay: float = 0.0) -> Step:
    """Return a function that takes one step of Adam (Kingma and Ba, 2015), by the parameters' ``.grad``."""
    values, means, squares = _FlatTensors(parameters, keep=True), _FlatTensors(parameters), _FlatTensors(parameters)
    steps = [0] * len(parameters)

    @torch.no_grad()
    def step() -> None:
        for group in values.groups(steps):
            gradient = values.gradient(group, weight_decay)
            number = steps[group[0]] + 1
            mean = means.of(group).lerp_(gradient, 1 - BETA1)
            square = squares.of(group).mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            scale = (square.sqrt() / sqrt(1 - BETA2**number)).add_(EPSILON)
            values.of(group).addcdiv_(mean, scale, value=-lr / (1 - BETA1**number))
            for index in group:
                steps[index] = number

    return step


class _FlatTensors:
    """Tensors of the parameters' shapes; small sets are views of one vector, so that one operation updates all.

    With ``keep`` they are the parameters themselves; otherwise they start at zero.
    """

    def __init__(self, parameters: list[Tensor], keep: bool = False) -> None:
        self.parameters = parameters
        self.whole: Tensor | None = None
        self.parts = [p.detach() if keep else torch.zeros_like(p, requires_grad=False) for p in parameters]
        if 0 < sum(p.numel() for p in parameters) <= GATHERED:
            self.whole = torch.cat([part.flatten() for part in self.parts])
            parts = self.whole.split([p.numel() for p in parameters])
            self.parts = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        if keep:
            for parameter, part in zip(parameters, self.parts, strict=True):
                parameter.data = part

    def groups(self, steps: Sequence[int]) -> list[list[int]]:
        """Return groups of indices to update at once: all parameters, or one by one those that have a gradient."""
        moving = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if self.whole is not None and len(moving) == len(self.parameters) and len(set(steps)) == 1:
            return [moving]
        return [[index] for index in moving]

    def of(self, group: list[int]) -> Tensor:
        """Return the whole vector, or the one tensor of a group of one."""
        return self.parts[group[0]] if self.whole is None or len(group) < len(self.parts) else self.whole

    def gradient(self, group: list[int], weight_decay: float) -> Tensor:
        """Return the gradient of a group, weight decay included."""
        values, gradients = self.of(group), [self.parameters[index].grad for index in group]
        found = [each for each in gradients if each is not None]
        gradient = found[0].reshape(values.shape) if len(found) == 1 else torch.cat([each.flatten() for each in found])
        return gradient.add(values, alpha=weight_decay) if weight_decay else gradient
