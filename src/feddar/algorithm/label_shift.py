"""Label shift: corrections of scores by the rates of labels at each client (docs/method.md, section Label shift).

Where clients have the same samples of each class, p(x | y), but classes at other rates, the posterior of client k is
that of all clients times a factor of the class, p_k(y | x) ~ p(y | x) t_k(y). With one domain t_k is pi_k(y) / pi(y),
the rates at the client over those of all clients. With several, whose heads know the rates pi_m of their domains, it is
the factor by which these become the rates at the client. It is kept there as a correction of the constant terms of
heads, like the corrections of sites (``algorithm.offsets``), and never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from feddar.algorithm.weighting import class_sums
from feddar.data.cohort import Cohort
from feddar.objectives import Objective

LABELS = "label_sums"
"""The name of sums of a census: weights by domain and class, [M, questions, classes]."""
PRIOR = 10.0
"""How many samples with the expected labels are added to those of each client."""
_MOST_STEPS, _ENOUGH = 500, 1e-10


def label_sums(objective: Objective, data: Cohort, least: int) -> Tensor:
    """Return the sums of weights by domain and class [M, questions, classes], as they may be sent.

    Classes of fewer than ``least`` patients of a domain are told as by ``class_sums``.
    """
    of_domains = (data.rows(data.domain == m) for m in range(len(data.domains)))
    return torch.stack([class_sums(objective, each, least) for each in of_domains])


def label_rates(sums: Tensor, *, by_domain: bool) -> Tensor:
    """Return the rates of classes over all clients from their sums [M, questions, classes], by domain or over all.

    They are [M or 1, questions, classes]; 0 for a domain without samples.

    >>> label_rates(torch.tensor([[[30.0, 10.0]], [[0.0, 60.0]]]), by_domain=False)
    tensor([[[0.3000, 0.7000]]])
    """
    sums = sums if by_domain else sums.sum(0, keepdim=True)
    return sums / sums.sum(-1, keepdim=True).clamp_min(torch.finfo(sums.dtype).tiny)


def log_factors(sums: Tensor, samples: Tensor, rates: Tensor) -> Tensor:
    """Return log t of each client [C, questions, classes], by which the rates of all clients become those at it.

    ``sums`` [C, M, questions, classes] are the weights of its samples by domain and class, ``samples`` [C] their
    number, and ``rates`` [M, questions, classes] those of all clients. With e the rates that these let expect at a
    client, the rates there are taken to be (n r + 10 e) / (n + 10) for the observed r: partially pooled towards e.
    """
    held = sums.sum(-1, keepdim=True)
    total = held.sum(1)
    part = held / total[:, None].clamp_min(torch.finfo(sums.dtype).tiny)
    """The share of each domain in the client's weight, [C, M, questions, 1]."""
    expected, observed = (part * rates).sum(1), sums.sum(1) / total.clamp_min(torch.finfo(sums.dtype).tiny)
    n = samples.double()[:, None, None]
    wanted = (n * observed + PRIOR * expected) / (n + PRIOR)
    known = (expected > 0) & (wanted > 0)
    found = torch.zeros_like(wanted)
    for _ in range(_MOST_STEPS):
        tilted = rates * found.exp()[:, None]
        tilted = tilted / tilted.sum(-1, keepdim=True).clamp_min(torch.finfo(sums.dtype).tiny)
        step = torch.where(known, (wanted / (part * tilted).sum(1)).log(), 0)
        found = found + step
        if bool((step.abs() < _ENOUGH).all()):
            break
    return found


def corrections(objective: Objective, data: Cohort, owner: Tensor, clients: int, rates: Tensor) -> Tensor:
    """Return what is added to the scores of each client, [clients, outputs]; ``owner`` [n] is each sample's client."""
    marks = objective.class_marks(data.y)
    assert marks is not None  # numbers to predict are refused before training
    domains = len(rates)
    cell = owner * domains + (data.domain if domains > 1 else 0)
    weight = torch.ones(len(data), dtype=torch.float64) if data.weight is None else data.weight.double()
    sums = torch.zeros(clients * domains, *marks.shape[1:], dtype=torch.float64)
    sums = sums.index_add(0, cell, weight[:, None, None] * marks).view(clients, domains, *marks.shape[1:])
    return objective.scores_of_factors(log_factors(sums, torch.bincount(owner, minlength=clients), rates))


def as_heads(scores: Tensor, heads: int, width: int) -> Tensor:
    """Return what is added to scores [clients, outputs] as corrections of heads [clients, heads, outputs, width]."""
    corrections = scores.new_zeros(len(scores), heads, scores.shape[1], width)
    corrections[..., -1] = scores[:, None]
    return corrections
