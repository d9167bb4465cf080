"""The coordinator (server): it waits for sites, trains over a link to them, and continues without sites that fail.

A site that dies, hangs, fails or sends an invalid reply is left out of that phase and named in the log; it can come
back at any time. The run stops only if fewer than ``min_clients`` sites answer, and keeps its checkpoint. The folder
is that of any other run, plus the study and ``exchanges.csv``: for each site and phase the time, the bytes sent and
received, and the problem if there was one.
"""

from __future__ import annotations

import csv
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddar.algorithm.names import CURVATURE, key_of, named_parameters, named_request, named_weights
from feddar.algorithm.offsets import MOMENTS
from feddar.algorithm.pooling import CURVATURE as POOLED_CURVATURE
from feddar.algorithm.pooling import ERRORS
from feddar.algorithm.protocol import BLENDS, VALIDATION, OwnState, Reply, Request
from feddar.algorithm.rounds import RoundEnd
from feddar.algorithm.server import refuse_bad
from feddar.algorithm.spreads import directions_sent
from feddar.algorithm.wire import MessageError, as_reply, pack, request_header, unpack
from feddar.errors import TrainingError, UserError, printable
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.links.link import Answer, Link
from feddar.federation.lock import alone_in
from feddar.federation.rehearsal import Rehearsal, ReplyFormat, build
from feddar.federation.study import Study
from feddar.models.heads import full_matrix
from feddar.models.model import Model
from feddar.models.parameters import Tensors
from feddar.results.csv_files import guarded
from feddar.results.evaluators import FromSums
from feddar.results.run import Run
from feddar.results.run_folder import MODEL_FILE, replacing, writing
from feddar.results.training import fixed_threads, load_checkpoint, run_rounds

STUDY_FILE, RUN_FILE, EXCHANGES_FILE, ADOPTED_FILE = "study.toml", "run.json", "exchanges.csv", "adopted.bin"
LARGEST_GROWTH = 1000.0
"""A reply is refused if a tensor's norm is larger than this factor times 1 + the norm of the tensor that was sent."""
LARGEST = 1e100
"""Sums whose norm is larger are refused: no measurements give them, and adding them to others could overflow."""
MOST_SAMPLES = 10**8
"""The largest number of samples that a site may report."""
LONGEST = 300
"""The longest text, in characters, that is shown of a site's problem."""
POLL = 0.5


@dataclass(frozen=True)
class Exchanged:
    """The outcome of one request to one site: a row of exchanges.csv."""

    round: int
    phase: str
    site: str
    seconds: float
    """From sending the request to receiving the answer."""
    working: float
    """The part of ``seconds`` in which the site worked, as it reports."""
    sent: int
    received: int
    problem: str = ""


@dataclass(frozen=True)
class CoordinatorEvents:
    """Callbacks by which the coordinator reports to the user."""

    say: Callable[[str], None] = lambda _: None
    exchanged: Callable[[int, str, Sequence[Exchanged]], None] = lambda *_: None
    progress: Callable[[RoundEnd], None] = lambda _: None


def coordinate(
    study: Study, link: Link, out: Path, *, resume: bool = False, events: CoordinatorEvents | None = None
) -> Run:
    """Train a study over a link and return the run; with ``resume``, continue from the checkpoint in ``out``."""
    events = events or CoordinatorEvents()
    name = run_name(study, out, resume)
    with fixed_threads(study.training.threads), _alone_in(out):
        run = _open_run(study, out, resume)
        with writing(out), replacing(out / RUN_FILE) as temporary:
            temporary.write_text(json.dumps({"run": name, "study": study.digest}), encoding="utf-8")
        federation = Federation(study, link, name, out, events)
        federation.counted = lambda counts: setattr(run, "cohort", _counted(study, counts))
        position = run.standing.position
        if position.is_over(study.training):
            events.say(f"all {position.round} rounds are done; sites that come get the model once more")
        federation.gather()
        run_rounds(run, federation, FromSums(run), out, [events.progress])
        federation.finish(run)
    return run


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Lock a folder against other coordinators while this one runs."""
    with ExitStack() as stack:
        with writing(out):
            try:
                stack.enter_context(alone_in(out, wait=False))
            except BlockingIOError:
                raise UserError(f"{out} is in use by another coordinator: stop it, or choose another one.") from None
        yield


def _open_run(study: Study, out: Path, resume: bool) -> Run:
    """Return a new run, or the run in the folder if it is resumed."""
    model, initial = build(study, with_weights=not (out / MODEL_FILE).exists())
    blank = study.cohort((), torch.zeros(0, len(study.facts.domains), dtype=torch.long))
    run = Run.begin(study.training, model, blank, initial, study.digest)
    load_checkpoint(run, out, resume)
    with writing(out):
        run.save_config(out, None)
        with replacing(out / STUDY_FILE) as temporary:
            study.write(temporary)
    return run


def run_name(study: Study, out: Path, resume: bool) -> str:
    """Return the name under which sites store their own state in this run; a resumed run keeps its name."""
    path = out / RUN_FILE
    if not resume:
        if path.exists():
            raise UserError(f"{out} already holds a run: go on with it (--resume), or choose another folder (--out).")
        return secrets.token_hex(8)
    if not path.exists():
        raise UserError(f"there is no run in {out} to resume: leave out --resume to start one.")
    facts = json.loads(path.read_text(encoding="utf-8"))
    if facts["study"] != study.digest:
        raise UserError(f"the run in {out} was started with another study: resume it with {out / STUDY_FILE}.")
    return str(facts["run"])


def _counted(study: Study, counts: dict[str, Tensor]) -> Any:
    clients = tuple(sorted(counts))
    return study.cohort(clients, torch.stack([counts[name] for name in clients]))


class Federation:
    """The engine whose clients are the sites behind a link."""

    def __init__(self, study: Study, link: Link, name: str, out: Path, events: CoordinatorEvents) -> None:
        self.study, self.link, self.name, self.out, self.events = study, link, name, out, events
        self.settings: CoordinatorSettings = study.coordinator
        self.rehearsal = Rehearsal(study)
        self.members: set[str] = set()
        self.turned_away: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.counts: dict[str, Tensor] = {}
        self.counted: Callable[[dict[str, Tensor]], None] = lambda _: None

    def gather(self) -> None:
        """Wait for ``sites`` sites, at most ``wait`` seconds; fewer than ``min_clients`` are an error."""
        wanted, least, end = self.settings.sites, self.settings.min_clients, time.monotonic() + self.settings.wait
        self.events.say(f"waiting for {wanted} sites")
        while len(self.members) < wanted and time.monotonic() < end:
            if not self._welcome():
                time.sleep(POLL)
        if len(self.members) < least:
            why = "".join(f"; {site}: {reason}" for site, reason in sorted(self.reasons.items()))
            raise TrainingError(
                f"{len(self.members)} of {least} sites needed have come in {self.settings.wait:g} s{why}; when the "
                "others can come, go on with --resume."
            )

    def joined(self) -> bool:
        """Let new sites join, and return whether there are sites that no census has counted."""
        self._welcome()
        return bool(self.members - set(self.counts))

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Send a request to all sites of the run, and yield the valid replies in the order of the sites' names."""
        asked = sorted(self.members if request.phase.name == "census" else set(self.counts))
        message = self._message(request)
        if request.phase.name == "adopt" and request.step == 1:
            with writing(self.out), replacing(self.out / ADOPTED_FILE) as temporary:
                temporary.write_bytes(message)
        answered, counts = 0, dict[str, Tensor]()
        for reply in in_order(asked, self._ask(request, message, asked)):
            answered += 1
            if request.phase.name == "census":
                counts[reply.client] = reply.sums["counts"]
            yield reply
        if answered < self.settings.min_clients:
            raise TrainingError(
                f"{answered} of {len(asked)} sites answered in the {request.phase.name} phase of round "
                f"{request.round}, and {self.settings.min_clients} are needed: see {self.out / EXCHANGES_FILE}; when "
                "they are back, go on with --resume."
            )
        if request.phase.name == "census":
            # A site that did not answer the census gets no requests until it has answered one.
            self.counts = counts
            self.counted(self.counts)

    def own_states(self) -> dict[str, OwnState]:
        """Return nothing: sites never send their own state."""
        return {}

    def restore(self, own: dict[str, OwnState]) -> None:
        """Do nothing: sites store their own state."""

    def close(self) -> None:
        """Do nothing: the link is closed by the code that opened it."""

    def finish(self, run: Run) -> None:
        """Send the trained model to every site."""
        facts = {"round": run.round, "counts": run.cohort.counts.sum(0).tolist()}
        message = pack({"kind": "finish", "run": self.name, **facts}, named_parameters(run.state.in_use))
        for answer in self.link.ask(message, sorted(self.members), self.settings.timeout):
            about, _ = _read(answer)
            if about["kind"] != "done":
                self.events.say(f"{answer.site} did not take the model: {_why(about)}")

    def _message(self, request: Request) -> bytes:
        about = {"kind": "ask", "run": self.name, "limit": self.link.limit, **request_header(request)}
        message = pack(about, named_request(request))
        if len(message) > self.link.limit:
            raise TrainingError(
                f"the request of the {request.phase.name} phase has {len(message):,} bytes, and {self.link.limit:,} "
                "can be carried: choose a smaller encoder."
            )
        return message

    def _welcome(self) -> bool:
        """Ask new sites to join, and return whether there were any."""
        present = self.link.sites()
        # A refused site that disconnected and came back may have corrected the problem: it is asked again.
        self.turned_away &= set(present)
        new = [site for site in present if site not in self.members | self.turned_away]
        if not new:
            return False
        message = pack({"kind": "join", "run": self.name, "study": self.study.tables()})
        for answer in self.link.ask(message, new, self.settings.timeout):
            about, _ = _read(answer)
            if about["kind"] == "joined":
                self.members.add(answer.site)
                self.events.say(f"{answer.site} has joined")
            else:
                self.turned_away.add(answer.site)
                self.reasons[answer.site] = _why(about)
                self.events.say(f"{answer.site} does not take part: {_why(about)}")
        return True

    def _ask(self, request: Request, message: bytes, sites: Sequence[str]) -> Iterator[tuple[str, Reply | None]]:
        """Yield each site with its reply, or None if it sent no valid one, as they arrive; write exchanges.csv."""
        present = set(self.link.sites())
        reachable = [site for site in sites if site in present]
        away = [site for site in sites if site not in reachable]
        outcomes = [self._outcome(request, site, problem="it is not connected") for site in away]
        yield from ((site, None) for site in away)
        begun, late = time.monotonic(), []
        for answer in self.link.ask(message, reachable, self.settings.timeout):
            outcome, reply = self._judged(request, answer, begun, len(message))
            if reply is None and outcome.problem == LACKS:
                late.append(answer.site)
                continue
            outcomes.append(outcome)
            yield answer.site, reply
        for site in late:
            outcome, reply = self._caught_up(request, message, site)
            outcomes.append(outcome)
            yield site, reply
        self._write_down(outcomes)
        self.events.exchanged(request.round, request.phase.name, sorted(outcomes, key=lambda each: each.site))

    def _caught_up(self, request: Request, message: bytes, site: str) -> tuple[Exchanged, Reply | None]:
        """Send a site that missed it the ``adopt`` request that starts its own parameters, then the request again."""
        path = self.out / ADOPTED_FILE
        if not path.exists():
            return self._outcome(request, site, problem=LACKS), None
        begun = time.monotonic()
        for step in (path.read_bytes(), message):
            for answer in self.link.ask(step, [site], self.settings.timeout):
                last = answer
        return self._judged(request, last, begun, len(message))

    def _judged(self, request: Request, answer: Answer, begun: float, sent: int) -> tuple[Exchanged, Reply | None]:
        """Check an answer; return its outcome, and the reply or None if it is not valid."""
        seconds, received = time.monotonic() - begun, len(answer.content)
        about, tensors = _read(answer)
        outcome = self._outcome(request, answer.site, seconds, about.get("seconds", 0.0), sent, received)
        if about["kind"] == "stranger":
            self.members.discard(answer.site)  # it has lost its state folder, and will be asked to join again
        if about["kind"] != "reply":
            return replace(outcome, problem=LACKS if about["kind"] == "lacks" else _why(about)), None
        try:
            reply = self._fitting(request, about, answer.site, tensors)
        except TrainingError as problem:
            # A site answers a phase once. What it answered before this coordinator was resumed, perhaps with other
            # sites, need not fit what is asked now: then it counts as an answer, and adds nothing.
            adds_nothing = Reply((answer.site,)) if about.get("again") is True else None
            return replace(outcome, problem=_plain(str(problem))), adds_nothing
        return outcome, reply

    def _outcome(
        self, request: Request, site: str, seconds: float = 0.0, working: Any = 0.0, sent: int = 0, received: int = 0,
        problem: str = "",
    ) -> Exchanged:  # fmt: skip
        spent = working if isinstance(working, float) else 0.0
        return Exchanged(request.round, request.phase.name, site, seconds, spent, sent, received, problem)

    def _fitting(self, request: Request, about: dict[str, Any], site: str, tensors: Tensors) -> Reply:
        """Return the reply; a reply to another request, or with impossible content, is a ``MessageError``."""
        asked = {"run": self.name, "round": request.round, "step": request.step, "phase": request.phase.name}
        for what, wanted in asked.items():
            if about.get(what) != wanted:
                raise MessageError(f"it answered another request: {what} {about.get(what)!r} instead of {wanted!r}")
        counting = request.phase.name == "census"
        counts = torch.ones(1, dtype=torch.long) if counting else self.counts[site]
        form = self.rehearsal.expected(request, counts)
        # A site without test samples sends no tensors in the measure phase.
        if tensors or request.phase.name != "measure":
            _require_tensors(form, tensors)
        reply = as_reply((site,), about, tensors)
        _require_counts(form, reply, counts)
        refuse_bad(reply, request.phase, request.parameters, request.round)
        sent = named_request(request)
        for name, value in tensors.items():
            _require_size(name, value, sent.get(name))
        match request.phase.name:
            case "census":
                _require_census(reply.sums)
            case "pool":
                _require_errors(reply.sums[ERRORS], int(counts.sum()) * self.rehearsal.model.outputs)
            case "offsets":
                _require_moments(reply.sums[MOMENTS], request, int(counts.count_nonzero()), self.rehearsal.model)
            case "validate":
                _require_validation(reply.sums[VALIDATION], reply.sums.get(BLENDS))
        return reply

    def _write_down(self, outcomes: Sequence[Exchanged]) -> None:
        path = self.out / EXCHANGES_FILE
        with writing(self.out):
            new = not path.exists()
            with path.open("a", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow(Exchanged.__dataclass_fields__)
                for each in sorted(outcomes, key=lambda each: each.site):
                    writer.writerow([f"{v:.3f}" if isinstance(v, float) else guarded(v) for v in asdict(each).values()])


def in_order(sites: Sequence[str], arriving: Iterable[tuple[str, Reply | None]]) -> Iterator[Reply]:
    """Yield replies in the order of ``sites``, each as soon as all before it have arrived.

    The order of additions decides the last bits of a sum, so a reply that comes early waits for its turn.
    """
    waiting, early = deque(sites), dict[str, Reply | None]()
    for site, reply in arriving:
        early[site] = reply
        while waiting and waiting[0] in early:
            due = early.pop(waiting.popleft())
            if due is not None:
                yield due


LACKS = "it has no parameters of its own yet"


def _read(answer: Answer) -> tuple[dict[str, Any], Tensors]:
    """Return header and tensors of an answer; a missing or unreadable one becomes a header of the kind ``failed``."""
    if answer.problem:
        return {"kind": "failed", "why": answer.problem}, {}
    try:
        about, tensors = unpack(answer.content)
    except MessageError as error:
        return {"kind": "failed", "why": str(error)}, {}
    return {"kind": "unknown", "why": "it sent no kind of message"} | about, tensors


def _why(about: dict[str, Any]) -> str:
    return _plain(str(about.get("why")))


def _plain(text: str) -> str:
    """Return a site's text, which may be anything, as one short printable line."""
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _require_tensors(form: ReplyFormat, tensors: Tensors) -> None:
    """Refuse tensors with other names, shapes or types than expected."""
    found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    if found.keys() != form.tensors.keys():
        odd = sorted(found.keys() ^ form.tensors.keys())[0]
        raise MessageError(f"it sent {'no' if odd in form.tensors else 'an unexpected'} '{odd}'")
    for name, expected in form.tensors.items():
        if found[name] != expected:
            raise MessageError(f"it sent '{name}' as {found[name]} instead of {expected}")


def _require_counts(form: ReplyFormat, reply: Reply, counts: Tensor) -> None:
    """Refuse weights other than the numbers of samples that the site reported in the census."""
    total, weights = int(counts.sum()), named_weights(reply)
    for key in {**dict.fromkeys(form.weights), **weights}:
        which = key_of(key)
        reported = (total if which == "all" else int(counts[int(which)])) if key in form.weights else 0
        if weights.get(key) != reported:
            raise MessageError(f"it sent the weight {weights.get(key)} for '{key}', and has told of {reported}")
    if reply.samples != total * form.samples:
        raise MessageError(f"it sent a loss over {reply.samples}, and has told of {total} samples")


def _require_census(tensors: Tensors) -> None:
    """Refuse a census whose sums are impossible for any samples."""
    counts = tensors["counts"].double()
    if not 0 < float(counts.sum()) <= MOST_SAMPLES:
        raise MessageError(f"it told of {float(counts.sum()):.0f} samples, and may have from 1 to {MOST_SAMPLES:,}")
    levels = tensors.get("levels", torch.zeros(0))
    if bool(((levels < 0) | (levels > counts.sum()) | (levels != levels.round())).any()):
        raise MessageError("it told counts of levels that no samples have")
    sums = [tensors["target"].unbind()] if "target" in tensors else []
    sums += [(tensors["present"], tensors["sum"], tensors["squares"])] if "sum" in tensors else []
    for number, total, squares in sums:
        # For any samples, (sum of x)^2 <= n * (sum of x^2).
        if bool(((number < 0) | (number > counts.sum()) | (total.square() > number * squares * (1 + 1e-6))).any()):
            raise MessageError("it told sums that no samples have")


def _require_validation(sums: Tensor, blends: Tensor | None) -> None:
    """Refuse losses below 0, without samples, or of a number of samples that cannot be; ``blends`` are losses, too."""
    loss, count = sums.unbind(1)
    whole = bool((count == count.round()).all()) and 0 <= float(count.min()) <= float(count.sum()) <= MOST_SAMPLES
    others = torch.zeros(0) if blends is None else blends
    odd = bool((others < 0).any()) or (not bool(count.any()) and bool(others.any()))
    if odd or not whole or bool(((loss < 0) | ((count == 0) & (loss > 0))).any()):
        raise MessageError("it told validation losses that no samples have")


def _require_errors(errors: Tensor, number: int) -> None:
    """Refuse a sum of squared errors below 0, or one that is not of all the site's samples."""
    squares, count = errors.tolist()
    if squares < 0 or count != number:
        raise MessageError(f"it sent '{ERRORS}' over {count:g}, and has told of {number}, or squares below 0")


def _require_moments(moments: Tensor, request: Request, held: int, model: Model) -> None:
    """Refuse sums over corrections that no most probable ones have: with them, spreads could end anywhere."""
    along = directions_sent(request.directions, model.outputs, model.width)
    constants, slopes = along.constants, along.matrix.shape[1] - along.constants
    numbers = torch.tensor([constants, slopes, held * constants, held * slopes], dtype=torch.float64)
    squares, variances, counts = moments.unbind(1)
    if not torch.equal(counts, numbers):
        raise MessageError(f"it sent '{MOMENTS}' over {counts.tolist()} corrections, and has {numbers.tolist()}")
    # No samples make corrections less certain than they were before.
    assert request.spreads is not None  # an offsets request always has them
    most = numbers * request.spreads.double().square() * (1 + 1e-6)
    if bool(((squares < 0) | (variances < 0) | (variances > most)).any()):
        raise MessageError(f"it sent '{MOMENTS}', which no corrections have")


def _require_curvature(name: str, value: Tensor) -> None:
    """Refuse a matrix that is not positive semidefinite: with it, aggregated heads could end anywhere."""
    matrix = full_matrix(value)
    size = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).abs()[..., None, None]
    lifted = matrix + (1e-6 * size + 1e-12) * torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    if bool(torch.linalg.cholesky_ex(lifted).info.any()):
        raise MessageError(f"it sent '{name}', which is not the curvature of any loss")


def _require_size(name: str, value: Tensor, sent: Tensor | None) -> None:
    """Refuse a tensor that is too large to be the result of training from what was sent."""
    if not value.is_floating_point():
        if bool((value < 0).any()):
            raise MessageError(f"it sent '{name}' with counts below 0")
        return
    after = _length(value)
    if sent is None:
        if not after <= LARGEST:
            raise MessageError(f"it sent '{name}' of length {after:.3g}: too large to be measured")
        if name.startswith((f"{CURVATURE}/", f"{POOLED_CURVATURE}/")):
            _require_curvature(name, value)
    elif not after <= LARGEST_GROWTH * (1 + _length(sent)):
        raise MessageError(
            f"it sent '{name}' of length {after:.3g}, which was {_length(sent):.3g}: too large to be trained"
        )


def _length(value: Tensor) -> float:
    """Return the Euclidean norm of a tensor's finite values; an encoder may hold infinite constants."""
    return float(torch.linalg.vector_norm(value.double().nan_to_num(nan=0, posinf=0, neginf=0)))


def run_app(link: Link, options: dict[str, Any]) -> None:
    """Train with the options of an engine's run configuration: study (a path), out (a folder), resume."""
    for needed in ("study", "out"):
        if not options.get(needed):
            raise UserError(f"the configuration does not say the {needed}: add {needed}='...' to it.")
    events = CoordinatorEvents(
        say=print, progress=lambda p: print(f"round {p.round} of {p.rounds}: {p.metric} {p.mean_domain:.3f}")
    )
    study, out = Study.read(Path(options["study"])), Path(options["out"])
    coordinate(study, link, out, resume=bool(options.get("resume", False)), events=events)
