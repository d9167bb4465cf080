"""The harness of benchmarks/, with small modules of its own; what the real ones measure is not tested here."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from benchmarks.__main__ import BEGIN, END, run, show
from benchmarks.figures import Figure, Paired, paired
from rich.console import Console

FIRST = """
from benchmarks.figures import Figure

def figures():
    yield Figure("quick | short", 1.0, "<= 1.05", "a note")
    yield Figure("slow", 3, ">= 20", "")
    yield Figure("size", 12345.6, "", "no target")
"""
SECOND = """
from benchmarks.figures import Figure

def figures():
    yield Figure("slow", 21.5, ">= 20", "again")
    yield Figure("last before the end", 2, "< 3", "")
    raise RuntimeError("broken")
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in {"tiny_first": FIRST, "tiny_second": SECOND}.items():
        (tmp_path / f"{name}.py").write_text(text)
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nText.\n"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def run_in(folder: Path, *names: str):
    return run(names, folder / "results.json", folder / "page.md")


def test_figures_are_written_down_and_the_table_is_refreshed(modules):
    found, failed = run_in(modules, "tiny_first")
    assert not failed
    assert found == json.loads((modules / "results.json").read_text())
    assert found[0] == {"name": "quick | short", "value": 1.0, "target": "<= 1.05", "met": True, "note": "a note"}
    assert [entry["met"] for entry in found] == [True, False, None]
    lines = (modules / "page.md").read_text().splitlines()
    assert lines[:3] == ["# Title", "", BEGIN]
    assert lines[-3:] == [END, "", "Text."]
    assert "| quick \\| short | 1 | <= 1.05 | yes | a note |" in lines
    assert "| slow | 3 | >= 20 | **no** |  |" in lines
    assert "| size | 12,346 |  |  | no target |" in lines


def test_a_failing_module_loses_nothing_and_the_figures_of_others_stay(modules, capfd):
    run_in(modules, "tiny_first")
    found, failed = run_in(modules, "tiny_second", "tiny_first", "tiny_absent")
    assert failed == ["tiny_second", "tiny_absent"]
    assert "broken" in capfd.readouterr().err
    assert [entry["name"] for entry in found[:2]] == ["slow", "last before the end"]
    kept = json.loads((modules / "results.json").read_text())
    assert [entry["name"] for entry in kept] == ["quick | short", "slow", "size", "last before the end"]
    run_in(modules, "tiny_second")
    kept = {entry["name"]: entry for entry in json.loads((modules / "results.json").read_text())}
    assert (kept["slow"]["value"], kept["slow"]["met"]) == (21.5, True)
    assert (modules / "page.md").read_text().count("| slow |") == 1


def test_what_is_not_met_is_said():
    output = StringIO()
    entries = [Figure("fast", 2, ">= 20", "[as] it is").entry(), Figure("small", 1, "<= 1", "").entry()]
    show(entries, ["tables"], Console(file=output, width=200))
    assert "NOT met: fast: 2, target >= 20" in output.getvalue()
    assert "FAILED: tables" in output.getvalue()
    assert "NOT met: small" not in output.getvalue()
    assert "[as] it is" in output.getvalue()


def test_pairs_are_measured_in_turn():
    calls = []
    found = paired(lambda: calls.append("a"), lambda: calls.append("b"), repeats=2, warm_up=1)
    assert "".join(calls) == "ababba"
    assert len(found.first) == len(found.second) == 2
    pairs = Paired((1.0, 2.0, 9.0), (1.0, 1.0, 3.0))
    assert pairs.ratio == 2.0
    assert pairs.note.startswith("1 to 3 in 3 repeats")
