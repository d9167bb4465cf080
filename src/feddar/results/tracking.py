"""Experiment trackers: callbacks that log each round, and are closed at the end.

To add one, write a class with the methods of ``Tracker`` or, where runs have a store of their own, of ``StoredRun``,
and add a line to ``TRACKERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from feddar.algorithm.rounds import Callback, RoundEnd, mean_loss
from feddar.errors import UserError, one_line
from feddar.lazy import pandas as pd
from feddar.results.mlflow_runs import MLflowRun, import_mlflow
from feddar.results.stored_runs import Figure, StoredRun, noting
from feddar.results.wandb_runs import WandbRun, import_wandb
from feddar.settings import Settings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SCOPES = ("all", "domain", "summary")
"""The scopes that are tracked; metrics of clients, of which there may be thousands, are in metrics.csv only."""


class Tracker(Protocol):
    """A callback that must be closed."""

    def __call__(self, end: RoundEnd) -> None:
        """Log a round."""

    def close(self, finished: bool) -> None:
        """Write what is not yet written, and close the files; training may not be finished, but stopped or failed."""


class Kind(NamedTuple):
    """A kind of tracker."""

    load: Callable[[], Any]
    """Imports its package, which the extra of its name brings along."""
    begin: Callable[[Path, Settings], Tracker]
    """Returns the tracker of a run in that folder."""
    store: type[StoredRun] | None = None
    """The class of its runs, if it keeps files and results, too."""


def require_tracker(settings: Settings, folder: Path | None) -> None:
    """Refuse a tracker whose package is not here, or that has no folder of a run to track."""
    if settings.track is None:
        return
    if folder is None:
        raise UserError(f"track {settings.track} needs a folder to write to: give --out (out=... in Python).")
    try:
        TRACKERS[settings.track].load()
    except ImportError:
        raise UserError(
            f"track {settings.track} needs one more package: pip install 'feddar[{settings.track}]'."
        ) from None


@contextmanager
def tracking(settings: Settings, folder: Path | None) -> Iterator[list[Callback]]:
    """Yield the callbacks of the tracker in the settings, if any, which ``require_tracker`` has allowed."""
    if settings.track is None or folder is None:
        yield []
        return
    tracker = TRACKERS[settings.track].begin(folder, settings)
    finished = False
    try:
        yield [tracker]
        finished = True
    finally:
        tracker.close(finished)


def _figures(end: RoundEnd) -> Iterator[Figure]:
    """Yield what is tracked of a round."""
    yield "loss", "train", "", end.loss
    if end.validation is not None:
        yield "loss", "validation", "", mean_loss(end.validation)
    if end.test is not None:
        yield from _shown(end.test)


def _shown(metrics: pd.DataFrame) -> Iterator[Figure]:
    """Yield those of the metrics that are tracked."""
    shown = metrics[metrics["scope"].isin(SCOPES)]
    yield from zip(*(shown[c] for c in ("metric", "scope", "name", "value")), strict=True)


def _summary_writer() -> type[SummaryWriter]:
    kind: type[SummaryWriter] = import_module("torch.utils.tensorboard").SummaryWriter
    return kind


class TensorBoard:
    """Writes event files to ``tensorboard`` in the run's folder: the loss, and metrics as METRIC/SCOPE/NAME.

    Look at them with ``tensorboard --logdir FOLDER``; a comparison's folder shows all of its runs.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder / "tensorboard", settings
        self.writer: SummaryWriter | None = None

    def __call__(self, end: RoundEnd) -> None:
        """Log the loss and each metric; after a resume, rounds logged after the last checkpoint are purged."""
        if self.writer is None:
            self.writer = _summary_writer()(str(self.folder), purge_step=end.round)
            self.writer.add_text("settings", _listed(self.settings), end.round)
        for metric, scope, name, value in _figures(end):
            self.writer.add_scalar("/".join(part for part in (metric, scope, name) if part), value, end.round)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()


def _listed(settings: Settings) -> str:
    """Return settings as a Markdown table."""
    rows = [f"| {name} | {value} |" for name, value in settings.model_dump(exclude_none=True).items()]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])


class StoreTracker:
    """Logs to a store of runs: configuration, the loss, and metrics as METRIC/SCOPE/NAME, with rounds as steps.

    A resumed run goes on in the same run of the store, if that is still there. Where the store fails in the middle,
    training goes on without it.
    """

    def __init__(self, kind: type[StoredRun], folder: Path, _: Settings) -> None:
        try:
            self.run = kind.opened(folder)
            self.logged = self.run.last_round()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{kind.store} begins no run ({one_line(error)}): see {kind.place}, or leave out --track."
            ) from None
        self.well = True

    def __call__(self, end: RoundEnd) -> None:
        """Log the loss and each metric of a round, once."""
        if self.well and end.round > self.logged:
            with noting(self.run.store, f"round {end.round} and later ones are not tracked") as outcome:
                self.run.log(_figures(end), end.round)
            self.well = outcome.well

    def close(self, finished: bool) -> None:
        """Say how the run has ended."""
        with noting(self.run.store, "the end of the run is not tracked"):
            self.run.end(finished)


def keeps_files(settings: Settings) -> bool:
    """Return whether there is a tracker that keeps files."""
    return _store(settings) is not None


def log_results(settings: Settings, folder: Path, results: pd.DataFrame, number: int, files: Iterable[str]) -> None:
    """Give the tracker the results of a run, as metrics ``result/...``, and those of its files that are there."""
    with _again(settings, folder, "results and files are not tracked") as run:
        if run is not None:
            run.log_results(_shown(results), number)
            run.log_files(folder / file for file in files)


def log_files(settings: Settings, folder: Path, files: Iterable[Path]) -> None:
    """Give the tracker of the run in a folder files about it."""
    with _again(settings, folder, "files are not tracked") as run:
        if run is not None:
            run.log_files(files)


def log_comparison(
    settings: Settings, folder: Path, files: Iterable[str], cells: Mapping[Path, Mapping[str, Any]]
) -> None:
    """Give the tracker a comparison: a run with its files, above the runs in the cells' folders, with their labels."""
    kind = _store(settings)
    if kind is not None:
        with noting(kind.store, "the comparison is not tracked"):
            above = kind.opened(folder)
            above.log_files(folder / file for file in files)
            above.end(True)
            for place, labels in cells.items():
                above.adopt(place, labels)


def _store(settings: Settings) -> type[StoredRun] | None:
    return None if settings.track is None else TRACKERS[settings.track].store


@contextmanager
def _again(settings: Settings, folder: Path, lost: str) -> Iterator[StoredRun | None]:
    """Yield the run of a folder that has ended well, which ends again; None if no tracker has it."""
    kind = _store(settings)
    if kind is None:
        yield None
        return
    with noting(kind.store, lost):
        run = kind.found(folder)
        yield run
        if run is not None:
            run.end(True)


TRACKERS: Mapping[str, Kind] = {
    "tensorboard": Kind(_summary_writer, TensorBoard),
    "mlflow": Kind(import_mlflow, partial(StoreTracker, MLflowRun), MLflowRun),
    "wandb": Kind(import_wandb, partial(StoreTracker, WandbRun), WandbRun),
}
