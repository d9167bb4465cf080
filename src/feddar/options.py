"""Options by name: what editors, type checkers and ``help()`` show in place of ``**options``.

Each is a field of ``Settings`` or ``Unknown``, which says what it means, what it may be and its default. Type checkers
need the names and types once more, here; a test holds them to those of the fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from pydantic import BaseModel

if TYPE_CHECKING:
    from numpy.random import RandomState
    from torch import nn


class UnknownOptions(TypedDict, total=False):
    """The options of prediction."""

    unknown_domain: Literal["error", "average"]
    missing_domain: Literal["error", "mixture"] | None
    unknown_client: Literal["error", "average"]
    unknown_category: Literal["error", "missing"]


class Options(TypedDict, total=False):
    """The options of all trainings."""

    rounds: int
    weights: str | None
    k: int | None
    bias: bool
    standardise_target: bool | None
    head_epochs: int
    encoder_epochs: int
    lr: float | None
    head_lr: float | None
    lr_steps: str
    schedule: Literal["constant", "cosine"] | None
    optimizer: Literal["adam", "sgd"]
    momentum: float
    weight_decay: float
    batch_size: int | None
    curvature: Literal["hessian", "block", "gram"] | None
    curvature_at: Literal["final", "start"]
    damping: float
    reweight: bool | None
    class_weight: Literal["balanced"] | None
    credibility: bool | None
    average: bool | None
    site_offset: bool | None
    label_shift: bool | None
    multi_head: bool | None
    domain_input: bool | None
    alternating: bool | None
    aggregation: Literal["average", "second-order"] | None
    mu: float
    q: float
    components: int
    minmax_lr: float
    beta: float
    ridge: float
    mix: float
    tune_factor: float
    tune_rounds: int | None
    warmup: int
    participation: float | None
    clients_per_round: int | None
    validation: float | None
    patience: int
    last: int
    test_every: int
    metric: str | None
    threshold: float | None
    flag: float | None
    sensitivity: float | None
    threshold_by: Literal["all", "domain"]
    batched: bool | None
    threads: int
    device: str
    precision: Literal["fp32", "bf16", "fp16"]
    compile: bool
    track: Literal["tensorboard", "mlflow", "wandb"] | None
    dtype: Literal["float32", "float64"]


class CompareOptions(Options, total=False):
    """The options of ``compare``, beside its own."""

    seed: int


class TrainOptions(CompareOptions, total=False):
    """The options of ``train``, beside its own."""

    jobs: int


class EstimatorOptions(Options, UnknownOptions, total=False):
    """The parameters of the scikit-learn estimators, where the seed is called as there."""

    method: str
    encoder: nn.Module | str | None
    jobs: int
    random_state: int | RandomState | None


def parameters_of(*models: type[BaseModel]) -> dict[str, inspect.Parameter]:
    """Return the fields of models as parameters with their types and defaults."""
    fields = {name: field for model in models for name, field in model.model_fields.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=field.default, annotation=field.annotation)
        for name, field in fields.items()
    }


Function = TypeVar("Function", bound=Callable[..., Any])


def showing(*models: type[BaseModel], without: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Let ``help()`` and notebooks show the fields of models in place of a function's last parameter, ``**options``."""

    def decorate(function: Function) -> Function:
        own = list(inspect.signature(function).parameters.values())[:-1]
        taken = {parameter.name for parameter in own}.union(without)
        fields = [each for name, each in parameters_of(*models).items() if name not in taken]
        signature = inspect.signature(function).replace(parameters=[*own, *fields])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate
