"""Our steps against torch.optim's, to the bit."""

import pytest
import torch

from feddar.algorithm import optimizers
from feddar.algorithm.local_training import make_step
from feddar.algorithm.optimizers import adam, sgd
from feddar.algorithm.protocol import Phase


@pytest.mark.parametrize("gathered", [0, 10_000], ids=["one by one", "gathered"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (sgd, torch.optim.SGD, {}),
        (sgd, torch.optim.SGD, {"momentum": 0.9}),
        (adam, torch.optim.Adam, {}),
    ],
)
def test_steps_are_torchs_to_the_bit(ours, theirs, options, dtype, weight_decay, gathered, monkeypatch):
    monkeypatch.setattr(optimizers, "GATHERED", gathered)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((7, 5), (3,), ())]
    mine, yours = ([value.clone() for value in start] for _ in range(2))
    step = ours(mine, lr=0.05, weight_decay=weight_decay, **options)
    optimizer = theirs(yours, lr=0.05, weight_decay=weight_decay, **options)
    for _ in range(25):
        for a, b in zip(mine, yours, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=dtype)
            b.grad = a.grad.clone()
        step()
        optimizer.step()
    for a, b in zip(mine, yours, strict=True):
        assert torch.equal(a, b)
    assert (len({a.untyped_storage().data_ptr() for a in mine}) == 1) == bool(gathered)


@pytest.mark.parametrize("gathered", [0, 10_000], ids=["one by one", "gathered"])
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_parameter_without_a_gradient_stays(make, gathered, monkeypatch):
    monkeypatch.setattr(optimizers, "GATHERED", gathered)
    used, unused = torch.zeros(2), torch.ones(2)
    used.grad = torch.ones(2)
    make([used, unused], lr=0.1, weight_decay=0.1)()
    assert (used < 0).all()
    assert torch.equal(unused, torch.ones(2))


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("adam", torch.optim.Adam, {}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a_phase_says_the_whole_optimiser(name, theirs, options):
    mine, yours = (torch.tensor([1.0, -2.0], dtype=torch.float64) for _ in range(2))
    step = make_step(Phase("heads", lr=0.03, optimizer=name, momentum=0.9, weight_decay=0.2), [mine])
    optimizer = theirs([yours], lr=0.03, weight_decay=0.2, **options)
    for slope in ([1.0, 2.0], [0.5, -1.0], [3.0, 0.0]):
        mine.grad, yours.grad = (torch.tensor(slope, dtype=torch.float64) for _ in range(2))
        step()
        optimizer.step()
    assert torch.equal(mine, yours)
