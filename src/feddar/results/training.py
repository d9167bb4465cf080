"""The round loop: census, warm-up, phases, aggregation, evaluation, checkpoints. It is the same for every method.

A run is a series of stages (warm-up with FedAvg, then the method), a stage is a method row for some rounds, and a
round is one phase (``together``) or two (``heads``, then ``encoder``: Algorithm 1 of the paper). All randomness comes
from (seed, round, phase, client), so a run that is stopped and resumed is the same, bit for bit, as one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from feddar.algorithm.aggregation import Average, Credibility, SecondOrder, project_to_simplex
from feddar.algorithm.client import (
    CURVED,
    FOCUS,
    MEAN,
    TARGET,
    Phase,
    Reply,
    Request,
    evidence_in,
    standard_units,
    standardise,
)
from feddar.algorithm.engine import Engine
from feddar.data.cohort import Cohort, Task, domain_weights
from feddar.errors import TrainingError, UserError
from feddar.evaluation.from_sums import merged, refocused
from feddar.evaluation.metrics import METRICS, evaluate, worst
from feddar.lazy import pandas as pd
from feddar.methods import RECOMMENDED, Method
from feddar.models.heads import as_blocks, default_curvature, from_blocks, whole
from feddar.models.model import Tensors, build_model, keys
from feddar.results.run import (
    CUSTOM_ENCODER,
    METRICS_COLUMNS,
    METRICS_FILE,
    MODEL_FILE,
    Run,
    read_metrics,
    read_model,
    require_same_shapes,
    writing,
)
from feddar.settings import DataSettings, Settings, checked
from feddar.simulation.allocation import keeping_freed_memory
from feddar.simulation.in_process import start as start_in_process
from feddar.simulation.stacked import Stack, assemble


@dataclass(frozen=True)
class Progress:
    """What a progress bar wants to know after each round."""

    round: int
    rounds: int
    loss: float
    metric: str
    worst_domain: float
    mean_domain: float


def train(
    cohort: Cohort,
    method: str = RECOMMENDED,
    encoder: nn.Module | str | None = None,
    *,
    test: Cohort | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    observe: Callable[[Cohort, Tensor], pd.DataFrame] | None = None,
    source: DataSettings | None = None,
    **options: Any,
) -> Run:
    """Train one method on a cohort and return the run.

    With ``test``, every round is evaluated on it, and in the last rounds, which make the results,
    ``observe(test, scores)`` may add rows (scope, name, metric, value, count) to what is recorded. With ``out``, the
    run is checkpointed there after every round, and ``resume=True`` goes on from the last one. Options are the fields
    of ``feddar.Settings``; ``source``, where the data came from, is written down with them.
    """
    name = CUSTOM_ENCODER if isinstance(encoder, nn.Module) else encoder
    settings = checked(Settings, {"method": method, "encoder": name} | options)
    require_trainable(cohort)
    test = None if test is None else test.aligned_to(cohort)
    folder = None if out is None else Path(out)
    begun = resume and folder is not None and (folder / MODEL_FILE).exists()
    model, initial = build_model(cohort, encoder, settings.trained() if begun else settings)
    run = Run.begin(settings, model, cohort, initial, cohort.fingerprint())
    if folder is not None:
        take_up(run, folder, resume)
        with writing(folder):
            run.save_config(folder, source)
    parties = assemble(cohort, test, model, settings)
    with (
        fixed_threads(settings.threads),
        # What stacks free is small, and keeping it would leave more holes than it saves time.
        nullcontext() if any(isinstance(party, Stack) for party in parties) else keeping_freed_memory(),
        closing(start_in_process(parties, settings.jobs)) as engine,
    ):
        Trainer(run, engine, test, folder, progress, observe).train()
    return run


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Fix torch's number of threads, on which the last bits of a result can depend, and put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Trainer:
    """The loop over rounds, on any engine."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        test: Cohort | None = None,
        folder: Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        observe: Callable[[Cohort, Tensor], pd.DataFrame] | None = None,
        *,
        by_sums: bool = False,
    ) -> None:
        """With ``by_sums``, clients evaluate their own test samples and say sums, since nobody sees them all."""
        self.run = run
        self.settings = run.settings
        self.engine = engine
        self.test = test
        self.folder = folder
        self.progress = progress
        self.observe = observe
        self.by_sums = by_sums
        self.told = torch.empty(0, 0, dtype=torch.long)
        """Samples of each domain at each client, [client, domain]."""
        self.places: dict[str, int] = {}
        """Which row is whose."""
        self.counts = torch.empty(0)
        self.steps = 0

    def train(self) -> None:
        """Run the rounds that are still to be done."""
        self._census()
        self.engine.restore(self.run.private)
        for round_number in range(self.run.round + 1, self.settings.rounds + 1):
            if self.engine.joined():
                self._census()
            self.steps = 0
            self._enter(self.settings.row_in(round_number), round_number)
            loss = self._round(round_number)
            self.run.round = round_number
            self._finish_round(loss)
        self.run.private = self.engine.private()

    def _census(self) -> None:
        """Learn how many samples of each domain there are, and the columns' moments: sums over clients."""
        phase = census(self.settings, self.run.model.task)
        told: list[Tensor] = []
        names: list[str] = []
        sums: Tensors = {}
        for reply in self.engine.exchange(self._request(phase, 0, {})):
            told.append(reply.tensors["counts"].view(len(reply.clients), -1).clone())
            names += reply.clients
            for name in SUMS & reply.tensors.keys():
                sums[name] = reply.tensors[name] + sums.get(name, 0)
        self.told, self.places = torch.cat(told), {name: place for place, name in enumerate(names)}
        self.counts = self.told.sum(0)
        if self.run.round == 0 and "sum" in sums:
            self.run.state |= standardise(self.run.model, sums["present"], sums["sum"], sums["squares"])
        if self.run.round == 0 and phase.target:
            self.run.state[TARGET] = torch.stack(standard_units(*sums[TARGET].unbind()))

    def _enter(self, method: Method, round_number: int) -> None:
        """At the start of a stage, give each key of the method's scopes a copy of the common parameters."""
        if method == self.run.method and round_number > 1:
            return
        self.run.method = method
        domains = len(self.run.cohort.domains)
        for group, scope in (("encoder", method.encoder), ("heads", method.heads)):
            if scope == "domain":
                common = [name for name in self.run.state if name.startswith(f"{group}/all")]
                for name in common:
                    value = self.run.state.pop(name)
                    copies = {name.replace("/all", f"/{key}", 1): value.clone() for key in keys(scope, domains)}
                    self.run.state |= copies
        if "client" in method.used:
            phase = Phase("adopt", *method.used)
            for _ in self.engine.exchange(self._request(phase, round_number, self.run.state)):
                pass
        for group, scope in (("encoder", method.encoder), ("heads", method.heads)):
            if scope == "client":
                # From here on it lives with the clients alone.
                self.run.state = {n: v for n, v in self.run.state.items() if not n.startswith(f"{group}/")}
        if method.minmax:
            self.run.state[SHARES] = self.counts.double() / self.counts.sum()

    def _round(self, round_number: int) -> float:
        """Run the phases of one round; returns the mean training loss."""
        method, loss = self.run.method, float("nan")
        self.run.state = with_trained_heads(self.run.state)
        credibility: Credibility | None = None
        for phase in phases(method, self.settings, self.run.model.task, round_number):
            tensors = dict(self.run.state)
            shares, _ = tensors.pop(SHARES, None), tensors.pop(FOCUS, None)
            if method.reweighted or method.minmax:
                tensors["domain_weights"] = domain_weights(self.counts, shares)
            if method.credible and phase.name == "heads":
                tensors[MEAN] = mean_head(self.run.state, self.counts)
            replies = self.engine.exchange(self._request(phase, round_number, tensors))
            reduced = reduce_replies(phase, replies, self.run.state, self.settings.damping, round_number)
            self.run.state |= reduced.changed
            if reduced.risks is not None and shares is not None:
                risks = reduced.risks / self._counts(reduced.clients)
                self.run.state[SHARES] = ascend(shares, risks, self.settings.minmax_lr)
            credibility = reduced.credibility or credibility
            # The first phase that measures it is that of the common parameters.
            loss = reduced.loss if math.isnan(loss) else loss
        if method.heads == "domain" and method.encoder == "global":
            self.run.state |= heads_of_absent_domains(self.run.state, self.counts)
        if credibility is not None:
            self.run.state |= credible_heads(self.run.state, credibility)
        return loss

    def _counts(self, clients: Iterable[str]) -> Tensor:
        return self.told[[self.places[name] for name in clients]].sum(0)

    def _request(self, phase: Phase, round_number: int, tensors: Tensors) -> Request:
        self.steps += 1
        return Request(phase, round_number, self.settings.seed, tensors, self.steps)

    def _finish_round(self, loss: float) -> None:
        rows = [(self.run.round, "train", "all", "all", "loss", loss, int(self.counts.sum()))]
        frame = pd.DataFrame(rows, columns=METRICS_COLUMNS)
        worst_domain = mean_domain = float("nan")
        metric = METRICS[self.run.model.task][0]
        found = self._evaluated()
        if found is not None:
            by_domain = found[(found["scope"] == "domain") & (found["metric"] == metric)]["value"]
            worst_domain, mean_domain = worst(metric, by_domain), float(by_domain.mean())
            found = found.assign(round=self.run.round, split="test")[METRICS_COLUMNS]
            frame = pd.concat([frame, found], ignore_index=True)
        self.run.history = frame if self.run.history.empty else pd.concat([self.run.history, frame], ignore_index=True)
        if self.folder is not None:
            self._checkpoint(self.folder)
        if self.progress is not None:
            rounds = self.settings.rounds
            self.progress(Progress(self.run.round, rounds, loss, metric, worst_domain, mean_domain))

    def _evaluated(self) -> pd.DataFrame | None:
        """Evaluate the model in use after this round, where there is something to evaluate it on."""
        if self.by_sums:
            phase = Phase("measure", *self.run.method.used)
            replies = self.engine.exchange(self._request(phase, self.run.round, in_use(self.run.state)))
            tallies = {reply.client: reply.tensors for reply in replies if reply.tensors}
            if (focus := refocused(tallies, self.run.state.get(FOCUS))) is not None:
                self.run.state[FOCUS] = focus
            return merged(self.run.model.task, tallies, self.run.cohort.domains)
        if self.test is None:
            return None
        scores = self._test_scores(self.test)
        found = evaluate(self.test, scores)
        if self.observe is not None and self.run.round > self.settings.rounds - self.settings.last:
            found = pd.concat([found, self.observe(self.test, scores)], ignore_index=True)
        return found

    def _checkpoint(self, folder: Path) -> None:
        """Metrics first: a resumed run drops rows that are newer than its model."""
        if self.run.method.personal:
            self.run.private = self.engine.private()
        with writing(folder):
            self.run.save_metrics(folder)
            self.run.checkpoint(folder)

    def _test_scores(self, test: Cohort) -> Tensor:
        """Score test samples at the client that holds them; those of other clients as ``Run.scores`` does."""
        phase = Phase("evaluate", *self.run.method.used)
        result = torch.zeros(len(test), self.run.model.outputs, dtype=self.run.model.dtype)
        for reply in self.engine.exchange(self._request(phase, self.run.round, in_use(self.run.state))):
            tested = [test.client_numbers[name] for name in reply.clients if name in test.client_numbers]
            result[test.rows_of(torch.tensor(tested, dtype=torch.long))] = reply.tensors["scores"]
        unseen = torch.from_numpy(~np.isin(test.client_names, self.run.cohort.clients))
        if bool(unseen.any()):
            self.run.private = self.engine.private()
            part = test.rows(unseen)
            result[unseen] = self.run.scores(part.x, part.domain, part.client_names)
        return result


SUMS = {"present", "sum", "squares", TARGET}
"""Names of what a census adds up beside the counts."""

TRAINED = "trained/"
"""Prefix of heads as they were trained, in the server's state, where those in use are weighed against their mean."""

SHARES = "domain_shares"
"""Name of the weights of domains that a minmax method ascends, in the server's state."""


def ascend(shares: Tensor, risks: Tensor, step: float) -> Tensor:
    """Move the shares of domains one step along their risks, on the simplex; domains that nobody holds stay at 0."""
    held = torch.isfinite(risks)
    moved = torch.zeros_like(shares)
    moved[held] = project_to_simplex(shares[held] + step * risks[held])
    return moved


def heads_of_absent_domains(state: Tensors, counts: Tensor) -> Tensors:
    """Give domains that nobody holds the mean of the others' heads.

    A head that is never trained would be left behind by the encoder under it.
    """
    absent = torch.nonzero(counts == 0).flatten().tolist()
    return {f"heads/{m}": mean_head(state, counts) for m in absent}


def mean_head(state: Tensors, counts: Tensor) -> Tensor:
    """Return the mean of the domains' heads by their samples."""
    mean = Average()
    for m, count in enumerate(counts.tolist()):
        mean.add({"head": state[f"heads/{m}"]}, float(count))
    return mean.result()["head"]


def credible_heads(state: Tensors, credibility: Credibility) -> Tensors:
    """Weigh the heads that were trained against their mean, for use, and keep them beside for the next round.

    Training goes on from the heads as they were trained: early on, an encoder that has yet to find in what domains
    differ shows no evidence that they do, and heads drawn together would never let it.
    """
    trained = {name: head for name, head in state.items() if name.startswith("heads/")}
    kept = {name.replace("heads/", TRAINED, 1): head.clone() for name, head in trained.items()}
    return kept | credibility.weighed(trained)


def in_use(state: Tensors) -> Tensors:
    """Return what predicts: without the heads as they were trained."""
    return {name: value for name, value in state.items() if not name.startswith(TRAINED)}


def with_trained_heads(state: Tensors) -> Tensors:
    """Undo ``credible_heads``."""
    return in_use(state) | {
        name.replace(TRAINED, "heads/", 1): value for name, value in state.items() if name.startswith(TRAINED)
    }


def census(settings: Settings, task: Task) -> Phase:
    """Return the phase that comes before all rounds."""
    standardised = settings.bias if settings.standardise_target is None else settings.standardise_target
    return Phase("census", target=standardised and task == "regression")


def planned(settings: Settings, task: Task, round_number: int) -> tuple[Phase, ...]:
    """Return all phases that a run between sites may ask for in a round; round 0 is the census."""
    if round_number == 0:
        return (census(settings, task),)
    method = settings.row_in(round_number)
    own, evaluation = Phase("adopt", *method.used), Phase("measure", *method.used)
    return own, *phases(method, settings, task, round_number), evaluation


def phases(method: Method, settings: Settings, task: Task, round_number: int) -> tuple[Phase, ...]:
    """Return the phases of a round of that method."""
    factor = settings.lr_factor(round_number)
    curvature = (settings.curvature or default_curvature(task)) if method.second_order else None
    tuning_lr = settings.lr * settings.tune_factor
    both = Phase(
        "together",
        method.encoder,
        method.heads,
        epochs=settings.encoder_epochs,
        lr=(tuning_lr if method.start else settings.lr) * factor,
        optimizer=settings.optimizer,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        batch_size=settings.batch_size,
        curvature=curvature,
        curvature_at=settings.curvature_at,
        mu=settings.mu if method.proximal else 0.0,
        private_norm=method.private_norm,
        risks=method.minmax,
    )
    common: tuple[Phase, ...] = (both,)
    if method.alternating:
        head_lr = (settings.head_lr or settings.lr) * factor
        heads = replace(both, name="heads", epochs=settings.head_epochs, lr=head_lr, risks=False)
        common = (heads, replace(both, name="encoder", curvature=None))
    own = replace(both, name="personal", encoder="client", heads="client", curvature=None, risks=False, mu=0.0)
    match method.companion:
        case "tuned":
            return *common, Phase("adopt", "client", "client"), replace(own, epochs=1, lr=tuning_lr * factor)
        case "pulled":
            return *common, replace(own, mu=settings.mu)
        case "mixed":
            return *common, replace(own, mix=settings.mix)
        case None:
            return common


@dataclass(frozen=True)
class Reduced:
    """What the replies to one request add up to."""

    clients: tuple[str, ...]
    """Who replied."""
    changed: Tensors
    loss: float
    """The mean over samples; NaN in phases that do not measure it."""
    risks: Tensor | None
    """The loss summed over each domain's samples, where it was asked for."""
    credibility: Credibility | None
    """Evidence of how far domains differ, where it was asked for."""


def reduce_replies(
    phase: Phase, replies: Iterable[Reply], state: Tensors, damping: float, round_number: int
) -> Reduced:
    """Add replies as they arrive and finish once."""
    averages: dict[str, Average] = {}
    solves: dict[str, SecondOrder] = {}
    credibility = Credibility(dict(state))  # as it was when evidence was taken: the round goes on to change it
    loss, samples = 0.0, 0
    risks: Tensor | None = None
    clients: list[str] = []
    for reply in replies:
        refuse_bad(reply, phase, state, round_number)
        clients += reply.clients
        loss, samples = loss + reply.loss, samples + reply.samples
        if "risks" in reply.tensors:
            risks = reply.tensors["risks"] + (0 if risks is None else risks)
        for key, weight in reply.weights.items():
            if phase.curvature is not None and key.startswith("heads/"):
                head = as_blocks(phase.curvature, reply.tensors[key])
                curvature = reply.tensors[key.replace("heads/", "curvature/")]
                curved = reply.tensors.get(key.replace("heads/", f"{CURVED}/"))
                solves.setdefault(key, SecondOrder(damping)).add(head, whole(curvature), weight, curved)
            else:
                own = {name: value for name, value in reply.tensors.items() if f"{name}/".startswith(f"{key}/")}
                averages.setdefault(key, Average()).add(own, weight)
            if evidence := evidence_in(reply.tensors, key.removeprefix("heads/")):
                credibility.add(key, evidence, weight)
    changed: Tensors = {}
    for average in averages.values():
        changed |= {name: value.to(state[name].dtype) for name, value in average.result().items()}
    for key, solve in solves.items():
        head = from_blocks(phase.curvature or "hessian", solve.result(), state[key].shape)
        changed[key] = head.to(state[key].dtype)
    mean_loss = loss / samples if samples else float("nan")
    return Reduced(tuple(clients), changed, mean_loss, risks, credibility if credibility.samples else None)


def refuse_bad(reply: Reply, phase: Phase, state: Tensors, round_number: int) -> None:
    """Refuse a reply with NaN, a wrong shape or a negative weight, naming client, phase and tensor."""

    def refuse(what: str, advice: str) -> None:
        raise TrainingError(
            f"client '{reply.client}' sent {what} in the {phase.name} phase of round {round_number}: {advice}"
        )

    if not math.isfinite(reply.loss):
        refuse(f"the loss {reply.loss}", "training diverged; try a smaller lr.")
    for name, tensor in reply.tensors.items():
        if name in state and tensor.shape != state[name].shape:
            refuse(f"'{name}' of shape {tuple(tensor.shape)}", f"expected was {tuple(state[name].shape)}.")
        if bool(torch.isfinite(tensor.sum())):  # one value that is not finite shows in the sum; this is faster
            continue
        bad = ~torch.isfinite(tensor)
        # An encoder may carry infinite constants, such as the mask of an attention layer.
        if bool(bad.any()) and bool((bad & torch.isfinite(state.get(name, torch.zeros(())))).any()):
            refuse(f"'{name}' with values that are not finite", "training diverged; try a smaller lr.")
    for key, weight in reply.weights.items():
        if not 0 <= weight < float("inf"):
            refuse(f"the weight {weight} for '{key}'", "weights are counts of samples.")


def require_trainable(cohort: Cohort) -> None:
    """Refuse a cohort in which some client has nothing to train on."""
    empty = torch.nonzero(cohort.counts.sum(1) == 0).flatten().tolist()
    if empty:
        raise UserError(f"client '{cohort.clients[empty[0]]}' has no samples: leave it out.")


def take_up(run: Run, folder: Path, resume: bool) -> None:
    """Take up the parameters, private parts and metrics of the last checkpoint in a folder, if that is wanted."""
    if resume and not folder.is_dir():
        raise UserError(f"there is no run in {folder} to resume.")
    if not (folder / MODEL_FILE).exists():
        return
    if not resume:
        raise UserError(f"{folder} already holds a run: resume it (--resume), or choose another folder (--out).")
    about, state, private = read_model(folder)
    require_same_run(about, run.settings, run.fingerprint, folder)
    require_same_shapes(run.model, state, private, folder)
    history = read_metrics(folder / METRICS_FILE)
    run.state, run.private, run.round = state, private, about["round"]
    run.method = Method(**about["method"])
    run.history = history[history["round"] <= run.round].reset_index(drop=True)


def require_same_run(about: dict[str, Any], settings: Settings, fingerprint: str, folder: Path) -> None:
    """Refuse to go on with a run that was started with other data or settings, naming what differs."""
    if about["fingerprint"] != fingerprint:
        raise UserError(f"the run in {folder} was started with other data: resume it with the same data and split.")
    # Where a method fine-tunes at the end, the number of rounds says when that begins.
    may_change = {"jobs", "threads"} | (set() if settings.row().start else {"rounds", "last"})
    now = settings.model_dump()
    for name, before in about["settings"].items():
        if name not in may_change and now[name] != before:
            raise UserError(
                f"the run in {folder} was started with {name}={before}, not {now[name]}: resume it as it was."
            )
    if about["round"] > settings.rounds:
        raise UserError(
            f"the run in {folder} has done {about['round']} rounds already: resume it with as many or more."
        )
