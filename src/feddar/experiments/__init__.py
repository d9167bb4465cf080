"""The experiments of the paper: each module makes one of its figures or tables, from the data to the picture."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from feddar.errors import UserError
from feddar.methods import nearest

if TYPE_CHECKING:
    import pandas as pd

EXPERIMENTS = {
    "samples": "samples",
    "convergence": "convergence",
    "effect-of-k": "effect_of_k",
    "face-age": "face_age",
    "face-gender": "face_gender",
    "digits": "digit_table",
    "exam": "exam_table",
    "ablation": "ablation",
}
"""The module of each."""


def find_experiment(name: str) -> Callable[..., pd.DataFrame]:
    """Return the function that runs the experiment: ``run(out, *, say, seeds, scale, jobs, resume, data)``.

    Only ``out`` and ``say`` are needed; what an experiment has no use for, it ignores.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"unknown experiment '{name}': {nearest(name, list(EXPERIMENTS))}")
    run: Callable[..., pd.DataFrame] = import_module(f"feddar.experiments.{EXPERIMENTS[name]}").run
    return run
