"""Every method and encoder on a pretended GPU: nothing is on the wrong device, and the bits are those of the CPU.

There are two of them, which know of different mistakes: one of our own (``pretended_device``), strict about copies and
waiting, and one by torch's FakeTensorMode (``fake_device``), which has torch's own rules.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import feddar
from feddar.algorithm.names import named_own, named_state
from feddar.data.image_cache import StoredImages
from feddar.models.devices import beside, moved
from feddar.models.encoders import IMAGE, TABLE
from feddar.models.model import build_model
from feddar.objectives import KINDS
from feddar.results.onnx_export import ExportedModel
from feddar.settings import Settings
from feddar.simulation import stacked
from feddar.simulation.dense import DenseLayers
from helpers.fake_device import FakeDevice
from helpers.pretended_device import DeviceError, Machine, PretendedDevice, machine_with

Pretended = PretendedDevice | FakeDevice


def table(outcome: str = "binary", clients: int = 3, n: int = 60) -> feddar.Cohort:
    """Return a table with numbers, gaps and categories."""
    rng = np.random.default_rng(0)
    gaps = np.where(rng.random(n) < 0.1, np.nan, rng.normal(size=n))
    x = pd.DataFrame({"a": rng.normal(size=n), "b": gaps, "c": rng.choice(list("uvw"), n)})
    score = x["a"] + (x["c"] == "u") + rng.normal(size=n)
    y: Any = {
        "binary": (score > 0.5).astype(int),
        "multiclass": pd.cut(score, [-9, 0, 1, 9], labels=list("xyz")).astype(str),
        "regression": score,
        "multilabel": pd.DataFrame({"p": (score > 0).astype(int), "q": (score > 1).astype(int)}),
    }[outcome]
    return feddar.Cohort.from_arrays(x, y, domain=rng.choice(["d", "e"], n), client=rng.integers(clients, size=n))


def images(size: int, channels: int = 3, n: int = 12, record: bool = False) -> feddar.Cohort:
    """Return images of 8 bits, with a record beside each if asked for."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, channels, size, size), generator=generator, dtype=torch.uint8)
    x = (pixels, torch.randn(n, 2, generator=generator)) if record else pixels
    y, domain = [0, 1] * (n // 2), ["d", "d", "e"] * (n // 3)
    return feddar.Cohort.from_arrays(x, y, domain=domain, client=["h"] * (n // 2) + ["i"] * (n - n // 2))


def trained(
    monkeypatch: pytest.MonkeyPatch, kind: str, train: feddar.Cohort, test: feddar.Cohort, **options: Any
) -> tuple[feddar.Run, feddar.Run, Pretended]:
    """Train on the CPU and on a pretended device, and predict there; return both runs."""
    expected = feddar.train(train, test=test, **options)
    machine_with(kind).pretend(monkeypatch)
    with FakeDevice() if kind == "cuda:0" else PretendedDevice(kind) as device:
        run = feddar.train(train, test=test, device=kind, **options)
        run.evaluate(test)
    return expected, run, device


def by_both(every: Iterable[str], fake_in_short: Collection[str]) -> pytest.MarkDecorator:
    """Run a test with every name on our own pretended device, and on torch's: there the others are for test-more."""
    names = list(every)
    fake = [pytest.param("cuda:0", each, marks=[] if each in fake_in_short else pytest.mark.more) for each in names]
    return pytest.mark.parametrize(("kind", "name"), [*(("cuda", each) for each in names), *fake])


def require_same_bits(expected: feddar.Run, run: feddar.Run, device: Pretended) -> None:
    """Compare state, clients' own states and metrics of every round; all of them are on the CPU again."""
    pairs = [(named_state(expected.state), named_state(run.state))]
    pairs += [(named_own(own), named_own(run.own[name])) for name, own in expected.own.items()]
    for before, after in pairs:
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert not device.holds(after[name]), name
            assert torch.equal(value, after[name]), name
    pd.testing.assert_frame_equal(expected.history, run.history, check_exact=True)
    assert device.copies["to"] > 0 and device.copies["back"] > 0


SHORT = {"rounds": 2, "head_epochs": 2, "batch_size": 8, "last": 1}


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "stacked"])
@by_both(feddar.METHODS, fake_in_short=("feddar", "apfl"))
def test_every_method(monkeypatch, kind, name, batched):
    train, test = table().split(0.3)
    rounds = {"rounds": 3, "tune_rounds": 1} if feddar.METHODS[name].start else {"rounds": 2 if kind == "cuda" else 1}
    require_same_bits(*trained(monkeypatch, kind, train, test, method=name, batched=batched, **SHORT | rounds))


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("method", ["feddar", "feddar-sa", "fedminmax", "apfl"])
def test_where_there_is_no_float64(monkeypatch, method, batched):
    train, test = table().split(0.3)
    require_same_bits(*trained(monkeypatch, "mps", train, test, method=method, batched=batched, **SHORT))


@pytest.mark.parametrize("curvature", ["hessian", "block", "gram"])
@by_both([kind.task for kind in KINDS], fake_in_short=("multiclass",))
def test_every_outcome_and_curvature(monkeypatch, kind, name, curvature):
    train, test = table(name).split(0.3)
    options = SHORT | {"method": "feddar-sa", "curvature": curvature, "curvature_at": "start", "rounds": 1}
    require_same_bits(*trained(monkeypatch, kind, train, test, **options))
    if kind == "cuda":
        require_same_bits(*trained(monkeypatch, "mps", train, test, **options | {"method": "feddar"}))


SIZES = {"digit-cnn": 28, "efficientnet-lite0": 32, "maps": 8, "densenet121": 32, "resnet34": 32}


@by_both([*TABLE, *IMAGE, "cnn+flip"], fake_in_short=("digit-cnn", "exam"))
def test_every_encoder(monkeypatch, kind, name):
    encoder, name = name, name.removesuffix("+flip")
    cohort = table() if name in TABLE else images(SIZES.get(name, 16), record=name == "exam")
    if name == "linear":
        cohort = feddar.Cohort.from_arrays(cohort.x[0].nan_to_num(), cohort.y, client=cohort.client)
    train, test = cohort.split(0.4)
    method = "fedavg" if encoder in ("densenet121", "resnet34", "efficientnet-lite0") else "feddar-sa"
    options = SHORT | {"rounds": 1, "encoder": encoder, "method": method, "k": 4 if name == "linear" else None}
    require_same_bits(*trained(monkeypatch, kind, train, test, **options))


@pytest.mark.parametrize("kept", ["in a file", "too large"])
def test_inputs_that_do_not_stay_on_the_device(monkeypatch, kept):
    """They follow batch by batch, and results are the same."""
    train, test = images(16, n=24).split(0.4)
    if kept == "in a file":
        train, test = (replace(part, x=(StoredImages(part.x[0], torch.arange(len(part))),)) for part in (train, test))
    machine = Machine(cuda=1, free=0 if kept == "too large" else 2**40)
    expected = feddar.train(train, test=test, method="feddar-sa", **SHORT)
    machine.pretend(monkeypatch)
    with PretendedDevice() as device:
        run = feddar.train(train, test=test, method="feddar-sa", device="cuda", **SHORT)
    require_same_bits(expected, run, device)
    batches = SHORT["rounds"] * len(train.clients)
    assert device.copies["fed"] >= batches


def test_a_stack_whose_samples_do_not_fit(monkeypatch):
    """Its batches follow, too."""
    train, test = table().split(0.3)
    options = SHORT | {"method": "feddar-sa", "batched": True, "rounds": 1}
    expected = feddar.train(train, test=test, **options)
    Machine(cuda=1, free=0).pretend(monkeypatch)
    with PretendedDevice() as device:
        run = feddar.train(train, test=test, device="cuda", **options)
    require_same_bits(expected, run, device)
    assert device.copies["fed"] > 0


@pytest.mark.parametrize("kind", ["cuda", "cuda:0", "mps"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_stacks_in_closed_form(monkeypatch, kind, optimizer):
    """Without categories, ``mlp`` is trained without autograd; plain steps of sgd keep no gradients."""
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    names = {"domain": ["d", "e", "e"] * 20, "client": ["h", "i", "i", "j", "h"] * 12}
    train, test = feddar.Cohort.from_arrays(x, (x[:, 0] > 0).long(), **names).split(0.3)
    taken, forward = [], DenseLayers.forward
    monkeypatch.setattr(DenseLayers, "forward", lambda *about: taken.append(len(about)) or forward(*about))
    options = SHORT | {"method": "fedavg-mh", "encoder": "mlp", "batched": True, "optimizer": optimizer, "rounds": 1}
    require_same_bits(*trained(monkeypatch, kind, train, test, **options))
    assert taken


@pytest.mark.parametrize(
    ("free", "jobs", "groups"),
    [(2**40, 1, [40]), (2**40, 3, [14, 13, 13]), (2**24, 1, [20, 20]), (2**24, 2, [10] * 4), (0, 1, [10] * 4)],
)
def test_small_clients_are_trained_in_groups_that_fit_the_device(monkeypatch, free, jobs, groups):
    """As many at a time as fit its memory, one group for each process at least, and never fewer than on the CPU."""
    monkeypatch.setattr(stacked, "CACHE", 100_000)
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    cohort = feddar.Cohort.from_arrays(x, (x[:, 0] > 0).long(), client=torch.arange(400).remainder(40).tolist())
    settings = Settings(method="fedavg", encoder="mlp", jobs=jobs)
    model, _ = build_model(cohort, "mlp", settings)

    def sizes(device: str) -> list[int]:
        placed = replace(model, device=torch.device(device))
        return [len(each.names) for each in stacked.make_clients(cohort, None, placed, settings)]

    assert sizes("cpu") == [10] * 4
    Machine(cuda=1, free=free).pretend(monkeypatch)
    assert sizes("cpu") == [10] * 4
    assert sizes("cuda") == groups


def test_larger_groups_end_where_those_of_the_cpu_do(monkeypatch):
    """Up to rounding: a group's sums are added at once."""
    monkeypatch.setattr(stacked, "CACHE", 2**16)
    train, test = table(clients=6).split(0.3)
    options = SHORT | {"method": "feddar-sa", "batched": True, "dtype": "float64"}
    expected = feddar.train(train, test=test, **options)
    machine_with("cuda").pretend(monkeypatch)
    with PretendedDevice():
        run = feddar.train(train, test=test, device="cuda", **options)
    after = named_state(run.state)
    for name, value in named_state(expected.state).items():
        torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("method", ["feddar", "fedprox", "apfl"])
def test_training_steps_do_not_wait_for_the_device(monkeypatch, method, batched):
    """Waiting is for once in a phase: with more epochs there is no more of it."""
    train, _ = table().split(0.3)
    machine_with("cuda").pretend(monkeypatch)
    found = []
    for count in (1, 4):
        epochs = {"head_epochs": count, "encoder_epochs": count}
        with PretendedDevice() as device:
            feddar.train(train, method=method, batched=batched, device="cuda", **SHORT | epochs | {"rounds": 1})
        found.append((device.waits["_train_heads"], device.waits["_train_encoders"]))
    assert found[0] == found[1] and sum(found[0])


@pytest.mark.parametrize("kind", ["cuda", "cuda:0"])
def test_predictions_and_export(monkeypatch, kind):
    train, test = table().split(0.3)
    expected, run, device = trained(monkeypatch, kind, train, test, method="ditto", **SHORT)
    given = test.x, torch.full_like(test.domain, -1), np.where(test.client == 0, "0", "another")
    with device:
        scores, model = run.scores(*given), ExportedModel(run)
    assert torch.equal(scores, expected.scores(*given))
    assert not any(device.holds(value) for value in (scores, *model.state_dict().values()))


class Draws(nn.Module):
    """Draws random numbers where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.rand_like(x[:, :1])


def test_the_pretended_device_fails_where_it_should(monkeypatch):
    machine_with("cuda").pretend(monkeypatch)
    with PretendedDevice() as device:
        here = torch.arange(6.0)
        there = beside(here, moved(here, torch.device("cuda")))
        assert there.device.type == "cuda" and here.device.type == "cpu"
        for wrong in (
            lambda: there + here,
            lambda: here[moved(torch.tensor([1]), device.device)],
            lambda: there[torch.tensor([1])],
            lambda: there[[1, 2]],
            there.numpy,
            lambda: there.to("cpu"),
            lambda: here.to("cuda"),
            lambda: torch.rand_like(there),
            lambda: there.new_zeros(6).copy_(here),
        ):
            with pytest.raises(DeviceError):
                wrong()
        before = sum(device.waits.values())
        assert bool(there.sum() > 0) and there.tolist() and there.nonzero().numel()
        assert sum(device.waits.values()) == before + 3
        cohort = feddar.Cohort.from_arrays(torch.randn(8, 2), [0, 1] * 4)
        with pytest.raises(DeviceError, match="drawn on the CPU"):
            feddar.train(cohort, encoder=Draws(), rounds=1, device="cuda")
