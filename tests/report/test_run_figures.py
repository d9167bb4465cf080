"""What the page shows of the figures of runs: each number as it is in their files, in sections that apply."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest
from test_page import Reader

from feddar.data.cohort import Cohort
from feddar.report.page import write_page
from feddar.results.figure_files import FILES, read_figures
from feddar.results.training import train
from feddar.settings import DataSettings
from helpers.browser import Opened
from helpers.cohorts import make_cohort

SECTIONS = ("Metrics with intervals", "At the operating point", "Calibration", "Decision curves")


def trained(folder, cohort, **options):
    part, test = cohort.split(0.4, seed=0)
    options = {"rounds": 2, "validation": 0.2, "source": DataSettings(data="study.csv")} | options
    train(part, test=test, out=folder, **options)
    return folder


def shown(folders, out):
    write_page(folders, out)
    return Reader(out)


def sections(page):
    return [title for title in SECTIONS if title in headings(page)]


def headings(page):
    return {line.strip() for line in page.text.splitlines()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on a cohort whose last domain has few positives."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    y = (rng.random(600) < 1 / (1 + np.exp(-2 * x[:, 0]))).astype(int)
    domain = np.where(np.arange(600) < 570, np.where(np.arange(600) % 2, "a", "b"), "small")
    cohort = Cohort.from_arrays(x, y, domain=domain, client=np.arange(600) % 3)
    place = tmp_path_factory.mktemp("figures")
    return [
        trained(place / name, cohort, method=name, threshold=0.4, lr=0.05, rounds=4) for name in ("feddar", "fedavg")
    ]


@pytest.fixture(scope="module")
def page(runs):
    return shown(runs, runs[0].parent / "page.html")


def said(of, factor=1, form=".3f"):
    if np.isnan(of.value):
        return "n/a"
    text = f"{factor * of.value:{form}}"
    ends = f" [{factor * of.low:{form}}, {factor * of.high:{form}}]" if of.interval else ""
    return f"{text}{ends}".replace("-", "−")


def test_every_figure_of_each_run_is_on_the_page_with_its_interval(runs, page):
    for folder in runs:
        found = read_figures(folder)
        parts = found.by_domain | {"all samples": found.overall}
        columns = {
            "Metrics with intervals": ("auc", "auprc", "accuracy", "log_loss", "brier"),
            "Operating point": ("threshold", "selection_rate", "sensitivity", "specificity", "ppv", "npv"),
            "Calibration": ("calibration_slope", "calibration_intercept", "ece"),
        }
        for caption, metrics in columns.items():
            rows, head = page.table(f"{caption}: {folder.name}")
            assert len(head) == 1 + len(metrics) and list(rows) == list(parts)
            for part, (counts, *cells) in rows.items():
                for cell, metric in zip(cells, metrics, strict=True):
                    percent = metric in ("accuracy", "selection_rate")
                    assert cell == said(parts[part][metric], *((100, ".1f") if percent else ())), (part, metric)
                positives = int(parts[part]["threshold"].positives)
                few = ", fewer than 10 positives" if positives < 10 else ""
                assert counts == f"{parts[part]['auc'].count:,} {positives:,} pos.{few}"
        rows, _ = page.table(f"Gaps at the operating point: {folder.name}")
        in_percent = {"selection rate (%)": (100, ".1f")}  # as the share that is flagged is
        expected = zip(rows, found.gaps.values(), strict=True)
        assert list(rows.values()) == [[said(of, *in_percent.get(name, ()))] for name, of in expected]
        assert in_percent.keys() < rows.keys()
    assert "95 % intervals (bootstrap by sample)" in page.text
    assert "predicted risk is above 0.4" in page.text and "mean nothing" not in page.text
    assert "small n 12, " in " ".join(page.text.split()), "the cohort should have a small domain"


def test_curves_are_those_of_the_files(runs, page):
    folder = runs[0]
    curve, benefit = (pd.read_csv(folder / f"{name}.csv") for name in ("calibration", "decisions"))
    own = curve[curve["name"] == "a"]
    rows, _ = page.table("feddar, calibration: a")
    assert [row[0] for row in rows.values()] == [f"{value:.3f}" for value in own["predicted"]]
    for row, (share, low, high) in zip(rows.values(), own[["observed", "low", "high"]].to_numpy(), strict=True):
        assert row[1] == f"{share:.3f}" + ("" if np.isnan(low) else f" [{low:.3f}, {high:.3f}]")
    assert own["low"].notna().sum() > 5
    lines = page.figures["figure-0-decision-0"].lines
    own = benefit[benefit["name"] == "a"].iloc[1::2]
    for name, values in {"the model": own["net_benefit"], "flagging everybody": own["flag_all"]}.items():
        assert lines[name]["data-texts"].split() == [f"{value:.3f}" for value in values]
    drawn = lines["the model"]["points"].split()
    heights = [page.figures["figure-0-decision-0"].value("top", float(point.split(",")[1])) for point in drawn]
    assert heights[:5] == pytest.approx(own["net_benefit"].tolist()[:5], abs=2e-3)


def test_intervals_are_drawn_in_the_panels_of_domains(runs, page):
    for place, name in enumerate(("a", "b")):
        for folder in runs:
            of = read_figures(folder).by_domain[name]["auc"]
            assert page.dots(f"auc-domain-{place}")[folder.name] == pytest.approx([of.value, of.low, of.high], abs=2e-3)
    assert "lines are 95 % intervals (bootstrap by sample)" in page.text


def test_few_positives_are_said_beside_the_name_everywhere(runs, tmp_path):
    one = shown(runs[:1], tmp_path / "one.html")
    text = " ".join(one.text.split())
    rows, _ = one.table("AUC in each domain")
    assert rows["small"][0].endswith("fewer than 10 positives") and "fewer" not in rows["a"][0]
    # In the table of scores of each metric, the panel of each metric's domains and curves, and the figures.
    assert text.count("fewer than 10 positives") >= 5 + 5 + 5 + 3 + 2


@pytest.mark.parametrize("threshold", [0.0001, 0.9999])
def test_where_nobody_or_everybody_is_flagged_gaps_mean_nothing(tmp_path, threshold):
    folder = trained(tmp_path / "run", make_cohort(n=240), method="fedavg", threshold=threshold)
    who = "Nobody" if threshold > 0.5 else "Everybody"
    assert f"{who} is flagged at this operating point" in shown([folder], tmp_path / "page.html").text


def test_runs_without_these_files_have_none_of_it(runs, tmp_path):
    old = shutil.copytree(runs[0], tmp_path / "old")
    for name in FILES:
        (old / name).unlink()
    page = shown([old], tmp_path / "page.html")
    assert sections(page) == [] and "95 %" not in page.text
    both = shown([old, runs[1]], tmp_path / "both.html")
    assert "Metrics with intervals: fedavg" in both.tables and "Metrics with intervals: feddar" not in both.tables


@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_other_outcomes_have_only_the_sections_that_apply(tmp_path, task):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200) if task == "multiclass" else rng.normal(size=200)
    domain = np.where(np.arange(200) < 190, np.arange(200) % 2, "few")
    cohort = Cohort.from_arrays(rng.normal(size=(200, 2)), y, domain=domain, client=np.arange(200) % 3)
    folder = trained(tmp_path / "run", cohort, method="fedavg")
    page = shown([folder], tmp_path / "page.html")
    assert sections(page) == ["Metrics with intervals"]
    _, head = page.table("Metrics with intervals: fedavg")
    expected = ["MSE", "RMSE", "MAE", "R²"] if task == "regression" else ["accuracy (%)", "AUC", "AUPRC", "log-loss"]
    assert head[1 : 1 + len(expected)] == expected and "pos." not in page.text
    rows, _ = page.table(f"{expected[0]} in each domain")
    assert rows["few"][0] == "n 4, fewer than 10 samples" and "fewer" not in rows["0"][0]
    assert ("AUC (mean over classes, each against all others) on held-out" in page.text) == (task == "multiclass")
    assert ("half the squared error" in page.text) == (task == "regression")


def test_several_outcomes_are_chosen_one_by_one(tmp_path):
    rng = np.random.default_rng(0)
    y = pd.DataFrame({name: rng.integers(0, 2, 200) for name in ("died", "icu")})
    cohort = Cohort.from_arrays(rng.normal(size=(200, 2)), y, domain=np.arange(200) % 2, client=np.arange(200) % 3)
    folder = trained(tmp_path / "run", cohort, method="fedavg")
    page = shown([folder], tmp_path / "page.html")
    assert sections(page) == list(SECTIONS)
    found = read_figures(folder).by_domain["1"]
    for outcome in ("died", "icu"):
        rows, _ = page.table(f"Calibration: {outcome}")
        assert rows["1"][1] == said(found[f"calibration_slope:{outcome}"])
    rows, _ = page.table("Metrics with intervals: all outcomes")
    assert rows["1"][1] == said(found["auc"])
    rows, _ = page.table("AUC of each outcome, mean domain")
    assert list(rows) == ["AUC of died", "AUC of icu"]
    assert "AUC (mean over outcomes) on held-out samples" in page.text
    others, _ = page.table("Metrics other than AUC, mean domain")
    assert not any(" of " in name for name in others)
    assert "Calibration: all outcomes" not in page.tables


def test_choosing_a_run_in_a_browser(page, runs, browser):
    opened = Opened(browser, runs[0].parent / "page.html")
    seen = opened.page
    sensitivity = seen.locator("#operating-point tbody tr:visible").first
    before = sensitivity.inner_text()
    seen.locator("#calibration .choose-run").select_option("fedavg")
    assert sensitivity.inner_text() != before
    assert seen.locator("[data-run='0']:visible").count() == 0
    assert seen.locator("#decisions .choose-run").input_value() == "1"
    field = seen.locator("#figure-1-decision-0 .field")
    field.hover()
    said_there = field.locator(".readout").inner_text().split("\n")
    assert re.fullmatch(r"threshold 0\.(5|48|52)", said_there[0])
    assert {line.rsplit(" ", 1)[0] for line in said_there[1:]} == {"the model", "flagging everybody", "flagging nobody"}
    for width in (1400, 360):
        opened.fits(width)
    opened.context.close()
    assert opened.wrong == []
