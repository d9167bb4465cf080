"""Federated Domain-Aware Representation learning: one model for many hospitals, fair to every group of patients.

>>> import feddar
>>> "feddar-sa" in feddar.METHODS
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddar.aggregate import second_order as second_order
    from feddar.cohort import Cohort as Cohort
    from feddar.comparison import Comparison as Comparison
    from feddar.comparison import compare as compare
    from feddar.errors import TrainingError as TrainingError
    from feddar.errors import UserError as UserError
    from feddar.estimators import FedDARClassifier as FedDARClassifier
    from feddar.estimators import FedDARRegressor as FedDARRegressor
    from feddar.methods import METHODS as METHODS
    from feddar.methods import Method as Method
    from feddar.run import Run as Run
    from feddar.run import load as load
    from feddar.settings import Settings as Settings
    from feddar.training import train as train

# Names are found when first used, so that `feddar --help` need not wait for torch.
_HOMES = {
    "second_order": "feddar.aggregate",
    "Cohort": "feddar.cohort",
    "Comparison": "feddar.comparison",
    "compare": "feddar.comparison",
    "TrainingError": "feddar.errors",
    "UserError": "feddar.errors",
    "FedDARClassifier": "feddar.estimators",
    "FedDARRegressor": "feddar.estimators",
    "METHODS": "feddar.methods",
    "Method": "feddar.methods",
    "Run": "feddar.run",
    "load": "feddar.run",
    "Settings": "feddar.settings",
    "train": "feddar.training",
}

# `import *` must not need a package that was not asked for.
__all__ = sorted(name for name in _HOMES if _HOMES[name] != "feddar.estimators")  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'feddar' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(_HOMES)
