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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from feddar.algorithm.names import named_parameters, named_request
from feddar.algorithm.offsets import MOMENTS
from feddar.algorithm.participation import takes_part
from feddar.algorithm.pooling import ERRORS
from feddar.algorithm.protocol import BLENDS, EVERYBODY, SILENT, VALIDATION, OwnState, Reply, Request
from feddar.algorithm.rounds import RoundEnd
from feddar.algorithm.server import refuse_bad
from feddar.algorithm.weighting import WEIGHTS
from feddar.algorithm.wire import MessageError, as_reply, pack, request_header
from feddar.errors import TrainingError, UserError
from feddar.evaluation.from_sums import about_coarse_bins
from feddar.federation.answers import AWAY, plain, read_answer, require_answer_to, why_of
from feddar.federation.column_scales import much_wider_than_others
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.influence import POOL, TRAINED, Influence, middle
from feddar.federation.links.link import Answer, Link
from feddar.federation.lock import alone_in
from feddar.federation.privacy.secure import require_cryptography
from feddar.federation.rehearsal import Rehearsal, build
from feddar.federation.reply_checks import (
    require_census,
    require_counts,
    require_errors,
    require_moments,
    require_parts,
    require_size,
    require_tally,
    require_tensors,
    require_validation,
)
from feddar.federation.study import Study
from feddar.models.parameters import Tensors
from feddar.results.csv_files import guarded
from feddar.results.evaluators import FromSums
from feddar.results.run import Run
from feddar.results.run_folder import MODEL_FILE, RUN_FILE, replacing, writing
from feddar.results.tracking import log_results, require_tracker
from feddar.results.training import TRACKED_FILES, fixed_threads, load_checkpoint, run_rounds

if TYPE_CHECKING:
    from feddar.federation.secure_sums import SecureSums

STUDY_FILE, EXCHANGES_FILE, ADOPTED_FILE = "study.toml", "exchanges.csv", "adopted.bin"
POLL = 0.5
SUMS_ONLY = "The coordinator has seen sums over at least three sites, and no single site's reply or figures."
SINGLE_REPLIES = "The coordinator has seen each site's replies: parameters, sums over its patients, and its figures."
"""What a run says of who has seen what."""


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


Judged = tuple[Exchanged, Reply | None]
"""The outcome of a request to a site, and the site's reply if it is valid."""


@dataclass(frozen=True)
class CoordinatorEvents:
    """Callbacks by which the coordinator reports to the user."""

    say: Callable[[str], None] = lambda _: None
    exchanged: Callable[[int, str, Sequence[Exchanged]], None] = lambda *_: None
    progress: Callable[[RoundEnd], None] = lambda _: None
    came: Callable[[str, str], None] = lambda *_: None
    """A site has joined, or why it does not take part."""
    asked: Callable[[int, str, Sequence[str]], None] = lambda *_: None
    """A phase of a round begins, with these sites."""
    answered: Callable[[Exchanged], None] = lambda _: None
    """A site has answered, or is known not to."""

    def beside(self, other: CoordinatorEvents) -> CoordinatorEvents:
        """Return the callbacks that report to these, and then to the others."""
        return CoordinatorEvents(**{each.name: _one_by_one(self, other, each.name) for each in fields(self)})


def _one_by_one(first: CoordinatorEvents, second: CoordinatorEvents, name: str) -> Callable[..., None]:
    def both(*what: Any) -> None:
        getattr(first, name)(*what)
        getattr(second, name)(*what)

    return both


def coordinate(
    study: Study, link: Link, out: Path, *, resume: bool = False, events: CoordinatorEvents | None = None
) -> Run:
    """Train a study over a link and return the run; with ``resume``, continue from the checkpoint in ``out``."""
    events = events or CoordinatorEvents()
    require_tracker(study.training, out)
    name = run_name(study, out, resume)
    with fixed_threads(study.training.threads), _alone_in(out):
        run = _open_run(study, out, resume)
        federation = Federation(study, link, name, out, events)
        federation.note(SUMS_ONLY if study.facts.secure else SINGLE_REPLIES)
        federation.counted = lambda counts: setattr(run, "cohort", _counted(study, counts))
        position = run.standing.position
        if position.is_over(study.training):
            events.say(f"all {position.round} rounds are done; sites that come get the model once more")
        federation.gather()
        run_rounds(run, federation, FromSums(run, out), out, [events.progress])
        coarse = about_coarse_bins(run.results(), len(federation.counted_sites))
        if coarse is not None:
            federation.note(coarse)
        federation.finish(run)
        files = (*TRACKED_FILES, STUDY_FILE, EXCHANGES_FILE, RUN_FILE)
        log_results(study.training, out, run.results(), run.round, files)
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
        """The rows of each domain at each site, as its census says; not known where only sums are."""
        self.masses: dict[str, Tensor] = {}
        """The sums of weights of each domain at each site, if samples have weights."""
        self.counted_sites: frozenset[str] = frozenset()
        self.counted: Callable[[dict[str, Tensor]], None] = lambda _: None
        self.influence = Influence(self.rehearsal.model, study.training.damping)
        self.sums = self._secure_sums() if study.facts.secure else None

    def _secure_sums(self) -> SecureSums:
        require_cryptography()
        from feddar.federation.secure_sums import SecureSums

        return SecureSums(self)

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

    def note(self, sentence: str) -> None:
        """Say something that readers of the results should know, and write it into the folder, once."""
        self.events.say(sentence)
        path = self.out / RUN_FILE
        notes = json.loads(path.read_text(encoding="utf-8")).get("notes", []) if path.exists() else []
        facts = {"run": self.name, "study": self.study.digest, "notes": [*dict.fromkeys([*notes, sentence])]}
        with writing(self.out), replacing(path) as temporary:
            temporary.write_text(json.dumps(facts), encoding="utf-8")

    def joined(self) -> bool:
        """Let new sites join, and return whether there are sites that no census has counted, enough to be counted."""
        self._welcome()
        return self.sums.may_count(self.counted_sites) if self.sums else bool(self.members - self.counted_sites)

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Send a request to all sites of the run, and yield the valid replies in the order of the sites' names."""
        if self.sums is not None and request.phase.name not in SILENT:
            yield self.sums.of(request)
            return
        asked = self.asked(request)
        message = self.message(request)
        if request.phase.name == "adopt" and request.step == 1:
            with writing(self.out), replacing(self.out / ADOPTED_FILE) as temporary:
                temporary.write_bytes(message)
        answered, told = 0, dict[str, Tensors]()
        for reply in in_order(asked, self._ask(request, message, asked)):
            answered += 1
            if request.phase.name == "census":
                told[reply.client] = reply.sums
            yield reply
        needed = min(self.settings.min_clients, len(asked)) if request.up_to != EVERYBODY else self.settings.min_clients
        if answered < needed:
            raise self.too_few(request, answered, len(asked), needed)
        if request.phase.name == "census":
            # A site that did not answer the census gets no requests until it has answered one.
            self.counts, self.counted_sites = {site: sums["counts"] for site, sums in told.items()}, frozenset(told)
            self.masses = {site: sums[WEIGHTS] for site, sums in told.items() if WEIGHTS in sums}
            self.counted(self.counts)
            for sentence in much_wider_than_others(self.study, told):
                self.note(sentence)

    def asked(self, request: Request) -> list[str]:
        """Return the sites that get a request: a census goes to all members, others to those counted that take part."""
        if request.phase.name == "census":
            return sorted(self.members)
        return sorted(site for site in self.counted_sites if takes_part(request, site))

    def too_few(self, request: Request, answered: int, asked: int, needed: int) -> TrainingError:
        """Return the error that ends a run, with its checkpoint, when too few sites answer."""
        return TrainingError(
            f"{answered} of {asked} sites answered in the {request.phase.name} phase of round {request.round}, and "
            f"{needed} are needed: see {self.out / EXCHANGES_FILE}; when they are back, go on with --resume."
        )

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
            about, _ = read_answer(answer)
            if about["kind"] != "done":
                self.events.say(f"{answer.site} did not take the model: {why_of(about)}")

    def message(self, request: Request, **more: Any) -> bytes:
        """Return the bytes of a request, with more in the header."""
        about = {"kind": "ask", "run": self.name, "limit": self.link.limit, **request_header(request), **more}
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
            about, _ = read_answer(answer)
            if about["kind"] == "joined":
                self.members.add(answer.site)
                self.events.say(f"{answer.site} has joined")
                self.events.came(answer.site, "")
            else:
                self.turned_away.add(answer.site)
                self.reasons[answer.site] = why_of(about)
                self.events.say(f"{answer.site} does not take part: {why_of(about)}")
                self.events.came(answer.site, why_of(about))
        return True

    def _ask(self, request: Request, message: bytes, sites: Sequence[str]) -> Iterator[tuple[str, Reply | None]]:
        """Yield each site with its reply, or None if it sent no valid one, as they arrive; write exchanges.csv."""
        present = set(self.link.sites())
        reachable = [site for site in sites if site in present]
        away = [site for site in sites if site not in reachable]
        outcomes = [self.outcome(request, site, problem=AWAY) for site in away]
        self.begin_phase(request, reachable, outcomes)
        yield from ((site, None) for site in away)
        for outcome, reply in self._within_reach(request, self._answered(request, message, reachable)):
            outcomes.append(outcome)
            self.events.answered(outcome)
            yield outcome.site, reply
        self.write_down(request, outcomes)

    def _answered(self, request: Request, message: bytes, sites: Sequence[str]) -> Iterator[Judged]:
        """Yield the answer of each site as it arrives; last come those of sites that had to be caught up."""
        begun, late = time.monotonic(), []
        for answer in self.link.ask(message, sites, self.settings.timeout):
            outcome, reply = self._judged(request, answer, begun, len(message))
            if reply is None and outcome.problem == LACKS:
                late.append(answer.site)
            else:
                yield outcome, reply
        yield from (self._caught_up(request, message, site) for site in late)

    def _within_reach(self, request: Request, judged: Iterable[Judged]) -> Iterator[Judged]:
        """Yield answers, without the replies that would move the model much further than is usual."""
        if request.phase.name == POOL:
            yield from self._pooled_within_reach(request, [*judged])
            return
        moves: list[tuple[float, int]] = []
        for outcome, reply in judged:
            if reply is None or request.phase.name not in TRAINED:
                yield outcome, reply
                continue
            try:
                by = self.influence.require_near(request, reply)
            except MessageError as problem:
                yield replace(outcome, problem=str(problem)), None
            else:
                moves.append((by, int(self.counts[reply.client].sum())))
                yield outcome, reply
        self.influence.remember(request, middle(moves))

    def _pooled_within_reach(self, request: Request, answers: Sequence[Judged]) -> Iterator[Judged]:
        """Yield answers; sums of pooling by which scores would move too far count as answers, and add nothing.

        Heads that were trained too long have such sums at all sites: then heads stay as they are, and the run goes on.
        """
        why = self.influence.outlying(request, [reply for _, reply in answers if reply is not None])
        for outcome, reply in answers:
            if outcome.site in why:
                yield replace(outcome, problem=why[outcome.site]), Reply((outcome.site,))
            else:
                yield outcome, reply

    def _caught_up(self, request: Request, message: bytes, site: str) -> Judged:
        """Send a site that missed it the ``adopt`` request that starts its own parameters, then the request again."""
        begun = time.monotonic()
        if not self.adopts(site):
            return self.outcome(request, site, problem=LACKS), None
        (answer,) = self.link.ask(message, [site], self.settings.timeout)
        return self._judged(request, answer, begun, len(message))

    def adopts(self, site: str) -> bool:
        """Send a site that missed it the ``adopt`` request; return whether there has been one."""
        path = self.out / ADOPTED_FILE
        return path.exists() and bool([*self.link.ask(path.read_bytes(), [site], self.settings.timeout)])

    def _judged(self, request: Request, answer: Answer, begun: float, sent: int) -> Judged:
        """Check an answer; return its outcome, and the reply or None if it is not valid."""
        seconds, received = time.monotonic() - begun, len(answer.content)
        about, tensors = read_answer(answer)
        outcome = self.outcome(request, answer.site, seconds, about.get("seconds", 0.0), sent, received)
        if about["kind"] == "stranger":
            self.members.discard(answer.site)  # it has lost its state folder, and will be asked to join again
        if about["kind"] != "reply":
            return replace(outcome, problem=LACKS if about["kind"] == "lacks" else why_of(about)), None
        try:
            reply = self._fitting(request, about, answer.site, tensors)
        except TrainingError as problem:
            # A site answers a phase once. What it answered before this coordinator was resumed, perhaps with other
            # sites, need not fit what is asked now: then it counts as an answer, and adds nothing.
            adds_nothing = Reply((answer.site,)) if about.get("again") is True else None
            return replace(outcome, problem=plain(str(problem))), adds_nothing
        return outcome, reply

    def outcome(
        self, request: Request, site: str, seconds: float = 0.0, working: Any = 0.0, sent: int = 0, received: int = 0,
        problem: str = "",
    ) -> Exchanged:  # fmt: skip
        """Return a row of exchanges.csv."""
        spent = working if isinstance(working, float) else 0.0
        return Exchanged(request.round, request.phase.name, site, seconds, spent, sent, received, problem)

    def place(self, request: Request) -> dict[str, Any]:
        """Return by what an answer says which request it answers."""
        return {"run": self.name, "round": request.round, "step": request.step, "phase": request.phase.name}

    def _fitting(self, request: Request, about: dict[str, Any], site: str, tensors: Tensors) -> Reply:
        """Return the reply; a reply to another request, or with impossible content, is a ``MessageError``."""
        require_answer_to(self.place(request), about)
        uncounted = request.phase.name in ("census", *SILENT)
        counts = torch.ones(1, dtype=torch.long) if uncounted else self.counts[site]
        form = self.rehearsal.expected(request, counts)
        # A site without test samples sends no tensors in the measure phase.
        if tensors or request.phase.name != "measure":
            require_tensors(form, tensors)
        reply = as_reply((site,), about, tensors)
        masses = scaled(request, self.masses.get(site))
        if request.phase.assigns:
            require_parts(form, reply, counts, masses)
        else:
            require_counts(form, reply, counts, masses, by_factor=request.phase.counts_by_factor)
        refuse_bad(reply, request.phase, request.parameters, request.round)
        sent = named_request(request)
        for name, value in tensors.items():
            require_size(name, value, sent.get(name))
        require_tally(reply)
        match request.phase.name:
            case "census":
                require_census(reply.sums, self.study.facts.max_rows)
            case "pool":
                require_errors(reply.sums[ERRORS], int(counts.sum()) * self.rehearsal.model.outputs)
            case "offsets":
                require_moments(reply.sums[MOMENTS], request, int(counts.count_nonzero()), self.rehearsal.model)
            case "validate":
                most = self.study.most_validated(counts, 1)
                require_validation(reply.sums[VALIDATION], reply.sums.get(BLENDS), most)
        return reply

    def begin_phase(self, request: Request, sites: Sequence[str], absent: Sequence[Exchanged]) -> None:
        """Report that a phase begins with these sites, and without those that are absent."""
        self.events.asked(request.round, request.phase.name, sites)
        for each in absent:
            self.events.answered(each)

    def write_down(self, request: Request, outcomes: Sequence[Exchanged]) -> None:
        """Add the outcomes of a request to exchanges.csv, and report them."""
        path = self.out / EXCHANGES_FILE
        with writing(self.out):
            new = not path.exists()
            with path.open("a", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow(Exchanged.__dataclass_fields__)
                for each in sorted(outcomes, key=lambda each: each.site):
                    writer.writerow([f"{v:.3f}" if isinstance(v, float) else guarded(v) for v in asdict(each).values()])
        self.events.exchanged(request.round, request.phase.name, sorted(outcomes, key=lambda each: each.site))


def scaled(request: Request, weights: Tensor | None) -> Tensor | None:
    """Return the masses that a request makes of sums of weights; None if it has no weights."""
    return None if weights is None or request.weight_scale is None else weights * request.weight_scale


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
