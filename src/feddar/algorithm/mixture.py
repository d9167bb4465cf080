"""Domains that nobody told us: learned components in their place (docs/method.md, section Unknown domains).

A sample j of client i is of component m with probability pi_im; given that, its labels have the likelihood exp(-l_jm),
with l_jm the loss under the component (for a number (s - y)^2 / (2 v_i), with v_i the variance of errors). So

    r_jm = pi_im exp(-l_jm) / sum_k pi_ik exp(-l_jk)        pi_im = (1 + sum_j r_jm) / (K + n_i)

in turn a few times at each client, and training is that of domains, on samples that each stand once for every
component, with the weight r_jm (EM; FedEM, Marfoq et al. 2021). With one component for all samples of a client, that
with the least loss, it is IFCA (Ghosh et al. 2020). A client keeps pi_i and v_i; what it sends of a component counts
with the sum of its r_jm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from feddar.algorithm.local_training import encode, in_units, rows_of
from feddar.algorithm.protocol import OwnState, Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort
from feddar.methods import Assignment, Scope
from feddar.models.devices import CPU, beside, exact, moved
from feddar.models.model import Model, seeded
from feddar.models.parameters import Parameters, Tensors, keys
from feddar.objectives import Objective

SHARES, ERRORS = "shares", "errors"
"""The names of pi_i [K] and v_i [] in a client's own state."""
FIRST = ("heads", "together")
"""The phases in which shares are found anew: the first of a round."""
STEPS = 5
"""Steps of EM for a client's own mixture in a round, in which the components stay as they are."""
SURE = 1e-12
"""No probability of a mixture is nearer to 0 or 1, so that its scores are finite."""
LOST = 0.05
"""A component with less than this part of an equal share is lost, and begins again in the first half of training."""
APART, SPLIT = 1.0, 0.1
"""The size of the noise by which heads of components begin apart, and by which one begins again beside the largest:
the less it is, the more nearly half of those that are of the largest are nearer to the other."""


@dataclass(frozen=True)
class Mixture:
    """A client's own: the shares of components in its samples, and the variance of errors of a number to predict."""

    shares: Tensor
    errors: Tensor

    @classmethod
    def equal(cls, components: int) -> Mixture:
        """Return the mixture before the first round."""
        return cls(torch.full((components,), 1 / components).double(), torch.ones((), dtype=torch.float64))

    @classmethod
    def of(cls, own: OwnState) -> Mixture | None:
        """Return the mixture that a client keeps; None before it has trained."""
        return cls(own.extra[SHARES], own.extra[ERRORS]) if SHARES in own.extra else None

    @property
    def named(self) -> Tensors:
        """The mixture as a client keeps it."""
        return {SHARES: self.shares, ERRORS: self.errors}

    def responsibilities(self, losses: Tensor, weight: Tensor, assigns: Assignment) -> Tensor:
        """Return r_jm of samples with these losses under every component [n, K] and these weights [n]."""
        if assigns == "client":
            best = (weight[:, None] * losses).sum(0).argmin()
            return torch.zeros_like(losses).index_fill(1, best, 1)
        shares, errors = beside((self.shares, self.errors), losses)
        return torch.softmax(shares.log() - losses / errors, dim=1)

    def fitted(self, losses: Tensor, responsible: Tensor, weight: Tensor, assigns: Assignment, units: bool) -> Mixture:
        """Return the most probable mixture given responsibilities; variances are only of numbers with ``units``."""
        held = (weight[:, None] * responsible).sum(0)
        shares = held / held.sum() if assigns == "client" else (1 + held) / (len(held) + held.sum())
        errors = beside(self.errors, losses)
        if units:
            errors = (2 * (weight[:, None] * responsible * losses).sum() / held.sum()).clamp_min(SURE)
        return Mixture(*moved((shares, errors), CPU))

    def settled(self, losses: Tensor, weight: Tensor, assigns: Assignment, units: bool) -> Mixture:
        """Return the mixture after some steps with these losses, which cost nothing beside the training."""
        found = self
        for _ in range(STEPS):
            found = found.fitted(losses, found.responsibilities(losses, weight, assigns), weight, assigns, units)
        return found


def component_scores(model: Model, phase: Phase, parameters: Parameters, x: tuple[Tensor, ...]) -> Tensor:
    """Return the scores of samples by every component, [n, K, outputs], in the units in which heads are trained."""
    # Stacked: products of tensors as they lie in a file, in other places of memory, can differ in the last bit.
    heads = torch.stack([parameters.heads[key] for key in keys(phase.heads, parameters.domains())])
    encoders = 1 if phase.encoder == "global" else len(heads)
    which = torch.zeros(len(x[0]), dtype=torch.long, device=model.device)
    features = [encode(model, phase, parameters, x, which + m) for m in range(encoders)]
    return torch.stack([features[min(m, encoders - 1)] @ head.T for m, head in enumerate(heads)], dim=1)


def component_losses(objective: Objective, scores: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample under every component, [n, K] in float64, from scores [n, K, outputs]."""
    return torch.stack([exact(objective.loss(each, y)) for each in scores.unbind(1)], dim=1)


def mixed(objective: Objective, scores: Tensor, shares: Tensor) -> Tensor:
    """Return the scores [n, outputs] that give the mean of the components' predictions, by their shares [K]."""
    every, part = exact(scores), beside(shares.double(), exact(scores))
    predicted = torch.stack([objective.predictions(each) for each in every.unbind(1)], dim=-1) @ part
    predicted = predicted if objective.in_units else predicted.clamp(SURE, 1 - SURE)
    return objective.scores_of(predicted).to(scores.device, scores.dtype)


def predict_mixed(model: Model, phase: Phase, parameters: Parameters, x: tuple[Tensor, ...], shares: Tensor) -> Tensor:
    """Return the scores of a mixture [n, outputs] in the units of the labels; samples and scores are on the CPU."""
    model.place()
    parameters = moved(parameters, model.device)
    every = component_scores(model, phase, parameters, x)
    return moved(in_units(mixed(model.objective, every, shares), parameters), CPU)


def with_enough(responsible: Tensor, data: Cohort, least: int) -> Tensor:
    """Return responsibilities [n, K] without components that fewer than ``least`` patients are of, by their sum.

    Their samples are of the others, by the same responsibilities; the largest component always stays.
    """
    patient = torch.arange(len(data)) if data.group is None else data.group.unique(return_inverse=True)[1]
    patient = beside(patient, responsible)
    rows = torch.bincount(patient).to(responsible.dtype)
    held = (responsible / rows[patient, None]).sum(0)
    enough = (held >= least) | (held == held.max())
    if bool(enough.all()):
        return responsible
    kept = torch.where(enough, responsible, 0)
    # A sample of which nothing is left is of the largest component.
    largest = torch.zeros_like(kept).index_fill(1, held.argmax(), 1)
    kept = torch.where(kept.sum(1, keepdim=True) > 0, kept, largest)
    return kept / kept.sum(1, keepdim=True)


def assigned(data: Cohort, responsible: Tensor) -> Cohort:
    """Return samples that stand once for every component that they are of, by their responsibilities [n, K]."""
    component, row = (responsible > 0).T.nonzero().unbind(1)
    found = rows_of(data, beside(row, data.domain))
    weight = responsible[row, component] * (1 if found.weight is None else beside(found.weight, responsible))
    names = tuple(str(m) for m in range(responsible.shape[1]))
    return replace(found, domain=beside(component, data.domain), domains=names, weight=weight)


def with_all_components(request: Request, reply: Reply) -> Reply:
    """Return the reply with every component: those that no sample is of are as they were sent, with the weight 0.

    So what a site sends does not say by its form which components it has.
    """
    sent, phase = request.parameters, request.phase
    heads: dict[str, TrainedHead] = {}
    encoders: dict[str, TrainedEncoder] = {}
    if phase.name != "encoder":
        same = {key: TrainedHead(sent.heads[key].clone(), 0.0) for key in keys(phase.heads, sent.domains())}
        heads = {key: reply.heads.get(key, unused) for key, unused in same.items()}
    if phase.name != "heads":
        started = {key: _floating(sent.encoder(key)) for key in keys(phase.encoder, sent.domains())}
        encoders = {
            key: reply.encoders.get(key, TrainedEncoder(tensors, 0.0)) for key, tensors in started.items() if tensors
        }
    return replace(reply, encoders=encoders, heads=heads)


def _floating(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items() if value.is_floating_point()}


def begun(state: ServerState, encoder: Scope, components: int, seed: int) -> ServerState:
    """Return the state with so many components: copies of the common model, with heads that are apart."""
    state = state.by_domain(encoder, "domain", components)
    return state.trained({}, {key: _apart(head, APART, seed, 0, key) for key, head in state.heads.items()})


def begun_again(state: ServerState, seed: int, round_number: int) -> ServerState:
    """Return the state with components that hardly any sample is of in the place of the largest, with a head apart."""
    if state.components is None:
        return state
    lost = state.components < LOST * state.components.mean()
    largest = str(int(state.components.argmax()))
    again = [str(m) for m in lost.nonzero().flatten().tolist()]
    heads = {key: _apart(state.heads[largest], SPLIT, seed, round_number, key) for key in again}
    own = state.encoders.get(largest)
    encoders = {key: {name: value.clone() for name, value in own.items()} for key in again} if own else {}
    return state.trained(encoders, heads)


def _apart(head: Tensor, size: float, seed: int, round_number: int, key: str) -> Tensor:
    """Return a head with noise that changes scores by about this much, where features are of the size 1."""
    with seeded(seed, "component", round_number, key):
        return head + torch.randn(head.shape, dtype=head.dtype) * (size / math.sqrt(head.shape[1]))
