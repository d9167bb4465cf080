"""The figures of a run are in its folder, and are those of its model."""

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from sklearn.metrics import log_loss, roc_auc_score

import feddar
from feddar.errors import UserError
from feddar.report.cards.files import write_card
from feddar.report.missing_domains import say_cost
from feddar.report.page import write_page
from feddar.results.figure_files import FILES, read_figures, read_missing_domains, remove_figures


def parts():
    """Return training and test part of a small table with a yes/no outcome."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3)).astype(np.float32)
    y = (rng.random(600) < 1 / (1 + np.exp(-2 * x[:, 0]))).astype(int)
    cohort = feddar.Cohort.from_arrays(x, y, domain=rng.choice(["a", "b"], 600), client=rng.choice(["x", "y"], 600))
    return cohort.split(test=0.3, seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "run"
    train, test = parts()
    return feddar.train(train, test=test, rounds=2, out=folder), test, folder


def test_a_run_writes_its_figures_and_they_are_read_as_they_were(trained):
    run, test, folder = trained
    figures, expected = read_figures(folder), run.figures(test)
    for table in ("table", "calibration", "decisions"):
        pd.testing.assert_frame_equal(getattr(figures, table), getattr(expected, table), check_dtype=False)
    evaluated = run.evaluate(test).set_index(["scope", "name", "metric"])["value"]
    for name, found in figures.by_domain.items():
        assert found["auc"].value == pytest.approx(evaluated["domain", name, "auc"])
    assert np.isfinite(figures.overall["calibration_slope"].low)


def test_a_run_writes_what_missing_domains_would_cost(trained):
    run, test, folder = trained
    found = read_missing_domains(folder).set_index(["scope", "name", "metric"])
    evaluated = run.evaluate(test).set_index(["scope", "name", "metric"])
    pd.testing.assert_series_equal(found["value"], evaluated["value"].loc[found.index], rtol=1e-12)
    risks = run.predict_proba(test.x[0], client=test.client_names, missing_domain="mixture")
    for name, number in (("a", 0), ("b", 1)):
        rows = (test.domain == number).numpy()
        y, p = test.y.numpy()[rows], risks[rows, 1]
        assert found.loc["domain", name, "log_loss"]["missing"] == pytest.approx(log_loss(y, p), rel=1e-5)
        assert found.loc["domain", name, "auc"]["missing"] == pytest.approx(roc_auc_score(y, p), abs=1e-9)
        assert found.loc["domain", name, "auc"]["count"] == len(y)
    other = feddar.train(parts()[0], "fedavg", rounds=1)
    assert other.missing_domains(test) is None


def test_what_missing_domains_would_cost_is_said_on_terminal_page_and_card(trained, tmp_path, capsys):
    folder = trained[2]
    say_cost(Console(width=300), folder, "auc")
    found = read_missing_domains(folder).set_index(["name", "metric"])
    auc, loss = (found.loc["domain_avg", metric] for metric in ("auc", "log_loss"))
    said = capsys.readouterr().out
    assert f"the mean domain had AUC {auc['missing']:.3f} instead of {auc['value']:.3f}" in said
    assert f"log-loss {loss['missing']:.3f} instead of {loss['value']:.3f}: missing-domains.csv" in said
    write_page([folder], tmp_path / "page.html")
    write_card(folder, tmp_path / "card.md")
    for text in ((tmp_path / file).read_text() for file in ("page.html", "card.md")):
        assert "If the domain were missing" in text and f"{auc['missing']:.3f}" in text


def test_resuming_writes_the_same_figures(trained):
    folder = trained[2]
    before = {file: (folder / file).read_bytes() for file in FILES}
    remove_figures(folder)
    assert read_figures(folder) is None
    train, test = parts()
    feddar.train(train, test=test, rounds=2, out=folder, resume=True)
    assert {file: (folder / file).read_bytes() for file in FILES} == before


def test_a_damaged_file_is_refused_in_a_sentence(trained, tmp_path):
    folder = trained[2]
    for file in FILES:
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "figures.csv").write_text("scope,name\n")
    with pytest.raises(UserError, match=r"cannot read the figures in .*figures\.csv"):
        read_figures(tmp_path)


def test_the_operating_point_may_change_when_a_run_is_resumed(trained):
    folder = trained[2]
    train, test = parts()
    feddar.train(train, test=test, rounds=2, out=folder, resume=True, flag="20%", validation=0.1)
    found = read_figures(folder).overall
    assert found["threshold"].value != 0.5 and found["selection_rate"].value == pytest.approx(0.2, abs=0.12)
