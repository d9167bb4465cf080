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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from feddar.algorithm.client import Phase, predict
from feddar.data.cohort import Cohort, Scalar, as_inputs, cells_of, table_inputs
from feddar.data.columns import Column
from feddar.data.images import Scaling
from feddar.errors import RowError, UserError
from feddar.evaluation.metrics import evaluate, last_rounds
from feddar.lazy import pandas as pd
from feddar.methods import Method, there_are
from feddar.models.heads import as_scores, probabilities
from feddar.models.model import Model, Tensors, build_model, in_precision
from feddar.results.prediction import Named, Predicted
from feddar.settings import DataSettings, Settings, Unknown, checked, write_config

if TYPE_CHECKING:
    from feddar.results.onnx_export import Exported

MODEL_FILE, METRICS_FILE, CONFIG_FILE = "model.safetensors", "metrics.csv", "config.toml"
METRICS_COLUMNS = ["round", "split", "scope", "name", "metric", "value", "count"]
FORMAT = 3


@dataclass(repr=False)
class Run:
    """Parameters after ``round`` rounds, and how they came about."""

    settings: Settings
    model: Model
    cohort: Cohort
    """What was trained on; that of a loaded run has names, counts and shapes, but no values."""
    state: Tensors
    private: dict[str, Tensors]
    round: int
    method: Method
    """The row in force after that round (during warm-up, FedAvg)."""
    history: pd.DataFrame
    fingerprint: str

    @classmethod
    def begin(cls, settings: Settings, model: Model, cohort: Cohort, initial: Tensors, fingerprint: str) -> Run:
        """Return a run before its first round."""
        history = pd.DataFrame(columns=METRICS_COLUMNS)
        return cls(settings, model, cohort, initial, {}, 0, settings.row_in(1), history, fingerprint)

    def __repr__(self) -> str:
        return f"Run({self.settings.method}, {self.round} of {self.settings.rounds} rounds, {self.cohort!r})"

    def predict_proba(self, x: Any, domain: Any = None, client: Any = None, **unknown: str) -> NDArray[np.floating]:
        """Return probabilities [n, classes] in the order of ``cohort.classes``; for ``unknown``, see ``predict``."""
        if self.cohort.classes is None:
            raise UserError("this model predicts a number, not classes: use predict.")
        return self._predicted(x, domain, client, unknown).values

    def predict(self, x: Any, domain: Any = None, client: Any = None, **unknown: str) -> NDArray[Any]:
        """Return predicted labels, or numbers for regression.

        ``domain`` and ``client`` are one name for all samples or a name for each; they are needed where the method
        uses them. A name that was not in training, or a missing one, is an error, unless ``unknown_domain`` or
        ``unknown_client`` is ``"average"``: then the mean of all domains' or clients' predictions answers, each
        weighted by its samples in training. A category's value that was not in training is an error too, unless
        ``unknown_category`` is ``"missing"``.
        """
        return self.labels(self._predicted(x, domain, client, unknown).values)

    def predictions(self, x: Any, domain: Any = None, client: Any = None, **unknown: str) -> pd.DataFrame:
        """Return all there is to say of each sample, a row each; arguments as for ``predict``.

        Columns: ``domain_used`` (empty where the domain is unknown or not used), ``head`` (what answered: a domain's
        name, ``all``, ``client NAME`` or ``average of N``), ``class`` and ``probability_CLASS`` of each class, or
        ``prediction``, and ``note`` (what training did not know; else empty).
        """
        return self._predicted(x, domain, client, unknown).frame(self)

    def evaluate(self, test: Cohort) -> pd.DataFrame:
        """Return metrics by domain and client, after the last round: scope, name, metric, value, count."""
        aligned = test.aligned_to(self.cohort)
        return evaluate(aligned, self.scores(aligned.x, aligned.domain, aligned.client_names))

    def results(self) -> pd.DataFrame:
        """Return the test metrics of training, averaged over the last rounds as the settings say."""
        return last_rounds(self.history, self.settings.last)

    def scores(self, x: tuple[Tensor, ...], domain: Tensor, client: NDArray[np.str_] | None) -> Tensor:
        """Score samples [n, outputs]; see ``answers``."""
        return self.answers(x, domain, client)[0]

    def answers(
        self, x: tuple[Tensor, ...], domain: Tensor, client: NDArray[np.str_] | None
    ) -> tuple[Tensor, NDArray[np.object_]]:
        """Score samples [n, outputs] by the head of their domain, or their client's model, and name what scored them.

        A domain of -1 is unknown: the mean of all domains' predictions, by their samples, takes its place. For a
        client that was not in training, it is what ``Method.for_unseen_client`` says.
        """
        x = in_precision(x, self.model.dtype)
        if not self.method.personal:
            return self._common_answers(x, domain)
        if client is None:
            raise UserError(f"{self.method.name} has a part of its own at each client: give client=... as well.")
        scores = torch.zeros(len(domain), self.model.outputs, dtype=self.model.dtype)
        heads: NDArray[np.object_] = np.full(len(domain), f"average of {len(self.cohort.clients)}", dtype=object)
        for name in np.unique(client):
            rows = torch.from_numpy(client == name)
            mine, held = tuple(part[rows] for part in x), domain[rows]
            if name in self.cohort.clients:
                scores[rows], heads[rows.numpy()] = self._answers_at(name, mine, held)
            elif self.method.companion:
                scores[rows], heads[rows.numpy()] = self._common_answers(mine, held)
            else:
                each = (self._answers_at(known, mine, held)[0] for known in self.cohort.clients)
                scores[rows] = self._mean_scores(each, self.cohort.counts.sum(1))
        return scores, heads

    def _common_answers(self, x: tuple[Tensor, ...], domain: Tensor) -> tuple[Tensor, NDArray[np.object_]]:
        phase = Phase("evaluate", self.method.encoder, self.method.heads)
        names = self.cohort.domains if "domain" in (phase.encoder, phase.heads) else ["all"] * len(self.cohort.domains)
        return self._answers_by(self.state, phase, x, domain, names)

    def _answers_at(self, client: str, x: tuple[Tensor, ...], domain: Tensor) -> tuple[Tensor, NDArray[np.object_]]:
        own, names = self.state | self.private.get(client, {}), [f"client {client}"] * len(self.cohort.domains)
        return self._answers_by(own, Phase("evaluate", *self.method.used), x, domain, names)

    def _answers_by(
        self, parameters: Tensors, phase: Phase, x: tuple[Tensor, ...], domain: Tensor, names: Sequence[str]
    ) -> tuple[Tensor, NDArray[np.object_]]:
        """Answer with these parameters, whose names by domain are given; for unknown domains, with all of them."""
        unknown = domain < 0
        if not self.needs_domain or not bool(unknown.any()):
            known = domain.clamp_min(0)
            return predict(self.model, phase, parameters, x, known), np.array(names, dtype=object)[known.numpy()]
        samples = self.cohort.counts.sum(0)
        scores = torch.zeros(len(domain), self.model.outputs, dtype=self.model.dtype)
        heads: NDArray[np.object_] = np.full(len(domain), f"average of {int((samples > 0).sum())}", dtype=object)
        asked, rest = (tuple(part[rows] for part in x) for rows in (~unknown, unknown))
        scores[~unknown], heads[~unknown.numpy()] = self._answers_by(parameters, phase, asked, domain[~unknown], names)
        every = (torch.full((len(rest[0]),), m) for m in range(len(samples)))
        each = (predict(self.model, phase, parameters, rest, same) for same in every)
        scores[unknown] = self._mean_scores(each, samples)
        return scores, heads

    def _mean_scores(self, each: Iterable[Tensor], samples: Tensor) -> Tensor:
        """Return scores of the mean prediction of several models, weighted by the samples they were trained on.

        Predictions are averaged, not parameters: that has a meaning for whole models, too.
        """
        task, shares = self.model.task, (samples / samples.sum()).tolist()
        predicted = sum(share * probabilities(task, found.double()) for share, found in zip(shares, each, strict=True))
        return as_scores(task, torch.as_tensor(predicted)).to(self.model.dtype)

    def save(self, path: str | Path) -> None:
        """Write the run folder."""
        folder = Path(path)
        with writing(folder):
            self.save_config(folder, None)
            self.save_metrics(folder)
            self.checkpoint(folder)

    def export(self, path: str | Path, client: str | None = None) -> Exported:
        """Write the model as one ONNX file, checked with onnxruntime; with ``client``, what that client uses of it."""
        from feddar.results.onnx_export import export

        return export(self, path, client)

    def save_config(self, folder: Path, source: DataSettings | None) -> None:
        """Make the folder and write config.toml whole: how it was trained and, if known, where the data came from."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {} if source is None else {"data": source}
        with replacing(folder / CONFIG_FILE) as temporary:
            write_config(temporary, **tables, training=self.settings)

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
            "method": asdict(self.method),
            "settings": self.settings.model_dump(),
            "domains": self.cohort.domains,
            "clients": self.cohort.clients,
            "classes": self.cohort.classes,
            "counts": self.cohort.counts.tolist(),
            "columns": None if self.cohort.columns is None else [asdict(column) for column in self.cohort.columns],
            "scaling": None if self.cohort.scaling is None else asdict(self.cohort.scaling),
            "inputs": [{"shape": part.shape[1:], "dtype": str(part.numpy().dtype)} for part in self.cohort.x],
            "fingerprint": self.fingerprint,
            "versions": versions(),
        }
        with replacing(folder / MODEL_FILE) as temporary:
            tensors = {name: value.contiguous() for name, value in tensors.items()}
            save_file(tensors, temporary, metadata={"feddar": json.dumps(about)})

    @property
    def needs_domain(self) -> bool:
        """Whether a prediction depends on the domain."""
        return self.method.domain_input or "domain" in self.method.used

    def _predicted(self, x: Any, domain: Any, client: Any, unknown: dict[str, str]) -> Predicted:
        allowed = checked(Unknown, unknown)
        table = x.rename(columns=str) if self.cohort.columns is not None and isinstance(x, pd.DataFrame) else None
        inputs = self._inputs(x if table is None else table, allowed)
        n = len(inputs[0])
        if domain is None and len(self.cohort.domains) > 1 and self.needs_domain:
            raise UserError(f"give the domain of each sample as domain=...; {there_are(self.cohort.domains)}")
        domains = Named.of("domain", domain if self.needs_domain else None, n, self.cohort.domains, allowed)
        client = self.cohort.clients[0] if client is None and len(self.cohort.clients) == 1 else client
        clients = Named.of("client", client if self.method.personal else None, n, self.cohort.clients, allowed)
        holders = None if client is None or not self.method.personal else clients.given.astype(str)
        scores, heads = self.answers(inputs, domains.index, holders)
        values = probabilities(self.model.task, scores.double()).numpy()
        bad = ~np.isfinite(values if values.ndim == 1 else values.sum(1))
        if bad.any():
            raise RowError("the model gives no number here: a value is missing or too large.", int(bad.argmax()))
        return Predicted(values, table, domains, clients, heads)

    def _inputs(self, x: Any, allowed: Unknown) -> tuple[Tensor, ...]:
        """Return the inputs of the encoder, as they were made in training."""
        dtype, columns = self.model.dtype, self.cohort.columns
        if columns is not None and isinstance(x, pd.DataFrame):
            inputs = table_inputs(x, columns, dtype, to_learn=False, unknown=allowed.unknown_category)
        else:
            inputs = tuple(as_inputs(part, dtype, to_learn=False) for part in (x if isinstance(x, tuple) else (x,)))
        shapes, expected = ([tuple(part.shape[1:]) for part in given] for given in (inputs, self.cohort.x))
        if shapes != expected:
            raise UserError(f"x has samples of shape {shapes}, and the model was trained on {expected}.")
        return inputs

    def labels(self, values: NDArray[np.floating]) -> NDArray[Any]:
        """Return the most probable class of each sample; for regression, the number itself."""
        if self.cohort.classes is None:
            return values
        kinds = {type(name) for name in self.cohort.classes}
        names = np.array(self.cohort.classes, dtype=None if len(kinds) == 1 else object)
        labels: NDArray[Any] = names[values.argmax(1)]
        return labels


def load(path: str | Path, encoder: nn.Module | None = None) -> Run:
    """Read a run folder. A run whose encoder was a module of the user's own needs one of the same shape again."""
    folder = Path(path)
    about, state, private = read_model(folder)
    settings = checked(Settings, about["settings"])
    cohort = _described(about)
    if settings.encoder == CUSTOM_ENCODER and encoder is None:
        raise UserError(f"the run in {folder} has an encoder of its own: give load(path, encoder=...) the same module.")
    model, _ = build_model(cohort, encoder if encoder is not None else settings.encoder, settings.trained())
    require_same_shapes(model, state, private, folder)
    metrics = folder / METRICS_FILE
    history = read_metrics(metrics) if metrics.exists() else pd.DataFrame(columns=METRICS_COLUMNS)
    return Run(
        settings,
        model,
        cohort,
        state,
        private,
        about["round"],
        Method(**about["method"]),
        history,
        about["fingerprint"],
    )


CUSTOM_ENCODER = "custom"


def require_same_shapes(model: Model, state: Tensors, private: dict[str, Tensors], folder: Path) -> None:
    """Refuse a stored encoder that the model's encoder cannot take."""
    expected = {name: value.shape for name, value in model.body.state_dict().items()}
    for tensors in (state, *private.values()):
        for name, value in tensors.items():
            if name.startswith("encoder/") and expected.get(name.split("/", 2)[2]) != value.shape:
                raise UserError(f"the run in {folder} has another encoder: '{name}' does not fit the one given.")


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


def read_metrics(path: Path, columns: Sequence[str] = METRICS_COLUMNS) -> pd.DataFrame:
    """Read metrics.csv, or another table of figures with these columns, exactly as it was written."""
    exact = {"value": lambda text: float(text or "nan")}
    try:
        frame = pd.read_csv(path, dtype={"name": str}, keep_default_na=False, converters=exact)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the metrics in {path}: {error}; restore the file or train again.") from None
    absent = [name for name in columns if name not in frame.columns]
    if absent:
        raise UserError(f"{path} has no column '{absent[0]}' of {', '.join(columns)}: restore the file or train again.")
    return frame


def versions() -> dict[str, str]:
    """Return the versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("feddar", "torch", "numpy", "pandas"):
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
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def names_only(
    domains: Sequence[str],
    clients: Sequence[str],
    classes: Sequence[Scalar] | None,
    counts: Tensor,
    inputs: Sequence[tuple[Sequence[int], str]],
) -> Cohort:
    """Make a cohort that carries names, counts [client, domain] and input shapes, but no data."""
    client, domain = cells_of(counts)
    n = len(client)
    x = tuple(torch.zeros(1, *shape, dtype=getattr(torch, dtype)).expand(n, *shape) for shape, dtype in inputs)
    y = torch.zeros(n, dtype=torch.float32 if classes is None else torch.long)
    return Cohort(
        x, y, domain, client, tuple(domains), tuple(clients), classes=None if classes is None else tuple(classes)
    )


def _described(about: dict[str, Any]) -> Cohort:
    """Make the cohort that a model file describes."""
    inputs = [(part["shape"], part["dtype"]) for part in about["inputs"]]
    names = about["domains"], about["clients"], about["classes"]
    columns = about["columns"] and tuple(
        Column(**{**each, "levels": tuple(each["levels"])}) for each in about["columns"]
    )
    scaling = about["scaling"] and Scaling(**{name: tuple(values) for name, values in about["scaling"].items()})
    return replace(names_only(*names, torch.tensor(about["counts"]), inputs), columns=columns, scaling=scaling)
