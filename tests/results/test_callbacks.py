"""Callbacks of ``feddar.train``: told of each round in order, and able to end the training."""

import numpy as np
import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.algorithm.rounds import RoundEnd
from feddar.results.run_folder import read_metrics, read_model
from helpers.cohorts import make_cohort


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=160, domains=2, clients=2).split(0.3)


def trained(parts, *callbacks, **options):
    given = {
        "rounds": 4,
        "last": 1,
        "validation": 0,
        "schedule": "constant",
        "test": parts[1],
        "callbacks": callbacks,
    } | options
    return feddar.train(parts[0], "feddar-wa", **given)


def test_all_are_called_after_each_round_in_their_order(parts):
    calls = []

    def named(name):
        return lambda end: calls.append((end.round, name))

    trained(parts, named("first"), named("second"), progress=named("progress"))
    assert calls == [(number, name) for number in range(1, 5) for name in ("progress", "first", "second")]


@pytest.mark.parametrize("callbacks", [print, None, ["x"]])
def test_what_cannot_be_called_is_refused(parts, callbacks):
    with pytest.raises(feddar.UserError, match="callbacks must be a list of functions"):
        trained(parts, callbacks=callbacks)


def test_they_are_told_what_is_known(parts, tmp_path):
    ends, seen = [], []

    def look(end):
        ends.append(end)
        seen.append((read_model(tmp_path)[0]["round"], int(read_metrics(tmp_path / "metrics.csv")["round"].max())))

    run = trained(parts, look, out=tmp_path)
    assert all(isinstance(end, RoundEnd) for end in ends)
    assert [(end.round, end.rounds, end.samples, end.metric) for end in ends] == [
        (number, 4, len(parts[0]), "auc") for number in range(1, 5)
    ]
    assert seen == [(number, number) for number in range(1, 5)]  # it is written down before they hear of it
    history = run.history
    losses = history[history["metric"] == "loss"]["value"].tolist()
    assert [end.loss for end in ends] == losses
    for end in ends:
        rows = history[(history["round"] == end.round) & (history["split"] == "test")]
        pd.testing.assert_frame_equal(
            end.test.reset_index(drop=True), rows[[*end.test.columns]].reset_index(drop=True), check_dtype=False
        )
        aucs = rows[(rows["scope"] == "domain") & (rows["metric"] == "auc")]["value"]
        assert (end.mean_domain, end.worst_domain) == (pytest.approx(aucs.mean()), aucs.min())
    assert all(torch.equal(ends[-1].position.state.heads[key], head) for key, head in run.state.heads.items())
    assert not torch.equal(ends[0].position.state.heads["0"], run.state.heads["0"])


def test_without_test_samples_there_are_no_metrics(parts):
    ends = []
    trained(parts, ends.append, test=None, rounds=1)
    assert ends[0].test is None
    assert np.isnan(ends[0].mean_domain)
    assert np.isnan(ends[0].worst_domain)
    assert ends[0].loss > 0


def test_one_that_returns_true_ends_training_with_the_checkpoint_of_that_round(parts, tmp_path):
    others = []
    stopped = trained(parts, lambda end: end.round == 2, others.append, out=tmp_path / "run")
    assert [end.round for end in others] == [1, 2]  # those behind it hear of the last round, too
    assert stopped.round == 2
    about, state, *_ = read_model(tmp_path / "run")
    assert about["round"] == 2
    short = trained(parts, rounds=2)
    for found in (named_state(stopped.state), named_state(state)):
        expected = named_state(short.state)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    pd.testing.assert_frame_equal(stopped.history, short.history)
    assert set(read_metrics(tmp_path / "run" / "metrics.csv")["round"]) == {1, 2}


def test_a_stopped_training_goes_on(parts, tmp_path):
    trained(parts, lambda end: end.round == 2, out=tmp_path / "run")
    whole = trained(parts, out=tmp_path / "whole")
    resumed = trained(parts, out=tmp_path / "run", resume=True)
    assert resumed.round == 4
    expected = named_state(whole.state)
    assert all(torch.equal(value, expected[name]) for name, value in named_state(resumed.state).items())
    files = [(tmp_path / name / "metrics.csv").read_bytes() for name in ("run", "whole")]
    assert files[0] == files[1]


@pytest.mark.parametrize("answer", [None, False])
def test_any_other_answer_lets_it_go_on(parts, answer):
    assert trained(parts, lambda _: answer).round == 4


def test_one_that_fails_ends_training_with_its_error_and_the_checkpoint(parts, tmp_path):
    def fail(end):
        if end.round == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(parts, fail, out=tmp_path)
    assert read_model(tmp_path)[0]["round"] == 3
