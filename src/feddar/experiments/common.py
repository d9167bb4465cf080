"""What the experiments share: checking their arguments and writing their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pandas as pd

from feddar.comparison.cells import Cell, CellProgress, Trained, run_cells
from feddar.errors import TrainingError, UserError
from feddar.results.run_folder import replacing

LABELS = {
    "fedavg": "FedAvg",
    "fedavg-mh": "FedAvg + Multi-head",
    "feddar-wa": "FedDAR-WA",
    "feddar-sa": "FedDAR-SA",
    "feddar": "feddar (ours)",
}
"""The paper's names of the methods; the last is the one we recommend, which the paper does not have."""

Setting = TypeVar("Setting")


def pick(scales: Mapping[str, Setting], scale: str, seeds: int | None) -> Setting:
    """Return the setting called `scale`, having checked it and the number of seeds, if one is given."""
    if scale not in scales:
        raise UserError(f"The scale must be one of {', '.join(scales)}, not {scale!r}.")
    if seeds is not None and seeds < 1:
        raise UserError(f"At least one seed is needed, not {seeds}.")
    return scales[scale]


def train_cells(cells: Sequence[Cell], say: Callable[[str], None], *, jobs: int, resume: bool) -> Trained:
    """Train the cells of an experiment, saying which is done; that all fail is an error."""
    done = 0

    def report(step: CellProgress) -> None:
        nonlocal done
        if step.state != "running":
            done += 1
            say(f"{done} of {len(cells)}: {step.cell} {step.state}")

    trained = run_cells(cells, jobs=jobs, resume=resume, report=report)
    if trained.results.empty:
        require_all(trained)
    return trained


def percent(values: pd.Series[float]) -> str:
    """Return the mean of shares in percent and, of several, their standard deviation, as text."""
    if values.empty:
        return "–"
    mean, sd = 100 * values.mean(), 100 * values.std(ddof=1)
    return f"{mean:.1f} ± {sd:.1f}" if len(values) > 1 else f"{mean:.1f}"


def write(out: Path, results: pd.DataFrame, table: str) -> None:
    """Write `results.csv` and `table.md` into the folder `out`, each whole."""
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "results.csv") as temporary:
        results.to_csv(temporary, index=False)
    with replacing(out / "table.md") as temporary:
        temporary.write_text(table, encoding="utf-8")


def finish(
    out: Path, trained: Trained, results: pd.DataFrame, table: str, draw: Callable[[pd.DataFrame, Path], None]
) -> pd.DataFrame:
    """Write results, table and figure into `out` and return the results; a training that failed is an error then."""
    write(out, results, table)
    draw(results, out / "figure.png")
    require_all(trained)
    return results


def require_all(trained: Trained) -> None:
    """Raise an error if a training failed; the results of the others are written before."""
    if trained.failures:
        cell, why = trained.failures[0]
        more = f" ({len(trained.failures)} of them)" if len(trained.failures) > 1 else ""
        raise TrainingError(f"a training failed{more}: {cell}: {why}")
