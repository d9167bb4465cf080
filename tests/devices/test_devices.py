"""Choosing a device, and what a run records of it."""

import warnings
from dataclasses import replace

import pytest
import torch

import feddar
from feddar.algorithm.protocol import OwnState, Phase, Request
from feddar.errors import Notice, UserError
from feddar.models import devices
from feddar.models.parameters import Parameters
from feddar.settings import Settings, checked
from helpers.pretended_device import Machine, PretendedDevice


@pytest.fixture
def cohort() -> feddar.Cohort:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return feddar.Cohort.from_arrays(x, (x[:, 0] > 0).long(), domain=["a", "b"] * 20, client=["h"] * 20 + ["i"] * 20)


@pytest.mark.parametrize(
    ("machine", "found"),
    [(Machine(), "cpu"), (Machine(cuda=2), "cuda"), (Machine(mps=True), "mps"), (Machine(cuda=1, mps=True), "cuda")],
)
def test_auto_takes_the_first_gpu_there_is(monkeypatch, machine, found):
    machine.pretend(monkeypatch)
    assert devices.find_device("auto") == torch.device(found)


@pytest.mark.parametrize("name", ["cuda", "cuda:2", "mps"])
def test_a_missing_device_is_one_sentence(monkeypatch, cohort, name):
    Machine(cuda=2 * (name != "cuda")).pretend(monkeypatch)
    with pytest.raises(UserError, match=rf"there is no device '{name}' here: choose cpu.*--device"):
        feddar.train(cohort, rounds=1, device=name)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UserError, match="choose auto, cpu, cuda"):
        checked(Settings, {"device": name})


def test_float64_is_refused_where_there_is_none(monkeypatch):
    Machine(mps=True).pretend(monkeypatch)
    with pytest.raises(UserError, match="mps has no float64"):
        devices.find_device("mps", torch.float64)


def test_jobs_by_default_are_one_for_each_gpu(monkeypatch):
    Machine(cuda=3).pretend(monkeypatch)
    assert [devices.default_jobs(name) for name in ("cuda", "auto", "cuda:1")] == [3, 3, 1]


def test_processes_take_turns_on_gpus(monkeypatch):
    Machine(cuda=2).pretend(monkeypatch)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for number in range(3):
        devices.take_turn(torch.device("cuda"), number)
    devices.take_turn(torch.device("cuda:1"), 0)  # named by its number: it is not spread
    devices.take_turn(torch.device("cpu"), 1)
    assert taken == [0, 1, 0]


def test_a_run_records_its_device_and_may_go_on_on_another(monkeypatch, cohort, tmp_path):
    options = {"out": tmp_path / "run", "schedule": "constant", "validation": 0}
    run = feddar.train(cohort, rounds=1, device="auto", **options)
    assert run.settings.device == "cpu"
    Machine(cuda=1).pretend(monkeypatch)
    with PretendedDevice(), pytest.warns(Notice, match="started on cpu and goes on on cuda: the last digits"):
        run = feddar.train(cohort, rounds=2, device="auto", resume=True, **options)
    assert (run.round, run.settings.device) == (2, "cuda")


def test_a_run_of_a_gpu_is_loaded_where_there_is_none(cohort, tmp_path):
    run = feddar.train(cohort, rounds=1)
    replace(run, settings=run.settings.model_copy(update={"device": "cuda:7"})).save(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = feddar.load(tmp_path / "run")
    assert loaded.settings.device == "cpu"
    assert (loaded.predict(cohort.x[0], domain="a") == run.predict(cohort.x[0], domain="a")).all()


def test_moved_reaches_every_tensor_and_leaves_the_rest():
    head = torch.ones(1, 2)
    request = Request(Phase("heads"), 1, 0, Parameters({"all": {"w": head}}, {"0": head}, head[0].double()))
    meta = torch.device("meta")  # any device that is not the CPU's
    there = devices.moved(request, meta)
    found = [there.parameters.encoders["all"]["w"], there.parameters.heads["0"], there.parameters.target]
    assert {each.device for each in found} == {meta} and there.phase == request.phase
    own = OwnState(request.parameters, {"mix": head})
    assert devices.moved(own, meta).extra["mix"].device == meta
    assert devices.moved(own, devices.CPU).extra["mix"] is head


def test_float64_stays_on_the_cpu_where_a_device_does_not_have_it(monkeypatch):
    monkeypatch.setattr(devices, "has_float64", lambda device: device.type == "cpu")
    one, two = devices.moved((torch.ones(2), torch.ones(2).double()), torch.device("meta"))
    assert (one.device.type, two.device.type) == ("meta", "cpu")
