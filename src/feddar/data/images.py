"""Images: read and kept as pixels from 0 to 255, and standardised when an encoder gets them.

A byte per pixel takes a quarter of a float's memory, also on the way to a worker process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddar.data.dicom import AGAIN, UnusableDicomError, is_dicom, read_dicom
from feddar.data.dicom import SUFFIXES as DICOM
from feddar.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", *DICOM)
DEEPEST = 2**16 - 1
"""The greatest value of a scan of 16 bits."""
BYTES_AT_ONCE = 2**24
"""Images are decoded so many bytes of pixels at a time."""
MOST_NAMED = 3
"""Of images that cannot be read, so many are named, and the others counted."""


@dataclass(frozen=True)
class Scaling:
    """Mean and standard deviation of each channel, for pixels scaled to 0..1."""

    mean: tuple[float, ...]
    sd: tuple[float, ...]


IMAGENET = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The scaling that encoders pretrained on ImageNet expect."""


def scaling_for(channels: int) -> Scaling:
    """Return the default scaling of images with so many channels."""
    return IMAGENET if channels == 3 else Scaling((0.5,) * channels, (0.5,) * channels)


class Scale(nn.Module):
    """Standardises pixels from 0 to 255. Its mean and sd are constants and not part of the state dict."""

    mean: Tensor
    sd: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        for name, values in (("mean", scaling.mean), ("sd", scaling.sd)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return standardised images."""
        return (pixels.to(self.mean.dtype) / 255 - self.mean) / self.sd


class Unreadable(NamedTuple):
    """An image that is missing or damaged, by its index in the list of files."""

    row: int
    path: Path
    reason: str
    remedy: str


class UnreadableImagesError(UserError):
    """Images that are missing or damaged: all of them, in one sentence that names the first few."""

    def __init__(self, images: Sequence[Unreadable], of: str = "") -> None:
        named = [f"{image.path} ({image.reason})" for image in images[:MOST_NAMED]]
        more = f" and {len(images) - len(named):,} more" if len(images) > len(named) else ""
        remedies = "; ".join(dict.fromkeys(image.remedy for image in images[:MOST_NAMED]))
        what = "the image" if len(images) == 1 else f"{len(images):,} images:"
        super().__init__(f"cannot read {what} {', '.join(named)}{more}{of}: {remedies}.")
        self.images = tuple(images)


def read_images(files: Sequence[Path], size: int) -> Tensor:
    """Decode images of any size as RGB [n, 3, size, size]; see ``decoded`` for what cannot be read."""
    pixels = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    first = 0
    for batch in decoded(files, size):
        pixels[first : first + len(batch)] = batch
        first += len(batch)
    return pixels


def decoded(files: Sequence[Path], size: int) -> Iterator[Tensor]:
    """Yield images of any size as RGB [n, 3, size, size], some at a time, in their order and all in the same memory.

    At the end, those that are missing or damaged are one ``UnreadableImagesError``; in their places there is nothing
    of use.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError("reading images needs Pillow: pip install 'feddar[images]'.") from error
    unreadable: list[Unreadable] = []
    step = max(1, BYTES_AT_ONCE // (3 * size * size))
    # Used again and again: allocated for each batch, it would leave memory in pieces.
    buffer = torch.empty(min(step, len(files)), 3, size, size, dtype=torch.uint8)
    # Decoding releases Python's lock, so threads help.
    with ThreadPoolExecutor() as readers:
        for first in range(0, len(files), step):
            some = files[first : first + step]
            pixels = buffer[: len(some)]
            problems = readers.map(_read_into, pixels.numpy(), some, chunksize=64)
            unreadable += [Unreadable(first + i, some[i], *why) for i, why in enumerate(problems) if why]
            yield pixels
    if unreadable:
        raise UnreadableImagesError(unreadable)


def _read_into(pixels: NDArray[np.uint8], file: Path) -> tuple[str, str] | None:
    """Write an image into ``pixels`` [3, size, size]; return why not and what to do, if it cannot be read."""
    from PIL import Image

    size = pixels.shape[-1]
    try:
        small = _opened(file, size).resize((size, size), Image.Resampling.BILINEAR)
        pixels[:] = np.asarray(small).transpose(2, 0, 1)
    except UnusableDicomError as problem:
        return str(problem), problem.remedy
    except UserError:
        raise
    except FileNotFoundError:
        return "there is no such file", "mend the path, or take out its row"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return str(getattr(error, "strerror", None) or error), AGAIN
    return None


def _opened(file: Path, size: int) -> Picture:
    """Return an image as RGB of 8 bits, of at least about the wanted size."""
    from PIL import Image

    if is_dicom(file):
        return Image.fromarray(read_dicom(file)).convert("RGB")
    with Image.open(file) as image:
        # Lets a JPEG be decoded directly at about the wanted size, which is much faster for large ones.
        image.draft("RGB", (size, size))
        return _in_colour(image)


def _in_colour(image: Picture) -> Picture:
    """Return an image as 8-bit RGB.

    Grey scans with whole numbers of 16 bits are scaled from all 16, so that the same value is the same grey in every
    file; other numbers (of 32 bits, or with a fraction), which have no common range, from the least to the greatest.
    """
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    from PIL.Image import fromarray

    grey = np.asarray(image, np.float64)
    least, greatest = float(grey.min()), float(grey.max())
    if image.mode != "F" and least >= 0 and greatest <= DEEPEST:
        least, greatest = 0, DEEPEST
    shares = (grey - least) / max(greatest - least, 1e-12)
    return fromarray((255 * shares).round().astype(np.uint8)).convert("RGB")
