"""Several methods compared fairly: the same splits, the same initial weights and the same seeds for all.

A comparison is a list of cells, each one training: a method on one fold with one seed. ``run_cells`` trains any such
list in parallel and takes it up again where it was stopped; ``compare`` makes the list for a cohort and writes what
comes out. Whatever the number of processes and the order in which cells finish, the results are the same to the digit,
since a cell depends on nothing but itself and results are read from the cells' folders in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pandas as pd
from torch import Tensor, nn

from feddar.comparison import tuning
from feddar.data.cohort import Cohort
from feddar.data.sources import read_options
from feddar.errors import TrainingError, UserError
from feddar.evaluation import fairness
from feddar.evaluation.metrics import COLUMNS, last_rounds
from feddar.models.model import build_model
from feddar.results.run import (
    CONFIG_FILE,
    CUSTOM_ENCODER,
    METRICS_FILE,
    MODEL_FILE,
    read_metrics,
    read_model,
    replacing,
    writing,
)
from feddar.results.training import Progress, fixed_threads, require_same_run, require_trainable, train
from feddar.settings import DataSettings, Plan, Settings, checked, read_config, write_config
from feddar.simulation.processes import Message, Say, run_all

Parts = tuple[Cohort, Cohort]
Observe = Callable[[Cohort, Tensor], pd.DataFrame]

ALONE = {"jobs": 1, "threads": 1}
TABLE_FILE, PAGE_FILE = "table.md", "report.html"
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
        """Return the checked settings."""
        return cell_settings({**self.options, **changed})


def cell_settings(options: Mapping[str, Any]) -> Settings:
    """Return checked settings; a cell trains with one job and one thread, as others run beside it."""
    encoder = options.get("encoder")
    name = CUSTOM_ENCODER if isinstance(encoder, nn.Module) else encoder
    return checked(Settings, {**options, **ALONE, "encoder": name})


@dataclass(frozen=True)
class Step:
    """What a progress display wants to know: which cell, how far it is (0 to 1), and how many are to be trained."""

    cell: Cell
    cells: int
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

    def write(self, folder: Path) -> None:
        """Write results.csv, curves.csv and, after a search, tuning.csv, each whole."""
        frames = {"results": self.results, "curves": self.curves, "tuning": self.tuning}
        for name, frame in frames.items():
            if name != "tuning" or not frame.empty:
                with replacing(folder / f"{name}.csv") as temporary:
                    frame.to_csv(temporary, index=False)


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
    training part (``comparison.tuning``). ``observe`` adds rows in the last rounds (see ``train``). A cell whose
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
    report: Callable[[Step], None] | None,
) -> Trained:
    """Train the pending cells, which ``unfinished`` has checked, and return what all cells gave."""
    ordered = [cell for sharing in _by_data(pending).values() for cell in sharing]
    tell = report or (lambda _: None)
    failed: dict[Cell, str] = {}

    def tasks() -> Iterator[Callable[[Say], None]]:
        for data, sharing in _by_data(pending).items():
            parts = data()
            for cell in sharing:
                yield partial(_train, cell, parts, tune, observe, source)

    def hear(number: int, message: Message) -> None:
        cell = ordered[number]
        if "failed" in message:
            failed[cell] = message["failed"]
        tell(Step(cell, len(ordered), **message["step"]))

    def lost(number: int) -> None:
        reason = "its process ended unexpectedly (out of memory?); resume with fewer jobs."
        hear(number, {"failed": reason, "step": {"state": "failed"}})

    run_all(tasks(), jobs, hear, lost)
    finished = [cell for cell in cells if cell not in failed]
    labels = list(cells[0].labels) if cells else []
    return Trained(
        _labelled(finished, results_of, [*labels, *COLUMNS]),
        _labelled(finished, curves_of, [*labels, *CURVE_COLUMNS]),
        _labelled(finished if tune else [], tuning_of, [*labels, *tuning.COLUMNS]),
        tuple((cell, failed[cell]) for cell in cells if cell in failed),
    )


@dataclass(frozen=True)
class Comparison(Trained):
    """Several methods, trained and tested on the same samples: what ``compare`` returns."""

    plan: Plan
    settings: Settings
    """How all of them were trained, apart from the method."""
    source: DataSettings | None

    def write(self, folder: Path) -> None:
        """Write the frames, table.md and the page, report.html."""
        from feddar.report.page import write_page

        super().write(folder)
        with replacing(folder / TABLE_FILE) as temporary:
            temporary.write_text(self.table(), encoding="utf-8")
        if len(self.results):
            write_page([folder], folder / PAGE_FILE)

    def table(self) -> str:
        """Return the comparison as Markdown, in the paper's layout; every number is one of ``results``."""
        from feddar.report.markdown import comparison_table

        return comparison_table(self)


def compare(
    cohort: Cohort | Callable[[int], Cohort],
    methods: str | Sequence[str] = "paper",
    encoder: nn.Module | str | None = None,
    *,
    folds: int | None = 5,
    test: float = 0.2,
    seeds: int = 1,
    reference: str | None = None,
    tune: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    source: DataSettings | None = None,
    report: Callable[[Step], None] | None = None,
    **options: Any,
) -> Comparison:
    """Train every method on the same folds with the same seeds, and return how they do.

    ``methods`` are names, or ``paper`` for those that the paper compares, or ``all``. The splits of seed s are
    ``cohort.folds(folds, s)``, or for ``folds=None`` (or 1) the one split ``cohort.split(test, s)``; seeds are
    ``seed``, ``seed + 1`` and so on. A function in place of the cohort is asked for the cohort of each seed. With
    ``out``, everything is kept in that folder, and ``resume=True`` goes on with what was started there, possibly with
    more methods or seeds. Other options are the fields of ``feddar.Settings``. A training that failed is listed in
    ``failures``; the others are not affected.
    """
    fairness.load_metric_frame()
    require_jobs(jobs)
    split = {"folds": 1 if folds is None else folds, "seeds": seeds}
    plan = checked(Plan, {"methods": methods, "reference": reference, "tune": tune, **split})
    every = {name: options | {"encoder": encoder, "method": name} for name in plan.methods}
    settings = next(cell_settings(each) for each in every.values())
    tables = _tables(plan, settings, source)
    folder = None if out is None else Path(out)
    if folder is not None:
        require_same_comparison(folder, tables, source, resume)
    cohorts = _cohorts(cohort, range(settings.seed, settings.seed + plan.seeds))
    data = {
        (fold, seed): partial(_parts, cohorts[seed], plan.folds, fold, test, seed)
        for fold in range(plan.folds)
        for seed in cohorts
    }
    with nullcontext(folder) if folder is not None else TemporaryDirectory(prefix="feddar-") as place:
        cells = [
            Cell(
                {"method": name, "fold": fold, "seed": seed},
                every[name] | {"seed": seed},
                parts,
                Path(place) / "runs" / name / f"seed-{seed}-fold-{fold}",
            )
            for name in plan.methods
            for (fold, seed), parts in data.items()
        ]
        pending = unfinished(cells, resume=resume, tune=plan.tune)
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(folder / CONFIG_FILE) as temporary:
                    write_config(temporary, **tables)
        trained = train_cells(
            cells, pending, jobs=jobs, tune=plan.tune, observe=fairness.observe, source=source, report=report
        )
    comparison = Comparison(**vars(trained), plan=plan, settings=settings, source=source)
    if folder is not None:
        with writing(folder):
            comparison.write(folder)
    return comparison


def require_same_comparison(
    folder: Path, tables: dict[str, dict[str, Any]], source: DataSettings | None, resume: bool
) -> None:
    """Refuse a folder that holds something else than the comparison to go on with; methods and seeds may be added."""
    path = folder / CONFIG_FILE
    if not resume:
        if path.exists():
            raise UserError(f"{folder} already holds results: go on with them (--resume), or choose another folder.")
        return
    before = read_config(path) if path.exists() else {}
    if "data" in before and source is not None:
        before["data"] = read_options(type(source), before["data"]).model_dump(exclude_none=True)
    if "compare" not in before:
        raise UserError(f"there is no comparison in {folder}: leave out --resume to start one.")

    def refuse(name: str, was: object, now: object) -> None:
        raise UserError(
            f"the comparison in {folder} was started with {name}={was}, not {now}: resume it as it was, or choose "
            "another folder."
        )

    for title, now in tables.items():
        was = before.get(title, {})
        for name in {**was, **now}:
            if title == "compare" and name == "methods":
                if not set(was[name]) <= set(now[name]):
                    refuse(name, ",".join(was[name]), ",".join(now[name]))
            elif title == "compare" and name == "seeds":
                if was[name] > now[name]:
                    refuse(name, was[name], now[name])
            elif (title, name) != ("compare", "reference") and was.get(name) != now.get(name):
                refuse(name, was.get(name), now.get(name))


def _tables(plan: Plan, settings: Settings, source: DataSettings | None) -> dict[str, dict[str, Any]]:
    """Return the configuration as tables; what differs between methods or changes no result is not part of it."""
    return {
        **({} if source is None else {"data": source.model_dump(exclude_none=True)}),
        "training": settings.model_dump(exclude_none=True, exclude={"method", "jobs", "threads"}),
        "compare": plan.model_dump(exclude_none=True, mode="json"),
    }


def _cohorts(given: Cohort | Callable[[int], Cohort], seeds: Iterable[int]) -> dict[int, Cohort]:
    """Return the cohort of each seed; those that are equal are kept once."""
    distinct: dict[str, Cohort] = {}
    found = {}
    for seed in seeds:
        cohort = given if isinstance(given, Cohort) else given(seed)
        found[seed] = distinct.setdefault(cohort.fingerprint(), cohort)
    return found


def _parts(cohort: Cohort, folds: int, fold: int, test: float, seed: int) -> Parts:
    return cohort.split(test, seed) if folds == 1 else cohort.fold(fold, folds, seed)


def results_of(cell: Cell) -> pd.DataFrame:
    """Return the averages over the last rounds of a trained cell."""
    return last_rounds(_history(cell), cell.settings().last)


def _history(cell: Cell) -> pd.DataFrame:
    """Return the metrics of all rounds of a trained cell; a file that lost some is an error."""
    history, rounds = read_metrics(cell.folder / METRICS_FILE), cell.settings().rounds
    if history["round"].nunique() != rounds:
        raise UserError(
            f"{cell.folder / METRICS_FILE} does not hold all {rounds} rounds: delete {cell.folder} and resume."
        )
    return history


def curves_of(cell: Cell) -> pd.DataFrame:
    """Return the main metric of every round of a trained cell, by domain and summarised."""
    history = _history(cell)
    test = history[history["split"] == "test"]
    shown = test["scope"].isin(["domain", "summary"]) & (test["metric"] == test["metric"].iloc[0])
    # Gaps are observed in the last rounds only.
    curves: pd.DataFrame = test[shown & (test["name"] != "domain_gap")][CURVE_COLUMNS]
    return curves


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
            if not _finished(cell, settings, fingerprint, resume, tune):
                found.append(cell)
    return found


def require_jobs(jobs: int) -> None:
    """Refuse a number of processes that cannot be."""
    if jobs < 1:
        raise UserError(f"jobs must be 1 or more, and is {jobs}.")


def require_distinct(cells: Sequence[Cell]) -> None:
    """Refuse two cells in one folder."""
    folders = [cell.folder for cell in cells]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise UserError(f"two trainings would share the folder {twice}: give each its own.")


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
        # From the first operation on: a forked child would wait for ever for the threads that its parent had.
        with fixed_threads(1):
            options = {**cell.options, **ALONE}
            if tune:
                options |= tuning.search(part, options, cell.settings(), cell.folder, show)
            progress = partial(show, candidates, "")
            place: dict[str, Any] = {"out": cell.folder, "resume": cell.folder.is_dir(), "source": source}
            train(part, test=test, progress=progress, observe=observe, **place, **options)
    except TrainingError as error:
        say({"failed": str(error), "step": {"state": "failed"}})
    else:
        say({"step": {"state": "done", "share": 1.0}})
