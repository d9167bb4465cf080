"""Encoders that are compiled while they are trained: the same results within rounding, or as without a compiler."""

import pytest
import torch
from torch import nn

import feddar
from feddar.algorithm.names import named_state
from feddar.errors import Notice, UserError
from feddar.models.compiled import Compiled
from feddar.models.model import seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture
def cohort() -> feddar.Cohort:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return feddar.Cohort.from_arrays(x, (x[:, 0] > 0).long(), domain=["a", "b"] * 30, client=["h"] * 30 + ["i"] * 30)


def trained(cohort: feddar.Cohort, width: int = 8, **options: object) -> feddar.Run:
    with seeded(0, "encoder"):
        encoder = nn.Sequential(nn.Linear(4, width), nn.ReLU())
    return feddar.train(cohort, "feddar-sa", encoder=encoder, rounds=2, batch_size=10, validation=0, **options)


@pytest.mark.more
def test_results_are_the_same_within_rounding(cohort):
    wanted, found = (named_state(trained(cohort, batched=False, compile=each).state) for each in (False, True))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_without_a_compiler_one_sentence_says_so(cohort, monkeypatch):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    options = {"width": 7, "batched": False}  # torch keeps compiled code: of this width there never is any
    with pytest.warns(Notice, match="cannot be compiled here, and is trained without: .") as said:
        run = trained(cohort, compile=True, **options)
    assert len([each for each in said if each.category is Notice]) == 1
    wanted = named_state(trained(cohort, **options).state)
    assert all(torch.equal(value, wanted[name]) for name, value in named_state(run.state).items())


def test_what_is_wrong_with_the_inputs_is_not_hidden():
    compiled = Compiled(nn.Linear(4, 2))
    compiled.run = compiled.module
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled(torch.zeros(1, 3))


def test_what_does_not_go_together_is_refused(cohort):
    with pytest.raises(UserError, match="compile cannot train clients together"):
        trained(cohort, batched=True, compile=True)
