"""With many clients results have metrics of domains and means over clients; those of each are a file of their own."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import feddar
from feddar.evaluation import metrics
from feddar.evaluation.fairness import observe
from feddar.report.folders import read_folders
from feddar.report.page import write_page
from feddar.results import client_metrics
from feddar.results.client_metrics import ABOUT_CLIENTS, CSV_FILE, PARQUET_FILE
from feddar.results.run_folder import METRICS_FILE, MODEL_FILE, read_metrics
from helpers.cohorts import make_cohort

CLIENTS = 12


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=480, domains=2, clients=CLIENTS).split(0.3)


@pytest.fixture
def many(monkeypatch):
    """Let there be many clients from very few on."""
    monkeypatch.setattr(metrics, "MANY_CLIENTS", CLIENTS - 1)


@pytest.fixture
def without_pyarrow(monkeypatch):
    """Let it not be found here; pandas goes on with it, for its texts."""
    monkeypatch.setattr(client_metrics, "find_spec", lambda _: None)


def trained(parts, folder, method="fedavg", **options):
    given = {"rounds": 3, "schedule": "constant"} | options
    return feddar.train(parts[0], method, test=parts[1], out=folder, **given)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "config.toml"}


def test_few_clients_are_in_every_round(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MANY_CLIENTS", CLIENTS)
    trained(parts, tmp_path)
    found = read_metrics(tmp_path / METRICS_FILE).query("scope == 'client'")
    assert len(found) == 3 * CLIENTS * len(parts[1].objective.metrics)
    assert not {PARQUET_FILE, CSV_FILE} & files_in(tmp_path).keys()


@pytest.mark.parametrize("method", ["fedavg", "feddar"])
@pytest.mark.parametrize("validation", [0, 0.2])
def test_all_but_the_rows_of_clients_is_the_same(parts, tmp_path, monkeypatch, method, validation):
    """Also their mean, to the last bit, and with what comparisons observe."""
    few = trained(parts, tmp_path / "few", method, validation=validation, observe=observe)
    monkeypatch.setattr(metrics, "MANY_CLIENTS", CLIENTS - 1)
    run = trained(parts, tmp_path / "many", method, validation=validation, observe=observe)
    rest = few.history[~few.history["scope"].isin(["client", "cell"])].reset_index(drop=True)
    assert {"summary", "domain", "all"} <= set(rest["scope"])
    pd.testing.assert_frame_equal(run.history, rest, check_exact=True)
    pd.testing.assert_frame_equal(read_metrics(tmp_path / "many" / METRICS_FILE), rest, check_dtype=False)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "feddar"])
def test_each_client_is_in_a_file_of_the_model_in_use(parts, tmp_path, many, method):
    pytest.importorskip("pyarrow")
    run = trained(parts, tmp_path, method, validation=0.2)
    found, whole = pd.read_parquet(tmp_path / PARQUET_FILE), run.evaluate(parts[1])
    expected = whole[whole["scope"] == "client"].reset_index(drop=True)
    assert set(found["name"]) == set(parts[1].clients)
    pd.testing.assert_frame_equal(found, expected, check_exact=True, check_dtype=False)
    # The mean over them is that of the round in use, whose scores the clients computed themselves.
    mean = run.results().query("name == 'client_avg'").set_index("metric")["value"]
    averaged = found.groupby("metric")["value"].mean()
    np.testing.assert_allclose(averaged[mean.index], mean, rtol=1e-5)


def test_without_pyarrow_it_is_a_packed_csv(parts, tmp_path, many, without_pyarrow):
    run = trained(parts, tmp_path)
    assert not (tmp_path / PARQUET_FILE).exists()
    expected = run.evaluate(parts[1]).query("scope == 'client'").reset_index(drop=True)
    found = pd.read_csv(tmp_path / CSV_FILE, converters={"value": float})
    pd.testing.assert_frame_equal(found, expected, check_exact=True, check_dtype=False)


@pytest.mark.parametrize("packed", [False, True])
def test_a_stopped_run_leaves_the_same_files(parts, tmp_path, many, packed, request):
    if packed:
        request.getfixturevalue("without_pyarrow")
    file = CSV_FILE if packed else PARQUET_FILE
    trained(parts, tmp_path / "whole")
    trained(parts, tmp_path / "run", rounds=2)
    before = (tmp_path / "run" / file).read_bytes()
    trained(parts, tmp_path / "run", resume=True)
    found, expected = (files_in(tmp_path / name) for name in ("run", "whole"))
    assert found == expected
    assert expected.keys() > {file, METRICS_FILE, MODEL_FILE}
    assert found[file] != before


class Killed(BaseException):
    """What ends a training."""


def test_while_it_is_trained_further_there_is_no_file_of_an_earlier_model(parts, tmp_path, many):
    def kill(_):
        raise Killed

    trained(parts, tmp_path, rounds=2)
    with pytest.raises(Killed):
        trained(parts, tmp_path, resume=True, callbacks=[kill])
    assert not {PARQUET_FILE, CSV_FILE} & files_in(tmp_path).keys()


def test_pages_and_tables_say_where_they_are(parts, tmp_path, many):
    trained(parts, tmp_path / "run")
    compared = read_folders([tmp_path / "run"])
    assert compared.summaries["client_avg"] == "mean client"
    write_page([tmp_path / "run"], tmp_path / "report.html")
    assert ABOUT_CLIENTS in (tmp_path / "report.html").read_text()


def test_a_comparison_says_where_they_are(parts, tmp_path, many):
    pytest.importorskip("fairlearn")
    whole = make_cohort(n=480, domains=2, clients=CLIENTS)
    feddar.compare(whole, ["fedavg", "local"], folds=2, rounds=2, out=tmp_path, references=False)
    results = pd.read_csv(tmp_path / "results.csv")
    assert not set(results["scope"]) & {"client", "cell"}
    assert (results.query("name == 'client_avg'")["value"] > 0).all()
    assert " ".join(ABOUT_CLIENTS.split()) in " ".join((tmp_path / "table.md").read_text().split())
    assert ABOUT_CLIENTS in (tmp_path / "report.html").read_text()
    assert len([*tmp_path.glob(f"runs/*/*/{PARQUET_FILE}")]) == 4
