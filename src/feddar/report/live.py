"""What is known of a training while it runs, for those who watch it: gathered from callbacks, and read by a thread.

The training only notes down what it is told anyway, and waits for nobody: what a page needs is computed when a page
asks for it (``live_page``, ``live_server``). Nothing here says anything of single samples: figures of a group with
fewer than ``MIN_CELL`` test samples are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Literal, NamedTuple

from feddar.algorithm.participation import takes_part
from feddar.algorithm.protocol import EVERYBODY, Reply, Request
from feddar.algorithm.rounds import RoundEnd, mean_loss
from feddar.evaluation.validation import LOSS, SPLIT
from feddar.federation.answers import AWAY
from feddar.federation.coordinator import EXCHANGES_FILE, CoordinatorEvents, Exchanged
from feddar.federation.site import MIN_CELL
from feddar.lazy import pandas as pd
from feddar.results.csv_files import without_guards
from feddar.results.run_folder import METRICS_FILE, read_metrics
from feddar.settings import Settings

MOST_NOTES = 12
"""So many of the last sentences are kept."""
State = Literal["here", "working", "answered", "away", "left out", "refused", "not drawn"]


class Value(NamedTuple):
    """A point of a curve: the training loss, the validation loss, or the main metric in a domain."""

    round: int
    split: str
    name: str
    value: float


class Score(NamedTuple):
    """The main metric of a domain or client after the last round that was tested."""

    value: float
    samples: int


@dataclass(frozen=True, eq=False)
class WatchedTraining:
    """One training: its curves so far and its last figures. It is another object after each round, and equals none."""

    settings: Settings
    folder: Path
    metric: str = ""
    round: int = 0
    values: tuple[Value, ...] = ()
    domains: dict[str, Score] = field(default_factory=dict)
    clients: dict[str, Score] = field(default_factory=dict)
    best: int | None = None
    """The round in use, if validation chooses it."""
    times: tuple[float, ...] = ()
    """When training began, and when each round since then ended."""

    def after(self, end: RoundEnd, now: float) -> WatchedTraining:
        """Return it after one more round; those before it, of a run that was resumed, come from its folder."""
        before = self.values
        if not self.round and end.round > 1:
            before = _values(read_metrics(self.folder / METRICS_FILE), end.metric, end.round)
        domains, clients = self.domains, self.clients
        if end.test is not None:
            domains, clients = (_scores(end.test, end.metric, scope) for scope in ("domain", "client"))
        new = [Value(end.round, "train", "all", end.loss)]
        if end.validation is not None:
            new.append(Value(end.round, SPLIT, "all", mean_loss(end.validation)))
        if end.test is not None:
            new += [Value(end.round, "test", name, score.value) for name, score in domains.items()]
        best = end.position.best
        return replace(
            self,
            domains=domains,
            clients=clients,
            metric=end.metric,
            round=end.round,
            values=(*before, *new),
            best=None if best is None else best.round,
            times=(*self.times, now),
        )

    def seconds_left(self, now: float) -> float | None:
        """Return how long the rounds that are left will take, by the last ones; None before the first has ended."""
        if len(self.times) < 2:
            return None
        recent = self.times[-11:]
        each = (recent[-1] - recent[0]) / (len(recent) - 1)
        return max(0.0, each * (self.settings.rounds - self.round) - (now - recent[-1]))


def _scores(test: pd.DataFrame, metric: str, scope: str) -> dict[str, Score]:
    """Return the metric by domain or by client, where there are enough samples."""
    rows = test[(test["metric"] == metric) & (test["scope"] == scope) & (test["count"] >= MIN_CELL)]
    found = zip(rows["name"], rows["value"], rows["count"], strict=True)
    return {str(name): Score(float(value), int(count)) for name, value, count in found}


def _values(metrics: pd.DataFrame, metric: str, end: int) -> tuple[Value, ...]:
    """Return the curves in metrics.csv before round ``end``."""
    wanted = {("train", "all", LOSS), (SPLIT, "all", LOSS), ("test", "domain", metric)}
    rows = metrics[(metrics["round"] < end) & ((metrics["count"] >= MIN_CELL) | (metrics["split"] != "test"))]
    columns = (rows[name] for name in ("round", "split", "scope", "name", "metric", "value"))
    return tuple(
        Value(int(number), split, str(name), float(value))
        for number, split, scope, name, each, value in zip(*columns, strict=True)
        if (split, scope, each) in wanted
    )


@dataclass(frozen=True)
class Seat:
    """A client or site: its state in the current phase, and what it has cost so far."""

    state: State = "here"
    problem: str = ""
    seconds: float = 0.0
    """How long its last answer took."""
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Known:
    """All that is known at one moment."""

    title: str
    about: str
    unit: Literal["client", "site"]
    folder: Path
    trainings: tuple[WatchedTraining, ...] = ()
    round: int = 0
    phase: str = ""
    seats: dict[str, Seat] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    started: float | None = None
    now: float = 0.0
    ending: str = ""
    """How it has ended; empty while it runs."""


class LiveView:
    """Is told of a training by its callbacks, and tells other threads what is known."""

    def __init__(self, title: str, about: str, unit: Literal["client", "site"], folder: Path) -> None:
        self._lock = Lock()
        self._known = Known(title, about, unit, folder)
        self._seats: dict[str, Seat] = _seats_in(folder)
        self.ended = Event()

    def known(self) -> Known:
        """Return what is known now."""
        with self._lock:
            return replace(self._known, seats=dict(self._seats), now=time.monotonic())

    def begin(self, settings: Settings, folder: Path) -> None:
        """Begin a training of this command."""
        training = WatchedTraining(settings, folder)
        with self._lock:
            self._known = replace(self._known, trainings=(*self._known.trainings, training), round=0, phase="")

    def round_ended(self, end: RoundEnd) -> None:
        """Note down a round: a callback of training."""
        *before, training = self._known.trainings
        after = training.after(end, time.monotonic())
        with self._lock:
            self._known = replace(self._known, trainings=(*before, after))

    def heard(self, request: Request, reply: Reply | None) -> None:
        """Note down a request to clients on this machine, or the answer of some: a listener of training."""
        if reply is None:
            all_do, (working, others) = request.up_to == EVERYBODY, (Seat("working"), Seat("not drawn"))
            drawn = {name: working if all_do or takes_part(request, name) else others for name in self._seats}
            self._begin_phase(request.round, request.phase.name, drawn)
            return
        with self._lock:
            self._seats.update(dict.fromkeys(reply.clients, Seat("answered")))

    @property
    def events(self) -> CoordinatorEvents:
        """The callbacks of a coordinator."""
        return CoordinatorEvents(
            say=self._say, progress=self.round_ended, came=self._came, asked=self._asked, answered=self._answered
        )

    def end(self, how: str) -> None:
        """Say how it has ended; only the first time counts."""
        with self._lock:
            self._known = replace(self._known, ending=self._known.ending or how)
        self.ended.set()

    def _say(self, sentence: str) -> None:
        with self._lock:
            self._known = replace(self._known, notes=(*self._known.notes, sentence)[-MOST_NOTES:])

    def _came(self, site: str, problem: str) -> None:
        with self._lock:
            before = self._seats.get(site, Seat())
            self._seats[site] = replace(before, state="refused" if problem else "here", problem=problem)

    def _asked(self, number: int, phase: str, sites: Sequence[str]) -> None:
        working = {site: replace(self._seats.get(site, Seat()), state="working", problem="") for site in sites}
        self._begin_phase(number, phase, working)

    def _begin_phase(self, number: int, phase: str, seats: dict[str, Seat]) -> None:
        now = time.monotonic()
        with self._lock:
            *before, training = self._known.trainings
            begun = training if training.times else replace(training, times=(now,))
            started = self._known.started or now
            self._known = replace(self._known, trainings=(*before, begun), round=number, phase=phase, started=started)
            self._seats.update(seats)

    def _answered(self, outcome: Exchanged) -> None:
        state: State = "away" if outcome.problem == AWAY else "left out" if outcome.problem else "answered"
        with self._lock:
            self._seats[outcome.site] = _added(self._seats.get(outcome.site, Seat()), state, outcome)


def _added(seat: Seat, state: State, outcome: Exchanged) -> Seat:
    sent, received = seat.sent + outcome.sent, seat.received + outcome.received
    return Seat(state, outcome.problem, outcome.seconds, sent, received)


def _seats_in(folder: Path) -> dict[str, Seat]:
    """Return the sites of a run that is resumed, with what they have sent and received before."""
    path = folder / EXCHANGES_FILE
    if not path.exists():
        return {}
    rows = without_guards(pd.read_csv(path, dtype={"site": str}, keep_default_na=False, on_bad_lines="skip"))
    # The last line may be incomplete, if the coordinator was killed.
    numbers = rows[["sent", "received"]].apply(pd.to_numeric, errors="coerce").fillna(0)
    totals = numbers.groupby(rows["site"]).sum()
    return {
        str(site): Seat("away", sent=int(sent), received=int(received))
        for site, sent, received in zip(totals.index, totals["sent"], totals["received"], strict=True)
    }
