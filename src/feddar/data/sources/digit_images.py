"""Digits from five sources, which are the domains: MNIST, USPS, MNIST-M, SVHN from files, and `synth`, drawn here.

`digit_files` lists the files. As in the paper, images are 28 x 28 x 3 and scaled with mean = sd = 0.5. The paper's
fifth source, SynthDigits, is not available; `synth` (see `rendered_digits`) is our own and differs from it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddar.data.images import Scaling
from feddar.data.sources import rendered_digits
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.digit_files import SIZE, Digits, Part, open_digits, possible_files
from feddar.data.sources.image_pool import Ints, Pool, numbered

SOURCES = ("mnist", "usps", "mnist_m", "svhn")
DOMAINS = (*SOURCES, "synth")
ORIGIN = "the authors of MNIST, USPS, MNIST-M and SVHN, as they publish them or as arrays: see docs/cohorts.md"
SYNTH_COUNT = {"train": 4000, "test": 2000}


def pool(part: Part, folder: str | Path | None = None, *, rendered: bool = True) -> Pool:
    """Return the training or test images of all sources, with or without those rendered here."""
    place = find_set("digits", folder, files=[possible_files(name) for name in SOURCES], origin=ORIGIN)
    sources = [open_digits(place, name, part) for name in SOURCES]
    if rendered:
        sources.append(Digits(rendered_digits.labels(SYNTH_COUNT[part]), lambda rows: rendered_digits.draw(rows, part)))
    domains = DOMAINS if rendered else SOURCES
    starts = np.cumsum([0, *(len(source.labels) for source in sources)])

    def read(numbers: Ints) -> Tensor:
        found = np.empty((len(numbers), SIZE, SIZE, 3), np.uint8)
        for source, start, end in zip(sources, starts, starts[1:], strict=False):
            mine = (numbers >= start) & (numbers < end)
            found[mine] = source.images(numbers[mine] - start)
        return torch.from_numpy(found).permute(0, 3, 1, 2).contiguous()

    samples = numbered(
        np.concatenate([source.labels for source in sources]),
        [name for name, source in zip(domains, sources, strict=True) for _ in source.labels],
        domains=domains,
        classes=tuple(range(10)),
    )
    return Pool(samples, read, Scaling((0.5,) * 3, (0.5,) * 3))
