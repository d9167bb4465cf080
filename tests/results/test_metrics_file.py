"""metrics.csv grows by the rows of each round, and whatever moment a process is killed at, it can be read."""

import os
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

import feddar
from feddar.results.run import Run
from feddar.results.run_folder import METRICS_COLUMNS, METRICS_FILE, append_metrics, read_metrics, read_model
from helpers.cohorts import make_cohort


class Killed(BaseException):
    """What ends a training."""


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=160, domains=2, clients=2).split(0.3)


def trained(parts, folder, **options):
    given = {"rounds": 3, "last": 1, "schedule": "constant"} | options
    return feddar.train(parts[0], "fedavg", test=parts[1], out=folder, **given)


def rows_of(number, name="a"):
    return pd.DataFrame([(number, "test", "domain", name, "auc", 0.1 + 0.2, 9)] * 2, columns=METRICS_COLUMNS)


def test_what_earlier_rounds_wrote_is_left_alone(parts, tmp_path):
    """The same file grows: it is neither written again nor replaced."""
    path, seen = tmp_path / METRICS_FILE, []
    trained(parts, tmp_path, callbacks=[lambda _: seen.append((path.read_bytes(), path.stat().st_ino))])
    contents, files = zip(*seen, strict=True)
    assert len(contents) == 3
    for number, (before, after) in enumerate(pairwise(contents), 2):
        assert after.startswith(before)
        added = after.removeprefix(before).decode().splitlines()
        assert added
        assert all(line.startswith(f"{number},") for line in added)
    assert len(set(files)) == 1
    assert path.read_bytes() == contents[-1]
    assert contents[0].decode().splitlines()[0] == ",".join(METRICS_COLUMNS)
    assert contents[-1].count(b"round,split") == 1


def test_the_file_is_what_the_run_says(parts, tmp_path):
    run = trained(parts, tmp_path / "run")
    pd.testing.assert_frame_equal(read_metrics(tmp_path / "run" / METRICS_FILE), run.history, check_dtype=False)
    run.save(tmp_path / "whole")
    assert (tmp_path / "whole" / METRICS_FILE).read_bytes() == (tmp_path / "run" / METRICS_FILE).read_bytes()


@pytest.mark.parametrize("name", ["a", "Kinderärzte 🏥", 'says "a, b"', "[/b] %"])
def test_a_line_that_was_cut_is_left_out(tmp_path, name):
    """Wherever it was cut: in a number, in a letter of several bytes, in quotes, or behind its last digit."""
    append_metrics(tmp_path, rows_of(1, name))
    path = tmp_path / METRICS_FILE
    before = read_metrics(path)
    one, two = rows_of(2, name).head(1), rows_of(2, name).tail(1)
    append_metrics(tmp_path, one)
    whole, start = read_metrics(path), path.stat().st_size
    append_metrics(tmp_path, two)
    content = path.read_bytes()
    for end in range(start, len(content)):
        path.write_bytes(content[:end])
        pd.testing.assert_frame_equal(read_metrics(path), whole)
    path.write_bytes(content[: start - 1])
    pd.testing.assert_frame_equal(read_metrics(path), before)
    path.write_bytes(content)
    assert len(read_metrics(path)) == 4
    assert set(read_metrics(path)["name"]) == {name}
    assert set(read_metrics(path)["value"]) == {0.1 + 0.2}


def killed_before_its_checkpoint(parts, folder, number, monkeypatch, cut=0):
    """Kill a training between the metrics and the model of a round, or in the middle of its metrics."""

    def checkpoint(run, where, before=Run.checkpoint):
        if run.round == number:
            raise Killed
        before(run, where)

    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    with pytest.raises(Killed):
        trained(parts, folder)
    monkeypatch.undo()
    path = folder / METRICS_FILE
    if cut:
        os.truncate(path, path.stat().st_size - cut)


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_kill_between_metrics_and_model_is_healed(parts, tmp_path, monkeypatch, cut):
    trained(parts, tmp_path / "whole")
    folder = tmp_path / "run"
    killed_before_its_checkpoint(parts, folder, 2, monkeypatch, cut)
    assert set(read_metrics(folder / METRICS_FILE)["round"]) == {1, 2}
    assert read_model(folder)[0]["round"] == 1
    assert set(feddar.load(folder).history["round"]) == {1}
    run = trained(parts, folder, resume=True)
    assert (folder / METRICS_FILE).read_bytes() == (tmp_path / "whole" / METRICS_FILE).read_bytes()
    pd.testing.assert_frame_equal(run.history, feddar.load(tmp_path / "whole").history, check_dtype=False)


def test_rows_beyond_the_model_are_gone_as_soon_as_it_is_taken_up(parts, tmp_path, monkeypatch):
    """Else a second kill, before another row is written, would leave rows of two trainings of one round."""
    killed_before_its_checkpoint(parts, tmp_path, 3, monkeypatch)
    trained(parts, tmp_path, resume=True, rounds=2)  # nothing is left to do
    assert set(read_metrics(tmp_path / METRICS_FILE)["round"]) == {1, 2}


def test_a_kill_before_the_first_checkpoint_leaves_nothing_behind(parts, tmp_path, monkeypatch):
    trained(parts, tmp_path / "whole")
    folder = tmp_path / "run"
    killed_before_its_checkpoint(parts, folder, 1, monkeypatch)
    assert (folder / METRICS_FILE).exists()
    trained(parts, folder)
    assert (folder / METRICS_FILE).read_bytes() == (tmp_path / "whole" / METRICS_FILE).read_bytes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files have no names here")
def test_metrics_are_on_the_disk_before_the_model_that_they_are_of(parts, tmp_path, monkeypatch):
    """A checkpoint that survives a power cut must not lack rows."""
    synced, folder = [], tmp_path.resolve() / "run"

    def fsync(number, before=os.fsync):
        synced.append(Path(f"/proc/self/fd/{number}").readlink())  # its whole path: a thread may write another run
        before(number)

    trained(parts, folder, rounds=1)
    monkeypatch.setattr(os, "fsync", fsync)
    trained(parts, folder, resume=True, rounds=2)
    metrics, model = folder / METRICS_FILE, folder / ".model.safetensors.tmp"
    assert [path for path in synced if path in (metrics, model)] == [metrics, model], synced


def test_names_of_several_lines_are_read(tmp_path):
    append_metrics(tmp_path, rows_of(1, "two\r\nlines"))
    assert set(read_metrics(tmp_path / METRICS_FILE)["name"]) == {"two\r\nlines"}
