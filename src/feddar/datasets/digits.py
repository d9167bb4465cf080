"""Digits from five sources, which are the domains: MNIST, USPS, MNIST-M, SVHN from files, and `synth`, drawn here.

Each file is `NAME.npz` with `x_train, y_train, x_test, y_test`: uint8 images of 28 x 28, grey or RGB, and labels 0 to
9. As in the paper, images are 28 x 28 x 3 and scaled with mean = sd = 0.5. The paper's fifth source, SynthDigits, is
not to be had; `synth` (see `feddar.datasets.synth`) is our own and differs from it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.datasets import synth
from feddar.datasets.folder import find_set
from feddar.datasets.pool import Ints, Pool, numbered
from feddar.errors import UserError
from feddar.images import Scaling

SOURCES = ("mnist", "usps", "mnist_m", "svhn")
DOMAINS = (*SOURCES, "synth")
SIZE = 28
ORIGIN = "the authors of MNIST, USPS, MNIST-M and SVHN, as arrays x_train, y_train, x_test, y_test of 28 x 28 pixels"
SYNTH_COUNT = {"train": 4000, "test": 2000}

Part = Literal["train", "test"]


def pool(part: Part, folder: str | Path | None = None, *, rendered: bool = True) -> Pool:
    """Return the training or test images of all sources, with or without those rendered here."""
    place = find_set("digits", folder, files=tuple(f"{name}.npz" for name in SOURCES), origin=ORIGIN)
    parts = [read_source(place / f"{name}.npz", part) for name in SOURCES]
    images = np.concatenate([x for x, _ in parts])
    labels = [y for _, y in parts] + ([synth.labels(SYNTH_COUNT[part])] if rendered else [])
    domains = DOMAINS if rendered else SOURCES

    def read(numbers: Ints) -> Tensor:
        filed = numbers < len(images)
        found = np.empty((len(numbers), SIZE, SIZE, 3), np.uint8)
        found[filed] = images[numbers[filed]]
        found[~filed] = synth.draw(numbers[~filed] - len(images), part)
        return torch.from_numpy(found).permute(0, 3, 1, 2).contiguous()

    samples = numbered(
        np.concatenate(labels),
        [name for name, y in zip(domains, labels, strict=True) for _ in y],
        domains=domains,
        classes=tuple(range(10)),
    )
    return Pool(samples, read, Scaling((0.5,) * 3, (0.5,) * 3))


def read_source(path: Path, part: Part) -> tuple[NDArray[np.uint8], Ints]:
    """Return the images [n, 28, 28, 3] and labels of one file, having checked them."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            x, y = file[f"x_{part}"], file[f"y_{part}"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read x_{part} and y_{part} in {path} ({error}): get the file again.") from None
    shapes = ((len(x), SIZE, SIZE), (len(x), SIZE, SIZE, 3))
    if x.dtype != np.uint8 or x.shape not in shapes or y.shape != (len(x),) or not np.isin(y, range(10)).all():
        raise UserError(
            f"{path} has x_{part} of shape {x.shape} ({x.dtype}) and y_{part} of shape {y.shape}; expected are uint8 "
            f"images [n, {SIZE}, {SIZE}] or [n, {SIZE}, {SIZE}, 3] and n labels from 0 to 9."
        )
    colour = x if x.ndim == 4 else np.repeat(x[..., None], 3, axis=3)
    return colour, y.astype(np.int64)
