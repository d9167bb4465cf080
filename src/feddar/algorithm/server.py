"""The server's side of a phase: checks replies, and aggregates them as they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from feddar.algorithm.aggregation import Average, SecondOrder, project_to_simplex
from feddar.algorithm.credibility import Credibility
from feddar.algorithm.local_training import SYMMETRIC
from feddar.algorithm.names import named_parameters, named_reply, named_weights
from feddar.algorithm.protocol import TALLY, Phase, Reply, TrainedHead
from feddar.algorithm.state import ServerState
from feddar.errors import TrainingError
from feddar.methods import Ascent
from feddar.models.heads import as_blocks, from_blocks, full_matrix
from feddar.models.parameters import Parameters, Tensors

SETTLED, SEEN = 20, 5
"""The rounds after the first from which evidence that domains are alike counts in full: for their weights, whose effect
on the encoder lasts, and for the epochs of their heads."""
DISTINCT = 0.3
"""From this share of slopes that is domains' own on, heads of domains are trained for all epochs."""


@dataclass(frozen=True)
class Reduced:
    """The aggregate of the replies to one request."""

    encoders: dict[str, Tensors]
    heads: dict[str, Tensor]
    loss: float
    """The mean training loss over samples; NaN in phases without one."""
    samples: int
    """The number of samples that the loss is a mean of."""
    masses: dict[str, float]
    """The samples behind each head that was averaged, by key, or the sum of their weights."""
    risks: Tensor | None
    """The mean loss over each domain's samples, [M], if the phase asked for it; NaN for a domain without any."""
    credibility: Credibility | None
    """The evidence for credibility, if the request asked for it."""
    tally: Tensor | None
    """The sums for the clients' own weights, if they have some."""


class Reduction:
    """Aggregates the replies to one request one by one; memory does not grow with their number."""

    def __init__(self, phase: Phase, sent: Parameters, damping: float) -> None:
        self.phase, self.sent, self.damping = phase, sent, damping
        self.encoders: dict[str, Average] = {}
        self.heads: dict[str, Average] = {}
        self.solves: dict[str, SecondOrder] = {}
        self.credibility = Credibility(sent.heads)
        self.loss, self.samples = 0.0, 0
        self.risks: Tensor | None = None
        self.tally: Tensor | None = None

    def add(self, reply: Reply) -> None:
        """Add a reply of one client, or of several added up."""
        self.loss, self.samples = self.loss + reply.loss, self.samples + reply.samples
        if "risks" in reply.sums:
            self.risks = reply.sums["risks"] + (0 if self.risks is None else self.risks)
        if TALLY in reply.sums:
            self.tally = reply.sums[TALLY] + (0 if self.tally is None else self.tally)
        for key, encoder in reply.encoders.items():
            self.encoders.setdefault(key, Average()).add(encoder.tensors, encoder.weight)
        for key, head in reply.heads.items():
            self._add_head(key, head)

    def _add_head(self, key: str, trained: TrainedHead) -> None:
        if self.phase.curvature is None:
            self.heads.setdefault(key, Average()).add({"head": trained.head}, trained.weight)
        else:
            blocks = as_blocks(self.phase.curvature, trained.head)
            # A head without curvature (a site has too few rows to send it) counts in the average alone.
            flat = blocks.new_zeros(len(blocks), blocks.shape[1], blocks.shape[1])
            curvature = flat if trained.curvature is None else full_matrix(trained.curvature)
            solve = self.solves.setdefault(key, SecondOrder(self.damping))
            solve.add(blocks, curvature, trained.weight, trained.curvature_times_head)
        if evidence := whole_evidence(trained):
            self.credibility.add(key, evidence, trained.weight)

    def result(self) -> Reduced:
        """Return the averages and second-order solutions, in the dtypes of the parameters that were sent."""
        encoders = {
            key: {name: value.to(self.sent.encoders[key][name].dtype) for name, value in average.result().items()}
            for key, average in self.encoders.items()
        }
        found = {key: average.result().get("head") for key, average in self.heads.items()}
        for key, solve in self.solves.items():
            kind = self.phase.curvature or "hessian"
            found[key] = from_blocks(kind, solve.result(), self.sent.heads[key].shape) if solve.weight else None
        heads = {key: head.to(self.sent.heads[key].dtype) for key, head in found.items() if head is not None}
        loss = self.loss / self.samples if self.samples else float("nan")
        credibility = self.credibility if self.credibility.samples else None
        risks = None if self.risks is None else self.risks[:, 0] / self.risks[:, 1]
        masses = {key: each.weight for key, each in self.heads.items()}
        return Reduced(encoders, heads, loss, self.samples, masses, risks, credibility, self.tally)


def reduce_replies(
    phase: Phase, replies: Iterable[Reply], sent: Parameters, damping: float, round_number: int
) -> Reduced:
    """Aggregate replies as they arrive; a reply that cannot be right is a ``TrainingError`` that says why."""
    reduction = Reduction(phase, sent, damping)
    for reply in replies:
        refuse_bad(reply, phase, sent, round_number)
        reduction.add(reply)
    return reduction.result()


def whole_evidence(trained: TrainedHead) -> Tensors:
    """Return the evidence sent with a head, with full symmetric matrices; empty if none was asked for."""
    if not trained.evidence:
        return {}
    packed = dict(trained.evidence)
    # If the curvature is the Gram matrix, the client sent it only once, as the curvature.
    packed.setdefault("gram", trained.curvature[0] if trained.curvature is not None else torch.empty(0))
    return packed | {name: full_matrix(packed[name]) for name in SYMMETRIC}


def refuse_bad(reply: Reply, phase: Phase, sent: Parameters, round_number: int) -> None:
    """Refuse a reply with NaN, a wrong shape or a negative weight, naming client, phase and tensor."""

    def refuse(what: str, advice: str) -> None:
        raise TrainingError(
            f"client '{reply.client}' sent {what} in the {phase.name} phase of round {round_number}: {advice}"
        )

    if not math.isfinite(reply.loss):
        refuse(f"the loss {reply.loss}", "training diverged; try a smaller lr.")
    for name, tensor, before in _beside_what_was_sent(reply, sent):
        if before is not None and tensor.shape != before.shape:
            refuse(f"'{name}' of shape {tuple(tensor.shape)}", f"expected was {tuple(before.shape)}.")
        if bool(torch.isfinite(tensor.sum())):  # fast check: a value that is not finite makes the sum so
            continue
        bad = ~torch.isfinite(tensor)
        # An encoder may hold infinite constants, such as an attention mask: only values that were finite are checked.
        if bool(bad.any()) and bool((bad & torch.isfinite(torch.zeros(()) if before is None else before)).any()):
            refuse(f"'{name}' with values that are not finite", "training diverged; try a smaller lr.")
    for key, weight in named_weights(reply).items():
        if not 0 <= weight < float("inf"):
            refuse(f"the weight {weight} for '{key}'", "weights are counts of samples.")


def _beside_what_was_sent(reply: Reply, sent: Parameters) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    before = named_parameters(sent)
    for name, tensor in named_reply(reply).items():
        yield name, tensor, before.get(name)


def first_shares(counts: Tensor, ascent: Ascent) -> Tensor:
    """Return the shares of domains [M] that the ascent starts from: by samples, or equal where there are samples."""
    behind = counts.double() if ascent == "projected" else (counts > 0).double()
    return behind / behind.sum()


def ascend(shares: Tensor, risks: Tensor, step: float, ascent: Ascent) -> Tensor:
    """Return the domains' shares s after one step along their risks R.

    ``projected`` is s + step R, projected onto the simplex (FedMinMax), ``exponentiated`` s exp(step R), normalised
    (group DRO). A domain without a risk, since nobody who holds it has answered, keeps its share; the others divide
    the rest.
    """
    measured = torch.isfinite(risks)
    rest = 1 - shares[~measured].sum()
    before, along = shares[measured], step * risks[measured]
    if ascent == "projected":
        found = project_to_simplex((before + along) / rest)
    else:
        # No product leaves 0: a domain whose first site has just joined begins with an equal share.
        begun = torch.where(before > 0, before, rest / max(1, len(before)))
        found = torch.softmax(begun.log() + along, 0)
    moved = shares.clone()
    moved[measured] = rest * found
    return moved


def shares_by_evidence(counts: Tensor, difference: Tensor | None, round_number: int) -> Tensor:
    """Return the shares of domains in the objective: equal as far as domains differ, by samples as far as they do not.

    The goal is the mean over domains of their risks. Where domains differ, the majority's encoder does not serve the
    others; where they do not, the risk of each is best estimated by all samples, and equal shares only add variance.
    An encoder at its start does not show yet how domains differ: shares are equal in the first round, and evidence
    that domains are alike counts for more in each of the next ``SETTLED``.
    """
    held = counts > 0
    alike = 0.0 if difference is None else 1 - float(difference)
    part = 1 - min(1.0, (round_number - 1) / SETTLED) * alike
    return part * held.double() / held.sum() + (1 - part) * counts.double() / counts.sum()


def epochs_by_evidence(epochs: int, difference: Tensor | None, round_number: int) -> int:
    """Return for how many epochs heads are trained: all where domains differ, and fewer the more they are alike.

    Heads that are trained apart for long learn the few samples of each client and domain by heart. That is the price of
    heads of domains, and not worth it where there is nothing of their own to learn.
    """
    alike = 0.0 if difference is None else max(0.0, 1 - float(difference) / DISTINCT)
    return max(1, round(epochs * (1 - min(1.0, (round_number - 1) / SEEN) * alike)))


def mean_head(state: ServerState, counts: Tensor) -> Tensor:
    """Return the mean of the domains' heads, weighted by samples."""
    mean = Average()
    for m, count in enumerate(counts.tolist()):
        mean.add({"head": state.heads[str(m)]}, float(count))
    return mean.result()["head"]


def heads_of_absent_domains(state: ServerState, counts: Tensor) -> Tensors:
    """Return, for domains without samples at any client, the mean of the other domains' heads.

    A head that is never trained would not fit an encoder that is.
    """
    absent = torch.nonzero(counts == 0).flatten().tolist()
    return {str(m): mean_head(state, counts) for m in absent}
