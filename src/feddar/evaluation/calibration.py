"""Calibration errors by domain, which stand beside AUC in a comparison, since AUC is blind to the level of risks."""

from __future__ import annotations

import numpy as np
import pandas as pd
from torch import Tensor

from feddar.data.cohort import Cohort
from feddar.evaluation.metrics import COLUMNS, Rows, summarise
from feddar.objectives.risks import Risks

ERROR = "ece"


def calibration_errors(test: Cohort, scores: Tensor) -> Rows:
    """Return the expected calibration error of each domain, and its summaries over domains.

    Of several yes/no outcomes it is the mean over outcomes; other outcomes have none. There is none of clients, of
    which many have too few samples for a curve.
    """
    objective = test.objective
    terms = objective.terms(test.y, objective.predictions(scores.double()))
    if not objective.risk_outcomes or terms.truth is None or terms.risks is None:
        return []
    truth, risk, domain = terms.truth.numpy() == 1, terms.risks.numpy(), test.domain.numpy()
    rows: Rows = []
    for m in np.unique(domain):
        mine = domain == m
        outcomes = [Risks.of(truth[mine, o], risk[mine, o]) for o in range(len(objective.risk_outcomes))]
        errors = [risks.calibration(risks.tenths())[ERROR] for risks in outcomes]
        rows.append(("domain", test.domains[m], ERROR, float(np.mean(errors)), int(mine.sum())))
    summaries = summarise(pd.DataFrame(rows, columns=COLUMNS))
    return [*rows, *summaries[summaries["name"] != "client_avg"].itertuples(index=False, name=None)]
