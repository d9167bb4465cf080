"""Exports a trained run as one ONNX file, for use without feddar: encoders and heads, with the domain as an input.

Its inputs are those of the model, raw as in a table (standardisation, gaps and embeddings are part of the encoder),
then ``domain``, and ``client`` if the method has parameters of its own for each client: both are indices into lists of
names. These lists and a description of the inputs are in the file's metadata as JSON, under ``feddar``. Before the file
gets its name, onnxruntime's scores and predictions are compared with the run's, on samples like those of training.
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

from feddar.algorithm.mixture import component_scores
from feddar.algorithm.protocol import Phase
from feddar.data.cohort import Cohort
from feddar.data.domain_structure import factors_of
from feddar.data.layout import Input
from feddar.errors import TrainingError, UserError, one_line
from feddar.methods import nearest
from feddar.models.devices import CPU, move_module
from feddar.models.encoders.tabular import Standardise
from feddar.models.model import Model, choose, in_precision, scores
from feddar.models.parameters import Tensors, key_of, keys
from feddar.objectives.labels import TRUTH
from feddar.results.run import Run
from feddar.results.run_folder import replacing, versions, writing

TOLERANCE = 1e-5
"""The largest difference of predictions, relative to the largest prediction if above 1."""
SCORE_TOLERANCE = 1e-4
"""The largest difference of scores, as a share of their size.

A score is a sum of products, and its size is the sum of their absolute values: it bounds the effect of rounding also
where products cancel out. One rounding changes a score by at most 6e-8 of its size, and two libraries that add in
different orders differ by a few of these for each layer: 2e-7 for tables, 4e-7 for resnet34, 4e-6 for
efficientnet-lite0. Files in float64 differ by 4e-8, since the exporter writes constants of the code in float32. So
deeper encoders have room, and a head that is wrong by a thousandth is found.
"""
SCORES = "scores"
"""The name of the scores in a file; they are not an output of it."""
MOST_IN_BATCH = 256
IMAGE_DIMENSIONS = 3
"""An input with channels, height and width is an image."""
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
    scores: float
    """The same of scores, before the link, as a share of their size."""
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
    model = exported_model(run, client)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            _write(model, temporary)
            found = differences(temporary, model, run)
            if not found.small:
                raise TrainingError(
                    f"{path} was not written: onnxruntime's scores of {found.worst} differ from the run's by "
                    f"{found.scores:.1e} of their size, and predictions by {found.predictions:.1e}, where "
                    f"{SCORE_TOLERANCE} and {TOLERANCE} are allowed; please report this with the encoder."
                )
    return Exported(path, found.predictions, found.scores, len(model.bodies))


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
        self.about = _about(run, only) | {"shares": run.shares_at([client or ""])[0].tolist()}
        encoders, heads, encoder_of, head_of = self._parts(run)
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
        columns = run.cohort.columns or ()
        self.levels = [len(column.levels) for column in columns if column.kind == "category"]
        self.truths = [column.kind == "boolean" for column in columns if column.is_numeric] or [False]
        self.eval().requires_grad_(False)

    def _parts(self, run: Run) -> tuple[list[Tensors], list[Tensor], list[int], list[int]]:
        """Return the distinct encoders and heads of a run, and which of them each client and domain uses."""
        return _cells(run, self.clients)

    @property
    def given(self) -> tuple[FileInput, ...]:
        """All inputs of the file in their order, with ``domain`` and ``client`` last."""
        who = ("domain", "client") if self.by_client else ("domain",)
        return *self.inputs, *(FileInput(name, torch.int64, ()) for name in who)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return probabilities [n, classes] and the most probable class [n], or numbers [n]; the scores are last.

        For an index of a domain or client outside its list, the result is NaN, and the class -1.
        """
        features, head, known = self._features(given)
        scored = self._in_units(scores(features, self.heads, head))
        return *self._answer(self.model.objective.predictions(scored), known), scored

    def _in_units(self, scored: Tensor) -> Tensor:
        return self.target[0] + self.target[1] * scored if self.model.objective.in_units else scored

    def _answer(self, predicted: Tensor, known: Tensor) -> tuple[Tensor, ...]:
        """Return predictions and, of classes, the most probable one; none where domain or client are not known."""
        if predicted.ndim == 1:
            return (predicted.where(known, torch.nan),)
        decided, shown = self.model.objective.decisions(predicted), known[:, None]
        return predicted.where(shown, torch.nan), decided.where(known if decided.ndim == 1 else shown, -1)

    def sizes(self, *given: Tensor) -> Tensor:
        """Return the size of each score [n, outputs]: the sum of the absolute values that it is the sum of."""
        features, head, _ = self._features(given)
        return self.target[0].abs() + self.target[1].abs() * scores(features.abs(), self.heads.abs(), head)

    def expected(self, run: Run, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the scores and the predictions of the run itself."""
        x, domain = given[: len(self.inputs)], given[len(self.inputs)]
        client = given[-1] if self.by_client else torch.zeros_like(domain)
        names = np.array(self.clients)[client.numpy()] if self.clients else None
        found = run.scores(x, domain, names).double()
        return found, run.model.objective.predictions(found)

    def whose(self, given: Sequence[Tensor], sample: int) -> str:
        """Return in words whose encoder and head answer a sample."""
        names = {"domain": self.domains, "client": self.clients}
        who = {each.name: int(part[sample]) for each, part in zip(self.given, given, strict=True) if each.name in names}
        return " of ".join(f"{role} '{names[role][place]}'" for role, place in who.items())

    def _features(self, given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return each sample's features, the index of its head, and whether its domain and client are known."""
        domain, client, known = self._who(given)
        cell, every = client * len(self.domains) + domain, self._encoded(given, domain)
        chosen = every[0] if len(every) == 1 else choose(torch.stack(every, 1), self.encoder_of[cell])
        return chosen, self.head_of[cell], known

    def _who(self, given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return each sample's domain and client, which are 0 where one of them is not known, and whether they are."""
        domain = given[len(self.inputs)]
        client = given[-1] if self.by_client else torch.zeros_like(domain)
        known = (domain >= 0) & (domain < len(self.domains)) & (client >= 0) & (client < max(1, len(self.clients)))
        return domain.where(known, 0), client.where(known, 0), known

    def _encoded(self, given: Sequence[Tensor], domain: Tensor) -> list[Tensor]:
        """Return the features of all samples by each encoder."""
        x = in_precision(tuple(given[: len(self.inputs)]), self.model.dtype)
        return [replace(self.model, body=body).features(x, domain) for body in self.bodies]


class ExportedMixture(ExportedModel):
    """All components of a run that learns them, whose predictions are averaged by shares: a client's, or of all.

    Its scores are those of every component, one after the other.
    """

    mixture: Tensor

    def __init__(self, run: Run, client: str | None = None) -> None:
        super().__init__(run, client)
        shares = run.shares_of_components(client)
        self.about["components"] = shares.tolist()
        self.register_buffer("mixture", shares.to(self.model.dtype))

    def _parts(self, run: Run) -> tuple[list[Tensors], list[Tensor], list[int], list[int]]:
        """Return the encoders and heads of all components; every domain has the same answer."""
        used = run.state.in_use
        encoders = [used.encoder(key) for key in keys(run.method.encoder, used.domains())]
        same = [0] * len(self.domains)
        return encoders, [used.heads[key] for key in keys("domain", used.domains())], same, same

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return probabilities [n, classes] and the most probable class [n], or numbers [n]; the scores are last."""
        domain, _, known = self._who(given)
        every = self._in_units(self._by_component(self._encoded(given, domain), self.heads))
        predicted = [self.model.objective.predictions(each) for each in every.unbind(1)]
        return *self._answer(torch.stack(predicted, -1) @ self.mixture, known), every.flatten(1)

    def sizes(self, *given: Tensor) -> Tensor:
        """Return the size of each score [n, components outputs]: the sum of the absolute values it is the sum of."""
        encoded = [each.abs() for each in self._encoded(given, self._who(given)[0])]
        return (self.target[0].abs() + self.target[1].abs() * self._by_component(encoded, self.heads.abs())).flatten(1)

    def expected(self, run: Run, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the scores of all components and the predictions of the run itself."""
        phase, x = Phase("evaluate", run.method.encoder, run.method.heads), given[: len(self.inputs)]
        learned = component_scores(run.model, phase, run.state.in_use, in_precision(x, run.model.dtype)).double()
        _, predicted = super().expected(run, given)
        return self._in_units(learned).flatten(1), predicted

    def whose(self, given: Sequence[Tensor], sample: int) -> str:
        """Return in words what answers a sample."""
        return "the components"

    def _by_component(self, encoded: Sequence[Tensor], heads: Tensor) -> Tensor:
        """Return the scores of samples by every component, [n, K, outputs]."""
        one = len(encoded) == 1
        return torch.stack([encoded[0 if one else m] @ head.T for m, head in enumerate(heads)], dim=1)


def exported_model(run: Run, client: str | None = None) -> ExportedModel:
    """Return a run, or what one client uses, as one module."""
    return (ExportedMixture if run.method.assigns else ExportedModel)(run, client)


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
    body = copy.deepcopy(model.body)
    move_module(body, CPU)
    return replace(model, body=body.to(dtype), dtype=dtype, device=CPU)


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
        "factors": factors_of(cohort.structure),
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
                output_names=(*model.outputs, SCORES),
                dynamic_shapes=(tuple({0: "n"} for _ in names),),
            )
    except Exception as error:
        raise TrainingError(f"this model's encoder cannot be written as ONNX: {one_line(error)}") from error
    graph = program.model.graph
    graph.outputs.pop()  # the scores, which are there for the check
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


@dataclass(frozen=True)
class Differences:
    """How far a file is from the run, on samples drawn like those of training, for every domain and client in it."""

    scores: float
    """The largest difference of scores (before the link), as a share of their size."""
    predictions: float
    """The largest difference of predictions, relative to the largest prediction if above 1."""
    worst: str
    """Whose scores differ most."""

    @property
    def small(self) -> bool:
        """Whether there is nothing but rounding between file and run; not so where a difference is no number."""
        return self.scores <= SCORE_TOLERANCE and self.predictions <= TOLERANCE


def differences(path: Path, model: ExportedModel, run: Run) -> Differences:
    """Compare a file with the run, by what onnxruntime makes of it."""
    drawn = _draw(model, _samples_to_check(model), torch.Generator().manual_seed(1))
    batches = list(zip(*(part.split(_batches(len(part))) for part in drawn), strict=True))
    found, found_scores = _computed(path, model, batches)
    expected_scores, predicted = model.expected(run, drawn)
    expected = predicted.numpy()
    size = torch.cat([model.sizes(*batch) for batch in batches]).double().numpy()
    apart = np.abs(found_scores - expected_scores.numpy())
    # Heads of zero have scores of zero on both sides.
    shares = np.divide(apart, size, out=np.where(apart == 0, 0.0, np.inf), where=size > 0).max(1)
    worst = int(shares.argmax())  # argmax takes NaN for the largest, as is meant
    apart_after = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
    return Differences(float(shares[worst]), float(apart_after), model.whose(drawn, worst))


def _computed(
    path: Path, model: ExportedModel, batches: Sequence[tuple[Tensor, ...]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return onnxruntime's predictions, by the file as it is, and its scores."""
    import onnx

    names = [each.name for each in model.given]
    feeds = [dict(zip(names, (part.numpy() for part in batch), strict=True)) for batch in batches]
    try:
        predicted = _run(path, model.outputs[0], feeds)
        # Scores are inside of the file: a copy in memory shows them as an output.
        opened = onnx.load(path)
        opened.graph.output.append(onnx.ValueInfoProto(name=SCORES))
        return predicted, _run(opened.SerializeToString(), SCORES, feeds)
    except Exception as error:
        raise TrainingError(f"onnxruntime cannot run this model: {one_line(error)}") from error


def _run(model: Path | bytes, output: str, feeds: Sequence[dict[str, NDArray[Any]]]) -> NDArray[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # no logging: errors are raised as exceptions anyway
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run([output], feed)[0] for feed in feeds])


def _batches(n: int) -> list[int]:
    """Return sizes of batches that make up n samples: small ones first, since a graph may be wrong for these alone."""
    sizes = [1, 2, 7]
    while sum(sizes) < n:
        sizes.append(min(MOST_IN_BATCH, n - sum(sizes)))
    return sizes


def _samples_to_check(model: ExportedModel) -> int:
    """Return how many samples meet every cell, if possible several times, and every level of every category."""
    cells, images = len(model.head_of), any(len(each.shape) >= IMAGE_DIMENSIONS for each in model.inputs)
    of_each = min(16, max(1, (64 if images else 4096) // cells))
    return max(sum(_batches(1)), of_each * cells, *(count + 1 for count in model.levels))


def _draw(model: ExportedModel, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw samples like those of training, of all clients and domains in turn."""
    cell = torch.arange(n) % len(model.head_of)
    who = {"domain": cell % len(model.domains), "client": cell // len(model.domains)}
    return tuple(
        who[each.name] if each.name in who else _drawn_input(each, model, n, generator) for each in model.given
    )


def _drawn_input(given: FileInput, model: ExportedModel, n: int, generator: torch.Generator) -> Tensor:
    shape = (n, *given.shape)
    if given.name == "categories":  # all levels alike, also rare ones, and missing values
        return torch.stack([torch.randperm(n, generator=generator) % (count + 1) for count in model.levels], dim=1)
    if given.dtype.is_floating_point and len(given.shape) < IMAGE_DIMENSIONS:
        standard = torch.randn(shape, generator=generator, dtype=given.dtype)
        return _drawn_numbers(standard, model, generator) if given.name == "numbers" else standard
    # Images of different brightness and contrast: those of pure noise would look all the same to an encoder.
    either, noise = torch.rand(n, 2, generator=generator).sort(1).values, torch.rand(shape, generator=generator)
    low, high = (part.reshape(n, *[1] * len(given.shape)) for part in either.unbind(1))
    values = low + (high - low) * noise
    return values.to(given.dtype) if given.dtype.is_floating_point else (255 * values).round().to(given.dtype)


def _drawn_numbers(standard: Tensor, model: ExportedModel, generator: torch.Generator) -> Tensor:
    """Return numbers with the means and spreads of training, truth values as 0 or 1, and gaps where there may be some.

    An encoder that does not standardise stores no means and spreads: its numbers are standard ones.
    """
    layers = [layer for layer in model.bodies[0].modules() if isinstance(layer, Standardise)]
    if not layers:
        return standard
    values = standard * layers[0].scale + layers[0].mean
    chance = torch.rand(values.shape, generator=generator, dtype=values.dtype)
    values = torch.where(torch.tensor(model.truths), (chance < layers[0].mean).to(values.dtype), values)
    gaps = layers[0].gaps
    missing = torch.rand(len(values), len(gaps), generator=generator) < 0.3
    values[:, gaps] = values[:, gaps].masked_fill(missing, torch.nan)
    return values
