"""The operating point: the risk above which a sample is flagged, given or chosen on validation samples.

It is a threshold, or what a threshold is to achieve: the share of samples that is flagged, or the share of samples with
the outcome that is found (sensitivity). One threshold holds for all domains, unless each domain is to have its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.evaluation.tested import USUAL, Values
from feddar.objectives import Objective
from feddar.settings import OPERATING_POINTS, Settings

ENDS = {"nobody": 0, "everybody": 1}
"""Who is flagged where the share of samples that is flagged is at an end."""
MOST_NAMED = 6
"""Of more domains only the number is said."""


@dataclass(frozen=True)
class OperatingPoint:
    """Which samples are flagged."""

    kind: str
    """``threshold``, ``flag`` or ``sensitivity``."""
    at: float
    by_domain: bool

    @classmethod
    def of(cls, settings: Settings) -> OperatingPoint:
        """Return the operating point that settings ask for; a threshold of 1/2 if they do not."""
        given = {name: getattr(settings, name) for name in OPERATING_POINTS}
        kind, at = next(((name, value) for name, value in given.items() if value is not None), ("threshold", USUAL))
        return cls(kind, at, settings.threshold_by == "domain")

    @property
    def chosen(self) -> bool:
        """Whether it has to be chosen on validation samples."""
        return self.kind != "threshold"

    def require_possible(self, objective: Objective, validated: bool) -> None:
        """Refuse what there are no risks for, or no validation samples to choose it on."""
        if self.chosen and not objective.risk_outcomes:
            raise UserError(f"{self.kind} is for yes/no outcomes, and this outcome is not one: leave it out.")
        if self.chosen and not validated:
            raise UserError(f"{self.kind} is chosen on validation samples: hold some out (--validation 0.1).")

    def thresholds(self, validation: Cohort | None, scores: Tensor | None, domains: int, outcomes: int) -> Values:
        """Return the threshold of each domain and outcome [M, O], from scored validation samples if it is chosen.

        A domain without validation samples (for ``sensitivity``, with the outcome) has the threshold of all domains.
        """
        if not self.chosen or validation is None or scores is None:
            return np.full((domains, outcomes), self.at)
        terms = validation.objective.terms(validation.y, validation.objective.predictions(scores.double()))
        assert terms.truth is not None and terms.risks is not None  # an outcome with risks has both
        truth, risk, domain = terms.truth.numpy() == 1, terms.risks.numpy(), validation.domain.numpy()
        found = np.empty((domains, outcomes))
        for o in range(outcomes):
            held = risk[:, o], truth[:, o]
            found[:, o] = self._threshold(*held)
            for m in range(domains) if self.by_domain else ():
                mine = self._threshold(*(each[domain == m] for each in held))
                found[m, o] = found[m, o] if np.isnan(mine) else mine
        return found

    def _threshold(self, risk: Values, truth: Values) -> float:
        """Return the threshold that reaches the aim on these samples; NaN if there are none to choose it on."""
        if self.kind == "flag":
            return float(np.quantile(risk, 1 - self.at, method="higher")) if len(risk) else np.nan
        positive = np.sort(risk[truth])[::-1]
        if not len(positive):
            return np.nan
        least = positive[int(np.ceil(self.at * len(positive) - 1e-9)) - 1]
        return float(np.nextafter(least, 0))  # risks above the threshold are flagged, so this one is


def nobody_or_everybody(selection_rates: Mapping[str, float]) -> str | None:
    """Return a sentence if nobody or everybody is flagged, of all or of some domains; else None.

    There gaps between groups mean nothing, or little: most of them is that between flagging and not flagging.
    """
    same = {who: [n for n, share in selection_rates.items() if share == at] for who, at in ENDS.items()}
    of = len(selection_rates)
    everywhere = any(len(names) == of for names in same.values())
    places = {who: "" if everywhere else f" in {_listed(names, of)}" for who, names in same.items() if names}
    if not places:
        return None
    said = "; ".join(f"{who} is flagged{where}" for who, where in places.items())
    mean = "nothing" if everywhere else "little"
    return (
        f"{said[0].upper()}{said[1:]} at this operating point, so the gaps between groups in these rates mean {mean}."
    )


def _listed(names: Sequence[str], of: int) -> str:
    """Return names of domains as text, or how many they are."""
    if len(names) > MOST_NAMED:
        return f"{len(names)} of {of} domains"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
