"""Commands and snippets of the pages run as they stand, results are those of their files, citations are the same.

Those of deploy.md and keys.md are run in tests/federation, those of the tutorials in test_docs_site.py. Commands that
take hours, other data or a GPU are only parsed.
"""

import re
import shlex
import tomllib
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.main import get_command

import feddar as package
from feddar.cli import app
from feddar.experiments import regret
from feddar.methods import METHODS
from feddar.report.numbers import paper_number
from helpers.cohorts import make_cohort
from helpers.command import feddar

FAST = {"run": ["--rounds", 2, "--jobs", 1], "compare": ["--rounds", 2, "--jobs", 1, "--folds", 1, "--seeds", 1]}
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
COMMANDS = get_command(app).commands


@pytest.fixture
def place(tmp_path):
    """Return a folder with the tables that the pages speak of."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(120, 2)), columns=["age", "crp"])
    table["hospital"], table["race"] = ["h1", "h2"] * 60, rng.choice(["a", "b"], 120)
    table["ward"] = rng.choice(["x", "y", "z"], 120)
    table["outcome"] = np.where(table["age"] > 0, "yes", "no")
    table.to_csv(tmp_path / "study.csv", index=False)
    new = table.drop(columns="outcome").head(20)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet")
    return tmp_path


def blocks_of(page):
    """Return the language and the text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.S | re.M)


def run_snippet(code, names, place):
    with chdir(place), redirect_stdout(StringIO()):
        exec(code, names)


def run_commands(lines, place):
    for line in lines:
        command, *arguments = shlex.split(line, comments=True)[1:]
        feddar(command, *arguments, *FAST.get(command, []), cwd=place)


def test_the_examples_of_using_run(place):
    names: dict[str, object] = {}
    for language, block in blocks_of(ROOT / "docs" / "using.md"):
        if language == "python":
            run_snippet(block, names, place)
        else:
            run_commands(block.splitlines(), place)
    assert {"predictions.csv", "predictions.parquet", "my-run"} <= {path.name for path in place.iterdir()}
    assert len(names["risks"]) == 20


def test_the_examples_of_the_readme_run(place):
    readme = blocks_of(ROOT / "README.md")
    (own,) = (block for _, block in readme if block.startswith("feddar run "))
    run_commands(own.splitlines(), place)
    assert {"my-run", "report.html", "predictions.csv"} <= {path.name for path in place.iterdir()}
    (place / "predictions.csv").unlink()
    table = pd.read_csv(place / "study.csv")
    samples = {"x": table[["age", "crp"]], "y": table["outcome"], "race": table["race"], "hospital": table["hospital"]}
    names = samples | {"x_new": table[["age", "crp"]].head(3), "race_new": table["race"].head(3)}
    (snippet,) = (block for language, block in readme if language == "python")
    (place / "report.html").unlink()
    run_snippet(snippet.replace('"my-run"', '"saved"'), names, place)
    assert names["run"].round == 20 and (place / "report.html").exists() and (place / "saved").is_dir()


@pytest.mark.more
def test_the_examples_of_comparing_run(place):
    (snippet,) = (block for language, block in blocks_of(ROOT / "docs" / "compare.md") if language == "python")
    names = {"feddar": package, "cohort": make_cohort(n=200)}
    run_snippet(snippet.replace("rounds=20", "rounds=2"), names, place)
    assert set(names["found"].results["method"]) == {"fedavg", "feddar"}
    assert (place / "my-comparison" / "report.html").exists()


@pytest.mark.more
def test_commands_on_a_table_of_ones_own_run_on_every_page(place):
    lines = [
        line
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r"feddar (run|cohort|compare) study\.csv ", line) and "--device" not in line
    ]
    assert len(lines) > 5
    run_commands(lines, place)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_those_that_feddar_takes(page):
    text = page.read_text()
    for line in re.findall(r"^(?: {4}|!)?(feddar .*?)(?: &)?$", text, flags=re.M):
        name, *arguments = shlex.split(line, comments=True)[1:]
        COMMANDS[name].make_context(name, arguments)
    for line in re.findall(r"`feddar ([a-z][^`\n]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
        command = COMMANDS[line.split()[0]]
        options = {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", line)) <= options | {"--help"}, line


def test_citation_and_changelog_are_those_of_this_version_and_of_one_paper():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation, paper = (ROOT / "CITATION.cff").read_text(), (ROOT / "docs" / "paper.md").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"version = {{{project['version']}}}" in paper
    assert f"\n## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text()
    texts = [citation, paper, (ROOT / "README.md").read_text(), (ROOT / "docs" / "method.md").read_text()]
    assert [set(re.findall(r"arXiv[:.](\d{4}\.\d{5})", text)) for text in texts] == [{"2209.04007"}] * 4


def test_every_row_of_the_regret_table_follows_from_its_file():
    results = pd.read_csv(RESULTS / "never-worse.csv", keep_default_na=False, na_values=[""])
    planned = results.loc[results["method"].isin(list(METHODS)), regret.CELL].drop_duplicates()
    assert rows_of(regret.table(results, planned)) <= rows_of((RESULTS / "never-worse.md").read_text())


def rows_of(text: str) -> set[tuple[str, str]]:
    """Return the rows of all tables of a Markdown text, each with the heading above it."""
    found, heading = set(), ""
    for line in text.splitlines():
        heading = line if line.startswith("#") else heading
        if line.startswith("|"):
            found.add((heading, line))
    return found


def test_the_table_of_digits_at_full_scale_follows_from_its_file():
    results = pd.read_csv(RESULTS / "digits-full.csv")
    accuracy = results[(results["scope"] == "summary") & (results["metric"] == "accuracy")]
    shown = {
        tuple(
            paper_number("accuracy", found.loc[found["name"] == f"domain_{name}", "value"].item())
            for name in ("max", "min", "avg")
        )
        for _, found in accuracy.groupby("method")
    }
    section = (RESULTS / "digits.md").read_text().partition("## At the paper's own scale")[2]
    cells = [[cell.strip() for cell in row.split("|")[2:5]] for row in section.splitlines() if row.startswith("| ")]
    found = {tuple(row) for row in cells if row[0][0].isdigit()}
    assert len(found) == 4 and found == shown


def test_the_first_table_of_the_readme_agrees_with_its_file():
    """But for rounding, and .0015 since the table was made on another processor."""
    results = pd.read_csv(RESULTS / "covid-mx.csv")
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().partition("**Without data at hand**")[0].splitlines()
        if line.startswith("|") and "---" not in line
    ]
    figures = {"mean group": ("domain_avg", "auc"), "worst group": ("domain_min", "auc")}
    figures |= {"log-loss, mean group": ("domain_avg", "log_loss")}
    means = results.groupby(["method", "name", "metric"])["value"].mean()
    for method, *cells in rows:
        for title, cell in zip(header[1:], cells, strict=True):
            figure = figures.get(title, (title, "auc"))
            assert abs(float(cell.split("±")[0]) - means[method.lower(), *figure]) < 0.0065, (method, title)
    assert [row[0] for row in rows] == ["FedAvg", "feddar"]
