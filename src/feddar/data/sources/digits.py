"""The source `digits`: digits of five data sets, which are the domains, read by ``digit_images``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddar.data.sources.data_folder import Folder
from feddar.data.sources.drawn import DrawnOptions, draw_clients
from feddar.data.sources.source import Source

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class DigitOptions(DrawnOptions):
    """The folder of the images, and how clients are drawn."""

    folder: Folder = None


def load(options: DigitOptions, seed: int) -> Cohort:
    """Return a cohort whose clients are drawn from the training images."""
    from feddar.data.sources.digit_images import pool

    return draw_clients(pool("train", options.folder), options, seed)


SOURCE = Source(
    "digits",
    "digits: MNIST, USPS, MNIST-M, SVHN and rendered ones as domains; clients are drawn with mixtures Dir(alpha p)",
    DigitOptions,
    load,
    {"encoder": "cnn"},
)
