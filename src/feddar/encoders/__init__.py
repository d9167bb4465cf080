"""Encoders by name. An encoder is any module that maps a batch to [batch, features]; these are the built-in ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from feddar.encoders.cnn import SmallCNN
from feddar.encoders.exam import ExamEncoder
from feddar.encoders.tabular import linear, mlp
from feddar.errors import UserError
from feddar.methods import nearest

Inputs = tuple[Tensor, ...]

ENCODERS: dict[str, Callable[[Inputs, int | None], nn.Module]] = {
    "linear": lambda x, k: linear(_columns(x, "linear"), k),
    "mlp": lambda x, _: mlp(_columns(x, "mlp")),
    "cnn": lambda x, _: SmallCNN(_channels(x, "cnn")),
    "exam": lambda _, __: ExamEncoder(),
}


def build_encoder(name: str | None, x: Inputs, k: int | None) -> nn.Module:
    """Make an encoder for inputs like ``x``; None chooses by their shape."""
    chosen = name or _default(x)
    if chosen not in ENCODERS:
        raise UserError(f"unknown encoder '{chosen}': {nearest(chosen, list(ENCODERS))}")
    return ENCODERS[chosen](x, k)


def _default(x: Inputs) -> str:
    if len(x) == 1 and x[0].ndim == 2:
        return "mlp"
    if len(x) == 1 and x[0].ndim == 4:
        return "cnn"
    shapes = [tuple(part.shape[1:]) for part in x]
    raise UserError(f"there is no default encoder for inputs of shape {shapes}: give one as encoder=...")


def _columns(x: Inputs, name: str) -> int:
    if len(x) != 1 or x[0].ndim != 2:
        raise UserError(f"encoder '{name}' takes a table [samples, features]: choose another for this data.")
    return x[0].shape[1]


def _channels(x: Inputs, name: str) -> int:
    if len(x) != 1 or x[0].ndim != 4:
        raise UserError(f"encoder '{name}' takes images [samples, channels, height, width]: choose another.")
    return x[0].shape[1]
