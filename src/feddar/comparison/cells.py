"""Cells: many independent trainings, run in parallel, which can be resumed.

A cell is one training, for example of a method on one fold with one seed. Results do not depend on the number of
processes or the order in which cells finish, since cells are independent and results are read from their folders in
the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from torch import nn

from feddar.algorithm.rounds import RoundEnd
from feddar.comparison import tuning
from feddar.data.cohort import Cohort
from feddar.errors import TrainingError, UserError
from feddar.evaluation.metrics import COLUMNS
from feddar.evaluation.validation import results_in, validation_curve
from feddar.models.devices import CPU, find_device
from feddar.models.model import build_model
from feddar.results.csv_files import write_csv
from feddar.results.evaluators import Observe
from feddar.results.run import CUSTOM_ENCODER
from feddar.results.run_folder import (
    METRICS_FILE,
    MODEL_FILE,
    read_description,
    read_metrics,
    read_model,
    replacing,
    rounds_done,
)
from feddar.results.training import divide, fixed_threads, require_same_run, require_trainable, train
from feddar.settings import DataSettings, Settings, checked
from feddar.simulation.processes import Message, Send, run_all

Parts = tuple[Cohort, Cohort]

ALONE = {"jobs": 1, "threads": 1}
CURVE_COLUMNS = ["round", "scope", "name", "metric", "value"]


@dataclass(frozen=True, eq=False)
class Cell:
    """One training of a comparison."""

    labels: Mapping[str, str | int | float]
    """Identifies the cell; these become the first columns of the results."""
    options: Mapping[str, Any]
    """The options of ``train``: method, encoder and the fields of ``Settings``, with the seed."""
    data: Callable[[], Parts]
    """Returns the training and test part. Cells with the same parts should share one callable: then it is called once
    for all of them (once more for ``later`` ones), in the parent process, and the parts are shared in memory."""
    folder: Path
    """The run folder of this cell: configuration, metrics of every round, checkpoint."""
    later: bool = False
    """Whether it is trained after all cells that are not ``later``, whatever their data."""

    def __str__(self) -> str:
        return ", ".join(str(v) if isinstance(v, str) else f"{name} {v}" for name, v in self.labels.items())

    def settings(self, **changed: Any) -> Settings:
        """Return the checked settings."""
        return cell_settings({**self.options, **changed})


def cell_settings(options: Mapping[str, Any]) -> Settings:
    """Return checked settings; a cell trains with one job and one thread, as others run beside it."""
    encoder = options.get("encoder")
    name = CUSTOM_ENCODER if isinstance(encoder, nn.Module) else encoder
    return checked(Settings, {**options, **ALONE, "encoder": name})


@dataclass(frozen=True)
class CellProgress:
    """Progress of a cell for a display: its state, how far it is (0 to 1), and how many cells are trained in all."""

    cell: Cell
    cells: int
    state: Literal["running", "done", "failed"]
    share: float = 0.0
    doing: str = ""


@dataclass(frozen=True)
class Trained:
    """The results of all cells; each frame has the labels as its first columns and is in the order of the cells."""

    results: pd.DataFrame
    """Metrics of the round in use, or averages over the last ones: labels, scope, name, metric, value, count."""
    curves: pd.DataFrame
    """The metrics of every round, by domain and summarised, and the validation loss (scope ``validation``):
    labels, round, scope, name, metric, value."""
    tuning: pd.DataFrame
    """The candidates of tuning: labels, lr, knob, knob_value, score, chosen; empty without tuning."""
    failures: tuple[tuple[Cell, str], ...]
    """Cells whose training failed, and why; they are missing in the frames."""

    def write(self, folder: Path) -> None:
        """Write results.csv, curves.csv and, after tuning, tuning.csv."""
        frames = {"results": self.results, "curves": self.curves, "tuning": self.tuning}
        for name, frame in frames.items():
            if name != "tuning" or not frame.empty:
                with replacing(folder / f"{name}.csv") as temporary:
                    write_csv(frame, temporary)


def run_cells(
    cells: Iterable[Cell],
    *,
    jobs: int = 1,
    resume: bool = False,
    tune: bool = False,
    observe: Observe | None = None,
    source: DataSettings | None = None,
    report: Callable[[CellProgress], None] | None = None,
) -> Trained:
    """Train every cell, at most ``jobs`` at a time in processes of their own, and return their results.

    Options and data are checked before the first cell is trained. With ``resume``, finished cells are kept and an
    unfinished one continues from its last checkpoint; without it, a folder that already has a run is an error.
    ``tune`` searches the learning rate and the method's own hyper-parameter for each cell on an inner split of its
    training part (``comparison.tuning``). ``observe`` adds rows that results have (see ``train``). A cell whose
    training diverges or whose process dies is a failure of that cell alone; a ``UserError`` stops everything.

    Example: ``cells = [Cell({"alpha": 0.1, "method": name, "seed": 0}, {"method": name, "seed": 0, "rounds": 20},
    parts, out / name) for name in ("fedavg", "feddar-sa")]`` with ``def parts(): return train_part, test_part``.
    """
    require_jobs(jobs)
    every = list(cells)
    pending = unfinished(every, resume=resume, tune=tune)
    return train_cells(every, pending, jobs=jobs, tune=tune, observe=observe, source=source, report=report)


def train_cells(
    cells: Sequence[Cell],
    pending: Sequence[Cell],
    *,
    jobs: int,
    tune: bool,
    observe: Observe | None,
    source: DataSettings | None,
    report: Callable[[CellProgress], None] | None,
) -> Trained:
    """Train the pending cells, which ``unfinished`` has checked, and return the results of all cells."""
    in_turn = ([cell for cell in pending if cell.later == later] for later in (False, True))
    groups = [group for cells_now in in_turn for group in _by_data(cells_now).items()]
    ordered = [cell for _, sharing in groups for cell in sharing]
    notify = report or (lambda _: None)
    failed: dict[Cell, str] = {}

    def tasks() -> Iterator[Callable[[Send], None]]:
        for data, sharing in groups:
            parts = partial(_same, data())
            for cell in sharing:
                yield partial(_train, replace(cell, data=parts), tune, observe, source)

    def on_message(number: int, message: Message) -> None:
        cell = ordered[number]
        if "failed" in message:
            failed[cell] = message["failed"]
        notify(CellProgress(cell, len(ordered), **message["step"]))

    def on_lost(number: int) -> None:
        reason = "its process ended unexpectedly (out of memory?); resume with fewer jobs."
        on_message(number, {"failed": reason, "step": {"state": "failed"}})

    device = find_device(pending[0].settings().device) if pending else CPU
    run_all(tasks(), jobs, on_message, on_lost, device)
    finished = [cell for cell in cells if cell not in failed]
    labels = list(cells[0].labels) if cells else []
    return Trained(
        _labelled(finished, results_of, [*labels, *COLUMNS]),
        _labelled(finished, curves_of, [*labels, *CURVE_COLUMNS]),
        _labelled(finished if tune else [], tuning_of, [*labels, *tuning.COLUMNS]),
        tuple((cell, failed[cell]) for cell in cells if cell in failed),
    )


def read_finished(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return the results of those cells that are trained to the end, from their folders; no data are read.

    That a folder holds a run with other settings is an error; whether its data are the same is not checked.
    """
    finished = [cell for cell in cells if (cell.folder / MODEL_FILE).exists() and _at_its_end(cell, cell.settings())]
    labels = list(cells[0].labels) if cells else []
    return _labelled(finished, results_of, [*labels, *COLUMNS])


def results_of(cell: Cell) -> pd.DataFrame:
    """Return the metrics of the round in use of a trained cell, or their averages over the last rounds."""
    return results_in(_history(cell), cell.settings())


def _history(cell: Cell) -> pd.DataFrame:
    """Return the metrics of all rounds of a trained cell; a file without some of the rounds is an error."""
    history, rounds = read_metrics(cell.folder / METRICS_FILE), rounds_done(read_description(cell.folder))
    if history["round"].nunique() != rounds:
        raise UserError(
            f"{cell.folder / METRICS_FILE} does not hold all {rounds} rounds: delete {cell.folder} and resume."
        )
    return history


def curves_of(cell: Cell) -> pd.DataFrame:
    """Return the metrics of every round of a trained cell, by domain and summarised, and its validation losses."""
    history = _history(cell)
    test = history[history["split"] == "test"]
    # What has no mean over clients (gaps, rates, calibration) is computed only in rounds that results may come from;
    # metrics of single outcomes are many.
    averaged = test[test["name"].eq("client_avg") & ~test["metric"].str.contains(":")]["metric"]
    shown = test["scope"].isin(["domain", "summary"]) & (test["name"] != "domain_gap")
    curves = test[shown & test["metric"].isin(averaged)]
    every: pd.DataFrame = pd.concat([curves, validation_curve(history)], ignore_index=True)[CURVE_COLUMNS]
    return every


def tuning_of(cell: Cell) -> pd.DataFrame:
    """Return the scores of a tuned cell's search."""
    return tuning.table(cell.folder, cell.settings())


def _labelled(cells: Sequence[Cell], frame_of: Callable[[Cell], pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Put the frames of the cells below each other, with the cells' labels as the first columns."""
    frames = []
    for cell in cells:
        frame = frame_of(cell)
        for place, (name, value) in enumerate(cell.labels.items()):
            frame.insert(place, name, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(columns))


def _by_data(cells: Iterable[Cell]) -> dict[Callable[[], Parts], list[Cell]]:
    groups: dict[Callable[[], Parts], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.data, []).append(cell)
    return groups


def unfinished(cells: Sequence[Cell], *, resume: bool, tune: bool) -> list[Cell]:
    """Check all cells, their data and their folders; return those that are still to be trained."""
    require_distinct(cells)
    found = []
    tried: list[dict[str, Any]] = []
    for data, sharing in _by_data(cells).items():
        part, test = data()
        require_trainable(part)
        test.aligned_to(part)
        fingerprint = part.fingerprint()
        for cell in sharing:
            settings = cell.settings()
            alike = settings.model_dump(exclude={"seed"})
            if alike not in tried:
                tried.append(alike)
                build_model(part, cell.options.get("encoder"), settings)
            if tune:
                tuning.inner_split(part, settings.seed)
            if not _finished(cell, part, fingerprint, resume, tune):
                found.append(cell)
    return found


def require_jobs(jobs: int) -> None:
    """Refuse a number of processes below 1."""
    if jobs < 1:
        raise UserError(f"jobs must be 1 or more, and is {jobs}.")


def require_distinct(cells: Sequence[Cell]) -> None:
    """Refuse two cells in one folder."""
    folders = [cell.folder for cell in cells]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise UserError(f"two trainings would share the folder {twice}: give each its own.")


def _finished(cell: Cell, part: Cohort, fingerprint: str, resume: bool, tune: bool) -> bool:
    """Return whether the cell's training is over; a run with other data or settings in its folder is an error."""
    started = [cell.folder / name for name in (MODEL_FILE, tuning.TUNING_FILE) if (cell.folder / name).exists()]
    if started and not resume:
        raise UserError(f"{cell.folder} already holds a run: resume it, or choose another folder.")
    tuned = tuning.chosen(cell.folder, cell.settings(), fingerprint) if tune else {}
    if not (cell.folder / MODEL_FILE).exists():
        return False
    if tuned is None:
        raise UserError(f"the run in {cell.folder} was started without tune: resume it as it was.")
    settings, _, _ = divide(part, cell.settings(**tuned))
    return _at_its_end(cell, settings, fingerprint)


def _at_its_end(cell: Cell, settings: Settings, fingerprint: str | None = None) -> bool:
    """Return whether the run in the cell's folder is over; without a fingerprint any data will do."""
    stored = read_model(cell.folder)
    if fingerprint is None:  # without data, what depends on them is taken as it was
        fingerprint, settings = stored.about["fingerprint"], settings.completed(stored.about["settings"])
    require_same_run(stored.about, settings, fingerprint, cell.folder)
    return stored.standing.position.is_over(settings)


def _same(parts: Parts) -> Parts:
    return parts


def _train(cell: Cell, tune: bool, observe: Observe | None, source: DataSettings | None, send: Send) -> None:
    """Train one cell, here or in a child process; a ``TrainingError`` is reported as a message, not raised."""
    part, test = cell.data()
    candidates = tuning.Search(cell.settings(), lower=False).length if tune else 0

    def show(trained: int, doing: str, now: RoundEnd) -> None:
        share = (trained + now.round / now.rounds) / (candidates + 1)
        text = f"{doing}round {now.round} of {now.rounds}"
        send({"step": {"state": "running", "share": share, "doing": text}})

    send({"step": {"state": "running"}})
    try:
        # Before the first operation: a forked child would wait forever for threads that only its parent has.
        with fixed_threads(1):
            options = {**cell.options, **ALONE}
            if tune:
                options |= tuning.search(part, options, cell.settings(), cell.folder, show)
            progress = partial(show, candidates, "")
            place: dict[str, Any] = {"out": cell.folder, "resume": cell.folder.is_dir(), "source": source}
            train(part, test=test, progress=progress, observe=observe, **place, **options)
    except TrainingError as error:
        send({"failed": str(error), "step": {"state": "failed"}})
    else:
        send({"step": {"state": "done", "share": 1.0}})
