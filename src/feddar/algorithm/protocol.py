"""What the server asks and what clients answer: a phase, its request and the replies to it.

One request and the replies to it is a phase; a round is a short series of phases. A reply is something that adds:
parameters with their weight, summed curvature, curvature times heads, counts. What one client says and what fifty say
together has the same type and passes through the same reduction (``algorithm.server``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from feddar.methods import Scope
from feddar.models.parameters import Parameters, Tensors
from feddar.objectives.objective import Curvature

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
    """Batch-norm layers stay with their client."""
    target: bool = False
    """Of a census: report the sums by which a number to predict is standardised."""
    risks: bool = False
    """Report the summed loss of each domain under the parameters received."""

    @property
    def is_personal(self) -> bool:
        """Whether an encoder or heads that stay with the client are concerned."""
        return "client" in (self.encoder, self.heads)


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
    """In a request to measure: where scores are to be told apart best."""
    step: int = 0
    """Its place among the requests of its round, by which a client knows what came before."""


@dataclass(frozen=True)
class TrainedEncoder:
    """An encoder, or the mean of several by weight, and its weight: the number of samples behind it."""

    tensors: Tensors
    weight: float


@dataclass(frozen=True)
class TrainedHead:
    """A head, or the mean of several by weight, its weight, and sums over the samples behind it."""

    head: Tensor
    weight: float
    curvature: Tensor | None = None
    """The summed curvature L_i H_i, as the triangles of its blocks."""
    curvature_times_head: Tensor | None = None
    """Of several clients: the sum of their L_i H_i w_i, as blocks."""
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    """What the samples say about how far their domain differs (``models.heads.evidence``), matrices as triangles."""


@dataclass(frozen=True)
class Reply:
    """What a client answers, or several together.

    The server multiplies and adds in float64 as replies arrive. A tensor travels as it is rather than multiplied by
    its weight: half the bytes of a float64 product, and one client's average is its own parameters to the bit.
    """

    clients: tuple[str, ...]
    """Who answers: one client, or several whose answers were added up (``simulation.stacked``)."""
    encoders: Mapping[str, TrainedEncoder] = field(default_factory=dict)
    heads: Mapping[str, TrainedHead] = field(default_factory=dict)
    sums: Tensors = field(default_factory=dict)
    """Sums over samples, by name: counts of a census, risks of domains, what metrics are made of."""
    scores: Tensor | None = None
    """Of test samples, one by one: on one machine only."""
    loss: float = 0.0
    """Summed over ``samples`` samples, in phases that measure it."""
    samples: int = 0

    @property
    def client(self) -> str:
        """The client that answers, or the first of several."""
        return self.clients[0]


@dataclass(frozen=True)
class OwnState:
    """What stays with a client: its parameters, and whatever else a method keeps there."""

    parameters: Parameters = field(default_factory=Parameters)
    extra: Tensors = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.parameters.encoders or self.parameters.heads or self.extra)

    def changed(
        self,
        encoders: Mapping[str, Tensors] | None = None,
        heads: Mapping[str, Tensor] | None = None,
        extra: Tensors | None = None,
    ) -> OwnState:
        """Return it with new values of some of it."""
        return OwnState(self.parameters.changed(encoders or {}, heads or {}), {**self.extra, **(extra or {})})
