"""Tracking by MLflow, read back by MLflow itself from a store on the disk."""

import sys

import pytest

import feddar
from feddar.errors import Notice, UserError
from feddar.results.mlflow_runs import MLflowRun
from feddar.simulation.processes import run_all
from helpers.cohorts import make_cohort, write_table
from helpers.command import COLUMNS
from helpers.command import feddar as command
from helpers.sites import make_study, write_tables

mlflow = pytest.importorskip("mlflow", reason="needs pip install 'feddar[mlflow]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # MLflow's own
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its connections
]
QUICK = {"rounds": 3, "last": 1, "schedule": "constant", "track": "mlflow"}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """Let all tests share a store, since it takes seconds to make; two processes want it at once."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        patch.chdir(folder)
        run_all([lambda _: MLflowRun.opened(configured(folder))] * 2, 2, lambda *_: None, pytest.fail)
        yield folder


def configured(folder):
    (folder / "config.toml").write_text("[training]\nrounds = 1\n")
    return folder


@pytest.fixture
def store():
    return mlflow.MlflowClient()


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=200).split(0.3)


def run_of(store, folder):
    return store.get_run((folder / "mlflow-run").read_text())


def points(store, folder, key):
    found = store.get_metric_history((folder / "mlflow-run").read_text(), key)
    return [(each.step, each.value) for each in found]


def files_of(store, folder):
    return {each.path for each in store.list_artifacts((folder / "mlflow-run").read_text())}


def test_every_figure_of_every_round_and_all_files_are_there(parts, store, tmp_path):
    run = feddar.train(parts[0], test=parts[1], out=tmp_path / "one", **QUICK)
    history = run.history
    for name in run.cohort.domains:
        expected = history[(history["name"] == name) & (history["metric"] == "auc")]
        assert points(store, tmp_path / "one", f"auc/domain/{name}") == list(
            zip(expected["round"], expected["value"], strict=True)
        )
    for split in ("train", "validation"):
        losses = history[(history["split"] == split) & (history["scope"] == "all")]["value"].tolist()
        assert [value for _, value in points(store, tmp_path / "one", f"loss/{split}")] == losses
    found = run_of(store, tmp_path / "one")
    assert found.info.status == "FINISHED" and found.info.run_name == "one"
    assert found.data.params["rounds"] == "3" and found.data.params["method"] == "feddar"
    worst = run.results().query("name == 'domain_min' and metric == 'auc'")["value"].item()
    assert found.data.metrics["result/auc/summary/domain_min"] == worst
    assert not any("/client/" in key for key in found.data.metrics)
    written = {path.name for path in (tmp_path / "one").iterdir()}
    assert files_of(store, tmp_path / "one") == written - {"mlflow-run"}
    assert {"config.toml", "metrics.csv", "model.safetensors", "figures.csv"} <= written


def test_a_resumed_run_goes_on_in_its_own_with_each_round_once(parts, store, tmp_path):
    options = QUICK | {"test": parts[1], "out": tmp_path}
    feddar.train(parts[0], **options | {"rounds": 2})
    first = run_of(store, tmp_path)
    feddar.train(parts[0], resume=True, **options | {"rounds": 4})
    again = run_of(store, tmp_path)
    assert again.info.run_id == first.info.run_id and again.info.status == "FINISHED"
    assert [step for step, _ in points(store, tmp_path, "loss/train")] == [1, 2, 3, 4]
    assert again.data.params["rounds"] == "2" and again.data.tags["resumed.rounds"] == "4"


def test_rounds_after_a_checkpoint_that_was_put_back_are_not_logged_twice(parts, store, tmp_path):
    options = QUICK | {"out": tmp_path}
    feddar.train(parts[0], **options | {"rounds": 1})
    checkpoint = (tmp_path / "model.safetensors").read_bytes()
    feddar.train(parts[0], resume=True, **options)
    (tmp_path / "model.safetensors").write_bytes(checkpoint)
    feddar.train(parts[0], resume=True, **options)
    assert [step for step, _ in points(store, tmp_path, "loss/train")] == [1, 2, 3]


def test_a_run_that_fails_is_said_to_have_failed(parts, store, tmp_path):
    def fail(end):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        feddar.train(parts[0], out=tmp_path, callbacks=[fail], **QUICK)
    assert run_of(store, tmp_path).info.status == "FAILED"


def test_domains_may_have_any_name(store, tmp_path):
    names = {"domain-0": "70+", "domain-1": "São/Rio", "domain-2": ".."}
    cohort = make_cohort(n=150)
    renamed = feddar.Cohort.from_arrays(
        cohort.x[0], cohort.y, domain=[names[name] for name in cohort.domain_names], client=cohort.client_names
    )
    part, test = renamed.split(0.3)
    feddar.train(part, test=test, out=tmp_path, **QUICK | {"rounds": 1})
    keys = {key for key in run_of(store, tmp_path).data.metrics if key.startswith("auc/domain/")}
    assert keys == {"auc/domain/70 plus sign", "auc/domain/São solidus Rio", "auc/domain/full stop full stop"}


def test_where_mlflow_fails_in_the_middle_training_goes_on(parts, store, tmp_path, monkeypatch):
    real, calls = MLflowRun.log, []

    def log(self, figures, step):
        calls.append(step)
        if step == 2:
            raise OSError("the disk is full")
        real(self, figures, step)

    monkeypatch.setattr(MLflowRun, "log", log)
    with pytest.warns(Notice, match=r"MLflow failed \(OSError: the disk is full\): round 2 and later ones are not"):
        run = feddar.train(parts[0], out=tmp_path, **QUICK)
    assert run.round == 3 and [step for step, _ in points(store, tmp_path, "loss/train")] == [1]


def test_a_place_that_cannot_be_used_is_one_sentence(parts, store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://there")
    with pytest.raises(UserError, match=r"MLflow begins no run \(.*: see MLFLOW_TRACKING_URI, or leave out --track."):
        feddar.train(parts[0], out=tmp_path, **QUICK)


def test_a_missing_package_is_one_sentence_before_anything_is_written(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"pip install 'feddar\[mlflow\]'"):
        feddar.train(parts[0], out=tmp_path / "run", **QUICK)
    with pytest.raises(UserError, match=r"pip install 'feddar\[mlflow\]'"):
        feddar.compare(make_cohort(n=200), ["fedavg"], out=tmp_path / "comparison", track="mlflow")
    assert not any(tmp_path.iterdir())


def test_commands_also_log_report_and_card_and_a_comparison_is_above_its_runs(store, tmp_path):
    write_table(make_cohort(n=200), tmp_path / "study.csv")
    given = ["study.csv", *COLUMNS, "--track", "mlflow"]
    command("run", *given, "--rounds", 2, "--jobs", 1, "--out", "run", cwd=tmp_path)
    run = run_of(store, tmp_path / "run")
    assert run.data.params["domain"] == "race" and run.info.status == "FINISHED"
    assert {"report.html", "card.md", "model.safetensors"} <= files_of(store, tmp_path / "run")
    assert not (tmp_path / "run" / "card.md").exists()
    several = ["--methods", "fedavg,local", "--folds", 2, "--rounds", 2, "--no-references"]
    command("compare", *given, *several, "--jobs", 2, "--out", "both", cwd=tmp_path)
    above = run_of(store, tmp_path / "both")
    assert {"report.html", "table.md", "results.csv", "curves.csv", "config.toml"} <= files_of(store, tmp_path / "both")
    below = store.search_runs([above.info.experiment_id], f"tags.mlflow.parentRunId = '{above.info.run_id}'")
    assert {each.info.run_name for each in below} == {f"{m}/{fold}/0" for m in ("fedavg", "local") for fold in (0, 1)}
    assert {each.data.tags["method"] for each in below} == {"fedavg", "local"}
    assert all(len(store.get_metric_history(each.info.run_id, "loss/train")) == 2 for each in below)


def test_a_study_between_sites_is_tracked_and_refused_before_anyone_is_waited_for(store, tmp_path, monkeypatch):
    make_study(write_tables(tmp_path / "tables"), rounds=2, schedule="constant").write(tmp_path / "study.toml")
    named = ["simulate", "--config", "study.toml", "--data", "tables", "--engine", "local", "--out", "run"]
    command(*named, "--track", "mlflow", cwd=tmp_path)
    history = feddar.load(tmp_path / "run").history.query("name == 'A' and metric == 'auc'")
    assert [value for _, value in points(store, tmp_path / "run", "auc/domain/A")] == history["value"].tolist()
    kept = {"study.toml", "exchanges.csv", "run.json", "model.safetensors", "report.html", "card.md"}
    assert kept <= files_of(store, tmp_path / "run")
    command(*named, "--track", "mlflow", "--resume", cwd=tmp_path)
    assert [step for step, _ in points(store, tmp_path / "run", "loss/train")] == [1, 2]
    monkeypatch.setitem(sys.modules, "mlflow", None)
    server = ["server", "--config", "study.toml", "--insecure", "--listen", "127.0.0.1:1", "--out", "new"]
    assert "pip install 'feddar[mlflow]'" in command(*server, "--track", "mlflow", cwd=tmp_path, code=2)
    assert not (tmp_path / "new").exists()
