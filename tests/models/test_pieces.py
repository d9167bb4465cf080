"""Features of a frozen encoder are computed for some samples at a time, and for fewer of large images."""

import pytest
import torch
from torch import Tensor, nn

from feddar.models.model import Model
from feddar.objectives import KINDS


class Means(nn.Module):
    """The mean of each channel; keeps how many samples it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(len(x))
        return x.float().mean((2, 3))


@pytest.mark.parametrize(("size", "pieces"), [(4, [512, 88]), (128, [341, 259])])
def test_pieces_by_the_size_of_images(size, pieces):
    images = torch.randint(0, 256, (600, 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    body = Means()
    model = Model(next(iter(KINDS)), body, 3, bias=False)
    found = model.frozen_features((images,), torch.zeros(600, dtype=torch.long))
    assert body.given == pieces
    torch.testing.assert_close(found, images.float().mean((2, 3)))
