"""Finds out what a site sends, by letting a dummy client without real samples answer the same requests.

So no second description of replies is needed: ``Rehearsal`` gives the coordinator the tensors that a reply must have,
and ``what_leaves`` shows a site, before it joins, every tensor that will leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor

from feddar.algorithm.client import Client
from feddar.algorithm.names import named_parameters, named_reply, named_weights
from feddar.algorithm.protocol import Phase, Reply, Request
from feddar.federation.privacy.norm_bound import bound_of
from feddar.federation.privacy.second_order_floor import SecondOrderFloor
from feddar.federation.privacy.secure.fixed_point import Field, Layout
from feddar.federation.privacy.secure.summands import is_change, summands
from feddar.federation.privacy.withheld import Withheld
from feddar.federation.study import Study
from feddar.models.model import Model, build_model
from feddar.models.parameters import Parameters, Tensors
from feddar.results.evaluators import FromSums
from feddar.results.run import Run
from feddar.results.training import fixed_threads, run_rounds
from feddar.settings import Settings, checked
from feddar.simulation.in_process import Direct

Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class ReplyFormat:
    """The expected format of a reply."""

    tensors: dict[str, Kind]
    """Shape and dtype of each tensor, by flat name."""
    weights: tuple[str, ...]
    """The names of encoders and heads that it has weights for."""
    samples: bool
    """Whether it has a training loss with its number of samples."""
    summands: dict[str, Kind]
    """Shape and dtype of what it adds to a sum over sites, by flat name."""


def build(study: Study, *, with_weights: bool = False) -> tuple[Model, Parameters]:
    """Return the study's model and initial parameters; only the coordinator uses the file of weights."""
    settings = study.training if with_weights else study.training.trained()
    two_of_each = torch.full((1, len(study.facts.domains)), 2)
    return build_model(study.cohort(("all",), two_of_each), settings.encoder, settings)


def stand_in(study: Study, model: Model, domains: Iterable[int]) -> Client:
    """Return a dummy client with two blank samples of each of these domains."""
    counts = torch.zeros(1, len(study.facts.domains), dtype=torch.long)
    counts[0, list(domains)] = 2
    blank = study.cohort(("a site",), counts)
    return Client("a site", blank, blank, model, validation=blank)


Floor = SecondOrderFloor | Withheld
"""Holds back what says too much of few rows: in the reply of a site, or in sums over sites."""


def floor_of(study: Study, model: Model) -> Floor:
    """Return the processor that holds back what says too much of few rows, as the study has it."""
    floor = SecondOrderFloor(study.facts.floor, model.width)
    return Withheld(floor.least) if study.facts.secure else floor


class Rehearsal:
    """Returns the expected format of the reply to a request."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.model, self.initial = build(study)
        self.floor = floor_of(study, self.model)
        self.known: dict[tuple[object, ...], ReplyFormat] = {}

    def expected(self, request: Request, rows: Tensor) -> ReplyFormat:
        """Return the format of the reply of a site that trains on so many rows of each domain [M]."""
        # Neither the rate nor the number of epochs, which change from round to round, is seen in the format.
        request = replace(request, phase=replace(request.phase, epochs=1, lr=0.0))
        held, few = tuple(rows.nonzero().flatten().tolist()), self.floor.few(rows)
        sent = request.mean_head is not None, request.candidates is not None
        about = request.phase, held, few, request.withheld, sent
        if about not in self.known:
            client = stand_in(self.study, self.model, held)
            client.answer(Request(Phase("adopt", "client", "client"), 0, 0, self.initial))
            reply = self.floor.process(request, client.answer(request), rows)
            formats = kinds(named_reply(reply)), tuple(named_weights(reply)), reply.samples > 0
            self.known[about] = ReplyFormat(*formats, kinds(summands(request, reply)))
        return self.known[about]

    def layout(self, request: Request, sites: int, rows: int) -> Layout:
        """Return how the sum of so many sites' replies, over so many rows in all, lies in a row of words.

        A change of parameters is that of at most all rows, each moved by the bound; where sites count by a factor, by
        any number of them.
        """
        fields, sent = [], named_parameters(request.parameters)
        for name, (shape, _) in sorted(self.of_all(request).summands.items()):
            limited = is_change(name) and not request.phase.counts_by_factor
            limit = rows * bound_of(sent[name], self.study.facts.max_norm) if limited else None
            fields.append(Field(name, shape, limit))
        return Layout(tuple(fields), sites)

    def of_all(self, request: Request) -> ReplyFormat:
        """Return the format of the reply of a site that holds all domains."""
        return self.expected(request, torch.full((len(self.study.facts.domains),), 2))


def kinds(tensors: Tensors) -> dict[str, Kind]:
    """Return shape and dtype of each tensor."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class _RecordingEngine(Direct):
    """An engine that records the replies of its one client."""

    def __init__(self, client: Client, floor: Floor, rows: Tensor) -> None:
        super().__init__([client])
        self.floor, self.rows = floor, rows
        self.recorded: list[tuple[Request, Reply]] = []

    def exchange(self, request: Request) -> Iterator[Reply]:
        for reply in super().exchange(request):
            self.recorded.append((request, self.floor.process(request, reply, self.rows)))
            yield reply


def what_leaves(study: Study, rows: Tensor) -> pd.DataFrame:
    """Return every tensor that leaves a site with so many rows of each domain [M], by round and phase.

    Columns: round, method, phase, tensor, shape, type, bytes.

    Only rounds with something new are listed: 0 is the census, then the first round of each stage.
    """
    model, initial = build(study)
    settings = _shortened(study.training)
    held = rows.nonzero().flatten().tolist()
    engine = _RecordingEngine(stand_in(study, model, held), floor_of(study, model), rows)
    blank = study.cohort(("a site",), torch.full((1, len(study.facts.domains)), 2))
    run = Run.begin(settings, model, blank, initial, "")
    with fixed_threads(1):
        run_rounds(run, engine, FromSums(run), None, [])
    found = [
        (request.round, settings.row_in(max(request.round, 1)).name, request.phase.name, name, tuple(t.shape), t)
        for request, reply in engine.recorded
        for name, t in named_reply(reply).items()
    ]
    frame = pd.DataFrame(found, columns=["round", "method", "phase", "tensor", "shape", "value"])
    frame["type"] = [str(value.dtype).removeprefix("torch.") for value in frame["value"]]
    frame["bytes"] = [value.numel() * value.element_size() for value in frame["value"]]
    return frame.drop(columns="value")


def _shortened(training: Settings) -> Settings:
    """Return settings with one round for each stage."""
    stages = bool(training.warmup) + 1 + bool(training.row().start)
    short = {"rounds": stages, "warmup": min(training.warmup, 1), "tune_rounds": 1, "head_epochs": 1, "last": 1}
    return checked(Settings, training.trained().model_dump() | short | {"encoder_epochs": 1, "jobs": 1})
