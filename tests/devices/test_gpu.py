"""On a real GPU, where there is one: as on the CPU up to rounding; images that are fed, precisions, compiling, jobs."""

import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.models import devices
from feddar.models.devices import cuda_devices
from helpers.cohorts import make_cohort

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_devices() and not devices.has_mps(), reason="there is no GPU here"),
]
OPTIONS = {"rounds": 2, "validation": 0, "optimizer": "sgd"}


def images() -> feddar.Cohort:
    pixels = torch.randint(0, 256, (48, 3, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return feddar.Cohort.from_arrays(pixels, [0, 1] * 24, client=["h"] * 24 + ["i"] * 24)


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("method", feddar.METHODS)
def test_every_method_gives_what_the_cpu_gives(method, batched):
    longer = {"rounds": 3, "tune_rounds": 1} if feddar.METHODS[method].start else {}
    here, there = (
        feddar.train(make_cohort(clients=4), method, batched=batched, device=device, **OPTIONS | longer)
        for device in ("cpu", "auto")
    )
    for name, value in named_state(here.state).items():
        torch.testing.assert_close(named_state(there.state)[name], value, rtol=1e-2, atol=1e-3)


def test_images_that_do_not_stay_on_the_device_give_the_same(monkeypatch):
    staying = feddar.train(images(), encoder="cnn", device="auto", **OPTIONS)
    monkeypatch.setattr(devices, "free_memory", lambda _: 0)
    fed = feddar.train(images(), encoder="cnn", device="auto", **OPTIONS)
    for name, value in named_state(staying.state).items():
        torch.testing.assert_close(named_state(fed.state)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", [{"precision": "bf16"}, {"precision": "fp16"}, {"compile": True}])
def test_losses_are_about_those_of_full_precision(how):
    plain, other = (feddar.train(images(), encoder="cnn", device="auto", **OPTIONS | each) for each in ({}, how))
    losses = [run.history.query("split == 'train'")["value"].iloc[-1] for run in (plain, other)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_clients_and_cells_are_spread_over_processes():
    compared = feddar.compare(
        make_cohort(), methods="fedavg,feddar-sa", folds=2, jobs=2, device="auto", references=False, rounds=2
    )
    assert not compared.failures and len(compared.results)
    run = feddar.train(make_cohort(), jobs=2, batched=False, device="auto", **OPTIONS)
    assert run.round == 2
