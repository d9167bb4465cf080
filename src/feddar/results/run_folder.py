"""The folder of a run, and how its files are read and written.

``config.toml`` is the resolved configuration, ``metrics.csv`` has the columns round, split, scope, name, metric, value,
count, and grows by the rows of each round, and ``model.safetensors`` has the parameters, each client's own state, and
in its header, as JSON, a description of data and software. The last is both checkpoint and final model: names that
begin with ``server/`` and ``client/`` are the model in use and, if validation has chosen an earlier round than the
last, those under ``training/`` are what training goes on from. It is written to a temporary name and renamed, so that
it is complete at every moment, and no pickle is ever loaded.
"""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from feddar.algorithm.names import named_own, named_state, own_from, state_from
from feddar.algorithm.protocol import OwnState
from feddar.algorithm.rounds import Best, Position, Standing
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort, cells_of
from feddar.data.columns import Column
from feddar.data.domain_structure import factors_of, structure_of
from feddar.data.images import Scaling
from feddar.data.layout import Input
from feddar.errors import UserError
from feddar.lazy import pandas as pd
from feddar.methods import Method
from feddar.models.model import Model
from feddar.models.parameters import Tensors
from feddar.objectives import Objective, from_facts, with_classes
from feddar.results.csv_files import without_guards, write_csv

MODEL_FILE, METRICS_FILE = "model.safetensors", "metrics.csv"
REFERENCES_FILE = "references.csv"
RUN_FILE = "run.json"
"""What a coordinator writes down of a run between sites: its name, the study's digest, and notes."""
METRICS_COLUMNS = ["round", "split", "scope", "name", "metric", "value", "count"]
FORMAT = 5
READABLE = (3, 4, 5)
"""Formats of model files that can be read; version 0.1 wrote 3, in which only classes describe the outcome, and before
5 there was no validation."""
TRAINING = "training/"
LOCK_FILE = ".training"


def notes_in(folder: Path) -> list[str]:
    """Return what a coordinator has noted of its run for those who read the results."""
    path = folder / RUN_FILE
    return list(json.loads(path.read_text(encoding="utf-8")).get("notes", [])) if path.exists() else []


def cohort_facts(cohort: Cohort) -> dict[str, Any]:
    """Return the description of the training data for a model file: names, counts and shapes."""
    return {
        "domains": cohort.domains,
        "clients": cohort.clients,
        "objective": cohort.objective.facts(),
        "classes": cohort.classes,
        "counts": cohort.counts.tolist(),
        "notes": cohort.notes,
        "columns": None if cohort.columns is None else [asdict(column) for column in cohort.columns],
        "scaling": None if cohort.scaling is None else asdict(cohort.scaling),
        "factors": factors_of(cohort.structure),
        "inputs": [{"shape": part.shape[1:], "dtype": str(part.dtype).removeprefix("torch.")} for part in cohort.x],
    }


def described_cohort(about: Mapping[str, Any]) -> Cohort:
    """Return the cohort, without data, that a model file describes."""
    inputs = [Input("other", tuple(part["shape"]), getattr(torch, part["dtype"])) for part in about["inputs"]]
    columns = about["columns"] and tuple(
        Column(**{**each, "levels": tuple(each["levels"])}) for each in about["columns"]
    )
    scaling = about["scaling"] and Scaling(**{name: tuple(values) for name, values in about["scaling"].items()})
    names = about["domains"], about["clients"], objective_in(about)
    described = names_only(*names, torch.tensor(about["counts"]), inputs)
    notes, structure = tuple(about["notes"]), structure_of(about["factors"])
    return replace(described, columns=columns, scaling=scaling, notes=notes, structure=structure)


def objective_in(about: Mapping[str, Any]) -> Objective:
    """Return the objective that a model file describes."""
    classes = about["classes"]
    return from_facts(about["objective"]) if "objective" in about else with_classes(classes and tuple(classes))


def names_only(
    domains: Sequence[str],
    clients: Sequence[str],
    objective: Objective,
    counts: Tensor,
    inputs: Sequence[Input],
) -> Cohort:
    """Return a cohort with names, counts [client, domain] and input shapes, but without data."""
    client, domain = cells_of(counts)
    n = len(client)
    x = tuple(torch.zeros(1, *part.shape, dtype=part.dtype).expand(n, *part.shape) for part in inputs)
    return Cohort(x, objective.blank(n), domain, client, tuple(domains), tuple(clients), objective)


class Stored(NamedTuple):
    """The content of a model file."""

    about: dict[str, Any]
    """The description of data, settings and software; ``round`` and ``method`` are those of the model in use."""
    state: ServerState
    """The server's state of the model in use."""
    own: dict[str, OwnState]
    """Each client's own state, which belongs to it."""
    standing: Standing
    """Where training stands."""


def write_model(folder: Path, own: Mapping[str, OwnState], standing: Standing, about: dict[str, Any]) -> None:
    """Write the model file atomically: the model in use, with its clients' ``own``, and where training stands.

    ``about["clients"]`` has the clients in the order of their indices.
    """
    position = standing.position
    used = position.best or position
    tensors = _named_model(used.state, own, about["clients"])
    if used.round != position.round:
        later = _named_model(position.state, standing.own, about["clients"])
        # What training leaves as it was, such as units, is one tensor in both, and safetensors refuses shared ones.
        tensors |= {f"{TRAINING}{name}": value.clone() for name, value in later.items()}
    training = None
    if position.best is not None:
        training = {"round": position.round, "method": asdict(position.method), "best_loss": position.best.loss}
    facts = {"round": used.round, "method": asdict(used.method), "training": training}
    about = {"format": FORMAT, **about, **facts, "versions": versions()}
    with replacing(folder / MODEL_FILE) as temporary:
        whole = {name: value.contiguous() for name, value in tensors.items()}
        save_file(whole, temporary, metadata={"feddar": json.dumps(about)})


def _named_model(state: ServerState, own: Mapping[str, OwnState], clients: Sequence[str]) -> Tensors:
    tensors = {f"server/{name}": value for name, value in named_state(state).items()}
    for number, client in enumerate(clients):
        kept = named_own(own[client]) if client in own else {}
        tensors |= {f"client/{number}/{name}": value for name, value in kept.items()}
    return tensors


def read_model(folder: Path) -> Stored:
    """Read the model file: the description, the model in use, and where training stands."""
    about, tensors = _read(folder / MODEL_FILE, with_tensors=True)
    state, own = _model_named(tensors, about["clients"])
    position = Position(about["round"], Method(**about["method"]), state)
    training = about["training"]
    if training is None:
        return Stored(about, state, own, Standing(position, own))
    best = Best(position.round, training["best_loss"], position.method, state)
    if training["round"] == best.round:
        return Stored(about, state, own, Standing(replace(position, best=best), own))
    later, kept = _model_named(_under(tensors, TRAINING), about["clients"])
    position = Position(training["round"], Method(**training["method"]), later, best)
    return Stored(about, state, own, Standing(position, kept))


def refuse_comparison(folder: Path) -> None:
    """Refuse the folder of a comparison where one run is wanted; the error names one."""
    inside = sorted(folder.glob(f"runs/*/*/{MODEL_FILE}"))
    if inside and not (folder / MODEL_FILE).exists():
        raise UserError(f"{folder} holds a comparison: name one of its runs, such as {inside[0].parent}.")


def read_description(folder: Path) -> dict[str, Any]:
    """Read the description in a model file, without its tensors."""
    return _read(folder / MODEL_FILE, with_tensors=False)[0]


def rounds_done(about: Mapping[str, Any]) -> int:
    """Return how many rounds were trained, by the description in a model file."""
    return int((about.get("training") or about)["round"])


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, Any], Tensors]:
    if not path.exists():
        raise UserError(f"there is no run in {path.parent}: {MODEL_FILE} is missing.")
    if not os.access(path, os.R_OK):
        raise UserError(f"you may not read {path}: ask its owner for it.")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["feddar"])
            names = file.keys() if with_tensors else ()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise UserError(
            f"the checkpoint {path} is damaged ({error}): restore it from a copy, or delete the folder and train again."
        ) from None
    if about["format"] not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise UserError(f"{path} has format {about['format']}, and this version of feddar reads formats {known}.")
    return _todays(about), tensors


def _todays(about: dict[str, Any]) -> dict[str, Any]:
    """Return the description in a model file with what older formats do not say: the defaults of their time."""
    settings = about["settings"]
    if about["format"] == 3 and about["method"]["credible"] and settings["credibility"] is None:
        settings = settings | {"credibility": True}  # the default of version 0.1
    older = {"validation": 0.0, "schedule": "constant"}
    if about["format"] < 5 and settings["encoder"] is None and all(len(part["shape"]) == 1 for part in about["inputs"]):
        settings = settings | {"encoder": "mlp"}
    return {"training": None, "notes": [], "factors": None, **about, "settings": older | settings}


def _model_named(tensors: Tensors, clients: Sequence[str]) -> tuple[ServerState, dict[str, OwnState]]:
    """Undo ``_named_model``."""
    kept: defaultdict[int, Tensors] = defaultdict(dict)
    for name, value in _under(tensors, "client/").items():
        number, _, own = name.partition("/")
        kept[int(number)][own] = value
    return state_from(_under(tensors, "server/")), {clients[number]: own_from(kept[number]) for number in sorted(kept)}


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def require_same_shapes(model: Model, stored: Stored, folder: Path) -> None:
    """Refuse a stored encoder whose parameters do not have the shapes of the model's encoder."""
    expected = {name: value.shape for name, value in model.body.state_dict().items()}
    every = [stored.state.in_training, *(each.parameters for each in stored.own.values())]
    for encoder in (encoder for parameters in every for encoder in parameters.encoders.values()):
        for name, value in encoder.items():
            if expected.get(name) != value.shape:
                raise UserError(f"the run in {folder} has another encoder: '{name}' does not fit the one given.")


def append_metrics(folder: Path, rows: pd.DataFrame) -> None:
    """Append rows to metrics.csv, which is created if needed, and wait until they are on the disk."""
    path = folder / METRICS_FILE
    with path.open("a", encoding="utf-8", newline="") as file:
        write_csv(rows, file, header=file.tell() == 0)
        file.flush()
        os.fsync(file.fileno())


def write_metrics(folder: Path, history: pd.DataFrame) -> None:
    """Write metrics.csv, replacing what is there."""
    with replacing(folder / METRICS_FILE) as temporary:
        write_csv(history, temporary)


def read_metrics(path: Path, columns: Sequence[str] = METRICS_COLUMNS) -> pd.DataFrame:
    """Read metrics.csv, or another table with these columns, with exactly the values that were written.

    An incomplete last line, left by a process that was killed, is ignored.
    """
    exact = {"value": lambda text: float(text or "nan")}
    try:
        content = path.read_bytes()  # bytes, since the file may end in the middle of a UTF-8 character
        whole = StringIO(content[: content.rfind(b"\n") + 1].decode(), newline="")
        frame = pd.read_csv(whole, dtype={"name": str}, keep_default_na=False, converters=exact)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the metrics in {path}: {reason}; restore the file or train again.") from None
    absent = [name for name in columns if name not in frame.columns]
    if absent:
        raise UserError(f"{path} has no column '{absent[0]}' of {', '.join(columns)}: restore the file or train again.")
    return without_guards(frame)


def read_history(folder: Path, rounds: int) -> pd.DataFrame:
    """Return the metrics of the first ``rounds`` rounds of a run, which its checkpoint has done."""
    path = folder / METRICS_FILE
    history = read_metrics(path)
    found = int(history["round"].max()) if len(history) else 0
    if found < rounds:
        raise UserError(
            f"{path} ends in round {found}, and the model beside it has done {rounds}: restore the file or train again."
        )
    return history[history["round"] <= rounds].reset_index(drop=True)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in ("feddar", "torch", "numpy", "pandas"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full disk or a read-only folder into a ``UserError`` of one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write to {folder}: {reason}; choose another folder with --out.") from None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine from training into a folder, which is made if there is none.

    Record locks are of one process: workers that are forked do not hold it, so a run that was killed can be resumed at
    once. Where there are none (Windows), nobody is kept out.
    """
    path = folder / LOCK_FILE
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    with lock:
        try:
            with suppress(ImportError):
                import fcntl

                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is training into {folder}: wait for it, or choose another folder with --out."
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it then replaces ``path``, or is deleted if there was an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
