"""Files of others that name code: a study, a configuration or a run. Nobody who reads or uses them runs it unasked."""

import json
import os
import sys

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import feddar as library
from feddar.errors import UserError
from feddar.federation.site import open_site
from feddar.federation.study import Study
from feddar.models.encoders.own import PERMITTED
from helpers.command import feddar
from helpers.sites import NAMES, make_study, write_tables

MODULE = "nets_of_a_stranger"
CODE = f"{MODULE}:Net"
TABLE = ["--client", "hospital", "--domain", "race", "--target", "outcome", "--ignore", "ward,lactate"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with tables, a study whose encoder is code, and that code, which leaves a file where it is imported."""
    write_tables(tmp_path / "data")
    (tmp_path / f"{MODULE}.py").write_text(
        f"from pathlib import Path\nfrom torch import nn\nPath({str(tmp_path / 'imported')!r}).touch()\n"
        "class Net(nn.Module):\n    def forward(self, x, codes=None):\n        return x.nan_to_num()\n"
    )
    plain = make_study(tmp_path / "data").tables()
    study = Study.from_tables(plain | {"training": plain["training"] | {"encoder": CODE}}, "")
    study.write(tmp_path / "study.toml")
    monkeypatch.delenv(PERMITTED, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop(MODULE, None)
    os.environ.pop(PERMITTED, None)


def client(*more):
    return ["client", "--study", "study.toml", "--data", f"data/{NAMES[0]}.csv", *more]


def connecting(*more):
    return client("--server", "127.0.0.1:9", "--insecure", "--name", "a", *more)


def rehearsing(out, *more):
    return ["simulate", "--config", "study.toml", "--data", "data", "--engine", "local", "--out", out, *more]


def refused(*arguments, cwd):
    said = feddar(*arguments, cwd=cwd, code=2)
    assert f"--allow-code {CODE}" in said
    assert not (cwd / "imported").exists()


def with_encoder(run, name):
    """Make a run name another encoder, as whoever hands it on can."""
    path = run / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["feddar"])
    about["settings"]["encoder"] = name
    save_file(load_file(path), path, metadata={"feddar": json.dumps(about)})
    config = run / "config.toml"
    config.write_text(config.read_text().replace('encoder = "wide"', f'encoder = "{name}"'))


def test_a_study_that_names_code_is_shown_and_not_run(folder):
    said = feddar(*client("--explain"), cwd=folder)
    assert f"the encoder {CODE} is code" in said and f"--allow-code {CODE}" in said
    assert "lactate" in said and "digest of the study" in said.lower()
    assert not (folder / "imported").exists()


def test_who_allows_the_code_sees_what_leaves(folder):
    said = feddar(*client("--explain", "--allow-code", CODE), cwd=folder)
    assert "curvature/0" in said and "is code" not in said
    assert (folder / "imported").exists()


def test_other_code_than_that_is_not_allowed_with_it(folder):
    refused(*connecting("--allow-code", f"{MODULE}:Other"), cwd=folder)
    refused(*connecting("--allow-code", MODULE), cwd=folder)
    refused(*connecting("--allow-code", f"{CODE}s"), cwd=folder)


def test_a_site_does_not_join_with_code_that_it_has_not_allowed(folder):
    refused(*connecting(), cwd=folder)


def test_neither_do_sites_that_an_engine_opens(folder):
    options = {"data": str(folder / "data" / f"{NAMES[0]}.csv"), "name": "a", "study": str(folder / "study.toml")}
    with pytest.raises(UserError, match=f"allow-code {CODE}"):
        open_site(options)
    open_site(options | {"allow-code": CODE})
    assert not (folder / "imported").exists()  # nor before there is something to train


def test_a_coordinator_does_not_run_what_the_study_names(folder):
    refused(*rehearsing("run"), cwd=folder)
    refused("server", "--config", "study.toml", "--insecure", "--listen", "127.0.0.1:0", "--out", "run", cwd=folder)
    assert "worst domain" in feddar(*rehearsing("run", "--allow-code", CODE), cwd=folder)


def test_a_run_of_somebody_else_does_not_bring_code(folder):
    make_study(folder / "data").write(folder / "plain.toml")
    feddar("simulate", "--config", "plain.toml", "--data", "data", "--engine", "local", "--out", "run", cwd=folder)
    with_encoder(folder / "run", CODE)
    refused("predict", "run", f"data/{NAMES[0]}.csv", cwd=folder)
    refused("export", "run", cwd=folder)
    with pytest.raises(UserError, match=rf"feddar.allow_code\('{CODE}'\)"):
        library.load(folder / "run")
    feddar("report", "run", cwd=folder)  # which needs no model
    assert not (folder / "imported").exists()


def test_a_configuration_does_not_bring_code(folder):
    table = f"data/{NAMES[0]}.csv"
    (folder / "config.toml").write_text(f'[training]\nencoder = "{CODE}+flip"\nrounds = 1\n')
    named = [table, "--client", "ward", "--domain", "race", "--target", "outcome"]
    refused("run", *named, "--config", "config.toml", "--out", "out", cwd=folder)
    refused("compare", *named, "--config", "config.toml", "--out", "out", cwd=folder)
    (folder / "config.toml").write_text(f'[training]\nencoder = "{CODE}"\nrounds = 1\n')
    feddar("run", *named, "--config", "config.toml", "--encoder", CODE, "--out", "out", cwd=folder)
    assert (folder / "imported").exists()


def test_going_on_with_a_run_needs_the_permission_again(folder, monkeypatch):
    named = ["run", f"data/{NAMES[0]}.csv", "--client", "ward", "--domain", "race", "--target", "outcome"]
    feddar(*named, "--encoder", CODE, "--rounds", 1, "--out", "out", cwd=folder)
    (folder / "imported").unlink()
    monkeypatch.delenv(PERMITTED)
    sys.modules.pop(MODULE)
    refused(*named, "--resume", "--out", "out", cwd=folder)
    feddar(*named, "--resume", "--out", "out", "--allow-code", CODE, cwd=folder)


@pytest.mark.parametrize("name", ["a:b; rm -rf ~", "os:system('x')", "a:b\nc", "$(id):x", "a b:c", "a:"])
def test_no_command_to_copy_is_made_of_a_name_that_is_none(folder, name):
    plain = make_study(folder / "data").tables()
    study = Study.from_tables(plain | {"training": plain["training"] | {"encoder": name}}, "")
    study.write(folder / "study.toml")
    said = feddar(*connecting(), cwd=folder, code=2)
    assert "must read MODULE:NAME" in said and "--allow-code" not in said


def test_what_lies_in_the_current_folder_is_not_imported_by_the_way(folder):
    """A package that feddar would use if it were installed may lie there, in a folder that somebody else packed."""
    found = [path for path in sys.path if path == ""]
    feddar("methods", cwd=folder)
    assert [path for path in sys.path if path == ""] == found
