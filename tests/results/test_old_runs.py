"""Run folders that version 0.1 wrote: they are read, used and gone on with.

Beside each is ``expected.csv``, what version 0.1 predicted for the rows of ``NEW``.
"""

import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_own, named_state
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.federation.coordinator import STUDY_FILE, coordinate
from feddar.federation.links.local import LocalLink
from feddar.federation.study import Study
from feddar.report.numbers import number
from feddar.results.run_folder import METRICS_FILE, MODEL_FILE, read_model
from helpers.command import feddar as feddar_command
from helpers.marks import first

RUNS = Path(__file__).parent / "runs-0.1"
NAMES = ("credible", "personal", "companion", "number", "minmax", "coordinator")
ON_TABLE = NAMES[:-1]
"""Those that ``feddar.train`` made, of the table below; the last one is a coordinator's."""
DOMAINS, CLIENTS = ["A", "B", "C"], ["north", "south", "north"]
NEW = pd.DataFrame({"age": [50.0, None, 71.5], "ward": ["er", "icu", "hall"], "smoker": ["no", "yes", "yes"]})
NEW_AT_SITES = pd.DataFrame({"age": [50.0, None, 71.5], "lactate": [2.5, None, 0.5], "ward": ["er", "icu", "er"]})
OPTIONS = {"last": 1, "head_epochs": 2, "lr": 1e-2}


def new_rows(name):
    return NEW_AT_SITES if name == "coordinator" else NEW


def expected_of(name):
    return pd.read_csv(RUNS / name / "expected.csv", keep_default_na=False)


def assert_as_expected(found, name):
    pd.testing.assert_frame_equal(found, expected_of(name), check_dtype=False, rtol=0, atol=1e-6)


def samples_of_then():
    """Return what the runs were trained and tested on."""
    rng, n = np.random.default_rng(0), 80
    age, ward = rng.normal(60, 10, n).round(1), rng.choice(["icu", "er", "hall"], n)
    table = pd.DataFrame({"age": age, "ward": ward, "smoker": rng.choice(["yes", "no"], n)})
    table.loc[:5, "age"] = np.nan
    race = rng.choice(["A", "B", "C"], n, p=[0.5, 0.35, 0.15])
    site = rng.choice(["north", "south"], n)
    died = np.where(rng.random(n) < 0.4, "died", "alive")
    return Cohort.from_arrays(table, died, domain=race, client=site).split(0.3)


def a_copy(name, folder):
    shutil.copytree(RUNS / name, folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_it_predicts_what_it_did(name):
    assert read_model(RUNS / name)[0]["format"] == 3
    run = feddar.load(RUNS / name)
    assert_as_expected(run.predictions(new_rows(name), domain=DOMAINS, client=CLIENTS), name)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_written_in_todays_format_and_read_again(name, tmp_path):
    run = feddar.load(RUNS / name)
    run.save(tmp_path / "today")
    about, state, own, _ = read_model(tmp_path / "today")
    assert about["format"] == 5
    again = feddar.load(tmp_path / "today")
    assert again.model.objective == run.model.objective
    assert again.settings == run.settings
    assert_as_expected(again.predictions(new_rows(name), domain=DOMAINS, client=CLIENTS), name)
    pairs = [(named_state(state), named_state(run.state))]
    pairs += [(named_own(own[client]), named_own(kept)) for client, kept in run.own.items()]
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], value) for each, value in expected.items())
    pd.testing.assert_frame_equal(again.history, run.history)


def test_what_it_kept_beside_parameters_is_in_its_place():
    credible, shares = feddar.load(RUNS / "credible").state, feddar.load(RUNS / "minmax").state.domain_shares
    assert credible.used_heads.keys() == credible.heads.keys() == {"0", "1", "2"}
    assert not torch.equal(credible.used_heads["2"], credible.heads["2"])
    assert shares.shape == (3,)
    assert float(shares.sum()) == pytest.approx(1)
    assert feddar.load(RUNS / "coordinator").state.score_range.shape == (1, 2)
    assert feddar.load(RUNS / "number").state.in_training.target.shape == (2,)
    own = feddar.load(RUNS / "companion").own
    assert own.keys() == {"north", "south"}
    assert all("mix" in kept.extra and "own" in kept.parameters.heads for kept in own.values())


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_read_as_they_are(name):
    history = feddar.load(RUNS / name).history
    assert set(history["round"]) == {1, 2}
    expected = pd.read_csv(RUNS / name / METRICS_FILE, keep_default_na=False)
    assert history["name"].tolist() == expected["name"].map(str).tolist()
    np.testing.assert_array_equal(history["value"], pd.to_numeric(expected["value"]))


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_predicts_with_it(name, tmp_path):
    rows = new_rows(name).assign(race=DOMAINS, site=CLIENTS)
    rows.to_csv(tmp_path / "new.csv", index=False)
    columns = ["--domain", "race", "--client", "site"]
    shown = feddar_command("predict", RUNS / name, "new.csv", *columns, "--out", "p.csv", cwd=tmp_path)
    assert "3 rows predicted" in shown
    found = pd.read_csv(tmp_path / "p.csv", keep_default_na=False)
    assert found["row"].tolist() == [1, 2, 3]
    assert_as_expected(found[expected_of(name).columns], name)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_written_about_it(name, tmp_path):
    feddar_command("report", RUNS / name, "--out", "page.html", cwd=tmp_path)
    page, run = (tmp_path / "page.html").read_text(), feddar.load(RUNS / name)
    assert run.settings.method in page
    results = run.results()
    main = results[(results["name"] == "domain_avg") & (results["metric"] == run.model.objective.metrics[0])]
    assert number(main["value"].item(), metric=main["metric"].item()) in page


def test_a_page_is_written_about_runs_of_then_and_now(tmp_path):
    train, test = samples_of_then()
    feddar.train(train, "fedavg", test=test, out=tmp_path / "now", rounds=2, **OPTIONS)
    feddar_command("report", RUNS / "credible", tmp_path / "now", "--out", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "feddar-sa" in page
    assert "fedavg" in page


@pytest.mark.parametrize("name", first(["credible"], NAMES))
def test_it_is_exported(name, tmp_path):
    shown = feddar_command("export", RUNS / name, "--out", "model.onnx", cwd=tmp_path)
    assert "Checked with onnxruntime" in shown
    assert onnxruntime.InferenceSession(tmp_path / "model.onnx").get_outputs()


@pytest.mark.parametrize("name", NAMES)
def test_its_configuration_is_taken(name, tmp_path):
    rng, n = np.random.default_rng(1), 60
    table = pd.DataFrame({"age": rng.normal(60, 10, n), "race": rng.choice(["A", "B"], n), "hospital": ["h", "i"] * 30})
    table["outcome"] = np.where(rng.random(n) < 0.5, "yes", "no")
    table.to_csv(tmp_path / "table.csv", index=False)
    columns = ["--client", "hospital", "--domain", "race", "--target", "outcome"]
    config = ["--config", RUNS / name / "config.toml", "--out", "run"]
    feddar_command("run", "table.csv", *columns, *config, cwd=tmp_path)
    before, now = feddar.load(RUNS / name).settings, feddar.load(tmp_path / "run").settings
    later = {"credibility", "validation", "encoder", "schedule"}
    assert now.model_dump(exclude=later) == before.model_dump(exclude=later)
    assert (before.validation, before.encoder, before.schedule) == (0, "mlp", "constant")
    assert (now.validation, now.encoder, now.schedule) == (0.1, "wide", "cosine")


def test_a_run_of_feddar_sa_is_not_taken_for_one_of_todays(tmp_path):
    """It weighed heads by their credibility; what goes by that name today does not."""
    train, test = samples_of_then()
    folder = a_copy("credible", tmp_path / "run")
    with pytest.raises(UserError) as caught:
        feddar.train(train, "feddar-sa", test=test, out=folder, resume=True, rounds=3, **OPTIONS)
    assert str(caught.value) == (
        f"the run in {folder} was started with credibility=True, not None: resume it as it was."
    )
    assert (folder / MODEL_FILE).read_bytes() == (RUNS / "credible" / MODEL_FILE).read_bytes()
    assert (folder / METRICS_FILE).read_bytes() == (RUNS / "credible" / METRICS_FILE).read_bytes()


def test_a_run_of_feddar_sa_goes_on_as_it_was(tmp_path):
    train, test = samples_of_then()
    folder = a_copy("credible", tmp_path / "run")
    options = {"rounds": 3, "credibility": True, **OPTIONS}
    run = feddar.train(train, "feddar-sa", test=test, out=folder, resume=True, **options)
    assert (run.round, run.method.credible, read_model(folder)[0]["format"]) == (3, True, 5)
    before, after = ((each / METRICS_FILE).read_bytes() for each in (RUNS / "credible", folder))
    assert after.startswith(before)
    assert set(run.history["round"]) == {1, 2, 3}


def test_a_coordinators_run_is_not_taken_for_one_of_todays(tmp_path):
    folder = a_copy("coordinator", tmp_path / "run")
    with pytest.raises(UserError) as caught:
        coordinate(Study.read(folder / STUDY_FILE), LocalLink({}), folder, resume=True)
    assert str(caught.value) == (
        f"the run in {folder} was started with another study: resume it with {folder / STUDY_FILE}."
    )


def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    """Two rounds of FedRep then, and one now, are three rounds now."""
    train, test = samples_of_then()
    resumed = feddar.train(
        train, "fedrep", test=test, out=a_copy("personal", tmp_path / "run"), resume=True, rounds=3, **OPTIONS
    )
    whole = feddar.train(
        train, "fedrep", test=test, rounds=3, validation=0, encoder="mlp", schedule="constant", **OPTIONS
    )
    pairs = [(named_state(resumed.state), named_state(whole.state))]
    pairs += [(named_own(resumed.own[client]), named_own(kept)) for client, kept in whole.own.items()]
    assert len(pairs) == 3
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        for each, value in expected.items():
            torch.testing.assert_close(found[each], value, rtol=0, atol=1e-6)
    then = whole.history[whole.history["metric"].isin(resumed.history.query("round == 1")["metric"])]
    now = resumed.history[resumed.history["metric"].isin(then["metric"])]
    pd.testing.assert_frame_equal(*(each.reset_index(drop=True) for each in (now, then)), check_dtype=False, rtol=1e-5)
    assert set(whole.history["metric"]) == set(resumed.history["metric"])
