"""A run as an ONNX file: every method, every kind of input, and what is said when it cannot be."""

import json
import re
import shutil
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
from feddar.algorithm.names import named_state, state_from
from feddar.data.cohort import Cohort
from feddar.data.columns import inputs
from feddar.errors import TrainingError, UserError
from feddar.methods import METHODS
from feddar.results import onnx_export as exporting
from feddar.results.onnx_export import SCORES, ExportedModel, differences, exported_model
from feddar.results.onnx_export import _draw as draw
from helpers.cohorts import make_cohort
from helpers.command import feddar as feddar_command
from helpers.command import names_in
from helpers.marks import first


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
    _, numbers, codes = inputs(table, run.cohort.columns, run.settings.dtype)
    index = {name: np.array([names.index(each) for each in who[name]], np.int64)
             for name, names in (("domain", run.cohort.domains), ("client", run.cohort.clients))}  # fmt: skip
    given = {"numbers": numbers, "categories": codes.astype(np.int64), **index}
    if (
        run.method.site_offset or run.method.decoupled or run.method.assigns
    ):  # what a client adds to heads is in its own file only
        del who["client"]
    return given, (run.predict if run.cohort.classes is None else run.predict_proba)(table, **who)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_one_module_predicts_as_the_run_does_with_every_method(method, classes):
    run = trained(method, classes)
    model = exported_model(run)
    given, expected = new_patients(run)
    tensors = [torch.from_numpy(given[each.name]) for each in model.given]
    found = model(*tensors)
    scale = max(1, np.abs(expected).max())
    np.testing.assert_allclose(found[0].numpy() / scale, expected / scale, atol=1e-6)
    if classes:
        assert found[1].tolist() == expected.argmax(1).tolist()
    assert model.by_client == run.method.personal
    assert len(model.bodies) == {"domain": 3, "client": 2, "global": 1}[run.method.used[0]]  # or components, 3 as well


def run_file(path, given):
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    return session.run(None, {name: given[name] for name in names})


# One for each way in which clients and domains share encoders and heads. Each takes seconds to write, and so is looked
# at from all sides in one test.
@pytest.mark.parametrize(
    ("method", "classes", "options"),
    [
        ("feddar-sa", 2, {"k": 3}),
        ("feddar-mixture", 2, {}),
        pytest.param("separate", 3, {}, marks=pytest.mark.more),
        ("apfl", 0, {}),
        pytest.param("fedavg-di", 2, {"dtype": "float64"}, marks=pytest.mark.more),
    ],
)
def test_the_file_predicts_as_the_run_does(tmp_path, monkeypatch, method, classes, options):
    run = trained(method, classes, **options)
    run.save(tmp_path / "run")
    said = feddar_command("export", "run", "--out", "made/model.onnx", cwd=tmp_path)
    path = tmp_path / "made" / "model.onnx"
    differs = re.search(r"Written: made/model.onnx, .*\nChecked with onnxruntime: .* at most (\S+)\n", said)
    assert float(differs[1]) < 1e-6
    assert names_in(path.parent) == {"model.onnx"}
    given, expected = new_patients(run)
    predicted, *label = run_file(path, given)
    np.testing.assert_allclose(predicted, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    assert not classes or label[0].tolist() == expected.argmax(1).tolist()
    check_unknown_domains(path, given)
    check_missing_domains(path, given, run)
    check_description(path, run)
    check_refusal(path, run, monkeypatch)
    if method == "feddar-sa":
        check_documented_example(path, run)


def check_unknown_domains(path, given):
    domain = given["domain"].copy()
    domain[:2] = -1, 3
    predicted, *label = run_file(path, given | {"domain": domain})
    assert np.isnan(predicted[:2]).all()
    assert np.isfinite(predicted[2:]).all()
    assert not label or label[0][:2].tolist() == [-1, -1]


def check_missing_domains(path, given, run):
    """The documented sum over domains is the mixture of heads, by the shares at all clients."""
    if not run.needs_domain:
        return
    shares = json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["feddar"])["shares"]
    n = len(given["domain"])
    mixed = sum(share * run_file(path, given | {"domain": np.full(n, place)})[0] for place, share in enumerate(shares))
    table = patients(n=n, seed=1)[0]
    np.testing.assert_allclose(mixed, run.predict_proba(table, missing_domain="mixture"), atol=1e-5)
    of_client = ExportedModel(run, "h1").about["shares"]
    np.testing.assert_allclose(of_client, run.cohort.counts[0] / run.cohort.counts[0].sum(), rtol=1e-6)
    assert of_client != shares


def check_description(path, run):
    """It is a valid file that says what it is, and not where it was made."""
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path)
    assert {each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())} == {"n"}
    about = json.loads(session.get_modelmeta().custom_metadata_map["feddar"])
    assert about["domains"] == ["a", "b", "c"]
    assert about["clients"] == (["h1", "h2"] if run.method.personal else None)
    assert about["method"] == run.settings.method
    assert [column["kind"] for column in about["columns"]] == ["number", "category", "boolean", "date", "number"]
    assert about["columns"][1]["levels"] == ["A", "B", "C"]
    assert about["inputs"][0] == {"name": "numbers", "type": run.settings.dtype, "shape": ["n", 4]}
    assert str(Path(feddar.__file__).parent).encode() not in path.read_bytes()


def check_refusal(path, run, monkeypatch):
    """A file that differs from the run is not left behind, and the one before it stays."""
    named = named_state(run.state)
    named |= {name: 1.1 * value for name, value in named.items() if name.startswith("heads/")}
    own = run.own | {"h1": run.own["h2"]} if run.method.personal else {}
    old = path.with_name("old.onnx")
    old.write_text("the one before")
    monkeypatch.setattr(exporting, "_write", lambda _, out: shutil.copy(path, out))
    with pytest.raises(
        TrainingError, match=r"was not written: onnxruntime's scores of (domain|the components) .*differ .* by \d"
    ):
        replace(run, state=state_from(named), own=own).export(old)
    monkeypatch.setattr(exporting, "_write", lambda _, out: out.write_text("no model"))
    with pytest.raises(TrainingError, match="onnxruntime cannot run this model"):
        run.export(old)
    assert names_in(path.parent) == {"model.onnx", "old.onnx"}
    assert old.read_text() == "the one before"


def altered(model, change):
    """Return an ONNX model with the first weights of heads, a matrix [features, 3], changed."""
    heads = next(each for each in model.graph.initializer if list(each.dims) == [33, 3])
    weights = onnx.numpy_helper.to_array(heads).copy()
    change(weights)
    heads.CopyFrom(onnx.numpy_helper.from_array(weights, heads.name))
    return model


def test_a_wrong_head_or_a_wrong_level_is_found_and_nothing_is_left_behind(tmp_path, monkeypatch):
    """The file is altered between its writing and its check, with probabilities so extreme that they hide it."""
    run = trained("feddar-wa")
    named = named_state(run.state)
    constant = torch.eye(33)[-1]
    named |= {name: value + 50 * constant for name, value in named.items() if name.startswith("heads/")}
    run = replace(run, state=state_from(named))
    good = run.export(tmp_path / "good.onnx").path
    model = onnx.load(good)
    assert SCORES not in {each.name for each in model.graph.output}

    def worst(changed):
        onnx.save(changed, tmp_path / "bad.onnx")
        found = differences(tmp_path / "bad.onnx", ExportedModel(run), run)
        assert not found.small
        return found

    for place, domain in enumerate("abc"):
        found = worst(altered(onnx.load(good), lambda w, place=place: np.multiply(w[:, place], 1.001, out=w[:, place])))
        assert found.worst == f"domain '{domain}'"
        assert 1e-4 < found.scores < 1e-2
        assert found.predictions < 1e-9
    level = onnx.load(good)
    (wards,) = [each for each in level.graph.initializer if list(each.dims) == [4, 2]]
    weights = onnx.numpy_helper.to_array(wards).copy()
    weights[3] += 1
    wards.CopyFrom(onnx.numpy_helper.from_array(weights, wards.name))
    worst(level)

    def write_wrongly(_, out):
        onnx.save(altered(onnx.load(good), lambda w: np.negative(w[:, 1], out=w[:, 1])), out)

    monkeypatch.setattr(exporting, "_write", write_wrongly)
    with pytest.raises(TrainingError, match=r"wrong.onnx was not written: onnxruntime's scores of domain 'b'") as error:
        run.export(tmp_path / "wrong.onnx")
    assert "\n" not in str(error.value)
    assert names_in(tmp_path) == {"good.onnx", "bad.onnx"}


@pytest.mark.parametrize("method", ["ifca", "feddar-mixture"])
def test_components_and_their_shares_are_checked(tmp_path, method):
    run = trained(method, 3)
    own = {"h1": torch.tensor([0.2, 0.7, 0.1]), "h2": torch.tensor([0.6, 0.1, 0.3])}
    run = replace(run, own={name: run.own[name].changed(extra={"shares": each.double()}) for name, each in own.items()})
    path = run.export(tmp_path / "h1.onnx", client="h1").path
    assert differences(path, exported_model(run, "h1"), run).small
    assert differences(path, exported_model(run, "h2"), run).predictions > 1e-3
    assert differences(path, exported_model(run), run).predictions > 1e-3
    given, _ = new_patients(run)
    expected, domain = run.predict_proba(patients(n=40, seed=1)[0], client="h1"), given["domain"]
    found, label = run_file(path, given)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert label.tolist() == expected.argmax(1).tolist()
    assert np.isnan(run_file(path, given | {"domain": np.full_like(domain, 7)})[0]).all()
    model = onnx.load(path)
    about = json.loads({each.key: each.value for each in model.metadata_props}["feddar"])
    np.testing.assert_allclose(about["components"], own["h1"])
    onnx.save(altered(model, lambda weights: np.multiply(weights, 1.001, out=weights)), tmp_path / "bad.onnx")
    assert differences(tmp_path / "bad.onnx", exported_model(run, "h1"), run).scores > 1e-4


def test_corrections_of_a_site_are_checked(tmp_path):
    table, _, who = patients()
    y = np.where(np.random.default_rng(2).random(len(table)) < np.where(who["client"] == "h1", 0.9, 0.1), "ill", "well")
    run = feddar.train(Cohort.from_arrays(table, y, **who), "feddar", rounds=2, lr=0.03)
    path = run.export(tmp_path / "h1.onnx", client="h1").path
    assert differences(path, ExportedModel(run, "h1"), run).small
    assert differences(path, ExportedModel(run, "h2"), run).scores > 1e-3
    assert differences(path, ExportedModel(run), run).scores > 1e-3


def test_samples_of_the_check_are_like_those_of_training_and_meet_every_head():
    run = trained("apfl")
    model = ExportedModel(run)
    numbers, levels, domain, client = draw(model, 960, torch.Generator().manual_seed(0))
    assert len(set(zip(domain.tolist(), client.tolist(), strict=True))) == 6
    table, _, _ = patients()
    for place, name in ((0, "age"), (3, "crp")):
        drawn, held = numbers[:, place].numpy(), table[name]
        assert abs(np.nanmean(drawn) - held.mean()) < 0.2 * held.std()
        assert abs(np.nanstd(drawn) / held.std() - 1) < 0.2
    assert set(np.unique(numbers[:, 1].nan_to_num(-1).tolist())) == {-1, 0, 1}  # smoker
    assert bool(numbers[:, 0].isnan().any())
    assert not bool(numbers[:, 2:].isnan().any())
    assert sorted(levels[:, 0].unique().tolist()) == [0, 1, 2, 3]


def check_documented_example(path, run):
    table, _, who = patients(n=40, seed=1)
    table.assign(race=who["domain"]).to_csv(path.with_name("new.csv"), index=False)
    text = (Path(__file__).parents[2] / "docs" / "using.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "onnxruntime" in block]
    assert "feddar" not in code.replace('["feddar"]', "")
    with chdir(path.parent):
        exec(code, {})
    result = pd.read_csv(path.with_name("onnx-predictions.csv"))
    np.testing.assert_allclose(result[["ill", "well"]], run.predict_proba(table, domain=who["domain"]), atol=1e-5)
    assert result["predicted"].tolist() == run.predict(table, domain=who["domain"]).tolist()


@pytest.mark.parametrize("kind", first(["pixels with records"], ["images in float64", "pixels with records"]))
def test_images_are_exported(tmp_path, kind):
    rng = np.random.default_rng(0)
    y, z = np.arange(40) % 2, np.arange(40) % 3
    if kind == "images in float64":  # which onnxruntime does not convolve in
        x = (rng.normal(size=(40, 2, 20, 20)),)
        given = {"image": x[0].astype(np.float32)}
        method, encoder, dtype = "fedbn", "cnn", "float64"
    else:
        x = (rng.integers(0, 256, (40, 3, 28, 28), dtype=np.uint8), rng.normal(size=(40, 5)))
        given = {"image": x[0], "numbers": x[1].astype(np.float32)}
        method, encoder, dtype = "feddar-wa", "exam", "float32"
    cohort = Cohort.from_arrays(x, y, domain=z, client=z)
    run = feddar.train(cohort, method, encoder, rounds=1, dtype=dtype)
    found, _ = run_file(run.export(tmp_path / "model.onnx").path, given | {"domain": z, "client": z})
    np.testing.assert_allclose(found, run.predict_proba(x, domain=z, client=z), atol=1e-5)


def test_one_client_takes_its_own_model_along():
    run = trained("local")
    model = ExportedModel(run, "h2")
    assert len(model.bodies) == 1
    assert [each.name for each in model.given] == ["numbers", "categories", "domain"]
    given, _ = new_patients(run)
    table, _, who = patients(n=40, seed=1)
    found, *_ = model(*(torch.from_numpy(given[each.name]) for each in model.given))
    np.testing.assert_allclose(found, run.predict_proba(table, who["domain"], client="h2"), atol=1e-6)
    assert (model.about["client"], model.about["clients"]) == ("h2", None)
    assert len(ExportedModel(trained("fedavg"), "h2").bodies) == 1


class Listening(nn.Module):
    """Does what a graph cannot: decides by the values."""

    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


class Counting(nn.Module):
    """Asks for the number of samples in a way that is often taken for a constant."""

    def forward(self, x):
        return x.reshape(len(x), -1)


def test_an_encoder_that_counts_its_samples_takes_any_number(tmp_path):
    cohort = make_cohort(n=60)
    run = feddar.train(cohort, "fedavg-mh", encoder=Counting(), rounds=1)
    with exporting._quiet():
        found, *_ = exporting._captured(ExportedModel(run)).module()(*cohort.x, cohort.domain)
    np.testing.assert_allclose(found, run.predict_proba(cohort.x[0], domain=cohort.domain_names), atol=1e-6)


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
    with pytest.raises(UserError, match=r"study.csv is not the name of an ONNX file: let it end in .onnx"):
        run.export(tmp_path / "study.csv")
    monkeypatch.setattr(exporting, "MOST_ENCODERS", 3)
    many = feddar.train(make_cohort(n=60), "local", rounds=1)
    with pytest.raises(UserError, match=r"4 encoders with .* at most 3 and .*; export .* with --client"):
        many.export(tmp_path / "model.onnx")
