"""The paper's encoder for digits: three convolutions and two fully connected layers, all with batch norm."""

from __future__ import annotations

from torch import Tensor, nn


class DigitCNN(nn.Module):
    """Maps [batch, channels, 28, 28] to 512 features; with a head of 10 classes it has 14.2 million parameters."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_convolution(channels, 64),
            nn.MaxPool2d(2),
            *_convolution(64, 64),
            nn.MaxPool2d(2),
            *_convolution(64, 128),
            nn.Flatten(),
        )
        self.dense = nn.Sequential(*_dense(128 * 7 * 7, 2048), *_dense(2048, 512))

    def forward(self, image: Tensor) -> Tensor:
        """Return features [batch, 512]."""
        features: Tensor = self.dense(self.convolutions(image))
        return features


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU()


def _dense(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()
