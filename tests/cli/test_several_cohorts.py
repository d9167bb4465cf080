"""Comparisons on several cohorts: a folder for each, and an overview of all."""

import numpy as np
import pandas as pd
import pytest

from helpers.command import COLUMNS, feddar, names_in

COMPARE = ["compare", "study.csv,other.csv"]
SMALL = [*COLUMNS, "--methods", "fedavg,feddar-wa", "--folds", 2, "--rounds", 1, "--no-references", "--jobs", 1]


@pytest.fixture
def tables(tmp_path):
    for seed, name in enumerate(("study", "other")):
        rng = np.random.default_rng(seed)
        table = pd.DataFrame(rng.normal(size=(160, 2)), columns=["age", "crp"])
        table["hospital"], table["race"] = ["h1", "h2"] * 80, rng.choice(["a", "b"], 160)
        table["outcome"] = np.where(table["age"] + 0.3 * rng.normal(size=160) > 0, "yes", "no")
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def cells(table):
    """Return the cells of the first table in Markdown, without stars."""
    rows = [line.strip("| ").replace("**", "").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return pd.DataFrame(rows[2:], columns=rows[0]).set_index("Methods")


def test_each_cohort_has_a_folder_and_all_have_an_overview(tables):
    shown = feddar(*COMPARE, *SMALL, "--out", "both", cwd=tables)
    both = tables / "both"
    assert names_in(both) == {"config.toml", "study", "other", "results.csv", "table.md", "report.html"}
    results = pd.read_csv(both / "results.csv")
    assert results.columns[0] == "cohort"
    for name, part in results.groupby("cohort"):
        pd.testing.assert_frame_equal(
            part.drop(columns="cohort").reset_index(drop=True), pd.read_csv(both / name / "results.csv")
        )
    overview = cells((both / "table.md").read_text())
    summary = results[(results["name"] == "domain_avg") & (results["metric"] == "auc")]
    means = summary.groupby(["method", "cohort"])["value"].mean().unstack()
    for name in ("study", "other"):
        shown_means = overview[f"{name}, mean AUC (higher)"].str.split(" ").str[0].astype(float)
        np.testing.assert_allclose(shown_means, means[name], atol=0.0005)
    ranks = means.rank(ascending=False).mean(axis=1)
    np.testing.assert_allclose(overview["Rank"].astype(float), ranks, atol=0.05)
    page = (both / "report.html").read_text()
    assert 'href="study/report.html"' in page and "other, worst AUC" in page
    assert "All cohorts" in shown and "Saved in both: " in shown
    assert "already holds results" in feddar(*COMPARE, *SMALL, "--out", "both", cwd=tables, code=2)


def test_what_was_stopped_goes_on_with_the_options_it_was_begun_with(tables):
    feddar(*COMPARE, *SMALL, "--out", "whole", cwd=tables)
    (tables / "cut").mkdir()
    (tables / "whole" / "config.toml").rename(tables / "cut" / "config.toml")
    (tables / "whole" / "study").rename(tables / "cut" / "study")  # as if it was stopped before the second began
    before = (tables / "cut" / "study" / "results.csv").read_bytes()
    feddar(*COMPARE, "--resume", "--jobs", 1, "--out", "cut", cwd=tables)
    assert (tables / "cut" / "study" / "results.csv").read_bytes() == before
    for name in ("results.csv", "table.md", "other/results.csv", "other/config.toml"):
        assert (tables / "cut" / name).read_bytes() == (tables / "whole" / name).read_bytes(), name
    feddar(*COMPARE, "--resume", "--jobs", 1, "--methods", "fedavg,feddar-wa,fedrep", "--out", "cut", cwd=tables)
    assert list(cells((tables / "cut" / "table.md").read_text()).index) == ["fedavg", "feddar-wa", "fedrep"]


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ("study.csv,nothing.csv", [], "there is no file or folder nothing.csv"),
        ("study.csv,exma", [], "unknown cohort 'exma': did you mean 'exam'?"),
        ("study.csv,./study.csv", [], "'study.csv' and './study.csv' would be kept in one folder"),
        ("study.csv,exam", [], "--client is for tables"),
        ("study.csv,other.csv", ["--folds", "2", "--test", "0.3"], "--test is for one split"),
        ("study.csv,other.csv", ["--resume", "--out", "none"], "there is no comparison in none"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(tables, data, more, said):
    assert said in feddar("compare", data, *COLUMNS, *more, cwd=tables, code=2)
    assert names_in(tables) == {"study.csv", "other.csv"}


def test_a_path_may_have_a_comma(tables):
    (tables / "study.csv").rename(tables / "a,b.csv")
    feddar("compare", "a,b.csv", *SMALL, "--out", "one", cwd=tables)
    assert "runs" in names_in(tables / "one")
