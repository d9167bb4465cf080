"""``feddar init``: a configuration whose every line works, and a schema that knows every option."""

import io
import json
import re
import sys
import tomllib

import numpy as np
import pandas as pd
import pytest

from feddar.cli.configuration import SCHEMA_FILE, configuration_schema
from feddar.data.sources import SOURCES
from feddar.data.table_options import TableOptions
from feddar.settings import Plan, Settings
from helpers.command import COLUMNS, feddar, names_in


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    pd.DataFrame({
        "hospital": random.choice(["A", "B"], 300), "race": random.choice(["x", "y"], 300),
        "stage_code": random.integers(1, 5, 300), "outcome": random.integers(0, 2, 300),
    }).to_csv(tmp_path / "patients.csv", index=False)  # fmt: skip
    return tmp_path


def test_every_line_of_the_configuration_is_a_default_or_what_was_said(folder):
    said = feddar("init", "patients.csv", "--missing", "?,-9", cwd=folder)
    assert "train with: feddar run patients.csv --config feddar.toml" in said
    assert "column 'stage_code' holds whole numbers that may be codes" in said
    text = (folder / "feddar.toml").read_text()
    assert "stage_code" in text
    assert tomllib.loads(text) == {
        "data": {"client": "hospital", "domain": "race", "target": "outcome", "missing": "?,-9"}, "training": {},
    }  # fmt: skip
    whole = tomllib.loads(re.sub(r"(?m)^# (?=[a-z_]+ = )", "", text))
    assert Settings(**whole["training"]) == Settings()
    assert whole["data"] | {"data": ""} == TableOptions(data="", **whole["data"]).model_dump(exclude_none=True)
    for model in (Settings, TableOptions):
        assert all(re.search(rf"(?m)^(# )?{name} =", text) for name in model.model_fields if name != "data")
    assert max(map(len, text.splitlines())) <= 112


def test_the_configuration_trains(folder):
    feddar("init", "patients.csv", "--out", "new/mine.toml", cwd=folder)
    feddar("run", "patients.csv", "--config", "new/mine.toml", "--rounds", 1, "--out", "run", cwd=folder)
    assert tomllib.loads((folder / "run/config.toml").read_text())["data"]["client"] == "hospital"


def test_on_a_terminal_it_asks_and_offers_the_likely_columns(folder, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("patients.csv\n\nstage_code\n\n"))
    feddar("init", cwd=folder)
    found = tomllib.loads((folder / "feddar.toml").read_text())
    assert found["data"] == {"client": "hospital", "domain": "stage_code", "target": "outcome"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Which file or folder holds the table? name it: feddar init TABLE."),
        (("exam",), "exam is built in and needs no configuration: feddar run exam"),
        (
            ("odd.csv", "--client", "a"),
            "Which column names the group of patients? say it: --domain COLUMN, of a, b, c.",
        ),
        (("patients.csv", "--target", "outcom"), "outcom"),
        (("patients.csv", "--out", "odd.csv/x.toml"), "cannot write to odd.csv: "),
        (("patients.csv", "--out", "odd.csv"), "odd.csv exists: choose another file with --out, or delete it."),
    ],
)
def test_what_it_cannot_do_is_said_in_one_sentence_and_nothing_is_written(folder, arguments, sentence):
    (folder / "odd.csv").write_text("a,b,c\n1,2,3\n")
    before = names_in(folder)
    assert sentence in feddar("init", *arguments, cwd=folder, code=2)
    assert names_in(folder) == before


def test_the_schema_knows_every_option_and_needs_none(folder):
    feddar("init", "patients.csv", *COLUMNS, "--schema", cwd=folder)
    assert (folder / "feddar.toml").read_text().startswith(f"#:schema ./{SCHEMA_FILE}\n")
    written = json.loads((folder / SCHEMA_FILE).read_text())
    assert written == configuration_schema()
    tables = {name: written["$defs"][part["$ref"].rsplit("/", 1)[1]] for name, part in written["properties"].items()}
    assert tables["training"]["properties"].keys() == Settings.model_fields.keys()
    assert tables["compare"]["properties"].keys() == Plan.model_fields.keys()
    options = {name for source in SOURCES for name in source.options.model_fields}
    assert options <= tables["data"]["properties"].keys()
    assert not any("required" in each or each["additionalProperties"] for each in (written, *tables.values()))
    assert tables["training"]["properties"]["optimizer"]["enum"] == ["adam", "sgd"]
