"""Exports a trained run as one ONNX file, for use without feddar: encoders and heads, with the domain as an input.

Its inputs are those of the model, raw as in a table (standardisation, gaps and embeddings are part of the encoder),
then ``domain``, and ``client`` if the method has parameters of its own for each client: both are indices into lists of
names. These lists and a description of the inputs are in the file's metadata as JSON, under ``feddar``. Before the file
gets its name, onnxruntime's predictions are compared with the run's.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddar.data.cohort import Cohort
from feddar.data.layout import Input
from feddar.errors import TrainingError, UserError, one_line
from feddar.methods import nearest
from feddar.models.encoders.tabular import Standardise
from feddar.models.model import Model, choose, in_precision, scores
from feddar.models.parameters import Tensors, key_of
from feddar.objectives.labels import TRUTH
from feddar.results.run import Run
from feddar.results.run_folder import replacing, versions, writing

TOLERANCE = 1e-5
MOST_ENCODERS = 32
"""The limit of encoders in a file: each of them is computed for every sample."""
MOST_BYTES = 2_000_000_000
"""The size limit of an ONNX file."""


@dataclass(frozen=True)
class Exported:
    """An exported file, and how well it agrees with the run."""

    path: Path
    difference: float
    """The largest difference between its predictions and the run's, relative to the largest prediction if above 1."""
    encoders: int


def export(run: Run, path: str | Path, client: str | None = None) -> Exported:
    """Write a run as an ONNX file, or only the model of one client, and check the file against the run."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file for the model, such as {path / 'model.onnx'}.")
    if path.suffix.lower() != ".onnx":
        raise UserError(f"{path} is not the name of an ONNX file: let it end in .onnx.")
    if client is not None and client not in run.cohort.clients:
        raise UserError(f"client '{client}' was not in training: {nearest(client, list(run.cohort.clients))}")
    model = ExportedModel(run, client)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            _write(model, temporary)
            difference = largest_difference(temporary, model, run)
            if not difference <= TOLERANCE:
                raise TrainingError(
                    f"{path} was not written: onnxruntime's predictions differ from the run's by {difference:.1e}, and "
                    f"{TOLERANCE} is allowed; please report this with the encoder."
                )
    return Exported(path, difference, len(model.bodies))


@dataclass(frozen=True)
class FileInput:
    """An input of the file; its shape is without the first dimension, the samples."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ExportedModel(nn.Module):
    """All encoders and heads of a run as one module, which selects them by client and domain.

    A cell is a pair of client and domain; ``encoder_of`` and ``head_of`` are the indices of each cell's encoder and
    head. Encoders and heads that cells share are stored once.
    """

    heads: Tensor
    target: Tensor
    encoder_of: Tensor
    head_of: Tensor

    def __init__(self, run: Run, client: str | None = None) -> None:
        super().__init__()
        personal = run.method.personal
        # Offsets go into the file of one client; without one, the file has the common model.
        only = client if run.method.keeps_own else None
        self.clients = (only,) if only is not None else run.cohort.clients if personal else ()
        self.by_client = personal and client is None
        self.domains = run.cohort.domains
        self.about = _about(run, only)
        encoders, heads, encoder_of, head_of = _cells(run, self.clients)
        _require_manageable(encoders, self.by_client)
        self.model = _exportable(run.model)
        self.bodies = nn.ModuleList(_loaded(self.model.body, tensors) for tensors in encoders)
        self.register_buffer("heads", torch.stack(heads).to(self.model.dtype))
        units = run.state.in_use.target
        units = torch.tensor([0.0, 1.0]) if units is None else units
        self.register_buffer("target", units.to(self.model.dtype))
        self.register_buffer("encoder_of", torch.tensor(encoder_of))
        self.register_buffer("head_of", torch.tensor(head_of))
        self.inputs = _inputs(run.cohort, self.model.dtype)
        self.outputs = ("prediction",) if run.model.objective.in_units else ("probabilities", "label")
        self.about["inputs"] = [_described(each) for each in self.given]
        self.eval().requires_grad_(False)

    @property
    def given(self) -> tuple[FileInput, ...]:
        """All inputs of the file in their order, with ``domain`` and ``client`` last."""
        who = ("domain", "client") if self.by_client else ("domain",)
        return *self.inputs, *(FileInput(name, torch.int64, ()) for name in who)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return probabilities [n, classes] and the most probable class [n], or numbers [n].

        For an index of a domain or client outside its list, the result is NaN, and the class -1.
        """
        x = in_precision(given[: len(self.inputs)], self.model.dtype)
        domain = given[len(self.inputs)]
        client = given[-1] if self.by_client else torch.zeros_like(domain)
        known = (domain >= 0) & (domain < len(self.domains)) & (client >= 0) & (client < max(1, len(self.clients)))
        domain, client = domain.where(known, 0), client.where(known, 0)
        cell = client * len(self.domains) + domain
        features = [replace(self.model, body=body).features(x, domain) for body in self.bodies]
        chosen = features[0] if len(features) == 1 else choose(torch.stack(features, 1), self.encoder_of[cell])
        predicted = self.model.objective.predictions(scores(chosen, self.heads, self.head_of[cell]))
        if predicted.ndim == 1:
            predicted = self.target[0] + self.target[1] * predicted
            return (predicted.where(known, torch.nan),)
        decided, shown = self.model.objective.decisions(predicted), known[:, None]
        return predicted.where(shown, torch.nan), decided.where(known if decided.ndim == 1 else shown, -1)


def _cells(run: Run, clients: Sequence[str]) -> tuple[list[Tensors], list[Tensor], list[int], list[int]]:
    """Return the distinct encoders and heads of a run, and which of them each client and domain uses."""
    encoders: dict[tuple[int, ...], Tensors] = {}
    heads: dict[int, Tensor] = {}
    encoder_of, head_of = [], []
    domains = len(run.cohort.domains)
    encoder_scope, head_scope = run.method.used
    for client in clients or ("",):
        parts = run.used_at(client)
        for domain in range(domains):
            encoder = parts.encoder(key_of(encoder_scope, domain))
            head = parts.heads[key_of(head_scope, domain)]
            # Shared parameters are the same tensor in memory, so they need not be compared by value.
            same = tuple(map(id, encoder.values()))
            encoders.setdefault(same, encoder)
            heads.setdefault(id(head), head)
            encoder_of.append(list(encoders).index(same))
            head_of.append(list(heads).index(id(head)))
    return list(encoders.values()), list(heads.values()), encoder_of, head_of


def _require_manageable(encoders: Sequence[Tensors], by_client: bool) -> None:
    size = sum(value.nbytes for tensors in encoders for value in tensors.values())
    if len(encoders) > MOST_ENCODERS or size > MOST_BYTES:
        advice = "; export what one client uses, with --client NAME" * by_client
        raise UserError(
            f"this run has {len(encoders):,} encoders with {size / 1e6:,.0f} MB of weights, and a file takes at most "
            f"{MOST_ENCODERS} and {MOST_BYTES / 1e6:,.0f} MB{advice}."
        )


def _exportable(model: Model) -> Model:
    """Return the model in a precision that onnxruntime supports: it has no convolutions in float64."""
    convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.body.modules())
    dtype = torch.float32 if convolves else model.dtype
    return replace(model, body=copy.deepcopy(model.body).to(dtype), dtype=dtype)


def _loaded(body: nn.Module, tensors: Tensors) -> nn.Module:
    loaded = copy.deepcopy(body)
    loaded.load_state_dict(tensors)
    return loaded


def _inputs(cohort: Cohort, dtype: torch.dtype) -> tuple[FileInput, ...]:
    """Return the inputs, named by their kind if these names are distinct, else x1, x2, ..."""
    names = ["x" if part.kind == "other" else part.kind for part in cohort.layout]
    if len(set(names)) < len(names):
        names = [f"x{i + 1}" for i in range(len(names))]
    return tuple(
        FileInput(name, _file_type(part, dtype), part.shape) for name, part in zip(names, cohort.layout, strict=True)
    )


def _file_type(part: Input, dtype: torch.dtype) -> torch.dtype:
    """Return the type of an input in the file: floats in the model's precision, and level numbers as int64."""
    return dtype if part.dtype.is_floating_point else torch.int64 if part.kind == "categories" else part.dtype


def _described(given: FileInput) -> dict[str, Any]:
    return {"name": given.name, "type": str(given.dtype).removeprefix("torch."), "shape": ["n", *given.shape]}


def _about(run: Run, client: str | None) -> dict[str, Any]:
    """Return the metadata that a user of the file needs."""
    cohort = run.cohort
    return {
        "feddar": versions()["feddar"],
        "method": run.settings.method,
        "rounds": run.round,
        **cohort.objective.facts(),
        "domains": cohort.domains,
        "clients": cohort.clients if run.method.personal and client is None else None,
        "client": client,
        "classes": cohort.classes,
        "columns": None if cohort.columns is None else [asdict(column) for column in cohort.columns],
        "truth": TRUTH,
    }


def _write(model: ExportedModel, path: Path) -> None:
    """Write the ONNX file with our metadata, and without the exporter's, which contains paths of this machine."""
    try:
        import onnxruntime  # noqa: F401 - missing packages are reported before the work begins
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError("exporting needs more packages: pip install 'feddar[onnx]'.") from error
    names = [each.name for each in model.given]
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                _captured(model),
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=model.outputs,
                dynamic_shapes=(tuple({0: "n"} for _ in names),),
            )
    except Exception as error:
        raise TrainingError(f"this model's encoder cannot be written as ONNX: {one_line(error)}") from error
    graph = program.model.graph
    for part in (program.model, graph, *graph.all_nodes(), *graph.initializers.values()):
        part.metadata_props.clear()
    program.model.metadata_props["feddar"] = json.dumps(model.about, ensure_ascii=False)
    program.model.producer_name, program.model.producer_version = "feddar", model.about["feddar"]
    program.save(path, external_data=False)


def _captured(model: ExportedModel) -> torch.export.ExportedProgram:
    """Return the model as a graph for batches of any size."""
    example = _draw(model, 3, torch.Generator().manual_seed(0))
    any_number: Any = (tuple({0: torch.export.Dim("n")} for _ in example),)
    try:
        return torch.export.export(model, example, dynamic_shapes=any_number)
    except Exception:
        # Strict mode supports len(x), which a user's encoder may contain, but less of Python otherwise.
        return torch.export.export(model, example, dynamic_shapes=any_number, strict=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings and logs, which are for its developers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def largest_difference(path: Path, model: ExportedModel, run: Run) -> float:
    """Return the largest difference between file and run, on random samples of every domain and client."""
    generator = torch.Generator().manual_seed(1)
    sizes = (1, 2, 7, max(len(model.domains), len(model.clients)))
    batches = [_draw(model, n, generator) for n in sizes]
    differences = []
    for given, found in zip(batches, _predictions(path, model, batches), strict=True):
        expected = _expected(run, model, given)
        differences.append(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    return float(np.max(differences))


def _predictions(path: Path, model: ExportedModel, batches: Sequence[tuple[Tensor, ...]]) -> list[NDArray[Any]]:
    """Return onnxruntime's predictions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # no logging: errors are raised as exceptions anyway
    names = [each.name for each in model.given]
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feeds = [dict(zip(names, (part.numpy() for part in given), strict=True)) for given in batches]
        return [session.run(list(model.outputs), each)[0] for each in feeds]
    except Exception as error:
        raise TrainingError(f"onnxruntime cannot run this model: {one_line(error)}") from error


def _expected(run: Run, model: ExportedModel, given: tuple[Tensor, ...]) -> NDArray[np.float64]:
    """Return the predictions of the run itself."""
    x, domain = given[: len(model.inputs)], given[len(model.inputs)]
    client = given[-1] if model.by_client else torch.zeros_like(domain)
    names = np.array(model.clients)[client.numpy()] if model.clients else None
    predicted: NDArray[np.float64] = run.model.objective.predictions(run.scores(x, domain, names).double()).numpy()
    return predicted


def _draw(model: ExportedModel, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw random samples: numbers around the means of training, with gaps, and of all levels and domains."""
    counts = {"domain": len(model.domains), "client": len(model.clients)}
    return tuple(
        torch.randperm(n, generator=generator) % counts[each.name]
        if each.name in counts
        else _drawn_input(each, model, n, generator)
        for each in model.given
    )


def _drawn_input(given: FileInput, model: ExportedModel, n: int, generator: torch.Generator) -> Tensor:
    columns = model.about["columns"] or []
    shape = (n, *given.shape)
    if given.name == "categories":
        levels = [len(column["levels"]) for column in columns if column["kind"] == "category"]
        return torch.stack([torch.randint(0, count + 1, (n,), generator=generator) for count in levels], dim=1)
    if not given.dtype.is_floating_point:
        return torch.randint(0, 256, shape, generator=generator).to(given.dtype)
    values = torch.randn(shape, generator=generator, dtype=given.dtype)
    if given.name == "numbers":
        for layer in model.bodies[0].modules():
            if isinstance(layer, Standardise):
                values = values * layer.scale + layer.mean
                missing = torch.rand(n, len(layer.gaps), generator=generator) < 0.3
                values[:, layer.gaps] = values[:, layer.gaps].masked_fill(missing, torch.nan)
    return values
