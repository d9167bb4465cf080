"""The figures of a run are in its folder, and are those of its model."""

import numpy as np
import pandas as pd
import pytest

import feddar
from feddar.errors import UserError
from feddar.results.figure_files import FILES, read_figures, remove_figures


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
