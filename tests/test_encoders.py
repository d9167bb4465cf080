"""Image encoders: sizes as published, shapes, and what is loaded."""

import os

import pytest
import torch
from torch import nn

from feddar.cohort import Cohort
from feddar.encoders import build_encoder, networks
from feddar.errors import UserError


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def holding(inputs):
    """A cohort with these inputs."""
    return Cohort.from_arrays(inputs, torch.arange(len(inputs[0])) % 2, classes=[0, 1])


def images(channels=3, size=32):
    return (torch.randn(2, channels, size, size),)


@pytest.mark.parametrize(
    ("name", "inputs", "features", "size"),
    [
        (
            "digit-cnn",
            images(size=28),
            512,
            14_219_210 - 5_130,
        ),  # with its head of 10 classes 14.2 million, as published
        ("resnet34", images(), 512, 21_797_672 - 513_000),  # He et al.'s, without its last layer
        ("resnet34", images(channels=1), 512, 21_797_672 - 513_000 - 2 * 64 * 49),
        ("efficientnet-lite0", images(), 1280, 4_652_008 - 1_281_000),
        ("maps", images(channels=112, size=6), 64, 112 * 32 + 32 + 32 * 36 * 64 + 64),
    ],
)
def test_encoders_have_their_published_size_and_train_on_a_batch_of_two(name, inputs, features, size):
    encoder = build_encoder(name, holding(inputs), None)
    assert parameters(encoder) == size
    out = encoder.train()(*inputs)
    assert out.shape == (2, features)
    out.sum().backward()
    assert encoder.eval()(*inputs).isfinite().all()


def test_efficientnet_comes_with_weights_that_know_images():
    one, other = (build_encoder("efficientnet-lite0", holding(images()), None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    maps = networks.FrozenStages()
    assert maps(torch.randn(2, 3, 96, 96)).shape == (2, 112, 6, 6)
    assert not any(parameter.requires_grad for parameter in maps.parameters())


def test_the_frozen_stages_are_the_networks_first():
    network, image = networks.efficientnet_lite0().eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        maps = networks.FrozenStages()(image)
        for block in network._blocks[networks.FrozenStages.BLOCKS :]:
            maps = block(maps)
        rest = network._swish(network._bn1(network._conv_head(maps))).mean((2, 3))
        torch.testing.assert_close(rest, network(image))


def test_flips_mirror_some_images_in_training_and_none_otherwise():
    encoder = build_encoder("resnet34+flip", holding(images()), None)
    flip, image = encoder[0], torch.randn(40, 3, 4, 4)
    assert flip.eval()(image) is image
    out = flip.train()(image)
    same = (out == image).flatten(1).all(1)
    mirrored = (out == image.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 5 < same.sum() < 35


def test_resnet_takes_a_state_dict_with_a_last_layer_of_its_own(tmp_path):
    source = networks.resnet34()
    state = source.state_dict() | {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    torch.save(state, tmp_path / "weights.pth")
    loaded = networks.resnet34(weights=tmp_path / "weights.pth")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


class Harmful:
    """What a pickle can do when it is loaded: here, make a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_weights_that_would_run_code_are_refused(tmp_path):
    torch.save({"weight": Harmful(tmp_path / "made")}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="cannot use the weights"):
        networks.load_weights(nn.Linear(3, 3), tmp_path / "weights.pth")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", ["text", "other network"])
def test_weights_that_do_not_fit_are_one_sentence(tmp_path, content):
    path = tmp_path / "weights.pth"
    if content == "text":
        path.write_text("no weights")
    else:
        torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(UserError, match="cannot use the weights") as error:
        networks.load_weights(nn.Linear(3, 3), path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("digit-cnn", images(size=32), "28 x 28"),
        ("efficientnet-lite0", images(channels=1), "colour"),
        ("resnet34", (torch.randn(2, 5),), "images"),
        ("mlp+flip", (torch.randn(2, 5),), "takes a table, which cannot be mirrored"),
        ("resnet43", images(), "did you mean 'resnet34'"),
    ],
)
def test_what_an_encoder_cannot_take_is_said(name, inputs, said):
    with pytest.raises(UserError, match=said):
        build_encoder(name, holding(inputs), None)
