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


@dataclass(frozen=True)
class Membership:
    """The domain or client of each sample: the given name as text, and its index in training (-1: unknown)."""

    given: NDArray[np.object_]
    index: Tensor

    @classmethod
    def of(cls, what: str, values: Any, n: int, names: tuple[str, ...], allowed: Unknown) -> Membership:
        """Look up the names of n samples; a single name is for all, and None means the first of ``names``."""
        if values is None:
            return cls(np.full(n, names[0], dtype=object), torch.zeros(n, dtype=torch.long))
        each = [values] * n if isinstance(values, str) else values
        given, index = known_indices(each, names, what)
        if getattr(allowed, f"unknown_{what}") == "error":
            advice = f" Or average all: unknown_{what}='average' (--unknown-{what} average)."
            require_all_known(given, index, names, what, advice)
        if len(index) != n:
            raise UserError(f"{what} has {len(index):,} entries, but x has {n:,} samples: make them equal.")
        return cls(given, index)


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
        used = np.array([*run.cohort.domains, ""], dtype=object)[self.domains.index.numpy()]
        columns: dict[str, Any] = {"domain_used": used if run.needs_domain else "", "head": self.head}
        columns |= run.model.objective.columns(self.values)
        return pd.DataFrame({**columns, "note": self._notes(run)})

    def _notes(self, run: Run) -> NDArray[np.object_]:
        notes: NDArray[np.object_] = np.full(len(self.values), "", dtype=object)

        def add(row: int, text: str) -> None:
            notes[row] += f"{'; ' * bool(notes[row])}{text}"

        for row, text in self.notes.items():
            add(row, text)
        answers = {"domain": "average of heads", "client": run.method.for_unseen_client}
        for what, named in (("domain", self.domains), ("client", self.clients)):
            for row in np.flatnonzero(named.index.numpy() < 0).tolist():
                name = named.given[row]
                add(row, f"{f'{what} {name!r} unknown' if name else f'no {what}'}: {answers[what]}")
        if self.table is not None:
            for place, text in unseen_values(self.table, run.cohort.columns or ()):
                add(place, text)
        return notes
