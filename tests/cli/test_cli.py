"""The command line as a person uses it: real files, wrong inputs, and processes that are killed."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.names import named_own, named_state
from feddar.errors import UserError
from feddar.results.run import load
from feddar.results.run_folder import read_model
from helpers.command import COLUMNS, feddar, names_in

FEDDAR = [sys.executable, "-m", "feddar.cli"]
CONSTANT = ["--schedule", "constant"]
"""With a rate that falls, the number of rounds cannot be changed when a run is resumed."""


def frame(n=240, seed=0):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(rng.normal(size=(n, 3)), columns=["age", "crp", "spo2"])
    table["hospital"] = [f"h{i % 3}" for i in range(n)]
    table["race"] = rng.choice(["a", "b"], n)
    sign = np.where(table["race"] == "a", 1, -1)
    table["outcome"] = np.where(table["age"] * sign + 0.3 * rng.normal(size=n) > 0, "yes", "no")
    return table


@pytest.fixture
def table(tmp_path):
    frame().to_csv(tmp_path / "study.csv", index=False)
    return tmp_path


def test_run_trains_evaluates_and_saves(table):
    shown = feddar("run", "study.csv", *COLUMNS, "--rounds", 3, "--versus", "fedavg", cwd=table)
    for word in ("feddar", "fedavg", "mean domain, log-loss", "worst client", "h2", "positive class 'yes'"):
        assert word in shown
    assert "feddar report runs/study-feddar runs/study-feddar/versus-fedavg --out report.html" in shown
    assert "feddar predict runs/study-feddar NEW.csv --out predictions.csv" in shown
    folder = table / "runs" / "study-feddar"
    metrics = pd.read_csv(folder / "metrics.csv")
    assert metrics.columns.tolist() == ["round", "split", "scope", "name", "metric", "value", "count"]
    assert metrics["round"].max() == 3
    assert {"model.safetensors", "config.toml", "versus-fedavg"} <= names_in(folder)
    again = feddar("run", "study.csv", "--config", folder / "config.toml", "--out", "again", cwd=table)
    assert "mean domain" in again
    assert (table / "again" / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()


def test_card_says_how_to_train_again_and_that_command_does(table):
    feddar("run", "study.csv", *COLUMNS, "--rounds", 2, "--out", "mine", cwd=table)
    shown = feddar("card", "mine", cwd=table)
    assert "Written: card.md" in shown and "Questions that the author has to answer: 26" in shown
    card = (table / "card.md").read_text()
    (command,) = re.findall(r"```\nfeddar (.*)\n```", card)
    feddar(*shlex.split(command), cwd=table)
    again, before = ((table / name / "figures.csv").read_bytes() for name in ("again", "mine"))
    assert again == before
    assert "Written: answers.toml" in feddar("card", "mine", "--questions", "answers.toml", cwd=table)
    feddar("card", "mine", "--answers", "answers.toml", "--out", "card.html", cwd=table)
    assert "holds neither a comparison" in feddar("card", "elsewhere", cwd=table, code=2)
    assert "exists and is no page" in feddar("report", "mine", "--out", "card.html", cwd=table, code=2)


def test_report_writes_a_page_about_runs(table):
    feddar("run", "study.csv", *COLUMNS, "--rounds", 2, "--versus", "fedavg", "--out", "mine", cwd=table)
    shown = feddar("report", "mine", "mine/versus-fedavg", "--out", "pages/study.html", "--title", "A & B", cwd=table)
    assert "Written: pages/study.html" in shown
    page = (table / "pages" / "study.html").read_text()
    assert "<h1>A &amp; B</h1>" in page
    assert "feddar run study.csv --config mine/versus-fedavg/config.toml" in page
    assert "holds neither a comparison" in feddar("report", "pages", cwd=table, code=2)
    assert "Missing argument" in feddar("report", cwd=table, code=2)
    assert "cannot write to" in feddar("report", "mine", "--out", "study.csv/page.html", cwd=table, code=2)
    assert not (table / "report.html").exists()
    for name, why in {"study.csv": "let it end in .html", "mine/notes.html": "is no page of feddar"}.items():
        file = table / name
        file.exists() or file.write_text("mine")
        before = file.read_bytes()
        assert why in feddar("report", "mine", "--out", name, cwd=table, code=2)
        assert file.read_bytes() == before
    assert "Written" in feddar("report", "mine", "--out", "pages/study.html", cwd=table)


def test_a_run_writes_its_page_itself(table):
    train = ["run", "study.csv", *COLUMNS, "--rounds", 1, "--out", "mine"]
    for name, why in {"page.txt": "let it end in .html", ".": "is a folder", "study.csv": "let it end"}.items():
        assert why in feddar(*train, "--report", name, cwd=table, code=2)
    assert not (table / "mine").exists()
    assert "Written: mine/page.html" in feddar(*train, "--versus", "fedavg", "--report", "mine/page.html", cwd=table)
    feddar("report", "mine", "mine/versus-fedavg", cwd=table)
    assert (table / "mine" / "page.html").read_bytes() == (table / "report.html").read_bytes()


def test_what_is_noted_of_a_table_is_on_its_pages_and_its_card(table):
    leaking = frame()
    leaking["<died> on"] = np.where(leaking["outcome"] == "yes", "2020-05-01", None)
    leaking.to_csv(table / "leaking.csv", index=False)
    roles = ["leaking.csv", *COLUMNS, "--rounds", 1]
    said = feddar("run", *roles, "--versus", "fedavg", "--out", "run", "--report", "run.html", cwd=table)
    feddar("compare", *roles, "--methods", "fedavg,local", "--folds", 2, "--no-references", "--out", "c", cwd=table)
    feddar("card", "run", "--out", "run-card.html", cwd=table)
    note = "column '&lt;died&gt; on' alone tells 'outcome' almost without error"
    assert note.replace("&lt;", "<").replace("&gt;", ">") in " ".join(said.split())
    for page in ("run.html", "c/report.html", "run-card.html"):
        assert (table / page).read_text().replace("&#39;", "'").count(note) == 1
    feddar("run", "leaking.csv", *COLUMNS, "--ignore", "<died> on", "--rounds", 1, "--out", "plain", cwd=table)
    feddar("report", "plain", cwd=table)
    assert "Noted of the data" not in (table / "report.html").read_text()


def test_parquet_and_a_folder_of_files_are_the_same_cohort(table):
    whole = frame()
    whole.to_parquet(table / "study.parquet")
    (table / "sites").mkdir()
    for name, part in whole.groupby("hospital"):
        part.drop(columns="hospital").to_csv(table / "sites" / f"{name}.csv", index=False)
    tables = [
        feddar("cohort", "study.csv", *COLUMNS, cwd=table),
        feddar("cohort", "study.parquet", *COLUMNS, cwd=table),
        feddar("cohort", "sites", "--domain", "race", "--target", "outcome", cwd=table),
    ]
    assert len({shown.split("\n", 1)[1] for shown in tables}) == 1


@pytest.mark.parametrize(("names", "positive"), [((1.0, 0.0), "1"), ((False, True), "false")])
def test_the_positive_class_is_found_however_a_file_writes_it(tmp_path, names, positive):
    coded = frame().assign(outcome=lambda t: np.where(t["outcome"] == "yes", *names))
    coded.to_parquet(tmp_path / "s.parquet")
    shown = feddar("cohort", "s.parquet", *COLUMNS, "--positive", positive, cwd=tmp_path)
    assert f"the positive class {names[0]!r}" in shown


def test_the_positive_class_is_the_one_named(table):
    shown = feddar("cohort", "study.csv", *COLUMNS, "--positive", "no", cwd=table)
    assert "positive class 'no'" in shown
    assert "positive class 'yes'" in feddar("cohort", "study.csv", *COLUMNS, cwd=table)


def test_cohort_warns(table):
    few = frame().query("race == 'a' or index < 12")
    few.to_csv(table / "few.csv", index=False)
    shown = feddar("cohort", "few.csv", *COLUMNS, cwd=table)
    assert "note: domain 'b' has" in shown
    assert "its figures will be noisy" in shown


def test_methods_are_listed(tmp_path):
    shown = feddar("methods", cwd=tmp_path)
    for name in ("local", "fedavg", "fedrep", "feddar-wa", "feddar-sa", "feddar", "Zhong"):
        assert name in shown


HEAVY = {"torch", "pandas", "matplotlib", "pyarrow", "onnx", "onnxscript", "onnxruntime"}


def loaded(code, cwd):
    """Run code in a new process; return which of the heavy packages it imports, and what it prints."""
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stderr.split()), done.stdout


def test_help_does_not_wait_for_heavy_packages(tmp_path):
    for arguments, flag in (
        (["--help"], "compare"),
        (["run", "--help"], "--rounds"),
        (["run", "--help-all"], "--head-epochs"),
    ):
        found, shown = loaded(f"sys.argv[1:] = {arguments}; import feddar.cli; feddar.cli.main()", tmp_path)
        assert not found
        assert flag in shown


def test_a_package_is_imported_when_it_is_used(tmp_path):
    assert not loaded("import feddar", tmp_path)[0]
    assert loaded("from feddar import train, Cohort, load", tmp_path)[0] == {"torch"}


def set_value(column, value, row=5):
    def change(table):
        return table.astype({column: object}).assign(
            **{column: lambda t: [value if i == row else v for i, v in enumerate(t[column])]}
        )

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_value("age", "old"),
            "study.csv, line 7: column 'age' holds 'old' among numbers; mend it, take it as missing with "
            "--missing 'old', or leave it out",
        ),
        (lambda table: set_value("day", "soon")(table.assign(day="2020-02-01")), "holds 'soon' among dates"),
        (set_value("age", float("inf")), "study.csv, line 7: column 'age' is infinite"),
        (set_value("outcome", None), "study.csv, line 7: column 'outcome' is empty"),
        (
            lambda table: set_value("outcome", "NA")(table.assign(outcome=table["age"])),
            "study.csv, line 7: column 'outcome' is empty there (or says NA",
        ),
        (set_value("race", None), "column 'race' is empty"),
        (lambda table: table.assign(outcome=range(len(table))), "--task regression|classification"),
        (
            lambda table: table.assign(day="31/12/2020"),
            "study.csv, line 2: column 'day' holds '31/12/2020'; write dates as 2020-12-31, or leave it out with "
            "--ignore day.",
        ),
        (set_value("age", 1e40), "study.csv, line 7: column 'age' holds 1e+40, too large"),
        (set_value("race", "lonely"), "domain 'lonely' has 1 sample;"),
        (set_value("hospital", "tiny"), "client 'tiny' has 1 sample;"),
        (lambda table: table.iloc[:0], "no samples"),
        (lambda table: table.assign(outcome="no"), "nothing to learn"),
        (lambda table: table.rename(columns={"outcome": "result"}), "has no column 'outcome'"),
        (lambda table: table.drop(columns=["age", "crp", "spo2"]), "no column left to learn from"),
    ],
)
def test_wrong_tables(tmp_path, change, message):
    change(frame()).to_csv(tmp_path / "study.csv", index=False)
    assert message in feddar("run", "study.csv", *COLUMNS, cwd=tmp_path, code=2)
    assert names_in(tmp_path) == {"study.csv"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "study.csv is empty"),
        (b"a,b,a\n1,2,3\n", "has the column 'a' more than once"),
        (b"age,hospital,race,outcome\n1,2\n1,2,3,4,5,6\n", "study.csv, line 3 has 6 entries, and the header 4"),
    ],
)
def test_broken_files(tmp_path, content, message):
    (tmp_path / "study.csv").write_bytes(content)
    assert message in feddar("run", "study.csv", *COLUMNS, cwd=tmp_path, code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "study.csv", "--domain", "race", "--target", "outcome"], "--client COLUMN"),
        (["run", "study.csv", *COLUMNS, "--method", "fedag"], "did you mean 'fedavg'?"),
        (["run", "study.csv", *COLUMNS, "--versus", "fedag"], "did you mean 'fedavg'?"),
        (["run", "study.csv", *COLUMNS, "--k", "-3"], "k should be greater than or equal to 1; given was '-3'"),
        (["run", "study.csv", *COLUMNS, "--rounds", "many"], "rounds should be a valid integer"),
        (["run", "study.csv", *COLUMNS, "--optimizer", "lion"], "optimizer should be 'adam' or 'sgd'"),
        (["run", "study.csv", *COLUMNS[:-1], "outcom"], "did you mean 'outcome'?"),
        (["run", "study.csv", *COLUMNS, "--ignore", "agee"], "did you mean 'age'?"),
        (["run", "study.csv", *COLUMNS, "--config", "none.toml"], "cannot read the configuration none.toml"),
        (["run", "study.csv", *COLUMNS, "--resume"], "--resume --out FOLDER"),
        (["run", "study.csv", *COLUMNS, "--resume", "--out", "nothing"], "there is no run in nothing"),
        (["run", "none.csv", *COLUMNS], "there is no file or folder none.csv"),
        (["run", "study.csv", *COLUMNS, "--positive", "maybe"], "'outcome', which has no, yes"),
        (["run", "study.csv", *COLUMNS, "--image", "photo"], "no column 'photo'"),
        (["run", "study.csv", *COLUMNS, "--image", "age"], "(does column 'age' hold paths of images?)"),
        (["run", "study.csv", *COLUMNS, "--image", "age", "--ignore", "age"], "'age' cannot be both --image and"),
        (["run", "study.csv", *COLUMNS, "--features", "outcome,age"], "column 'outcome' is the target"),
        (["run", "study.csv", *COLUMNS, "--features", "age,hospital"], "column 'hospital' is the client"),
        (["run", "study.csv", *COLUMNS, "--group", "spo2", "--features", "spo2"], "column 'spo2' is the group"),
        (["run", "study.csv", *COLUMNS, "--features", "age,age"], "--features names column 'age' twice"),
        (["run", "study.csv", *COLUMNS[:-1], "race"], "'race' is named twice, as domain and target"),
        (["run", "study.csv", *COLUMNS, "--group", "hospital"], "'hospital' is named twice, as client and group"),
        (["run", "study.csv", *COLUMNS, "--image", "age"], "(does column 'age' hold paths of images?): mend"),
        (["run", "exma"], "did you mean 'exam'?"),
        (["paper", "sample"], "did you mean 'samples'?"),
        (["paper", "samples", "--scale", "huge"], "scale"),
        (["paper", "samples", "--seeds", "0"], "seed"),
        (["paper", "digits", "--device", "cuda:99"], "there is no device 'cuda:99' here"),
        (["paper", "digits", "--device", "gpu"], "choose auto, cpu, cuda"),
    ],
)
def test_wrong_commands(table, arguments, message):
    before = names_in(table)
    assert message in feddar(*arguments, cwd=table, code=2)
    assert names_in(table) == before


def test_an_empty_client_file(tmp_path):
    whole = frame().drop(columns="hospital")
    whole.to_csv(tmp_path / "full.csv", index=False)
    whole.iloc[:0].to_csv(tmp_path / "nobody.csv", index=False)
    columns = ["--domain", "race", "--target", "outcome"]
    assert "client 'nobody' has no samples" in feddar("run", ".", *columns, cwd=tmp_path, code=2)


def test_a_run_is_not_overwritten(table):
    feddar("run", "study.csv", *COLUMNS, "--rounds", 1, "--out", "mine", cwd=table)
    before = (table / "mine" / "model.safetensors").read_bytes()
    assert "already holds a run" in feddar("run", "study.csv", *COLUMNS, "--out", "mine", cwd=table, code=2)
    assert (table / "mine" / "model.safetensors").read_bytes() == before


def test_metrics_with_other_columns_are_one_sentence(table):
    feddar("run", "study.csv", *COLUMNS, *CONSTANT, "--rounds", 1, "--out", "mine", cwd=table)
    metrics = table / "mine" / "metrics.csv"
    pd.read_csv(metrics).rename(columns={"split": "part"}).to_csv(metrics, index=False)
    for command in (["report", "mine"], ["run", "study.csv", "--resume", "--out", "mine", "--rounds", 2]):
        assert "metrics.csv has no column 'split' of round, split, scope" in feddar(*command, cwd=table, code=2)


def test_metrics_that_end_before_the_model_are_refused(table):
    feddar("run", "study.csv", *COLUMNS, *CONSTANT, "--rounds", 3, "--out", "mine", cwd=table)
    metrics = table / "mine" / "metrics.csv"
    rows = pd.read_csv(metrics)
    rows[rows["round"] < 3].to_csv(metrics, index=False)
    for command in (["report", "mine"], ["run", "study.csv", "--resume", "--out", "mine", "--rounds", 4]):
        said = feddar(*command, cwd=table, code=2)
        assert "metrics.csv ends in round 2, and the model beside it has done 3" in said


def test_resuming_with_other_settings_or_data_is_refused(table):
    feddar("run", "study.csv", *COLUMNS, *CONSTANT, "--rounds", 1, "--out", "mine", cwd=table)
    again = ["run", "study.csv", "--resume", "--out", "mine"]
    before = (table / "mine" / "config.toml").read_bytes()
    assert "was started with lr=0.003, not 0.1" in feddar(*again, "--lr", 0.1, "--rounds", 2, cwd=table, code=2)
    assert "was started with seed=0, not 3" in feddar(*again, "--seed", 3, cwd=table, code=2)
    assert (table / "mine" / "config.toml").read_bytes() == before
    frame(seed=1).to_csv(table / "study.csv", index=False)
    assert "was started with other data" in feddar(*again, "--rounds", 2, cwd=table, code=2)
    (table / "mine" / "model.safetensors").write_bytes(b"damaged")
    assert "is damaged" in feddar(*again, cwd=table, code=2)


def test_more_rounds_can_be_added(table):
    feddar("run", "study.csv", *COLUMNS, *CONSTANT, "--rounds", 4, "--out", "whole", cwd=table)
    feddar("run", "study.csv", *COLUMNS, *CONSTANT, "--rounds", 2, "--out", "parts", cwd=table)
    feddar("run", "study.csv", "--resume", "--rounds", 4, "--out", "parts", cwd=table)
    feddar("run", "study.csv", *COLUMNS, "--rounds", 2, "--out", "falling", cwd=table)
    falling = ["run", "study.csv", "--resume", "--rounds", 4, "--out", "falling"]
    assert "was started with rounds=2, not 4" in feddar(*falling, cwd=table, code=2)
    assert (table / "whole" / "metrics.csv").read_bytes() == (table / "parts" / "metrics.csv").read_bytes()


def test_a_folder_that_cannot_be_written(table):
    (table / "file").write_text("")
    assert "cannot write to file" in feddar("run", "study.csv", *COLUMNS, "--out", "file", cwd=table, code=2)
    assert "cannot write to /proc" in feddar("run", "study.csv", *COLUMNS, "--out", "/proc/feddar", cwd=table, code=2)


def test_a_full_disk_keeps_the_last_checkpoint(table, monkeypatch):
    feddar("run", "study.csv", *COLUMNS, *CONSTANT, "--rounds", 1, "--out", "mine", cwd=table)
    before = (table / "mine" / "model.safetensors").read_bytes()
    again = ["run", "study.csv", "--resume", "--rounds", 3, "--out", "mine"]

    def full(tensors, path, **_):
        path.write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr("feddar.results.run_folder.save_file", full)
        assert "cannot write to mine: No space left on device" in feddar(*again, cwd=table, code=2)
    assert (table / "mine" / "model.safetensors").read_bytes() == before
    assert names_in(table / "mine") == {"config.toml", "metrics.csv", "model.safetensors"}
    feddar(*again, cwd=table)


@pytest.mark.parametrize(
    ("how", "jobs"),
    [
        (signal.SIGKILL, 2),
        (signal.SIGINT, 1),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.more),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.more),
    ],
)
def test_killed_and_resumed_gives_the_same_bits(table, how, jobs):
    options = [*COLUMNS, "--method", "fedrep", "--rounds", "60", "--patience", "60", "--jobs", str(jobs)]
    feddar("run", "study.csv", *options, "--out", "whole", cwd=table)
    process = subprocess.Popen(
        [*FEDDAR, "run", "study.csv", *options, "--out", "cut"],
        cwd=table, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.time() + 120
    while not (table / "cut" / "model.safetensors").exists() and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    os.killpg(process.pid, how) if how == signal.SIGINT else process.kill()
    said, _ = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 1, said
        assert "feddar run study.csv --resume --out cut" in said
    assert pd.read_csv(table / "cut" / "metrics.csv")["round"].max() < 60, "it was not stopped in time"
    feddar("run", "study.csv", "--resume", "--out", "cut", "--jobs", 3 - jobs, cwd=table)
    for name in ("metrics.csv",):
        assert (table / "cut" / name).read_bytes() == (table / "whole" / name).read_bytes()
    (_, a, own_a, _), (_, b, own_b, _) = read_model(table / "cut"), read_model(table / "whole")
    assert len(own_b) == 3
    own = [(named_own(own_a[client]), named_own(own_b[client])) for client in own_b]
    for found, expected in [(named_state(a), named_state(b)), *own]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_names_with_brackets_and_signs_survive(tmp_path):
    odd = frame().rename(columns={"race": "🏥 [/b]"})
    odd["🏥 [/b]"] = odd["🏥 [/b]"].map({"a": "Black [other]", "b": "x[/b]"})
    odd.to_csv(tmp_path / "s.csv", index=False)
    columns = ["--client", "hospital", "--domain", "🏥 [/b]", "--target", "outcome"]
    shown = feddar("run", "s.csv", *columns, *CONSTANT, "--rounds", 1, "--out", "r", cwd=tmp_path)
    assert "Black [other]" in shown
    assert "x[/b]" in shown
    feddar("run", "s.csv", "--resume", "--out", "r", "--rounds", 2, cwd=tmp_path)
    assert "Black [other]" in feddar("cohort", "s.csv", *columns, cwd=tmp_path)


def test_codes_stay_text_and_only_empty_names_are_missing(tmp_path):
    odd = frame()
    odd["hospital"] = odd["hospital"].map({"h0": "001", "h1": "01", "h2": "NA"})
    odd.to_csv(tmp_path / "s.csv", index=False)
    shown = feddar("cohort", "s.csv", *COLUMNS, cwd=tmp_path)
    assert [line.split()[0] for line in shown.splitlines()[6:9]] == ["001", "01", "NA"]


def test_files_of_a_folder_are_named(tmp_path):
    whole = frame().drop(columns="hospital")
    whole.to_csv(tmp_path / "a.csv", index=False)
    whole.assign(age=[*whole["age"][:3], "old", *whole["age"][4:]]).to_csv(tmp_path / "b.csv", index=False)
    columns = ["--domain", "race", "--target", "outcome"]
    assert "b.csv, line 5: column 'age' holds 'old'" in feddar("run", ".", *columns, cwd=tmp_path, code=2)
    assert "a.csv has no column 'hospital'" in feddar("run", ".", *COLUMNS, cwd=tmp_path, code=2)


def test_files_of_a_folder_may_order_their_columns_but_not_have_others(tmp_path):
    whole, columns = frame().drop(columns="hospital"), ["--domain", "race", "--target", "outcome"]
    straight, turned = (tmp_path / name for name in ("straight", "turned"))
    for folder, second in ((straight, whole), (turned, whole[whole.columns[::-1]])):
        folder.mkdir()
        whole.to_csv(folder / "a.csv", index=False)
        second.to_csv(folder / "b.csv", index=False)
    shown = [feddar("cohort", ".", *columns, cwd=folder) for folder in (straight, turned)]
    assert shown[0] == shown[1]
    whole.rename(columns={"crp": "protein"}).to_csv(turned / "b.csv", index=False)
    wrong = feddar("cohort", ".", *columns, cwd=turned, code=2)
    assert "b.csv has other columns than a.csv, without crp, with protein: every file" in wrong


def test_a_number_that_differs_in_every_row_is_noted(tmp_path):
    frame().assign(mrn=range(1000, 1240), stay=[3, *range(239)]).to_csv(tmp_path / "s.csv", index=False)
    shown = " ".join(feddar("cohort", "s.csv", *COLUMNS, cwd=tmp_path).split())
    assert "if it is an identifier, add --ignore mrn" in shown
    assert "--ignore stay" not in shown


def test_columns_of_lists_are_left_out_or_refused(tmp_path):
    odd = frame().assign(codes=[[1, 2]] * 240, record=[{"a": 1}] * 240)
    odd.to_parquet(tmp_path / "s.parquet")
    shown = feddar("cohort", "s.parquet", *COLUMNS, cwd=tmp_path)
    assert "column 'codes' is left out: it holds lists or records." in shown
    assert "column 'record' is left out: it holds lists or records." in shown
    asked = feddar("cohort", "s.parquet", *COLUMNS, "--features", "codes", cwd=tmp_path, code=2)
    assert "column 'codes' holds lists or records; leave it out of --features" in asked
    as_domain = feddar("cohort", "s.parquet", *COLUMNS[:2], "--domain", "codes", *COLUMNS[4:], cwd=tmp_path, code=2)
    assert "column 'codes' holds lists or records" in as_domain
    feddar("run", "s.parquet", *COLUMNS, "--rounds", 1, "--out", "r", cwd=tmp_path)
    odd.assign(age=odd["codes"]).to_parquet(tmp_path / "new.parquet")
    assert "row 1: column 'age' holds a list" in feddar("predict", "r", "new.parquet", cwd=tmp_path, code=2)


def test_a_column_with_a_comma_in_its_name_is_found_again(tmp_path):
    frame().rename(columns={"outcome": "dead, yes/no"}).to_csv(tmp_path / "s.csv", index=False)
    feddar("run", "s.csv", *COLUMNS[:-1], "dead, yes/no", "--rounds", 1, "--out", "r", cwd=tmp_path)
    assert "of the rows with a label" in feddar("predict", "r", "s.csv", cwd=tmp_path)


def test_csv_and_parquet_agree_on_what_is_missing_and_on_codes(tmp_path):
    both = frame().assign(
        hospital=lambda t: t["hospital"].str[1:].astype(float),
        ward=["", "A", "NA", "B"] * 60,
        unit=pd.Categorical(["", "A", "B"] * 80),
        seen=pd.date_range("2020-06-01", periods=240, freq="h", tz="Europe/Paris"),
    )
    both.astype({"hospital": int}).to_csv(tmp_path / "s.csv", index=False)
    both.to_parquet(tmp_path / "s.parquet")
    shown = [feddar("cohort", f"s.{kind}", *COLUMNS, cwd=tmp_path).split("\n", 1)[1] for kind in ("csv", "parquet")]
    assert shown[0] == shown[1]
    assert "50.0%" in shown[0]
    predicted = []
    for kind in ("csv", "parquet"):
        feddar("run", f"s.{kind}", *COLUMNS, "--method", "local", "--rounds", 1, "--out", kind, cwd=tmp_path)
        for new in ("csv", "parquet"):
            feddar("predict", kind, f"s.{new}", "--out", f"{kind}-{new}.csv", cwd=tmp_path)
            predicted.append((tmp_path / f"{kind}-{new}.csv").read_text())
    assert len(set(predicted)) == 1


def test_classes_are_named_with_their_shares(tmp_path):
    frame().assign(outcome=["mild", "mild", "none so far", "severe"] * 60).to_csv(tmp_path / "s.csv", index=False)
    shown = feddar("cohort", "s.csv", *COLUMNS, cwd=tmp_path)
    assert "predicted: one of 3 classes: mild 50.0%, none so far 25.0%, severe 25.0%" in " ".join(shown.split())


@pytest.mark.parametrize("index", [range(240), [*range(239), 5]])
def test_the_index_of_a_saved_frame_is_no_column(tmp_path, index):
    frame().set_index(pd.Index(index, name="patient")).to_parquet(tmp_path / "s.parquet")
    wrong = feddar("cohort", "s.parquet", *COLUMNS, "--group", "patient", cwd=tmp_path, code=2)
    assert "no column 'patient': it is the index of the data frame; use reset_index() before saving." in wrong


def test_tables_that_hide_a_mistake(tmp_path):
    lines = frame().to_csv(index=False).splitlines()
    (tmp_path / "comma.csv").write_text("\n".join([lines[0], *(f"{line}," for line in lines[1:])]))
    assert "line 2 has 7 entries, and the header 6" in feddar("run", "comma.csv", *COLUMNS, cwd=tmp_path, code=2)
    frame().assign(note="text").set_index("note", drop=False).to_parquet(tmp_path / "indexed.parquet")
    assert "column 'note' has the same value everywhere" in feddar("cohort", "indexed.parquet", *COLUMNS, cwd=tmp_path)


def mixed(n=240):
    """A table with every kind of column, and gaps."""
    rng = np.random.default_rng(1)
    table = frame(n).assign(
        smoker=rng.choice(["yes", "no"], n),
        ward=rng.choice(["A", "B", "C"], n),
        admitted=pd.date_range("2020-01-01", periods=n).strftime("%Y-%m-%d"),
        sex=rng.choice(["F", "M"], n),
        patient=[f"patient {i}" for i in range(n)],
        empty=np.nan,
    )
    gaps = rng.random((n, 3)) < 0.2
    for place, column in enumerate(("age", "ward", "smoker")):
        table.loc[gaps[:, place], column] = np.nan
    return table


def test_every_kind_of_column_and_gaps_are_learned_from(tmp_path):
    mixed().to_csv(tmp_path / "s.csv", index=False)
    shown = feddar("cohort", "s.csv", *COLUMNS, cwd=tmp_path)
    assert "column 'patient' is left out: it has 240 distinct texts in 240 rows" in shown
    assert "column 'empty' is left out: it has no values" in shown
    feddar("run", "s.csv", *COLUMNS, "--rounds", 2, "--out", "r", cwd=tmp_path)
    run, new = load(tmp_path / "r"), mixed()
    assert {c.name: c.kind for c in run.cohort.columns} == {
        "age": "number", "crp": "number", "spo2": "number", "smoker": "boolean", "ward": "category",
        "admitted": "date", "sex": "category",
    }  # fmt: skip
    found = run.predict_proba(new, domain=new["race"])
    assert np.isfinite(found).all()
    parquet = mixed().assign(admitted=lambda t: pd.to_datetime(t["admitted"]))
    np.testing.assert_array_equal(run.predict_proba(parquet, domain=new["race"]), found)
    with pytest.raises(UserError, match="column 'ward' holds 'D', which did not occur in training"):
        run.predict(new.assign(ward="D"), domain=new["race"])


def test_features_are_chosen_and_domains_crossed(tmp_path):
    mixed().to_csv(tmp_path / "s.csv", index=False)
    columns = ["--client", "hospital", "--domain", "race,sex", "--target", "outcome", "--features", "age,ward"]
    assert "a, F" in feddar("cohort", "s.csv", *columns, cwd=tmp_path)
    feddar("run", "s.csv", *columns, "--rounds", 1, "--out", "r", cwd=tmp_path)
    run = load(tmp_path / "r")
    assert run.cohort.domains == ("a, F", "a, M", "b, F", "b, M")
    assert [column.name for column in run.cohort.columns] == ["age", "ward"]
    wrong = [*columns[:-1], "age,patient"]
    assert "leave it out of --features" in feddar("run", "s.csv", *wrong, cwd=tmp_path, code=2)
    wrong = [*columns[:-1], "age,wardd"]
    assert "did you mean 'ward'?" in feddar("run", "s.csv", *wrong, cwd=tmp_path, code=2)


def test_a_kill_before_the_first_checkpoint_leaves_no_trace(table):
    feddar("run", "study.csv", *COLUMNS, "--rounds", 2, "--out", "whole", cwd=table)
    feddar("run", "study.csv", *COLUMNS, "--rounds", 1, "--out", "cut", cwd=table)
    (table / "cut" / "model.safetensors").unlink()
    feddar("run", "study.csv", "--resume", "--rounds", 2, "--out", "cut", cwd=table)
    assert (table / "cut" / "metrics.csv").read_bytes() == (table / "whole" / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "study.csv", *COLUMNS, "--roundz", "3"], "No such option"),
        (["run"], "Missing argument"),
        (["cohort", "synthetic", "--seed", "-1"], "seed"),
        (["run", "study.csv", *COLUMNS, "--versus", "feddar"], "is the method itself"),
        (["run", "study.csv", *COLUMNS, "--damping", "inf"], "damping should be a finite number"),
        (["run", "study.csv", *COLUMNS, "--lr-steps", "1:-1"], "positive factors"),
        (["run", "study.csv", *COLUMNS, "--k", "100000000000"], "k should be less than"),
    ],
)
def test_more_wrong_commands(table, arguments, message):
    assert message in feddar(*arguments, cwd=table, code=2)


def test_help_names_the_choices(tmp_path):
    assert "hessian|block|gram" in feddar("run", "--help-all", cwd=tmp_path)
    assert "Usage" in feddar(cwd=tmp_path, code=0)


def test_a_comparison_can_be_resumed_and_added(table):
    done = ["--resume", "--out", "mine", "--versus", "fedavg"]
    feddar("run", "study.csv", *COLUMNS, "--rounds", 2, "--out", "mine", cwd=table)
    shown = feddar("run", "study.csv", *done, cwd=table)
    assert "mean domain" in shown
    assert feddar("run", "study.csv", *done, cwd=table) == shown


def test_blanks_around_names_do_not_make_new_groups(table):
    odd = frame()
    odd["race"] = [f"{name} " if i % 2 else name for i, name in enumerate(odd["race"])]
    odd.to_csv(table / "blanks.csv", index=False)
    shown = [feddar("cohort", name, *COLUMNS, cwd=table).split("\n", 1)[1] for name in ("study.csv", "blanks.csv")]
    assert shown[0] == shown[1]
    feddar("run", "study.csv", *COLUMNS, "--ignore", "age, crp", "--rounds", 1, cwd=table)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda t, p: t.assign(age=np.where(t.index == 5, np.inf, t["age"])).to_csv(p, index=False),
            "line 7: column 'age'",
        ),
        (lambda t, p: t.assign(race=t["age"]).to_csv(p, index=False), "240 distinct values; is it a group"),
    ],
)
def test_what_spreadsheets_write(tmp_path, write, message):
    write(frame(), tmp_path / "study.csv")
    assert message in feddar("run", "study.csv", *COLUMNS, cwd=tmp_path, code=2)


def test_version(tmp_path):
    assert feddar("--version", cwd=tmp_path).startswith("feddar ")


def test_a_model_of_a_table_finds_its_columns(table):
    feddar("run", "study.csv", *COLUMNS, "--rounds", 2, "--out", "mine", cwd=table)
    run, new = load(table / "mine"), frame()
    expected = run.predict_proba(new[["age", "crp", "spo2"]], domain=new["race"])
    np.testing.assert_array_equal(run.predict_proba(new[["spo2", "age", "crp"]], domain=new["race"]), expected)
    with pytest.raises(UserError, match="no column 'crp', which the model needs"):
        run.predict(new[["spo2", "age"]], domain=new["race"])
    assert "3 clients, 2 domains, 2 classes" in repr(run)


METHODS_AND_FOLDS = ["--methods", "local, fedavg,feddar-sa", "--folds", 2, "--rounds", 2]
COMPARE = ["compare", "study.csv", *COLUMNS, *METHODS_AND_FOLDS, "--no-references"]
FILES = ("results.csv", "curves.csv", "table.md", "config.toml")


def same_files(folder, other, names=FILES):
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_compare_trains_shows_and_saves(table):
    shown = feddar(*COMPARE, "--references", "--jobs", 2, cwd=table)
    for word in (
        "8 of 8 done",
        "pooled-boosting, domain known",
        "AUC, mean of 2 folds; higher is better",
        "client avg",
        "Difference to fedavg",
    ):
        assert word in shown
    folder = table / "runs" / "study-compare"
    assert {*FILES, "runs"} <= names_in(folder)
    assert names_in(folder / "runs") == {"local", "fedavg", "feddar-sa"}
    assert names_in(folder / "runs" / "local") == {"seed-0-fold-0", "seed-0-fold-1"}
    assert load(folder / "runs" / "local" / "seed-0-fold-1").settings.method == "local"
    feddar("compare", "study.csv", "--config", folder / "config.toml", "--jobs", 1, "--out", "again", cwd=table)
    assert same_files(table / "again", folder)
    assert "feddar compare study.csv --config config.toml" in (folder / "table.md").read_text(encoding="utf-8")
    feddar(*COMPARE, "--jobs", 2, "--rounds", 1, cwd=table)
    assert names_in(table / "runs") == {"study-compare", "study-compare-2"}


def test_compare_with_one_split_and_seeds(table):
    feddar(*COMPARE, "--folds", 1, "--seeds", 2, "--seed", 3, "--test", 0.4, "--out", "mine", cwd=table)
    results = pd.read_csv(table / "mine" / "results.csv")
    assert results[["fold", "seed"]].drop_duplicates().to_numpy().tolist() == [[0, 3], [0, 4]]
    everyone = results[(results["scope"] == "all") & (results["metric"] == "auc")]
    assert everyone["count"].between(94, 98).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fedavg,fedag"], "unknown method 'fedag': did you mean 'fedavg'?"),
        (["--methods", "fedavg,fedavg"], "'fedavg' is named twice"),
        (["--methods", ""], "unknown method ''"),
        (["--reference", "feddar-wa"], "'feddar-wa' is not among the methods compared"),
        (["--folds", "0"], "folds should be greater than or equal to 1"),
        (["--seeds", "some"], "seeds should be a valid integer"),
        (["--jobs", "0"], "jobs"),
        (["--lr", "-1"], "lr should be greater than 0"),
        (["--test", "0.5"], "add --folds 1"),
        (["--resume"], "--resume --out FOLDER"),
        (["--resume", "--out", "nothing"], "there is no comparison in nothing"),
        (["--config", "none.toml"], "cannot read the configuration none.toml"),
        (["--method", "fedavg"], "No such option"),
        (["--encoder", "cnn"], "encoder 'cnn' takes images"),
        (["--out", "study.csv"], "cannot write to study.csv"),
    ],
)
def test_wrong_comparisons_leave_nothing_behind(table, arguments, message):
    assert message in feddar(*COMPARE, *arguments, cwd=table, code=2)
    assert names_in(table) == {"study.csv"}


def test_a_comparison_is_not_overwritten_and_resumes_as_it_was(table):
    feddar(*COMPARE, "--out", "mine", cwd=table)
    before = {path: path.read_bytes() for path in (table / "mine").rglob("*") if path.is_file()}
    assert "already holds results" in feddar(*COMPARE, "--out", "mine", cwd=table, code=2)
    again = ["compare", "study.csv", "--resume", "--out", "mine"]
    assert "was started with lr=0.003, not 0.1" in feddar(*again, "--lr", 0.1, cwd=table, code=2)
    assert "was started with folds=2, not 3" in feddar(*again, "--folds", 3, cwd=table, code=2)
    frame(seed=1).to_csv(table / "other.csv", index=False)
    other = ["compare", "other.csv", *again[2:]]
    assert "was started with data=study.csv, not other.csv" in feddar(*other, cwd=table, code=2)
    (table / "study.csv").write_bytes((table / "other.csv").read_bytes())
    assert "was started with other data" in feddar(*again, cwd=table, code=2)
    frame().to_csv(table / "study.csv", index=False)
    assert "local" in feddar(*again, cwd=table)
    assert {path: path.read_bytes() for path in (table / "mine").rglob("*") if path.is_file()} == before
    shown = feddar(*again, "--methods", "local,fedavg,feddar-sa,fedrep", cwd=table)
    assert "2 of 2 done: fedrep, fold" in shown
    assert pd.read_csv(table / "mine" / "results.csv")["method"].unique().tolist()[-1] == "fedrep"
    feddar("run", "study.csv", *COLUMNS, "--rounds", 1, "--out", "alone", cwd=table)
    assert "there is no comparison in alone" in feddar(*again[:-1], "alone", cwd=table, code=2)


def test_a_method_that_fails_ends_with_its_name_and_the_others_are_there(table):
    wild = ["--head-lr", "1e9", "--optimizer", "sgd", "--lr", "0.01", "--rounds", 4]
    wrong = feddar(*COMPARE, *wild, "--out", "mine", cwd=table, code=1)
    assert wrong.startswith("feddar: a training failed: feddar-sa, fold 0, seed 0: client 'h")
    assert "(2 of them; see mine/table.md)" in wrong
    results = pd.read_csv(table / "mine" / "results.csv")
    assert results["method"].unique().tolist() == ["local", "fedavg"]
    assert "## Missing" in (table / "mine" / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.more)])
def test_a_comparison_killed_and_resumed_gives_the_same_bytes(table, how):
    options = [*map(str, COMPARE), "--rounds", "6", "--methods", "fedavg,fedrep"]
    process = subprocess.Popen(
        [*FEDDAR, *options, "--jobs", "2", "--out", "cut"],
        cwd=table, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.time() + 120
    while not list((table / "cut").glob("runs/*/*/model.safetensors")) and time.time() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, how)
    said, _ = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 1, said
        assert said.endswith("feddar: stopped; go on with: feddar compare study.csv --resume --out cut\n"), said
    assert not (table / "cut" / "results.csv").exists(), "it was not stopped in time"
    feddar("compare", "study.csv", "--resume", "--out", "cut", "--jobs", 1, cwd=table)
    feddar(*options, "--out", "whole", "--jobs", 2, cwd=table)
    assert same_files(table / "cut", table / "whole")


def test_children_end_with_their_parent(table):
    process = subprocess.Popen(
        [*FEDDAR, *map(str, COMPARE), "--rounds", "1000", "--jobs", "2", "--out", "cut"],
        cwd=table, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("this system does not list children")
    deadline = time.time() + 120
    while len(found := children.read_text().split()) < 2 and time.time() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.time() + 10
    while (left := [child for child in found if Path(f"/proc/{child}").exists()]) and time.time() < deadline:
        time.sleep(0.05)
    for child in left:
        os.kill(int(child), signal.SIGKILL)
    assert len(found) == 2
    assert not left, "a child outlived its parent"


@pytest.mark.filterwarnings("default::feddar.errors.Notice")
def test_an_encoder_of_ones_own_and_its_weights_come_from_the_current_folder(table):
    (table / "shallow_nets.py").write_text(
        "from torch import nn\n\ndef shallow():\n    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())\n"
    )
    state = {"0.weight": torch.ones(4, 3), "0.bias": torch.zeros(4), "fc.weight": torch.zeros(2, 4)}
    torch.save(state, table / "start.pt")
    chosen = ["--encoder", "shallow_nets:shallow", "--weights", "start.pt", "--lr", 1e-9, "--out", "mine"]
    shown = feddar("run", "study.csv", *COLUMNS, "--rounds", 1, *chosen, cwd=table)
    assert "note: fc.weight in start.pt, a classifier's last layer, is not used.\n" in shown
    (table / "start.pt").unlink()
    with chdir(table):
        run = load("mine")
    torch.testing.assert_close(run.state.encoders["all"]["encoder.0.weight"], torch.ones(4, 3))
    assert 'weights = "start.pt"' in (table / "mine" / "config.toml").read_text()
    said = feddar("run", "study.csv", *COLUMNS, "--encoder", "shallow_nets:deep", cwd=table, code=2)
    assert "'shallow_nets' has no 'deep': there are: nn, shallow." in said
