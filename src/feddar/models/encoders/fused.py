"""An encoder of an image and a record (table row) of the same patient: two branches, fused, as in the paper's EXAM.

The image branch is any image encoder; the small one here suits a few thousand images with a few hundred positive
cases. The record branch is a deep & cross network.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

IMAGE_FEATURES = 8  # fewer than a record has, since the image branch overfits first


class Fused(nn.Module):
    """Fuses an image, [batch, channels, height, width], and a record into [batch, features].

    ``image`` maps the former to ``image_features`` numbers, and ``record`` the latter to ``record_features``.
    """

    def __init__(
        self, image: nn.Module, image_features: int, record: nn.Module, record_features: int, features: int = 32
    ) -> None:
        super().__init__()
        self.image = image
        self.record = record
        self.cross = CrossLayer(record_features)
        self.deep = nn.Sequential(nn.Linear(record_features, 64), nn.ReLU(), nn.Linear(64, features), nn.ReLU())
        width = image_features + features + record_features
        self.fuse = nn.Sequential(
            nn.BatchNorm1d(width),
            nn.Linear(width, features),
            nn.ReLU(),
        )

    def forward(self, image: Tensor, *record: Tensor) -> Tensor:
        """Return features [batch, features]."""
        values = self.record(*record)
        parts = [self.image(image), self.deep(values), self.cross(values)]
        fused: Tensor = self.fuse(torch.cat(parts, dim=1))
        return fused


def small_branch(channels: int) -> nn.Module:
    """Return the small image branch, with ``IMAGE_FEATURES`` outputs."""
    return nn.Sequential(
        *_convolve(channels, 8, size=5, stride=4),
        *_convolve(8, 16, size=3, stride=2),
        GridPooling(4),  # a 4x4 grid keeps coarse positions: it matters where an opacity is
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, IMAGE_FEATURES),
    )


class GridPooling(nn.Module):
    """Average pooling to a grid [size, size]; maps that already have this size are returned as they are."""

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
        """Return x + x * (W x + b)."""
        crossed: Tensor = x + x * self.linear(x)
        return crossed


def _convolve(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )
