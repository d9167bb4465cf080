"""What a client does when asked.

Heads phase (Algorithm 1, first loop): the encoder is frozen, so each sample's feature is computed once and tau_h
epochs on each held head cost almost nothing; the reply is the head w_im, its curvature L_im H_im and its weight L_im.
Encoder phase (second loop): the heads are frozen; the re-weighted risk sum_j u_z(j) l_j / L_i is minimised for tau_phi
epochs; the reply is the encoder and its weight L_i. ``together`` trains both at once, as FedAvg does, and ``personal``
does so for a model that the client keeps beside the common one.

All of it is plain functions of plain tensors that know no engine, no files and no clock (``algorithm.local_training``).
What a client's scope keeps private is in ``Client.own`` and never in a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from feddar.algorithm.local_training import (
    curvature_of,
    descend,
    domain_risks,
    draws,
    encode,
    evidence_of,
    fit_head,
    in_precision_of,
    in_units,
    make_step,
    mixed,
    predict,
    pulled,
    sample_weights,
    samples_by_domain,
    samples_by_key,
)
from feddar.algorithm.optimizers import Step
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import OwnState, Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.data.cohort import Cohort
from feddar.models.encoders.tabular import Standardise
from feddar.models.model import Model
from feddar.models.parameters import ALL, OWN, Parameters, Tensors, key_index, keys
from feddar.objectives.score_bins import CoarseBins
from feddar.objectives.scored import Scored


class Client:
    """One site: its samples, the parameters that stay with it, and its answers."""

    def __init__(
        self, name: str, train: Cohort, test: Cohort | None, model: Model, processors: Processors | None = None
    ) -> None:
        self.name = name
        self.model = model
        self.processors = processors or Processors()
        self.train = in_precision_of(model, self.processors.admit(train))
        self.test = None if test is None else in_precision_of(model, self.processors.admit(test))
        self.own = OwnState()

    @property
    def names(self) -> tuple[str, ...]:
        """The clients that this one answers for: itself."""
        return (self.name,)

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.train)

    def kept(self) -> dict[str, OwnState]:
        """Return what stays with it, under its name."""
        return {self.name: self.own}

    def restore(self, _: str, kept: OwnState) -> None:
        """Take back what it kept."""
        self.own = kept

    def answers(self, request: Request) -> Iterator[Reply]:
        """Give the one answer, as those do who answer for several."""
        yield self.answer(request)

    def answer(self, request: Request) -> Reply:
        """Do what is asked; the same request always gets the same reply."""
        with draws(request, self.name):
            return self.processors.process(request, self._work(request))

    def _work(self, request: Request) -> Reply:
        match request.phase.name:
            case "census":
                return Reply(self.names, sums=self._census(request.phase))
            case "adopt":
                self.own = adopted(self.own, request)
                return Reply(self.names)
            case "evaluate":
                return Reply(self.names, scores=self._evaluate(request))
            case "measure":
                return Reply(self.names, sums=self._measure(request))
            case "heads":
                return self._heads(request)
            case _:
                return self._descend(request)

    def _parameters(self, request: Request) -> Parameters:
        return request.parameters.with_own(self.own.parameters)

    def _evaluate(self, request: Request) -> Tensor:
        if self.test is None:
            return torch.zeros(0, self.model.outputs, dtype=self.model.dtype)
        return predict(self.model, request.phase, self._parameters(request), self.test.x, self.test.domain)

    def _measure(self, request: Request) -> Tensors:
        """Say how well the test samples are predicted, as sums over each domain."""
        if self.test is None or not len(self.test):
            return {}
        predicted, y = self.model.objective.predictions(self._evaluate(request).double()), self.test.y
        if request.parameters.target is not None:  # errors and spread are the same around any centre
            centre = request.parameters.target[0].double()  # and exact around the mean
            predicted, y = predicted - centre, y.double() - centre
        patient = torch.arange(len(y)) if self.test.group is None else self.test.group
        coarse = CoarseBins(patient, self.processors.fewest)
        domain, domains = self.test.domain, len(self.test.domains)
        return self.model.objective.sums(Scored(y, predicted, domain, domains, request.score_range, coarse))

    def _census(self, phase: Phase) -> Tensors:
        """Count the samples of each domain, and sum up, with their squares, the numbers that are to be standardised."""
        sums = {"counts": samples_by_domain(self.train)}
        if self.train.numbers is not None and any(isinstance(m, Standardise) for m in self.model.body.modules()):
            columns = self.train.numbers.double()
            present = columns.isfinite().sum(0)
            patients = torch.tensor([self._patients(column.isfinite()) for column in columns.T], dtype=torch.long)
            enough = patients >= self.processors.fewest
            found = {"present": present.double(), "sum": columns.nansum(0), "squares": columns.square().nansum(0)}
            sums |= {name: torch.where(enough, value, 0) for name, value in found.items()}
        if phase.target:
            y = self.train.y.double()
            number = torch.tensor(float(len(y)), dtype=torch.float64)
            sums["target"] = torch.stack([number, y.sum(), y.square().sum()])
        return sums

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
        heads: dict[str, TrainedHead] = {}
        for key, rows in samples_by_key(phase.heads, data):
            start, x, y = parameters.heads[key], features[rows], data.y[rows]
            head = fit_head(self.model, phase, start, x, y, None if weight is None else weight[rows])
            curvature = curvature_of(self.model, phase, start, head, x) if phase.heads != "client" else None
            heads[key] = TrainedHead(
                head, float(len(rows)), curvature, evidence=evidence_of(self.model, request, key, x, y)
            )
        return Reply(self.names, heads=self._common_heads(phase, heads))

    def _common_heads(self, phase: Phase, heads: dict[str, TrainedHead]) -> dict[str, TrainedHead]:
        """Keep heads that are this client's own, and return what may be sent."""
        if phase.heads != "client":
            return heads
        self.own = self.own.changed(heads={key: trained.head for key, trained in heads.items()})
        return {}

    def _descend(self, request: Request) -> Reply:
        """Train the encoder of each key this client holds, under frozen heads or together with them."""
        phase, parameters, data = request.phase, self._parameters(request), in_units(request, self.train)
        weight = sample_weights(request, data.domain, self.model.dtype)
        sums = {"risks": domain_risks(self.model, phase, parameters, data)} if phase.risks else {}
        encoders: dict[str, TrainedEncoder] = {}
        heads: dict[str, TrainedHead] = {}
        total = 0.0
        for key, rows in samples_by_key(phase.encoder, data):
            part = data if len(rows) == len(data) else data.rows(rows)
            used, position = key_index(phase.heads, part.domain).unique(return_inverse=True)
            head_keys = [keys(phase.heads, len(data.domains))[index] for index in used.tolist()]
            start = torch.stack([parameters.heads[each] for each in head_keys])
            self.model.load(parameters, key)
            stepper = self._stepper(request, key, head_keys)
            # The same draws for every key: a domain is then trained as if the client held no other.
            with draws(request, self.name):
                loss, trained = descend(self.model, phase, start, position, part, weight[rows], stepper)
            total += loss
            sent = self._keep_own(phase, key)
            if sent:
                encoders[key] = TrainedEncoder(sent, float(len(rows)))
            if phase.name != "encoder":
                ends = zip(head_keys, start, trained, strict=True)
                heads |= {
                    each: self._trained_head(phase, before, after, part, position == place)
                    for place, (each, before, after) in enumerate(ends)
                }
        return Reply(self.names, encoders, self._common_heads(phase, heads), sums, loss=total, samples=len(data))

    def _trained_head(self, phase: Phase, start: Tensor, head: Tensor, part: Cohort, mine: Tensor) -> TrainedHead:
        """Return a head that was trained with the encoder now loaded, on the samples that are its own."""
        curvature = None
        if phase.curvature is not None and phase.heads != "client":
            features = self.model.frozen_features(tuple(x[mine] for x in part.x), part.domain[mine])
            curvature = curvature_of(self.model, phase, start, head, features)
        return TrainedHead(head.clone(), float(mine.sum()), curvature)

    def _keep_own(self, phase: Phase, key: str) -> Tensors:
        """Keep what is this client's own of the encoder just trained, and return what may be sent."""
        state = {name: value.clone() for name, value in self.model.body.state_dict().items()}
        own = set(state) if phase.encoder == "client" else set()
        if phase.private_norm:
            own |= self.model.batch_norm_names()
        if own:
            self.own = self.own.changed(encoders={key: {name: state[name] for name in own}})
        return {name: value for name, value in state.items() if name not in own and value.is_floating_point()}

    def _stepper(self, request: Request, key: str, head_keys: list[str]) -> Callable[[list[Tensor]], Step]:
        """Say how parameters move: by the optimiser alone, pulled towards the common model, or mixed with it."""
        phase = request.phase
        if not phase.mu and phase.mix is None:
            return lambda parameters: make_step(phase, parameters)
        encoder = request.parameters.encoder(_common(key))
        common = [encoder[name] for name, _ in self.model.body.named_parameters()]
        common.append(torch.stack([request.parameters.heads[_common(each)] for each in head_keys]))
        if phase.mix is None:
            return lambda parameters: pulled(make_step(phase, parameters), parameters, common, phase.mu)
        local, mix = self._mixture(phase, common)
        return lambda parameters: mixed(make_step(phase, local), parameters, local, common, mix, phase.lr)

    def _mixture(self, phase: Phase, common: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return APFL's local parameters and the share they have, as they go on from here: training changes them."""
        kept = self.own.extra
        local = [kept.get(f"local/{place}", value).clone() for place, value in enumerate(common)]
        mix = kept["mix"].clone() if "mix" in kept else torch.tensor(phase.mix, dtype=self.model.dtype)
        self.own = self.own.changed(extra={f"local/{place}": value for place, value in enumerate(local)} | {"mix": mix})
        return local, mix


def _common(key: str) -> str:
    """Return the key of the common parameters that a client's own started from."""
    return ALL if key == OWN else key


def adopted(own: OwnState, request: Request) -> OwnState:
    """Return a client's own state with private parameters that start from the common ones."""
    phase, common = request.phase, request.parameters
    encoders, heads = {}, {}
    if phase.encoder == "client":
        encoders = {OWN: {name: value.clone() for name, value in common.encoder(ALL).items()}}
    if phase.heads == "client":
        heads = {OWN: common.heads[ALL].clone()}
    return own.changed(encoders, heads)
