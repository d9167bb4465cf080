"""Training in lower precision, for real on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import feddar
from feddar.algorithm.loss_scaling import LARGEST, ScaledLoss, backward_of, plain
from feddar.algorithm.names import named_state
from feddar.errors import UserError
from feddar.models.model import seeded


class Watched(nn.Module):
    """A small network that keeps the dtypes of its features, by whether it is being trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        SEEN.add((self.training, features.dtype))
        return features


SEEN: set[tuple[bool, torch.dtype]] = set()


@pytest.fixture
def cohort() -> feddar.Cohort:
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    client = ["h"] * 120 + ["i"] * 120
    return feddar.Cohort.from_arrays(x, (x[:, 0] + x[:, 1] > 0).long(), domain=["a", "b"] * 120, client=client)


def trained(cohort: feddar.Cohort, **options: Any) -> feddar.Run:
    SEEN.clear()
    with seeded(0, "watched"):
        encoder = Watched()
    return feddar.train(cohort, encoder=encoder, rounds=4, lr=1e-2, validation=0, **options)


@pytest.mark.parametrize(("precision", "lower"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("method", ["feddar-sa", "fedprox"])
def test_only_encoders_in_training_have_lower_precision(cohort, method, precision, lower):
    full = trained(cohort, method=method)
    assert {(True, torch.float32), (False, torch.float32)} == SEEN or method == "fedprox"
    run = trained(cohort, method=method, precision=precision)
    run.evaluate(cohort)
    assert {(True, lower), (False, torch.float32)} == SEEN
    wanted, found = named_state(full.state), named_state(run.state)
    assert {name: value.dtype for name, value in wanted.items()} == {name: v.dtype for name, v in found.items()}
    assert any(not torch.equal(value, found[name]) for name, value in wanted.items())
    for name, value in wanted.items():
        assert torch.allclose(value, found[name], atol=0.1), name
    losses = [each.history.query("split == 'train'")["value"].iloc[-1] for each in (full, run)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_fp32_is_as_ever(cohort):
    before, after = (named_state(trained(cohort, **how).state) for how in ({}, {"precision": "fp32"}))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_scaled_gradients_are_those_of_the_loss():
    weight = torch.tensor([3.0], requires_grad=True)
    assert backward_of(torch.float16, [weight])(weight.square().sum())
    assert weight.grad == 6.0
    assert backward_of(torch.bfloat16, [weight]) is backward_of(None, [weight]) is plain


def test_a_step_that_overflows_is_left_out_and_the_scale_halved():
    weight = torch.tensor([1.0], requires_grad=True)
    scaled, slope = ScaledLoss([weight]), 1e4  # in fp16 the scaled slope overflows until the scale is 4
    found = []
    while not found or not found[-1]:
        weight.grad = None
        found.append(scaled((weight.half() * slope).float().sum()))
    assert scaled.scale == 4 and found == [False] * 14 + [True] and LARGEST == 2**16
    assert weight.grad == pytest.approx(slope, rel=1e-3)


def test_a_loss_that_is_not_finite_is_not_hidden():
    weight = torch.tensor([1.0], requires_grad=True)
    scaled = ScaledLoss([weight])
    used = [scaled((weight * float("nan")).sum()) for _ in range(17)]
    assert used == [False] * 16 + [True]


def test_what_does_not_go_together_is_refused(cohort):
    with pytest.raises(UserError, match="precision bf16 is for dtype float32"):
        trained(cohort, precision="bf16", dtype="float64")
    with pytest.raises(UserError, match="precision bf16 cannot train clients together"):
        feddar.train(cohort, precision="bf16", batched=True, rounds=1)
