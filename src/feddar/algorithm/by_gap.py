"""Clients that count by how their gap between domains differs from the common one: FairFed (Ezzeldin et al. 2023).

With F_k the gap between domains of client k under the parameters sent, F that of all samples, and

    D_k = |F - F_k|,  or  |A - A_k|  where a gap at the client is not defined,

the weights of clients move by -beta (D_k - mean D), and stay at 0 or above; they start at the shares of samples. For
two classes the gap is that of the rate of positives found (equal opportunity), and A the accuracy; for other outcomes
both are of the loss. A gap is the largest value of a domain minus the smallest.

Nobody but the client knows its weight. F, A and the mean of D come from sums over clients, which the next request
brings back: at once F and A, by which a client finds its D_k, and in the round after that the mean, by which it moves
its weight. So weights follow the model with a delay of two rounds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from feddar.algorithm.agnostic import weighed
from feddar.algorithm.local_training import by_domain, domain_risks, learned_scores
from feddar.algorithm.protocol import TALLY, OwnState, Reply, Request
from feddar.data.cohort import Cohort
from feddar.models.devices import CPU, moved
from feddar.models.model import Model
from feddar.models.parameters import Parameters

FAIRNESS = "fairness"
"""The name of what a client keeps, [4]: its weight, and D_k, F_k and A_k as they were found in the last round."""
UNKNOWN = -1.0
"""In place of a gap or distance that there is none of: others are 0 or more."""


def counted_by_gap(
    request: Request, reply: Reply, own: OwnState, values: Tensor, mass: float
) -> tuple[Reply, OwnState]:
    """Return the reply of a client with its own weight, and its next state.

    ``values`` are ``values_of`` its samples, and ``mass`` is their number, or the sum of their weights.
    """
    weight, distance = _moved(request, own, mass)
    told = torch.tensor([max(distance, 0.0), float(distance != UNKNOWN), mass], dtype=torch.float64)
    kept = torch.tensor([weight, distance, *_gap_and_mean(values)], dtype=torch.float64)
    counted = weighed(reply, weight / mass if mass else 1.0)
    tally = torch.cat([values.flatten(), told])
    return replace(counted, sums=reply.sums | {TALLY: tally}), own.changed(extra={FAIRNESS: kept})


def size_of_tally(domains: int) -> int:
    """Return how many numbers a client tells: its ``values_of``, its distance, whether it has one, and its samples."""
    return 2 * (domains + 1) + 3


def _moved(request: Request, own: OwnState, mass: float) -> tuple[float, float]:
    """Return a client's weight after what was found of all clients, and D_k, as far as it is known yet."""
    if FAIRNESS not in own.extra:
        return mass, UNKNOWN
    weight, distance, gap, mean = own.extra[FAIRNESS].tolist()
    if request.tally is None:
        return weight, UNKNOWN
    distances, clients, samples = request.tally[-3:].tolist()
    if clients > 0 and distance != UNKNOWN:
        weight = max(0.0, weight - request.phase.fair * samples * (distance - distances / clients))
    common_gap, common_mean = _gap_and_mean(request.tally[:-3].view(-1, 2))
    return weight, abs(common_mean - mean) if UNKNOWN in (gap, common_gap) else abs(common_gap - gap)


def _gap_and_mean(values: Tensor) -> tuple[float, float]:
    """Return the gap between domains, if two have a value, and the mean, from ``values_of``."""
    rates = values[:, 0] / values[:, 1].clamp_min(1e-300)
    by_domain, mean = rates[:-1][values[:-1, 1] > 0], float(rates[-1])
    return float(by_domain.max() - by_domain.min()) if len(by_domain) > 1 else UNKNOWN, mean


def values_of(model: Model, request: Request, parameters: Parameters, data: Cohort, least: int) -> Tensor:
    """Return sums and counts from which gaps follow, [M + 1, 2]: of each domain, and of all for the mean.

    Of a domain with fewer than ``least`` patients of either of two classes nothing is told.
    """
    if model.objective.positive is None:
        risks = moved(domain_risks(model, request, parameters, data), CPU)
        return torch.cat([risks, risks.sum(0, keepdim=True)])
    scores = moved(learned_scores(model, request.phase, parameters, data.x, data.domain), CPU).double()
    y, objective = moved(data.y, CPU), model.objective
    right = (objective.decisions(objective.predictions(scores)) == y).double()
    held = replace(data, domain=moved(data.domain, CPU))
    found = torch.stack([by_domain(part, held) for part in (right * y, y.double())], dim=1)
    told = [min(data.patients((held.domain == m) & (y == each)) for each in (0, 1)) for m in range(len(data.domains))]
    found = found * (torch.tensor(told) >= least)[:, None]
    return torch.cat([found, torch.stack([right.sum(), right.new_tensor(float(len(y)))])[None]])
