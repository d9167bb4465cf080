"""The round loop: census, phases, aggregation, evaluation. It is the same for every method and every engine.

All randomness comes from (seed, round, phase, client), so a run that is stopped and resumed equals an uninterrupted
one bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from feddar.algorithm.closed_form import closed_form_heads
from feddar.algorithm.credibility import Credibility
from feddar.algorithm.engine import Engine
from feddar.algorithm.label_shift import LABELS, label_rates
from feddar.algorithm.local_training import counted, standard_units, standardised
from feddar.algorithm.mixture import begun, begun_again
from feddar.algorithm.offsets import MOMENTS, next_spreads
from feddar.algorithm.participation import highest_number
from feddar.algorithm.pooling import AS_TRAINED, total_of
from feddar.algorithm.protocol import BLENDS, EVERYBODY, VALIDATION, WITHHELD, OwnState, Phase, Reply, Request
from feddar.algorithm.schedule import census, evaluation, is_pooled, label_shift, offsets, phases, pool
from feddar.algorithm.server import (
    Reduced,
    ascend,
    epochs_by_evidence,
    first_shares,
    heads_of_absent_domains,
    mean_head,
    reduce_replies,
    refuse_bad,
    shares_by_evidence,
)
from feddar.algorithm.spreads import FIRST_OF_CLIENTS, Directions
from feddar.algorithm.state import ServerState
from feddar.algorithm.weighting import CLASSES, WEIGHED, WEIGHTS, class_weights, scale_and_masses
from feddar.data.cohort import domain_weights
from feddar.evaluation.metrics import worst
from feddar.lazy import pandas as pd
from feddar.methods import Method
from feddar.models.model import Model
from feddar.models.parameters import ALL, Tensors, key_of, keys
from feddar.settings import Settings


@dataclass(frozen=True)
class Best:
    """The best round so far: the one with the lowest validation loss, of equal ones the first."""

    round: int
    loss: float
    """The mean loss over all validation samples."""
    method: Method
    state: ServerState


@dataclass(frozen=True)
class Position:
    """Where a training stands: the number of rounds done, the method in force and the server's state."""

    round: int
    method: Method
    state: ServerState
    best: Best | None = None
    """The round whose model is used; None without validation, where it is the last one."""

    @property
    def is_best(self) -> bool:
        """Whether the round just done is the best so far."""
        return self.best is not None and self.best.round == self.round

    def judged(self, loss: float, settings: Settings) -> Position:
        """Return the position with this round as the best one, if its loss is the lowest and it may be chosen."""
        if not settings.may_choose(self.round) or (self.best is not None and not loss < self.best.loss):
            return self
        return replace(self, best=Best(self.round, loss, self.method, self.state))

    def with_state(self, state: ServerState) -> Position:
        """Return the position with another state, which is also that of the best round if that is this one."""
        best = replace(self.best, state=state) if self.best is not None and self.is_best else self.best
        return replace(self, state=state, best=best)

    def is_over(self, settings: Settings) -> bool:
        """Return whether all rounds are done, or as many as ``patience`` without a better validation loss."""
        waited = 0 if self.best is None else self.round - self.best.round
        return self.round >= settings.rounds or waited >= settings.patience


@dataclass(frozen=True)
class Standing:
    """Where a training stands, with each client's own state; from this it can go on."""

    position: Position
    own: dict[str, OwnState]
    """Each client's own state, as far as it is known here (between sites it is not)."""


@dataclass(frozen=True)
class RoundEnd:
    """The result of a round, which callbacks get."""

    position: Position
    rounds: int
    loss: float
    """The mean loss over training samples."""
    samples: int
    metric: str
    """The main metric, for displays with room for one."""
    test: pd.DataFrame | None
    """Test metrics with the columns scope, name, metric, value, count; None if the model was not evaluated."""
    validation: Tensor | None = None
    """Summed loss and number of the validation samples of each domain, [M, 2]; None without validation."""

    @property
    def round(self) -> int:
        """The number of rounds done."""
        return self.position.round

    @property
    def mean_domain(self) -> float:
        """The mean of the main metric over domains; NaN if the model was not evaluated."""
        return float("nan") if self.test is None else float(self._by_domain(self.test).mean())

    @property
    def worst_domain(self) -> float:
        """The main metric in the worst domain; NaN if the model was not evaluated."""
        return float("nan") if self.test is None else worst(self.metric, self._by_domain(self.test))

    def _by_domain(self, test: pd.DataFrame) -> pd.Series[float]:
        return test[(test["scope"] == "domain") & (test["metric"] == self.metric)]["value"]


def mean_loss(sums: Tensor) -> float:
    """Return the mean loss from summed loss and number of samples, [2] or by domain [M, 2]."""
    total, count = sums.reshape(-1, 2).sum(0).tolist()
    return float(total / count)


Callback = Callable[[RoundEnd], bool | None]
"""Called after each round, in the order of the list; one that returns True ends the training."""

Listener = Callable[[Request, Reply | None], None]
"""Called with each request as it is sent, and then with the request and each reply as it comes."""

Ask = Callable[..., Iterable[Reply]]
"""Sends a phase to all clients: ``ask(phase, parameters=..., ...)``, with fields of ``Request``."""


class Evaluator(Protocol):
    """Evaluates the model in use after a round."""

    def __call__(self, position: Position, ask: Ask) -> tuple[ServerState, pd.DataFrame | None]:
        """Return the state (it may store something there for the next round) and metrics by domain and client."""


AVERAGING = 8
"""The power of its number that each round counts with in the average (Shamir and Zhang, 2013): it is of about the last
ninth of the rounds, so that it is steady when training is long, and not behind when training has just begun."""
STEPS_TRIED = (AS_TRAINED, 0.0, 0.25, 0.5, 0.75, 1.0)
"""What validation compares: heads as trained, drawn together, and after these parts of their second-order step."""


class RoundLoop:
    """The loop over rounds, on any engine."""

    def __init__(
        self,
        settings: Settings,
        model: Model,
        domains: int,
        engine: Engine,
        evaluate: Evaluator,
        callbacks: Sequence[Callback] = (),
        listeners: Sequence[Listener] = (),
        shared: Sequence[Tensor] = (),
    ) -> None:
        """``shared`` is what domains that are made of several factors have in common (``DomainStructure.shared``)."""
        self.settings, self.model, self.domains, self.engine = settings, model, domains, engine
        self.shared = shared
        self.evaluate, self.callbacks, self.listeners = evaluate, callbacks, listeners
        self.clients: list[str] = []
        """The clients of the census, where only a part of them trains in a round."""
        self.counts = torch.zeros(domains, dtype=torch.long)
        """Samples of each domain over all clients of the census, L_m, or the sums of their weights, of mean 1."""
        self.withheld: tuple[int, ...] = ()
        """The domains whose heads no client sends, as the census says; they have the mean of the others' heads."""
        self.weights: dict[str, Tensor] = {}
        """The scale of weights of samples, and the weights of classes, if there are any, as fields of requests."""
        self.label_sums: Tensor | None = None
        """The sums of weights by domain and class over all clients, if the census asks for them."""
        self.steps = 0
        """The number of requests sent in this round."""
        self.candidates: Tensor | None = None
        """Pooled heads after each part of their step, which validation compares; None without pooling."""
        self.best = 0
        """The best round so far by the validation loss, which requests say; 0 if there is none."""

    def run(self, position: Position, own: dict[str, OwnState]) -> Position:
        """Restore the clients' own states, run the remaining rounds and return the final position."""
        position = self._census(position)
        self.engine.restore(own)
        while not position.is_over(self.settings):
            if self.engine.joined():
                position = self._census(position)
            position, end = self._next(position)
            stops = [callback(end) for callback in self.callbacks]
            if any(stops):
                break
        return position

    def _next(self, position: Position) -> tuple[Position, RoundEnd]:
        """Train, validate and evaluate the next round."""
        number, self.steps = position.round + 1, 0
        self.best = 0 if position.best is None else position.best.round
        position = self._enter(position, self.settings.row_in(number), number)
        position, loss, samples = self._round(position, number)
        validation, position = self._validate(position)
        if validation is not None:
            position = position.judged(mean_loss(validation), self.settings)
        state, test = self.evaluate(position, self._asking(number))
        position = position.with_state(state)
        metric = self.model.objective.headline(self.settings.metric)
        return position, RoundEnd(position, self.settings.rounds, loss, samples, metric, test, validation)

    def _validate(self, position: Position) -> tuple[Tensor | None, Position]:
        """Return summed loss and number of all clients' validation samples by domain, [M, 2]; None if there is none.

        The position comes with the part of the step that pooled heads take in the next round: what was best in this.
        """
        if not self.settings.validation:
            return None, position
        phase, state = evaluation("validate", position.method), position.state
        sums = torch.zeros(self.domains, 2, dtype=torch.float64)
        blends = torch.zeros(len(STEPS_TRIED), dtype=torch.float64)
        for reply in self._asking(position.round)(phase, parameters=state.in_use, candidates=self.candidates):
            refuse_bad(reply, phase, state.in_use, position.round)
            sums = sums + reply.sums.get(VALIDATION, 0)
            blends = blends + reply.sums.get(BLENDS, 0)
        if not bool(sums[:, 1].any()):
            return None, position
        if self.candidates is not None:
            blend = torch.tensor(STEPS_TRIED[int(blends.argmin())], dtype=torch.float64)
            position = replace(position, state=replace(state, blend=blend))
        return sums, position

    def _asking(self, number: int) -> Ask:
        def ask(phase: Phase, **fields: Any) -> Iterable[Reply]:
            self.steps += 1
            withheld = () if phase.assigns else self.withheld  # which domains these are is nobody's concern then
            fields |= {"step": self.steps, "best": self.best, "withheld": withheld}
            fields |= self.weights if phase.name in WEIGHED else {}
            request = Request(phase, number, self.settings.seed, **fields)
            return self._overheard(request) if self.listeners else self.engine.exchange(request)

        return ask

    def _overheard(self, request: Request) -> Iterator[Reply]:
        """Send a request and yield its replies, and tell the listeners of both."""
        self._tell(request, None)
        for reply in self.engine.exchange(request):
            self._tell(request, reply)
            yield reply
            del reply  # its memory is to be free while the next one comes

    def _tell(self, request: Request, reply: Reply | None) -> None:
        for listener in self.listeners:
            listener(request, reply)

    def _census(self, position: Position) -> Position:
        """Ask clients for their samples by domain and the sums of columns, and add these up over clients."""
        phase = census(self.settings, self.model.objective)
        self.clients, self.counts = [], torch.zeros_like(self.counts)
        sums: Tensors = {}
        for reply in self._asking(0)(phase):
            self.clients += reply.clients if self.settings.trains_a_part else ()
            self.counts = self.counts + reply.sums["counts"].view(-1, self.domains).sum(0)
            for name in reply.sums.keys() - {"counts"}:
                sums[name] = reply.sums[name] + sums.get(name, 0)
        self.withheld = tuple(sums.pop(WITHHELD, torch.empty(0)).nonzero().flatten().tolist())
        self.weights = {}
        if WEIGHTS in sums:
            self.weights["weight_scale"], self.counts = scale_and_masses(self.counts, sums[WEIGHTS])
        if CLASSES in sums:
            self.weights["class_weights"] = class_weights(sums[CLASSES])
        self.label_sums = sums.get(LABELS)
        return position if position.round else replace(position, state=self._standardised(position.state, sums))

    def _standardised(self, state: ServerState, sums: Tensors) -> ServerState:
        """Set mean and scale of columns and of a number to predict, and counts of levels, before round 1."""
        if "sum" in sums:
            fixed = standardised(self.model, sums["present"], sums["sum"], sums["squares"])
            state = state.trained({ALL: fixed}, {})
        if "levels" in sums:
            state = state.trained({ALL: counted(self.model, sums["levels"], float(self.counts.sum()))}, {})
        if "target" in sums:
            units = torch.stack(standard_units(*sums["target"].unbind()))
            state = replace(state, in_training=replace(state.in_training, target=units))
        return state

    def _enter(self, position: Position, method: Method, number: int) -> Position:
        """At the start of a stage, give each domain or client (as the scopes say) a copy of the common parameters."""
        if method == position.method and number > 1:
            return position
        state = self._with_keys(position.state, method)
        if "client" in method.used:
            for _ in self._asking(number)(Phase("adopt", *method.used), parameters=state.in_training):
                pass
        state = state.without_own(method.encoder, method.heads)
        if method.minmax:
            state = replace(state, domain_shares=first_shares(self.counts, method.ascent))
        return replace(position, method=method, state=state)

    def _with_keys(self, state: ServerState, method: Method) -> ServerState:
        """Return the state with a copy of the common parameters for each domain, or for each component."""
        if method.assigns is None:
            return state.by_domain(method.encoder, method.heads, self.domains)
        return begun(state, method.encoder, self.settings.components, self.settings.seed)

    def _counted(self, state: ServerState, reduced: Reduced, method: Method) -> ServerState:
        """Return the state with what a phase has told beside parameters: masses of components, risks, a tally."""
        if method.assigns is not None and reduced.masses:
            masses = [reduced.masses.get(key, 0.0) for key in keys("domain", self.settings.components)]
            state = replace(state, components=torch.tensor(masses, dtype=torch.float64))
        if reduced.risks is not None and state.domain_shares is not None:
            shares = ascend(state.domain_shares, reduced.risks, self.settings.minmax_lr, method.ascent)
            state = replace(state, domain_shares=shares)
        return state if reduced.tally is None else replace(state, tally=reduced.tally)

    def _round(self, position: Position, number: int) -> tuple[Position, float, int]:
        """Run the phases of one round; return the new position, the mean training loss and of how many samples."""
        method, loss, samples, self.candidates = position.method, float("nan"), 0, None
        state = replace(position.state, used_heads=None)
        credibility: Credibility | None = None
        if method.assigns is not None and 2 * number <= self.settings.rounds:
            state = begun_again(state, self.settings.seed, number)
        for phase in phases(method, self.settings, self.model.objective, number):
            reduced = self._phase(phase, state, method, number)
            state = self._counted(state.trained(reduced.encoders, reduced.heads), reduced, method)
            credibility = reduced.credibility or credibility
            # Of several phases with a loss, the first trains the common parameters; later ones train personal models.
            loss, samples = (reduced.loss, reduced.samples) if math.isnan(loss) else (loss, samples)
        if method.heads == "domain" and method.encoder == "global" and method.assigns is None:
            state = state.trained({}, heads_of_absent_domains(state, self._counts_behind_heads()))
        if method.averaged:
            state = state.with_average((AVERAGING + 1) / (AVERAGING + number - self.settings.warmup))
        along = None
        if credibility is not None and self._tell_of_differences(credibility.samples):
            # The next round starts from the heads as trained, not these. Early on the encoder does not show yet how
            # domains differ, so there is no evidence that they do, and shrunk heads would keep it from learning it.
            others = self._heads_without_evidence(position.state, state.settled.heads)
            weighed = credibility.weighed(state.settled.heads, self.counts)
            difference = torch.tensor(weighed.difference, dtype=torch.float64)
            state = replace(state, used_heads=others | weighed.heads, difference=difference)
        elif is_pooled(method, self.model):
            state, along = self._pooled(state, method, number)
        elif method.closed_form:
            state = self._in_closed_form(state, method, number)
        if method.site_offset:
            state = self._offsets(state, method, number, along)
        if method.label_shift and self.label_sums is not None:
            rates = label_rates(self.label_sums, by_domain=method.needs_domain)
            for _ in self._asking(number)(label_shift(method), label_rates=rates):
                pass
        return replace(position, round=number, state=state), loss, samples

    def _heads_without_evidence(self, before: ServerState, trained: Mapping[str, Tensor]) -> Tensors:
        """Return the heads for use of domains that no evidence was sent of in this round.

        Where nobody who holds a domain took part, that is the one used before, since nobody has trained it either.
        """
        behind = self._counts_behind_heads()
        known = {key: head for key, head in (before.used_heads or {}).items() if behind[int(key)] > 0}
        kept = {**trained, **known} if self.settings.trains_a_part else trained
        return {key: head.clone() for key, head in kept.items()}  # safetensors refuses shared tensors

    def _pooled(self, state: ServerState, method: Method, number: int) -> tuple[ServerState, Directions | None]:
        """Return the state with pooled heads for use, and the directions in which heads can be corrected.

        The next round goes on from the heads as trained: an encoder at its start, under heads that are already as good
        as they can be, would stay where it is.
        """
        spreads = self._spreads_of(state) if method.site_offset else None
        replies = self._asking(number)(pool(method), parameters=state.settled, spreads=spreads)
        share = AS_TRAINED if state.blend is None else float(state.blend)
        total = total_of(replies, self.model.objective, self.model.bias, self.shared)
        found = total.pooled(state.settled.heads, state.domain_spreads)
        if found is None or not self._tell_of_differences(total.keys):
            return state, None
        self.candidates = torch.stack([self._of_all(found.part(each), state) for each in STEPS_TRIED])
        used = self._of_all(found.part(share), state)
        heads = {str(m): head.clone() for m, head in enumerate(used)}  # safetensors refuses shared tensors
        difference = torch.tensor(found.difference, dtype=torch.float64)
        return replace(state, used_heads=heads, domain_spreads=found.spreads, difference=difference), found.directions

    def _in_closed_form(self, state: ServerState, method: Method, number: int) -> ServerState:
        """Return the state with heads of domains for use in closed form, over the encoder as trained."""
        trained = state.settled.heads
        by_domain = {str(m): trained[key_of(method.heads, m)] for m in range(self.domains)}
        total = total_of(
            self._asking(number)(pool(method), parameters=state.settled), self.model.objective, self.model.bias
        )
        heads = closed_form_heads(total, self.settings.ridge, self.domains) or by_domain
        return replace(state, used_heads={key: heads[key].to(head, copy=True) for key, head in by_domain.items()})

    def _up_to(self, number: int) -> int:
        """Return the highest number of the clients that train in a round; others fit, validate and test as always."""
        return highest_number(self.settings, number, self.clients) if self.settings.trains_a_part else EVERYBODY

    def _counts_behind_heads(self) -> Tensor:
        """Return the samples of each domain that its own head is trained on, [M]: 0 for those that are withheld."""
        return self.counts.index_fill(0, torch.tensor(self.withheld, dtype=torch.long), 0)

    def _tell_of_differences(self, domains: Collection[str]) -> bool:
        """Return whether evidence of these domains says how far domains differ: of one among several it does not."""
        return len(domains) >= min(2, int((self.counts > 0).sum()))

    def _of_all(self, pooled: Tensors, state: ServerState) -> Tensor:
        """Return the heads of all domains [M, outputs, width]: pooled ones, and the others as they were."""
        return torch.stack([pooled.get(key, head) for key, head in state.settled.heads.items()])

    def _offsets(self, state: ServerState, method: Method, number: int, along: Directions | None) -> ServerState:
        """Let clients fit their corrections with the spreads of the round before, and find those for the next round."""
        spreads = self._spreads_of(state)
        # Slopes of a site's own can fit what an encoder has learned by heart; only where validation would see that.
        matrix = along.matrix if along is not None and self.settings.validation else None
        replies = self._asking(number)(offsets(method), parameters=state.in_use, spreads=spreads, directions=matrix)
        moments = [reply.sums[MOMENTS] for reply in replies if MOMENTS in reply.sums]
        return replace(state, spreads=next_spreads(spreads, torch.stack(moments).sum(0)) if moments else spreads)

    def _spreads_of(self, state: ServerState) -> Tensor:
        """Return the spreads of corrections after the last round, or before the first."""
        return FIRST_OF_CLIENTS if state.spreads is None else state.spreads

    def _phase(self, phase: Phase, state: ServerState, method: Method, number: int) -> Reduced:
        """Send one phase to all clients, and aggregate the replies."""
        shares = state.domain_shares
        if method.by_evidence:
            shares = shares_by_evidence(self.counts, state.difference, number)
            if phase.name == "heads":
                phase = replace(phase, epochs=epochs_by_evidence(phase.epochs, state.difference, number))
        counts = self.counts if method.assigns is None else state.components
        weights = domain_weights(counts, shares) if method.weighs and counts is not None else None
        weighed = method.credible and not is_pooled(method, self.model) and phase.name == "heads"
        mean = mean_head(state, self.counts) if weighed else None
        sent = state.in_training
        asked = {"parameters": sent, "domain_weights": weights, "mean_head": mean, "up_to": self._up_to(number)}
        asked |= {"tally": state.tally} if phase.has_own_weights else {}
        replies = self._asking(number)(phase, **asked)
        return reduce_replies(phase, replies, sent, self.settings.damping, number)
