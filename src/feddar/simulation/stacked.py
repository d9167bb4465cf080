"""Trains many small clients as one computation: stacked parameters, and one batched matrix product for all of them.

A client with a few dozen samples and a small network needs microseconds of arithmetic per step, and a hundred times as
long for Python and torch around it. A ``Stack`` has clients that take equally many steps in an epoch and trains them
together: parameters [C, ...], batches [C, B, ...] whose padding has weight 0, the same shuffles that each client would
draw alone, and no more clients at a time than fit the cache. Its reply is the sum of their replies: weighted means, and
sums, in float64. Up to rounding, results do not depend on which clients are stacked together.

Only encoders that map each sample independently and draw no random numbers can be stacked (``stackable``). For some
phases stacking is not worth it, and the clients of a stack answer one by one: encoders of domains, APFL's mixtures, and
the evaluation of clients' own models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property

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
    levels_of,
    make_step,
    proximal_step,
    sample_weights,
    seeded_for,
    weighed_by_levels,
    with_standard_target,
)
from feddar.algorithm.names import named_reply
from feddar.algorithm.offsets import OFFSETS
from feddar.algorithm.protocol import NOTHING, OwnState, Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.models import heads as linear_heads
from feddar.models.encoders.fused import CrossLayer
from feddar.models.encoders.tabular import MLP, CountedEmbedding, Ramps, Standardise, TableInput, Waves, WideAndDeep
from feddar.models.model import Body, Model, choose
from feddar.models.parameters import ALL, OWN, Parameters, Tensors, key_index, keys
from feddar.settings import Settings

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


def make_clients(
    cohort: Cohort, test: Cohort | None, model: Model, settings: Settings, validation: Cohort | None = None
) -> list[Client | Stack]:
    """Return all clients of a cohort, stacked where it is faster, or as ``settings.batched`` says.

    ``validation`` are samples of the same clients that are held out to choose the round in use.
    """
    cohort = in_precision_of(model, cohort)
    test, validation = (None if part is None else in_precision_of(model, part) for part in (test, validation))
    counts = cohort.counts
    return [
        Stack(torch.tensor(numbers), counts[numbers], cohort, test, model, validation)
        if len(numbers) > 1
        else _client(cohort, test, model, numbers[0], validation)
        for numbers in _divided(counts, model, settings)
    ]


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


def _divided(counts: Tensor, model: Model, settings: Settings) -> Iterator[list[int]]:
    """Yield lists of client indices to stack, with equally many steps per epoch; one alone is not stacked."""
    sizes = counts.sum(1)
    heads = counts.shape[1] if settings.row().heads == "domain" else 1
    can = stackable(model.body)
    if settings.batched and not can:
        raise UserError("this encoder cannot train clients together: leave out batched, or choose another encoder.")
    fewest = 2 if settings.batched else FEWEST
    by_steps: dict[int, list[int]] = defaultdict(list)
    for number, size in enumerate(sizes.tolist()):
        by_steps[steps_in_epoch(size, settings.samples_in_batch)].append(number)
    alone = []
    for _, numbers in sorted(by_steps.items()):
        at_once = _most(model, heads, int(sizes[numbers].max()), settings.samples_in_batch)
        if not can or settings.batched is False or min(at_once, len(numbers)) < fewest:
            alone += numbers
            continue
        # Parts of about equal size, and an even number of them, so that two workers have equal shares.
        pieces = -(-len(numbers) // at_once)
        pieces += pieces % 2 if pieces > 1 else 0
        yield from (part.tolist() for part in torch.tensor(numbers).tensor_split(pieces))
    yield from ([number] for number in sorted(alone))


def _most(model: Model, heads: int, size: int, batch_size: int) -> int:
    """Return how many clients with ``size`` samples fit the cache, with their parameters and the samples of a step."""
    numbers = sum(parameter.numel() for parameter in model.body.parameters()) + heads * model.outputs * model.width
    each = numbers * model.dtype.itemsize
    # A few of a middling model are faster together than alone, though they do not fit the cache.
    fitting = max(CACHE // each, FEWEST if FEWEST * each <= LARGEST_STACK else 0)
    return min(fitting, SAMPLES // min(batch_size_for(size, batch_size), size), ROWS // size)


def _client(cohort: Cohort, test: Cohort | None, model: Model, number: int, validation: Cohort | None) -> Client:
    name = cohort.clients[number]
    tested, validated = (part.at(name) if part and name in part.client_numbers else None for part in (test, validation))
    return Client(name, cohort.at(name), tested, model, validation=validated)


class Stack:
    """Clients that are trained as one computation; they take equally many steps in an epoch."""

    def __init__(
        self,
        numbers: Tensor,
        counts: Tensor,
        cohort: Cohort,
        test: Cohort | None,
        model: Model,
        validation: Cohort | None = None,
    ) -> None:
        self.numbers = numbers
        self.counts = counts
        """Samples of each client and domain, [C, M]."""
        self.names = tuple(cohort.clients[number] for number in numbers.tolist())
        self.cohort = cohort
        self.test = test
        self.validation = validation
        self.model = model
        self.own = dict.fromkeys(self.names, NOTHING)
        """Each client's own state."""

    def answers(self, request: Request) -> Iterator[Reply]:
        """Yield one reply for all clients if the phase can be stacked, else one reply for each."""
        phase = request.phase if supports(request.phase) else None
        match phase and phase.name:
            case "census":
                counted = Client("", self._data(), None, self.model).answer(request)
                yield replace(counted, clients=self.names, sums=counted.sums | {"counts": self.counts})
            case "adopt":
                self.own = {name: adopted(own, request) for name, own in self.own.items()}
                yield Reply(self.names)
            case "evaluate" if self.test is not None:
                known = [self.test.client_numbers[name] for name in self.names if name in self.test.client_numbers]
                tested = self.test.of(torch.tensor(known, dtype=torch.long))
                yield self._as_one(tested, tested).reply(request)
            case "validate" if self.validation is not None:
                held_out = self.validation.of(self.numbers)
                yield self._as_one(held_out, validation=held_out).reply(request)
            case "pool" | "offsets":
                yield self._as_one(self._data()).reply(request)
            case "heads":
                yield self._train_heads(request)
            case "encoder" | "together" | "personal":
                yield self._train_encoders(request)
            case _:
                yield from self._one_by_one(request)

    def _as_one(self, data: Cohort, test: Cohort | None = None, validation: Cohort | None = None) -> _Together:
        """Return one client for the samples of all, which scores each with the corrections of its own client."""
        return _Together(self, data, test, validation)

    def _one_by_one(self, request: Request) -> Iterator[Reply]:
        """Yield the reply of each client."""
        for number, name in zip(self.numbers.tolist(), self.names, strict=True):
            client = _client(self.cohort, self.test, self.model, number, self.validation)
            client.own = self.own[name]
            yield client.answer(request)
            self.own = {**self.own, name: client.own}

    @property
    def samples(self) -> int:
        """The number of training samples of all its clients."""
        return int(self.counts.sum())

    def own_states(self) -> dict[str, OwnState]:
        """Return each client's own state, by name."""
        return self.own

    def restore(self, name: str, own: OwnState) -> None:
        """Set a client's own state."""
        self.own = {**self.own, name: own}

    def _data(self) -> Cohort:
        """Return the samples of all clients, one client after another."""
        return self.cohort.of(self.numbers)

    @cached_property
    def levels(self) -> Tensors:
        """How many samples each level of each category has at each client, [C, levels], by embedding."""
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
            return torch.stack([self.own[name].parameters.heads[OWN] for name in self.names])[:, None]
        heads = [request.parameters.heads[key] for key in self._head_keys(request.phase)]
        return torch.stack(heads).expand(len(self.names), -1, -1, -1)

    def _head_keys(self, phase: Phase) -> list[str]:
        return keys(phase.heads, len(self.cohort.domains))

    def _start_encoders(self, request: Request) -> tuple[Tensors, Tensors]:
        """Return the tensors of the encoder that clients train, stacked [C, ...], and those that stay common to all."""
        names = self.model.body.state_dict()
        if request.phase.encoder == "client":
            encoders = [self.own[name].parameters.encoder(OWN) for name in self.names]
            return {each: torch.stack([encoder[each] for encoder in encoders]) for each in names}, {}
        common = {each: request.parameters.encoder(ALL)[each] for each in names}
        own = {each: common.pop(each) for each in self._trainable()}
        return {each: value.expand(len(self.names), *value.shape).clone() for each, value in own.items()}, common

    def _trainable(self) -> list[str]:
        return [name for name, parameter in self.model.body.named_parameters() if parameter.requires_grad]

    def _train_heads(self, request: Request) -> Reply:
        """Train the head of each key that each client has samples of, on features that are computed once."""
        phase, data = request.phase, with_standard_target(request, self._data())
        counts = self._by_key(phase)
        client, key = counts.nonzero().unbind(1)
        # Sorted by client, and by key within each: the samples of one head are contiguous.
        owner = torch.arange(len(counts)).repeat_interleave(counts.sum(1))
        data = data.rows(torch.argsort(owner * counts.shape[1] + key_index(phase.heads, data.domain), stable=True))
        features = encode(self.model, phase, request.parameters, data.x, data.domain)
        # Within one domain all samples have the same weight, which would only rescale the learning rate: none is used.
        weight = None if phase.heads == "domain" else sample_weights(request, data.domain, self.model.dtype)
        holders = [self.names[place] for place in client.tolist()]
        seeds = [seeded_for(request, name).seed for name in holders]
        sets = SampleSets(counts[client, key], phase, seeds, self.model.dtype)
        trained = self._start_heads(request)[client, key]
        for alike in sets.of_equal_steps():
            trained[alike] = _fitted(self.model, phase, trained[alike], sets.batches(alike), features, data.y, weight)
        if phase.heads == "client":
            self._keep_heads(trained)
            return Reply(self.names)
        if (lost := _first_diverged(trained)) is not None:
            diverged = TrainedHead(trained[lost], float(sets.sizes[lost]))
            return Reply((holders[lost],), heads={self._head_keys(phase)[key[lost]]: diverged})
        own = sets.scores(trained, features) if phase.curvature is not None else None
        heads = _mean_heads(self._head_keys(phase), trained, key, sets.sizes)
        heads = {each: self._with_sums(head, request, each, data, features, own) for each, head in heads.items()}
        return Reply(self.names, heads=heads)

    def _with_sums(
        self, head: TrainedHead, request: Request, key: str, data: Cohort, features: Tensor, own: Tensor | None
    ) -> TrainedHead:
        """Return a head with evidence and curvature, summed over the samples of all clients.

        ``own`` are the samples' scores [n, outputs] by the heads that their clients have trained.
        """
        objective, phase, start = self.model.objective, request.phase, request.parameters.heads[key].double()
        rows = key_index(phase.heads, data.domain) == self._head_keys(phase).index(key)
        mine = features[rows].double()
        head = replace(head, evidence=evidence_of(self.model, request, key, mine, data.y[rows]))
        if phase.curvature is None or own is None:
            return head
        at = own[rows] if phase.curvature_at == "final" else mine @ start.T
        return replace(
            head,
            curvature=linear_heads.triangle(objective.curvature(phase.curvature, at, mine)),
            curvature_times_head=linear_heads.curvature_times_heads(objective, phase.curvature, at, own[rows], mine),
        )

    def _train_encoders(self, request: Request) -> Reply:
        """Train the encoders of all clients, under frozen heads or together with them."""
        phase, data = request.phase, with_standard_target(request, self._data())
        own, common = self._start_encoders(request)
        heads = self._start_heads(request)
        heads = heads if phase.name == "encoder" else heads.clone()
        sums = {"risks": domain_risks(self.model, phase, request.parameters, data)} if phase.risks else {}
        losses = self._train(request, data, own, common, heads)
        if phase.encoder == "global" and self.levels:
            own = own | weighed_by_levels(request.parameters.encoder(ALL), own, self.levels, self.counts.sum(1))
        encoders, trained = self._mean_encoders(phase, own, common), {}
        if phase.name != "encoder" and phase.heads == "client":
            self._keep_heads(heads[:, 0])
        elif phase.name != "encoder":
            counts = self._by_key(phase)
            client, key = counts.nonzero().unbind(1)
            trained = _mean_heads(self._head_keys(phase), heads.detach()[client, key], key, counts[client, key])
        reply = Reply(self.names, encoders, trained, sums, loss=float(losses.sum()), samples=len(data))
        if all(bool(value.isfinite().all()) for value in (losses, *named_reply(reply).values())):
            return reply
        lost = _first_diverged(torch.cat([value.flatten(1) for value in (losses[:, None], *own.values(), heads)], 1))
        return reply if lost is None else replace(reply, clients=(self.names[lost],))

    def _train(self, request: Request, data: Cohort, own: Tensors, common: Tensors, heads: Tensor) -> Tensor:
        """Train the stacked tensors ``own`` (and heads) in place; return clients' summed losses of the last epoch."""
        phase, model = request.phase, self.model
        leaves = [own[name].requires_grad_() for name in self._trainable()]
        if phase.name != "encoder":
            leaves.append(heads.requires_grad_())
        step = make_step(phase, leaves)
        if phase.mu:
            step = proximal_step(step, leaves, self._anchors(request), phase.mu)
        encoders = vmap(lambda mine, *x: functional_call(model.body, common | mine, x))
        weight = sample_weights(request, data.domain, model.dtype) if request.domain_weights is not None else None
        seeds = [seeded_for(request, name).seed for name in self.names]
        sets = SampleSets(self.counts.sum(1), phase, seeds, model.dtype)
        losses = torch.zeros(len(self.names), dtype=torch.float64)
        for epoch, rows, share in sets.batches():
            x = (part.index_select(0, rows.flatten()).view(*rows.shape, *part.shape[1:]) for part in data.x)
            domain = data.domain[rows] if model.domain_columns or phase.heads == "domain" else rows.new_zeros(1)
            scores = _scores(model.with_constants(encoders(own, *x), domain), heads, domain)
            found = model.objective.loss(scores, data.y[rows].flatten(0, 1)).view_as(rows)
            found = found if weight is None else found * weight[rows]
            if found.requires_grad:  # false if the encoder has no parameters to train
                # Not backward(), which would copy gradients whose memory is transposed.
                slopes = torch.autograd.grad((found * share).sum(), leaves, allow_unused=True)
                for leaf, slope in zip(leaves, slopes, strict=True):
                    leaf.grad = slope
                step()
            if epoch == phase.epochs - 1:
                losses += (found.detach() * (share > 0)).sum(1)
        for leaf in leaves:
            leaf.requires_grad_(False)
        return losses

    def _anchors(self, request: Request) -> list[Tensor]:
        """Return the common parameters, the anchors of the proximal term."""
        encoder = [request.parameters.encoder(ALL)[name] for name in self._trainable()]
        common = [ALL] if request.phase.heads == "client" else self._head_keys(request.phase)
        return [*encoder, torch.stack([request.parameters.heads[key] for key in common])]

    def _mean_encoders(self, phase: Phase, own: Tensors, common: Tensors) -> dict[str, TrainedEncoder]:
        """Return the weighted mean of the clients' encoders; encoders of scope ``client`` are stored instead."""
        if phase.encoder == "client":
            for place, name in enumerate(self.names):
                encoder = {each: value[place].clone() for each, value in own.items()}
                self.own = {**self.own, name: self.own[name].changed(encoders={OWN: encoder})}
            return {}
        mean = {name: _mean(self.counts.sum(1), value) for name, value in own.items()}
        kept = {name: value for name, value in common.items() if value.is_floating_point()}
        sent = mean | kept
        return {ALL: TrainedEncoder(sent, float(self.samples))} if sent else {}

    def _keep_heads(self, heads: Tensor) -> None:
        """Store each client's own head, [C, outputs, p]."""
        self.own = {
            name: self.own[name].changed(heads={OWN: head.clone()})
            for name, head in zip(self.names, heads, strict=True)
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
        return torch.tensor([place.get(name, 0) for name in data.clients])[data.client], len(place)

    def _keep_corrections(self, corrections: Tensor) -> None:
        pairs, own = zip(self.stack.names, corrections, strict=True), self.stack.own
        self.stack.own = {name: own[name].changed(extra={OFFSETS: each.clone()}) for name, each in pairs}

    def _scores(self, phase: Phase, parameters: Parameters, features: Tensor, data: Cohort) -> Tensor:
        own = [self.stack.own[name].extra.get(OFFSETS) for name in self.stack.names]
        if not phase.offsets or own[0] is None:
            return super()._scores(phase, parameters, features, data)
        heads = torch.stack([parameters.heads[str(m)] for m in range(len(data.domains))])
        every = heads + torch.stack([each for each in own if each is not None]).to(heads.dtype)
        return torch.einsum("np,nop->no", features, every[self._owners(data)[0], data.domain])


class SampleSets:
    """Sets of samples, contiguous in the data; each trains one client's encoder or head, in parallel with the others.

    Every set is shuffled by its own seed. Consecutive sets with the same seed belong to one client, and draw from one
    generator in turn.
    """

    def __init__(self, sizes: Tensor, phase: Phase, seeds: Sequence[int], dtype: torch.dtype) -> None:
        self.sizes = sizes
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
                yield epoch, rows, there.to(self.dtype) / there.sum(1, keepdim=True)

    def scores(self, heads: Tensor, features: Tensor) -> Tensor:
        """Return scores of all samples [n, outputs] in float64, each by the head of its set."""
        result = torch.empty(len(features), heads.shape[1], dtype=torch.float64)
        for alike in self.of_equal_steps():
            place = torch.arange(int(self.sizes[alike].max()))
            rows = self.starts[alike, None] + place.minimum(self.sizes[alike, None] - 1)
            # Padding repeats the set's last sample, which gets the same scores again.
            result[rows] = features[rows].double() @ heads[alike].double().mT
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
        slope = model.objective.residual((given @ heads.mT).flatten(0, 1), y[rows].flatten(0, 1))
        pull = share if weight is None else share * weight[rows]
        heads.grad = (slope.view(*rows.shape, -1) * pull[:, :, None]).mT @ given
        step()
    return heads.detach()


def _scores(features: Tensor, heads: Tensor, key: Tensor) -> Tensor:
    """Score each sample by its own head: features [C, B, p], heads [C, K, outputs, p], key [C, B] -> [C B, outputs]."""
    _, count, outputs, _ = heads.shape
    every = (features @ heads.flatten(1, 2).mT).view(-1, count, outputs)
    return every[:, 0] if count == 1 else choose(every, key.flatten())


def _mean_heads(names: list[str], heads: Tensor, key: Tensor, sizes: Tensor) -> dict[str, TrainedHead]:
    """Return the mean of heads [U, outputs, p] for each key, weighted by the samples they were trained on."""
    held = {name: key == place for place, name in enumerate(names)}
    return {
        name: TrainedHead(_mean(sizes[mine], heads[mine]), float(sizes[mine].sum()))
        for name, mine in held.items()
        if bool(mine.any())
    }


def _mean(sizes: Tensor, values: Tensor) -> Tensor:
    """Return the mean of values [C, ...], weighted by ``sizes``, in float64."""
    mean: Tensor = torch.tensordot(sizes.double() / sizes.sum(), values.detach().double(), 1)
    return mean


def _first_diverged(values: Tensor) -> int | None:
    """Return the index of the first client or head [C, ...] with values that are not finite; None if there is none."""
    lost = torch.nonzero(~values.flatten(1).isfinite().all(1)).flatten().tolist()
    return lost[0] if lost else None


TRAINING = {
    *("epochs", "lr", "optimizer", "momentum", "weight_decay", "batch_size"),
}
UNDERSTOOD: dict[str, set[str]] = {
    "census": {"target"},
    "adopt": {"encoder", "heads"},
    "pool": {"encoder", "heads"},
    "offsets": {"encoder", "heads"},
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
    if phase.name in ("census", "adopt"):
        return True
    if phase.name in ("pool", "offsets", "validate", "evaluate"):
        return not phase.is_personal
    return phase.encoder != "domain" and not (phase.risks and phase.is_personal)
