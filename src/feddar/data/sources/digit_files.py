"""Files of digits: each set in the format in which it is published, or as arrays in a `.npz`.

| source | files |
| --- | --- |
| any | `NAME.npz`: arrays x_train, y_train, x_test, y_test of 28 x 28 pixels, grey or RGB |
| `mnist` | `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte`, `t10k-labels-idx1-ubyte` |
| `usps` | `zip.train`, `zip.test` (of *The Elements of Statistical Learning*), or `usps`, `usps.t` (LIBSVM) |
| `mnist_m` | `mnist_m_train/`, `mnist_m_train_labels.txt`, `mnist_m_test/`, `mnist_m_test_labels.txt` |
| `svhn` | `train_32x32.mat`, `test_32x32.mat` (cropped digits) |

They are in the folder of the set, or in a subfolder with the source's name, and may be compressed (`.gz`, `.bz2`). Of
several formats of a source, the first in this table is used. Images of another size are resized to 28 x 28.
"""

from __future__ import annotations

import bz2
import gzip
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from feddar.data.images import read_images
from feddar.errors import UserError

Ints = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Part = Literal["train", "test"]

SIZE = 28
ENDINGS = ("", ".gz", ".bz2")


@dataclass(frozen=True)
class Digits:
    """The labels of a part, and a function that reads images when they are needed."""

    labels: Ints
    images: Callable[[Ints], Pixels]
    """Returns the images of these rows, [n, 28, 28, 3]."""


@dataclass(frozen=True)
class Format:
    """A file format: the files of each part (a name that ends in / is a folder), and the function that reads them."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[..., Digits]
    """Called with the part and the paths of its files; raises ValueError if they are not in this format."""

    def files(self, part: Part) -> tuple[str, ...]:
        """Return the names of a part's files."""
        return self.train if part == "train" else self.test


def open_digits(place: Path, name: str, part: Part) -> Digits:
    """Return the train or test part of one source, in the first of its formats that the folder has."""
    for kind in FORMATS[name]:
        for folder in (place, place / name):
            if any(_find(folder, file) for file in (*kind.train, *kind.test)):
                return _open(kind, part, [_required(folder, file) for file in kind.files(part)])
    raise UserError(f"{place} lacks {name}.npz, and its authors' own files: put either there.")


def possible_files(name: str) -> tuple[str, ...]:
    """Return all file names that a source may have, in any format."""
    files = [file for kind in FORMATS[name] for file in (*kind.train, *kind.test)]
    return tuple(f"{folder}{file}{ending}" for file in files for folder in ("", f"{name}/") for ending in ENDINGS)


def _find(folder: Path, file: str) -> Path | None:
    if file.endswith("/"):
        return folder / file if (folder / file).is_dir() else None
    return next((path for ending in ENDINGS if (path := folder / f"{file}{ending}").is_file()), None)


def _required(folder: Path, file: str) -> Path:
    path = _find(folder, file)
    if path is None:
        raise UserError(
            f"{folder} lacks {file}, which belongs to the other files there: get it from where they are from."
        )
    return path


def _open(kind: Format, part: Part, paths: list[Path]) -> Digits:
    try:
        found = kind.read(part, *paths)
        if not len(found.labels) or not np.isin(found.labels, range(10)).all():
            raise ValueError("it has no labels, or others than 0 to 9")
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        if isinstance(error, UserError):
            raise
        what = " and ".join(map(str, paths))
        raise UserError(f"cannot read the {part} part in {what} ({error}): get the file again.") from None
    return found


def _arrays(part: Part, path: Path) -> Digits:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        x, y = file[f"x_{part}"], file[f"y_{part}"]
    if x.shape[1:] not in ((SIZE, SIZE), (SIZE, SIZE, 3)):
        raise ValueError(f"x_{part} has shape {x.shape} and not [n, {SIZE}, {SIZE}] or [n, {SIZE}, {SIZE}, 3]")
    return _in_memory(x, y)


def _idx(_: Part, images: Path, labels: Path) -> Digits:
    return _in_memory(_idx_values(images), _idx_values(labels))


def _idx_values(path: Path) -> Pixels:
    """Read the format of MNIST: two zeros, the type, the number of dimensions, their sizes, the values."""
    content = _content(path)
    if content[:3] != b"\0\0\x08" or len(content) < 8:
        raise ValueError(f"{path.name} is not an idx file of bytes")
    sizes = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes.astype(int))


def _zip_codes(_: Part, path: Path) -> Digits:
    """Read USPS as in the book's files: a row is the digit and its 256 pixels."""
    rows = np.array(_content(path).split(), np.float64).reshape(-1, 1 + 16 * 16)
    return _in_memory(_grey(rows[:, 1:]), rows[:, 0])


def _libsvm(_: Part, path: Path) -> Digits:
    """Read USPS as in LIBSVM's files: a row is the digit plus 1, then the number of each pixel and its value."""
    rows = [np.array(line.replace(b":", b" ").split(), np.float64) for line in _content(path).splitlines()]
    values = np.zeros((len(rows), 16 * 16))
    for row, fields in enumerate(rows):
        places = fields[1::2].astype(int) - 1
        if len(fields) % 2 == 0 or not np.isin(places, range(16 * 16)).all():
            raise ValueError(f"line {row + 1} is not a label and up to 256 pixels")
        values[row, places] = fields[2::2]
    return _in_memory(_grey(values), np.array([fields[0] - 1 for fields in rows]))


def _grey(values: NDArray[np.float64]) -> Pixels:
    """Return values from -1 to 1 as grey images [n, 16, 16] of bytes."""
    if not (np.abs(values) <= 1).all():
        raise ValueError("a pixel is not between -1 and 1")
    return np.rint((values + 1) * 127.5).astype(np.uint8).reshape(-1, 16, 16)


def _matlab(_: Part, path: Path) -> Digits:
    """Read SVHN: X is [32, 32, 3, n], and the digit 0 has the label 10."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise UserError(f"reading {path} needs scipy: pip install 'feddar[images]'.") from error
    try:
        content = loadmat(path, variable_names=("X", "y"))
        x, y = np.moveaxis(content["X"], 3, 0), content["y"].ravel()
    except Exception as error:  # scipy raises many kinds for a damaged file
        raise ValueError(error) from None
    return _in_memory(x, np.where(y == 10, 0, y))


def _pictures(_: Part, folder: Path, table: Path) -> Digits:
    """Read MNIST-M: a line of the table is the name of an image and its digit."""
    lines = [line.split() for line in _content(table).decode().splitlines()]
    if any(len(line) != 2 for line in lines):
        raise ValueError(f"{table.name} has lines other than FILE DIGIT")
    files = [folder / name for name, _ in lines]
    labels = np.array([int(digit) for _, digit in lines])

    def images(rows: Ints) -> Pixels:
        found: Pixels = read_images([files[row] for row in rows], SIZE).permute(0, 2, 3, 1).numpy()
        return found

    return Digits(labels, images)


def _in_memory(x: NDArray[Any], y: NDArray[Any]) -> Digits:
    """Return ``Digits`` from images in memory, [n, height, width] or [n, height, width, 3]."""
    if x.dtype != np.uint8 or x.shape[3:] not in ((), (3,)) or x.ndim < 3:
        raise ValueError(f"the images have shape {x.shape} ({x.dtype}); expected are bytes, grey or RGB")
    if y.shape != (len(x),) or y.dtype.kind not in "uif":
        raise ValueError(f"there are {len(x)} images, and labels of shape {y.shape} ({y.dtype})")
    return Digits(y.astype(np.int64), lambda rows: _in_colour(_resized(x[rows])))


def _resized(images: Pixels) -> Pixels:
    if images.shape[1:3] == (SIZE, SIZE) or not len(images):
        return images
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("resizing images needs Pillow: pip install 'feddar[images]'.") from error
    small = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for image in images]
    return np.stack([np.asarray(image) for image in small])


def _in_colour(images: Pixels) -> Pixels:
    return images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=3)


def _content(path: Path) -> bytes:
    opened = gzip.open if path.suffix == ".gz" else bz2.open if path.suffix == ".bz2" else open
    with opened(path, "rb") as stream:
        content: bytes = stream.read()
    return content


def _own(name: str) -> Format:
    return Format((f"{name}.npz",), (f"{name}.npz",), _arrays)


FORMATS = {
    "mnist": (
        _own("mnist"),
        Format(
            ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
            _idx,
        ),
    ),
    "usps": (
        _own("usps"),
        Format(("zip.train",), ("zip.test",), _zip_codes),
        Format(("usps",), ("usps.t",), _libsvm),
    ),
    "mnist_m": (
        _own("mnist_m"),
        Format(
            ("mnist_m_train/", "mnist_m_train_labels.txt"),
            ("mnist_m_test/", "mnist_m_test_labels.txt"),
            _pictures,
        ),
    ),
    "svhn": (_own("svhn"), Format(("train_32x32.mat",), ("test_32x32.mat",), _matlab)),
}
