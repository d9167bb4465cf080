"""Options of sources on the command line, and in files that version 0.1 wrote."""

import tomllib

import numpy as np
import pandas as pd
import pytest

from feddar.data.table_options import TableOptions
from feddar.settings import write_config
from helpers.command import COLUMNS, feddar

OTHERS = {"difference": 1.0, "label": "age", "clients": 5}
"""Options of other sources that version 0.1 wrote for tables, too."""


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(120, 2)), columns=["age", "crp"])
    table["hospital"], table["race"] = ["h1", "h2"] * 60, rng.choice(["a", "b"], 120)
    table["outcome"] = np.where(table["age"] + 0.3 * rng.normal(size=120) > 0, "yes", "no")
    table.to_csv(tmp_path / "study.csv", index=False)
    return tmp_path


def data_of(folder):
    return tomllib.loads((folder / "config.toml").read_text())["data"]


def as_version_0_1(folder):
    """Write a folder's configuration as version 0.1 would have."""
    tables = tomllib.loads((folder / "config.toml").read_text())
    write_config(folder / "config.toml", **(tables | {"data": OTHERS | tables["data"]}))


def test_a_run_keeps_the_options_of_its_own_source(table):
    feddar("run", "study.csv", *COLUMNS, "--rounds", 1, "--out", "run", cwd=table)
    own = {name for name, field in TableOptions.model_fields.items() if field.default is not None}
    assert set(data_of(table / "run")) == own | {"data", "client", "domain", "target"}
    feddar("report", "run", cwd=table)
    assert ">image_size<" in (table / "report.html").read_text()
    feddar("run", "synthetic", "--samples", 4, "--rounds", 1, "--out", "drawn", cwd=table)
    assert data_of(table / "drawn") == {"data": "synthetic", "test": 0.2, "samples": 4, "alpha": 0.4}


def test_domains_may_be_learned_without_a_column(table):
    """The method follows, unless it is said; the run goes on, predicts and is reported without a column, too."""
    asked = ["--client", "hospital", "--target", "outcome", "--rounds", 2, "--domain", "auto:2"]
    feddar("run", "study.csv", *asked, "--ignore", "race", "--versus", "fedavg", "--out", "run", cwd=table)
    settings = tomllib.loads((table / "run" / "config.toml").read_text())["training"]
    assert (settings["method"], settings["components"]) == ("feddar-mixture", 2)
    before = (table / "run" / "metrics.csv").read_bytes()
    feddar("run", "study.csv", "--resume", "--out", "run", cwd=table)
    assert (table / "run" / "metrics.csv").read_bytes() == before
    assert {*pd.read_csv(table / "run" / "metrics.csv").query("scope == 'domain'")["name"]} == {"all"}
    feddar("predict", "run", "study.csv", "--out", "new.csv", cwd=table)
    assert {*pd.read_csv(table / "new.csv")["head"]} == {"components at h1", "components at h2"}
    feddar("card", "run", "--out", "card.md", cwd=table)
    assert "All sites use the same components" in (table / "card.md").read_text()
    assert "2 domains" not in feddar("cohort", "study.csv", *asked[:4], *asked[-2:], cwd=table)
    both = feddar("run", "study.csv", *asked, "--components", 3, "--out", "other", cwd=table, code=2)
    assert "--domain auto:2 and --components 3 say two numbers" in both
    study = feddar("study", "study.csv", *asked[2:4], *asked[-2:], cwd=table, code=2)
    assert "between sites a column names the domains by which results are reported" in study
    assert not (table / "other").exists() and not (table / "study.toml").exists()


def test_another_operating_point_replaces_that_of_the_file(table):
    run = ["run", "study.csv", "--rounds", 1, "--out", "run"]
    feddar(*run, *COLUMNS, "--flag", "10%", cwd=table)
    before = (table / "run" / "metrics.csv").read_bytes()
    feddar(*run, "--resume", "--sensitivity", 0.9, cwd=table)
    settings = tomllib.loads((table / "run" / "config.toml").read_text())["training"]
    assert settings["sensitivity"] == 0.9 and "flag" not in settings
    assert (table / "run" / "metrics.csv").read_bytes() == before
    feddar("report", "run", cwd=table)
    page = (table / "report.html").read_text()
    assert "so that 90 % of those with the outcome are flagged" in page and "10 % of them" not in page


def test_runs_of_version_0_1_go_on_predict_and_are_reported(table):
    feddar("run", "study.csv", *COLUMNS, "--schedule", "constant", "--rounds", 1, "--out", "old", cwd=table)
    feddar("run", "study.csv", *COLUMNS, "--rounds", 1, "--method", "fedavg", "--out", "new", cwd=table)
    as_version_0_1(table / "old")
    feddar("predict", "old", "study.csv", cwd=table)
    feddar("predict", "old", "synthetic", cwd=table, code=2)  # it has other inputs, but options are no obstacle
    feddar("report", "old", "new", cwd=table)
    page = (table / "report.html").read_text()
    assert ">image_size<" in page
    assert ">difference<" not in page
    feddar("run", "study.csv", "--config", "old/config.toml", "--out", "again", cwd=table)
    assert data_of(table / "again") == data_of(table / "new")
    assert (table / "again" / "metrics.csv").read_bytes() == (table / "old" / "metrics.csv").read_bytes()
    feddar("run", "study.csv", "--resume", "--rounds", 2, "--out", "old", cwd=table)
    assert data_of(table / "old") == data_of(table / "new")


def test_comparisons_of_version_0_1_go_on(table):
    compare = [
        "compare",
        "synthetic",
        "--samples",
        6,
        "--methods",
        "fedavg,local",
        "--rounds",
        1,
        "--folds",
        2,
        "--no-references",
    ]
    feddar(*compare, "--out", "c", cwd=table)
    kept = data_of(table / "c")
    as_version_0_1(table / "c")
    path = table / "c" / "config.toml"
    path.write_text(path.read_text().replace("alpha = 0.4\n", ""))  # it was unset where the default was meant
    feddar("compare", "synthetic", "--resume", "--out", "c", "--methods", "fedavg,local,fedprox", cwd=table)
    assert data_of(table / "c") == kept
    other = feddar("compare", "synthetic", "--resume", "--out", "c", "--samples", 5, cwd=table, code=2)
    assert "was started with samples=6, not 5" in other


@pytest.mark.parametrize("command", ["run", "compare", "cohort"])
def test_a_flag_of_another_source_names_the_sources_it_is_for(table, command):
    said = feddar(command, "study.csv", *COLUMNS, "--clients", 3, cwd=table, code=2)
    assert said == "feddar: --clients is for digits and fairface, not for study.csv: leave it out.\n"
    assert "--client is for tables, eicu, covid-mx and acs-income, not for exam" in feddar(
        command, "exam", "--client", "h", cwd=table, code=2
    )


def test_a_study_has_the_options_of_tables_alone(table):
    assert "No such option" in feddar("study", "study.csv", *COLUMNS, "--clients", 3, cwd=table, code=2)
    assert "--image-size" in feddar("study", "--help-all", cwd=table)


def test_help_says_which_sources_an_option_is_for_and_what_its_defaults_are(tmp_path):
    shown = " ".join(feddar("run", "--help-all", cwd=tmp_path).split())
    assert "tables, eicu, covid-mx, acs-income: Column that names the client" in shown
    assert "digits, fairface: How many clients are drawn. [default: 5]" in shown
    assert "Samples per client. [default: 20 (synthetic), 500 (digits, fairface)]" in shown
    assert "--test FLOAT Share of samples held out for testing. [default: 0.2]" in shown
    assert "Weight decay of the optimiser. [default: 0.0; 0.001 (exam), 0.03 (eicu)]" in shown
    assert "Give heads a constant term. [default: yes; no (synthetic)]" in shown


def test_a_cohort_lists_the_options_of_its_source(table):
    assert "options of synthetic: --test, --samples, --alpha\n" in feddar("cohort", "synthetic", cwd=table)
    shown = " ".join(feddar("cohort", "study.csv", *COLUMNS, cwd=table).split()).partition("options of ")[2]
    assert shown.startswith("tables: --test, --client, --domain")
    assert "--clients" not in shown
