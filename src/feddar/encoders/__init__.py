"""Encoders by name. An encoder is any module that maps a batch to [batch, features]; these are the built-in ones.

A name with ``+flip`` behind it, as in ``resnet34+flip``, mirrors images at random while the encoder is trained. Where
samples are images with records, an image encoder becomes one branch of two (``feddar.encoders.fused``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from feddar.cohort import Cohort
from feddar.encoders import networks
from feddar.encoders.cnn import MapsEncoder, SmallCNN
from feddar.encoders.digits import DigitCNN
from feddar.encoders.fused import Fused, small_branch
from feddar.encoders.tabular import MLP, linear, table_input
from feddar.errors import UserError
from feddar.methods import nearest

EXAM = "exam"
TABLE: dict[str, Callable[[Cohort, int | None], nn.Module]] = {
    "linear": lambda cohort, k: linear(_columns(cohort, "linear"), k),
    "mlp": lambda cohort, _: MLP(table_input(cohort)),
}
IMAGE: dict[str, Callable[[Cohort], nn.Module]] = {
    EXAM: lambda cohort: small_branch(_channels(cohort, EXAM)),
    "cnn": lambda cohort: SmallCNN(_channels(cohort, "cnn")),
    "maps": lambda cohort: MapsEncoder(_channels(cohort, "maps"), cohort.x[0].shape[2:].numel()),
    "digit-cnn": lambda cohort: DigitCNN(_channels(cohort, "digit-cnn", size=28)),
    "resnet34": lambda cohort: networks.resnet34(_channels(cohort, "resnet34")),
    "efficientnet-lite0": lambda cohort: _pretrained(cohort, "efficientnet-lite0", networks.efficientnet_lite0),
}
ENCODERS = (*TABLE, *IMAGE)
FLIP = "+flip"
MOST_FUSED = 32
"""An image with a record gives at most so many features: the record's are few, and should be heard."""


def build_encoder(name: str | None, cohort: Cohort, k: int | None) -> nn.Module:
    """Make an encoder for the inputs of a cohort; None chooses by their shape."""
    name = name or _default(cohort)
    chosen = name.removesuffix(FLIP)
    if chosen not in ENCODERS:
        raise UserError(f"unknown encoder '{chosen}': {nearest(chosen, list(ENCODERS))}")
    if chosen in TABLE:
        if _dimensions(cohort) not in ([1], [1, 1]):
            raise UserError(f"encoder '{chosen}' takes a table [samples, features]: choose another for this data.")
        if name != chosen:
            raise UserError(f"encoder '{chosen}' takes a table, which cannot be mirrored: leave out {FLIP}.")
        return TABLE[chosen](cohort, k)
    if chosen == EXAM and len(cohort.x) == 1:
        raise UserError("encoder 'exam' takes an image and a record of each sample: choose another for this data.")
    image = IMAGE[chosen](cohort)
    if name.endswith(FLIP):
        image = nn.Sequential(networks.Flip(), image)
    return image if len(cohort.x) == 1 else _fused(image, cohort)


def _fused(image: nn.Module, cohort: Cohort) -> nn.Module:
    """Add a branch for the record to that of the image."""
    with torch.no_grad():
        features = image.eval()(torch.zeros(1, *cohort.x[0].shape[1:])).shape[1]
    if features > MOST_FUSED:
        image, features = nn.Sequential(image, nn.Linear(features, MOST_FUSED)), MOST_FUSED
    if cohort.columns is None:
        return Fused(image, features, nn.Identity(), cohort.x[1].shape[1])
    record = table_input(cohort)
    return Fused(image, features, record, record.features)


def _default(cohort: Cohort) -> str:
    known = {(1,): "mlp", (1, 1): "mlp", (3,): "cnn", (3, 1): EXAM, (3, 1, 1): EXAM}
    shapes = [tuple(part.shape[1:]) for part in cohort.x]
    if tuple(_dimensions(cohort)) not in known:
        raise UserError(f"there is no default encoder for inputs of shape {shapes}: give one as encoder=...")
    return known[tuple(_dimensions(cohort))]


def _dimensions(cohort: Cohort) -> list[int]:
    return [part.ndim - 1 for part in cohort.x]


def _columns(cohort: Cohort, name: str) -> int:
    columns = cohort.columns or ()
    if any(column.gaps or column.kind == "category" for column in columns):
        raise UserError(f"encoder '{name}' takes numbers without gaps: choose mlp, or leave other columns out.")
    return cohort.x[0].shape[1]


def _channels(cohort: Cohort, name: str, size: int | None = None) -> int:
    if _dimensions(cohort)[0] != 3:
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
