"""Images: read and kept as pixels from 0 to 255, and standardised when an encoder gets them.

A byte per pixel takes a quarter of a float's memory, also on the way to a worker process.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from feddar.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


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


class UnreadableImageError(UserError):
    """An image that is missing or damaged; ``row`` is its index in the list of files."""

    def __init__(self, path: Path, reason: object, row: int) -> None:
        super().__init__(f"cannot read the image {path} ({reason}): get it again, or take out its row.")
        self.path, self.row = path, row


def read_images(files: Sequence[Path], size: int) -> Tensor:
    """Decode images of any size as RGB [n, 3, size, size]; a missing or damaged one is an ``UnreadableImageError``."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("reading images needs Pillow: pip install 'feddar[images]'.") from error
    pixels = torch.empty(len(files), 3, size, size, dtype=torch.uint8)
    array = pixels.numpy()

    def read(row: int) -> None:
        try:
            with Image.open(files[row]) as image:
                # Lets a JPEG be decoded directly at about the wanted size, which is much faster for large ones.
                image.draft("RGB", (size, size))
                small = _in_colour(image).resize((size, size), Image.Resampling.BILINEAR)
                array[row] = np.asarray(small).transpose(2, 0, 1)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UnreadableImageError(files[row], getattr(error, "strerror", None) or error, row) from None

    # Decoding releases Python's lock, so threads help. Of several errors, that of the first file is raised.
    with ThreadPoolExecutor() as readers:
        for _ in readers.map(read, range(len(files)), chunksize=64):
            pass
    return pixels


def _in_colour(image: Picture) -> Picture:
    """Return an image as 8-bit RGB; grey scans with more than 8 bits are scaled from their own range."""
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    from PIL.Image import fromarray

    grey = np.asarray(image, np.float64)
    shares = (grey - grey.min()) / max(float(np.ptp(grey)), 1e-12)
    return fromarray((255 * shares).round().astype(np.uint8)).convert("RGB")
