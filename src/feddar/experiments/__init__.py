"""The experiments of the paper: each module makes one of its figures or tables, from the data to the picture."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from feddar.errors import UserError
from feddar.methods import nearest

if TYPE_CHECKING:
    import pandas as pd

    from feddar.experiments.common import ExperimentOptions

EXPERIMENTS = {
    "samples": "samples:run",
    "convergence": "convergence:run",
    "effect-of-k": "effect_of_k:run",
    "face-age": "face_tables:run_age",
    "face-gender": "face_tables:run_gender",
    "digits": "digit_table:run",
    "exam": "exam_table:run",
    "ablation": "ablation:run",
    "never-worse": "never_worse:run",
}
"""The module and function of each experiment, by name."""


def find_experiment(name: str) -> Callable[[ExperimentOptions], pd.DataFrame]:
    """Return the function that runs the experiment and returns its results."""
    if name not in EXPERIMENTS:
        raise UserError(f"unknown experiment '{name}': {nearest(name, list(EXPERIMENTS))}")
    run: Callable[[ExperimentOptions], pd.DataFrame] = resolve_name(f"feddar.experiments.{EXPERIMENTS[name]}")
    return run
