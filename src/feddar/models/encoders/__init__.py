"""Encoders by name. An encoder is any module that maps a batch to [batch, features]; these are the built-in ones.

A name with ``+flip`` behind it, as in ``resnet34+flip``, mirrors images at random while the encoder is trained. Where
samples are images with records, an image encoder becomes one branch of two (``encoders.fused``). A name such as
``my_nets:Chest`` is one of the user's own (``encoders.own``). Any encoder takes weights from a file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from feddar.data.cohort import Cohort
from feddar.data.layout import Input, InputKind
from feddar.errors import Notice, UserError
from feddar.methods import nearest
from feddar.models.encoders import networks
from feddar.models.encoders.cnn import MapsEncoder, SmallCNN
from feddar.models.encoders.digit_cnn import DigitCNN
from feddar.models.encoders.fused import Fused, small_branch
from feddar.models.encoders.own import own_encoder
from feddar.models.encoders.tabular import MLP, linear, table_input, wide_and_deep
from feddar.models.encoders.weights import load_weights
from feddar.settings import OF_TABLES

EXAM = "exam"
TABLE: dict[str, Callable[[Cohort, int | None], nn.Module]] = {
    "linear": lambda cohort, k: linear(_columns(cohort, "linear"), k),
    "mlp": lambda cohort, _: MLP(table_input(cohort)),
    "wide": lambda cohort, _: wide_and_deep(cohort),
}
IMAGE: dict[str, Callable[[Cohort], nn.Module]] = {
    EXAM: lambda cohort: small_branch(_channels(cohort, EXAM)),
    "cnn": lambda cohort: SmallCNN(_channels(cohort, "cnn")),
    "maps": lambda cohort: MapsEncoder(_channels(cohort, "maps"), cohort.x[0].shape[2:].numel()),
    "digit-cnn": lambda cohort: DigitCNN(_channels(cohort, "digit-cnn", size=28)),
    "resnet34": lambda cohort: networks.resnet34(_channels(cohort, "resnet34")),
    "densenet121": lambda cohort: networks.densenet121(_channels(cohort, "densenet121")),
    "efficientnet-lite0": lambda cohort: _pretrained(cohort, "efficientnet-lite0", networks.efficientnet_lite0),
}
ENCODERS = (*TABLE, *IMAGE)
FLIP = "+flip"
TABLES: tuple[tuple[InputKind, ...], ...] = (("numbers",), ("numbers", "categories"))
DEFAULTS: dict[tuple[InputKind, ...], str] = {
    **dict.fromkeys(TABLES, OF_TABLES["encoder"]),
    ("image",): "cnn",
    **{("image", *kinds): EXAM for kinds in TABLES},
}
"""The default encoder for inputs of these kinds."""
MOST_FUSED = 32
"""An image with a record is mapped to at most so many features, so that they do not outweigh the record's."""


def require_encoder(encoder: object) -> None:
    """Refuse what is neither a module nor the name of one."""
    if encoder is None or isinstance(encoder, nn.Module | str):
        return
    if isinstance(encoder, type):
        name = encoder.__name__
        raise UserError(f"the encoder {name} is a class: give a module made of it, encoder={name}(...).")
    raise UserError(
        f"the encoder must be a torch.nn.Module or the name of one, and is of the type {type(encoder).__name__}."
    )


def build_encoder(
    encoder: nn.Module | str | None, cohort: Cohort, k: int | None, weights: str | None = None
) -> nn.Module:
    """Return an encoder for the inputs of a cohort; None chooses by their shape. A module is copied, not changed.

    ``weights`` is a file with the weights of the named network, without the branch for records that may be added to it.
    """
    if isinstance(encoder, nn.Module):
        return _starting_from(weights, copy.deepcopy(encoder))
    name = encoder or _default(cohort)
    chosen = name.removesuffix(FLIP)
    made = _starting_from(weights, _named(chosen, cohort, k))
    if name.endswith(FLIP):
        _require_mirrored(chosen, cohort)
        made = nn.Sequential(networks.Flip(), made)
    return _fused(made, cohort) if chosen in IMAGE and len(cohort.x) > 1 else made


def _named(name: str, cohort: Cohort, k: int | None) -> nn.Module:
    if ":" in name:
        return own_encoder(name)
    if name in IMAGE:
        if name == EXAM and len(cohort.x) == 1:
            raise UserError("encoder 'exam' takes an image and a record of each sample: choose another for this data.")
        return IMAGE[name](cohort)
    if name not in TABLE:
        raise UserError(f"unknown encoder '{name}': {nearest(name, list(ENCODERS))}")
    if kinds(cohort) not in TABLES:
        raise UserError(f"encoder '{name}' takes a table [samples, features]: choose another for this data.")
    return TABLE[name](cohort, k)


def _require_mirrored(name: str, cohort: Cohort) -> None:
    if name in TABLE:
        raise UserError(f"encoder '{name}' takes a table, which cannot be mirrored: leave out {FLIP}.")
    if name not in IMAGE and kinds(cohort) != ("image",):
        raise UserError(f"encoder '{name}' takes more than an image, and mirrors it best itself: leave out {FLIP}.")


def _starting_from(weights: str | None, network: nn.Module) -> nn.Module:
    if weights is not None:
        _warn_unused(weights, tuple(load_weights(network, Path(weights))))
    return network


@cache  # warn only once, however many models a comparison makes
def _warn_unused(weights: str, unused: tuple[str, ...]) -> None:
    if unused:
        names = ", ".join(unused)
        warnings.warn(f"{names} in {weights}, a classifier's last layer, is not used.", Notice, stacklevel=2)


def _fused(image: nn.Module, cohort: Cohort) -> nn.Module:
    """Return a two-branch encoder of the image encoder and a branch for the record."""
    with torch.no_grad():
        features = image.eval()(torch.zeros(1, *cohort.x[0].shape[1:])).shape[1]
    if features > MOST_FUSED:
        image, features = nn.Sequential(image, nn.Linear(features, MOST_FUSED)), MOST_FUSED
    if cohort.columns is None:
        return Fused(image, features, nn.Identity(), cohort.x[1].shape[1])
    record = table_input(cohort)
    return Fused(image, features, record, record.features)


def _default(cohort: Cohort) -> str:
    if kinds(cohort) not in DEFAULTS:
        shapes = [part.shape for part in cohort.layout]
        raise UserError(f"there is no default encoder for inputs of shape {shapes}: give one as encoder=...")
    return DEFAULTS[kinds(cohort)]


def is_table(layout: Iterable[Input]) -> bool:
    """Return whether inputs are those of a table: numbers and categories only."""
    return tuple(part.kind for part in layout) in TABLES


def kinds(cohort: Cohort) -> tuple[InputKind, ...]:
    """Return the kinds of a cohort's inputs, in their order."""
    return tuple(part.kind for part in cohort.layout)


def _columns(cohort: Cohort, name: str) -> int:
    columns = cohort.columns or ()
    if any(column.gaps or column.kind == "category" for column in columns):
        raise UserError(f"encoder '{name}' takes numbers without gaps: choose mlp, or leave other columns out.")
    return cohort.x[0].shape[1]


def _channels(cohort: Cohort, name: str, size: int | None = None) -> int:
    if kinds(cohort)[0] != "image":
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
