"""How a client answers the server's requests.

Heads phase (Algorithm 1, first loop): the encoder is frozen, so each sample's features are computed once, and tau_h
epochs on the head of each domain the client has samples of cost almost nothing; the reply is the head w_im, its
curvature L_im H_im and its weight L_im.
Encoder phase (second loop): the heads are frozen; the re-weighted risk sum_j u_z(j) l_j / L_i is minimised for tau_phi
epochs; the reply is the encoder and its weight L_i. ``together`` trains both at once, as FedAvg does, and ``personal``
does so for a model that the client keeps beside the common one.

The computations are plain functions of tensors, without engine, files or clock (``algorithm.local_training``).
Parameters of scope ``client`` are in ``Client.own`` and never in a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from feddar.algorithm.agnostic import counted_by_ascent
from feddar.algorithm.by_gap import counted_by_gap, values_of
from feddar.algorithm.by_loss import counted_by_loss, loss_of
from feddar.algorithm.decoupled import balanced, with_added_heads, with_own_heads
from feddar.algorithm.label_shift import LABELS, as_heads, corrections, label_sums
from feddar.algorithm.local_training import (
    apfl_step,
    curvature_of,
    domain_risks,
    embeddings_of,
    encode,
    evidence_of,
    fit_head,
    in_precision_of,
    in_units,
    levels_of,
    losses_and_counts,
    losses_of,
    make_step,
    on_device,
    proximal_step,
    rows_of,
    samples_by_domain,
    samples_by_key,
    scores_by,
    seeded_for,
    train_encoder,
    weighed_by_levels,
    with_standard_target,
)
from feddar.algorithm.mixture import (
    FIRST,
    Mixture,
    assigned,
    component_losses,
    component_scores,
    mixed,
    with_all_components,
    with_enough,
)
from feddar.algorithm.offsets import MOMENTS, OFFSETS, Cells, CorrectedSamples, Corrections, with_offsets
from feddar.algorithm.optimizers import Step
from feddar.algorithm.participation import takes_part
from feddar.algorithm.pooling import head_sums
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import (
    BLENDS,
    NOTHING,
    SILENT,
    VALIDATION,
    OwnState,
    Phase,
    Reply,
    Request,
    TrainedEncoder,
    TrainedHead,
)
from feddar.algorithm.spreads import Directions, directions_sent
from feddar.algorithm.weighting import CLASSES, WEIGHTS, class_sums, loss_weights, mass_of, training_weights
from feddar.data.cohort import Cohort
from feddar.errors import TrainingError
from feddar.methods import Scope
from feddar.models.devices import CPU, beside, exact, moved
from feddar.models.encoders.tabular import Standardise
from feddar.models.model import Model
from feddar.models.parameters import ALL, OWN, Parameters, Tensors, key_index, keys, with_heads
from feddar.objectives.score_bins import CoarseBins
from feddar.objectives.scored import Scored


class Client:
    """One client (site): its samples, the parameters that never leave it, and its replies to requests."""

    def __init__(
        self,
        name: str,
        train: Cohort,
        test: Cohort | None,
        model: Model,
        processors: Processors | None = None,
        validation: Cohort | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.processors = processors or Processors()
        self.train = in_precision_of(model, self.processors.to_train_on(train))
        self.test = None if test is None else in_precision_of(model, self.processors.admit(test))
        self.validation = None if validation is None else in_precision_of(model, self.processors.admit(validation))
        self.own = NOTHING
        self.placed: dict[Cohort, Cohort] = {}
        """Samples on the model's device, once they were needed there."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients that this object answers for: only its own (a ``Stack`` has several)."""
        return (self.name,)

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.train)

    def own_states(self) -> dict[str, OwnState]:
        """Return its own state as {name: state}, for a checkpoint; empty if it has none."""
        return {self.name: self.own} if self.own else {}

    def restore(self, _: str, own: OwnState) -> None:
        """Set its own state from a checkpoint."""
        self.own = own

    def answers(self, request: Request) -> Iterator[Reply]:
        """Yield the one reply, or none if this client does not take part in the round."""
        if takes_part(request, self.name):
            yield self.answer(request)

    def answer(self, request: Request) -> Reply:
        """Do the phase of the request; the same request always gets the same reply."""
        with seeded_for(request, self.name):
            return self.processors.process(request, self._work_on_device(request), samples_by_domain(self.train))

    def _work_on_device(self, request: Request) -> Reply:
        """Do the phase on the model's device; the reply and the client's own state are on the CPU again."""
        if self.model.device.type == "cpu" or request.phase.name in ("census", *SILENT):
            return self._work(request)
        self.model.place()
        self.own = moved(self.own, self.model.device)
        reply = self._work(moved(request, self.model.device))
        self.own = moved(self.own, CPU)
        return moved(reply, CPU)

    def _here(self, data: Cohort) -> Cohort:
        """Return samples of this client on the model's device, where they stay."""
        if self.model.device.type == "cpu":
            return data
        if data not in self.placed:
            self.placed[data] = on_device(self.model, data)
        return self.placed[data]

    def _work(self, request: Request) -> Reply:
        sums = {
            "census": self._census,
            "pool": self._pool,
            "offsets": self._fit_offsets,
            "validate": self._validate,
            "measure": self._measure,
        }
        if request.phase.name in sums:
            return Reply(self.names, sums=sums[request.phase.name](request))
        match request.phase.name:
            case "adopt":
                self.own = adopted(self.own, request)
                return Reply(self.names)
            case "label-shift":
                self._shift_labels(request)
                return Reply(self.names)
            case "evaluate":
                return Reply(self.names, scores=self._evaluate(request))
            case _:
                return self._trained(request)

    def _trained(self, request: Request) -> Reply:
        """Train what the phase says; return the reply, which counts by loss or gap if the phase says so."""
        data = with_standard_target(request, self._here(self.train))
        if request.phase.added_heads:
            return self._train_added_heads(request, data)
        if request.phase.balanced:
            request = balanced(request, self.model.objective, self.train)
        train = self._train_heads if request.phase.name == "heads" else self._train_encoders
        if request.phase.assigns:
            return self._averaged_by_levels(request, self._train_components(request, data))
        counted = self._count(request, data, train) if request.phase.counts_by_factor else train(request, data)
        return self._averaged_by_levels(request, counted)

    def _count(self, request: Request, data: Cohort, train: Callable[[Request, Cohort], Reply]) -> Reply:
        """Train; return the reply with the weight that the phase says, by loss or gap under the parameters received."""
        before, mass = self._parameters(request), mass_of(request, data, torch.arange(len(data)))
        if request.phase.fair:
            values = values_of(self.model, request, before, data, self.processors.min_patients)
            reply, self.own = counted_by_gap(request, train(request, data), self.own, values, mass)
            return reply
        loss = loss_of(self.model, request, before, data)
        if request.phase.q:
            return counted_by_loss(self.model, request, train(request, data), data, loss)
        reply, self.own = counted_by_ascent(request, train(request, data), self.own, loss, mass)
        return reply

    def _train_components(self, request: Request, data: Cohort) -> Reply:
        """Train every component on the samples, as far as they are of it, and find this client's shares anew."""
        assert request.phase.assigns is not None  # the caller has looked
        how, units = request.phase.assigns, self.model.objective.in_units
        losses, weight = self._component_losses(request, data)
        mixture = Mixture.of(self.own) or Mixture.equal(losses.shape[1])
        if request.phase.name in FIRST:
            mixture = mixture.settled(losses, weight, how, units)
            self.own = self.own.changed(extra=mixture.named)
        found = with_enough(mixture.responsibilities(losses, weight, how), data, self.processors.min_patients)
        train = self._train_heads if request.phase.name == "heads" else self._train_encoders
        reply = train(request, assigned(data, found))
        return with_all_components(request, replace(reply, samples=len(data) if reply.samples else 0))

    def _component_losses(self, request: Request, data: Cohort) -> tuple[Tensor, Tensor]:
        """Return the losses of samples under every component [n, K], and the weights of samples [n]."""
        scores = component_scores(self.model, request.phase, self._parameters(request), data.x)
        losses = component_losses(self.model.objective, scores, data.y)
        return losses, losses.new_ones(len(data)) if data.weight is None else beside(data.weight, losses)

    def _own_mixture(self, request: Request) -> Mixture:
        """Return this client's mixture; one that has not trained finds it on its training samples."""
        assert request.phase.assigns is not None  # the caller has looked
        if (known := Mixture.of(self.own)) is not None:
            return known
        losses, weight = self._component_losses(request, with_standard_target(request, self._here(self.train)))
        start, units = Mixture.equal(losses.shape[1]), self.model.objective.in_units
        found = start.settled(losses, weight, request.phase.assigns, units)
        self.own = self.own.changed(extra=found.named)
        return found

    def _averaged_by_levels(self, request: Request, reply: Reply) -> Reply:
        """Return the reply with embeddings such that the average weighs each level by its own samples."""
        if not (request.phase.encoder == "global" and self.levels and ALL in reply.encoders):
            return reply
        data = self._here(self.train)
        mass = mass_of(request, data, torch.arange(len(data)))
        samples = torch.tensor(mass or torch.inf, dtype=torch.float64)  # without mass it moves no level
        encoder = reply.encoders[ALL]
        weighed = weighed_by_levels(request.parameters.encoder(ALL), encoder.tensors, self.levels, samples)
        return replace(reply, encoders={ALL: replace(encoder, tensors=encoder.tensors | weighed)})

    def _parameters(self, request: Request) -> Parameters:
        return request.parameters.with_own(self.own.parameters)

    def _scored(self, request: Request, data: Cohort) -> tuple[Tensor, Tensor]:
        """Return features and scores of samples, in the units in which heads are trained.

        The features of a mixture are the scores by its components.
        """
        parameters = self._parameters(request)
        if request.phase.assigns:
            every = component_scores(self.model, request.phase, parameters, data.x)
            return every.flatten(1), mixed(self.model.objective, every, self._own_mixture(request).shares)
        features = encode(self.model, request.phase, parameters, data.x, data.domain)
        return features, self._scores(request.phase, parameters, features, data)

    def _scores(self, phase: Phase, parameters: Parameters, features: Tensor, data: Cohort) -> Tensor:
        """Return the scores of features by the heads, with this client's own corrections if the phase says so."""
        used = with_offsets(parameters, self.own) if phase.offsets else parameters
        used = with_added_heads(used, self.own) if phase.added_heads else used
        return scores_by(phase, used, features, data.domain)

    def _evaluate(self, request: Request) -> Tensor:
        if self.test is None:
            return torch.zeros(0, self.model.outputs, dtype=self.model.dtype)
        return in_units(self._scored(request, self._here(self.test))[1], request.parameters)

    def _pool(self, request: Request) -> Tensors:
        """Return gradient and curvature of the head of each domain, summed over its samples.

        With spreads, scores are those with corrections that fit these heads. They are for this phase alone: with those
        of other heads the step would start from scores that nobody has, overshoot, and grow from round to round.
        """
        data = with_standard_target(request, self._here(self.train))
        features, scores = map(exact, self._scored(request, data))
        if request.spreads is not None:
            scores = scores + self._fitted(request, self._directions(request), features, scores, data).moved
        weight, kind = loss_weights(request, self.model.objective, data), request.phase.curvature
        labels = beside((data.y, data.domain), scores)
        if kind is not None:  # heads in closed form are a step from zero
            return head_sums(self.model.objective, features, torch.zeros_like(scores), *labels, weight, kind)
        return head_sums(self.model.objective, features, scores, *labels, weight)

    def _fit_offsets(self, request: Request) -> Tensors:
        """Store corrections of heads for the spreads of the request; return the sums for the next spreads."""
        assert request.spreads is not None  # the server always sends them, and a site refuses a request without
        data, along = with_standard_target(request, self._here(self.train)), self._directions(request)
        found = self._fitted(request, along, *self._scored(request, data), data)
        self._keep_corrections(found.of_heads(along, self.model.outputs))
        return {MOMENTS: found.moments}

    def _directions(self, request: Request) -> Directions:
        """Return the directions in which heads are corrected: those of the request, or constant terms only."""
        return moved(directions_sent(request.directions, self.model.outputs, self.model.width), self.model.device)

    def _fitted(
        self, request: Request, along: Directions, features: Tensor, scores: Tensor, data: Cohort
    ) -> Corrections:
        """Return the most probable corrections, along the directions, of the clients that samples belong to."""
        assert request.spreads is not None  # both callers have looked
        objective, features, scores = self.model.objective, exact(features), exact(scores)
        owner, clients = self._owners(data)
        owner, domain, y = beside((owner, data.domain, data.y), scores)
        cells, weight = Cells(owner, domain, clients, len(data.domains)), loss_weights(request, objective, data)
        return CorrectedSamples(objective, features, scores, y, cells, along, weight).fitted(request.spreads)

    def _owners(self, data: Cohort) -> tuple[Tensor, int]:
        """Return the number of the client that each sample belongs to, and how many clients there are: only this."""
        return torch.zeros_like(data.domain), 1

    def _keep_corrections(self, corrections: Tensor) -> None:
        """Store the corrections of heads of each client, [clients, M, outputs, width]."""
        self.own = self.own.changed(extra={OFFSETS: corrections[0]})

    def _shift_labels(self, request: Request) -> None:
        """Store corrections of heads by the rates of labels here, beside those of all clients in the request."""
        assert request.label_rates is not None  # the server always sends them, and a site refuses a request without
        heads = len(keys(request.phase.heads, len(self.train.domains)))
        found = corrections(self.model.objective, self.train, *self._owners(self.train), request.label_rates)
        self._keep_corrections(as_heads(found, heads, self.model.width))

    @cached_property
    def _held_out(self) -> Cohort:
        """The validation samples; none, if there are none."""
        return self.train.rows(slice(0)) if self.validation is None else self.validation

    def _validate(self, request: Request) -> Tensors:
        """Return the loss summed over the validation samples of each domain and their number, [M, 2] in float64.

        With candidates for the heads, also the loss summed over all of these samples with each of them.
        """
        data = with_standard_target(request, self._here(self._held_out))
        features, scores = self._scored(request, data)

        def losses(scores: Tensor) -> Tensor:
            return losses_and_counts(losses_of(self.model, request, scores, data), data)

        sums = {VALIDATION: losses(scores)}
        if request.candidates is not None:
            sums[BLENDS] = torch.stack([
                losses(self._scores(request.phase, with_heads(request.parameters, heads), features, data))[:, 0].sum()
                for heads in request.candidates
            ])  # fmt: skip
        return sums

    def _measure(self, request: Request) -> Tensors:
        """Return sums over the test samples of each domain, from which the server computes metrics."""
        if self.test is None or not len(self.test):
            return {}
        scores = moved(self._evaluate(request), CPU).double()
        predicted, y = self.model.objective.predictions(scores), self.test.y
        target, score_range = moved((request.parameters.target, request.score_range), CPU)
        if not bool(predicted.isfinite().all()):
            raise TrainingError(
                "the model's predictions of test samples are not finite: the learning rate is too high."
            )
        if target is not None:  # a shift changes neither errors nor variance,
            centre = target[0].double()  # and sums of squares around the mean lose no digits
            predicted, y = predicted - centre, y.double() - centre
        patient = torch.arange(len(y)) if self.test.group is None else self.test.group
        coarse = CoarseBins(patient, self.processors.min_patients)
        domain, domains = self.test.domain, len(self.test.domains)
        return self.model.objective.sums(Scored(y, predicted, domain, domains, score_range, coarse))

    def _census(self, request: Request) -> Tensors:
        """Return the samples of each domain, and sums and sums of squares of the columns that will be standardised."""
        sums = {"counts": samples_by_domain(self.train)}
        if self.train.numbers is not None and any(isinstance(m, Standardise) for m in self.model.body.modules()):
            columns = self.train.numbers.double()
            sums["present"] = columns.isfinite().sum(0).double()
            sums |= {"sum": columns.nansum(0), "squares": columns.square().nansum(0)}
        if self.levels:
            sums["levels"] = torch.cat(list(self.levels.values()))
        if self.train.weight is not None:
            zeros = torch.zeros(len(self.train.domains), dtype=torch.float64)
            sums[WEIGHTS] = zeros.index_add(0, self.train.domain, self.train.weight)
        least = self.processors.min_patients
        if request.phase.label_shift:
            sums[LABELS] = label_sums(self.model.objective, self.train, least)
        if request.phase.class_weight:
            # Other sums over all domains would tell by their difference what sums by domain hide.
            by_domain = sums.get(LABELS)
            sums[CLASSES] = (
                class_sums(self.model.objective, self.train, least) if by_domain is None else by_domain.sum(0)
            )
        if request.phase.target:
            y = self.train.y.double()
            number = torch.tensor(float(len(y)), dtype=torch.float64)
            sums["target"] = torch.stack([number, y.sum(), y.square().sum()])
        return sums

    @cached_property
    def levels(self) -> Tensors:
        """How many samples each level of each category has, by embedding."""
        embeddings = embeddings_of(self.model)
        if not embeddings:
            return {}
        found = levels_of(self.train, [len(part.counts) for part in embeddings.values()])
        return {name: counts.double() for name, counts in zip(embeddings, found, strict=True)}

    def _train_heads(self, request: Request, data: Cohort) -> Reply:
        """Train the head of each key that this client has samples of, on cached features."""
        phase, parameters = request.phase, self._parameters(request)
        features = encode(self.model, phase, parameters, data.x, data.domain)
        # Within one domain all samples have the same u_m, which would only rescale the learning rate: none is used.
        weight = self._training_weights(request, data, phase.heads, domains=phase.heads != "domain")
        counted = loss_weights(request, self.model.objective, data)
        heads: dict[str, TrainedHead] = {}
        for key, rows in samples_by_key(phase.heads, data):
            start, x, y = parameters.heads[key], features[rows], data.y[rows]
            head = fit_head(self.model, phase, start, x, y, None if weight is None else weight[rows])
            own = None if counted is None else counted[beside(rows, counted)]
            curvature = curvature_of(self.model, phase, start, head, x, own) if phase.heads != "client" else None
            evidence = evidence_of(self.model, request, key, x, y, own)
            heads[key] = TrainedHead(head, mass_of(request, data, rows), curvature, evidence=evidence)
        return Reply(self.names, heads=self._common_heads(phase, heads))

    def _train_added_heads(self, request: Request, data: Cohort) -> Reply:
        """Train and store heads of this client's own that are added to the common ones; nothing of them is sent."""
        start = with_added_heads(self._parameters(request), self.own)
        trained = self._train_heads(replace(request, parameters=start), data).heads
        heads = {key: part.head for key, part in trained.items()}
        self.own = with_own_heads(self.own, request.parameters.heads, heads)
        return Reply(self.names)

    def _training_weights(self, request: Request, data: Cohort, scope: Scope, *, domains: bool) -> Tensor | None:
        """Return by what losses are multiplied in training, with weights of mean 1 in the samples of each key."""
        part, parts = key_index(scope, data.domain), len(keys(scope, len(data.domains)))
        return training_weights(request, self.model, data, part, parts, domains=domains)

    def _common_heads(self, phase: Phase, heads: dict[str, TrainedHead]) -> dict[str, TrainedHead]:
        """Store heads of scope ``client`` in ``own``, and return the heads that may be sent."""
        if phase.heads != "client":
            return heads
        self.own = self.own.changed(heads={key: trained.head for key, trained in heads.items()})
        return {}

    def _train_encoders(self, request: Request, data: Cohort) -> Reply:
        """Train the encoder of each key that this client has samples of, under frozen heads or together with them."""
        phase, parameters = request.phase, self._parameters(request)
        weight = self._training_weights(request, data, phase.encoder, domains=True)
        sums = {"risks": domain_risks(self.model, request, parameters, data)} if phase.risks else {}
        encoders: dict[str, TrainedEncoder] = {}
        heads: dict[str, TrainedHead] = {}
        total = 0.0
        for key, rows in samples_by_key(phase.encoder, data):
            part = data if len(rows) == len(data) else rows_of(data, rows)
            used, position = key_index(phase.heads, part.domain).unique(return_inverse=True)
            head_keys = [keys(phase.heads, len(data.domains))[index] for index in used.tolist()]
            start = torch.stack([parameters.heads[each] for each in head_keys])
            self.model.load(parameters, key)
            stepper = self._stepper(request, key, head_keys)
            # The same seed for every key: a domain is then trained as if the client had samples of no other.
            with seeded_for(request, self.name):
                own = None if weight is None else weight[rows]
                loss, trained = train_encoder(self.model, phase, start, position, part, own, stepper)
            mass = mass_of(request, data, rows)
            total += loss * (mass / len(rows))
            sent = self._keep_own(phase, key)
            if sent:
                encoders[key] = TrainedEncoder(sent, mass)
            if phase.name != "encoder":
                ends = zip(head_keys, start, trained, strict=True)
                heads |= {
                    each: self._trained_head(request, before, after, part, position == place)
                    for place, (each, before, after) in enumerate(ends)
                }
        return Reply(self.names, encoders, self._common_heads(phase, heads), sums, loss=total, samples=len(data))

    def _trained_head(self, request: Request, start: Tensor, head: Tensor, part: Cohort, mine: Tensor) -> TrainedHead:
        """Return a head that was trained together with the encoder now loaded; ``mine`` marks the head's samples."""
        phase, curvature = request.phase, None
        if phase.curvature is not None and phase.heads != "client":
            x = tuple(each[beside(mine, each)] for each in part.x)
            features = self.model.frozen_features(x, part.domain[mine])
            weight = loss_weights(request, self.model.objective, part)
            own = None if weight is None else weight[beside(mine, weight)]
            curvature = curvature_of(self.model, phase, start, head, features, own)
        return TrainedHead(head.clone(), mass_of(request, part, mine.nonzero().flatten()), curvature)

    def _keep_own(self, phase: Phase, key: str) -> Tensors:
        """Store what never leaves the client of the encoder just trained, and return the tensors that may be sent."""
        state = {name: value.clone() for name, value in self.model.body.state_dict().items()}
        own = set(state) if phase.encoder == "client" else set()
        if phase.private_norm:
            own |= self.model.batch_norm_names()
        if own:
            self.own = self.own.changed(encoders={key: {name: state[name] for name in own}})
        return {name: value for name, value in state.items() if name not in own and value.is_floating_point()}

    def _stepper(self, request: Request, key: str, head_keys: list[str]) -> Callable[[list[Tensor]], Step]:
        """Return the step to train with: plain, with a proximal term towards the common model, or APFL's mixture."""
        phase = request.phase
        if not phase.mu and phase.mix is None:
            return lambda parameters: make_step(phase, parameters)
        encoder = request.parameters.encoder(_common(key))
        common = [encoder[name] for name, _ in self.model.body.named_parameters()]
        common.append(torch.stack([request.parameters.heads[_common(each)] for each in head_keys]))
        if phase.mix is None:
            return lambda parameters: proximal_step(make_step(phase, parameters), parameters, common, phase.mu)
        local, mix = self._mixture(phase, common)
        return lambda parameters: apfl_step(make_step(phase, local), parameters, local, common, mix, phase.lr)

    def _mixture(self, phase: Phase, common: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return APFL's local parameters v and mixture a, which are part of ``own``; training changes them in place."""
        assert phase.mix is not None  # this is only for phases with a mixture
        kept = self.own.extra
        local = [kept.get(f"local/{place}", value).clone() for place, value in enumerate(common)]
        mix = kept["mix"].clone() if "mix" in kept else common[-1].new_full((), phase.mix)
        self.own = self.own.changed(extra={f"local/{place}": value for place, value in enumerate(local)} | {"mix": mix})
        return local, mix


def _common(key: str) -> str:
    """Return the key of the common parameters from which a client's own parameters started."""
    return ALL if key == OWN else key


def adopted(own: OwnState, request: Request) -> OwnState:
    """Return a client's own state with a copy of the common parameters for each scope that is ``client``."""
    phase, common = request.phase, request.parameters
    encoders, heads = {}, {}
    if phase.encoder == "client":
        encoders = {OWN: {name: value.clone() for name, value in common.encoder(ALL).items()}}
    if phase.heads == "client":
        heads = {OWN: common.heads[ALL].clone()}
    return own.changed(encoders, heads)
