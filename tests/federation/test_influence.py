"""How far a reply may move the model, in runs without any hostile site."""

import pandas as pd
import pytest

from feddar.errors import TrainingError
from feddar.federation import influence
from feddar.federation.coordinator import CoordinatorEvents, coordinate
from feddar.federation.site import Site
from helpers.sites import NAMES, local_link, make_sites, make_study, with_facts, write_tables


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), rows=200)


def alarms_of(study, sites, out):
    """Return what is said of jumps in a run, and the problems in its exchanges."""
    said = []
    coordinate(study, local_link(sites), out, events=CoordinatorEvents(say=said.append))
    rows = pd.read_csv(out / "exchanges.csv", keep_default_na=False)
    return [line for line in said if "jumped" in line] + rows.query("problem != ''")["problem"].tolist()


@pytest.mark.parametrize("secure", [False, True])
def test_a_rate_that_the_study_raises_moves_the_model_further_without_an_alarm(tables, tmp_path, secure):
    rates = {"lr": 1e-3, "lr_steps": "2:20", "schedule": "constant", "rounds": 4}
    study = with_facts(make_study(tables, method="feddar-wa", **rates), secure=secure)
    assert not alarms_of(study, make_sites(tables, tmp_path / "kept"), tmp_path / "out")


def test_a_run_goes_on_with_heads_as_trained_if_the_step_of_pooling_is_left_out_at_all_sites(
    tables, tmp_path, monkeypatch
):
    """Where heads were trained too long, that step is of any length at honest sites, too."""
    monkeypatch.setattr(influence, "FAR_SCORES", 0.0)
    found = alarms_of(make_study(tables, validation=0.2), make_sites(tables, tmp_path / "kept"), tmp_path / "out")
    assert len(found) == 3 * len(NAMES)
    assert all(problem.startswith("it would move the model by") for problem in found)


def with_column(folder, largest):
    """Write tables with one more column of numbers about as large as this, and return a study of them."""
    write_tables(folder, rows=60)
    for name in NAMES:
        table = pd.read_csv(folder / f"{name}.csv")
        table["visit"] = largest * (1 + 1e-4 * table.index)
        table.to_csv(folder / f"{name}.csv", index=False)
    return with_facts(make_study(folder, method="fedavg", rounds=1), secure=True)


@pytest.mark.parametrize("largest", [1.7e12, 1e15])
def test_numbers_as_large_as_times_in_milliseconds_can_be_summed(tmp_path, largest):
    study = with_column(tmp_path / "tables", largest)
    assert not alarms_of(study, make_sites(tmp_path / "tables", tmp_path / "kept"), tmp_path / "out")


def test_numbers_that_are_too_large_to_be_summed_are_refused_by_name(tmp_path):
    study = with_column(tmp_path / "tables", 1e20)
    with pytest.raises(TrainingError, match="sites answered in the census phase"):
        alarms_of(study, make_sites(tmp_path / "tables", tmp_path / "kept"), tmp_path / "out")
    (problem,) = pd.read_csv(tmp_path / "out" / "exchanges.csv")["problem"].unique()
    assert problem == "its 'squares' is larger than 1.7e+38, the most that fits into a sum of sites."


def test_a_constant_column_at_a_site_is_no_reason_for_a_warning(tmp_path):
    folder, said = write_tables(tmp_path / "tables", rows=147), []
    table = pd.read_csv(folder / f"{NAMES[0]}.csv")
    table["lactate"] = 36.6
    table.to_csv(folder / f"{NAMES[0]}.csv", index=False)
    sites = {name: Site(name, folder / f"{name}.csv", tmp_path / name, say=said.append) for name in NAMES}
    study = make_study(folder, method="fedavg", rounds=1)
    assert not alarms_of(study, sites, tmp_path / "out")
    assert not [line for line in said if "varies by" in line]
