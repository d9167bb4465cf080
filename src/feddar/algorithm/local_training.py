"""Local training of a client, as plain functions of tensors: without engine, files, clock or state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from feddar.algorithm.loss_scaling import backward_of
from feddar.algorithm.optimizers import Step, adam, sgd
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.weighting import loss_weights, masses_of
from feddar.data.cohort import Cohort
from feddar.data.image_cache import StoredImages
from feddar.methods import Scope
from feddar.models import heads as linear_heads
from feddar.models.devices import CPU, beside, exact, fits, like, moved
from feddar.models.encoders.tabular import CountedEmbedding, Standardise
from feddar.models.heads import triangle
from feddar.models.model import Model, in_precision, scores, seeded, seeds_of
from feddar.models.parameters import Parameters, Tensors, key_index, key_of, keys
from feddar.settings import Settings

SYMMETRIC = ("residuals", "gram")
"""Which sums of evidence are symmetric matrices; like curvature, they are sent as their upper triangle."""


def evidence_of(
    model: Model, request: Request, key: str, features: Tensor, y: Tensor, weight: Tensor | None = None
) -> Tensors:
    """Return the evidence for credibility in the form in which it is sent; empty if the request does not ask for it."""
    if request.mean_head is None:
        return {}
    mean, start, features = map(exact, (request.mean_head, request.parameters.heads[key], features))
    found = linear_heads.evidence(model.objective, mean, start, features, beside(y, features), weight)
    if model.objective.is_gram(request.phase.curvature):
        del found["gram"]  # it is already sent as the curvature
    return {name: triangle(value) if name in SYMMETRIC else value for name, value in found.items()}


def curvature_of(
    model: Model, phase: Phase, start: Tensor, head: Tensor, features: Tensor, weight: Tensor | None = None
) -> Tensor | None:
    """Return the curvature at the trained head or the start (``phase.curvature_at``); None if it is not asked for."""
    if phase.curvature is None:
        return None
    at = exact({"start": start, "final": head}[phase.curvature_at])
    return triangle(linear_heads.curvature(model.objective, phase.curvature, at, exact(features), weight))


def proximal_step(step: Step, parameters: list[Tensor], anchor: list[Tensor], mu: float) -> Step:
    """Return a step that first adds the gradient of mu/2 |w - anchor|^2 (FedProx; the personal model of Ditto)."""

    @torch.no_grad()
    def move() -> None:
        for parameter, fixed in zip(parameters, anchor, strict=False):  # frozen heads are only in anchor
            if parameter.grad is not None:
                parameter.grad.add_(parameter - fixed, alpha=mu)
        step()

    return move


def apfl_step(
    step: Step, parameters: list[Tensor], local: list[Tensor], common: list[Tensor], mix: Tensor, lr: float
) -> Step:
    """Return APFL's step on the local parameters v and the mixture a; the model is a v + (1 - a) w for fixed w.

    With g the gradient of the loss in the model's parameters, the gradient in v is a g and that in a is <v - w, g>.
    ``step`` updates v.
    """

    @torch.no_grad()
    def blend() -> None:
        for parameter, own, shared in zip(parameters, local, common, strict=True):
            parameter.copy_(mix * own + (1 - mix) * shared)

    @torch.no_grad()
    def move() -> None:
        slope = torch.zeros_like(mix)
        for parameter, own, shared in zip(parameters, local, common, strict=True):
            own.grad = None if parameter.grad is None else mix * parameter.grad
            if parameter.grad is not None:
                slope += ((own - shared) * parameter.grad).sum()
        step()
        mix.sub_(lr * slope).clamp_(0, 1)
        blend()

    blend()
    return move


def with_standard_target(request: Request, data: Cohort) -> Cohort:
    """Return the training samples; a number to predict is standardised, as the request's ``target`` says."""
    if request.parameters.target is None:
        return data
    mean, scale = like(request.parameters.target, data.y).unbind()
    return replace(data, y=(data.y - mean) / scale)


def samples_by_domain(data: Cohort) -> Tensor:
    """Return the number of samples of each domain, [M]."""
    return torch.bincount(data.domain, minlength=len(data.domains))


def standard_units(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation from count, sum and sum of squares; a constant column gets the scale 1."""
    count = count.clamp_min(1)
    mean = total / count
    scale = (squares / count - mean.square()).clamp_min(0).sqrt()
    return mean, torch.where(scale > 1e-8 * (1 + mean.abs()), scale, torch.ones_like(scale))


def standardised(model: Model, present: Tensor, total: Tensor, squares: Tensor) -> Tensors:
    """Return the mean and scale of each ``Standardise`` layer by parameter name, from sums over clients."""
    mean, scale = standard_units(present, total, squares)
    changed: Tensors = {}
    for name, module in model.body.named_modules():
        if isinstance(module, Standardise):
            for part, value in (("mean", mean), ("scale", scale)):
                changed[f"{name}.{part}"] = value.to(model.dtype)
    return changed


def embeddings_of(model: Model) -> dict[str, CountedEmbedding]:
    """Return the encoder's embeddings that count samples, by name, in the order of the table's categories."""
    return {name: part for name, part in model.body.named_modules() if isinstance(part, CountedEmbedding)}


def levels_of(data: Cohort, sizes: Sequence[int]) -> list[Tensor]:
    """Return how many samples each level of each category has; ``sizes`` are the numbers of levels, with missing."""
    if not sizes:  # an encoder may take categories in another way
        return []
    codes = torch.zeros(0, len(sizes), dtype=torch.long) if data.codes is None else data.codes.long()
    return [torch.bincount(column, minlength=size) for column, size in zip(codes.T, sizes, strict=True)]


def counted(model: Model, levels: Tensor, samples: float) -> Tensors:
    """Return the counts of each ``CountedEmbedding`` by parameter name; ``levels`` are those of all, one by one."""
    parts = levels.split([len(part.counts) for part in embeddings_of(model).values()])
    changed: Tensors = {}
    for name, part in zip(embeddings_of(model), parts, strict=True):
        changed |= {f"{name}.counts": part.to(model.dtype), f"{name}.total": torch.tensor([samples], dtype=model.dtype)}
    return changed


def weighed_by_levels(before: Tensors, after: Tensors, levels: Mapping[str, Tensor], samples: Tensor) -> Tensors:
    """Return the trained embeddings such that the average by samples weighs each level by its own samples.

    Averaged by L_i / L, the change of level r at client i would count as much as the client does. Times
    (n_ir / n_r) / (L_i / L) it counts as much as the client's part in the samples of the level. ``levels`` are the
    samples of each level [..., rows] by embedding, ``samples`` [...] those of the client; both may be of many clients.
    """
    found: Tensors = {}
    for name, own in levels.items():
        counts, total = exact(before[f"{name}.counts"]), exact(before[f"{name}.total"])
        mine, weight = beside((own, samples[..., None]), counts)
        part = torch.where(counts > 0, mine / counts.clamp_min(1), 0) * total / weight
        start, end = before[f"{name}.weight"], after[f"{name}.weight"]
        found[f"{name}.weight"] = start + like(part[..., None], end) * (end - start)
    return found


def samples_by_key(scope: Scope, data: Cohort) -> Iterator[tuple[str, Tensor]]:
    """Yield each key of the scope that the client has samples of, and the indices of these samples."""
    index = key_index(scope, data.domain)
    for position, key in enumerate(keys(scope, len(data.domains))):
        rows = torch.nonzero(index == position).flatten()
        if len(rows):
            yield key, rows


def encode(model: Model, phase: Phase, parameters: Parameters, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
    """Return the features [n, width] of samples, each computed by the frozen encoder of its key."""
    index = key_index(phase.encoder, domain)
    result = torch.zeros(len(domain), model.width, dtype=model.dtype, device=domain.device)
    for position in index.unique().tolist():
        model.load(parameters, key_of(phase.encoder, position))
        rows = index == position
        chosen = x if bool(rows.all()) else tuple(part[beside(rows, part)] for part in x)
        result[rows] = model.frozen_features(chosen, domain[rows])
    return result


def predict(model: Model, phase: Phase, parameters: Parameters, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
    """Return the scores [n, outputs] of samples, by the encoder and head of their keys, in the units of the labels.

    The work is done on the model's device; samples come from the CPU, and scores return there.
    """
    model.place()
    parameters, domain = moved((parameters, domain), model.device)
    return moved(in_units(learned_scores(model, phase, parameters, x, domain), parameters), CPU)


def predict_as_each(
    model: Model, phase: Phase, parameters: Parameters, x: tuple[Tensor, ...], domains: int
) -> Iterator[Tensor]:
    """Yield the scores [n, outputs] of samples as if all were of one domain, for each domain, as ``predict`` does.

    Features that do not depend on the domain are computed once.
    """
    model.place()
    parameters, features = moved(parameters, model.device), None
    for number in range(domains):
        domain = torch.full((len(x[0]),), number, device=model.device)
        if features is None or phase.encoder == "domain" or model.domain_columns:
            features = encode(model, phase, parameters, x, domain)
        yield moved(in_units(scores_by(phase, parameters, features, domain), parameters), CPU)


def in_units(scores: Tensor, parameters: Parameters) -> Tensor:
    """Return scores in the units of the labels."""
    if parameters.target is None:
        return scores
    mean, scale = like(parameters.target, scores).unbind()
    return scores * scale + mean


def learned_scores(model: Model, phase: Phase, parameters: Parameters, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
    """Return the scores [n, outputs] in the units in which the heads are trained (standardised for a number)."""
    return scores_by(phase, parameters, encode(model, phase, parameters, x, domain), domain)


def scores_by(phase: Phase, parameters: Parameters, features: Tensor, domain: Tensor) -> Tensor:
    """Return the scores [n, outputs] of features, each by the head of its sample's key."""
    by_key = torch.stack([parameters.heads[key] for key in keys(phase.heads, parameters.domains())])
    return scores(features, by_key, key_index(phase.heads, domain))


def fit_head(model: Model, phase: Phase, start: Tensor, features: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Train one head for the epochs of the heads phase, with the gradient in closed form."""
    head = start.clone()
    step = make_step(phase, [head])
    for drawn in batches(len(y), phase):
        batch = beside(drawn, features)
        own = None if weight is None else weight[batch]
        head.grad = linear_heads.gradient(model.objective, head, features[batch], y[batch], own) / len(batch)
        step()
    return head.detach()


def train_encoder(
    model: Model,
    phase: Phase,
    heads: Tensor,
    position: Tensor,
    data: Cohort,
    weight: Tensor | None,
    stepper: Callable[[list[Tensor]], Step],
) -> tuple[float, Tensor]:
    """Train the loaded encoder for the epochs of the phase; return the summed loss of the last epoch and the heads.

    ``position`` [n] is the index of each sample's head in ``heads`` [K, outputs, p].
    """
    with_heads = phase.name != "encoder"
    heads = heads.clone().requires_grad_(with_heads)
    parameters = [*model.body.parameters(), *([heads] if with_heads else [])]
    step, backward = stepper(parameters), backward_of(model.precision, parameters)
    # Batch norm cannot be trained on a batch of one; batches() makes one only if there is one sample or batch_size 1.
    model.body.train(len(data) > 1 and phase.batch_size != 1)
    last, seen = [], 0
    for drawn in batches(len(data), phase):
        batch = beside(drawn, data.domain)
        x = tuple(part[batch if part.device == batch.device else drawn] for part in data.x)
        features = model.features(x, data.domain[batch])
        scored, y = scores(features, heads, position[batch]), data.y[batch]
        own = None if weight is None else weight[batch]
        losses = model.objective.loss(scored, y) if own is None else model.objective.weighted_loss(scored, y, own)
        if losses.requires_grad:  # false if the encoder has no parameters to train
            for parameter in parameters:
                parameter.grad = None
            if backward(losses.mean()):
                step()
        seen += len(batch)
        if seen > len(data) * (phase.epochs - 1):
            last.append(losses.detach().sum())
    return sum(torch.stack(last).tolist()), heads.detach()


def domain_risks(model: Model, request: Request, parameters: Parameters, data: Cohort) -> Tensor:
    """Return the loss summed over the samples of each domain, and their number or mass, [M, 2] in float64."""
    found = learned_scores(model, request.phase, parameters, data.x, data.domain)
    losses = losses_of(model, request, found, data)
    masses = masses_of(request, data, data.domain, len(data.domains))
    return torch.stack([by_domain(losses, data), exact(masses)], dim=1)


def losses_of(model: Model, request: Request, scores: Tensor, data: Cohort) -> Tensor:
    """Return the loss of each sample [n], times its weight if samples or classes have weights."""
    weight = loss_weights(request, model.objective, data)
    if weight is None:
        return model.objective.loss(scores, data.y)
    return model.objective.weighted_loss(scores, data.y, like(weight, scores))


def losses_and_counts(losses: Tensor, data: Cohort) -> Tensor:
    """Return losses [n] summed over the samples of each domain, and the number of samples, [M, 2] in float64."""
    return torch.stack([by_domain(losses, data), exact(samples_by_domain(data))], dim=1)


def by_domain(losses: Tensor, data: Cohort) -> Tensor:
    """Return losses [n] summed over the samples of each domain, [M], in float64."""
    losses = exact(losses)
    return losses.new_zeros(len(data.domains)).index_add(0, beside(data.domain, losses), losses)


def batch_size_for(n: int, asked: int) -> int:
    """Return the number of samples in a batch as asked; for 0, about an eighth of n, as a power of 2 from 32 to 256.

    So a small client takes several steps in an epoch, and a large one does not take too many.
    """
    return asked or min(256, max(32, 1 << max(n // 8, 1).bit_length() - 1))


def batches(n: int, phase: Phase) -> Iterator[Tensor]:
    """Yield the indices of shuffled batches for all epochs; a last batch of one sample joins the one before."""
    for _ in range(phase.epochs):
        parts = list(torch.randperm(n).split(batch_size_for(n, phase.batch_size)))
        if len(parts) > 1 and len(parts[-1]) == 1:
            last = parts.pop()
            parts[-1] = torch.cat([parts[-1], last])
        yield from parts


def make_step(phase: Phase, parameters: list[Tensor]) -> Step:
    """Return the step of a new optimiser; its state lasts for one client, phase and round."""
    if phase.optimizer == "adam":
        return adam(parameters, phase.lr, phase.weight_decay)
    return sgd(parameters, phase.lr, phase.momentum, phase.weight_decay)


def is_plain_descent(steps: Phase | Settings, *, pulled: bool) -> bool:
    """Return whether a step only takes the gradient of the loss, times the learning rate, off the parameters.

    ``pulled`` says whether the loss has a proximal term.
    """
    return steps.optimizer == "sgd" and not (steps.momentum or steps.weight_decay or pulled)


def seeded_for(request: Request, client: str) -> seeded:
    """Return a context that seeds all randomness of a client's work by seed, round, phase and client."""
    return seeded(request.seed, request.round, request.phase.name, client)


def seeds_for(request: Request, clients: Iterable[str]) -> list[int]:
    """Return the seed by which ``seeded_for`` seeds each client's work."""
    return list(seeds_of((request.seed, request.round, request.phase.name), clients))


def in_precision_of(model: Model, data: Cohort) -> Cohort:
    """Return the samples with inputs and numbers to predict in the model's precision."""
    y = data.y.to(model.dtype) if data.y.is_floating_point() else data.y
    return replace(data, x=in_precision(data.x, model.dtype), y=y)


def rows_of(data: Cohort, rows: Tensor) -> Cohort:
    """Return some of the samples; inputs, labels and domains may be on different devices."""
    x = tuple(part[beside(rows, part)] for part in data.x)
    y, domain, client = data.y[rows], data.domain[rows], data.client[rows]
    weight = None if data.weight is None else data.weight[beside(rows, data.weight)]
    return replace(data, x=x, y=y, domain=domain, client=client, group=None, weight=weight)


def on_device(model: Model, data: Cohort) -> Cohort:
    """Return the samples on the model's device; inputs that do not fit there stay on the CPU.

    Images that are kept in a file stay there, too.
    """
    device, x = model.device, data.x
    if device.type == "cpu":
        return data
    stored = any(isinstance(part, StoredImages) for part in x)
    x = moved(x, device) if not stored and fits(x, device) else x
    y, domain, client, weight = moved((data.y, data.domain, data.client, data.weight), device)
    return replace(data, x=x, y=y, domain=domain, client=client, weight=weight)
