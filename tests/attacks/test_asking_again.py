"""A coordinator that asks one step of a run again and again, with one crafted model after another."""

import pytest
import torch

from feddar.algorithm.names import named_request
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import planned
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.federation import site as site_module
from feddar.federation.privacy.answer_log import read_log
from feddar.federation.rehearsal import build
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, make_sites, make_study, write_tables

RUN = "0123456789abcdef"


@pytest.fixture
def study(tmp_path):
    write_tables(tmp_path / "data")
    return make_study(tmp_path / "data", method="fedavg", schedule="constant")


def site_of(folder):
    return make_sites(folder / "data", folder / "kept")[NAMES[0]]


def joined(folder, study, run=RUN):
    site = site_of(folder)
    assert join(site, study, run) == {"kind": "joined"}
    return site


def join(site, study, run):
    return unpack(site.answer(pack({"kind": "join", "run": run, "study": study.tables()})))[0]


def training(study, number=1, step=1, run=RUN, shift=0.0):
    """Return the message that asks to train, in this step, a model that was moved by ``shift``."""
    model, initial = build(study)
    phase = next(each for each in planned(study.training, model.objective, number) if each.name == "together")
    heads = {key: head + shift for key, head in initial.heads.items()}
    request = Request(phase, number, 0, Parameters(initial.encoders, heads), step=step)
    return pack({"kind": "ask", "run": run, **request_header(request)}, named_request(request))


def test_the_same_step_gets_the_same_reply_whatever_model_comes_with_it(tmp_path, study):
    site, torch_seed = joined(tmp_path, study), torch.Generator().manual_seed(0)
    first = site.answer(training(study))
    assert unpack(first)[0]["kind"] == "reply"
    for shift in torch.randn(20, generator=torch_seed).tolist():
        assert site.answer(training(study, shift=shift)) == first
    assert site_of(tmp_path).answer(training(study, shift=1.0)) == first  # also in another process
    # Every one of them is in the log, those that were answered again, too.
    assert [entry["answer"] for entry in read_log(tmp_path / "kept" / NAMES[0]).entries] == ["joined", *["reply"] * 22]


def test_replies_do_depend_on_the_model_where_the_step_is_another(tmp_path, study):
    site = joined(tmp_path, study)
    first, second = (unpack(site.answer(training(study, number=n, shift=n)))[1] for n in (1, 2))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_rounds_and_steps_only_go_forward(tmp_path, study):
    site = joined(tmp_path, study)
    for number in (1, 2, 3):
        assert unpack(site.answer(training(study, number=number)))[0]["kind"] == "reply"
    assert unpack(site.answer(training(study, number=2)))[0]["kind"] == "reply"  # the coordinator was a round behind
    about, tensors = unpack(site.answer(training(study, number=1)))  # its reply is not stored any more
    assert about == {"kind": "refused", "why": "rounds only go forward: it has answered step 1 of round 3."}
    assert not tensors
    assert unpack(site.answer(training(study, number=3, step=2)))[0]["kind"] == "reply"
    about, _ = unpack(site.answer(training(study, number=3, step=3)))
    assert about["kind"] == "reply"


def test_a_round_has_as_many_steps_as_the_study_plans(tmp_path, study):
    site, most = joined(tmp_path, study), len(planned(study.training, build(study)[0].objective, 1))
    answers = [unpack(site.answer(training(study, step=step, shift=step)))[0] for step in range(1, most + 3)]
    assert [about["kind"] for about in answers] == ["reply"] * most + ["refused"] * 2
    assert answers[-1]["why"] == f"round 1 of the study has {most} steps, and this is step {most + 2}."


def test_a_study_has_only_so_many_runs(tmp_path, study, monkeypatch):
    monkeypatch.setattr(site_module, "MOST_RUNS", 3)
    site = site_of(tmp_path)
    runs = [f"{number:08x}" for number in range(5)]
    kinds = [join(site, study, run)["kind"] for run in runs]
    assert kinds == ["joined"] * 3 + ["refused"] * 2
    assert join(site, study, runs[0]) == {"kind": "joined"}  # it is one of them
    other = make_study(tmp_path / "data", method="fedavg", schedule="constant", lr=0.5)
    assert join(site, other, runs[4])["kind"] == "joined"


def test_nothing_is_sent_that_cannot_be_written_down(tmp_path, study, monkeypatch):
    site = joined(tmp_path, study)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(site.log, "write", fail)
    about, tensors = unpack(site.answer(training(study)))
    assert about == {"kind": "failed", "why": "it cannot write down what it answers."}
    assert not tensors


def test_a_stored_reply_costs_no_training(tmp_path, study):
    site = joined(tmp_path, study)
    site.answer(training(study))
    site.participation.client.answer = None  # would fail
    assert unpack(site.answer(training(study)))[0]["kind"] == "reply"
