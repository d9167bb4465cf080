"""FedAvg as a bare loop of PyTorch: one network, tensors in memory, the gradient steps and a sum of weights.

The least that a round can take when clients are trained one by one. Batch-norm statistics are averaged as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers import Ran
from benchmarks.work import Knobs, Network, Tensors, Work

Order = Callable[[int, int, int], Tensor]
"""From (round, client, samples): the order in which a client takes its samples in an epoch."""


def shuffled(_round: int, _client: int, samples: int) -> Tensor:
    return torch.randperm(samples)


def epoch(network: Network, x: Tensor, y: Tensor, knobs: Knobs, rows: Tensor | None = None) -> None:
    """Take gradient steps through all samples, in the order of ``rows`` or as they lie."""
    parameters = list(network.parameters())
    if rows is None:
        batches = zip(x.split(knobs.batch_size), y.split(knobs.batch_size), strict=True)
    else:
        batches = ((x[part], y[part]) for part in rows.split(knobs.batch_size))
    for batch in batches:
        gradients = torch.autograd.grad(network.loss(*batch), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-knobs.lr)


class BareLoop:
    """FedAvg, one round at a time; without ``order`` samples are taken as they lie."""

    def __init__(self, work: Work, order: Order | None = shuffled) -> None:
        self.knobs = work.knobs
        self.order = order
        self.clients = [(x.to(self.knobs.device), y.to(self.knobs.device)) for x, y in work.clients()]
        self.network = work.new_network().to(self.knobs.device)
        # The count of batches is the only whole number in the state, and plays no part.
        self.state = [value for value in self.network.state_dict().values() if value.is_floating_point()]
        self.total = [torch.empty_like(value) for value in self.state]
        self.common = [value.clone() for value in self.state]
        self.round = 0

    def next_round(self) -> float:
        """Run a round; returns its seconds."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.knobs.threads)
        start = time.perf_counter()
        self._round()
        if self.knobs.device != "cpu":
            torch.cuda.synchronize(self.knobs.device)
        took = time.perf_counter() - start
        torch.set_num_threads(before)
        return took

    def weights(self) -> Tensors:
        """Return the common weights."""
        names = [name for name, value in self.network.state_dict().items() if value.is_floating_point()]
        return dict(zip(names, (value.cpu().clone() for value in self.common), strict=True))

    def _round(self) -> None:
        self.round += 1
        samples = sum(len(y) for _, y in self.clients)
        with torch.no_grad():
            torch._foreach_zero_(self.total)
        for client, (x, y) in enumerate(self.clients):
            with torch.no_grad():
                torch._foreach_copy_(self.state, self.common)
            for _ in range(self.knobs.epochs):
                rows = None if self.order is None else self.order(self.round, client, len(y)).to(y.device)
                epoch(self.network, x, y, self.knobs, rows)
            with torch.no_grad():
                torch._foreach_add_(self.total, self.state, alpha=len(y) / samples)
        self.total, self.common = self.common, self.total


def train(path: Path) -> Ran:
    """Train as a peer does, on samples as they lie."""
    work = Work.load(path)
    loop = BareLoop(work, order=None)
    return Ran([loop.next_round() for _ in range(work.knobs.rounds)], loop.weights())
