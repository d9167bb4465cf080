"""Rendered digits: our own fifth source of digits, in place of SynthDigits, which is not available.

A digit in one of Matplotlib's fonts, of random size, place, slant and colour, on a background of another colour, with
parts of other digits at the sides (as in photos of house numbers), blurred and noisy. Each image depends only on its
number and part (train or test): nothing is stored, and only images that were drawn for a client are rendered.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from feddar.data.sources.image_pool import Ints
from feddar.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

SIZE = 28
CANVAS = 56
"""Digits are drawn at twice the size and reduced, which smooths their edges."""
FONTS = ("DejaVu", "STIXGeneral", "cmr", "cmb", "cmss", "cmtt")
HEIGHTS = tuple(range(30, 51, 4))
_SEED = {"train": 1, "test": 2}


def labels(count: int) -> Ints:
    """Return the labels of the first ``count`` images: 0 to 9, repeated."""
    return np.arange(count) % 10


def draw(numbers: Ints, part: str) -> NDArray[np.uint8]:
    """Render the images of these numbers, [n, 28, 28, 3]."""
    images = [_render(int(number), part) for number in numbers]
    return np.stack(images) if images else np.empty((0, SIZE, SIZE, 3), np.uint8)


def _render(number: int, part: str) -> NDArray[np.uint8]:
    from PIL import Image, ImageFilter

    rng = np.random.default_rng([_SEED[part], number])
    paper, ink = _two_colours(rng)
    mask = Image.new("L", (CANVAS, CANVAS))
    height = int(rng.choice(HEIGHTS))
    _write(mask, number % 10, height, rng, shift=rng.uniform(-5, 5, 2))
    for side in (-1, 1):
        if rng.random() < 0.6:
            aside = side * (0.62 * height + rng.uniform(0, 8))
            _write(mask, int(rng.integers(10)), height, rng, shift=np.array([aside, rng.uniform(-5, 5)]))
    soft = mask.filter(ImageFilter.GaussianBlur(rng.uniform(0, 2.2))).resize((SIZE, SIZE), Image.Resampling.BOX)
    share = np.asarray(soft, np.float64)[..., None] / 255
    light = np.linspace(-1, 1, SIZE)[:, None, None] * rng.uniform(-20, 20, 3)
    noise = rng.normal(0, rng.uniform(0, 12), (SIZE, SIZE, 3))
    image = paper * (1 - share) + ink * share + light + noise
    return np.clip(image, 0, 255).astype(np.uint8)


def _two_colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw two colours, background and ink, that differ enough."""
    while True:
        paper, ink = rng.uniform(0, 255, (2, 3))
        if np.abs(paper - ink).sum() > 180:
            return paper, ink


def _write(mask: Image, digit: int, height: int, rng: np.random.Generator, shift: np.ndarray) -> None:
    """Write a rotated digit into the mask, with its centre moved from the mask's centre by `shift` pixels."""
    from PIL import Image, ImageDraw

    fonts = _fonts()
    letter = Image.new("L", (CANVAS, CANVAS))
    font = _font(fonts[int(rng.integers(len(fonts)))], height)
    middle = (CANVAS / 2, CANVAS / 2)
    ImageDraw.Draw(letter).text(middle, str(digit), fill=255, font=font, anchor="mm")
    turned = letter.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR)
    x, y = np.round(shift).astype(int)
    mask.paste(255, (int(x), int(y)), turned)


@cache
def _fonts() -> tuple[Path, ...]:
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the digits of 'synth' need Matplotlib's fonts: pip install 'feddar[plots]'.") from error
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = sorted(folder.glob("*.ttf"))
    return tuple(path for path in names if path.name.startswith(FONTS) and "Display" not in path.name)


@cache
def _font(path: Path, height: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(path, height)
