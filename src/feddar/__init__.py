"""Federated Domain-Aware Representation learning: one model for many hospitals, fair to every group of patients.

>>> import feddar
>>> "feddar" in feddar.METHODS
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddar.algorithm.aggregation import second_order as second_order
    from feddar.api import Comparison as Comparison
    from feddar.api import compare as compare
    from feddar.data.cohort import Cohort as Cohort
    from feddar.data.files import read_table as read_table
    from feddar.errors import TrainingError as TrainingError
    from feddar.errors import UserError as UserError
    from feddar.methods import METHODS as METHODS
    from feddar.methods import Method as Method
    from feddar.models.encoders.own import allow_code as allow_code
    from feddar.results.estimators import FedDARClassifier as FedDARClassifier
    from feddar.results.estimators import FedDARRegressor as FedDARRegressor
    from feddar.runs import Run as Run
    from feddar.runs import load as load
    from feddar.runs import train as train
    from feddar.settings import Settings as Settings

# Names are imported when first used, so that `feddar --help` need not wait for torch.
_HOMES = {
    "second_order": "feddar.algorithm.aggregation",
    "Cohort": "feddar.data.cohort",
    "Comparison": "feddar.api",
    "compare": "feddar.api",
    "read_table": "feddar.data.files",
    "TrainingError": "feddar.errors",
    "UserError": "feddar.errors",
    "FedDARClassifier": "feddar.results.estimators",
    "FedDARRegressor": "feddar.results.estimators",
    "METHODS": "feddar.methods",
    "Method": "feddar.methods",
    "allow_code": "feddar.models.encoders.own",
    "Run": "feddar.runs",
    "load": "feddar.runs",
    "Settings": "feddar.settings",
    "train": "feddar.runs",
}

# `import *` must not need scikit-learn, which is optional.
__all__ = sorted(name for name in _HOMES if _HOMES[name] != "feddar.results.estimators")  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'feddar' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(_HOMES)
