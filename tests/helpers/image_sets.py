"""Makes tiny copies of the image sets, in the layout of the real ones."""

from itertools import product

import numpy as np
from PIL import Image

from feddar.data.sources import digit_images as digits
from feddar.data.sources import face_images as fairface

FACES_PER_CELL = 2


def write_digits(folder, train=60, test=20):
    """Write a file for each source: a bar whose place is the label, on noise."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in digits.SOURCES:
        arrays = {}
        for part, count in (("train", train), ("test", test)):
            y = np.arange(count) % 10
            x = rng.integers(0, 60, (count, 28, 28, 3), dtype=np.uint8)
            for row, label in enumerate(y):
                x[row, :, 2 * label + 3 : 2 * label + 6] += 150
            arrays |= {f"x_{part}": x if name in ("mnist_m", "svhn") else x[..., 0], f"y_{part}": y.astype(np.uint8)}
        np.savez(folder / f"{name}.npz", **arrays)


def write_faces(folder, size=(40, 50)):
    """Write two images of every race, age group and gender."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        (folder / part).mkdir(parents=True)
        lines = ["file,age,gender,race,service_test"]
        cells = product(fairface.RACES, fairface.CLASSES["age"], fairface.CLASSES["gender"])
        for number, (race, age, gender) in enumerate(cells, start=1):
            small = rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)
            Image.fromarray(small).resize(size).save(folder / part / f"{number}.jpg", quality=95)
            lines.append(f"{part}/{number}.jpg,{age},{gender},{race},True")
        (folder / f"fairface_label_{part}.csv").write_text("\n".join(lines) + "\n")
