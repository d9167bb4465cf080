"""Encoders by name. An encoder is any module that maps a batch to [batch, features]; these are the built-in ones.

A name with ``+flip`` behind it, as in ``resnet34+flip``, mirrors images at random while the encoder is trained.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from feddar.encoders import networks
from feddar.encoders.cnn import MapsEncoder, SmallCNN
from feddar.encoders.digits import DigitCNN
from feddar.encoders.exam import ExamEncoder
from feddar.encoders.tabular import linear, mlp
from feddar.errors import UserError
from feddar.methods import nearest

Inputs = tuple[Tensor, ...]

ENCODERS: dict[str, Callable[[Inputs, int | None], nn.Module]] = {
    "linear": lambda x, k: linear(_columns(x, "linear"), k),
    "mlp": lambda x, _: mlp(_columns(x, "mlp")),
    "cnn": lambda x, _: SmallCNN(_channels(x, "cnn")),
    "maps": lambda x, _: MapsEncoder(_channels(x, "maps"), x[0].shape[2] * x[0].shape[3]),
    "exam": lambda _, __: ExamEncoder(),
    "digit-cnn": lambda x, _: DigitCNN(_channels(x, "digit-cnn", size=28)),
    "resnet34": lambda x, _: networks.resnet34(_channels(x, "resnet34")),
    "efficientnet-lite0": lambda x, _: _pretrained(x, "efficientnet-lite0", networks.efficientnet_lite0),
}
FLIP = "+flip"


def build_encoder(name: str | None, x: Inputs, k: int | None) -> nn.Module:
    """Make an encoder for inputs like ``x``; None chooses by their shape."""
    chosen = (name or _default(x)).removesuffix(FLIP)
    if chosen not in ENCODERS:
        raise UserError(f"unknown encoder '{chosen}': {nearest(chosen, list(ENCODERS))}")
    encoder = ENCODERS[chosen](x, k)
    if name is None or not name.endswith(FLIP):
        return encoder
    _channels(x, name)
    return nn.Sequential(networks.Flip(), encoder)


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


def _channels(x: Inputs, name: str, size: int | None = None) -> int:
    if len(x) != 1 or x[0].ndim != 4:
        raise UserError(f"encoder '{name}' takes images [samples, channels, height, width]: choose another.")
    height, width = x[0].shape[2:]
    if size is not None and (height, width) != (size, size):
        raise UserError(f"encoder '{name}' takes images of {size} x {size} pixels, not {height} x {width}.")
    return x[0].shape[1]


def _pretrained(x: Inputs, name: str, make: Callable[[], nn.Module]) -> nn.Module:
    if _channels(x, name) != 3:
        raise UserError(f"encoder '{name}' was trained on colour images, and these have {x[0].shape[1]} channels.")
    return make()
