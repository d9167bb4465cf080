"""The JSON schema of study files: every study is of it, and what a study refuses it marks."""

import json
import tomllib

import jsonschema
import pytest

from feddar.federation.study import Facts, Study
from feddar.federation.study_schema import study_schema
from feddar.settings import Settings
from helpers.command import feddar
from helpers.sites import write_tables


@pytest.fixture
def folder(tmp_path):
    write_tables(tmp_path / "tables")
    made = ["study", "tables", "--domain", "race", "--target", "outcome", "--schema", "--sites", 3]
    feddar(*made, cwd=tmp_path)
    return tmp_path


def test_a_study_file_names_the_schema_beside_it_and_fits(folder):
    text, schema = (folder / "study.toml").read_text(), json.loads((folder / "study.schema.json").read_text())
    assert text.startswith("#:schema ./study.schema.json\n") and schema == study_schema()
    jsonschema.validate(tomllib.loads(text), schema)
    assert Study.read(folder / "study.toml").facts.name == "tables"
    assert schema["$defs"]["Settings"]["properties"].keys() == Settings.model_fields.keys()
    assert schema["$defs"]["Facts"]["properties"].keys() == Facts.model_fields.keys()


@pytest.mark.parametrize(
    ("title", "change"),
    [
        ("study", {"naem": "x"}),
        ("study", {"domains": []}),
        ("columns", {"age": "numbr"}),
        ("columns", {"age": {"kind": "image", "size": 7}}),
        ("training", {"rounds": "many"}),
        ("training", {"optimizer": "adma"}),
        ("terms", {"sites": 0}),
    ],
)
def test_what_a_study_refuses_is_marked(folder, title, change):
    tables = tomllib.loads((folder / "study.toml").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tables | {title: tables[title] | change}, study_schema())
