"""``feddar.train``: runs the round loop on one machine, with evaluation, metrics and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from feddar.algorithm.engine import Engine
from feddar.algorithm.rounds import Callback, Evaluator, Position, RoundEnd, RoundLoop
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.lazy import pandas as pd
from feddar.methods import RECOMMENDED, Method
from feddar.models.model import build_model
from feddar.results.evaluators import FromScores, Observe, no_evaluation
from feddar.results.run import CUSTOM_ENCODER, Run
from feddar.results.run_folder import (
    METRICS_COLUMNS,
    METRICS_FILE,
    MODEL_FILE,
    append_metrics,
    read_history,
    read_model,
    require_same_shapes,
    write_metrics,
    writing,
)
from feddar.results.tracking import tracking
from feddar.settings import DataSettings, Settings, checked
from feddar.simulation.allocation import keeping_freed_memory
from feddar.simulation.in_process import start as start_in_process
from feddar.simulation.stacked import Stack, make_clients


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
    observe: Observe | None = None,
    source: DataSettings | None = None,
    **options: Any,
) -> Run:
    """Train one method on a cohort and return the run.

    With ``test``, every round is evaluated on it, and in the last rounds, which make the results,
    ``observe(test, scores)`` may return further rows (scope, name, metric, value, count) to record. With ``out``, the
    run is checkpointed there after every round, and ``resume=True`` continues from the last checkpoint. After each
    round ``progress`` and all ``callbacks`` are called with a ``RoundEnd``; a callback that returns True ends the
    training. Options are the fields of ``feddar.Settings``; ``source``, where the data came from, is saved with them.
    """
    name = CUSTOM_ENCODER if isinstance(encoder, nn.Module) else encoder
    settings = checked(Settings, {"method": method, "encoder": name} | options)
    require_trainable(cohort)
    _require_callable(callbacks)
    test = None if test is None else test.aligned_to(cohort)
    folder = None if out is None else Path(out)
    begun = resume and folder is not None and (folder / MODEL_FILE).exists()
    model, initial = build_model(cohort, encoder, settings.trained() if begun else settings)
    run = Run.begin(settings, model, cohort, initial, cohort.fingerprint())
    if folder is not None:
        load_checkpoint(run, folder, resume)
        with writing(folder):
            run.save_config(folder, source)
    participants = make_clients(cohort, test, model, settings)
    with (
        fixed_threads(settings.threads),
        # Stacks free only small blocks; keeping these would fragment memory more than it saves time.
        nullcontext() if any(isinstance(each, Stack) for each in participants) else keeping_freed_memory(),
        closing(start_in_process(participants, settings.jobs)) as engine,
    ):
        evaluate = no_evaluation if test is None else FromScores(test, run, engine.own_states, observe)
        run_rounds(run, engine, evaluate, folder, [*([progress] if progress else []), *callbacks])
    return run


def run_rounds(
    run: Run, engine: Engine, evaluate: Evaluator, folder: Path | None, callbacks: Sequence[Callback]
) -> None:
    """Run the remaining rounds of a run on an engine, and update the run.

    Each round is recorded in the run and its folder before ``callbacks`` are called.
    """
    record = Recorder(run, engine, folder)
    with tracking(run.settings, folder) as trackers:
        all_callbacks: list[Callback] = [record, *trackers, *callbacks]
        loop = RoundLoop(run.settings, run.model, len(run.cohort.domains), engine, evaluate, all_callbacks)
        run.update(loop.run(Position(run.round, run.method, run.state), run.own))
    run.own = engine.own_states()
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
        self.run.update(end.position)
        self.frames.append(_metrics(end))
        if self.folder is None:
            return
        if end.position.method.keeps_own:
            self.run.own = self.engine.own_states()
        with writing(self.folder):
            append_metrics(self.folder, self.frames[-1])
            self.run.checkpoint(self.folder)

    def history(self) -> pd.DataFrame:
        """Return the metrics of all rounds."""
        before = [] if self.run.history.empty else [self.run.history]
        return pd.concat([*before, *self.frames], ignore_index=True) if self.frames else self.run.history


def _metrics(end: RoundEnd) -> pd.DataFrame:
    """Return the rows of a round for metrics.csv."""
    loss = pd.DataFrame([(end.round, "train", "all", "all", "loss", end.loss, end.samples)], columns=METRICS_COLUMNS)
    if end.test is None:
        return loss
    test = end.test.assign(round=end.round, split="test")[METRICS_COLUMNS]
    return pd.concat([loss, test], ignore_index=True)


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
    if resume and not folder.is_dir():
        raise UserError(f"there is no run in {folder} to resume.")
    if not (folder / MODEL_FILE).exists():
        with writing(folder):
            (folder / METRICS_FILE).unlink(missing_ok=True)  # left by a run that was killed before its first checkpoint
        return
    if not resume:
        raise UserError(f"{folder} already holds a run: resume it (--resume), or choose another folder (--out).")
    about, state, own = read_model(folder)
    require_same_run(about, run.settings, run.fingerprint, folder)
    require_same_shapes(run.model, state, own, folder)
    run.own = own
    run.update(Position(about["round"], Method(**about["method"]), state))
    run.history = read_history(folder, run.round)
    with writing(folder):
        write_metrics(folder, run.history)


def require_same_run(about: dict[str, Any], settings: Settings, fingerprint: str, folder: Path) -> None:
    """Refuse to resume a run that was started with other data or settings; the error says what differs."""
    # If a method fine-tunes in its last rounds, their beginning depends on the number of rounds.
    may_change = Settings.without_effect | (set() if settings.row().start else {"rounds", "last"})
    now = settings.model_dump()
    for name, before in about["settings"].items():
        if name not in may_change and now[name] != before:
            raise UserError(
                f"the run in {folder} was started with {name}={before}, not {now[name]}: resume it as it was."
            )
    if about["fingerprint"] != fingerprint:
        raise UserError(f"the run in {folder} was started with other data: resume it with the same data and split.")
    if about["round"] > settings.rounds:
        raise UserError(
            f"the run in {folder} has done {about['round']} rounds already: resume it with as many or more."
        )
