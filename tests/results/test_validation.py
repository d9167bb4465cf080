"""Validation: which samples are held out, which round is used, and when training stops."""

import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_own, named_state
from feddar.algorithm.rounds import Position
from feddar.algorithm.state import ServerState
from feddar.comparison.cells import Cell, run_cells
from feddar.data.cohort import Cohort
from feddar.data.validation import divided, held_out
from feddar.errors import Notice, UserError
from feddar.evaluation.validation import Choice, choice_of, results_in, validation_losses
from feddar.models.parameters import Parameters
from feddar.report.validation import about_choice, about_choices
from feddar.results.run_folder import METRICS_FILE, MODEL_FILE, read_metrics, read_model
from feddar.settings import Settings
from helpers.cohorts import make_cohort

EAGER = {"rounds": 12, "lr": 0.05, "schedule": "constant", "batch_size": 8, "patience": 4, "head_epochs": 2}
"""Settings with which a small noisy table is learned by heart within a few rounds."""


def noisy(seed: int = 0) -> tuple[Cohort, Cohort]:
    """Return training and test part of a small table whose labels are noise for a good part."""
    rng, n = np.random.default_rng(seed), 240
    x, z, c = rng.normal(size=(n, 6)), rng.integers(0, 3, n), rng.integers(0, 4, n)
    y = (x[:, 0] * np.where(z == 0, 1, -1) + 1.5 * rng.normal(size=n)) > 0
    cohort = Cohort.from_arrays(x, y, domain=z, client=[f"site-{i}" for i in c])
    return cohort.split(0.25, 0)


def same_run(found, expected):
    """Assert that two runs have the same model in use, bit for bit, and the same metrics."""
    assert found.round == expected.round
    same_tensors(named_state(found.state), named_state(expected.state))
    assert found.own.keys() == expected.own.keys()
    for client, own in expected.own.items():
        same_tensors(named_own(found.own[client]), named_own(own))
    pd.testing.assert_frame_equal(found.history, expected.history, check_exact=True)


def same_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# Which samples are held out


def test_about_the_share_of_every_client_is_held_out_stratified():
    cohort = make_cohort(n=6000, clients=4)
    mask = torch.from_numpy(held_out(cohort, 0.1, 0))
    for client in range(4):
        for domain in range(3):
            for label in range(2):
                cell = (cohort.client == client) & (cohort.domain == domain) & (cohort.y == label)
                assert abs(int(mask[cell].sum()) - 0.1 * int(cell.sum())) <= 1


def test_parts_keep_names_columns_and_levels():
    table = pd.DataFrame({"age": np.arange(80.0), "ward": ["icu", "er", "hall", "er"] * 20})
    cohort = Cohort.from_arrays(table, [0, 1] * 40, domain=["a", "b"] * 40, client=["h"] * 40 + ["i"] * 40)
    train, held = divided(cohort, 0.1, 0)
    assert len(train) + len(held) == len(cohort)
    for part in (train, held):
        assert (part.columns, part.domains, part.clients) == (cohort.columns, cohort.domains, cohort.clients)
    assert (train.client[1:] >= train.client[:-1]).all()


def test_groups_stay_together():
    cohort = make_cohort(n=600)
    group = torch.arange(600) % 90  # with samples at several clients, too
    mask = held_out(replace(cohort, group=group), 0.3, 0)
    assert mask.any()
    assert not set(group[mask].tolist()) & set(group[~mask].tolist())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("least", [1, 5])
def test_nobody_loses_the_last_samples(share, least):
    cohort = make_cohort(n=120, domains=4, clients=6)
    train, held = divided(cohort, share, 0, least)
    cells = cohort.counts > 0
    assert (train.counts[cells] >= cohort.counts[cells].clamp(max=least)).all()
    assert ((held.counts == 0) | (held.counts >= least)).all()


def test_patients_with_several_domains_leave_enough_of_each():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        domain, group = rng.choice(4, 160, p=[0.5, 0.2, 0.17, 0.13]), rng.integers(0, 80, 160)
        labels, site = rng.integers(0, 2, 160), ["site"] * 160
        cohort = Cohort.from_arrays(rng.normal(size=(160, 2)), labels, domain=domain, client=site, group=group)
        mask = held_out(cohort, 0.3, seed, least=5)
        assert mask.any()
        assert not set(group[mask]) & set(group[~mask])
        patients = [len(set(group[mask & (domain == m)])) for m in range(4)]
        assert all(count == 0 or count >= 5 for count in patients)


def test_it_does_not_depend_on_other_clients_and_differs_from_the_test_part():
    cohort = make_cohort(n=600)
    alone = cohort.at("site-2")
    alone = replace(alone, client=torch.zeros_like(alone.client), clients=("site-2",))
    rows = cohort.rows_of(torch.tensor([2]))
    np.testing.assert_array_equal(held_out(alone, 0.1, 3), held_out(cohort, 0.1, 3)[rows.numpy()])
    assert (held_out(cohort, 0.2, 0) != cohort.held_out(0.2, 0)).any()


# Which round is used


def test_the_best_round_is_the_first_of_the_lowest():
    settings = Settings(rounds=10, patience=3)
    position = Position(0, settings.row(), ServerState(Parameters()))
    for loss in (3.0, 1.0, 2.0, 1.0):
        position = replace(position, round=position.round + 1).judged(loss, settings)
        assert not position.is_over(settings)
    assert (position.best.round, position.best.loss) == (2, 1.0)
    position = replace(position, round=5).judged(1.5, settings)
    assert position.is_over(settings)
    losses = pd.Series([3.0, 1.0, 2.0, 1.0, 1.5], index=range(1, 6))
    choice = choice_of(losses, settings)
    assert choice == Choice(2, 1.0, 5, 1.5, 10, 3, 1.0)
    assert (choice.stopped, choice.rise, choice.fall) == (True, 0.5, 0)


def test_a_loss_that_still_falls_at_the_end_is_said():
    settings = Settings(rounds=8, patience=3)
    falling = pd.Series([8.0, 6.0, 5.0, 4.5, 4.2, 4.0, 3.8, 3.6], index=range(1, 9))
    choice = choice_of(falling, settings)
    assert choice.fall == pytest.approx(0.1)
    last = "The validation loss was still falling, by 10 % in the last quarter of the rounds: more of them"
    assert about_choice(choice)[-1].startswith(last)
    assert about_choices([choice] * 3)[-1].startswith("In 3 of 3 trainings the validation loss was still falling")
    flat = falling.where(falling.index < 7, 3.99)
    assert len(about_choice(choice_of(flat, settings))) == 1
    assert choice_of(falling, Settings(rounds=9, patience=3)).fall == 0  # it was stopped, and is to go on


@pytest.mark.parametrize("options", [{"method": "fedavg-separate-ft", "tune_rounds": 3}, {"warmup": 5}])
def test_only_rounds_of_the_method_itself_are_chosen(options):
    settings = Settings(rounds=8, patience=1, **options)
    losses = pd.Series([1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.85, 1.0], index=range(1, 9))
    assert choice_of(losses, settings).round == 7
    position = Position(0, settings.row_in(1), ServerState(Parameters()))
    for number in range(1, 9):
        position = replace(position, round=number, method=settings.row_in(number)).judged(losses[number], settings)
        assert position.is_over(settings) == (number == 8)
    assert position.best.round == 7


@pytest.mark.parametrize("method", ["feddar", "fedrep", "apfl", "fedavg-ft", "fedminmax"])
def test_the_model_in_use_is_that_of_the_lowest_validation_loss(method, tmp_path):
    train, test = noisy()
    run = feddar.train(train, method, test=test, out=tmp_path / "run", **EAGER)
    history = read_metrics(tmp_path / "run" / METRICS_FILE)
    losses = validation_losses(history)
    assert run.round == losses.idxmin() == run.choice().round
    assert len(losses) == min(run.round + EAGER["patience"], EAGER["rounds"])
    assert run.round < len(losses)  # it was trained for too long, on purpose
    stopped = feddar.train(train, method, test=test, **EAGER | {"rounds": run.round})
    same_tensors(named_state(run.state), named_state(stopped.state))
    arguments = test.x, test.domain, test.client_names
    assert torch.equal(run.scores(*arguments), stopped.scores(*arguments))
    loaded = feddar.load(tmp_path / "run")
    assert torch.equal(loaded.scores(*arguments), stopped.scores(*arguments))
    used = history[(history["split"] == "test") & (history["round"] == run.round)]
    np.testing.assert_array_equal(run.results()["value"], used["value"])
    # Clients score their own samples; all at once, the last bits of a product of matrices may be others.
    np.testing.assert_allclose(run.evaluate(test)["value"], used["value"], rtol=1e-7)


def test_the_rows_of_domains_add_up_to_those_of_all(tmp_path):
    train, test = noisy()
    run = feddar.train(train, test=test, rounds=2)
    rows = run.history[run.history["split"] == "validation"]
    for _, of_round in rows.groupby("round"):
        every, domains = of_round[of_round["scope"] == "all"], of_round[of_round["scope"] == "domain"]
        assert every["count"].item() == domains["count"].sum() == len(train) - len(run.cohort)
        assert every["value"].item() == pytest.approx(np.average(domains["value"], weights=domains["count"]))


def test_without_validation_everything_is_as_before():
    train, test = noisy()
    run = feddar.train(train, test=test, rounds=7, validation=0, last=2)
    assert (run.round, run.choice(), len(run.cohort)) == (7, None, len(train))
    assert set(run.history["split"]) == {"train", "test"}
    last = run.history[(run.history["round"] > 5) & (run.history["name"] == "domain_avg")]
    main = last[last["metric"] == "auc"]["value"].mean()
    found = run.results()
    assert found[(found["name"] == "domain_avg") & (found["metric"] == "auc")]["value"].item() == pytest.approx(main)


def test_unset_it_depends_on_the_data(tmp_path):
    train, _ = noisy()
    assert feddar.train(train, rounds=1, out=tmp_path).settings.validation == 0.1
    assert "validation = 0.1" in (tmp_path / "config.toml").read_text()
    images = np.random.default_rng(0).integers(0, 255, (40, 1, 8, 8)).astype(np.uint8)
    cohort = Cohort.from_arrays(images, [0, 1] * 20, domain=["a", "b"] * 20)
    assert feddar.train(cohort, rounds=1).settings.validation == 0


def test_too_few_samples_are_all_trained_on():
    cohort = Cohort.from_arrays(np.arange(4.0)[:, None], [0, 1, 0, 1], client=list("abcd"))
    with pytest.warns(Notice, match="with 4 in all, samples are too few to hold some out for validation"):
        run = feddar.train(cohort, rounds=1)
    assert (run.settings.validation, len(run.cohort)) == (0, 4)


# The same bits


@pytest.mark.parametrize("method", ["feddar", "fedrep"])
@pytest.mark.parametrize("after", [2, 4])
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(method, after, tmp_path):
    train, test = noisy()
    whole = feddar.train(train, method, test=test, out=tmp_path / "whole", **EAGER)
    stop = [lambda end: end.round == after]
    feddar.train(train, method, test=test, out=tmp_path / "cut", callbacks=stop, **EAGER)
    resumed = feddar.train(train, method, test=test, out=tmp_path / "cut", resume=True, **EAGER)
    same_run(resumed, whole)
    for name in (MODEL_FILE, METRICS_FILE):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_that_stopped_early_is_done(tmp_path):
    train, test = noisy()
    run = feddar.train(train, "fedrep", test=test, out=tmp_path, **EAGER)
    before = {name: (tmp_path / name).read_bytes() for name in (MODEL_FILE, METRICS_FILE)}
    again = feddar.train(train, "fedrep", test=test, out=tmp_path, resume=True, **EAGER)
    same_run(again, run)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert read_model(tmp_path).standing.position.is_over(run.settings)
    longer = feddar.train(train, "fedrep", test=test, out=tmp_path, resume=True, **EAGER | {"patience": 6})
    assert longer.standing.position.round > run.standing.position.round


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import feddar
from results.test_validation import EAGER, noisy

train, test = noisy()
kill = lambda end: os.kill(os.getpid(), signal.SIGKILL) if end.round == 4 else None
feddar.train(train, "fedrep", test=test, out=sys.argv[2], callbacks=[kill], **EAGER)
"""


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    train, test = noisy()
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-c", KILLED, tests, str(tmp_path / "cut")]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    resumed = feddar.train(train, "fedrep", test=test, out=tmp_path / "cut", resume=True, **EAGER)
    same_run(resumed, feddar.train(train, "fedrep", test=test, **EAGER))


@pytest.mark.parametrize("method", ["feddar", "fedrep"])
def test_results_do_not_depend_on_the_number_of_workers(method):
    train, test = noisy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)  # where processes cannot be forked, clients are trained one by one
        one, two = (feddar.train(train, method, test=test, jobs=jobs, **EAGER) for jobs in (1, 2))
    same_run(two, one)


@pytest.mark.parametrize("method", ["feddar", "fedavg", "fedrep"])
def test_stacked_clients_choose_the_same_round(method):
    train, test = noisy()
    one, stacked = (
        feddar.train(train, method, test=test, batched=batched, **EAGER | {"dtype": "float64"})
        for batched in (False, True)
    )
    assert one.round == stacked.round
    torch.testing.assert_close(*(torch.tensor(validation_losses(run.history).to_numpy()) for run in (one, stacked)))


# What is made of it


def test_a_comparison_uses_the_chosen_rounds(tmp_path):
    parts = noisy()
    cells = [
        Cell({"method": name}, {"method": name, **EAGER}, lambda: parts, tmp_path / name)
        for name in ("fedavg", "fedrep")
    ]
    trained = run_cells(cells)
    for name, found in trained.results.groupby("method"):
        history = read_metrics(tmp_path / str(name) / METRICS_FILE)
        best = validation_losses(history).idxmin()
        used = history[(history["split"] == "test") & (history["round"] == best)]
        np.testing.assert_array_equal(found["value"], used["value"])
    before = {cell.folder: (cell.folder / MODEL_FILE).stat().st_mtime_ns for cell in cells}
    again = run_cells(cells, resume=True)
    pd.testing.assert_frame_equal(again.results, trained.results)
    assert before == {cell.folder: (cell.folder / MODEL_FILE).stat().st_mtime_ns for cell in cells}


def test_what_is_observed_is_there_for_the_chosen_round():
    train, test = noisy()
    row = pd.DataFrame([("all", "all", "seen", 1.0, 1)], columns=["scope", "name", "metric", "value", "count"])
    run = feddar.train(train, test=test, observe=lambda *_: row, **EAGER)
    assert (run.results()["metric"] == "seen").sum() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validation": 1.5}, "validation should be less than 1; given was 1.5."),
        ({"validation": -0.1}, "validation should be greater than or equal to 0; given was -0.1."),
        ({"patience": 0}, "patience should be greater than or equal to 1; given was 0."),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(options, said):
    with pytest.raises(UserError) as caught:
        feddar.train(noisy()[0], **options)
    assert str(caught.value) == said


def test_a_run_is_not_resumed_with_another_share(tmp_path):
    train, _ = noisy()
    feddar.train(train, rounds=1, out=tmp_path)
    with pytest.raises(UserError, match=r"was started with validation=0.1, not 0.2: resume it as it was"):
        feddar.train(train, rounds=2, out=tmp_path, resume=True, validation=0.2)


# Which rounds are tested


def rounds_with_tests(history: pd.DataFrame) -> list[int]:
    return history[history["split"] == "test"]["round"].unique().tolist()


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_rounds_that_results_come_from_are_always_tested_and_others_change_nothing(validation):
    train, test = noisy()
    options = EAGER | {"rounds": 8, "last": 2, "patience": 8, "validation": validation}
    every = feddar.train(train, test=test, **options)
    some = feddar.train(train, test=test, test_every=3, **options)
    same_tensors(named_state(some.state), named_state(every.state))
    assert rounds_with_tests(every.history) == [1, 2, 3, 4, 5, 6, 7, 8]
    best = validation_losses(every.history).cummin().drop_duplicates().index
    assert rounds_with_tests(some.history) == sorted({3, 6, *(best if validation else [7, 8])})
    assert len(best) < 8
    pd.testing.assert_frame_equal(results_in(some.history, some.settings), results_in(every.history, every.settings))
