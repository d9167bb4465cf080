"""Functions that all experiments use: they check the user's options, train, and write the files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pandas as pd

from feddar.comparison.cells import Cell, CellProgress, Trained, read_finished, run_cells
from feddar.comparison.references import cell_methods
from feddar.errors import TrainingError, UserError
from feddar.evaluation.metrics import COLUMNS
from feddar.methods import nearest
from feddar.report.folders import RESULTS_FILE
from feddar.report.numbers import UNDEFINED
from feddar.results.csv_files import write_csv
from feddar.results.run_folder import read_metrics, replacing

LABELS = {
    "fedavg": "FedAvg",
    "fedavg-mh": "FedAvg + Multi-head",
    "feddar-wa": "FedDAR-WA",
    "feddar-sa": "FedDAR-SA",
    "feddar": "feddar (ours)",
}
"""The paper's names of the methods; the last is the one we recommend, which the paper does not have."""

Setting = TypeVar("Setting")


@dataclass(frozen=True)
class ExperimentOptions:
    """The user's options of an experiment, which ignores those that it does not use."""

    out: Path
    """The folder for the results."""
    say: Callable[[str], None]
    """Called with a line of progress."""
    seeds: int | None = None
    """The number of repetitions; None is the experiment's default."""
    scale: str | None = None
    """The scale, small or full; None is the experiment's default."""
    jobs: int = 1
    """The number of trainings at a time."""
    resume: bool = False
    """Whether to continue with the results in the folder."""
    data: str | None = None
    """The folder of the data sets."""
    only: str | None = None
    """The parts to run, separated by commas; None is all. Experiments without parts refuse it."""
    device: str = "cpu"
    """Where networks on images work."""


def pick(
    scales: Mapping[str, Setting], options: ExperimentOptions, usual: str = "small", *, parts: Collection[str] = ()
) -> tuple[str, Setting]:
    """Return the scale, as asked for or the default, and its setting; the number of seeds is checked too.

    An experiment that names no parts refuses to be run in part.
    """
    if options.only is not None and not parts:
        raise UserError("this experiment has no parts: leave out --only.")
    scale = usual if options.scale is None else options.scale
    if scale not in scales:
        raise UserError(f"The scale must be one of {', '.join(scales)}, not {scale!r}.")
    if options.seeds is not None and options.seeds < 1:
        raise UserError(f"At least one seed is needed, not {options.seeds}.")
    return scale, scales[scale]


def chosen_parts(options: ExperimentOptions, parts: Collection[str]) -> list[str]:
    """Return the parts that were asked for, in the order of the experiment; all, if none were named."""
    asked = list(parts) if options.only is None else [name.strip() for name in options.only.split(",")]
    for name in asked:
        if name not in parts:
            raise UserError(f"unknown part '{name}': {nearest(name, list(parts))}")
    return [name for name in parts if name in asked]


def train_cells(cells: Sequence[Cell], options: ExperimentOptions) -> Trained:
    """Train the cells of an experiment, and report each one that is done; it is an error if all fail.

    As in the paper, all training samples are trained on, and results are averages over the last rounds, unless a
    cell's options say something else of validation.
    """
    cells = [replace(cell, options={"validation": 0.0, **cell.options}) for cell in cells]
    done = 0

    def report(step: CellProgress) -> None:
        nonlocal done
        if step.state != "running":
            done += 1
            options.say(f"{done} of {len(cells)}: {step.cell} {step.state}")

    trained = run_cells(cells, jobs=options.jobs, resume=options.resume, report=report)
    if trained.results.empty:
        require_all(trained.failures)
    return trained


def earlier_results(cells: Sequence[Cell], options: ExperimentOptions) -> dict[Path, pd.DataFrame]:
    """Return what `results.csv` has of each cell whose own folder is gone, by that folder; nothing without ``resume``.

    So results can be kept, or taken to another machine, without the folders of trainings, which are large.
    """
    path = options.out / RESULTS_FILE
    if not (options.resume and cells and path.exists()):
        return {}
    labels = list(cells[0].labels)
    stored = read_metrics(path, [*labels, *COLUMNS])
    named = stored.assign(method=cell_methods(stored["method"]))
    by_cell = dict(iter(stored.groupby([named[label] for label in labels], sort=False)))
    found = {cell.folder: by_cell.get(tuple(cell.labels.values())) for cell in cells if not cell.folder.exists()}
    return {folder: rows.reset_index(drop=True) for folder, rows in found.items() if rows is not None}


def pending(cells: Sequence[Cell], earlier: Mapping[Path, pd.DataFrame]) -> list[Cell]:
    """Return the cells that are not among the earlier results."""
    return [cell for cell in cells if cell.folder not in earlier]


def finished(
    cells: Sequence[Cell],
    earlier: Mapping[Path, pd.DataFrame],
    read: Callable[[Sequence[Cell]], pd.DataFrame] = read_finished,
) -> pd.DataFrame:
    """Return the results of the cells that are finished: the earlier ones, or what is read from their folders."""
    labels = list(cells[0].labels) if cells else []
    found = (earlier[cell.folder] if cell.folder in earlier else read([cell]) for cell in cells)
    return joined(found, [*labels, *COLUMNS])


def joined(frames: Iterable[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Return the results of all frames below each other; empty ones, whose columns have no type, are left out."""
    found = [frame for frame in frames if len(frame)]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=list(columns))


def percent(values: pd.Series[float]) -> str:
    """Return the mean of shares in percent and, of several, their standard deviation, as text."""
    if values.empty:
        return UNDEFINED
    mean, sd = 100 * values.mean(), 100 * values.std(ddof=1)
    return f"{mean:.1f} ± {sd:.1f}" if len(values) > 1 else f"{mean:.1f}"


def finish(
    out: Path,
    results: pd.DataFrame,
    table: str,
    draw: Callable[[pd.DataFrame, Path], None],
    trained: Trained | None = None,
) -> pd.DataFrame:
    """Write `results.csv`, `table.md` and `figure.png` into `out`, and return the results.

    That one of the trainings failed is an error, once everything is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / RESULTS_FILE) as temporary:
        write_csv(results, temporary)
    with replacing(out / "table.md") as temporary:
        temporary.write_text(table, encoding="utf-8")
    draw(results, out / "figure.png")
    if trained is not None:
        require_all(trained.failures)
    return results


def require_all(failures: Sequence[tuple[Cell, str]]) -> None:
    """Raise an error if a training failed; the results of the others are written before."""
    if failures:
        cell, why = failures[0]
        more = f" ({len(failures)} of them)" if len(failures) > 1 else ""
        raise TrainingError(f"a training failed{more}: {cell}: {why}")
