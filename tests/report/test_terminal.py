"""What the terminal shows of a comparison fits it."""

import io

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from feddar.comparison.comparison import ComparisonResults
from feddar.data.cohort import Cohort
from feddar.evaluation.intervals import RESULTS_COLUMNS
from feddar.methods import METHODS
from feddar.report.folders import CURVES_COLUMNS
from feddar.report.terminal import show_comparison, warnings
from feddar.settings import Plan, Settings

EXAM = ["White", "Black", "Asian", "Latino", "Other"]


def comparison(domains, monkeypatch, methods=15):
    names = [f"method-of-length-{i:02}"[-18:] for i in range(methods - 1)]
    for name in names:
        monkeypatch.setitem(METHODS, name, METHODS["fedavg"])
    rng = np.random.default_rng(0)
    places = [("domain", name) for name in domains]
    places += [("summary", name) for name in ("domain_min", "domain_avg", "domain_max", "client_avg")]
    rows = [
        (method, fold, 0, scope, name, "auc", rng.random(), 10)
        for method in ("fedavg", *names)
        for fold in range(3)
        for scope, name in places
    ]
    results = pd.DataFrame(rows, columns=RESULTS_COLUMNS)
    plan = Plan(methods=("fedavg", *names), folds=3)
    empty = pd.DataFrame(columns=CURVES_COLUMNS)
    return ComparisonResults(results, empty, empty, (), plan=plan, settings=Settings(), source=None, references=empty)


@pytest.mark.parametrize(
    ("domains", "shown"), [(EXAM, True), (EXAM * 2, False), (["a long name of a group"] * 3, False)]
)
def test_a_comparison_fits_80_columns(domains, shown, monkeypatch, tmp_path):
    names = [name + "'" * domains[:i].count(name) for i, name in enumerate(domains)]
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    found = comparison(names, monkeypatch)
    show_comparison(console, found, tmp_path)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for method in found.plan.methods[1:]:
        assert sum(method in line for line in lines) == 2, "one line in each table"
    header = next(line for line in lines if "client avg" in line)
    assert (names[0] in header) is shown
    assert ("table.md has a column for each domain" in file.getvalue()) is not shown
    mean = found.results.query("method == 'fedavg' and name == 'domain_avg'")["value"].mean()
    assert f"{mean:.3f}"[1:] in next(line for line in lines if line.split()[:1] == ["fedavg"])


@pytest.mark.parametrize("clients", [3, 30])
def test_a_few_notes_are_shown_each_and_many_of_a_kind_as_one(clients):
    n = 10 * clients
    label = np.arange(n) % 2 * (np.arange(n) >= 10)  # the first client has one class only
    cohort = Cohort.from_arrays(
        np.arange(n), label, domain=np.arange(n) // 2 % 2, client=np.repeat(np.arange(clients), 10)
    )
    few = [note for note in warnings(cohort) if note.startswith("client") and "noisy" in note]
    if clients == 3:
        assert few == [f"client '{i}' has 10 samples only: its figures will be noisy." for i in range(3)]
    else:
        assert few == ["clients with fewer than 20 samples, whose figures will be noisy: 30 of 30."]
    assert "client '0' has one class only (0): its AUC is undefined." in warnings(cohort)
