"""TensorBoard files: read back by TensorBoard itself."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import feddar
from feddar.comparison.tuning import Search
from feddar.errors import UserError
from helpers.cohorts import make_cohort

QUICK = {"rounds": 3, "last": 1}


@pytest.fixture
def parts():
    return make_cohort(n=200).split(0.3)


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_every_figure_of_every_round_is_there(parts, tmp_path):
    run = feddar.train(parts[0], test=parts[1], out=tmp_path, track="tensorboard", **QUICK)
    found = events(tmp_path)
    history = run.history
    for name in run.cohort.domains:
        expected = history[(history["name"] == name) & (history["metric"] == "auc")]
        points = found.Scalars(f"auc/domain/{name}")
        assert [point.step for point in points] == [1, 2, 3]
        assert [point.value for point in points] == pytest.approx(expected["value"].tolist(), rel=1e-6)
    for split in ("train", "validation"):
        losses = history[(history["split"] == split) & (history["scope"] == "all")]["value"].tolist()
        assert [point.value for point in found.Scalars(f"loss/{split}")] == pytest.approx(losses, rel=1e-6)
    assert "auc/summary/domain_min" in found.Tags()["scalars"]
    assert not any("/client/" in tag for tag in found.Tags()["scalars"])


def test_a_resumed_run_has_each_round_once(parts, tmp_path):
    options = {"test": parts[1], "out": tmp_path, "track": "tensorboard", "schedule": "constant"}
    feddar.train(parts[0], rounds=2, last=1, **options)
    feddar.train(parts[0], rounds=4, last=1, resume=True, **options)
    assert [point.step for point in events(tmp_path).Scalars("loss/train")] == [1, 2, 3, 4]


def test_tracking_changes_no_result_and_may_begin_when_a_run_is_resumed(parts, tmp_path):
    options = {"last": 1, "schedule": "constant"}
    feddar.train(parts[0], out=tmp_path / "a", rounds=1, **options)
    tracked = feddar.train(parts[0], out=tmp_path / "a", rounds=2, resume=True, track="tensorboard", **options)
    plain = feddar.train(parts[0], rounds=2, **options)
    assert tracked.history["value"].tolist() == plain.history["value"].tolist()


def test_without_a_folder_there_is_nowhere_to_write(parts):
    with pytest.raises(UserError, match="track tensorboard needs a folder to write to"):
        feddar.train(parts[0], track="tensorboard", **QUICK)


def test_a_missing_package_is_one_sentence(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'feddar\[tensorboard\]'"):
        feddar.train(parts[0], out=tmp_path / "run", track="tensorboard", **QUICK)
    assert not any(tmp_path.iterdir())


def test_a_tuned_comparison_is_tracked_but_for_its_search(tmp_path, monkeypatch):
    monkeypatch.setattr(Search, "next", lambda self: None if self.scores else (0.01, None))
    options = {"folds": 1, "references": False, "rounds": 2, "tune": True, "track": "tensorboard"}
    feddar.compare(make_cohort(n=200), ["fedavg"], out=tmp_path, **options)
    (folder,) = tmp_path.glob("**/tensorboard")
    assert [point.step for point in events(folder.parent).Scalars("loss/train")] == [1, 2]
