"""An example of every kind of outcome, and small problems for linear heads."""

import torch
from torch import Tensor

from feddar.objectives import KINDS, Binary, Multiclass, MultiLabel, Objective, Regression

EXAMPLES: dict[str, Objective] = {
    example.task: example
    for example in (
        MultiLabel(("died", "icu", "pain")),
        Regression(),
        Binary(("no", "yes")),
        Multiclass(("a", "b", "c", "d")),
    )
}
"""By task; a new kind of outcome needs one here."""
TASKS = tuple(kind.task for kind in KINDS)


def draw_labels(objective: Objective, n: int, generator: torch.Generator) -> Tensor:
    """Draw labels at random, each class with samples where there are enough; numbers are in float64."""
    if objective.in_units:
        return torch.randn(n, generator=generator, dtype=torch.float64)
    if objective.classes is None:
        return torch.randint(0, 2, (n, objective.outputs), generator=generator)
    return torch.randperm(n, generator=generator) % len(objective.classes)


def draw_problem(objective: Objective, n: int = 40, p: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a head W [outputs, p], features X [n, p] and labels y [n] at random, numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, p, generator=generator, dtype=torch.float64)
    W = torch.randn(objective.outputs, p, generator=generator, dtype=torch.float64)
    return W, X, draw_labels(objective, n, generator)
