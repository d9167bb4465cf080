import numpy as np
import pandas as pd
import pytest

from feddar.experiments import convergence
from feddar.experiments.common import ExperimentOptions


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("convergence") / "new"
    return out, convergence.run(ExperimentOptions(out, lambda _: None, seeds=3, scale="small"))


def test_it_writes_the_results_the_table_and_the_figure(done):
    out, results = done
    varying = ["panel", "clients", "samples", "round", "bound"]
    assert list(results.columns) == [*varying, "method", "seed", "scope", "name", "metric", "value", "count"]
    pd.testing.assert_frame_equal(pd.read_csv(out / "results.csv"), results, check_dtype=False)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "never exceeds the bound: 3 runs" in (out / "table.md").read_text(encoding="utf-8")


def test_every_run_descends_in_a_straight_line_under_the_bound(done):
    rate = done[1].query("panel == 'rate'")
    assert (rate["value"] <= rate["bound"]).all()
    for _, run in rate.groupby("seed"):
        logs = np.log10(run["value"].to_numpy())
        assert len(logs) == convergence.RATE_ROUNDS + 1
        assert logs[-1] < -11
        assert np.corrcoef(run["round"], logs)[0, 1] < -0.999


def test_more_clients_need_fewer_samples_each(done):
    needed = convergence.needed(convergence.medians(done[1]))
    assert needed[160] < needed[40] < needed[10]


def test_too_few_samples_do_not_converge_and_are_shown(done):
    grid = convergence.medians(done[1])
    assert grid.loc[1, 10] > 0.5
    assert grid.loc[16, 160] < 1e-4


def test_the_bound_is_the_theorems():
    bound = convergence.bound(0.6, progress=0.25, rounds=np.array([0, 2]))
    np.testing.assert_allclose(bound, [0.6, 0.6 * (1 - 0.25 * 0.64 / 2)])


def test_needed_is_the_least_from_which_on_the_target_is_met():
    grid = pd.DataFrame({10: [1.0, 1e-4, 1.0], 20: [1e-4, 1.0, 1e-5], 40: [1e-4, 1e-4, 1e-5]}, index=[1, 2, 4])
    needed = convergence.needed(grid)
    assert np.isnan(needed[10])
    assert list(needed[[20, 40]]) == [4, 1]


def test_a_broken_bound_is_admitted(done):
    results = done[1].copy()
    results.loc[results.index[5], "bound"] = 0.0
    assert convergence.verdict(results).startswith("In 1 of ")
