"""The messages between server and clients: a phase, its request and the replies to it.

A phase is one request and the replies to it; a round is a short series of phases. Everything in a reply can be added:
parameters with their weight, summed curvature, curvature times heads, counts. So the reply of one client and the sum
over fifty have the same type, and pass through the same reduction (``algorithm.server``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from feddar.methods import Assignment, Scope
from feddar.models.parameters import Parameters, Tensors
from feddar.objectives.objective import Curvature

PhaseName = Literal[
    "census", "adopt", "heads", "encoder", "together", "personal", "pool", "offsets", "label-shift", "validate",
    "evaluate", "measure",
]  # fmt: skip
SILENT = ("adopt", "label-shift")
"""The phases whose replies say no more than that clients have done them."""
VALIDATION = "validation"
"""The name of a client's sums over its validation samples in its reply: summed loss and count by domain, [M, 2]."""
WITHHELD = "withheld"
"""The name, in the answer to a census, of the domains [M] whose heads no client sends: others than 0."""
TALLY = "tally"
"""The name of a client's sums, in its reply, from which clients that count by a weight of their own find the next."""
EVERYBODY = 2**63 - 1
"""The number up to which clients answer a request that goes to all."""
BLENDS = "blends"
"""The name of the loss summed over its validation samples, with each of the request's candidates for the heads, [T]."""


@dataclass(frozen=True)
class Phase:
    """What a request asks for: everything a client needs to know beside the parameters."""

    name: PhaseName
    encoder: Scope = "global"
    heads: Scope = "global"
    epochs: int = 1
    lr: float = 0.0
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    """0: by the number of samples (``local_training.batch_size_for``)."""
    curvature: Curvature | None = None
    curvature_at: str = "final"
    mu: float = 0.0
    """Weight of the proximal term mu/2 |w - common|^2 (FedProx, Ditto)."""
    q: float = 0.0
    """The power of its loss under the parameters received that a client counts by (q-FFL)."""
    agnostic: float = 0.0
    """The step by which the weight of a client ascends its loss (``algorithm.agnostic``)."""
    fair: float = 0.0
    """The step by which the weight of a client follows its gap between domains (``algorithm.by_gap``)."""
    mix: float | None = None
    """APFL: the personal model is a mixture of local and common; this is the local share at the start."""
    assigns: Assignment | None = None
    """What domains are here: learned, and assigned to samples or clients by their losses (``algorithm.mixture``)."""
    private_norm: bool = False
    """Batch-norm layers stay with their client."""
    target: bool = False
    """In a census: report the sums by which a number to predict is standardised."""
    risks: bool = False
    """Report the summed loss of each domain under the parameters received."""
    class_weight: bool = False
    """In a census: report the sums of weights by class, from which class weights follow."""
    label_shift: bool = False
    """In a census: report the sums of weights by domain and class, from which rates of labels follow."""
    offsets: bool = False
    """Predict with the client's own corrections of heads, where it has some."""
    balanced: bool = False
    """Train with every class of a client counting the same there (Fed-RoD)."""
    added_heads: bool = False
    """Train, or predict with, heads of the client's own that are added to the common ones (``algorithm.decoupled``)."""

    @property
    def is_personal(self) -> bool:
        """Whether the encoder or the heads of this phase stay with the client."""
        return "client" in (self.encoder, self.heads)

    @property
    def has_own_weights(self) -> bool:
        """Whether clients count by weights that they keep, and tell sums from which they find the next ones."""
        return bool(self.agnostic or self.fair)

    @property
    def counts_by_factor(self) -> bool:
        """Whether a client counts by its samples times a factor that only it knows."""
        return bool(self.q) or self.has_own_weights


@dataclass(frozen=True)
class Request:
    """A phase with the parameters it starts from."""

    phase: Phase
    round: int
    seed: int
    parameters: Parameters = field(default_factory=Parameters)
    domain_weights: Tensor | None = None
    """u_m of each domain, where samples are re-weighted."""
    mean_head: Tensor | None = None
    """The mean of domains' heads; sending it asks for evidence of how far domains differ."""
    score_range: Tensor | None = None
    """In a ``measure`` request: the range of scores in which histograms have their finest bins."""
    step: int = 0
    """The number of this request in its round; by (round, step) a site finds its own state as it was before it."""
    best: int = 0
    """The best round so far by the validation loss, whose own parameters a site keeps; 0 if there is none."""
    spreads: Tensor | None = None
    """In ``offsets``, and in ``pool`` with corrections: how far clients, and clients x domains, differ, [4]."""
    candidates: Tensor | None = None
    """In a ``validate`` request: further sets of heads to compare, [T, M, outputs, width]."""
    directions: Tensor | None = None
    """In an ``offsets`` request: the directions in which heads are corrected; None: constant terms only."""
    up_to: int = EVERYBODY
    """Clients whose number in this round (``algorithm.participation``) is at most this answer, and no others."""
    withheld: tuple[int, ...] = ()
    """The domains whose heads no client sends: too few clients hold them, or too few samples are behind them."""
    weight_scale: Tensor | None = None
    """By what weights of samples are multiplied, so that their mean over all clients is 1; None without weights."""
    class_weights: Tensor | None = None
    """The weights of classes, [questions, classes] (``Objective.class_marks``); None without them."""
    tally: Tensor | None = None
    """The sums of the last tally over clients, where these count by weights of their own; None before the first."""
    label_rates: Tensor | None = None
    """In a ``label-shift`` request: the rates of classes over all clients, by domain or over all (``label_shift``)."""


@dataclass(frozen=True)
class TrainedEncoder:
    """An encoder, or the weighted mean of several, and its weight: how many samples, or the sum of their weights.

    Where clients count by their loss or gap, that is a factor of the weight (``Phase.counts_by_factor``).
    """

    tensors: Tensors
    weight: float


@dataclass(frozen=True)
class TrainedHead:
    """A head, or the weighted mean of several, its weight, and sums over the samples it was trained on."""

    head: Tensor
    weight: float
    curvature: Tensor | None = None
    """The curvature summed over samples, L_i H_i, as the upper triangles of its blocks."""
    curvature_times_head: Tensor | None = None
    """In a reply of several clients: the sum of their L_i H_i w_i, as blocks."""
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums for credibility (``models.heads.evidence``), symmetric matrices as their upper triangles."""


@dataclass(frozen=True)
class Reply:
    """The answer of a client, or of several clients added up.

    The server multiplies and adds in float64 as replies arrive. Tensors are sent without being multiplied by their
    weight: that is half the bytes of a float64 product, and the average over one client equals its parameters exactly.
    """

    clients: tuple[str, ...]
    """Who answers: one client, or several whose answers were added up (``simulation.stacked``)."""
    encoders: Mapping[str, TrainedEncoder] = field(default_factory=dict)
    heads: Mapping[str, TrainedHead] = field(default_factory=dict)
    sums: Tensors = field(default_factory=dict)
    """Sums over samples, by name: counts of a census, risks of domains, sums that metrics are computed from."""
    scores: Tensor | None = None
    """Scores of the test samples, one by one; sent on one machine only, never between sites."""
    loss: float = 0.0
    """The training loss summed over ``samples`` samples; 0 in phases that do not train the encoder."""
    samples: int = 0

    @property
    def client(self) -> str:
        """The client that answers, or the first of several."""
        return self.clients[0]


@dataclass(frozen=True)
class OwnState:
    """A client's private state, which never leaves it: parameters of scope ``client``, and others of its method."""

    parameters: Parameters = field(default_factory=Parameters)
    extra: Tensors = field(default_factory=dict)

    def __bool__(self) -> bool:
        # An encoder without tensors is nothing to keep.
        return bool(any(self.parameters.encoders.values()) or self.parameters.heads or self.extra)

    def changed(
        self,
        encoders: Mapping[str, Tensors] | None = None,
        heads: Mapping[str, Tensor] | None = None,
        extra: Tensors | None = None,
    ) -> OwnState:
        """Return a copy with some values replaced."""
        return OwnState(self.parameters.changed(encoders or {}, heads or {}), {**self.extra, **(extra or {})})


NOTHING = OwnState()
"""The state of a client that has nothing of its own; one for all, since there may be very many clients."""
