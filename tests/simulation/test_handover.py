"""Objects that are handed to another process: the same there, with what they share, and without traces here."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn

from feddar.data.image_cache import StoredImages, in_memory
from feddar.simulation import handover
from feddar.simulation.handover import NotHandedOverError, hand_over, hand_over_all


@pytest.fixture(autouse=True)
def traces(monkeypatch, tmp_path):
    """The files that are made on the way."""
    monkeypatch.setattr(handover.tempfile, "tempdir", str(tmp_path / "way"))
    (tmp_path / "way").mkdir()
    return lambda: list((tmp_path / "way").iterdir())


def test_tensors_arrive_with_values_shapes_and_kinds(traces):
    whole = torch.arange(12.0).view(3, 4)
    given = {
        "transposed": whole.T,
        "part": whole[1:, ::2],
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "exact": torch.tensor([0.1], dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(7),
        "trained": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    }
    found = hand_over(given).take()
    for name, value in given.items():
        there = found[name]
        assert torch.equal(there, value) and there.dtype == value.dtype and there.stride() == value.stride()
        assert type(there) is type(value) and there.requires_grad == value.requires_grad
    assert not traces()


def test_memory_that_is_shared_travels_once(traces):
    whole = torch.zeros(1000)
    layer = nn.Linear(10, 10)
    tied = nn.Sequential(layer, layer)
    on_its_way = hand_over(([whole[n : n + 10] for n in range(0, 1000, 10)], tied))
    assert traces()[0].stat().st_size < 4 * 1000 + 4 * 110 + 3 * 64
    _, found = on_its_way.take()
    assert found[0].weight is found[1].weight


def test_what_is_changed_there_is_not_changed_here():
    value = torch.zeros(3)
    on_its_way = hand_over(value)
    on_its_way.take().fill_(1)
    assert value.eq(0).all()


def test_mappings_that_cannot_be_changed(traces):
    found = hand_over(MappingProxyType({"a": torch.ones(1)})).take()
    assert type(found) is MappingProxyType and found["a"] == 1


def test_images_in_a_file_stay_there(tmp_path, traces):
    path = tmp_path / "images.pixels"
    path.write_bytes(bytes(range(48)) * 10)
    stored = torch.from_file(str(path), size=480, dtype=torch.uint8).view(-1, 3, 4, 4)
    images = StoredImages(stored, torch.arange(10), path)[2:5]
    on_its_way = hand_over(images)
    assert traces()[0].stat().st_size < 480
    found = on_its_way.take()
    assert isinstance(found, StoredImages) and torch.equal(in_memory(found), in_memory(images))


def test_nothing_is_left_of_what_cannot_be_handed_over(traces):
    with pytest.raises(NotHandedOverError, match="lambda"):
        hand_over([torch.ones(3), lambda: None])
    with pytest.raises(NotHandedOverError):
        hand_over_all([torch.ones(3), lambda: None])
    assert not traces()


def test_what_nobody_takes_is_deleted(traces):
    on_its_way = hand_over(torch.ones(3))
    assert Path(on_its_way.file).stat().st_mode & 0o077 == 0
    on_its_way.delete()
    on_its_way.delete()
    assert not traces()
