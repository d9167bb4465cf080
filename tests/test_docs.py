"""The examples of docs/using.md run as they stand there, results are those of their files, citations are the same."""

import re
import shlex
import tomllib
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

from feddar.experiments import regret
from feddar.methods import METHODS
from feddar.report.numbers import paper_number
from helpers.command import feddar

FAST = ["--rounds", 2, "--jobs", 1]
ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "using.md").read_text()
RESULTS = ROOT / "docs" / "results"


def test_the_examples_of_using_run(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(120, 2)), columns=["age", "crp"])
    table["hospital"], table["race"] = ["h1", "h2"] * 60, rng.choice(["a", "b"], 120)
    table["ward"] = rng.choice(["x", "y", "z"], 120)
    table["outcome"] = np.where(table["age"] > 0, "yes", "no")
    table.to_csv(tmp_path / "study.csv", index=False)
    new = table.drop(columns="outcome").head(20)
    new.to_csv(tmp_path / "new.csv", index=False)
    new.to_parquet(tmp_path / "new.parquet")
    names: dict[str, object] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, flags=re.S | re.M):
        if language == "python":
            with chdir(tmp_path), redirect_stdout(StringIO()):
                exec(block, names)
        else:
            for line in block.splitlines():
                command, *arguments = shlex.split(line, comments=True)[1:]
                feddar(command, *arguments, *(FAST if command == "run" else []), cwd=tmp_path)
    assert {"predictions.csv", "predictions.parquet", "my-run"} <= {path.name for path in tmp_path.iterdir()}
    assert len(names["risks"]) == 20


def test_the_citation_is_that_of_this_version_and_of_one_paper():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation, paper = (ROOT / "CITATION.cff").read_text(), (ROOT / "docs" / "paper.md").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"version = {{{project['version']}}}" in paper
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
