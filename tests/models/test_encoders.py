"""Encoders: sizes as published, shapes, weights from files, and encoders of the user's own."""

import os
import pickle
import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import feddar
from feddar.data.cohort import Cohort
from feddar.errors import Notice, UserError
from feddar.models.encoders import build_encoder, networks
from feddar.models.encoders.own import allow_code
from feddar.models.encoders.weights import load_weights
from helpers.cohorts import make_cohort


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
        ("densenet121", images(), 1024, 7_978_856 - 1_025_000),  # Huang et al.'s, without its last layer
        ("densenet121", images(channels=1), 1024, 7_978_856 - 1_025_000 - 2 * 64 * 49),
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


def save(state, path):
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def other_weights(network):
    found = network.state_dict().items()
    return {name: torch.rand_like(value) if value.is_floating_point() else value for name, value in found}


def assert_same(encoder, state):
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())


def test_resnet_takes_a_state_dict_with_a_last_layer_of_its_own(tmp_path):
    network = networks.resnet34()
    last = {"fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    state = other_weights(network) | last
    assert load_weights(network, save(state, tmp_path / "weights.pth")) == list(last)
    assert_same(network, state)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("name", ["cnn", "cnn+flip", "own"])
def test_any_encoder_starts_from_a_file(tmp_path, name, suffix):
    sample = holding(images(size=16))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)) if name == "own" else name
    made = build_encoder("cnn" if name == "cnn+flip" else encoder, sample, None)
    state = other_weights(made)
    path = save(state, tmp_path / f"weights.{suffix}")
    found = build_encoder(encoder, sample, None, str(path))
    assert_same(found[1] if name == "cnn+flip" else found, state)
    assert found is not encoder  # what the user gave stays as it is


def test_beside_a_record_the_weights_are_those_of_the_image_network(tmp_path):
    pair = (*images(size=16), torch.randn(2, 5))
    state = other_weights(build_encoder("cnn", holding(images(size=16)), None))
    path = save(state, tmp_path / "weights.safetensors")
    fused = build_encoder("cnn", holding(pair), None, str(path))
    assert fused(*pair).shape == (2, 32)
    assert_same(fused.image[0], state)


@pytest.mark.parametrize("layout", ["MONAI", "torchvision", "old torchvision"])
def test_densenet_takes_the_layouts_of_monai_and_torchvision(tmp_path, layout):
    state = other_weights(networks.densenet121())
    last = "class_layers.out" if layout == "MONAI" else "classifier"
    saved = state | {f"{last}.weight": torch.zeros(1000, 1024), f"{last}.bias": torch.zeros(1000)}
    if layout != "MONAI":
        saved = {name.replace(".layers.", "."): value for name, value in saved.items()}
    if layout == "old torchvision":
        counted = {name: value for name, value in saved.items() if not name.endswith("num_batches_tracked")}
        saved = {re.sub(r"(denselayer.*(?:norm|conv))(\d)", r"\1.\2", name): value for name, value in counted.items()}
    path = str(save(saved, tmp_path / "weights.pth"))
    with pytest.warns(Notice, match=rf"{last}.weight, {last}.bias in {path}, a classifier's last layer, is not used"):
        assert_same(build_encoder("densenet121", holding(images()), None, path), state)


class Harmful:
    """What a pickle can do when it is loaded: here, make a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_weights_that_would_run_code_are_refused(tmp_path):
    torch.save({"weight": Harmful(tmp_path / "made")}, tmp_path / "weights.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps({"weight": Harmful(tmp_path / "made")}))
    advice = r"holds more than tensors, which is never loaded; save a network's state_dict\(\) as safetensors\.$"
    for name in ("weights", "plain"):
        with pytest.raises(UserError, match=advice) as error:
            load_weights(nn.Linear(3, 3), tmp_path / f"{name}.pth")
        assert "weights_only" not in str(error.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text", "cannot use the weights"),
        ("nothing", "no such file"),
        (torch.zeros(3), "no tensors by name"),
        ({"epoch": 3, "state_dict": {}}, "'epoch' is no tensor"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, r"'weight' has the shape \[3, 2\].*has \[3, 3\]"),
        ({"weight": torch.zeros(3, 3)}, r"it lacks 'bias' of shape \[3\]"),
        ({**nn.Linear(3, 3).state_dict(), "more": torch.zeros(2)}, r"the encoder has no 'more', of shape \[2\]"),
        ({**nn.Linear(2, 2).state_dict()}, r"\(1 more do not fit either\)"),
    ],
)
def test_weights_that_do_not_fit_are_one_sentence_that_names_the_file(tmp_path, content, said):
    for path in (tmp_path / "weights.pth", tmp_path / "weights.safetensors"):
        if content == "text":
            path.write_text("no weights")
        elif isinstance(content, dict) and "epoch" not in content:
            save(content, path)
        elif content != "nothing":
            torch.save(content, path.with_suffix(".pth"))
            path = path.with_suffix(".pth")  # noqa: PLW2901 - safetensors holds tensors alone
        with pytest.raises(UserError, match=said) as error:
            load_weights(nn.Linear(3, 3), path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


def test_a_trained_run_needs_its_weight_file_no_more(tmp_path):
    part, test = make_cohort(n=120).split()
    state = nn.Linear(6, 4).state_dict()
    path = save(state, tmp_path / "weights.safetensors")
    encoder = nn.Linear(6, 4)
    fixed = {"encoder": encoder, "weights": str(path), "lr": 1e-9, "schedule": "constant", "out": tmp_path / "run"}
    started = feddar.train(part, rounds=1, **fixed)
    torch.testing.assert_close(started.state.encoders["all"]["encoder.weight"], state["weight"], atol=1e-6, rtol=0)
    path.unlink()
    again = feddar.load(tmp_path / "run", encoder=encoder)
    assert again.settings.weights == str(path)
    assert again.evaluate(test).equals(started.evaluate(test))
    assert feddar.train(part, rounds=2, resume=True, **fixed).standing.position.round == 2
    with pytest.raises(UserError, match="no such file"):
        feddar.train(part, encoder=encoder, weights=str(path), rounds=1)


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


NETS = """
from functools import partial

from torch import nn

class Chest(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.layer = nn.Linear(3, width)

    def forward(self, x):
        return self.layer(x).relu()

class Choosy(Chest):
    def __init__(self, width):
        super().__init__(width)

def narrow():
    return Chest(2)

wide = partial(Chest, 9)
made = Chest(4)
number = 3
text = str
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A folder on the path with modules of the user's own, which are forgotten afterwards."""
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "broken.py").write_text("import feddar\n1 / 0\n")
    (tmp_path / "lacking.py").write_text("import surely_not_installed\n")
    (tmp_path / "mistyped.py").write_text("class Chest(:\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('goodbye')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_nets", "broken", "lacking", "mistyped", "ends"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "features"), [("Chest", 5), ("narrow", 2), ("wide", 9), ("made", 4)])
def test_an_encoder_of_ones_own_is_named_by_module_and_attribute(nets, name, features):
    inputs = holding((torch.randn(4, 3),))
    allow_code(f"my_nets:{name}")
    encoder = build_encoder(f"my_nets:{name}", inputs, None)
    assert encoder(inputs.x[0]).shape == (4, features)
    with torch.no_grad():
        encoder.layer.weight.zero_()
    assert (build_encoder(f"my_nets:{name}", inputs, None).layer.weight != 0).all()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_nots:Chest", "there is no module 'my_nots': name a file of the current folder without its .py"),
        ("my_nets.py:Chest", "there is no module 'my_nets.py'"),
        ("my_nets:Chets", "the module 'my_nets' has no 'Chets': did you mean 'Chest'"),
        ("my_nets:", "must read MODULE:NAME"),
        (":Chest", "must read MODULE:NAME"),
        ("my_nets:number", "is int: name a class, a function or a torch module"),
        ("my_nets:text", "gives str when called"),
        ("my_nets:Choosy", "called without arguments, raised TypeError: .*'width'"),
        ("broken:Chest", r"importing 'broken' raised ZeroDivisionError: division by zero \(broken.py, line 2\)"),
        ("lacking:Chest", "importing 'lacking' raised ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("mistyped:Chest", r"importing 'mistyped' raised SyntaxError: .*mistyped.py, line 1\)\.$"),
        ("ends:Chest", "importing 'ends' raised SystemExit: goodbye"),
        ("my_nets:Chest+flip", "leave out \\+flip"),
    ],
)
def test_what_is_wrong_with_an_encoder_of_ones_own_is_one_sentence(nets, name, said):
    allow_code(name)
    with pytest.raises(UserError, match=said) as error:
        build_encoder(name, holding((torch.randn(4, 3),)), None)
    assert "\n" not in str(error.value)
