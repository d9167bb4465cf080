"""A coordinator that asks one step of a run again and again, with one crafted model after another."""

import multiprocessing
from dataclasses import replace

import pytest
import torch

from feddar.algorithm.names import named_request
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import planned
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.federation import site as site_module
from feddar.federation.privacy.answer_log import read_log
from feddar.federation.privacy.plausible_models import IMPLAUSIBLE
from feddar.federation.rehearsal import build
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, make_sites, make_study, with_facts, write_tables

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


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def reply_to(folder, study, **changes):
    """Return the tensors of the reply of the same site in another folder."""
    site = make_sites(folder / "data", folder / "elsewhere")[NAMES[0]]
    assert join(site, study, RUN) == {"kind": "joined"}
    return unpack(site.answer(training(study, **changes)))[1]


def training(study, number=1, step=1, run=RUN, shift=0.0, **about):
    """Return the message that asks to train, in this step, a model that was moved by ``shift``."""
    model, initial = build(study)
    phase = next(each for each in planned(study.training, model.objective, number) if each.name == "together")
    heads = {key: head + shift for key, head in initial.heads.items()}
    request = Request(phase, number, 0, Parameters(initial.encoders, heads), step=step)
    return pack({"kind": "ask", "run": run, **request_header(request), **about}, named_request(request))


def test_the_same_step_gets_the_same_reply_whatever_model_comes_with_it(tmp_path, study):
    site, torch_seed = joined(tmp_path, study), torch.Generator().manual_seed(0)
    about, first = unpack(site.answer(training(study)))
    assert about["kind"] == "reply"
    for number, shift in enumerate(torch.randn(20, generator=torch_seed).tolist()):
        again, tensors = unpack(site.answer(training(study, shift=shift, step=number)))
        assert again == about | {"again": True, "step": number}
        assert_same(tensors, first)
    assert_same(unpack(site_of(tmp_path).answer(training(study, shift=1.0)))[1], first)  # also in another process
    # Every one of them is in the log, those that were answered again, too.
    assert [entry.answer for entry in read_log(tmp_path / "kept" / NAMES[0]).entries] == ["joined", *["reply"] * 22]


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
    assert about == {"kind": "refused", "why": "rounds only go forward: it has answered in round 3."}
    assert not tensors


def test_that_a_reply_is_too_large_says_nothing_new(tmp_path, study):
    """Otherwise a limit of 0 would be a question that costs nothing, and the size of a reply its answer."""
    site = joined(tmp_path, study)
    for shift in range(3):
        about, tensors = unpack(site.answer(training(study, shift=shift, limit=0)))
        assert about == {"kind": "refused", "why": "its reply is larger than the 0 bytes that can be carried."}
        assert not tensors
    assert_same(unpack(site.answer(training(study, shift=7.0, limit="x")))[1], reply_to(tmp_path, study, shift=0))


def test_that_work_fails_is_an_answer_too(tmp_path, study):
    site = joined(tmp_path, study)
    # What the study's model cannot be is refused, whatever the samples are, and is no answer.
    assert unpack(site.answer(training(study, shift=float("inf"))))[0]["kind"] == "refused"
    assert unpack(site.answer(training(study)))[0]["kind"] == "reply"

    def fail(_):
        raise RuntimeError("out of memory")

    site.participation.client.answer = fail
    about, tensors = unpack(site.answer(training(study, number=2)))
    assert (about, tensors) == ({"kind": "failed", "why": "it failed; its own log says why."}, {})
    about, tensors = unpack(site_of(tmp_path).answer(training(study, number=2)))  # where it would not fail
    assert (about["kind"], tensors) == ("failed", {})


def answer_in_a_process(folder, message, answers):
    answers.put(site_of(folder).answer(message))


def test_processes_of_one_site_give_one_reply_and_one_log(tmp_path, study):
    joined(tmp_path, study)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=answer_in_a_process, args=(tmp_path, training(study, shift=shift), answers))
        for shift in range(3)
    ]
    for process in processes:
        process.start()
    first, *others = (unpack(answers.get(timeout=60))[1] for _ in processes)
    for process in processes:
        process.join()
    for other in others:
        assert_same(other, first)
    assert len(read_log(tmp_path / "kept" / NAMES[0]).entries) == 4


def test_a_damaged_reply_is_not_answered_anew_and_other_files_are_left_alone(tmp_path, study):
    site = joined(tmp_path, study)
    site.answer(training(study))
    replies = tmp_path / "kept" / NAMES[0] / RUN / "replies"
    (path,) = replies.iterdir()
    path.write_bytes(b"")
    assert unpack(site.answer(training(study)))[0]["kind"] == "failed"
    for name in ("notes.reply", "1-2 (copy).together.reply", "._1-1.together.reply", "3.reply"):
        (replies / name).write_text("mine")
    assert unpack(site.answer(training(study, number=2)))[0]["kind"] == "reply"
    assert (replies / "notes.reply").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"study": {"colour": "blue"}}'])
def test_another_run_that_cannot_be_read_does_not_keep_a_site_from_joining(tmp_path, study, text):
    other = tmp_path / "kept" / NAMES[0] / "abababab"
    other.mkdir(parents=True)
    (other / "study.json").write_text(text)
    joined(tmp_path, study)


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


def far_away(study, **changes):
    """Return a message with a model that no training comes to: whether it is too far depends on the site's samples."""
    return training(study, **{"shift": 1e3} | changes)


def test_that_a_model_is_refused_is_the_answer_of_its_phase(tmp_path, study):
    """Otherwise refusals, which cost nothing, would say by halves how far the site's own training has moved a model."""
    site = joined(tmp_path, study)
    assert unpack(site.answer(far_away(study))) == (IMPLAUSIBLE, {})
    for shift in (0.0, 1e3, 0.5):
        about, tensors = unpack(site_of(tmp_path).answer(training(study, shift=shift, step=7)))
        assert (about, tensors) == (IMPLAUSIBLE | {"again": True, "step": 7}, {})
    assert unpack(site.answer(training(study, number=2)))[0]["kind"] == "reply"


def adopting(study, step, shift=0.0):
    model, initial = build(study)
    phase = next(each for each in planned(study.training, model.objective, 1) if each.name == "adopt")
    heads = {key: head + shift for key, head in initial.heads.items()}
    request = Request(phase, 1, 0, Parameters(initial.encoders, heads), step=step)
    return pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))


def test_parameters_are_taken_over_twice_in_a_round_at_most(tmp_path):
    """A round has two such phases if clients tune the common model; of each, the first answer is the only one."""
    study = make_study(write_tables(tmp_path / "data"), method="fedavg-ft")
    site = joined(tmp_path, study)
    kinds = [
        unpack(site.answer(adopting(study, step, shift)))[0]["kind"]
        for step, shift in [(1, 1e3), (1, 0.0), (3, 0.0), (3, 1e3), (4, 0.0), (5, 1e3)]
    ]
    assert kinds == ["refused", "refused", "reply", "reply", "refused", "refused"]


def test_parameters_of_long_ago_are_not_taken_over_anew(tmp_path):
    """A site that comes late begins by them, in whatever round it is; one that has them gives its answer of then."""
    study = make_study(write_tables(tmp_path / "data"), method="fedavg-ft", rounds=30)
    site = joined(tmp_path, study)
    assert "again" not in unpack(site.answer(adopting(study, 1)))[0]
    for number in range(1, 30, 2):
        assert unpack(site.answer(training(study, number)))[0]["kind"] in ("reply", "refused")
    assert unpack(site.answer(adopting(study, 1)))[0]["again"] is True
    assert unpack(site.answer(adopting(study, 3)))[0]["kind"] == "reply"
    assert unpack(site.answer(adopting(study, 5)))[0]["kind"] == "refused"


def test_a_census_has_no_model_to_be_refused(tmp_path, study):
    _, initial = build(study)
    request = Request(planned(study.training, study.objective, 0)[0], 0, 0, initial, step=1)
    message = pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))
    about, _ = unpack(joined(tmp_path, study).answer(message))
    assert about == {"kind": "refused", "why": "the census phase has no model."}


NO_KEYS = "it has no such keys: they were replaced."


def said_of_rows(site, study, rows, run=RUN, shift=0.0):
    """Return why a site does not take part in a sum over so many rows; it has no keys for one yet."""
    terms = {"setup": "0" * 32, "index": 0, "sites": list(NAMES), "rows": rows}
    return unpack(site.answer(training(study, run=run, shift=shift, secure=terms)))[0]["why"]


def test_a_run_says_of_the_number_of_rows_only_whether_it_is_above_one_number(tmp_path, study):
    """Otherwise 20 requests would find it."""
    study, no_keys = with_facts(study, secure=True), NO_KEYS
    site = joined(tmp_path, study)
    assert said_of_rows(site, study, 1000) == no_keys
    for rows in (999, 500, 20, 1, 0, -1):
        assert said_of_rows(site, study, rows) == "fewer rows are said to be behind the sum than before."
    assert said_of_rows(site, study, 2000) == no_keys  # sites have come that were counted later
    other = "ab" * 8
    assert join(site, study, other) == {"kind": "joined"}
    few = "fewer rows were said to be behind sums of this run than this site has."
    assert [said_of_rows(each, study, rows, other) for rows in (5, 4, 1000) for each in (site, site_of(tmp_path))] == (
        [few] * 6
    )


def one_head_moved(head, by):
    """Return the move of one number of a head."""
    return torch.zeros_like(head).index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(by))


def test_what_fits_into_a_sum_says_nothing_of_what_a_site_has_trained(tmp_path, study):
    """Were its change that of the model which comes with the question, 28 of them would find a parameter to 1e-8."""
    study = with_facts(study, secure=True, max_norm=0.01)
    site, head = joined(tmp_path, study), next(iter(build(study)[1].heads.values()))
    for by in (0.0, 1e-3, 1e-2, 0.1, 1.0, 1e3):
        assert said_of_rows(site, study, 60, shift=one_head_moved(head, by)) == NO_KEYS


def test_that_a_reply_does_not_fit_into_a_sum_is_an_answer_too(tmp_path, study):
    study = with_facts(study, secure=True)
    site = joined(tmp_path, study)
    answer = site.participation.client.answer
    site.participation.client.answer = lambda request: replace(answer(request), loss=float("nan"))
    why = "its 'loss' is larger than 1.7e+38, the most that fits into a sum of sites."
    assert [said_of_rows(each, study, 1000) for each in (site, site, site_of(tmp_path))] == [why] * 3
