"""Predicts a file of new samples chunk by chunk, and returns a summary of the predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pandas.api.types import union_categoricals

from feddar.data.chunks import ROLES, Chunk, cohort_chunks, image_chunks, images_in, table_chunks
from feddar.data.cohort import Cohort
from feddar.data.files import Reading, readable
from feddar.data.name_lists import names_in
from feddar.data.sources import BUILT_IN, find_source, resolve_options
from feddar.data.table_paths import is_table
from feddar.errors import RowError, UserError
from feddar.evaluation.metrics import evaluate
from feddar.objectives import Objective
from feddar.objectives.labels import LabelColumns, by_distinct
from feddar.options import UnknownOptions
from feddar.results.csv_files import write_csv
from feddar.results.flagging import Flagging
from feddar.results.run import Run, load
from feddar.results.run_folder import refuse_comparison, replacing, writing
from feddar.settings import CONFIG_FILE, Unknown, checked, read_config

NO_NAME = "(none)"
"""The text shown for a missing domain or client."""


@dataclass(frozen=True)
class Summary:
    """A summary of the predictions of a file."""

    answers: pd.DataFrame
    """By domain (as given) and head: the number of rows, and the totals of ``Objective.summary``."""
    flagged: Counter[str]
    """The number of rows that each column of flags flags."""
    notes: Counter[str]
    """The number of rows with each note, such as an unknown category."""
    unlabelled: int
    """The number of rows whose label is missing or was not in training; 0 if there is no column of labels."""
    labelled: Cohort | None
    """The rows with a label, without their inputs."""
    metrics: pd.DataFrame | None
    """Metrics of the rows with a label: scope, name, metric, value, count."""


def predict_file(run: Run, chunks: Iterable[Chunk], out: Path, **unknown: Unpack[UnknownOptions]) -> Summary:
    """Write predictions for every chunk to a CSV or Parquet file, which gets its name when it is complete."""
    flagging = Flagging.of(run)
    flags = [] if flagging is None else flagging.columns
    answers, flagged, notes, labelled = [], Counter[str](), Counter[str](), _Labelled(run)
    with writing(out.parent), _writer(out) as write:
        for chunk in chunks:
            frame = _predicted(run, chunk, unknown)
            frame = frame if flagging is None else flagging.added(frame, run)
            write(frame)
            answers.append(_answers(run.model.objective, frame))
            flagged.update({name: int(frame[name].sum()) for name in flags})
            notes.update(frame["note"][frame["note"] != ""].tolist())
            if chunk.labels is not None:
                labelled.add(frame, LabelColumns.of(chunk.labels))
    return Summary(
        _added(run.model.objective, pd.concat(answers, ignore_index=True)),
        flagged,
        notes,
        labelled.without,
        *labelled.evaluated(),
    )


def find_run(folder: Path, device: str = "cpu") -> Run:
    """Load a run, to predict on a device; for the folder of a comparison, the error names one of its runs."""
    refuse_comparison(folder)
    run = load(folder, device=device)
    if run.method.personal and not run.own:
        raise UserError(f"what {run.method.name} learns for each site is at the sites, not in {folder}: predict there.")
    return run


def read_new(
    run: Run, folder: Path, data: str, given: Mapping[str, str], unknown: Mapping[str, str]
) -> Iterator[Chunk]:
    """Return new samples in chunks; the columns of a table are those given, else those of the run's configuration."""
    config = read_config(folder / CONFIG_FILE).get("data", {}) if (folder / CONFIG_FILE).exists() else {}
    source = find_source(data)
    if data in BUILT_IN:
        if given:
            raise UserError(f"{data} is built in and has no columns to name: leave out --{next(iter(given))}.")
        return cohort_chunks(source.load(resolve_options(source, data, {}, config), run.settings.seed))
    allowed = checked(Unknown, {**unknown})
    required = [role for role in _needed(run) if allowed.of_missing(role) == "error"]
    if _is_of_images(Path(data)):
        column, size = _image_input(run, folder)
        for role in required:
            if role not in given:
                raise UserError(f"say which {role} the images are of: --{role} NAME.")
        return image_chunks(Path(data), column, size, {role: given[role] for role in ROLES[:2] if role in given})
    if run.cohort.columns is None:
        raise UserError(
            f"the model in {folder} was not trained on a table with named columns: use it in Python, with "
            f"feddar.load({str(folder)!r}).predict_proba(x, domain=...)."
        )
    roles = {role: config[role] for role in ROLES if role in config} | dict(given)
    reading = Reading(missing=tuple(names_in(config.get("missing", ""))))
    merged = config.get("spellings") == "merge"
    known = {"domain": run.cohort.domains, "client": run.cohort.clients} if merged else None
    how: dict[str, Any] = {"reading": reading, "known": known, "structure": run.cohort.structure}
    return table_chunks(Path(data), run.cohort.columns, roles, [*given, *required], **how)


def _needed(run: Run) -> list[str]:
    """Return the roles, domain or client, that the model needs to predict a sample."""
    return ["domain"] * run.needs_domain + ["client"] * (run.method.personal and len(run.cohort.clients) > 1)


def _is_of_images(path: Path) -> bool:
    """Return whether the path is an image or a folder of images; a folder that also has tables is not."""
    tables = [file for file in path.iterdir() if is_table(file)] if path.is_dir() else []
    return path.exists() and not tables and bool(images_in(path))


def _image_input(run: Run, folder: Path) -> tuple[str | None, int]:
    """Return the column of image paths that the model was trained on (None if not a table), and the images' size."""
    columns, shapes = run.cohort.columns or (), [part.shape for part in run.cohort.layout]
    size = shapes[0][-1] if shapes[0] else 0
    if shapes != [(3, size, size)] or len(columns) > 1:
        what = f"the columns {', '.join(c.name for c in columns)}" if columns else f"inputs of shape {shapes}"
        raise UserError(f"the model in {folder} takes {what}, not images alone: name a table of these.")
    return (columns[0].name if columns else None), size


def require_new_file(out: Path, run: Path, data: Path) -> None:
    """Refuse to write into the folder of the run or of the data, or over a file that is not predictions."""
    if out.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"{out} is neither a CSV nor a Parquet file: choose such a name with --out.")
    if out.resolve() == data.resolve() or (data.is_dir() and data.resolve() in out.resolve().parents):
        raise UserError(f"{out} would be written over {data}, or among its files: choose another name with --out.")
    if run.resolve() in out.resolve().parents:
        raise UserError(f"{out} lies in the folder of the run, which stays as it is: choose another one with --out.")
    if out.exists() and not {"row", "head", "note"} <= _columns_in(out):
        raise UserError(f"{out} exists and holds no predictions of feddar: choose another name with --out.")


def _columns_in(file: Path) -> set[str]:
    """Return the names of a file's columns; empty if it is not a table."""
    try:
        if file.suffix.lower() == ".csv":
            return set(map(str, pd.read_csv(file, nrows=0).columns))
        from pyarrow.parquet import read_schema

        return set(read_schema(file).names)
    except (OSError, ValueError, ImportError):
        return set()


def _predicted(run: Run, chunk: Chunk, unknown: UnknownOptions) -> pd.DataFrame:
    """Return the predictions of a chunk, as rows of the file to write."""
    given: dict[str, Any] = {
        role: _text(chunk.roles[role]) for role in ("image", "client", "domain", "group") if role in chunk.roles
    }
    none = np.full(len(chunk), "", dtype=object)
    domain = given.get("domain", none) if run.needs_domain else None
    client = given.get("client", none if "client" in _needed(run) else None)
    try:
        found = run.predictions(chunk.x, domain, client, **unknown)
    except RowError as problem:
        raise UserError(f"{chunk.where(problem.row)}: {problem.reason}") from None
    if run.needs_domain:
        first = [chunk.notes.get(row, "") for row in range(len(chunk))]
        found["note"] = ["; ".join(filter(None, each)) for each in zip(first, found["note"], strict=True)]
    rows = np.arange(chunk.first + 1, chunk.first + len(chunk) + 1)
    return pd.DataFrame({"row": rows} | given).join(found)


def _text(values: pd.Series[Any]) -> NDArray[np.object_]:
    text = by_distinct(values, lambda distinct: distinct.map(str)).astype(object)
    found: NDArray[np.object_] = text.where(values.notna(), "").to_numpy()
    return found


def _domain(frame: pd.DataFrame) -> pd.Series[Any]:
    return frame["domain"].replace("", NO_NAME) if "domain" in frame else frame["head"]


def _answers(objective: Objective, frame: pd.DataFrame) -> pd.DataFrame:
    """Sum up the rows of a chunk, by domain and head."""
    named = pd.DataFrame({"domain": _domain(frame), "head": frame["head"], "rows": 1})
    return _added(objective, pd.concat([named, objective.summary(frame)], axis=1))


def _added(objective: Objective, answers: pd.DataFrame) -> pd.DataFrame:
    """Combine the summaries of chunks, by domain and head."""
    ways: dict[Any, str] = {"rows": "sum"} | objective.summary_ways()
    found: pd.DataFrame = answers.groupby(["domain", "head"], sort=False, as_index=False).agg(ways)
    return found


class _Labelled:
    """Collects labels and predictions of rows whose label is known, for metrics."""

    def __init__(self, run: Run) -> None:
        self.objective = run.model.objective
        self.without = 0
        self.labels: list[NDArray[Any]] = []
        self.values: list[NDArray[np.floating]] = []
        self.domains: list[pd.Series[Any]] = []

    def add(self, frame: pd.DataFrame, target: LabelColumns) -> None:
        """Add the rows of a chunk."""
        labels = self.objective.read(target)
        known = np.asarray(np.isfinite(labels).reshape(len(labels), -1).all(axis=1))
        self.without += int((~known).sum())
        self.labels.append(labels[known])
        self.values.append(self.objective.from_columns(frame)[known])
        self.domains.append(_domain(frame)[known].astype("category"))

    def evaluated(self) -> tuple[Cohort | None, pd.DataFrame | None]:
        """Return the rows as a cohort and their metrics by domain; None and None if there are no labels."""
        if not sum(map(len, self.labels)):
            return None, None
        y = self.objective.as_labels(np.concatenate(self.labels))
        values = torch.from_numpy(np.concatenate(self.values))
        domain = union_categoricals(self.domains, ignore_order=True)
        index = torch.from_numpy(domain.codes.astype(np.int64))
        x, client = (torch.zeros(len(y), 1),), torch.zeros(len(y), dtype=torch.long)
        names = tuple(map(str, domain.categories))
        cohort = Cohort(x, y, index, client, names, ("all",), self.objective)
        return cohort, evaluate(cohort, self.objective.scores_of(values))


@contextmanager
def _writer(out: Path) -> Iterator[Callable[[pd.DataFrame], None]]:
    """Yield a function that appends rows to a new file, which gets its name at the end if there was no error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary, ExitStack() as stack:
        if out.suffix.lower() == ".csv":
            file = stack.enter_context(temporary.open("w", encoding="utf-8", newline=""))
            yield lambda frame: write_csv(frame, file, header=file.tell() == 0)
            return
        with readable(out):
            import pyarrow
            from pyarrow.parquet import ParquetWriter
        opened: list[Any] = []

        def write(frame: pd.DataFrame) -> None:
            table = pyarrow.Table.from_pandas(frame, preserve_index=False)
            if not opened:
                opened.append(stack.enter_context(ParquetWriter(temporary, table.schema)))
            opened[0].write_table(table)

        yield write
