"""The files with a run's figures: ``figures.csv``, ``calibration.csv`` and ``decisions.csv`` in its folder."""

from __future__ import annotations

from pathlib import Path

from feddar.errors import UserError
from feddar.evaluation.figures import CALIBRATION_COLUMNS, DECISION_COLUMNS, TABLE_COLUMNS, Figures
from feddar.lazy import pandas as pd
from feddar.results.csv_files import without_guards, write_csv
from feddar.results.run_folder import replacing, writing

FILES = {
    "figures.csv": ("table", TABLE_COLUMNS),
    "calibration.csv": ("calibration", CALIBRATION_COLUMNS),
    "decisions.csv": ("decisions", DECISION_COLUMNS),
}
"""The name of each file, the table of ``Figures`` in it, and its columns."""
MISSING_FILE = "missing-domains.csv"
MISSING_COLUMNS = ["scope", "name", "metric", "value", "missing", "count"]
"""The file with metrics as they are, and as they were if all domains were ``missing``, and its columns."""
_TEXTS = ("scope", "name", "metric", "outcome", "interval")


def write_figures(folder: Path, figures: Figures) -> None:
    """Write the figures into a run's folder, replacing those that are there."""
    with writing(folder):
        for file, (table, _) in FILES.items():
            with replacing(folder / file) as temporary:
                write_csv(getattr(figures, table), temporary)


def write_missing_domains(folder: Path, frame: pd.DataFrame) -> None:
    """Write what missing domains cost into a run's folder, replacing what is there."""
    with writing(folder), replacing(folder / MISSING_FILE) as temporary:
        write_csv(frame, temporary)


def read_missing_domains(folder: Path) -> pd.DataFrame | None:
    """Return what missing domains cost; None where it is not known, as between sites."""
    path = folder / MISSING_FILE
    return _read(path, MISSING_COLUMNS) if path.exists() else None


def remove_figures(folder: Path) -> None:
    """Remove the figures of a model that is about to be trained further."""
    with writing(folder):
        for file in (*FILES, MISSING_FILE):
            (folder / file).unlink(missing_ok=True)


def read_figures(folder: Path) -> Figures | None:
    """Return the figures of a run; None if there are none, as in runs of earlier versions."""
    if not all((folder / file).exists() for file in FILES):
        return None
    return Figures(**{table: _read(folder / file, columns) for file, (table, columns) in FILES.items()})


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    numbers = {name: lambda text: float(text or "nan") for name in columns if name not in (*_TEXTS, "count", "group")}
    texts = {name: str for name in columns if name in _TEXTS}
    try:
        frame = pd.read_csv(path, dtype=texts, converters=numbers, keep_default_na=False)
        return without_guards(frame[columns])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read the figures in {path}: {error}; restore the file or train again.") from None
