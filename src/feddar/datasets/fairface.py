"""FairFace (Kärkkäinen and Joo, 2021): faces of 7 race groups, which are the domains, with age group and gender.

The folder is the set's own: `train/`, `val/` and `fairface_label_train.csv`, `fairface_label_val.csv` with the columns
file, age, gender, race. Images may have any size and are resized to the one wanted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from feddar.datasets.folder import find_set
from feddar.datasets.pool import IMAGENET, Pixels, Pool, numbered
from feddar.errors import UserError

RACES = ("White", "Black", "East Asian", "Indian", "Latino_Hispanic", "Middle Eastern", "Southeast Asian")
CLASSES = {
    "age": ("0-2", "3-9", "10-19", "20-29", "30-39", "40-49", "50-59", "60-69", "more than 70"),
    "gender": ("Female", "Male"),
}
FILES = ("fairface_label_train.csv", "fairface_label_val.csv", "train", "val")
ORIGIN = "https://github.com/joojs/fairface"

Part = Literal["train", "val"]
Label = Literal["age", "gender"]


def pool(part: Part, label: Label, size: int, folder: str | Path | None = None) -> Pool:
    """Return the training or validation images, `size` pixels wide and high."""
    place = find_set("fairface", folder, files=FILES, origin=ORIGIN)
    table = read_labels(place / f"fairface_label_{part}.csv", label)
    files = [place / name for name in table["file"]]
    try:
        samples = numbered(table[label].tolist(), table["race"].tolist(), domains=RACES, classes=CLASSES[label])
    except UserError as error:
        raise UserError(f"fairface_label_{part}.csv in {place}: {error}") from None
    return Pool(samples, lambda numbers: read_images([files[number] for number in numbers], size), *IMAGENET)


def read_labels(path: Path, label: Label) -> pd.DataFrame:
    """Return the columns file, race and the label of one of the set's tables."""
    try:
        table = pd.read_csv(path, dtype=str)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): get it again from {ORIGIN}.") from None
    wanted = ["file", "race", label]
    absent = [name for name in wanted if name not in table.columns]
    if absent or table.empty:
        what = f"no column '{absent[0]}'" if absent else "no rows"
        raise UserError(f"{path} has {what}: get it again from {ORIGIN}.")
    return table[wanted]


def read_images(files: list[Path], size: int) -> Pixels:
    """Decode images to [n, size, size, 3]; one that is missing or damaged is named."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("reading images needs Pillow: pip install 'feddar[images]'.") from error
    pixels: Pixels = np.empty((len(files), size, size, 3), np.uint8)
    for row, path in enumerate(files):
        try:
            with Image.open(path) as image:
                # A JPEG decodes to about the wanted size at once, which is much faster for large ones.
                image.draft("RGB", (size, size))
                pixels[row] = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"cannot read the image {path} ({reason}): get it again, or take out its row.") from None
    return pixels
