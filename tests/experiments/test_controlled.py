"""The paper's experiments with controlled mixtures, at a tiny scale, and its numbers against its text."""

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from feddar import cli
from feddar.data.images import Scale
from feddar.data.sources import face_images as fairface
from feddar.data.sources.image_pool import at_most
from feddar.errors import UserError
from feddar.experiments import (
    EXPERIMENTS,
    controlled,
    effect_of_k,
    face_tables,
    faces,
    find_experiment,
)
from feddar.experiments import digit_table as digits
from feddar.experiments.common import ExperimentOptions
from feddar.models.encoders.networks import FrozenStages
from helpers.image_sets import write_digits, write_faces

TINY = {"rounds": 2, "warmup": 1, "last": 1}
COLUMNS = ["method", "seed", "scope", "name", "metric", "value", "count"]


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """Tiny image sets, and experiments that are over in a second."""
    write_digits(tmp_path / "digits", train=40)
    write_faces(tmp_path / "fairface")
    tiny = replace(faces.SMALL, alphas=(100,), seeds=1, samples=8, test=4, training=faces.SMALL.training | TINY)
    monkeypatch.setattr(faces, "SCALES", {"small": tiny})
    monkeypatch.setattr(faces, "SIZES", {"small": 32})
    monkeypatch.setattr(effect_of_k, "SCALES", {"small": replace(tiny, alphas=(effect_of_k.ALPHA,))})
    monkeypatch.setattr(effect_of_k, "KS", (2, 8))
    setting = digits.SCALES["small"]
    tiny = replace(setting, alphas=(1,), seeds=2, samples=10, test=5, training=setting.training | TINY)
    monkeypatch.setattr(digits, "SCALES", {"small": tiny})
    return tmp_path


def run_quietly(name, out, sets, **options):
    return find_experiment(name)(ExperimentOptions(out, lambda _: None, data=str(sets), **options))


def test_digits_writes_results_a_table_in_the_papers_layout_and_a_figure(sets, tmp_path):
    out = tmp_path / "out"
    results = run_quietly("digits", out, sets)
    assert list(results.columns) == ["alpha", *COLUMNS]
    assert set(results["method"]) == set(controlled.METHODS)
    assert len(results[["alpha", "method", "seed"]].drop_duplicates()) == 5 * 2
    assert "client" not in set(results["scope"])
    pd.testing.assert_frame_equal(pd.read_csv(out / "results.csv"), results, check_dtype=False)
    text = (out / "table.md").read_text(encoding="utf-8")
    assert "| Method | α=1 Max | α=1 Min | α=1 Avg |" in text
    assert "| *the paper's* | *96.6* | *74.5* | *86.3* |" in text
    for method, label in controlled.LABELS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
        shown = results[(results["method"] == method) & (results["metric"] == "accuracy")].set_index("name")["value"]
        assert row.split(" | ")[3].startswith(f"{100 * shown['domain_avg'].mean():.1f} ± ")
    assert "synth" in text
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_parts_are_trained_alone_and_add_to_one_table_that_says_what_it_lacks(sets, tmp_path):
    out = tmp_path / "out"
    first = run_quietly("digits", out, sets, only="1,feddar", seeds=1)
    assert set(first["method"]) == {"feddar"}
    lacks = "- α = 1: 4 of 5 cells: all of fedavg, all of fedavg-mh, all of feddar-wa, all of feddar-sa."
    assert lacks in (out / "table.md").read_text(encoding="utf-8")
    run_quietly("digits", out, sets, only="fedavg", resume=True)
    text = (out / "table.md").read_text(encoding="utf-8")
    assert "- α = 1: 7 of 10 cells: feddar (seed 1), all of fedavg-mh, all of feddar-wa, all of feddar-sa." in text
    assert "nan" not in text
    whole = run_quietly("digits", out, sets, resume=True)
    assert len(whole[["method", "seed"]].drop_duplicates()) == 10
    assert "Nothing is missing" in (out / "table.md").read_text(encoding="utf-8")
    pd.testing.assert_frame_equal(whole, run_quietly("digits", tmp_path / "at-once", sets))


def test_a_part_of_which_there_is_nothing_is_refused(sets, tmp_path):
    with pytest.raises(UserError, match="trains nothing of fedavg-narrow: name other parts"):
        run_quietly("digits", tmp_path / "out", sets, only="fedavg-narrow")
    run_quietly("face-gender", tmp_path / "faces", sets, only="fedavg-narrow")


def test_results_are_kept_where_the_folders_of_trainings_are_not(sets, tmp_path):
    out = tmp_path / "out"
    first = run_quietly("digits", out, sets, only="fedavg,feddar-wa")
    shutil.rmtree(out / "runs")
    said = []
    options = ExperimentOptions(out, said.append, data=str(sets), resume=True, only="feddar-wa,feddar", seeds=1)
    added = find_experiment("digits")(options)
    assert [line.split(": ")[1] for line in said] == ["alpha 1, feddar, seed 0 done"]
    kept = first[first["seed"] == 0].reset_index(drop=True)
    pd.testing.assert_frame_equal(added[added["method"] != "feddar"], kept, check_dtype=False)
    assert "3 of 5 cells" not in (out / "table.md").read_text(encoding="utf-8")
    assert "2 of 5 cells: all of fedavg-mh, all of feddar-sa." in (out / "table.md").read_text(encoding="utf-8")
    (out / "results.csv").write_text("alpha,method\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no column 'seed'"):
        find_experiment("digits")(options)


def test_faces_do_not_depend_on_jobs_and_resume(sets, tmp_path):
    one = run_quietly("face-gender", tmp_path / "one", sets)
    assert "FedAvg, k as SA's" in (tmp_path / "one" / "table.md").read_text(encoding="utf-8")
    two = run_quietly("face-gender", tmp_path / "two", sets, jobs=2)
    pd.testing.assert_frame_equal(one, two)
    again = run_quietly("face-gender", tmp_path / "one", sets, resume=True)
    pd.testing.assert_frame_equal(one, again)


def test_samples_of_faces_are_what_the_frozen_stages_make_of_the_drawn_images(sets, monkeypatch):
    monkeypatch.setattr(faces, "CHUNK", 3)
    monkeypatch.setattr(faces, "PIECE", 7)
    setting = replace(faces.SCALES["small"], seeds=2)
    options = ExperimentOptions(sets / "out", lambda _: None, jobs=2, data=str(sets))
    draw, _ = faces.samples("age", "small", setting, options)
    train, val = (fairface.pool(part, "age", 32, sets) for part in ("train", "val"))
    part, test = draw(100, 1)
    drawn = controlled.draw(train, setting, 100, 1)
    stages = nn.Sequential(Scale(train.scaling), FrozenStages())
    torch.testing.assert_close(part.x[0], stages(train.images(train.numbers(drawn))), rtol=1e-3, atol=1e-4)
    assert torch.equal(part.y, drawn.y)
    assert test.counts.tolist() == [[4] * 7]
    tested = at_most(val.samples, 4)
    torch.testing.assert_close(test.x[0], stages(val.images(val.numbers(tested))), rtol=1e-3, atol=1e-4)


def test_all_methods_start_from_the_same_draw_and_settings(sets, tmp_path):
    setting = replace(digits.SCALES["small"], seeds=1, second_order={"k": 4})
    every = controlled.cells(setting, lambda alpha, seed: (alpha, seed), tmp_path)
    for alpha in setting.alphas:
        same = [cell for cell in every if cell.labels["alpha"] == alpha]
        assert len({id(cell.data) for cell in same}) == 1
        own = [{n: v for n, v in cell.options.items() if n not in ("method", "k")} for cell in same]
        assert own == [own[0]] * 6
    assert {cell.options["method"] for cell in every if "k" in cell.options} == {"feddar-sa", "fedavg"}
    assert {cell.labels["method"] for cell in every if "k" in cell.options} == {
        "feddar-sa",
        controlled.NARROW,
    }


def test_effect_of_k_varies_k_for_both_aggregations(sets, tmp_path):
    results = run_quietly("effect-of-k", tmp_path / "out", sets)
    assert list(results.columns) == ["k", *COLUMNS]
    assert set(map(tuple, results[["k", "method"]].to_numpy())) == {
        (k, m) for k in (2, 8) for m in ("feddar-wa", "feddar-sa")
    }
    text = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "without numbers" in text
    assert (tmp_path / "out" / "figure.png").exists()


def test_full_scale_of_faces_asks_for_weights(sets, monkeypatch, tmp_path):
    monkeypatch.setattr(faces, "SCALES", {"full": replace(faces.FULL, alphas=(100,), samples=4)})
    monkeypatch.setattr(faces, "SIZES", {"full": 32})
    with pytest.raises(ValueError, match=r"resnet34\.pth"):
        run_quietly("face-age", tmp_path / "out", sets, scale="full")


@pytest.mark.parametrize("name", ["digits", "face-age", "face-gender", "effect-of-k"])
def test_missing_data_is_one_sentence_and_exit_code_2(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["feddar", "paper", name, "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("feddar: ")
    assert "--data or FEDDAR_DATA" in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_every_experiment_can_be_found():
    assert all(callable(find_experiment(name)) for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("label", "numbers"),
    [
        ("table:face_age", face_tables.AGE.paper),
        ("table:face_gender", face_tables.GENDER.paper),
        ("table:digits", digits.PAPER),
    ],
)
def test_the_papers_numbers_are_those_of_its_text(label, numbers):
    path = Path(__file__).parents[3] / "shared" / "paper" / "feddar.tex"
    if not path.exists():
        pytest.skip(f"the paper's text is not at {path}")
    text = path.read_text(encoding="utf-8")
    lines = text[text.index(f"\\label{{{label}}}") :].split("\\bottomrule")[0].splitlines()
    body = " ".join(line for line in lines if not line.lstrip().startswith("%"))
    rows = [row for row in body.split("\\\\") if re.search(r"FedAvg|FedDAR", row)]
    names = ["fedavg", "fedavg-mh", "feddar-wa", "feddar-sa"]
    found = {}
    for name, row in zip(names, rows, strict=False):
        values = [float(value) for value in re.findall(r"\b\d\d\.\d\b", row)]
        found[name] = {alpha: tuple(values[3 * i : 3 * i + 3]) for i, alpha in enumerate((0.1, 0.5, 1, 100))}
    assert found == numbers
