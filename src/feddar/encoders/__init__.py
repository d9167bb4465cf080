"""Encoders by name. An encoder is any module that maps a batch to [batch, features]; these are the built-in ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from feddar.cohort import Cohort
from feddar.encoders.cnn import SmallCNN
from feddar.encoders.exam import ExamEncoder
from feddar.encoders.tabular import linear, mlp
from feddar.errors import UserError
from feddar.methods import nearest

ENCODERS: dict[str, Callable[[Cohort, int | None], nn.Module]] = {
    "linear": lambda cohort, k: linear(_columns(cohort, "linear"), k),
    "mlp": lambda cohort, _: mlp(_table(cohort, "mlp")),
    "cnn": lambda cohort, _: SmallCNN(_channels(cohort, "cnn")),
    "exam": lambda _, __: ExamEncoder(),
}


def build_encoder(name: str | None, cohort: Cohort, k: int | None) -> nn.Module:
    """Make an encoder for the inputs of a cohort; None chooses by their shape."""
    chosen = name or _default(cohort)
    if chosen not in ENCODERS:
        raise UserError(f"unknown encoder '{chosen}': {nearest(chosen, list(ENCODERS))}")
    return ENCODERS[chosen](cohort, k)


def _default(cohort: Cohort) -> str:
    if cohort.columns is not None or _shapes(cohort) == [1]:
        return "mlp"
    if _shapes(cohort) == [3]:
        return "cnn"
    shapes = [tuple(part.shape[1:]) for part in cohort.x]
    raise UserError(f"there is no default encoder for inputs of shape {shapes}: give one as encoder=...")


def _shapes(cohort: Cohort) -> list[int]:
    return [part.ndim - 1 for part in cohort.x]


def _table(cohort: Cohort, name: str) -> Cohort:
    if cohort.columns is None and _shapes(cohort) != [1]:
        raise UserError(f"encoder '{name}' takes a table [samples, features]: choose another for this data.")
    return cohort


def _columns(cohort: Cohort, name: str) -> int:
    columns = _table(cohort, name).columns or ()
    if any(column.gaps or column.kind == "category" for column in columns):
        raise UserError(f"encoder '{name}' takes numbers without gaps: choose mlp, or leave other columns out.")
    return cohort.x[0].shape[1]


def _channels(cohort: Cohort, name: str) -> int:
    if _shapes(cohort) != [3]:
        raise UserError(f"encoder '{name}' takes images [samples, channels, height, width]: choose another.")
    return cohort.x[0].shape[1]
