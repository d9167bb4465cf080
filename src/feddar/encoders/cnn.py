"""A small convolutional encoder with batch norm, for images of any size: three stages, then a mean over places."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Conv 3x3, batch norm, ReLU and pooling, three times; gives ``features`` numbers per image."""

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
