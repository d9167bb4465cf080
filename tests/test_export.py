"""A run as an ONNX file: every method, every kind of input, and what is said when it cannot be."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from torch import nn

import feddar
from conftest import make_cohort
from feddar import export as exporting
from feddar.cohort import Cohort
from feddar.columns import inputs
from feddar.datasets import exam_cohort
from feddar.datasets.exam import draw
from feddar.errors import TrainingError, UserError
from feddar.export import ExportedModel
from feddar.methods import METHODS
from test_cli import feddar as feddar_command


def patients(n=90, seed=0):
    """A table with gaps, categories, truth values and dates."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "age": rng.normal(60, 15, n),
            "ward": rng.choice(["A", "B", "C"], n),
            "smoker": rng.choice(["yes", "no"], n),
            "admitted": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D"),
            "crp": rng.lognormal(3, 1, n),
        }
    )
    for column in ("age", "ward", "smoker"):
        table.loc[rng.random(n) < 0.2, column] = None
    who = {"domain": rng.choice(["a", "b", "c"], n), "client": rng.choice(["h1", "h2"], n)}
    return table, rng.choice(["ill", "well"], n), who


def trained(method="feddar-sa", classes=2, **options):
    table, y, who = patients()
    y = {0: np.linspace(-1000, 3000, len(y)), 2: y, 3: np.arange(len(y)) % 3}[classes]
    return feddar.train(Cohort.from_arrays(table, y, **who), method, rounds=2, lr=0.03, **options)


def new_patients(run):
    table, _, who = patients(n=40, seed=1)
    numbers, codes = inputs(table, run.cohort.columns)
    index = {name: np.array([names.index(each) for each in who[name]], np.int64)
             for name, names in (("domain", run.cohort.domains), ("client", run.cohort.clients))}  # fmt: skip
    given = {"numbers": numbers.astype(run.settings.dtype), "categories": codes, **index}
    return given, run._predicted(table, **who)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_one_module_predicts_as_the_run_does_with_every_method(method, classes):
    run = trained(method, classes)
    model = ExportedModel(run)
    given, expected = new_patients(run)
    tensors = [torch.from_numpy(given[each.name]) for each in model.given]
    found = model(*tensors)
    scale = max(1, np.abs(expected).max())
    np.testing.assert_allclose(found[0].numpy() / scale, expected / scale, atol=1e-6)
    if classes:
        assert found[1].tolist() == expected.argmax(1).tolist()
    assert model.by_client == run.method.personal
    assert len(model.bodies) == {"domain": 3, "client": 2, "global": 1}[run.method.used[0]]


def run_file(path, given):
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    return session.run(None, {name: given[name] for name in names})


# One for each way in which clients and domains share encoders and heads; each takes seconds to write.
@pytest.fixture(
    scope="module",
    params=[("feddar-sa", 2, {"k": 3}), ("separate", 3, {}), ("apfl", 0, {}), ("fedavg-di", 2, {"dtype": "float64"})],
    ids=lambda given: given[0],
)
def exported(request, tmp_path_factory):
    run = trained(request.param[0], request.param[1], **request.param[2])
    folder = tmp_path_factory.mktemp("model")
    run.save(folder)
    said = feddar_command("export", folder, "--out", folder / "made" / "model.onnx", cwd=folder)
    return run, folder / "made" / "model.onnx", said


def test_the_file_predicts_as_the_run_does(exported):
    run, path, said = exported
    differs = re.search(r"Written: .*model.onnx.*\nChecked with onnxruntime: .* at most (\S+)\n", said)
    assert float(differs[1]) < 1e-6
    assert [each.name for each in path.parent.iterdir()] == ["model.onnx"]
    given, expected = new_patients(run)
    predicted, *label = run_file(path, given)
    np.testing.assert_allclose(predicted, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    if label:
        assert label[0].tolist() == expected.argmax(1).tolist()


def test_a_domain_in_no_list_gives_no_number(exported):
    run, path, _ = exported
    given, _ = new_patients(run)
    given["domain"][:2] = -1, 3
    predicted, *label = run_file(path, given)
    assert np.isnan(predicted[:2]).all()
    assert np.isfinite(predicted[2:]).all()
    assert not label or label[0][:2].tolist() == [-1, -1]


def test_the_file_is_valid_says_what_it_is_and_not_where_it_was_made(exported):
    run, path, _ = exported
    onnx.checker.check_model(str(path), full_check=True)
    about = json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["feddar"])
    assert about["domains"] == ["a", "b", "c"]
    assert about["clients"] == (["h1", "h2"] if run.method.personal else None)
    assert about["method"] == run.settings.method
    assert [column["kind"] for column in about["columns"]] == ["number", "category", "boolean", "date", "number"]
    assert about["columns"][1]["levels"] == ["A", "B", "C"]
    assert about["inputs"][0] == {"name": "numbers", "type": run.settings.dtype, "shape": ["n", 4]}
    assert str(Path(feddar.__file__).parent).encode() not in path.read_bytes()


def test_what_differs_from_the_run_is_not_left_behind(exported, tmp_path, monkeypatch):
    run, path, _ = exported
    name = next(name for name in run.state if name.startswith("heads/"))
    other = replace(run, state=run.state | {name: run.state[name] * 1.01}, private={})
    if run.method.personal:
        other = replace(run, private=run.private | {"h1": run.private["h2"]})
    (tmp_path / "model.onnx").write_text("the one before")
    monkeypatch.setattr(exporting, "_write", lambda _, out: shutil.copy(path, out))
    with pytest.raises(TrainingError, match=r"was not written: onnxruntime's predictions differ .* by \d"):
        other.export(tmp_path / "model.onnx")
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "the one before"
    (tmp_path / "run").mkdir()
    (tmp_path / "new.onnx").write_text("no model")
    monkeypatch.setattr(exporting, "_write", lambda _, out: out.write_text("no model"))
    with pytest.raises(TrainingError, match="onnxruntime cannot run this model"):
        run.export(tmp_path / "model.onnx")


@pytest.mark.parametrize("exported", [("feddar-sa", 2, {})], indirect=True)
def test_the_documented_example_runs_without_feddar(exported, tmp_path):
    run, path, _ = exported
    table, _, who = patients(n=40, seed=1)
    table.assign(race=who["domain"]).to_csv(tmp_path / "new.csv", index=False)
    shutil.copy(path, tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "using.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "onnxruntime" in block]
    assert "feddar" not in code.replace('["feddar"]', "")
    with chdir(tmp_path):
        exec(code, {})
    result = pd.read_csv(tmp_path / "predictions.csv")
    np.testing.assert_allclose(result[["ill", "well"]], run.predict_proba(table, domain=who["domain"]), atol=1e-5)
    assert result["predicted"].tolist() == run.predict(table, domain=who["domain"]).tolist()


def test_images_and_records_in_any_precision(tmp_path):
    rng = np.random.default_rng(0)
    images, y, z = rng.normal(size=(30, 2, 20, 20)), np.arange(30) % 2, np.arange(30) % 3
    run = feddar.train(Cohort.from_arrays(images, y, domain=z, client=z), "fedbn", rounds=1, dtype="float64")
    given = {"image": images.astype(np.float32), "domain": z, "client": z}
    found, _ = run_file(run.export(tmp_path / "images.onnx").path, given)
    np.testing.assert_allclose(found, run.predict_proba(images, domain=z, client=z), atol=1e-5)
    hospitals = exam_cohort(draw())
    cases = hospitals.rows(torch.arange(0, len(hospitals), 50))
    run = feddar.train(cases, "feddar-wa", "exam", rounds=1)
    given = {"image": cases.x[0].numpy(), "numbers": cases.x[1].numpy(), "domain": cases.domain.numpy()}
    found, _ = run_file(run.export(tmp_path / "exam.onnx").path, given)
    np.testing.assert_allclose(found, run.predict_proba(cases.x, domain=cases.domain_names), atol=1e-5)


def test_one_client_takes_its_own_model_along():
    run = trained("local")
    model = ExportedModel(run, "h2")
    assert len(model.bodies) == 1
    assert [each.name for each in model.given] == ["numbers", "categories", "domain"]
    given, _ = new_patients(run)
    table, _, who = patients(n=40, seed=1)
    found, _ = model(*(torch.from_numpy(given[each.name]) for each in model.given))
    np.testing.assert_allclose(found, run.predict_proba(table, who["domain"], client="h2"), atol=1e-6)
    assert (model.about["client"], model.about["clients"]) == ("h2", None)
    assert len(ExportedModel(trained("fedavg"), "h2").bodies) == 1


class Listening(nn.Module):
    """Does what a graph cannot: decides by the values."""

    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    run = feddar.train(make_cohort(n=60), "fedavg", encoder=Listening(), rounds=1)
    with pytest.raises(TrainingError, match="this model's encoder cannot be written as ONNX") as error:
        run.export(tmp_path / "model.onnx")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="client 'site-9' was not in training: did you mean"):
        run.export(tmp_path / "model.onnx", client="site-9")
    with pytest.raises(UserError, match="is a folder: name a file"):
        run.export(tmp_path)
    monkeypatch.setattr(exporting, "MOST_ENCODERS", 3)
    many = feddar.train(make_cohort(n=60), "local", rounds=1)
    with pytest.raises(UserError, match=r"4 encoders with 0 MB of weights: export what one client uses, with --client"):
        many.export(tmp_path / "model.onnx")


def test_nothing_heavy_is_imported_before_it_is_wanted():
    code = "import feddar.cli, feddar.run, sys; assert not {'onnx', 'onnxscript', 'onnxruntime'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
