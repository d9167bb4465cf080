"""Tracking by Weights & Biases, read back from the records that `wandb sync` sends; nothing is sent here."""

import struct
import sys

import pytest

import feddar
from feddar.errors import Notice, UserError
from feddar.results.wandb_runs import WandbRun
from helpers.cohorts import make_cohort, write_table
from helpers.command import COLUMNS
from helpers.command import feddar as command

QUICK = {"rounds": 3, "last": 1, "schedule": "constant", "track": "wandb"}


@pytest.fixture
def records():
    """Return a function that reads the records of all parts of a folder's run, in the order of their making."""
    pytest.importorskip("wandb", reason="needs pip install 'feddar[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    def read(folder):
        number = (folder / "wandb-run").read_text().split()[0]
        parts = sorted((folder / "wandb").glob(f"offline-run-*/run-{number}.wandb"))
        return [Record.FromString(each) for part in parts for each in entries(part.read_bytes())]

    return read


def entries(log):
    """Yield the entries of a log of LevelDB: of blocks with pieces, each behind its checksum, length and kind."""
    place, entry = 7, b""  # a mark and a version come first
    while place < len(log):
        if (left := -place % 32768) < 7 and left:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", log[place : place + 7])
        entry += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield entry
            entry = b""


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=200).split(0.3)


def points(records, key):
    """Return step and value of each time that a metric was logged."""
    found = [{item.nested_key[0] or item.key: item.value_json for item in each.history.item} for each in records]
    return [(int(row["_step"]), float(row[key])) for row in found if key in row]


def configured(records):
    return {item.key: item.value_json for each in records for item in each.run.config.update}


def test_every_figure_of_every_round_and_all_files_are_there(parts, records, tmp_path):
    run = feddar.train(parts[0], test=parts[1], out=tmp_path / "one", **QUICK)
    found, history = records(tmp_path / "one"), run.history
    for name in run.cohort.domains:
        expected = history[(history["name"] == name) & (history["metric"] == "auc")]
        assert points(found, f"auc/domain/{name}") == list(zip(expected["round"], expected["value"], strict=True))
    for split in ("train", "validation"):
        losses = history[(history["split"] == split) & (history["scope"] == "all")]["value"].tolist()
        assert [value for _, value in points(found, f"loss/{split}")] == losses
    assert configured(found)["method"] == '"feddar"' and configured(found)["rounds"] == "3"
    assert {each.run.display_name for each in found if each.run.display_name} == {"one"}
    assert {each.run.project for each in found if each.run.project} == {"feddar"}
    assert {each.exit.exit_code for each in found if each.HasField("exit")} == {0}
    summary = {item.key or item.nested_key[0]: item.value_json for each in found for item in each.summary.update}
    worst = run.results().query("name == 'domain_min' and metric == 'auc'")["value"].item()
    assert float(summary["result/auc/summary/domain_min"]) == worst
    kept = {item.path for each in found for item in each.files.files}
    assert {"config.toml", "metrics.csv", "model.safetensors", "figures.csv"} <= kept
    (copy,) = (tmp_path / "one").glob("wandb/offline-run-*/files/model.safetensors")
    assert copy.read_bytes() == (tmp_path / "one" / "model.safetensors").read_bytes()


def test_nothing_of_the_machine_is_noted(parts, records, tmp_path):
    feddar.train(parts[0], out=tmp_path, **QUICK)
    assert not any(each.HasField("stats") or each.environment.host or each.run.host for each in records(tmp_path))
    assert not any((tmp_path / "wandb").rglob("wandb-metadata.json"))
    assert not any((tmp_path / "wandb").rglob("requirements.txt"))


def test_a_resumed_run_goes_on_in_its_own_with_each_round_once(parts, records, tmp_path):
    feddar.train(parts[0], out=tmp_path, **QUICK | {"rounds": 2})
    first = (tmp_path / "wandb-run").read_text()
    checkpoint = (tmp_path / "model.safetensors").read_bytes()
    feddar.train(parts[0], out=tmp_path, resume=True, **QUICK | {"rounds": 4})
    (tmp_path / "model.safetensors").write_bytes(checkpoint)
    feddar.train(parts[0], out=tmp_path, resume=True, **QUICK | {"rounds": 4})
    assert first.endswith(" 2") and (tmp_path / "wandb-run").read_text() == first[:-1] + "4"
    found = records(tmp_path)
    assert [step for step, _ in points(found, "loss/train")] == [1, 2, 3, 4]
    assert {each.run.run_id for each in found if each.run.run_id} == {first.split()[0]}


def test_a_run_that_fails_is_said_to_have_failed(parts, records, tmp_path):
    def fail(end):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        feddar.train(parts[0], out=tmp_path, callbacks=[fail], **QUICK)
    assert {each.exit.exit_code for each in records(tmp_path) if each.HasField("exit")} == {1}


def test_where_it_fails_in_the_middle_training_goes_on(parts, records, tmp_path, monkeypatch):
    real = WandbRun.log

    def log(self, figures, step):
        if step == 2:
            raise OSError("the disk is full")
        real(self, figures, step)

    monkeypatch.setattr(WandbRun, "log", log)
    expected = r"Weights & Biases failed \(OSError: the disk is full\): round 2 and later ones are not"
    with pytest.warns(Notice, match=expected):
        run = feddar.train(parts[0], out=tmp_path, **QUICK)
    assert run.round == 3 and [step for step, _ in points(records(tmp_path), "loss/train")] == [1]


def test_a_mode_that_there_is_not_is_one_sentence(parts, records, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(UserError, match=r"Weights & Biases begins no run \(.*: see WANDB_MODE, or leave out --track."):
        feddar.train(parts[0], out=tmp_path, **QUICK)


def test_a_missing_package_is_one_sentence_before_anything_is_written(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'feddar\[wandb\]'"):
        feddar.train(parts[0], out=tmp_path / "run", **QUICK)
    assert not any(tmp_path.iterdir())


def test_commands_also_keep_report_and_card_and_a_comparison_is_a_group(records, tmp_path):
    write_table(make_cohort(n=200), tmp_path / "study.csv")
    given = ["study.csv", *COLUMNS, "--track", "wandb"]
    command("run", *given, "--rounds", 2, "--jobs", 2, "--versus", "fedavg", "--out", "run", cwd=tmp_path)
    for folder in (tmp_path / "run", tmp_path / "run" / "versus-fedavg"):
        kept = {item.path for each in records(folder) for item in each.files.files}
        assert {"report.html", "card.md", "model.safetensors"} <= kept
    several = ["--methods", "fedavg,local", "--folds", 2, "--rounds", 2, "--no-references"]
    command("compare", *given, *several, "--jobs", 2, "--out", "both", cwd=tmp_path)
    above = records(tmp_path / "both")
    assert {"report.html", "table.md", "results.csv", "config.toml"} <= {
        item.path for each in above for item in each.files.files
    }
    group = f"both {(tmp_path / 'both' / 'wandb-run').read_text().split()[0]}"
    cells = [records(path.parent) for path in (tmp_path / "both" / "runs").rglob("wandb-run")]
    assert {names(cell)[-1] for cell in cells} == {f"{m}/{fold}/0" for m in ("fedavg", "local") for fold in (0, 1)}
    assert {[each.run.run_group for each in cell if each.run.run_group][-1] for cell in cells} == {group}
    assert all([step for step, _ in points(cell, "loss/train")] == [1, 2] for cell in cells)


def names(records):
    return [each.run.display_name for each in records if each.run.display_name]
