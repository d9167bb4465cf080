"""Encoders by name. An encoder is any module that maps a batch to [batch, features]; these are the built-in ones.

A name with ``+flip`` behind it, as in ``resnet34+flip``, mirrors images at random while the encoder is trained. A name
such as ``my_nets:Chest`` is one of the user's own (``feddar.encoders.own``). Any encoder takes weights from a file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import nn

from feddar.cohort import Cohort
from feddar.encoders import networks
from feddar.encoders.cnn import MapsEncoder, SmallCNN
from feddar.encoders.digits import DigitCNN
from feddar.encoders.exam import ExamEncoder
from feddar.encoders.own import own_encoder
from feddar.encoders.tabular import linear, mlp
from feddar.encoders.weights import load_weights
from feddar.errors import Notice, UserError
from feddar.methods import nearest

ENCODERS: dict[str, Callable[[Cohort, int | None], nn.Module]] = {
    "linear": lambda cohort, k: linear(_columns(cohort, "linear"), k),
    "mlp": lambda cohort, _: mlp(_table(cohort, "mlp")),
    "cnn": lambda cohort, _: SmallCNN(_channels(cohort, "cnn")),
    "maps": lambda cohort, _: MapsEncoder(_channels(cohort, "maps"), cohort.x[0].shape[2:].numel()),
    "exam": lambda _, __: ExamEncoder(),
    "digit-cnn": lambda cohort, _: DigitCNN(_channels(cohort, "digit-cnn", size=28)),
    "resnet34": lambda cohort, _: networks.resnet34(_channels(cohort, "resnet34")),
    "densenet121": lambda cohort, _: networks.densenet121(_channels(cohort, "densenet121")),
    "efficientnet-lite0": lambda cohort, _: _pretrained(cohort, "efficientnet-lite0", networks.efficientnet_lite0),
}
FLIP = "+flip"


def build_encoder(
    encoder: nn.Module | str | None, cohort: Cohort, k: int | None, weights: str | None = None
) -> nn.Module:
    """Make an encoder for the inputs of a cohort, with weights from a file if given; None chooses by their shape.

    A module is copied, since training will change it.
    """
    if isinstance(encoder, nn.Module):
        made, flip = copy.deepcopy(encoder), False
    else:
        name = encoder or _default(cohort)
        made, flip = _named(name.removesuffix(FLIP), cohort, k), name.endswith(FLIP)
    if weights is not None:
        _say_unused(weights, tuple(load_weights(made, Path(weights))))
    if not flip:
        return made
    _channels(cohort, str(encoder))
    return nn.Sequential(networks.Flip(), made)


def _named(name: str, cohort: Cohort, k: int | None) -> nn.Module:
    if ":" in name:
        return own_encoder(name)
    if name not in ENCODERS:
        raise UserError(f"unknown encoder '{name}': {nearest(name, list(ENCODERS))}")
    return ENCODERS[name](cohort, k)


@cache  # once, however many models a comparison makes
def _say_unused(weights: str, unused: tuple[str, ...]) -> None:
    if unused:
        names = ", ".join(unused)
        warnings.warn(f"{names} in {weights}, a classifier's last layer, is not used.", Notice, stacklevel=2)


def _default(cohort: Cohort) -> str:
    if cohort.columns is not None or _dimensions(cohort) == [1]:
        return "mlp"
    if _dimensions(cohort) == [3]:
        return "cnn"
    shapes = [tuple(part.shape[1:]) for part in cohort.x]
    raise UserError(f"there is no default encoder for inputs of shape {shapes}: give one as encoder=...")


def _dimensions(cohort: Cohort) -> list[int]:
    return [part.ndim - 1 for part in cohort.x]


def _table(cohort: Cohort, name: str) -> Cohort:
    if cohort.columns is None and _dimensions(cohort) != [1]:
        raise UserError(f"encoder '{name}' takes a table [samples, features]: choose another for this data.")
    return cohort


def _columns(cohort: Cohort, name: str) -> int:
    columns = _table(cohort, name).columns or ()
    if any(column.gaps or column.kind == "category" for column in columns):
        raise UserError(f"encoder '{name}' takes numbers without gaps: choose mlp, or leave other columns out.")
    return cohort.x[0].shape[1]


def _channels(cohort: Cohort, name: str, size: int | None = None) -> int:
    if _dimensions(cohort) != [3]:
        raise UserError(f"encoder '{name}' takes images [samples, channels, height, width]: choose another.")
    channels, height, width = cohort.x[0].shape[1:]
    if size is not None and (height, width) != (size, size):
        raise UserError(f"encoder '{name}' takes images of {size} x {size} pixels, not {height} x {width}.")
    return channels


def _pretrained(cohort: Cohort, name: str, make: Callable[[], nn.Module]) -> nn.Module:
    channels = _channels(cohort, name)
    if channels != 3:
        raise UserError(f"encoder '{name}' was trained on colour images, and these have {channels} channels.")
    return make()
