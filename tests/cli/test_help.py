"""Help in panels, the nearest command or option to a wrong one, and what the shell completes."""

import re
import subprocess
import sys

import pytest

from feddar.cli import COMMANDS
from feddar.cli.help import FEW
from feddar.data.sources import BUILT_IN
from feddar.methods import METHODS
from feddar.models import encoders
from feddar.settings import ENCODERS, Settings
from helpers.command import feddar

NAMES = [command.__name__.replace("_", "-") for commands in COMMANDS.values() for command in commands]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def panels(shown):
    """Return the flags of each panel of a help text."""
    found = {}
    for line in shown.splitlines():
        if re.fullmatch(r"\w.*:", line):
            options = found.setdefault(line[:-1], [])
        elif flag := re.match(r"  (--[\w-]+)", line):
            options.append(flag[1])
    return found


def test_help_of_a_run_shows_ten_options_in_panels_and_says_how_many_more_there_are(tmp_path):
    shown = feddar("run", "--help", cwd=tmp_path)
    assert panels(shown) == {
        "Arguments": [],
        "Data": ["--client", "--domain", "--target"],
        "Method": ["--method", "--encoder"],
        "Training": ["--rounds", "--seed"],
        "Evaluation": ["--versus"],
        "Output": ["--out", "--resume"],
        "Options": ["--help-all", "--help"],
    }
    everything = panels(feddar("run", "--help-all", cwd=tmp_path))
    more = sum(map(len, everything.values())) - 12
    assert shown.splitlines()[-1] == f"{more} more options: feddar run --help-all"
    flags = {flag for panel in everything.values() for flag in panel}
    assert {f"--{name.replace('_', '-')}" for name in Settings.model_fields} <= flags
    assert "--damping" in everything["Method"]
    assert "--threshold" in everything["Evaluation"]


@pytest.mark.parametrize("command", NAMES)
def test_help_fits_into_80_columns_and_is_short(tmp_path, command):
    shown = feddar(command, "--help", cwd=tmp_path)
    assert max(map(len, shown.splitlines())) <= 80
    found = panels(shown)
    assert list(found)[-1] == "Options"
    assert sum(map(len, found.values())) <= FEW + 2
    left_out = "more options" in shown
    assert left_out == (command in ("init", "run", "compare", "cohort", "study"))
    assert ("--help-all" in shown) == left_out
    if left_out:
        whole = feddar(command, "--help-all", cwd=tmp_path)
        assert "more options" not in whole
        assert len(whole) > 2 * len(shown)


def test_wide_terminals_have_lines_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    widest = max(map(len, feddar("run", "--help-all", cwd=tmp_path).splitlines()))
    assert 80 < widest <= 100


def test_the_overview_has_every_command_in_its_group_in_one_whole_line(tmp_path):
    shown = feddar("--help", cwd=tmp_path)
    assert max(map(len, shown.splitlines())) <= 80
    assert [line[:-1].lower() for line in shown.splitlines() if re.fullmatch(r"\w.*:", line)] == [*COMMANDS, "options"]
    lines = dict(re.findall(r"^  ([a-z][a-z-]+)  +(.+)$", shown, flags=re.M))
    assert list(lines) == NAMES
    assert all(line.endswith(".") and not line.endswith("...") for line in lines.values())


def test_help_of_sites_takes_defaults_from_the_study(tmp_path):
    for command in ("server", "simulate"):
        shown = " ".join(feddar(command, "--help", cwd=tmp_path).split())
        assert "--sites INT How many sites to wait for before the first round. [default: as the study says]" in shown
    assert "before the first round. [default: 2]" in " ".join(feddar("study", "--help", cwd=tmp_path).split())


@pytest.mark.parametrize(("command", "start"), [("run", "Worker processes"), ("compare", "Trainings"), ("paper", "T")])
def test_the_default_of_jobs_is_that_of_the_command(tmp_path, command, start):
    everything = "--help" if command == "paper" else "--help-all"
    shown = " ".join(feddar(command, everything, cwd=tmp_path).split())
    assert re.search(rf"--jobs [A-Z ]+ {start}[^\[]+\[default: one for each core", shown)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rum"], "there is no command 'rum': did you mean 'run'?"),
        (["train"], "there is no command 'train': there are: run, cohort, "),
        (["run", "exam", "--round", "3"], "No such option: --round. Did you mean --rounds? (see: feddar run --help)"),
        (["run", "exam", "--head_epochs", "3"], "No such option: --head_epochs. Did you mean --head-epochs?"),
        (["cohort", "exam", "--rounds", "3"], "No such option: --rounds. (see: feddar cohort --help)"),
        (["--verison"], "No such option: --verison. Did you mean --version? (see: feddar --help)"),
    ],
)
def test_a_wrong_command_or_option_names_the_nearest(tmp_path, arguments, said):
    assert feddar(*arguments, cwd=tmp_path, code=2).startswith(f"feddar: {said}")


def completed(monkeypatch, cwd, *words):
    """Return what bash would offer for the last of these words."""
    monkeypatch.setenv("_FEDDAR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["feddar", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    return feddar(cwd=cwd).split()


def test_the_shell_completes_commands_options_and_names(tmp_path, monkeypatch):
    (tmp_path / "study.csv").touch()
    offered = {
        ("co",): ["cohort", "compare"],
        ("run", ""): [*BUILT_IN, "study.csv"],
        ("run", "s"): ["synthetic", "study.csv"],
        ("run", "st"): [],  # and so the shell completes files
        ("run", "exam", "--method", "ditt"): ["ditto"],
        ("run", "exam", "--method", ""): list(METHODS),
        ("compare", "exam", "--methods", "fedavg,ditt"): ["fedavg,ditto"],
        ("run", "exam", "--encoder", "d"): ["digit-cnn", "densenet121"],
        ("run", "exam", "--schedule", "c"): ["constant", "cosine"],
        ("run", "exam", "--curvature-"): ["--curvature-at"],
        ("run", "exam", "--help"): ["--help-all", "--help"],
    }
    for words, names in offered.items():
        assert completed(monkeypatch, tmp_path, *words) == names


def test_completion_is_shown_and_does_not_wait_for_torch(tmp_path, monkeypatch):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    assert "complete -o default -F _feddar_completion feddar" in feddar("--show-completion", cwd=tmp_path)
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
        "from feddar.cli import main; main()"
    )
    words = {"_FEDDAR_COMPLETE": "complete_bash", "COMP_WORDS": "feddar\nrun\nexam\n--encoder\nres", "COMP_CWORD": "4"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["resnet34", "False"]


def test_names_of_encoders_are_those_that_can_be_built():
    assert ENCODERS == encoders.ENCODERS
