"""Small encoders for six features."""

from torch import Tensor, nn


class Dropping(nn.Module):
    """Draws random numbers while training, and has batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
