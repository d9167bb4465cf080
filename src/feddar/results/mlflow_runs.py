"""Runs in MLflow, each that of a folder.

Where they are kept, and in which experiment, is said to MLflow as by any program: by MLFLOW_TRACKING_URI, else in
``mlflow.db`` where the command was started, and by MLFLOW_EXPERIMENT_NAME, else ``feddar``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import gettempdir
from typing import Any, ClassVar

from feddar.results.run_folder import replacing, writing
from feddar.results.stored_runs import PROJECT, Figure, configuration, key

MLFLOW_FILE = "mlflow-run"
"""The file in a folder with what MLflow calls the run."""
MOST_METRICS, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 6000
"""How many of them MLflow takes at once, and how long one may be."""


@dataclass(frozen=True)
class MLflowRun:
    """A run in MLflow."""

    store: ClassVar[str] = "MLflow"
    place: ClassVar[str] = "MLFLOW_TRACKING_URI"

    client: Any
    number: str

    @classmethod
    def opened(cls, folder: Path) -> MLflowRun:
        """Return the run of a folder, which goes on; if it is not in MLflow, it begins, with its configuration."""
        parameters = {name: str(value)[:LONGEST_PARAMETER] for name, value in configuration(folder).items()}
        found = cls.found(folder)
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

    def last_round(self) -> int:
        """Return the last round that was logged, 0 if none was."""
        return max((each.step for each in self.client.get_metric_history(self.number, "loss/train")), default=0)

    def log(self, figures: Iterable[Figure], step: int) -> None:
        """Log the figures of a round as metrics METRIC/SCOPE/NAME."""
        self._log({key(*names): value for *names, value in figures}, step)

    def log_results(self, figures: Iterable[Figure], step: int) -> None:
        """Log the figures of the round in use as result/METRIC/SCOPE/NAME."""
        self._log({key("result", *names): value for *names, value in figures}, step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        kind, now = import_mlflow("entities").Metric, int(1000 * time.time())
        points = [kind(name, float(value), now, step) for name, value in values.items()]
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

    def end(self, finished: bool) -> None:
        """Say how the run has ended."""
        self.client.set_terminated(self.number, "FINISHED" if finished else "FAILED")


def import_mlflow(module: str = "") -> Any:
    """Return a module of MLflow, which is asked to be silent, and not to tell its makers how it is used."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    return import_module("mlflow" + (module and f".{module}"))


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
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
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
