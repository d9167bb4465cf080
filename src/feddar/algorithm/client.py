"""What a client does when asked. One request and its reply is a phase; a round is a short series of phases.

Heads phase (Algorithm 1, first loop): the encoder is frozen, so each sample's feature is computed once and tau_h
epochs on each held head cost almost nothing; the reply is the head w_im, its curvature L_im H_im and its weight L_im.
Encoder phase (second loop): the heads are frozen; the re-weighted risk sum_j u_z(j) l_j / L_i is minimised for tau_phi
epochs; the reply is the encoder and its weight L_i. ``together`` trains both at once, as FedAvg does, and ``personal``
does so for a model that the client keeps beside the common one.

All of it is plain functions of plain tensors that know no engine, no files and no clock. What a client's scope keeps
private is in ``Client.private`` and never in a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from feddar.algorithm.optimizers import Step, adam, sgd
from feddar.data.cohort import Cohort
from feddar.evaluation.from_sums import Together, tally
from feddar.methods import Scope
from feddar.models import heads as linear_heads
from feddar.models.encoders.tabular import Standardise
from feddar.models.heads import Curvature, probabilities, triangle, whole
from feddar.models.model import Model, Tensors, in_precision, key_index, keys, scores, seeded

MEAN = "mean_head"
"""Name of the mean of domains' heads in a request: it asks for evidence of how far domains differ."""

EVIDENCE = ("slope", "bend", "residuals", "gram")
"""Names of that evidence in a reply, each with the domain's key behind it."""

SYMMETRIC = ("residuals", "gram")
"""Which of it are matrices; like curvature, they travel as their triangles."""

CURVED = "curved"
"""Name, in a reply of several clients, of their curvatures times their heads, summed, with the head's key behind it."""

FOCUS = "focus"
"""Name, in a request to measure, of where scores are to be told apart best."""

TARGET = "target"
"""Name of the mean and scale of a number to predict, by which it is learned in standard units."""

PhaseName = Literal["census", "adopt", "heads", "encoder", "together", "personal", "evaluate", "measure"]


@dataclass(frozen=True)
class Phase:
    """What is asked for; everything a client needs to know beside the parameters."""

    name: PhaseName
    encoder: Scope = "global"
    heads: Scope = "global"
    epochs: int = 1
    lr: float = 0.0
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    curvature: Curvature | None = None
    curvature_at: str = "final"
    mu: float = 0.0
    """Strength of the pull towards the common parameters."""
    mix: float | None = None
    """The personal model is a mixture with the common one, which starts with this share of its own."""
    private_norm: bool = False
    """Batch-norm layers stay here."""
    target: bool = False
    """Of a census: report the sums by which a number to predict is standardised."""
    risks: bool = False
    """Report the summed loss of each domain under the parameters received."""


@dataclass(frozen=True)
class Request:
    """A phase with the parameters it starts from."""

    phase: Phase
    round: int
    seed: int
    tensors: Tensors
    step: int = 0
    """Its place among the requests of its round, by which a client knows what came before."""


@dataclass(frozen=True)
class Reply:
    """What a client answers: tensors, and the number of samples behind each key of theirs.

    The server multiplies and adds in float64 as replies arrive. A tensor travels as it is rather than multiplied by
    its weight: half the bytes of a float64 product, and one client's average is its own parameters to the bit.
    """

    clients: tuple[str, ...]
    """Who speaks: one client, or several whose answers were added up (``feddar.simulation.stacked``)."""
    tensors: Tensors = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    """Summed over ``samples`` samples, in phases that measure it."""
    samples: int = 0

    @property
    def client(self) -> str:
        """The client that speaks, or the first of several."""
        return self.clients[0]


class Client:
    """One site: its samples, the parameters that stay with it, and its answers.

    Samples of a domain with fewer than ``min_cell`` are left out of everything, since a sum over one patient is that
    patient, and weights of domains, which a client is told, could single them out of a larger sum.
    """

    def __init__(self, name: str, train: Cohort, test: Cohort | None, model: Model, min_cell: int = 0) -> None:
        self.name = name
        self.model = model
        self.min_cell = min_cell
        self.train = in_precision_of(model, told_of(train, min_cell))
        self.test = None if test is None else in_precision_of(model, told_of(test, min_cell))
        self.private: Tensors = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The clients that this one speaks for: itself."""
        return (self.name,)

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.train)

    def kept(self) -> dict[str, Tensors]:
        """Return what stays with it, under its name."""
        return {self.name: self.private}

    def restore(self, _: str, kept: Tensors) -> None:
        """Take back what it kept."""
        self.private = dict(kept)

    def answers(self, request: Request) -> Iterator[Reply]:
        """Give the one answer, as those do who speak for several."""
        yield self.answer(request)

    def answer(self, request: Request) -> Reply:
        """Do what is asked; the same request always gets the same reply."""
        with draws(request, self.name):
            match request.phase.name:
                case "census":
                    return Reply(self.names, self._census(request.phase))
                case "adopt":
                    self.private |= adopted(request)
                    return Reply(self.names)
                case "evaluate":
                    return Reply(self.names, {"scores": self._evaluate(request)})
                case "measure":
                    return Reply(self.names, self._measure(request))
                case "heads":
                    return self._heads(request)
                case _:
                    return self._descend(request)

    def _parameters(self, request: Request) -> Tensors:
        return request.tensors | self.private

    def _evaluate(self, request: Request) -> Tensor:
        if self.test is None:
            return torch.zeros(0, self.model.outputs, dtype=self.model.dtype)
        return predict(self.model, request.phase, self._parameters(request), self.test.x, self.test.domain)

    def _measure(self, request: Request) -> Tensors:
        """Say how well the test samples are predicted, as sums over each domain."""
        if self.test is None or not len(self.test):
            return {}
        predicted, y = probabilities(self.model.task, self._evaluate(request).double()), self.test.y
        if TARGET in request.tensors:  # errors and spread are the same around any centre, and exact around the mean
            centre = request.tensors[TARGET][0].double()
            predicted, y = predicted - centre, y.double() - centre
        patient = torch.arange(len(y)) if self.test.group is None else self.test.group
        binned = request.tensors.get(FOCUS), Together(patient, self.min_cell)
        return tally(self.model.task, y, predicted, self.test.domain, len(self.test.domains), *binned)

    def _census(self, phase: Phase) -> Tensors:
        """Count the samples of each domain, and sum up, with their squares, the numbers that are to be standardised."""
        tensors = {"counts": samples_by_domain(self.train)}
        if self.train.numbers is not None and any(isinstance(m, Standardise) for m in self.model.body.modules()):
            columns = self.train.numbers.double()
            present = columns.isfinite().sum(0)
            patients = torch.tensor([self._patients(column.isfinite()) for column in columns.T], dtype=torch.long)
            told = patients >= self.min_cell
            sums = {"present": present.double(), "sum": columns.nansum(0), "squares": columns.square().nansum(0)}
            tensors |= {name: torch.where(told, value, 0) for name, value in sums.items()}
        if phase.target:
            y = self.train.y.double()
            number = torch.tensor(float(len(y)), dtype=torch.float64)
            tensors["target"] = torch.stack([number, y.sum(), y.square().sum()])
        return tensors

    def _patients(self, rows: Tensor) -> int:
        """Return how many patients these samples are of."""
        group = self.train.group
        return int(rows.sum() if group is None else group[rows].unique().numel())

    def _heads(self, request: Request) -> Reply:
        """Train the head of each key this client holds, on cached features."""
        phase, parameters, data = request.phase, self._parameters(request), in_units(request, self.train)
        features = encode(self.model, phase, parameters, data.x, data.domain)
        # A head of one domain sees one weight, which would only rescale its learning rate: R_im has none.
        weight = None if phase.heads == "domain" else sample_weights(request, data.domain, self.model.dtype)
        reply = Reply(self.names)
        for key, rows in held(phase.heads, data):
            start = parameters[f"heads/{key}"]
            own = None if weight is None else weight[rows]
            head = fit_head(self.model, phase, start, features[rows], data.y[rows], own)
            if phase.heads == "client":
                self.private[f"heads/{key}"] = head
                continue
            reply.tensors[f"heads/{key}"] = head
            reply.weights[f"heads/{key}"] = float(len(rows))
            reply.tensors.update(evidence_of(self.model, request, key, features[rows], data.y[rows]))
            if phase.curvature is not None:
                ends = {"start": start, "final": head}
                reply.tensors.update(self._curvature(phase, f"heads/{key}", ends, features[rows]))
        return reply

    def _descend(self, request: Request) -> Reply:
        """Train the encoder of each key this client holds, under frozen heads or together with them."""
        phase, parameters, data = request.phase, self._parameters(request), in_units(request, self.train)
        weight = sample_weights(request, data.domain, self.model.dtype)
        tensors = {"risks": domain_risks(self.model, phase, parameters, data)} if phase.risks else {}
        weights: dict[str, float] = {}
        total = 0.0
        for key, rows in held(phase.encoder, data):
            part = data if len(rows) == len(data) else data.rows(rows)
            used, position = key_index(phase.heads, part.domain).unique(return_inverse=True)
            head_names = [f"heads/{keys(phase.heads, len(data.domains))[index]}" for index in used.tolist()]
            start = torch.stack([parameters[name] for name in head_names])
            load_encoder(self.model, parameters, key)
            stepper = self._stepper(request, key, head_names)
            # The same draws for every key: a domain is then trained as if the client held no other.
            with draws(request, self.name):
                loss, trained = descend(self.model, phase, start, position, part, weight[rows], stepper)
            total += loss
            sent = self._keep_own(phase, key)
            if sent:
                tensors |= sent
                weights[f"encoder/{key}"] = float(len(rows))
            if phase.name == "encoder":
                continue
            for index, name in enumerate(head_names):
                mine = position == index
                if phase.heads == "client":
                    self.private[name] = trained[index].clone()
                    continue
                tensors[name], weights[name] = trained[index].clone(), float(mine.sum())
                if phase.curvature is not None:
                    features = self.model.frozen_features(tuple(x[mine] for x in part.x), part.domain[mine])
                    ends = {"start": start[index], "final": trained[index]}
                    tensors |= self._curvature(phase, name, ends, features)
        return Reply(self.names, tensors, weights, total, len(data))

    def _keep_own(self, phase: Phase, key: str) -> Tensors:
        """Keep what is this client's own of the encoder just trained, and return what may be sent."""
        state = {f"encoder/{key}/{name}": value.clone() for name, value in self.model.body.state_dict().items()}
        own = set(state) if phase.encoder == "client" else set()
        if phase.private_norm:
            own |= {f"encoder/{key}/{name}" for name in self.model.batch_norm_names()}
        self.private |= {name: state[name] for name in own}
        return {name: value for name, value in state.items() if name not in own and value.is_floating_point()}

    def _curvature(self, phase: Phase, name: str, ends: Tensors, features: Tensor) -> Tensors:
        """Return the curvature of a head at the end of training (or its start, as the phase says), under its name."""
        kind: Curvature = phase.curvature or "hessian"
        at = ends[phase.curvature_at].double()
        found = linear_heads.curvature(self.model.task, kind, at, features.double())
        return {name.replace("heads/", "curvature/"): triangle(found)}

    def _stepper(self, request: Request, key: str, head_names: list[str]) -> Callable[[list[Tensor]], Step]:
        """Say how parameters move: by the optimiser alone, pulled towards the common model, or mixed with it."""
        phase = request.phase
        if not phase.mu and phase.mix is None:
            return lambda parameters: make_step(phase, parameters)
        names = [f"encoder/{key}/{name}" for name, _ in self.model.body.named_parameters()]
        common = [request.tensors[name.replace("/own", "/all", 1)] for name in names]
        common.append(torch.stack([request.tensors[name.replace("/own", "/all", 1)] for name in head_names]))
        if phase.mix is None:
            return lambda parameters: pulled(make_step(phase, parameters), parameters, common, phase.mu)
        local = [self.private.setdefault(f"local/{i}", value.clone()) for i, value in enumerate(common)]
        mix = self.private.setdefault("mix", torch.tensor(phase.mix, dtype=self.model.dtype))
        return lambda parameters: mixed(make_step(phase, local), parameters, local, common, mix, phase.lr)


def evidence_of(model: Model, request: Request, key: str, features: Tensor, y: Tensor) -> Tensors:
    """Return, as it travels, what samples say about how far their domain differs; nothing if it is not asked for."""
    if MEAN not in request.tensors:
        return {}
    mean, start = request.tensors[MEAN].double(), request.tensors[f"heads/{key}"].double()
    found = linear_heads.evidence(model.task, mean, start, features.double(), y)
    if linear_heads.is_gram(model.task, request.phase.curvature):
        del found["gram"]  # it is the curvature, and sent as that
    return {f"{name}/{key}": triangle(value) if name in SYMMETRIC else value for name, value in found.items()}


def evidence_in(tensors: Tensors, key: str) -> Tensors:
    """Return the evidence that a reply has of a key, its matrices whole, or nothing if it was not asked for."""
    found = {name: tensors[f"{name}/{key}"] for name in EVIDENCE if f"{name}/{key}" in tensors}
    if found and "gram" not in found:
        found["gram"] = tensors[f"curvature/{key}"][0]
    return {name: whole(value) if name in SYMMETRIC else value for name, value in found.items()}


def pulled(step: Step, parameters: list[Tensor], anchor: list[Tensor], mu: float) -> Step:
    """Add the gradient of mu/2 |w - anchor|^2 before each step (FedProx; the personal model of Ditto)."""

    @torch.no_grad()
    def move() -> None:
        for parameter, fixed in zip(parameters, anchor, strict=False):  # heads may be frozen
            if parameter.grad is not None:
                parameter.grad.add_(parameter - fixed, alpha=mu)
        step()

    return move


def mixed(
    step: Step, parameters: list[Tensor], local: list[Tensor], common: list[Tensor], mix: Tensor, lr: float
) -> Step:
    """Move local parameters v and the mixture a of APFL, where the model is a v + (1 - a) w for fixed w.

    The loss's gradient g by the model gives a g by v, and <v - w, g> by a. ``step`` moves v.
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


def adopted(request: Request) -> Tensors:
    """Return private parameters that start from the common ones."""
    scopes = {"encoder": request.phase.encoder, "heads": request.phase.heads}
    begins = tuple(f"{group}/all" for group, scope in scopes.items() if scope == "client")
    return {n.replace("/all", "/own", 1): v.clone() for n, v in request.tensors.items() if n.startswith(begins)}


def in_units(request: Request, data: Cohort) -> Cohort:
    """Return samples to train on, a number to predict in the units in which it is learned."""
    if TARGET not in request.tensors:
        return data
    mean, scale = request.tensors[TARGET].to(data.y.dtype).unbind()
    return replace(data, y=(data.y - mean) / scale)


def sample_weights(request: Request, domain: Tensor, dtype: torch.dtype) -> Tensor:
    """u_m of each sample, or 1 where the method does not re-weight."""
    weights = request.tensors.get("domain_weights")
    return torch.ones(len(domain), dtype=dtype) if weights is None else weights[domain].to(dtype)


def samples_by_domain(data: Cohort) -> Tensor:
    """Return how many samples there are of each domain."""
    return torch.bincount(data.domain, minlength=len(data.domains))


def patients_by_domain(data: Cohort) -> Tensor:
    """Return how many patients there are of each domain: groups of samples where there are such, else samples."""
    if data.group is None:
        return samples_by_domain(data)
    pairs = torch.stack([data.domain, data.group], dim=1).unique(dim=0)
    return torch.bincount(pairs[:, 0], minlength=len(data.domains))


def told_of(data: Cohort, least: int) -> Cohort:
    """Return the samples of domains that have as many patients as ``least``."""
    kept = (patients_by_domain(data) >= least)[data.domain]
    return data if bool(kept.all()) else data.rows(kept)


def standard_units(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and scale from sums; what does not vary has the scale 1."""
    count = count.clamp_min(1)
    mean = total / count
    scale = (squares / count - mean.square()).clamp_min(0).sqrt()
    return mean, torch.where(scale > 1e-8 * (1 + mean.abs()), scale, torch.ones_like(scale))


def standardise(model: Model, present: Tensor, total: Tensor, squares: Tensor) -> Tensors:
    """Fix the statistics of a standardising encoder from sums over clients; returns what changed."""
    mean, scale = standard_units(present, total, squares)
    changed: Tensors = {}
    for name, module in model.body.named_modules():
        if isinstance(module, Standardise):
            for part, value in (("mean", mean), ("scale", scale)):
                changed[f"encoder/all/{name}.{part}"] = value.to(model.dtype)
    return changed


def held(scope: Scope, data: Cohort) -> Iterator[tuple[str, Tensor]]:
    """Give each key of the scope that the client has samples for, and which samples those are."""
    index = key_index(scope, data.domain)
    for position, key in enumerate(keys(scope, len(data.domains))):
        rows = torch.nonzero(index == position).flatten()
        if len(rows):
            yield key, rows


def load_encoder(model: Model, parameters: Tensors, key: str) -> None:
    """Put the encoder of that key into the model's body."""
    prefix = f"encoder/{key}/"
    model.body.load_state_dict({n.removeprefix(prefix): v for n, v in parameters.items() if n.startswith(prefix)})


def encode(model: Model, phase: Phase, parameters: Tensors, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
    """Return the features of samples, each by the frozen encoder of its key."""
    index = key_index(phase.encoder, domain)
    result = torch.zeros(len(domain), model.width, dtype=model.dtype)
    for position in index.unique().tolist():
        load_encoder(model, parameters, keys(phase.encoder, position + 1)[position])
        rows = index == position
        result[rows] = model.frozen_features(x if bool(rows.all()) else tuple(part[rows] for part in x), domain[rows])
    return result


def predict(model: Model, phase: Phase, parameters: Tensors, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
    """Score samples [n, outputs] by the encoder and head of their keys; a number in the units of the label."""
    found = learned_scores(model, phase, parameters, x, domain)
    if TARGET not in parameters:
        return found
    mean, scale = parameters[TARGET].to(model.dtype).unbind()
    return found * scale + mean


def learned_scores(model: Model, phase: Phase, parameters: Tensors, x: tuple[Tensor, ...], domain: Tensor) -> Tensor:
    """Score samples in the units in which the heads are learned."""
    features = encode(model, phase, parameters, x, domain)
    by_key = torch.stack([parameters[f"heads/{key}"] for key in keys(phase.heads, _domains(parameters))])
    return scores(features, by_key, key_index(phase.heads, domain))


def fit_head(model: Model, phase: Phase, start: Tensor, features: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Run the epochs of the heads phase on one head, with the loss's exact gradient."""
    head = start.clone()
    step = make_step(phase, [head])
    for batch in batches(len(y), phase):
        own = None if weight is None else weight[batch]
        head.grad = linear_heads.gradient(model.task, head, features[batch], y[batch], own) / len(batch)
        step()
    return head.detach()


def descend(
    model: Model,
    phase: Phase,
    heads: Tensor,
    position: Tensor,
    data: Cohort,
    weight: Tensor,
    stepper: Callable[[list[Tensor]], Step],
) -> tuple[float, Tensor]:
    """Run the epochs of a phase that trains the encoder; returns the summed loss of the last epoch and the heads.

    ``position`` says which of the heads [K, outputs, p] is each sample's.
    """
    with_heads = phase.name != "encoder"
    heads = heads.clone().requires_grad_(with_heads)
    parameters = [*model.body.parameters(), *([heads] if with_heads else [])]
    step = stepper(parameters)
    # Batch norm cannot be trained on one sample; batches() leaves a single one only where there is no other.
    model.body.train(len(data) > 1 and phase.batch_size > 1)
    total, seen = torch.zeros((), dtype=torch.float64), 0
    for batch in batches(len(data), phase):
        features = model.features(tuple(part[batch] for part in data.x), data.domain[batch])
        losses = weight[batch] * linear_heads.loss(model.task, scores(features, heads, position[batch]), data.y[batch])
        if losses.requires_grad:  # an encoder may have nothing to train
            for parameter in parameters:
                parameter.grad = None
            losses.mean().backward()
            step()
        seen += len(batch)
        if seen > len(data) * (phase.epochs - 1):
            total += losses.detach().sum()
    return float(total), heads.detach()


def domain_risks(model: Model, phase: Phase, parameters: Tensors, data: Cohort) -> Tensor:
    """Return the loss summed over the samples of each domain, [M], in float64."""
    losses = linear_heads.loss(model.task, learned_scores(model, phase, parameters, data.x, data.domain), data.y)
    return torch.zeros(len(data.domains), dtype=torch.float64).index_add(0, data.domain, losses.double())


def batches(n: int, phase: Phase) -> Iterator[Tensor]:
    """Give shuffled batches for all epochs; a last batch of one sample joins the one before."""
    for _ in range(phase.epochs):
        pieces = list(torch.randperm(n).split(phase.batch_size))
        if len(pieces) > 1 and len(pieces[-1]) == 1:
            last = pieces.pop()
            pieces[-1] = torch.cat([pieces[-1], last])
        yield from pieces


def make_step(phase: Phase, parameters: list[Tensor]) -> Step:
    """Make a fresh optimiser: its state lives for one client, phase and round."""
    if phase.optimizer == "adam":
        return adam(parameters, phase.lr, phase.weight_decay)
    return sgd(parameters, phase.lr, phase.momentum, phase.weight_decay)


def draws(request: Request, client: str) -> seeded:
    """All randomness of a client's work in a phase comes from here."""
    return seeded(request.seed, request.round, request.phase.name, client)


def _domains(parameters: Tensors) -> int:
    return sum(name.startswith("heads/") and name.removeprefix("heads/").isdigit() for name in parameters)


def in_precision_of(model: Model, data: Cohort) -> Cohort:
    """Return the samples with inputs and numbers to predict in the model's precision."""
    return replace(
        data, x=in_precision(data.x, model.dtype), y=data.y.to(model.dtype) if data.classes is None else data.y
    )
