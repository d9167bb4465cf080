"""The user's own table: a CSV or Parquet file with columns for client, domain and target, or one file per client.

Every other column is a feature and must be a number; the encoder standardises it with statistics that are sums over
clients. Whatever is wrong is said with the file, the column and the line.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from feddar.cohort import Cohort
from feddar.errors import UserError
from feddar.methods import nearest
from feddar.settings import DataSettings

SUFFIXES = (".csv", ".parquet")


def read_table(options: DataSettings) -> Cohort:
    """Read a file, or a folder with one file per client, as a cohort."""
    path = Path(options.data)
    frame, client = (_read_folder(path), CLIENT) if path.is_dir() else (_read_file(path), options.client)
    if frame.empty:
        raise UserError(f"{path} has a header and no samples below it.")
    roles = {"client": client, "domain": options.domain, "target": options.target, "group": options.group}
    for role in ("client", "domain", "target"):
        if roles[role] is None:
            raise UserError(f"say which column of {path} is the {role}: --{role} COLUMN.")
    ignored = [name for name in options.ignore.split(",") if name]
    for column in [*filter(None, roles.values()), *ignored]:
        if column not in frame.columns:
            raise UserError(f"{path} has no column '{column}': {nearest(column, list(map(str, frame.columns)))}")
    features = [name for name in frame.columns if name not in {*roles.values(), *ignored}]
    _require_numbers(path, frame, features)
    _require_filled(path, frame, [name for name in frame.columns if name in {*features, *filter(None, roles.values())}])
    return Cohort.from_arrays(
        frame[features].to_numpy(np.float64),
        frame[roles["target"]],
        domain=frame[roles["domain"]],
        client=frame[roles["client"]],
        group=frame[options.group] if options.group else None,
        task=options.task,
        features=features,
    )


CLIENT = "file"


def _read_folder(folder: Path) -> pd.DataFrame:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"the folder {folder} holds no CSV or Parquet file: put one per client there.")
    frames: list[pd.DataFrame] = []
    for file in files:
        frame = _read_file(file)
        if frame.empty:
            raise UserError(f"client '{file.stem}' has no samples: {file} has a header and no rows.")
        if frames and list(frame.columns) != list(frames[0].columns)[:-1]:
            raise UserError(f"{file} has other columns than {files[0]}: every client's file needs the same ones.")
        frames.append(frame.assign(**{CLIENT: file.stem}))
    return pd.concat(frames, ignore_index=True)


def _read_file(path: Path) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path} is neither a CSV nor a Parquet file.")
    try:
        if suffix == ".parquet":
            return pd.read_parquet(path)
        with path.open(encoding="utf-8", newline="") as file:
            header = next(iter(pd.read_csv(file, header=None, nrows=1, dtype=str).to_numpy().tolist()))
        repeated = {str(name) for name in header if header.count(name) > 1}
        if repeated:
            raise UserError(f"{path} has the column '{sorted(repeated)[0]}' more than once: rename one.")
        return pd.read_csv(path, encoding="utf-8")
    except UserError:
        raise
    except ImportError:
        raise UserError("reading Parquet needs one more package: pip install 'feddar[parquet]'.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).strip()}.") from None


def _require_numbers(path: Path, frame: pd.DataFrame, features: list[str]) -> None:
    if not features:
        raise UserError(f"{path} has no column left to learn from beside client, domain and target.")
    for name in features:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            text = frame[name].dropna()
            wrong = text[pd.to_numeric(text, errors="coerce").isna()]
            row = wrong.index[0] if len(wrong) else 0
            raise UserError(
                f"{path}, line {row + 2}: column '{name}' holds {wrong.iloc[0] if len(wrong) else 'text'!r}, which is "
                f"not a number; turn it into numbers or leave it out with --ignore {name}."
            )


def _require_filled(path: Path, frame: pd.DataFrame, columns: list[str]) -> None:
    for name in columns:
        missing = frame[name].isna()
        if missing.any():
            raise UserError(
                f"{path}, line {int(missing.argmax()) + 2}: column '{name}' is empty there and in "
                f"{int(missing.sum()) - 1:,} more rows; fill it in or leave those rows out."
            )
