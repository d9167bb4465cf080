"""A trained model with everything needed to use it, audit it or go on training: what ``train`` returns.

On disk a run is a folder: ``config.toml`` (the resolved configuration), ``metrics.csv`` (round, split, scope, name,
metric, value, count) and ``model.safetensors``, which holds the parameters, what each client keeps to itself, and in
its header, as JSON, the facts about data and software. The last is both checkpoint and final model. It is written to
a temporary name and renamed, so that it is whole at every moment, and no pickle is ever loaded.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from feddar.cohort import Cohort, Scalar
from feddar.errors import UserError
from feddar.evaluation import evaluate, last_rounds
from feddar.heads import probabilities
from feddar.methods import METHODS, Method, nearest
from feddar.model import Model, Tensors, build_model
from feddar.phases import Phase, predict
from feddar.settings import Settings, checked, write_config

MODEL_FILE, METRICS_FILE, CONFIG_FILE = "model.safetensors", "metrics.csv", "config.toml"
METRICS_COLUMNS = ["round", "split", "scope", "name", "metric", "value", "count"]
FORMAT = 1


@dataclass
class Run:
    """Parameters after ``round`` rounds, and how they came about."""

    settings: Settings
    model: Model
    cohort: Cohort
    """What was trained on; a loaded run has one sample per domain name at most, for names and shapes only."""
    state: Tensors
    private: dict[str, Tensors]
    round: int
    method: Method
    """The row in force after that round (during warm-up, FedAvg)."""
    history: pd.DataFrame
    fingerprint: str

    def predict_proba(self, x: Any, domain: Any = None, client: Any = None) -> NDArray[np.floating]:
        """Return probabilities [n, classes] in the order of ``cohort.classes``."""
        if self.cohort.classes is None:
            raise UserError("this model predicts a number, not classes: use predict.")
        return self._predicted(x, domain, client)

    def predict(self, x: Any, domain: Any = None, client: Any = None) -> NDArray[Any]:
        """Return predicted labels, or numbers for regression, for samples of known domains (and clients)."""
        predicted = self._predicted(x, domain, client)
        if self.cohort.classes is None:
            return predicted
        labels: NDArray[Any] = np.array(self.cohort.classes)[predicted.argmax(1)]
        return labels

    def evaluate(self, test: Cohort) -> pd.DataFrame:
        """Return metrics by domain and client, after the last round: scope, name, metric, value, count."""
        domain = self._indices(np.array(test.domains)[test.domain.numpy()], self.cohort.domains, "domain", len(test))
        clients = np.array(test.clients)[test.client.numpy()]
        return evaluate(test, self.scores(test.x, domain, clients))

    def results(self) -> pd.DataFrame:
        """Return the test metrics of training, averaged over the last rounds as the settings say."""
        return last_rounds(self.history, self.settings.last)

    def scores(self, x: tuple[Tensor, ...], domain: Tensor, client: NDArray[np.str_] | None) -> Tensor:
        """Score samples; a personal method uses the parameters of each sample's client."""
        x = tuple(part.to(self.model.dtype) for part in x)
        phase = Phase("evaluate", self.method.encoder, self.method.heads)
        if not self.method.personal:
            return predict(self.model, phase, self.state, x, domain)
        if client is None:
            raise UserError(f"{self.method.name} has a part of its own at each client: give client=... as well.")
        result = torch.zeros(len(domain), self.model.outputs, dtype=self.model.dtype)
        for name in np.unique(client):
            if name not in self.private:
                raise UserError(f"client '{name}' was not in training: {nearest(name, list(self.private))}")
            rows = torch.from_numpy(client == name)
            own = self.state | self.private[name]
            result[rows] = predict(self.model, phase, own, tuple(part[rows] for part in x), domain[rows])
        return result

    def save(self, path: str | Path) -> None:
        """Write the run folder."""
        folder = Path(path)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_config(folder / CONFIG_FILE, training=self.settings)
            self.save_metrics(folder)
            self.checkpoint(folder)

    def save_metrics(self, folder: Path) -> None:
        """Write metrics.csv whole."""
        with replacing(folder / METRICS_FILE) as temporary:
            self.history.to_csv(temporary, index=False)

    def checkpoint(self, folder: Path) -> None:
        """Write the model file: all or nothing."""
        tensors = {f"server/{name}": value for name, value in self.state.items()}
        for index, name in enumerate(self.cohort.clients):
            own = self.private.get(name, {})
            tensors |= {f"client/{index}/{key}": value for key, value in own.items()}
        about = {
            "format": FORMAT,
            "round": self.round,
            "method": self.method.name,
            "settings": self.settings.model_dump(),
            "domains": self.cohort.domains,
            "clients": self.cohort.clients,
            "classes": self.cohort.classes,
            "counts": self.cohort.counts.tolist(),
            "inputs": [list(part.shape[1:]) for part in self.cohort.x],
            "fingerprint": self.fingerprint,
            "versions": versions(),
        }
        with replacing(folder / MODEL_FILE) as temporary:
            save_file(tensors, temporary, metadata={"feddar": json.dumps(about)})

    def _predicted(self, x: Any, domain: Any, client: Any) -> NDArray[np.floating]:
        parts = x if isinstance(x, tuple) else (x,)
        inputs = tuple(torch.as_tensor(np.asarray(part)) for part in parts)
        index = self._indices(domain, self.cohort.domains, "domain", len(inputs[0]))
        holders = None if client is None else np.array([str(name) for name in client])
        scored = self.scores(inputs, index, holders).double()
        found: NDArray[np.floating] = probabilities(self.model.task, scored).numpy()
        return found

    def _indices(self, values: Any, names: tuple[str, ...], what: str, n: int) -> Tensor:
        if values is None:
            if len(names) > 1:
                raise UserError(f"give the {what} of each sample as {what}=...; there are: {', '.join(names)}.")
            return torch.zeros(n, dtype=torch.long)
        known = {name: index for index, name in enumerate(names)}
        for value in values:
            if str(value) not in known:
                raise UserError(f"{what} '{value}' was not in training: {nearest(str(value), list(names))}")
        return torch.tensor([known[str(value)] for value in values], dtype=torch.long)


def load(path: str | Path, encoder: nn.Module | None = None) -> Run:
    """Read a run folder. A run whose encoder was a module of the user's own needs one of the same shape again."""
    folder = Path(path)
    about, state, private = read_model(folder)
    settings = checked(Settings, about["settings"])
    cohort = _names_only(about)
    if settings.encoder == CUSTOM_ENCODER and encoder is None:
        raise UserError(f"the run in {folder} has an encoder of its own: give load(path, encoder=...) the same module.")
    model, _ = build_model(
        cohort,
        encoder if encoder is not None else settings.encoder,
        k=settings.k,
        bias=settings.bias,
        seed=settings.seed,
        dtype=getattr(torch, settings.dtype),
    )
    metrics = folder / METRICS_FILE
    history = read_metrics(metrics) if metrics.exists() else pd.DataFrame(columns=METRICS_COLUMNS)
    return Run(
        settings,
        model,
        cohort,
        state,
        private,
        about["round"],
        METHODS[about["method"]],
        history,
        about["fingerprint"],
    )


CUSTOM_ENCODER = "custom"


def read_model(folder: Path) -> tuple[dict[str, Any], Tensors, dict[str, Tensors]]:
    """Read the model file: facts, parameters, and what belongs to each client."""
    path = folder / MODEL_FILE
    if not path.exists():
        raise UserError(f"there is no run in {folder}: {MODEL_FILE} is missing.")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["feddar"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise UserError(
            f"the checkpoint {path} is damaged ({error}): restore it from a copy, or delete the folder and train again."
        ) from None
    if about["format"] != FORMAT:
        raise UserError(f"{path} has format {about['format']}, and this version of feddar reads format {FORMAT}.")
    state = {name.removeprefix("server/"): value for name, value in tensors.items() if name.startswith("server/")}
    private: dict[str, Tensors] = {}
    for index, client in enumerate(about["clients"]):
        prefix = f"client/{index}/"
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if own:
            private[client] = own
    return about, state, private


def read_metrics(path: Path) -> pd.DataFrame:
    """Read metrics.csv exactly as it was written."""
    exact = {"value": lambda text: float(text or "nan")}
    return pd.read_csv(path, dtype={"name": str}, keep_default_na=False, converters=exact)


def versions() -> dict[str, str]:
    """Return the versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("feddar", "torch", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full disk or a read-only folder into one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write to {folder}: {reason}; choose another folder with --out.") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it takes the place of ``path``, on failure it is gone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _names_only(about: dict[str, Any]) -> Cohort:
    """Make a cohort that carries names, counts and input shapes, but no data."""
    counts = torch.tensor(about["counts"])
    cells = torch.nonzero(counts)
    repeats = counts[cells[:, 0], cells[:, 1]]
    client, domain = cells.repeat_interleave(repeats, dim=0).unbind(1)
    n = len(client)
    classes: tuple[Scalar, ...] | None = None if about["classes"] is None else tuple(about["classes"])
    x = tuple(torch.zeros(1, *shape).expand(n, *shape) for shape in about["inputs"])
    y = torch.zeros(n, dtype=torch.float32 if classes is None else torch.long)
    cohort = Cohort(x, y, domain, client, tuple(about["domains"]), tuple(about["clients"]))
    return replace(cohort, classes=classes)
