"""Tensors in memory that processes share."""

from contextlib import closing

import pytest
import torch

from feddar.simulation.shared_memory import Arena


@pytest.fixture
def arena():
    with closing(Arena()) as made:
        yield made


def test_tensors_of_every_kind_come_back_and_are_not_copied():
    tensors = {
        "matrix": torch.randn(3, 5).T,  # not contiguous
        "double": torch.randn(7, dtype=torch.float64),
        "half": torch.randn(3).bfloat16(),
        "number": torch.tensor(3),
        "nothing": torch.zeros(0, 10),
        "truth": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    with closing(Arena(readers=2)) as arena:
        place = arena.put(tensors)
        found, again = (arena.get(place, reader) for reader in range(2))
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert list(found) == list(tensors)
    found["matrix"].zero_()
    assert not again["matrix"].any()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())


def test_no_tensors_need_no_room(arena):
    assert arena.get(arena.put({})) == {}
    assert arena.put({})["begin"] == 0


def test_it_grows_and_what_lies_in_it_stays(arena):
    held = {}
    for size in (10, 5_000, 1_000_000, 3):
        held[size] = arena.get(arena.put({"x": torch.full((size,), float(size))}))["x"]
    arena.close()
    for size, tensor in held.items():
        assert torch.equal(tensor, torch.full((size,), float(size)))


def test_room_is_used_again_once_nothing_lies_in_it(arena):
    first = arena.get(arena.put({"x": torch.zeros(100)}))
    part = arena.get(arena.put({"x": torch.ones(1000)}))["x"][10:20].view(2, 5)
    for _ in range(100):
        arena.get(arena.put({"x": torch.full((1000,), 2.0)}))
    assert len(arena.laid) == 3
    assert part.eq(1).all(), "a view of a tensor holds its place"
    assert max(arena.laid.values()) < 3 * 5_000
    del first
    assert arena.put({"x": torch.zeros(50)})["begin"] == 0


@pytest.mark.parametrize("last", range(3))
def test_room_is_free_when_the_last_of_several_readers_has_let_go(last):
    with closing(Arena(readers=3)) as arena:
        place = arena.put({"x": torch.ones(9)})
        held = [arena.get(place, reader) for reader in range(3)]
        kept = held.pop(last)
        held.clear()
        assert arena.put({"x": torch.zeros(9)})["begin"] > 0
        assert kept["x"].eq(1).all()
        del kept
        assert arena.put({"x": torch.zeros(9)})["begin"] == 0
