"""The server's state between phases. It is replaced, never changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from feddar.methods import Scope
from feddar.models.parameters import ALL, Parameters, Tensors, keys


@dataclass(frozen=True)
class ServerState:
    """Parameters in training, the heads for use if they differ, and further state of some methods."""

    in_training: Parameters
    """Encoders and heads as they are trained, and mean and scale of a number to predict."""
    averaged: Parameters | None = None
    """Encoders and heads averaged over rounds, from which those for use are made; None: those in training are."""
    used_heads: Mapping[str, Tensor] | None = None
    """The heads used for prediction, if they differ from those of ``settled`` (drawn together by evidence)."""
    domain_shares: Tensor | None = None
    """The shares of domains in the objective, for fedminmax and group-dro."""
    score_range: Tensor | None = None
    """The range of test scores in the last round, by which the next round sets the bins of histograms."""
    spreads: Tensor | None = None
    """How far clients, and clients x domains, differ by the last round's evidence [4], for their corrections."""
    domain_spreads: Tensor | None = None
    """How far domains, the common head and the parts of factors differ by the last round's evidence, for pooling
    (``PooledHeads.spreads``)."""
    difference: Tensor | None = None
    """The share of heads' slopes that is domains' own by the last round's evidence, [], for the weights of domains."""
    blend: Tensor | None = None
    """Which part (0 to 1) of the step of pooled heads is taken, or none of pooling (-1), by the last validation, []."""
    tally: Tensor | None = None
    """The sums over clients from which they find weights of their own, of the last phase that told them."""
    components: Tensor | None = None
    """How many samples are of each learned component by the last round's responsibilities [K], if there are some."""

    @property
    def heads(self) -> Mapping[str, Tensor]:
        """The heads in training, by key."""
        return self.in_training.heads

    @property
    def encoders(self) -> Mapping[str, Tensors]:
        """The encoders, by key."""
        return self.in_training.encoders

    @property
    def settled(self) -> Parameters:
        """The parameters from which those for use are made: averaged over rounds, or those in training."""
        return self.in_training if self.averaged is None else self.averaged

    @property
    def in_use(self) -> Parameters:
        """The parameters used for prediction."""
        return self.settled if self.used_heads is None else replace(self.settled, heads=self.used_heads)

    def trained(self, encoders: Mapping[str, Tensors], heads: Mapping[str, Tensor]) -> ServerState:
        """Return the state after a phase that changed some encoders or heads."""
        return replace(self, in_training=self.in_training.changed(encoders, heads))

    def with_average(self, share: float) -> ServerState:
        """Return the state with the average of rounds moved by this share of the way to the parameters in training."""
        return replace(self, averaged=self.settled.moved_to(self.in_training, share))

    def by_domain(self, encoder: Scope, heads: Scope, domains: int) -> ServerState:
        """Return the state with the common encoder or head copied to each domain, if its scope is ``domain``."""
        now = self.in_training
        if encoder == "domain" and ALL in now.encoders:
            now = replace(now, encoders={key: _copied(now.encoders[ALL]) for key in keys("domain", domains)})
        if heads == "domain" and ALL in now.heads:
            now = replace(now, heads={key: now.heads[ALL].clone() for key in keys("domain", domains)})
        return replace(self, in_training=now)

    def without_own(self, encoder: Scope, heads: Scope) -> ServerState:
        """Return the state without the groups of scope ``client``, which only clients have."""
        groups = [group for group, scope in (("encoders", encoder), ("heads", heads)) if scope == "client"]
        return replace(self, in_training=self.in_training.without(*groups))


def _copied(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}
