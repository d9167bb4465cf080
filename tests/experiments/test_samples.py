import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from feddar.errors import UserError
from feddar.experiments import samples
from feddar.experiments.common import ExperimentOptions


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out, said = tmp_path_factory.mktemp("samples") / "new", []
    return out, samples.run(ExperimentOptions(out, said.append, seeds=2, scale="small")), said


def test_it_writes_the_results_the_table_and_the_figure(done):
    out, results, said = done
    columns = ["samples", "method", "seed", "scope", "name", "metric", "value", "count"]
    pd.testing.assert_frame_equal(pd.read_csv(out / "results.csv", dtype={"name": "str"}), results, check_dtype=False)
    assert list(results.columns) == columns
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert said


def test_every_method_is_scored_on_every_domain_and_in_summary(done):
    _, results, _ = done
    assert set(results["method"]) == set(samples.LABELS)
    for _, rows in results.groupby(["samples", "method", "seed"]):
        domains = rows[rows["scope"] == "domain"].set_index("name")
        summary = rows[rows["scope"] == "summary"].set_index("name")["value"]
        assert domains["count"].sum() == samples.CLIENTS * samples.TEST_SAMPLES
        assert summary["domain_max"] == domains["value"].max()
        assert summary["domain_min"] == domains["value"].min()
        assert summary["domain_avg"] == pytest.approx(domains["value"].mean())
        assert summary["client_avg"] == pytest.approx(np.average(domains["value"], weights=domains["count"]))


def test_feddar_reaches_the_limit_far_below_the_others(done):
    _, results, _ = done
    means = samples.summary(results)["mean"]
    for count in results["samples"].unique():
        sa = means["feddar-sa", count]
        assert sa < 1.5 * samples.limit(count)
        assert all(means[method, count] > 10_000 * sa for method in samples.BASELINES)
        assert means["feddar-wa", count] > 100 * sa
        assert means["local", count] <= means["local-unpenalised", count]
    assert means["feddar-sa", 20] < means["feddar-sa", 5]


def test_the_limit_counts_the_free_parameters():
    assert samples.limit(5) == pytest.approx(9.2e-8)


def test_the_table_says_what_the_results_say(done):
    out, results, _ = done
    table = (out / "table.md").read_text(encoding="utf-8")
    ratio = samples.summary(results)["mean"]["feddar-sa", 5] / samples.limit(5)
    assert f"| FedDAR-SA / statistical limit | {ratio:.2f} |" in table
    assert "four orders of magnitude" in table


def test_one_seed_has_no_spread_and_still_a_table(tmp_path):
    results = samples.run(ExperimentOptions(tmp_path, lambda _: None, seeds=1, scale="small"))
    assert results["seed"].nunique() == 1
    assert "nan" not in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_a_notebook_whose_figures_are_drawn_by_what_is_not_here_does_not_matter(tmp_path):
    command = [sys.executable, "-m", "feddar.cli", "paper", "samples", "--scale", "small", "--seeds=1", "--out", "new"]
    environment = os.environ | {"MPLBACKEND": "module://nowhere.to_be_found"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "new" / "figure.png").exists()


@pytest.mark.parametrize("wrong", [{"scale": "huge"}, {"seeds": 0}])
def test_bad_arguments_are_refused(tmp_path, wrong):
    with pytest.raises(UserError, match=r"\.$"):
        samples.run(ExperimentOptions(tmp_path, lambda _: None, **wrong))
