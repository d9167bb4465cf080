"""Small convolutional encoders: one for images of any size, one for feature maps of a frozen network."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from feddar.models.devices import beside


class SmallCNN(nn.Module):
    """Three blocks of 3x3 convolution, batch norm, ReLU and pooling, and a dense layer with ``features`` outputs."""

    def __init__(self, channels: int, features: int = 128) -> None:
        super().__init__()
        widths = (channels, 16, 32, 64)
        stages = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(widths)
        ]
        self.stages = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(3), nn.Flatten())
        self.out = nn.Sequential(nn.Linear(widths[-1] * 9, features), nn.ReLU())

    def forward(self, image: Tensor) -> Tensor:
        """Return features [batch, features]."""
        features: Tensor = self.out(self.stages(image))
        return features


class Dropout(nn.Dropout):
    """Dropout whose mask is drawn on the CPU, so that it is the same on every device."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the values, in training mode with some of them at random as 0 and the others scaled up."""
        if not self.training:
            return values
        kept = torch.empty(values.shape, dtype=values.dtype).bernoulli_(1 - self.p).div_(1 - self.p)
        return values * beside(kept, values)


class MapsEncoder(nn.Module):
    """Batch norm, a 1x1 convolution, dropout and one dense layer on feature maps: few weights, for few samples."""

    def __init__(self, channels: int, places: int, mixed: int = 32, features: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels, affine=False),
            nn.Conv2d(channels, mixed, 1),
            nn.ReLU(),
            nn.Flatten(),
            Dropout(0.5),
            nn.Linear(mixed * places, features),
            nn.ReLU(),
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Return features [batch, features]."""
        features: Tensor = self.layers(maps)
        return features
