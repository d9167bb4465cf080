"""Which new samples are flagged, at the operating point that a run was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from feddar.evaluation.operating_point import OperatingPoint
from feddar.results.figure_files import read_figures
from feddar.results.run import Run
from feddar.settings import OPERATING_POINTS


@dataclass(frozen=True)
class Flagging:
    """The threshold of each outcome above which a sample is flagged."""

    outcomes: Sequence[str]
    by_domain: Mapping[str, Sequence[float]]
    elsewhere: Sequence[float]
    """Those of a domain that has none of its own; NaN where thresholds are by domain."""

    @classmethod
    def of(cls, run: Run) -> Flagging | None:
        """Return the thresholds of a run; None if it was not given an operating point, or what that is is not known.

        One that was chosen on validation samples is in the run's figures, which a site's copy of a model does not have.
        """
        outcomes, point = run.model.objective.risk_outcomes, OperatingPoint.of(run.settings)
        if not outcomes or all(getattr(run.settings, name) is None for name in OPERATING_POINTS):
            return None
        if not point.chosen:
            return cls(outcomes, {}, [point.at] * len(outcomes))
        figures = None if run.folder is None else read_figures(run.folder)
        if figures is None:
            return None
        names = [f"threshold{end}" for end in outcomes]
        by_domain = {domain: [of[name].value for name in names] for domain, of in figures.by_domain.items()}
        return cls(outcomes, by_domain, [figures.overall[name].value for name in names])

    @property
    def columns(self) -> list[str]:
        """The names of the columns of flags: ``flagged``, or of several outcomes ``flagged_NAME``."""
        return [f"flagged{end.replace(':', '_', 1)}" for end in self.outcomes]

    def added(self, frame: pd.DataFrame, run: Run) -> pd.DataFrame:
        """Return predictions with a column of flags for each outcome: 1, 0, or nothing where there is no threshold."""
        domain = frame["domain_used" if run.needs_domain or "domain" not in frame else "domain"]
        limits = np.array([self.by_domain.get(name, self.elsewhere) for name in domain]).reshape(len(frame), -1)
        risks = run.model.objective.from_columns(frame)[:, -len(self.outcomes) :]
        flags: dict[str, Any] = {
            name: pd.Series(risk > limit, frame.index).astype("Int8").mask(np.isnan(limit))
            for name, risk, limit in zip(self.columns, risks.T, limits.T, strict=True)
        }
        return frame.assign(**flags)[[*frame.columns.drop("note"), *flags, "note"]]
