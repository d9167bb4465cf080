"""The encoder of the `exam` cohort: a convolutional branch for the image, deep-and-cross for the record.

Small on purpose: a few hundred positive cases teach no more, and a training epoch must not take a second.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from feddar.datasets.exam import FEATURES

IMAGE_FEATURES = 8  # fewer numbers than the record has: pixels are many and overfit first


class ExamEncoder(nn.Module):
    """Fuses a chest X-ray, [batch, 1, height, width], and a record, [batch, 20], into [batch, features]."""

    def __init__(self, features: int = 32, record_size: int = len(FEATURES)) -> None:
        super().__init__()
        self.features = features
        self.image = nn.Sequential(
            *_convolve(1, 8, size=5, stride=4),
            *_convolve(8, 16, size=3, stride=2),
            Places(4),  # coarse places survive: where an opacity lies matters
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, IMAGE_FEATURES),
        )
        self.cross = CrossLayer(record_size)
        self.deep = nn.Sequential(nn.Linear(record_size, 64), nn.ReLU(), nn.Linear(64, features), nn.ReLU())
        width = IMAGE_FEATURES + features + record_size
        self.fuse = nn.Sequential(
            nn.BatchNorm1d(width),
            nn.Linear(width, features),
            nn.ReLU(),
        )

    def forward(self, image: Tensor, record: Tensor) -> Tensor:
        """The shared representation of a batch of cases."""
        parts = [self.image(image), self.deep(record), self.cross(record)]
        fused: Tensor = self.fuse(torch.cat(parts, dim=1))
        return fused


class Places(nn.Module):
    """Average over a grid of so many places in height and width; maps that have this size already pass as they are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps [batch, channels, size, size]."""
        return maps if maps.shape[2:] == (self.size, self.size) else adaptive_avg_pool2d(maps, self.size)


class CrossLayer(nn.Module):
    """x + x * (W x + b): products of pairs of values (Deep & Cross Network V2, Wang et al., 2021)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Add the products."""
        crossed: Tensor = x + x * self.linear(x)
        return crossed


def _convolve(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )
