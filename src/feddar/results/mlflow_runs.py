"""Runs in MLflow, each that of a folder.

Where they are kept, and in which experiment, is said to MLflow as by any program: by MLFLOW_TRACKING_URI, else in
``mlflow.db`` where the command was started, and by MLFLOW_EXPERIMENT_NAME, else ``feddar``.
"""

from __future__ import annotations

import os
import re
import time
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from feddar.errors import Notice, one_line
from feddar.results.run_folder import replacing, writing
from feddar.settings import CONFIG_FILE, read_config

MLFLOW_FILE = "mlflow-run"
"""The file in a folder with what MLflow calls the run."""
EXPERIMENT = "feddar"
MOST_METRICS, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 6000
"""How many of them MLflow takes at once, and how long one may be."""

Figure = tuple[str, str, str, float]
"""A metric, its scope and name, and its value."""


@dataclass(frozen=True)
class MLflowRun:
    """A run in MLflow."""

    client: Any
    number: str

    @classmethod
    def opened(cls, folder: Path) -> MLflowRun:
        """Return the run of a folder, which goes on; if it is not in MLflow, it begins, with its configuration."""
        parameters, found = _parameters(folder), cls.found(folder)
        if found is not None:
            found._resume(parameters)
            return found
        client = _client()
        number = client.create_run(_experiment(client), run_name=folder.resolve().name).info.run_id
        kind = import_mlflow("entities").Param
        for some in _parts([kind(*each) for each in parameters.items()], MOST_PARAMETERS):
            client.log_batch(number, params=some)
        with writing(folder), replacing(folder / MLFLOW_FILE) as temporary:
            temporary.write_text(number, encoding="utf-8")
        return cls(client, number)

    @classmethod
    def found(cls, folder: Path) -> MLflowRun | None:
        """Return the run of a folder; None if it has none, or none in this place."""
        path = folder / MLFLOW_FILE
        if not path.exists():
            return None
        number, client = path.read_text(encoding="utf-8"), _client()
        try:
            gone = client.get_run(number).info.lifecycle_stage == "deleted"
        except import_mlflow("exceptions").MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            gone = True
        return None if gone else cls(client, number)

    def _resume(self, parameters: Mapping[str, str]) -> None:
        """Let the run go on; what is another than before becomes a tag, since MLflow keeps parameters as they were."""
        before = self.client.get_run(self.number).data.params
        for name, value in parameters.items():
            if before.get(name, value) != value:
                self.client.set_tag(self.number, f"resumed.{name}", value)
        self.client.update_run(self.number, status="RUNNING")

    def last_step(self, key: str) -> int:
        """Return the last step at which a metric was logged, 0 if it never was."""
        return max((each.step for each in self.client.get_metric_history(self.number, key)), default=0)

    def log(self, figures: Iterable[Figure], step: int, before: str = "") -> None:
        """Log figures as metrics METRIC/SCOPE/NAME, or BEFORE/METRIC/SCOPE/NAME."""
        kind, now = import_mlflow("entities").Metric, int(1000 * time.time())
        points = [kind(key(before, *names), float(value), now, step) for *names, value in figures]
        for some in _parts(points, MOST_METRICS):
            self.client.log_batch(self.number, metrics=some)

    def log_files(self, files: Iterable[Path]) -> None:
        """Log those of the files that are there, as artifacts."""
        for file in files:
            if file.exists():
                self.client.log_artifact(self.number, str(file))

    def adopt(self, folder: Path, labels: Mapping[str, Any]) -> None:
        """Show the run of a folder below this one, with labels as its name and as tags."""
        child = self.found(folder)
        if child is not None:
            named = {"mlflow.parentRunId": self.number, "mlflow.runName": "/".join(map(str, labels.values()))}
            for name, value in (named | dict(labels)).items():
                self.client.set_tag(child.number, name, value)

    def end(self, status: str) -> None:
        """Say how the run has ended."""
        self.client.set_terminated(self.number, status)


def import_mlflow(module: str = "") -> Any:
    """Return a module of MLflow, which is asked to be silent, and not to tell its makers how it is used."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    return import_module("mlflow" + (module and f".{module}"))


def key(*names: str) -> str:
    """Return the key of a metric; signs that MLflow does not allow are named.

    >>> key("auc", "domain", "70+"), key("loss", "train", "")
    ('auc/domain/70 plus sign', 'loss/train')
    """
    return "/".join(re.sub(r"[^\w.\- :]+|^\.+$", _named, name) for name in names if name)[:250]


def _named(signs: re.Match[str]) -> str:
    words = " ".join(unicodedata.name(each, f"{ord(each):x}").lower() for each in signs[0])
    before, after = signs.string[: signs.start()], signs.string[signs.end() :]
    return f"{' ' if before else ''}{words}{' ' if after else ''}"


def _parameters(folder: Path) -> dict[str, str]:
    """Return the configuration of the run in a folder."""
    tables = read_config(folder / CONFIG_FILE).values()
    return {name: str(value)[:LONGEST_PARAMETER] for table in tables for name, value in table.items()}


def _client() -> Any:
    """Return what talks to the store, one process of a user after another: MLflow makes a new store without a lock."""
    with ExitStack() as stack:
        with suppress(ImportError):  # Windows
            import fcntl

            path = Path(gettempdir()) / f"feddar-mlflow-{os.getuid()}.lock"
            fcntl.lockf(stack.enter_context(path.open("a")), fcntl.LOCK_EX)
        return import_mlflow().MlflowClient()


def _experiment(client: Any) -> str:
    """Return the number of the experiment, which is made if there is none."""
    if number := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return number
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except import_mlflow("exceptions").MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another process has made it meanwhile
    return str(found.experiment_id)


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    """Yield a list in parts of at most so many."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


@dataclass
class Outcome:
    """Whether a block has gone well."""

    well: bool = True


@contextmanager
def noting(lost: str) -> Iterator[Outcome]:
    """Turn whatever MLflow raises within the block into a note on what is lost by it; training must not end by it."""
    outcome = Outcome()
    try:
        yield outcome
    except Exception as error:
        outcome.well = False
        warnings.warn(f"MLflow failed ({one_line(error)}): {lost}.", Notice, stacklevel=3)
