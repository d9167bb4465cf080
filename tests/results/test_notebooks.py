"""What notebooks show of cohorts, runs and comparisons has the numbers of their frames, and no markup of its names."""

import re

import pytest

import feddar
from feddar.data.notebooks import by_name
from helpers.cohorts import make_cohort
from helpers.training import train


def test_a_cohort_shows_who_holds_what():
    cohort = make_cohort()
    shown = cohort._repr_html_()
    for name in (*cohort.clients, *cohort.domains):
        assert f"<th>{name}</th>" in shown
    assert [int(each) for each in re.findall(r"<td>(\d+)</td>", shown)] == cohort.counts.flatten().tolist()
    markup = feddar.Cohort.from_arrays([[1.0], [2.0]] * 20, [0, 1] * 20, domain=["<b>", "x"] * 20)
    assert "<b>" not in markup._repr_html_()


def test_a_run_shows_its_metrics_by_domain_and_one_without_a_test_part_shows_none():
    part, test = make_cohort(n=300).split(0.3, 0)
    run = feddar.train(part, test=test, rounds=2)
    results = run.results()
    shown = by_name(results, "metric")
    for place, row in shown.iterrows():
        own = results.set_index(["scope", "name"]).loc[[place]].set_index("metric")["value"]
        assert row.to_dict() == pytest.approx(own.to_dict(), abs=5e-4)
    assert set(shown.index.get_level_values(0)) == {"all", "domain", "summary"}
    assert "<td>" in run._repr_html_()
    assert "<td>" not in train(part, "fedavg", rounds=1)._repr_html_()


def test_a_comparison_shows_the_mean_of_its_folds():
    methods = ["fedavg", "local"]
    found = feddar.compare(make_cohort(n=300), methods, folds=2, rounds=1, references=False)
    shown = by_name(found.results[found.results["metric"] == found.metric], "method")
    assert list(shown.columns) == methods
    means = found.results.query("metric == @found.metric and name == 'domain_min'").groupby("method")["value"].mean()
    assert shown.loc[("summary", "domain_min")].to_dict() == pytest.approx(means.to_dict(), abs=5e-4)
    assert repr(found) in found._repr_html_().replace("&#x27;", "'")
