"""Trains many small clients as one computation: stacked parameters, and one batched matrix product for all of them.

A client with a few dozen samples and a small network needs microseconds of arithmetic per step, and a hundred times as
long for Python and torch around it. A ``Stack`` has clients that take equally many steps in an epoch and trains them
together: parameters [C, ...], batches [C, B, ...] whose padding has weight 0, the same shuffles that each client would
draw alone, and no more clients at a time than fit the processor's cache or the GPU's memory. Its reply is the sum of
their replies: weighted means, and sums, in float64. Up to rounding, results do not depend on which clients are stacked
together.

Only encoders that map each sample independently and draw no random numbers can be stacked (``stackable``). For some
phases stacking is not worth it, and the clients of a stack answer one by one: encoders of domains, APFL's mixtures,
clients that count by their loss or have balanced classes and added heads, learned components, and the evaluation of
clients' own models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from feddar.algorithm.client import Client, adopted
from feddar.algorithm.local_training import (
    batch_size_for,
    domain_risks,
    embeddings_of,
    encode,
    evidence_of,
    in_precision_of,
    is_plain_descent,
    levels_of,
    make_step,
    on_device,
    proximal_step,
    seeds_for,
    weighed_by_levels,
    with_standard_target,
)
from feddar.algorithm.names import named_reply
from feddar.algorithm.offsets import OFFSETS
from feddar.algorithm.participation import takes_part
from feddar.algorithm.protocol import NOTHING, SILENT, OwnState, Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.weighting import loss_weights, masses_of, training_weights
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.models import heads as linear_heads
from feddar.models.devices import CPU, beside, exact, fed, like, memory_of_groups, moved
from feddar.models.encoders.fused import CrossLayer
from feddar.models.encoders.tabular import MLP, CountedEmbedding, Ramps, Standardise, TableInput, Waves, WideAndDeep
from feddar.models.model import Body, Model, choose
from feddar.models.parameters import ALL, OWN, Parameters, Tensors, key_index, keys
from feddar.objectives.objective import Objective
from feddar.settings import Settings
from feddar.simulation.dense import DenseLayers, dense_layers

Slopes = Callable[[Tensor, Tensor], tuple[Tensor, Sequence[Tensor | None] | None]]
"""From rows and shares of batches, the samples' losses [C, B], and the gradients in what is trained, if anything is."""
BatchStep = Callable[[Tensor, Tensor], Tensor]
"""Takes a step by rows and shares of batches, and returns the samples' losses [C, B] before it."""
Forward = Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]]
"""From rows and shares of batches: losses, values of all layers, gradients in the last and in scores, and features."""

BY_SAMPLE = {
    *(nn.Identity, nn.Sequential, nn.ModuleList, nn.Linear, nn.Embedding, nn.LayerNorm, nn.Flatten),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
    *(Body, Standardise, CountedEmbedding, TableInput, MLP, Waves, Ramps, WideAndDeep, CrossLayer),
}
"""Modules that map each sample independently, without random numbers."""

CACHE = 3 * 2**19
"""Bytes of parameters that are trained at a time: with their gradients they fit the processor's cache."""
LARGEST_STACK = 4 * CACHE
"""Bytes of parameters of the fewest clients that are stacked, where that is more than ``CACHE``."""
SAMPLES = 8192
"""Samples in one step over all clients of a stack, for the same reason."""
ROWS = 2**17
"""Samples of all clients of a stack, whose features are kept in memory while heads are trained."""
FEWEST = 8
"""The number of clients from which stacking is faster."""
COPIES = 6
"""Tensors as large as the parameters that a step needs: they, gradients, two of the optimiser, and two in between."""
NO_STATES: Mapping[str, OwnState] = MappingProxyType({})
"""The states of clients that have nothing of their own."""


def make_clients(
    cohort: Cohort, test: Cohort | None, model: Model, settings: Settings, validation: Cohort | None = None
) -> list[Client | Stack]:
    """Return all clients of a cohort, stacked where it is faster, or as ``settings.batched`` says.

    ``validation`` are samples of the same clients that are held out to choose the round in use.
    """
    cohort = in_precision_of(model, cohort)
    test, validation = (None if part is None else in_precision_of(model, part) for part in (test, validation))
    counts = cohort.counts
    few_bytes = counts.int()  # no client has 2^31 samples, and there may be very many clients
    stacked, alone = _divided(counts, model, settings)
    stacks = [
        Stack(order, first, last, few_bytes, cohort, test, model, validation)
        if last - first > 1
        else _client(cohort, test, model, int(order[first]), validation)
        for order, pieces in stacked
        for first, last in _equal_pieces(len(order), pieces)
    ]
    return [*stacks, *(_client(cohort, test, model, number, validation) for number in alone)]


def stackable(body: nn.Module) -> bool:
    """Return whether every module of an encoder maps each sample independently, without random numbers.

    Modules with hooks are excluded, since hooks may do anything; so are parameters that are used in two places, since
    they are stacked under one name only.
    """
    names = [dict(body.named_parameters(remove_duplicate=once)).keys() for once in (True, False)]
    return names[0] == names[1] and all(type(part) in BY_SAMPLE and not _hooked(part) for part in body.modules())


def _hooked(module: nn.Module) -> bool:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, kind) for kind in hooks)


def steps_in_epoch(n: int, batch_size: int) -> int:
    """Return how many batches ``local_training.batches`` makes of n samples in an epoch."""
    batch_size = batch_size_for(n, batch_size)
    pieces = -(-n // batch_size)
    return pieces - 1 if pieces > 1 and n - (pieces - 1) * batch_size == 1 else pieces


def _divided(counts: Tensor, model: Model, settings: Settings) -> tuple[list[tuple[Tensor, int]], list[int]]:
    """Return the indices of clients to stack, by their steps per epoch and in how many pieces, and of those alone."""
    sizes = counts.sum(1)
    heads = counts.shape[1] if settings.row().heads == "domain" else 1
    can = stackable(model.body) and model.precision is None and not model.compiled
    if settings.batched and not can:
        lower = "this encoder" if model.precision is None else f"precision {settings.precision}"
        what = "compile" if model.compiled else lower
        raise UserError(f"{what} cannot train clients together: leave out batched, or choose another one.")
    fewest = 2 if settings.batched else FEWEST
    distinct, place = sizes.unique(return_inverse=True)
    steps = torch.tensor([steps_in_epoch(size, settings.samples_in_batch) for size in distinct.tolist()])[place]
    stacked: list[tuple[Tensor, int]] = []
    alone: list[int] = []
    for count in steps.unique():
        numbers = torch.nonzero(steps == count).flatten()
        at_once = _most(model, heads, int(sizes[numbers].max()), settings)
        if not can or settings.batched is False or min(at_once, len(numbers)) < fewest:
            alone += numbers.tolist()
            continue
        # Parts of about equal size.
        pieces = -(-len(numbers) // at_once)
        if model.device == CPU:  # an even number of them, so that two workers have equal shares
            pieces += pieces % 2 if pieces > 1 else 0
        else:  # one for each process at least, so that no GPU is idle
            pieces = max(pieces, min(settings.jobs, len(numbers) // fewest))
        stacked.append((numbers.int(), pieces))  # kept, and there may be very many clients
    return stacked, sorted(alone)


def _equal_pieces(number: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Yield where each piece begins and ends, of about equal sizes, the larger ones first."""
    size, larger = divmod(number, pieces)
    first = 0
    for place in range(pieces):
        last = first + size + (place < larger)
        yield first, last
        first = last


def _most(model: Model, heads: int, size: int, settings: Settings) -> int:
    """Return how many clients with ``size`` samples are trained at a time: as many as fit the cache, or the GPU."""
    numbers = sum(parameter.numel() for parameter in model.body.parameters()) + heads * model.outputs * model.width
    each = numbers * model.dtype.itemsize
    batch = min(batch_size_for(size, settings.samples_in_batch), size)
    room = CACHE if _keeps_gradients(model, settings) else 2 * CACHE
    # A few of a middling model are faster together than alone, though they do not fit the cache.
    fitting = max(room // each, FEWEST if FEWEST * each <= LARGEST_STACK else 0)
    in_cache = min(fitting, SAMPLES // batch, ROWS // size)
    if model.device == CPU:
        return in_cache
    # In a step, a sample becomes at most about as many numbers as there are parameters.
    whole = (COPIES + batch) * each + size * model.width * model.dtype.itemsize
    return max(in_cache, memory_of_groups(model.device, settings.jobs) // whole)


def _keeps_gradients(model: Model, settings: Settings) -> bool:
    """Return whether training keeps gradients; a plain step under dense layers does not (``DenseLayers.descend``)."""
    trained = {name for name, parameter in model.body.named_parameters() if parameter.requires_grad}
    common = {name: value for name, value in model.body.state_dict().items() if name not in trained}
    plain = is_plain_descent(settings, pulled=settings.row().proximal)
    return not plain or dense_layers(model.body, common) is None


def _client(cohort: Cohort, test: Cohort | None, model: Model, number: int, validation: Cohort | None) -> Client:
    name = cohort.clients[number]
    tested, validated = (part.at(name) if part and name in part.client_numbers else None for part in (test, validation))
    return Client(name, cohort.at(name), tested, model, validation=validated)


@dataclass(frozen=True)
class Work:
    """What the clients of a stack train in a phase, and on what."""

    phase: Phase
    data: Cohort
    own: Tensors
    """The encoders' tensors that are trained, stacked [C, ...]."""
    common: Tensors
    """The encoders' tensors that are not, and are the same for all."""
    heads: Tensor
    """The heads of each client, [C, K, outputs, p]."""
    weight: Tensor | None
    """By what losses are multiplied."""


class Stack:
    """Clients that are trained as one computation; they take equally many steps in an epoch.

    Of many clients there are thousands of stacks, so each has little of its own.
    """

    __slots__ = ("_counts", "_levels", "cohort", "first", "last", "model", "order", "own", "test", "validation")

    def __init__(
        self,
        order: Tensor,
        first: int,
        last: int,
        counts: Tensor,
        cohort: Cohort,
        test: Cohort | None,
        model: Model,
        validation: Cohort | None = None,
    ) -> None:
        """Its clients are those from ``first`` to ``last`` in ``order``; counts are those of all of the cohort."""
        self.order, self.first, self.last = order, first, last
        self._counts = counts
        self.cohort = cohort
        self.test = test
        self.validation = validation
        self.model = model
        self._levels: Tensors | None = None
        self.own: Mapping[str, OwnState] = NO_STATES
        """The own state of each client that has one, by name."""

    @property
    def numbers(self) -> Tensor:
        """The indices of its clients in the cohort."""
        return self.order[self.first : self.last].long()

    @property
    def counts(self) -> Tensor:
        """Samples of each client and domain, [C, M]."""
        return self._counts[self.numbers].long()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its clients; they are not kept, since there may be very many."""
        return tuple(self.cohort.clients[number] for number in self.numbers.tolist())

    def answers(self, request: Request) -> Iterator[Reply]:
        """Yield one reply for all clients that take part if the phase can be stacked, else one reply for each."""
        drawn = [place for place, name in enumerate(self.names) if takes_part(request, name)]
        if len(drawn) == len(self.numbers):
            yield from self._answers(request)
        elif drawn:
            part = self._part(drawn)
            yield from part._answers(request)
            self.own = {**self.own, **part.own}

    def _part(self, places: list[int]) -> Stack:
        """Return the stack of some of the clients."""
        shared = (self._counts, self.cohort, self.test, self.model, self.validation)
        part = Stack(self.numbers[places], 0, len(places), *shared)
        part.own = {name: self.own[name] for name in part.names if name in self.own}
        part._levels = {name: counts[places] for name, counts in self.levels.items()}
        return part

    def _answers(self, request: Request) -> Iterator[Reply]:
        phase = request.phase if supports(request.phase) else None
        match phase and phase.name:
            case "census":
                counted = Client("", self._data(), None, self.model).answer(request)
                yield replace(counted, clients=self.names, sums=counted.sums | {"counts": self.counts})
            case "adopt":
                self.own = {name: adopted(self._own_of(name), request) for name in self.names}
                yield Reply(self.names)
            case "evaluate" if self.test is not None:
                known = [self.test.client_numbers[name] for name in self.names if name in self.test.client_numbers]
                tested = self.test.of(torch.tensor(known, dtype=torch.long))
                yield self._as_one(tested, tested).reply(request)
            case "validate" if self.validation is not None:
                held_out = self.validation.of(self.numbers)
                yield self._as_one(held_out, validation=held_out).reply(request)
            case "pool" | "offsets" | "label-shift":
                yield self._as_one(self._data()).reply(request)
            case "heads":
                yield self._on_device(self._train_heads, request)
            case "encoder" | "together" | "personal":
                yield self._on_device(self._train_encoders, request)
            case _:
                yield from self._one_by_one(request)

    def _on_device(self, train: Callable[[Request], Reply], request: Request) -> Reply:
        """Train on the model's device, and return the reply on the CPU."""
        self.model.place()
        if self.model.device == CPU:  # to look for what is elsewhere takes longer than small steps
            return train(request)
        return moved(train(moved(request, self.model.device)), CPU)

    def _as_one(self, data: Cohort, test: Cohort | None = None, validation: Cohort | None = None) -> _Together:
        """Return one client for the samples of all, which scores each with the corrections of its own client."""
        return _Together(self, data, test, validation)

    def _one_by_one(self, request: Request) -> Iterator[Reply]:
        """Yield the reply of each client."""
        for number, name in zip(self.numbers.tolist(), self.names, strict=True):
            client = _client(self.cohort, self.test, self.model, number, self.validation)
            client.own = self._own_of(name)
            yield client.answer(request)
            self.restore(name, client.own)

    @property
    def samples(self) -> int:
        """The number of training samples of all its clients."""
        return int(self.counts.sum())

    def own_states(self) -> dict[str, OwnState]:
        """Return the own state of each client that has one, by name."""
        return dict(self.own)

    def restore(self, name: str, own: OwnState) -> None:
        """Set a client's own state."""
        others = {each: kept for each, kept in self.own.items() if each != name}
        self.own = {**others, name: own} if own else others

    def _own_of(self, name: str) -> OwnState:
        """Return a client's own state."""
        return self.own.get(name, NOTHING)

    def _data(self) -> Cohort:
        """Return the samples of all clients, one client after another."""
        return self.cohort.of(self.numbers)

    @property
    def levels(self) -> Tensors:
        """How many samples each level of each category has at each client, [C, levels], by embedding."""
        if self._levels is None:
            self._levels = self._counted_levels()
        return self._levels

    def _counted_levels(self) -> Tensors:
        embeddings = embeddings_of(self.model)
        sizes = [len(part.counts) for part in embeddings.values()]
        by_client = [levels_of(self.cohort.of(number[None]), sizes) for number in self.numbers] if sizes else []
        return {
            name: torch.stack(rows).double()
            for name, rows in zip(embeddings, zip(*by_client, strict=True), strict=True)
        }

    def _by_key(self, phase: Phase) -> Tensor:
        """Return how many samples each client has under each key of the heads, [C, K]."""
        return self.counts if phase.heads == "domain" else self.counts.sum(1, keepdim=True)

    def _start_heads(self, request: Request) -> Tensor:
        """Return the heads that clients start from, [C, K, outputs, p]."""
        if request.phase.heads == "client":
            own = torch.stack([self.own[name].parameters.heads[OWN] for name in self.names])
            return moved(own, self.model.device)[:, None]
        heads = [request.parameters.heads[key] for key in self._head_keys(request.phase)]
        return torch.stack(heads).expand(len(self.numbers), -1, -1, -1)

    def _head_keys(self, phase: Phase) -> list[str]:
        return keys(phase.heads, len(self.cohort.domains))

    def _start_encoders(self, request: Request) -> tuple[Tensors, Tensors]:
        """Return the tensors of the encoder that clients train, stacked [C, ...], and those that stay common to all."""
        names = self.model.body.state_dict()
        if request.phase.encoder == "client":
            encoders = [self._own_of(name).parameters.encoders.get(OWN, {}) for name in self.names]
            stacked = {each: torch.stack([encoder[each] for encoder in encoders]) for each in names}
            return moved(stacked, self.model.device), {}
        common = {each: request.parameters.encoder(ALL)[each] for each in names}
        own = {each: common.pop(each) for each in self._trainable()}
        return {each: value.expand(len(self.numbers), *value.shape).clone() for each, value in own.items()}, common

    def _trainable(self) -> list[str]:
        return [name for name, parameter in self.model.body.named_parameters() if parameter.requires_grad]

    def _train_heads(self, request: Request) -> Reply:
        """Train the head of each key that each client has samples of, on features that are computed once."""
        phase, data, device = request.phase, self._data(), self.model.device
        counts = self._by_key(phase)
        client, key = counts.nonzero().unbind(1)
        # Sorted by client, and by key within each: the samples of one head are contiguous.
        data = data.rows(
            torch.argsort(self._owner() * counts.shape[1] + key_index(phase.heads, data.domain), stable=True)
        )
        data = with_standard_target(request, on_device(self.model, data))
        features = encode(self.model, phase, request.parameters, data.x, data.domain)
        sizes = counts[client, key]
        place = torch.arange(len(sizes)).repeat_interleave(sizes)
        # Within one domain all samples have the same u_m, which would only rescale the learning rate: none is used.
        weight = training_weights(request, self.model, data, place, len(sizes), domains=phase.heads != "domain")
        holders = [self.names[place] for place in client.tolist()]
        seeds = seeds_for(request, holders)
        sets = SampleSets(sizes, phase, seeds, self.model.dtype, device)
        trained = self._start_heads(request)[moved((client, key), device)]
        for alike in sets.of_equal_steps():
            some, batches = moved(alike, device), sets.batches(alike)
            trained[some] = _fitted(self.model, phase, trained[some], batches, features, data.y, weight)
        if phase.heads == "client":
            self._keep_heads(trained)
            return Reply(self.names)
        if (lost := _first_diverged(trained)) is not None:
            diverged = TrainedHead(trained[lost], float(sets.sizes[lost]))
            return Reply((holders[lost],), heads={self._head_keys(phase)[key[lost]]: diverged})
        own = sets.scores(trained, features) if phase.curvature is not None else None
        masses = self._masses(request, data, place, len(sizes))
        heads = _mean_heads(self._head_keys(phase), trained, key, masses)
        heads = {each: self._with_sums(head, request, each, data, features, own) for each, head in heads.items()}
        return Reply(self.names, heads=heads)

    def _with_sums(
        self, head: TrainedHead, request: Request, key: str, data: Cohort, features: Tensor, own: Tensor | None
    ) -> TrainedHead:
        """Return a head with evidence and curvature, summed over the samples of all clients.

        ``own`` are the samples' scores [n, outputs] by the heads that their clients have trained.
        """
        objective, phase, start = self.model.objective, request.phase, exact(request.parameters.heads[key])
        rows = key_index(phase.heads, data.domain) == self._head_keys(phase).index(key)
        mine = exact(features[rows])
        every = loss_weights(request, objective, data)
        weight = None if every is None else every[beside(rows, every)]
        head = replace(head, evidence=evidence_of(self.model, request, key, mine, data.y[rows], weight))
        if phase.curvature is None or own is None:
            return head
        scores = own[beside(rows, own)]
        at = scores if phase.curvature_at == "final" else mine @ start.T
        return replace(
            head,
            curvature=linear_heads.triangle(linear_heads.curvature_at(objective, phase.curvature, at, mine, weight)),
            curvature_times_head=linear_heads.curvature_times_heads(
                objective, phase.curvature, at, scores, mine, weight
            ),
        )

    def _masses(self, request: Request, data: Cohort, part: Tensor, parts: int) -> Tensor:
        """Return the sum of weights in each part of the samples, [parts], on the CPU, where counts are."""
        return moved(masses_of(request, data, part, parts), CPU)

    def _owner(self) -> Tensor:
        """Return the place of each sample's client in the stack, as samples are in ``_data``."""
        return torch.arange(len(self.numbers)).repeat_interleave(self.counts.sum(1))

    def _train_encoders(self, request: Request) -> Reply:
        """Train the encoders of all clients, under frozen heads or together with them."""
        phase, data = request.phase, with_standard_target(request, on_device(self.model, self._data()))
        own, common = self._start_encoders(request)
        heads = self._start_heads(request)
        heads = heads if phase.name == "encoder" else heads.clone()
        sums = {"risks": domain_risks(self.model, request, request.parameters, data)} if phase.risks else {}
        masses = self._masses(request, data, self._owner(), len(self.numbers))
        losses = self._train(request, data, own, common, heads) * (masses / self.counts.sum(1))
        if phase.encoder == "global" and self.levels:
            moving = torch.where(masses > 0, masses.double(), torch.inf)  # a client without mass moves no level
            own = own | weighed_by_levels(request.parameters.encoder(ALL), own, self.levels, moving)
        encoders, trained = self._mean_encoders(phase, own, common, masses), {}
        if phase.name != "encoder" and phase.heads == "client":
            self._keep_heads(heads[:, 0])
        elif phase.name != "encoder":
            counts = self._by_key(phase)
            client, key = counts.nonzero().unbind(1)
            place = self._owner() * counts.shape[1] + key_index(phase.heads, moved(data.domain, CPU))
            behind = self._masses(request, data, place, counts.numel()).view_as(counts)
            chosen = heads.detach()[beside((client, key), heads)]
            trained = _mean_heads(self._head_keys(phase), chosen, key, behind[client, key])
        encoders, trained, sums = moved((encoders, trained, sums), CPU)
        reply = Reply(self.names, encoders, trained, sums, None, float(losses.sum()), len(data))
        if all(bool(value.isfinite().all()) for value in (losses, *named_reply(reply).values())):
            return reply
        every = moved((losses[:, None], *own.values(), heads), CPU)
        lost = _first_diverged(torch.cat([value.flatten(1) for value in every], 1))
        return reply if lost is None else replace(reply, clients=(self.names[lost],))

    def _train(self, request: Request, data: Cohort, own: Tensors, common: Tensors, heads: Tensor) -> Tensor:
        """Train the stacked tensors ``own`` (and heads) in place; return clients' summed losses of the last epoch."""
        phase, model = request.phase, self.model
        leaves = [own[name] for name in self._trainable()]
        if phase.name != "encoder":
            leaves.append(heads)
        weight = training_weights(request, self.model, data, self._owner(), len(self.numbers), domains=True)
        work, dense = Work(phase, data, own, common, heads, weight), dense_layers(model.body, common)
        if dense and is_plain_descent(phase, pulled=bool(phase.mu)):
            step = self._plain_step(work, dense)
        else:
            slopes = self._slopes_in_closed_form(work, dense) if dense else self._slopes_by_autograd(work, leaves)
            step = self._step(request, leaves, slopes)
        seeds = seeds_for(request, self.names)
        sets = SampleSets(self.counts.sum(1), phase, seeds, model.dtype, model.device)
        last = []
        for epoch, rows, share in sets.batches():
            found = step(rows, share)
            if epoch == phase.epochs - 1:
                last.append((found * (share > 0)).sum(1))
        losses = torch.zeros(len(self.numbers), dtype=torch.float64)
        for each in moved(last, CPU):
            losses += each
        return losses

    def _step(self, request: Request, leaves: list[Tensor], slopes: Slopes) -> BatchStep:
        """Return a step of the phase's optimiser by the gradients in ``leaves``."""
        phase = request.phase
        step = make_step(phase, leaves)
        if phase.mu:
            step = proximal_step(step, leaves, self._anchors(request), phase.mu)

        def of_batch(rows: Tensor, share: Tensor) -> Tensor:
            found, gradients = slopes(rows, share)
            if gradients is not None:
                for leaf, slope in zip(leaves, gradients, strict=True):
                    leaf.grad = slope
                step()
            return found

        return of_batch

    def _slopes_by_autograd(self, work: Work, leaves: list[Tensor]) -> Slopes:
        """Return the losses and gradients of batches under any encoder that can be stacked."""
        model = self.model
        encoders = vmap(lambda mine, *x: functional_call(model.body, work.common | mine, x))

        def slopes(rows: Tensor, share: Tensor) -> tuple[Tensor, Sequence[Tensor | None] | None]:
            x = fed(tuple(_rows_of(part, rows) for part in work.data.x), model.device)
            domain = self._domain(work, rows)
            for leaf in leaves:
                leaf.requires_grad_()
            scores = _scores(model.with_constants(encoders(work.own, *x), domain), work.heads, domain)
            found = self._losses(work, scores, rows)
            # Not backward(), which would copy gradients whose memory is transposed. An encoder may have none to train.
            trained = found.requires_grad
            gradients = torch.autograd.grad((found * share).sum(), leaves, allow_unused=True) if trained else None
            for leaf in leaves:
                leaf.requires_grad_(False)
            return found.detach(), gradients

        return slopes

    def _slopes_in_closed_form(self, work: Work, dense: DenseLayers) -> Slopes:
        """Return the losses and gradients of batches under dense layers."""
        names, forward = self._trainable(), self._forward(work, dense)

        def slopes(rows: Tensor, share: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
            found, values, slope, pull, features = forward(rows, share)
            by_name = dense.backward(work.own, values, slope)
            gradients = [by_name[name] for name in names]
            if work.phase.name != "encoder":
                gradients.append((pull.mT @ features).view_as(work.heads))
            return found, gradients

        return slopes

    def _plain_step(self, work: Work, dense: DenseLayers) -> BatchStep:
        """Return a plain gradient step under dense layers, which needs no memory for gradients."""
        forward, lr = self._forward(work, dense), work.phase.lr
        heads = work.heads.view(len(work.heads), -1, work.heads.shape[-1]) if work.phase.name != "encoder" else None

        def of_batch(rows: Tensor, share: Tensor) -> Tensor:
            found, values, slope, pull, features = forward(rows, share)
            dense.descend(work.own, values, slope, lr)
            if heads is not None:
                heads.baddbmm_(pull.mT, features, alpha=-lr)
            return found

        return of_batch

    def _forward(self, work: Work, dense: DenseLayers) -> Forward:
        """Return the losses of batches, the layers' values with the gradient in the last, and those of the heads."""
        model, heads = self.model, work.heads
        inputs = dense.prepared(beside(work.common, work.data.x[0]), work.data.x)

        def forward(rows: Tensor, share: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
            values = dense.forward(work.own, *fed((_rows_of(inputs, rows),), model.device))
            domain = self._domain(work, rows)
            features = model.with_constants(values[-1], domain)
            scores = _scores(features, heads, domain)
            pull = _pull(model.objective, scores, work.data.y, rows, share, work.weight)
            pull = _at_its_head(pull, heads.shape[1], domain)
            slope = pull @ heads.flatten(1, 2)[..., : values[-1].shape[-1]]
            return self._losses(work, scores, rows), values, slope, pull, features

        return forward

    def _domain(self, work: Work, rows: Tensor) -> Tensor:
        """Return the domains of batches [C, B], if the model depends on them."""
        needed = self.model.domain_columns or work.phase.heads == "domain"
        return work.data.domain[rows] if needed else rows.new_zeros(1)

    def _losses(self, work: Work, scores: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of each sample of batches, [C, B]."""
        y, objective = work.data.y[rows].flatten(0, 1), self.model.objective
        if work.weight is None:
            return objective.loss(scores, y).view_as(rows)
        return objective.weighted_loss(scores, y, work.weight[rows].flatten(0, 1)).view_as(rows)

    def _anchors(self, request: Request) -> list[Tensor]:
        """Return the common parameters, the anchors of the proximal term."""
        encoder = [request.parameters.encoder(ALL)[name] for name in self._trainable()]
        common = [ALL] if request.phase.heads == "client" else self._head_keys(request.phase)
        return [*encoder, torch.stack([request.parameters.heads[key] for key in common])]

    def _mean_encoders(self, phase: Phase, own: Tensors, common: Tensors, masses: Tensor) -> dict[str, TrainedEncoder]:
        """Return the mean of the clients' encoders by their masses; those of scope ``client`` are stored instead."""
        if phase.encoder == "client":
            own = moved(own, CPU)
            encoders = (
                {each: value[place].clone() for each, value in own.items()} for place in range(len(self.numbers))
            )
            self.own = {
                name: self._own_of(name).changed(encoders={OWN: encoder})
                for name, encoder in zip(self.names, encoders, strict=True)
            }
            return {}
        mean = {name: _mean(masses, value) for name, value in own.items()}
        kept = {name: value for name, value in common.items() if value.is_floating_point()}
        sent = mean | kept
        return {ALL: TrainedEncoder(sent, float(masses.sum()))} if sent else {}

    def _keep_heads(self, heads: Tensor) -> None:
        """Store each client's own head, [C, outputs, p]."""
        self.own = {
            name: self._own_of(name).changed(heads={OWN: head.clone()})
            for name, head in zip(self.names, moved(heads, CPU), strict=True)
        }


class _Together(Client):
    """The clients of a stack as one, for phases that only score samples; each has its own corrections of heads."""

    def __init__(self, stack: Stack, data: Cohort, test: Cohort | None, validation: Cohort | None) -> None:
        super().__init__("", data, test, stack.model, validation=validation)
        self.stack = stack

    def reply(self, request: Request) -> Reply:
        """Return the reply of all clients, added up."""
        return replace(self.answer(request), clients=self.stack.names)

    def _owners(self, data: Cohort) -> tuple[Tensor, int]:
        """Return the place of each sample's client in the stack, and how many clients it has."""
        place = {name: place for place, name in enumerate(self.stack.names)}
        places = torch.tensor([place.get(name, 0) for name in data.clients])
        return beside(places, data.client)[data.client], len(place)

    def _keep_corrections(self, corrections: Tensor) -> None:
        pairs = zip(self.stack.names, moved(corrections, CPU), strict=True)
        own = self.stack._own_of
        self.stack.own = {name: own(name).changed(extra={OFFSETS: each.clone()}) for name, each in pairs}

    def _scores(self, phase: Phase, parameters: Parameters, features: Tensor, data: Cohort) -> Tensor:
        own = [self.stack._own_of(name).extra.get(OFFSETS) for name in self.stack.names]
        if not phase.offsets or own[0] is None:
            return super()._scores(phase, parameters, features, data)
        heads = torch.stack([parameters.heads[key] for key in keys(phase.heads, len(data.domains))])
        every = heads + like(torch.stack([each for each in own if each is not None]), heads)
        return torch.einsum("np,nop->no", features, every[self._owners(data)[0], key_index(phase.heads, data.domain)])


class SampleSets:
    """Sets of samples, contiguous in the data; each trains one client's encoder or head, in parallel with the others.

    Every set is shuffled by its own seed. Consecutive sets with the same seed belong to one client, and draw from one
    generator in turn.
    """

    def __init__(
        self, sizes: Tensor, phase: Phase, seeds: Sequence[int], dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        """Batches are found on the CPU, and go to ``device``."""
        self.sizes, self.device = sizes, device
        self.starts = sizes.cumsum(0) - sizes
        self.epochs, self.asked, self.dtype = phase.epochs, phase.batch_size, dtype
        self.batch_sizes = torch.tensor([batch_size_for(size, self.asked) for size in sizes.tolist()])
        self.shuffles = self._shuffled(seeds) + self.starts.repeat_interleave(sizes * self.epochs)
        """Rows of each set, shuffled for each epoch: the first set in all epochs, then the second, ..."""

    def _shuffled(self, seeds: Sequence[int]) -> Tensor:
        generator, before = torch.Generator(), None
        places = []
        for seed, size in zip(seeds, self.sizes.tolist(), strict=True):
            if seed != before:
                generator.manual_seed(seed)
            before = seed
            places += [torch.randperm(size, generator=generator) for _ in range(self.epochs)]
        return torch.cat(places)

    def of_equal_steps(self) -> Iterator[Tensor]:
        """Yield the indices of sets that take equally many steps in an epoch, and so can be trained together."""
        steps = torch.tensor([steps_in_epoch(size, self.asked) for size in self.sizes.tolist()])
        for count in steps.unique():
            yield torch.nonzero(steps == count).flatten()

    def batches(self, chosen: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the epoch, rows [U, B] of a batch of each set, and the rows' weights in its mean, 0 for padding.

        For each set these are the batches of ``local_training.batches``.
        """
        of = slice(None) if chosen is None else chosen
        sizes, starts, batch = self.sizes[of], self.starts[of], self.batch_sizes[of]
        steps = steps_in_epoch(int(sizes.max()), self.asked)
        for epoch in range(self.epochs):
            begins = starts * self.epochs + sizes * epoch
            for step in range(steps):
                first, last = batch * step, sizes if step == steps - 1 else batch * (step + 1)
                place = first[:, None] + torch.arange(int((last - first).max()))
                there = place < last.minimum(sizes)[:, None]
                rows = self.shuffles[begins[:, None] + place.minimum(sizes[:, None] - 1)]
                share = there.to(self.dtype) / there.sum(1, keepdim=True)
                yield epoch, *moved((rows, share), self.device)

    def scores(self, heads: Tensor, features: Tensor) -> Tensor:
        """Return scores of all samples [n, outputs] in float64, each by the head of its set."""
        features, heads = exact(features), exact(heads)
        result = features.new_empty(len(features), heads.shape[1])
        for alike in self.of_equal_steps():
            place = torch.arange(int(self.sizes[alike].max()))
            rows = beside(self.starts[alike, None] + place.minimum(self.sizes[alike, None] - 1), features)
            # Padding repeats the set's last sample, which gets the same scores again.
            result[rows] = features[rows] @ heads[beside(alike, heads)].mT
        return result


def _fitted(
    model: Model,
    phase: Phase,
    heads: Tensor,
    batches: Iterator[tuple[int, Tensor, Tensor]],
    features: Tensor,
    y: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """Train heads [U, outputs, p] for the epochs of the heads phase, with the gradient in closed form."""
    step = make_step(phase, [heads])
    for _, rows, share in batches:
        given = features[rows]
        heads.grad = _pull(model.objective, (given @ heads.mT).flatten(0, 1), y, rows, share, weight).mT @ given
        step()
    return heads.detach()


def _rows_of(part: Tensor, rows: Tensor) -> Tensor:
    """Return rows [C, B] of an input as [C, B, ...], where the input is."""
    return part.index_select(0, beside(rows, part).flatten()).view(*rows.shape, *part.shape[1:])


def _pull(
    objective: Objective, scores: Tensor, y: Tensor, rows: Tensor, share: Tensor, weight: Tensor | None
) -> Tensor:
    """Return the gradient [C, B, outputs] of the batches' mean losses in the scores [C B, outputs] of their samples."""
    slope = objective.residual(scores, y[rows].flatten(0, 1)).view(*rows.shape, -1)
    return slope * (share[:, :, None] if weight is None else share[:, :, None] * linear_heads.by_output(weight)[rows])


def _at_its_head(pull: Tensor, count: int, key: Tensor) -> Tensor:
    """Return the gradient in the scores by every one of ``count`` heads: [C, B, outputs] -> [C, B, count outputs]."""
    if count == 1:
        return pull
    mine = key[:, :, None] == torch.arange(count, device=key.device)
    return (pull[:, :, None] * mine[..., None]).flatten(2)


def _scores(features: Tensor, heads: Tensor, key: Tensor) -> Tensor:
    """Score each sample by its own head: features [C, B, p], heads [C, K, outputs, p], key [C, B] -> [C B, outputs]."""
    _, count, outputs, _ = heads.shape
    every = (features @ heads.flatten(1, 2).mT).view(-1, count, outputs)
    return every[:, 0] if count == 1 else choose(every, key.flatten())


def _mean_heads(names: list[str], heads: Tensor, key: Tensor, sizes: Tensor) -> dict[str, TrainedHead]:
    """Return the mean of heads [U, outputs, p] for each key, weighted by the masses of their samples."""
    held = {name: key == place for place, name in enumerate(names)}
    return {
        name: TrainedHead(_mean(sizes[mine], heads[beside(mine, heads)]), float(sizes[mine].sum()))
        for name, mine in held.items()
        if bool(mine.any())
    }


def _mean(sizes: Tensor, values: Tensor) -> Tensor:
    """Return the mean of values [C, ...], weighted by ``sizes``, in float64."""
    values, total = exact(values.detach()), sizes.sum()  # 0 if all weights are: then the mean counts for nothing
    weights = beside(sizes.double() / (total if total else 1), values)
    return (weights @ values.reshape(len(values), -1)).view(values.shape[1:])


def _first_diverged(values: Tensor) -> int | None:
    """Return the index of the first client or head [C, ...] with values that are not finite; None if there is none."""
    lost = torch.nonzero(~values.flatten(1).isfinite().all(1)).flatten().tolist()
    return lost[0] if lost else None


TRAINING = {
    *("epochs", "lr", "optimizer", "momentum", "weight_decay", "batch_size"),
}
UNDERSTOOD: dict[str, set[str]] = {
    "census": {"target", "class_weight", "label_shift"},
    "adopt": {"encoder", "heads"},
    "pool": {"encoder", "heads", "curvature"},
    "offsets": {"encoder", "heads"},
    "label-shift": {"encoder", "heads"},
    "validate": {"encoder", "heads", "offsets"},
    "evaluate": {"encoder", "heads", "offsets"},
    "heads": {"heads", *TRAINING, "curvature", "curvature_at", "mu", "private_norm"},
    "encoder": {"encoder", "heads", *TRAINING, "curvature_at", "mu", "private_norm", "risks"},
    "together": {"encoder", "heads", *TRAINING, "curvature_at", "mu", "private_norm", "risks"},
    "personal": {"encoder", "heads", *TRAINING, "curvature_at", "mu", "private_norm"},
}
"""The fields of each phase that a stack supports; ``private_norm`` has no effect, as batch norm is never stacked.

A field that is not listed must have its default value, else clients answer one by one: so a new field of ``Phase``
cannot be ignored here by mistake.
"""


def supports(phase: Phase) -> bool:
    """Return whether a stack can answer a phase with one computation."""
    known = UNDERSTOOD.get(phase.name)
    if known is None:
        return False
    others = (field for field in fields(phase) if field.name not in {"name", *known})
    return all(getattr(phase, field.name) == field.default for field in others) and _worth_it(phase)


def _worth_it(phase: Phase) -> bool:
    """Return whether stacking is worth it: not for encoders of domains, nor for evaluating clients' own models."""
    if phase.name in ("census", *SILENT):
        return True
    if phase.name in ("pool", "offsets", "validate", "evaluate"):
        return not phase.is_personal
    return phase.encoder != "domain" and not (phase.risks and phase.is_personal)
