"""The source `fairface`: faces of seven race groups, which are the domains, read by ``face_images``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from feddar.data.sources.data_folder import Folder
from feddar.data.sources.drawn import DrawnOptions, draw_clients
from feddar.data.sources.source import Source
from feddar.data.table_options import ImageSize

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


class FairFaceOptions(DrawnOptions):
    """The folder of the images, the label to predict, and how clients are drawn."""

    folder: Folder = None
    label: Literal["age", "gender"] = Field("age", description="What to predict.")
    image_size: ImageSize = 96


def load(options: FairFaceOptions, seed: int) -> Cohort:
    """Return a cohort whose clients are drawn from the training images."""
    from feddar.data.sources.face_images import pool

    return draw_clients(pool("train", options.label, options.image_size, options.folder), options, seed)


SOURCE = Source(
    "fairface",
    "FairFace: age group or gender, 7 race groups as domains; clients are drawn with mixtures Dir(alpha p)",
    FairFaceOptions,
    load,
    {"encoder": "efficientnet-lite0+flip", "lr": 1e-4},
)
