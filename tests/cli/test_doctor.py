"""`feddar doctor`: what is installed, what is missing, and the extras of pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from feddar.extras import GIVES, Package, extras
from feddar.models.devices import devices_here
from helpers.command import feddar

ROOT = Path(__file__).parents[2]


def described(shown):
    """Return what doctor says beside each name, with the lines that go on below it."""
    return dict(re.findall(r"^  (\S+) +(.+(?:\n {4,}.+)*)", shown, flags=re.M))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let Python find these distributions first, each a version and what it requires."""

    def install(distributions):
        for name, (number, requirements) in distributions.items():
            lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {number}"]
            lines += [f"Requires-Dist: {each}" for each in requirements]
            lines += [
                f"Provides-Extra: {each}" for each in set(re.findall(r"extra == '(\w+)'", " ".join(requirements)))
            ]
            place = tmp_path / "site" / f"{name.replace('-', '_')}-{number}.dist-info"
            place.mkdir(parents=True)
            (place / "METADATA").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


def test_it_says_versions_the_machine_and_every_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDAR_DATA", str(tmp_path / "sets"))
    shown = feddar("doctor", cwd=tmp_path)
    said = described(shown)
    assert said["feddar"] == version("feddar")
    assert said["Python"].endswith(sys.executable)
    assert all(device in said["devices"] for device in devices_here())
    assert said["data"] == f"{tmp_path / 'sets'}, named by FEDDAR_DATA, where there is no such folder"
    assert {each: said[each] for each in ("numpy", "pandas", "torch")} == {
        each: version(each) for each in ("numpy", "pandas", "torch")
    }
    for extra in extras():
        assert said[extra.name].startswith(f"missing: {extra.gives}" if extra.lacking else f"present: {extra.gives}")
        assert (extra.install in shown) == bool(extra.lacking)


def test_without_a_data_folder_it_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDDAR_DATA", raising=False)
    monkeypatch.setattr("feddar.data.sources.data_folder._PROJECT", tmp_path / "project")
    assert described(feddar("doctor", cwd=tmp_path))["data"].startswith("none: name the folder")
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert "shared/data, found beside" in described(feddar("doctor", cwd=tmp_path))["data"]


def test_what_is_missing_is_said_with_what_it_gives_and_how_to_get_it(tmp_path, installed):
    needs = [
        "numpy>=1.26",
        "absent-package>=2",
        "old-package>=2.10",
        "onnx-of-the-future>=1; extra == 'onnx'",
        "numpy>=1.26; extra == 'plots'",
        "old-package==2.10.0; extra == 'flower'",
    ]
    installed({"feddar": ("9.1", needs), "old-package": ("2.9.0", [])})
    said = described(feddar("doctor", cwd=tmp_path))
    assert said["feddar"] == "9.1"
    assert said["numpy"] == version("numpy")
    assert said["absent-package"] == "missing, where >=2 is needed: pip install --upgrade feddar"
    assert said["old-package"] == "2.9.0, where >=2.10 is needed: pip install --upgrade feddar"
    assert said["plots"] == f"present: {GIVES['plots']}"
    first, second = said["onnx"].splitlines()
    assert first == f"missing: {GIVES['onnx']}"
    assert second.strip() == "pip install 'feddar[onnx]' (lacking: onnx-of-the-future)"
    assert said["flower"].endswith("pip install 'feddar[flower]' (lacking: old-package, 2.9.0 is not ==2.10.0)")


def test_an_extra_of_another_package_counts(installed):
    inner = ["numpy>=1", "engine==2.55.1 ; python_version >= '3.11' and extra == 'fast'", "other; extra == 'slow'"]
    installed({"feddar": ("9.1", ["outer[fast]==1.0; extra == 'simulation'"]), "outer": ("1.0", inner)})
    (simulation,) = extras()
    assert simulation.packages == (Package("outer", "==1.0", "1.0"), Package("engine", "==2.55.1", None))
    assert [each.name for each in simulation.lacking] == ["engine"]


@pytest.mark.parametrize(
    ("wanted", "found", "will_do"),
    [
        (">=1.26", "1.26", True),
        (">=1.26.0", "1.26", True),
        (">=1.26", "1.9.4", False),
        (">=13.7", "14.0", True),
        ("==2.13.0", "2.13+cpu", True),
        ("==1.41.0", "1.41.1", False),
        ("<3,>=2", "3.0", False),
        ("<3,>=2", "2.99", True),
        ("", "0", True),
        (">=1", None, False),
    ],
)
def test_versions_are_compared_as_numbers(wanted, found, will_do):
    assert Package("some", wanted, found).will_do == will_do


def test_every_extra_of_the_project_is_described_and_every_one_that_is_named_exists():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert set(GIVES) == declared
    texts = [path.read_text() for path in (*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    named = {
        name
        for text in texts
        for given in re.findall(r"(?:feddar|'\.)\[([a-z,]+)\]", text)
        for name in given.split(",")
    }
    assert len(named) > 5
    assert named <= declared


@pytest.mark.parametrize("broken", [False, True])
def test_it_imports_no_optional_package_and_works_where_torch_does_not(tmp_path, broken):
    code = f"""
import atexit, sys
sys.argv = ["feddar", "doctor"]
if {broken}:
    sys.modules["torch"] = None
atexit.register(lambda: print("imported", *sorted({{name.split(".")[0] for name in sys.modules}})))
from feddar.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    imported = set(done.stdout.splitlines()[-1].split())
    assert not imported & {"flwr", "jinja2", "matplotlib", "nvflare", "onnx", "pandas", "pyarrow", "scipy", "sklearn"}
    assert ("torch cannot be imported" in described(done.stdout)["devices"]) == broken
