"""Several methods compared fairly: the same splits, the same initial weights and the same seeds for all.

A comparison is a list of cells, each one training: a method on one fold with one seed. ``run_cells`` trains any such
list in parallel and takes it up again where it was stopped; ``compare`` makes the list for a cohort and writes what
comes out. Whatever the number of processes and the order in which cells finish, the results are the same to the digit,
since a cell depends on nothing but itself and results are read from the cells' folders in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from torch import Tensor, nn

from feddar import tuning
from feddar.cohort import Cohort
from feddar.errors import TrainingError, UserError
from feddar.evaluation import last_rounds
from feddar.model import build_model
from feddar.parallel import Message, Say, run_all
from feddar.run import CUSTOM_ENCODER, METRICS_FILE, MODEL_FILE, read_metrics, read_model
from feddar.settings import DataSettings, Settings, checked
from feddar.training import Progress, require_same_run, require_trainable, train

Parts = tuple[Cohort, Cohort]
Observe = Callable[[Cohort, Tensor], pd.DataFrame]

CURVE_COLUMNS = ["round", "scope", "name", "metric", "value"]


@dataclass(frozen=True, eq=False)
class Cell:
    """One training of a comparison."""

    labels: Mapping[str, str | int | float]
    """What tells it from the others; these become the first columns of the results."""
    options: Mapping[str, Any]
    """What ``train`` takes: method, encoder and the fields of ``Settings``, seed included."""
    data: Callable[[], Parts]
    """Makes the training and test part. Cells on the same parts should share one callable: then it is called once for
    all of them, in the parent process, and what it makes is shared."""
    folder: Path
    """The run folder of this cell: configuration, metrics of every round, checkpoint."""

    def __str__(self) -> str:
        return ", ".join(str(v) if isinstance(v, str) else f"{name} {v}" for name, v in self.labels.items())

    def settings(self, **changed: Any) -> Settings:
        """Return the checked settings; a cell trains with one job and one thread, as others run beside it."""
        options = {**self.options, **changed, "jobs": 1, "threads": 1}
        encoder = options.get("encoder")
        name = CUSTOM_ENCODER if isinstance(encoder, nn.Module) else encoder
        return checked(Settings, options | {"encoder": name})


@dataclass(frozen=True)
class Step:
    """What a progress display wants to know: which cell, and how far it is (0 to 1)."""

    cell: Cell
    state: Literal["running", "done", "failed"]
    share: float = 0.0
    doing: str = ""


@dataclass(frozen=True)
class Trained:
    """What the cells gave, each frame with the cells' labels as its first columns and in the order of the cells."""

    results: pd.DataFrame
    """labels, scope, name, metric, value, count: averages over the last rounds."""
    curves: pd.DataFrame
    """labels, round, scope, name, metric, value: the main metric of every round, by domain and summarised."""
    tuning: pd.DataFrame
    """labels, lr, knob, knob_value, score, chosen: empty without a search."""
    failures: tuple[tuple[Cell, str], ...]
    """Cells whose training failed, and why; they are missing in the frames."""


def run_cells(
    cells: Iterable[Cell],
    *,
    jobs: int = 1,
    resume: bool = False,
    tune: bool = False,
    observe: Observe | None = None,
    source: DataSettings | None = None,
    report: Callable[[Step], None] | None = None,
) -> Trained:
    """Train every cell, at most ``jobs`` at a time in processes of their own, and return what they gave.

    Everything that can be wrong with options and data is checked before the first cell is trained. With ``resume``,
    finished cells are kept and an unfinished one goes on from its last checkpoint; without it, a folder that holds a
    run is an error. ``tune`` searches the learning rate and the method's knob for each cell on an inner split of its
    training part (see ``feddar.tuning``). ``observe`` adds rows in the last rounds (see ``train``). A cell whose
    training diverges or whose process dies is a failure of that cell alone; a ``UserError`` stops everything.

    Example: ``cells = [Cell({"alpha": 0.1, "method": name, "seed": 0}, {"method": name, "seed": 0, "rounds": 20},
    parts, out / name) for name in ("fedavg", "feddar-sa")]`` with ``def parts(): return train_part, test_part``.
    """
    every = list(cells)
    pending = [cell for cells_of_data in _by_data(_unfinished(every, resume, tune)).values() for cell in cells_of_data]
    failed: dict[Cell, str] = {}
    report = report or (lambda _: None)

    def tasks() -> Iterator[Callable[[Say], None]]:
        for data, sharing in _by_data(pending).items():
            parts = data()
            for cell in sharing:
                yield partial(_train, cell, parts, tune, observe, source)

    def hear(number: int, message: Message) -> None:
        cell = pending[number]
        if "failed" in message:
            failed[cell] = message["failed"]
        report(Step(cell, **message["step"]))

    def lost(number: int) -> None:
        reason = "its process ended unexpectedly (out of memory?); resume with fewer jobs."
        hear(number, {"failed": reason, "step": {"state": "failed"}})

    run_all(tasks(), jobs, hear, lost)
    finished = [cell for cell in every if cell not in failed]
    return Trained(
        _labelled(finished, results_of),
        _labelled(finished, curves_of),
        _labelled(finished, lambda cell: tuning.table(cell.folder, cell.settings())) if tune else pd.DataFrame(),
        tuple((cell, failed[cell]) for cell in every if cell in failed),
    )


def results_of(cell: Cell) -> pd.DataFrame:
    """Return the averages over the last rounds of a trained cell."""
    return last_rounds(read_metrics(cell.folder / METRICS_FILE), cell.settings().last)


def curves_of(cell: Cell) -> pd.DataFrame:
    """Return the main metric of every round of a trained cell, by domain and summarised."""
    history = read_metrics(cell.folder / METRICS_FILE)
    test = history[history["split"] == "test"]
    shown = test["scope"].isin(["domain", "summary"]) & (test["metric"] == test["metric"].iloc[0])
    curves: pd.DataFrame = test[shown][CURVE_COLUMNS]
    return curves


def _labelled(cells: Sequence[Cell], frame_of: Callable[[Cell], pd.DataFrame]) -> pd.DataFrame:
    """Put the frames of the cells below each other, with the cells' labels as the first columns."""
    frames = []
    for cell in cells:
        frame = frame_of(cell)
        for place, (name, value) in enumerate(cell.labels.items()):
            frame.insert(place, name, value)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _by_data(cells: Iterable[Cell]) -> dict[Callable[[], Parts], list[Cell]]:
    groups: dict[Callable[[], Parts], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.data, []).append(cell)
    return groups


def _unfinished(cells: Sequence[Cell], resume: bool, tune: bool) -> list[Cell]:
    """Check all cells against their data and their folders; return those that are still to be trained."""
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
            if not _finished(cell, settings, fingerprint, resume, tune):
                found.append(cell)
    order = {cell: place for place, cell in enumerate(cells)}
    return sorted(found, key=lambda cell: order[cell])


def _finished(cell: Cell, settings: Settings, fingerprint: str, resume: bool, tune: bool) -> bool:
    """Tell whether the cell's folder holds its last round; what it holds must be of the same data and settings."""
    started = [cell.folder / name for name in (MODEL_FILE, tuning.TUNING_FILE) if (cell.folder / name).exists()]
    if started and not resume:
        raise UserError(f"{cell.folder} already holds a run: resume it, or choose another folder.")
    tuned = tuning.chosen(cell.folder, settings, fingerprint) if tune else {}
    if not (cell.folder / MODEL_FILE).exists():
        return False
    if tuned is None:
        raise UserError(f"the run in {cell.folder} was started without tune: resume it as it was.")
    settings = cell.settings(**tuned)
    about, _, _ = read_model(cell.folder)
    require_same_run(about, settings, fingerprint, cell.folder)
    return bool(about["round"] == settings.rounds)


def _train(
    cell: Cell, parts: Parts, tune: bool, observe: Observe | None, source: DataSettings | None, say: Say
) -> None:
    """Train one cell, in a process of its own or not; a training that fails is told, not raised."""
    part, test = parts
    candidates = tuning.Search(cell.settings(), lower=False).length if tune else 0

    def show(trained: int, doing: str, now: Progress) -> None:
        share = (trained + now.round / now.rounds) / (candidates + 1)
        text = f"{doing}round {now.round} of {now.rounds}"
        say({"step": {"state": "running", "share": share, "doing": text}})

    say({"step": {"state": "running"}})
    try:
        options = dict(cell.options) | {"jobs": 1, "threads": 1}
        if tune:
            options |= tuning.search(part, options, cell.settings(), cell.folder, show)
        progress = partial(show, candidates, "")
        begun = cell.folder.is_dir()
        place: dict[str, Any] = {"out": cell.folder, "resume": begun, "source": source}
        train(part, test=test, progress=progress, observe=observe, **place, **options)
    except TrainingError as error:
        say({"failed": str(error), "step": {"state": "failed"}})
    else:
        say({"step": {"state": "done", "share": 1.0}})
