"""FairFace (Kärkkäinen and Joo, 2021): faces of 7 race groups, which are the domains, with age group and gender.

The folder is as published: `train/`, `val/` and `fairface_label_train.csv`, `fairface_label_val.csv` with the columns
file, age, gender, race. Images may have any size and are resized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pandas as pd

from feddar.data.images import IMAGENET, read_images
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.image_pool import Pool, numbered
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
    return Pool(samples, lambda numbers: read_images([files[number] for number in numbers], size), IMAGENET)


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
