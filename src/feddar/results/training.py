"""``feddar.train``: runs the round loop on one machine, with evaluation, metrics and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from feddar.algorithm.engine import Engine
from feddar.algorithm.rounds import Callback, Evaluator, Listener, RoundEnd, RoundLoop, Standing, mean_loss
from feddar.algorithm.weighting import require_classes
from feddar.data.cohort import Cohort, require_cohort
from feddar.data.validation import divided
from feddar.errors import Notice, UserError
from feddar.evaluation.metrics import are_many
from feddar.evaluation.operating_point import OperatingPoint
from feddar.evaluation.validation import LOSS, SPLIT
from feddar.lazy import pandas as pd
from feddar.methods import RECOMMENDED
from feddar.models.devices import find_device, say_if_moved
from feddar.models.encoders import is_table, require_encoder
from feddar.models.encoders.own import allow_code
from feddar.models.model import build_model
from feddar.options import TrainOptions, showing
from feddar.results.client_metrics import CSV_FILE, PARQUET_FILE, remove_client_metrics, write_client_metrics
from feddar.results.evaluators import FromScores, Observe, no_evaluation
from feddar.results.figure_files import FILES, MISSING_FILE, remove_figures, write_figures, write_missing_domains
from feddar.results.run import CUSTOM_ENCODER, Run
from feddar.results.run_folder import (
    METRICS_COLUMNS,
    METRICS_FILE,
    MODEL_FILE,
    alone_in,
    append_metrics,
    read_description,
    read_history,
    read_model,
    require_same_shapes,
    rounds_done,
    write_metrics,
    writing,
)
from feddar.results.tracking import log_results, require_tracker, tracking
from feddar.settings import CONFIG_FILE, DataSettings, Settings, checked
from feddar.simulation.allocation import keeping_freed_memory
from feddar.simulation.in_process import start as start_in_process
from feddar.simulation.stacked import Stack, make_clients

TRACKED_FILES = (CONFIG_FILE, METRICS_FILE, MODEL_FILE, *FILES, MISSING_FILE, PARQUET_FILE, CSV_FILE)
"""The files of a run that a tracker gets, where they are there."""


@showing(Settings)
def train(
    cohort: Cohort,
    method: str = RECOMMENDED,
    encoder: nn.Module | str | None = None,
    *,
    test: Cohort | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[RoundEnd], None] | None = None,
    callbacks: Sequence[Callback] = (),
    listeners: Sequence[Listener] = (),
    observe: Observe | None = None,
    source: DataSettings | None = None,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train one method on a cohort and return the run.

    With validation (by default of tables; ``validation=0``: none), a share of each client's samples is held out, the
    model in use is that of the round with the lowest loss on it, and training stops after ``patience`` rounds without
    a lower one. With ``test``, every round is evaluated on it (each of many clients only at the end),
    and in rounds that may make the results ``observe(test, scores)`` may return further rows (scope, name, metric,
    value, count) to record. With ``out``, the run is checkpointed there after every round, and ``resume=True``
    continues from the last checkpoint. After each round ``progress`` and all ``callbacks`` are called with a
    ``RoundEnd``; a callback that returns True ends the training. ``listeners`` hear of each request to clients and of
    each reply. Options are the fields of ``feddar.Settings``; ``source``, where the data came from, is saved with them.
    """
    require_encoder(encoder)
    require_cohort(cohort, "what is trained on")
    if test is not None:
        require_cohort(test, "test")
    name = CUSTOM_ENCODER if isinstance(encoder, nn.Module) else encoder
    allow_code(name)
    settings = _on_device(checked(Settings, {"method": method, "encoder": name, **options}))
    require_trainable(cohort)
    _require_callable(callbacks)
    test = None if test is None else test.aligned_to(cohort)
    folder = None if out is None else Path(out)
    require_tracker(settings, folder)
    begun = resume and folder is not None and (folder / MODEL_FILE).exists()
    if folder is not None and begun:
        settings = _as_begun(settings, folder)
    settings, part, validation = divide(cohort, settings)
    cohort.objective.headline(settings.metric)
    require_classes(cohort.objective, settings)
    OperatingPoint.of(settings).require_possible(cohort.objective, validation is not None)
    chosen = encoder if isinstance(encoder, nn.Module) else settings.encoder
    model, initial = build_model(cohort, chosen, settings.trained() if begun else settings)
    run = Run.begin(settings, model, part, initial, cohort.fingerprint())
    run.folder = folder
    participants = make_clients(part, test, model, settings, validation)
    with (
        nullcontext() if folder is None else _begun_in(folder, run, resume, source),
        fixed_threads(settings.threads),
        # Stacks free only small blocks; keeping these would fragment memory more than it saves time.
        nullcontext() if any(isinstance(each, Stack) for each in participants) else keeping_freed_memory(),
        closing(start_in_process(participants, settings.jobs, model.device)) as engine,
    ):
        evaluate = no_evaluation if test is None else FromScores(test, run, engine.own_states, observe)
        run_rounds(run, engine, evaluate, folder, [*([progress] if progress else []), *callbacks], listeners)
        if folder is not None and test is not None:
            write_figures(folder, run.figures(test, validation))
            if (missing := run.missing_domains(test)) is not None:
                write_missing_domains(folder, missing)
            if are_many(test):
                write_client_metrics(folder, run.evaluate(test))
        if folder is not None:
            log_results(settings, folder, run.results(), run.round, TRACKED_FILES)
    return run


@contextmanager
def _begun_in(folder: Path, run: Run, resume: bool, source: DataSettings | None) -> Iterator[None]:
    """Let a run begin or go on in its folder, in which nobody else may train within the block."""
    if resume and not folder.is_dir():
        raise UserError(f"there is no run in {folder} to resume.")
    with alone_in(folder):
        load_checkpoint(run, folder, resume)
        with writing(folder):
            run.save_config(folder, source)
        remove_figures(folder)
        remove_client_metrics(folder)
        yield


def _on_device(settings: Settings) -> Settings:
    """Return the settings with the name of the device that is used, which must be there."""
    device = find_device(settings.device, getattr(torch, settings.dtype))
    return settings.model_copy(update={"device": str(device)})


class Divided(NamedTuple):
    """The samples of a training: those trained on and those that choose the round in use, and the settings for them."""

    settings: Settings
    train: Cohort
    validation: Cohort | None


def divide(cohort: Cohort, settings: Settings) -> Divided:
    """Return the settings as they are for this data, and the cohort divided into training and validation part.

    If there are too few samples to hold any out, a warning says so, and it is as without validation.
    """
    settings = settings.resolved(is_table(cohort.layout))
    if not settings.validation:
        return Divided(settings, cohort, None)
    part, validation = divided(cohort, settings.validation, settings.seed)
    if len(validation):
        return Divided(settings, part, validation)
    warnings.warn(
        f"with {len(cohort):,} in all, samples are too few to hold some out for validation: the last round is used.",
        Notice,
        stacklevel=3,
    )
    return Divided(settings.model_copy(update={"validation": 0.0}), cohort, None)


def _as_begun(settings: Settings, folder: Path) -> Settings:
    """Return the settings to resume a run with; what depends on the data, if it is not given, is as the run has it."""
    return settings.completed(read_description(folder)["settings"])


def run_rounds(
    run: Run,
    engine: Engine,
    evaluate: Evaluator,
    folder: Path | None,
    callbacks: Sequence[Callback],
    listeners: Sequence[Listener] = (),
) -> None:
    """Run the remaining rounds of a run on an engine, and update the run.

    Each round is recorded in the run and its folder before ``callbacks`` are called.
    """
    record = Recorder(run, engine, folder)
    with tracking(run.settings, folder) as trackers:
        all_callbacks: list[Callback] = [record, *trackers, *callbacks]
        hooks, structure = (all_callbacks, listeners), run.cohort.structure
        shared = () if structure is None else structure.shared()
        loop = RoundLoop(run.settings, run.model, len(run.cohort.domains), engine, evaluate, *hooks, shared)
        position = loop.run(run.standing.position, run.standing.own)
    run.reach(Standing(position, engine.own_states()))
    run.history = record.history()


@dataclass
class Recorder:
    """The callback that keeps a run and its folder up to date."""

    run: Run
    engine: Engine
    folder: Path | None
    frames: list[pd.DataFrame] = field(default_factory=list)
    """The metrics of each round since training began or was resumed."""

    def __call__(self, end: RoundEnd) -> None:
        """Update the run, and write metrics and checkpoint: metrics first, so that a checkpoint always has its metrics.

        A resumed run drops metrics of rounds after its checkpoint.
        """
        position = end.position
        needed = position.method.keeps_state and (self.folder is not None or position.is_best)
        self.run.reach(Standing(position, self.engine.own_states() if needed else {}))
        self.frames.append(_metrics(end, self.run.cohort.domains))
        if self.folder is None:
            return
        with writing(self.folder):
            append_metrics(self.folder, self.frames[-1])
            self.run.checkpoint(self.folder)

    def history(self) -> pd.DataFrame:
        """Return the metrics of all rounds."""
        before = [] if self.run.history.empty else [self.run.history]
        return pd.concat([*before, *self.frames], ignore_index=True) if self.frames else self.run.history


def _metrics(end: RoundEnd, domains: Sequence[str]) -> pd.DataFrame:
    """Return the rows of a round for metrics.csv."""
    rows = [(end.round, "train", "all", "all", LOSS, end.loss, end.samples), *_validation_rows(end, domains)]
    loss = pd.DataFrame(rows, columns=METRICS_COLUMNS)
    if end.test is None:
        return loss
    test = end.test.assign(round=end.round, split="test")[METRICS_COLUMNS]
    return pd.concat([loss, test], ignore_index=True)


def _validation_rows(end: RoundEnd, domains: Sequence[str]) -> Iterator[tuple[int, str, str, str, str, float, int]]:
    """Yield the validation loss of a round, over all samples and by domain."""
    if end.validation is None:
        return
    every = ("all", "all", end.validation.sum(0))
    for scope, name, sums in (every, *(("domain", *pair) for pair in zip(domains, end.validation, strict=True))):
        if sums[1]:
            yield end.round, SPLIT, scope, name, LOSS, mean_loss(sums), int(sums[1])


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads, on which the last bits of results can depend, and restore it at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def require_trainable(cohort: Cohort) -> None:
    """Refuse a cohort in which a client has no samples."""
    empty = torch.nonzero(cohort.counts.sum(1) == 0).flatten().tolist()
    if empty:
        raise UserError(f"client '{cohort.clients[empty[0]]}' has no samples: leave it out.")


def _require_callable(callbacks: Sequence[Callback]) -> None:
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UserError("callbacks must be a list of functions, each of which is called with a RoundEnd.")


def load_checkpoint(run: Run, folder: Path, resume: bool) -> None:
    """With ``resume``, load parameters, clients' own states and metrics of the folder's checkpoint into the run."""
    if not (folder / MODEL_FILE).exists():
        with writing(folder):
            (folder / METRICS_FILE).unlink(missing_ok=True)  # left by a run that was killed before its first checkpoint
        return
    if not resume:
        raise UserError(f"{folder} already holds a run: resume it (--resume), or choose another folder (--out).")
    stored = read_model(folder)
    require_same_run(stored.about, run.settings, run.fingerprint, folder)
    require_same_shapes(run.model, stored, folder)
    say_if_moved(stored.about["settings"].get("device", "cpu"), run.settings.device)
    run.restore(stored)
    run.history = read_history(folder, run.standing.position.round)
    with writing(folder):
        write_metrics(folder, run.history)
        decided = run.settings.model_dump(include=set(Settings.of_decisions))
        before = stored.about["settings"]
        if any(before.get(name, value) != value for name, value in decided.items()):
            run.checkpoint(folder)  # so that it has the operating point of the figures, also if no round is left


def require_same_run(about: dict[str, Any], settings: Settings, fingerprint: str, folder: Path) -> None:
    """Refuse to resume a run that was started with other data or settings; the error says what differs."""
    # The rate of a falling lr, the beginning of fine-tuning in the last rounds, and which rounds are tested, depend on
    # the number of rounds.
    fixed = settings.row().start or settings.schedule == "cosine" or settings.test_every > 1
    may_change = (
        Settings.without_effect
        | Settings.of_decisions
        | {"patience", "device"}
        | (set() if fixed else {"rounds", "last"})
    )
    now = settings.model_dump()
    for name, before in about["settings"].items():
        if name not in may_change and now[name] != before:
            raise UserError(
                f"the run in {folder} was started with {name}={before}, not {now[name]}: resume it as it was."
            )
    if about["fingerprint"] != fingerprint:
        raise UserError(f"the run in {folder} was started with other data: resume it with the same data and split.")
    done = rounds_done(about)
    if done > settings.rounds:
        raise UserError(f"the run in {folder} has done {done} rounds already: resume it with as many or more.")
