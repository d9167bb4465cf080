"""References of a comparison: models that see all rows in one place, which is what a federation gives up.

They are scikit-learn's, with fixed settings, on the same splits as the methods: the shares of classes alone, a linear
model, and gradient boosting; the last two also with the domain, and with domain, client and their crossing, as further
columns. They say what the table itself holds, and are never ranked among the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from feddar.comparison.cells import Cell, CellProgress, Parts
from feddar.data.cohort import Cohort
from feddar.evaluation.calibration import calibration_errors
from feddar.evaluation.intervals import RESULTS_COLUMNS, UNIT
from feddar.evaluation.metrics import COLUMNS, evaluate
from feddar.results.csv_files import write_csv
from feddar.results.run_folder import read_metrics, replacing
from feddar.results.training import fixed_threads
from feddar.simulation.processes import Message, Send, run_all

MAJORITY = "majority"
LINEAR, BOOSTING = "pooled-logistic", "pooled-boosting"
KNOWN = {"": (), ", domain known": ("domain",), ", domain and client known": ("domain", "client", "both")}
"""What else a pooled model sees of a sample, by the end of its name."""
NAMES = (MAJORITY, *(f"{model}{ending}" for model in (LINEAR, BOOSTING) for ending in KNOWN))
REFERENCES = "references"
"""What the cell is called in which all references of a fold and seed are fitted."""
RIDGE = 0.1
"""The inverse strength of the linear model's penalty (scikit-learn's C)."""
MOST_LEVELS = 254
"""Boosting takes so many levels of a category; the rarest of more become one."""
LEAST = 1e-6
"""Probabilities are kept so far from 0 and 1."""


def reference_cells(data: Mapping[tuple[int, int], Callable[[], Parts]], folder: Path) -> list[Cell]:
    """Return a cell for each (fold, seed), in which all references are fitted; it has no options, and one file."""
    return [
        Cell({"method": REFERENCES, "fold": fold, "seed": seed}, {}, parts, folder / f"seed-{seed}-fold-{fold}.csv")
        for (fold, seed), parts in data.items()
    ]


def cell_methods(methods: pd.Series[str]) -> pd.Series[str]:
    """Return what the cells are called that methods in results are of: references do not have a cell each."""
    return methods.mask(methods.isin(NAMES), REFERENCES)


def fit_references(cells: Sequence[Cell], jobs: int, report: Callable[[CellProgress], None]) -> pd.DataFrame:
    """Fit the references of every cell that has no file yet; return the results of all, as in results.csv."""
    pending = unfitted(cells)

    def on_message(number: int, message: Message) -> None:
        report(CellProgress(pending[number], len(pending), **message))

    tasks = (partial(_fit_all, cell.folder, cell.data()) for cell in pending)  # parts are made here
    run_all(tasks, jobs, on_message, lambda number: on_message(number, {"state": "failed"}))
    # A file is missing if its process was killed, for want of memory.
    found = [_results_of(cell) for cell in cells if cell.folder.exists()]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=RESULTS_COLUMNS)


def unfitted(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells that have no file yet."""
    return [cell for cell in cells if not cell.folder.exists()]


def _results_of(cell: Cell) -> pd.DataFrame:
    fold_and_seed = {name: cell.labels[name] for name in UNIT}
    return read_metrics(cell.folder, ["method", *COLUMNS]).assign(**fold_and_seed)[RESULTS_COLUMNS]


def _fit_all(file: Path, parts: Parts, send: Send) -> None:
    """Fit every reference to one training part, and write their test metrics to a file."""
    from threadpoolctl import threadpool_limits

    send({"state": "running"})
    # Before the first operation: a forked child would wait forever for threads that only its parent has.
    with fixed_threads(1), threadpool_limits(1):
        frames = [_measured(parts[1], scores).assign(method=name) for name, scores in reference_scores(*parts)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        write_csv(pd.concat(frames, ignore_index=True)[["method", *COLUMNS]], temporary)
    send({"state": "done", "share": 1.0})


def _measured(test: Cohort, scores: torch.Tensor) -> pd.DataFrame:
    """Return the metrics that methods have in a comparison, but for those of cells and gaps."""
    measured = evaluate(test, scores).itertuples(index=False, name=None)
    return pd.DataFrame([*measured, *calibration_errors(test, scores)], columns=COLUMNS)


def reference_scores(train: Cohort, test: Cohort) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each reference's name and its scores of the test samples; images have only the first."""
    test = test.aligned_to(train)
    yield MAJORITY, _scores(train, _fitted(train.y.numpy(), partial(_constant, len(test))))
    if any(part.ndim != 2 for part in train.x):
        return
    for model, make in ((LINEAR, _linear), (BOOSTING, _boosting)):
        for ending, known in KNOWN.items():
            columns = _table(train, known), _table(test, known)
            yield f"{model}{ending}", _scores(train, _fitted(train.y.numpy(), partial(make, *columns)))


def _scores(train: Cohort, predicted: NDArray[np.floating]) -> torch.Tensor:
    return train.objective.scores_of(torch.from_numpy(predicted))


Fit = Callable[[NDArray[Any]], NDArray[np.floating]]
"""Fits one column of labels, and returns probabilities of its values in order, or the numbers predicted."""


def _fitted(y: NDArray[Any], fit: Fit) -> NDArray[np.floating]:
    """Return predictions in the shape of ``Objective.predictions``; several outcomes are fitted one by one."""
    if y.dtype.kind == "f":
        return fit(y).astype(np.float64)
    if y.ndim == 2:
        return np.stack([_shares(column, fit)[:, 1] for column in y.T], axis=1)
    return _shares(y, fit)


def _shares(y: NDArray[Any], fit: Fit) -> NDArray[np.floating]:
    """Return the probability of each class 0, 1, ...; one that training does not have gets next to nothing."""
    classes = np.unique(y)
    found = fit(y) if len(classes) > 1 else np.ones((len(fit(y)), 1))
    every = np.full((len(found), max(2, int(y.max()) + 1)), LEAST)
    every[:, classes] = np.clip(found, LEAST, 1 - LEAST)
    shares: NDArray[np.floating] = every / every.sum(1, keepdims=True)
    return shares


def _constant(rows: int, y: NDArray[Any]) -> NDArray[np.floating]:
    if y.dtype.kind == "f":
        return np.full(rows, y.mean())
    return np.tile(np.unique(y, return_counts=True)[1] / len(y), (rows, 1))


def _table(cohort: Cohort, known: Iterable[str]) -> pd.DataFrame:
    """Return numbers (NaN where missing) and categories of samples, with what else is known of them as categories."""
    numbers = np.zeros((len(cohort), 0)) if cohort.numbers is None else cohort.numbers.numpy()
    table = pd.DataFrame(numbers, columns=[f"number {place}" for place in range(numbers.shape[1])])
    codes = {} if cohort.codes is None else {f"level {place}": code for place, code in enumerate(cohort.codes.T)}
    roles = {"domain": cohort.domain, "client": cohort.client}
    roles["both"] = cohort.client * len(cohort.domains) + cohort.domain
    for name, values in {**codes, **{name: roles[name] + 1 for name in known}}.items():
        table[name] = pd.Series(values.numpy()).replace(0, pd.NA).astype("category")
    return table


def _linear(train: pd.DataFrame, test: pd.DataFrame, y: NDArray[Any]) -> NDArray[np.floating]:
    """Fit a penalised linear model on standardised numbers, flags of missing ones, and a column for each level."""
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = make_pipeline(SimpleImputer(add_indicator=True, keep_empty_features=True), StandardScaler())
    columns = make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_include="category")),
    )
    if y.dtype.kind == "f":
        predicted: NDArray[np.floating] = make_pipeline(columns, Ridge(1 / RIDGE)).fit(train, y).predict(test)
        return predicted
    shares: NDArray[np.floating] = (
        make_pipeline(columns, LogisticRegression(C=RIDGE, max_iter=2000)).fit(train, y).predict_proba(test)
    )
    return shares


def _boosting(train: pd.DataFrame, test: pd.DataFrame, y: NDArray[Any]) -> NDArray[np.floating]:
    """Fit gradient boosting with scikit-learn's settings, which takes missing numbers and categories as they are."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    how: dict[str, Any] = {"categorical_features": "from_dtype", "random_state": 0}
    seen, new = _frequent(train, train), _frequent(test, train)
    if y.dtype.kind == "f":
        predicted: NDArray[np.floating] = HistGradientBoostingRegressor(**how).fit(seen, y).predict(new)
        return predicted
    shares: NDArray[np.floating] = HistGradientBoostingClassifier(**how).fit(seen, y).predict_proba(new)
    return shares


def _frequent(table: pd.DataFrame, train: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose categories have the most frequent levels of the training part; the others are one level."""
    found = table.copy()
    for name in train.select_dtypes("category"):
        levels = train[name].value_counts().index[:MOST_LEVELS]
        rare = table[name].notna() & ~table[name].isin(levels)
        numbered = table[name].astype(float).mask(rare, -1)
        found[name] = pd.Categorical(numbered, categories=[-1, *sorted(map(float, levels))])
    return found
