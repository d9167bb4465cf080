"""Predictions with their explanation: the domain and head that were used, and notes on what was not in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import known_indices, require_all_known
from feddar.data.columns import unseen_values
from feddar.errors import UserError
from feddar.lazy import pandas as pd
from feddar.settings import Unknown

if TYPE_CHECKING:
    from feddar.results.run import Run


MISSING = -2
"""The index of a missing domain that is answered by a mixture of heads; that of an unknown domain is -1."""
MIX = " Or mix heads by the shares of domains: missing_domain='mixture' (--missing-domain mixture)."


@dataclass(frozen=True)
class Membership:
    """The domain or client of each sample: the given name as text, and its index in training.

    An index of -1 is unknown, and ``MISSING`` is a missing domain that is answered by a mixture of heads.
    """

    given: NDArray[np.object_]
    index: Tensor

    @classmethod
    def of(cls, what: str, values: Any, n: int, names: tuple[str, ...], allowed: Unknown) -> Membership:
        """Look up the names of n samples; a single name is for all, and None means the first of ``names``."""
        if values is None:
            return cls(np.full(n, "", dtype=object), torch.zeros(n, dtype=torch.long))
        each = [values] * n if isinstance(values, str) else values
        given, index = known_indices(each, names, what)
        missing = torch.from_numpy(given == "") & (index < 0)
        accepted = torch.where(
            missing, allowed.of_missing(what) != "error", getattr(allowed, f"unknown_{what}") != "error"
        )
        average = f" Or average all: unknown_{what}='average' (--unknown-{what} average)."
        advice = (average, MIX if what == "domain" else average)
        require_all_known(given, index.masked_fill(accepted, 0), names, what, *advice)
        if len(index) != n:
            raise UserError(f"{what} has {len(index):,} entries, but x has {n:,} samples: make them equal.")
        return cls(given, index.masked_fill(missing, MISSING) if allowed.of_missing(what) == "mixture" else index)


@dataclass(frozen=True)
class Predicted:
    """Predictions of samples, and the domain, client and head that were used."""

    values: NDArray[np.floating]
    """Numbers [n], or probabilities [n, classes]."""
    table: pd.DataFrame | None
    domains: Membership
    clients: Membership
    head: NDArray[np.object_]
    notes: Mapping[int, str]
    """What is to be said of the domains of some rows."""

    def frame(self, run: Run) -> pd.DataFrame:
        """Return the predictions as a data frame (see ``Run.predictions``)."""
        used = np.array([*run.cohort.domains, ""], dtype=object)[self.domains.index.clamp_min(-1).numpy()]
        columns: dict[str, Any] = {"domain_used": used if run.needs_domain else "", "head": self.head}
        columns |= run.model.objective.columns(self.values)
        return pd.DataFrame({**columns, "note": self._notes(run)})

    def _notes(self, run: Run) -> NDArray[np.object_]:
        notes: NDArray[np.object_] = np.full(len(self.values), "", dtype=object)

        def add(row: int, text: str) -> None:
            notes[row] += f"{'; ' * bool(notes[row])}{text}"

        for row, text in self.notes.items():
            add(row, text)
        for row in np.flatnonzero(self.domains.index.numpy() < 0).tolist():
            mixed = int(self.domains.index[row]) == MISSING
            answer = f"mixture of heads by {self._shares_of(row, run)}" if mixed else "average of heads"
            add(row, f"{_unknown('domain', self.domains.given[row])}: {answer}")
        for row in np.flatnonzero(self.clients.index.numpy() < 0).tolist() if run.method.keeps_own else ():
            add(row, f"{_unknown('client', self.clients.given[row])}: {run.method.for_unseen_client}")
        if self.table is not None:
            for place, text in unseen_values(self.table, run.cohort.columns or ()):
                add(place, text)
        return notes

    def _shares_of(self, row: int, run: Run) -> str:
        """Return in words whose shares of domains a mixture of heads is by."""
        client = self.clients.given[row]
        return f"the shares at client {client!r}" if run.has_shares(client) else "the shares at all clients"


def _unknown(what: str, name: str) -> str:
    return f"{what} {name!r} unknown" if name else f"no {what}"
