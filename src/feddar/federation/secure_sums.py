"""Phases as secure sums: the coordinator gets one reply, the sum over all sites that answered (``privacy.secure``).

A site that drops out before its masked reply has come is left out of the sum; with too few left the phase is asked
again, with new keys, and sites send what they have stored. Once sites were asked to reveal a sum, they reveal none of
other sites: which ones it is over is written down before, and nobody else is asked for that phase again. The sums of
the census are stored too: asked for again with one site more or less, they would say what that site has.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from feddar.algorithm.protocol import WITHHELD, Reply, Request
from feddar.algorithm.weighting import WEIGHTS
from feddar.algorithm.wire import MessageError, pack, unpack
from feddar.errors import TrainingError
from feddar.federation.answers import AWAY, plain, read_answer, require_answer_to, why_of
from feddar.federation.links.link import Answer
from feddar.federation.privacy.secure.collector import (
    FewHoldersError,
    Setup,
    SharesError,
    UnmaskError,
    set_up,
    unmask,
)
from feddar.federation.privacy.secure.fixed_point import Layout, Words
from feddar.federation.privacy.secure.summands import (
    COLUMN_HOLDERS,
    HOLDERS,
    LEVEL_HOLDERS,
    domains_of,
    sum_as_reply,
)
from feddar.federation.privacy.withheld import Withheld
from feddar.federation.reply_checks import require_sum
from feddar.federation.step_files import KEPT_ROUNDS
from feddar.federation.study import APART, FEWEST, Study
from feddar.models.parameters import Tensors
from feddar.results.run_folder import replacing, writing

if TYPE_CHECKING:
    from feddar.federation.coordinator import Exchanged, Federation

CENSUS_FILE, BEGUN_FILE = "census.bin", "sums.json"
MASKED = "masked"
ATTEMPTS = 3
"""How often a phase is asked for."""
MOST_LISTED = 10
"""The most columns and levels that are listed of those that few sites have."""


class SecureSums:
    """The secure sums of one run, over the sites of a federation."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.setup: Setup | None = None
        self.asked_for: Sequence[str] = ()
        """The sites that the keys in use were asked of."""
        self.shut_out: set[str] = set()
        """The sites that take part in no more sums."""
        self.waiting: set[str] = set()
        """The sites of which it was said that they wait to be counted."""
        self.counts = torch.zeros(len(federation.study.facts.domains), dtype=torch.long)
        """The rows of each domain over all sites, as the census says."""
        self.masses = self.counts
        """The same as sums of weights, if samples have some."""

    def of(self, request: Request) -> Reply:
        """Return the sum over sites of their replies to a request, as a reply of several clients."""
        if request.phase.name == "census":
            return self._census(request)
        reply = self._summed(request)
        everyone = {*reply.clients} == self.federation.counted_sites
        try:
            masses = None if request.weight_scale is None else self.masses * request.weight_scale
            require_sum(request, reply, self.counts, self.federation.study, exact=everyone, masses=masses)
            moved = self.federation.influence.require_near(request, reply)
        except MessageError as problem:
            self.federation.note(
                f"The sum of the {request.phase.name} phase of round {request.round} has jumped and was left out: "
                f"{problem}; training has diverged, or one site at least has sent what no training gives."
            )
            return Reply(reply.clients)
        self.federation.influence.remember(request, moved)
        return reply

    def _census(self, request: Request) -> Reply:
        """Return the sums of the census: those stored, unless enough sites have joined since."""
        federation, path = self.federation, self.federation.out / CENSUS_FILE
        stored = unpack(path.read_bytes()) if path.exists() else ({"sites": []}, {})
        sites, sums = tuple(stored[0]["sites"]), stored[1]
        if not sites or self.may_count(sites):
            reply = self._summed(request)
            sites, sums = reply.clients, reply.sums
            self._require_possible(request, reply)
            with writing(federation.out), replacing(path) as temporary:
                temporary.write_bytes(pack({"sites": list(sites)}, sums))
            self.forget(request)
        self.counts, federation.counted_sites = sums["counts"], frozenset(sites)
        self.masses = sums.get(WEIGHTS, self.counts)
        federation.counted({"all sites": self.counts})
        self._say_whose_inputs(sums)
        found = {name: value for name, value in sums.items() if name not in (HOLDERS, COLUMN_HOLDERS, LEVEL_HOLDERS)}
        return Reply(sites, sums=found | {WITHHELD: self._withheld(sums["counts"], sums[HOLDERS])})

    def may_count(self, counted: Collection[str]) -> bool:
        """Return whether enough sites have joined since a census of others, who are all here: the next has them too.

        Say, once, which ones wait for that.
        """
        new = self.federation.members - {*counted} - self.shut_out
        if len(new) >= APART and {*counted} <= {*self.federation.link.sites()}:
            return True
        for site in sorted(new - self.waiting):
            self.federation.note(
                f"{site} has come late and waits, for a second site or the next run: counted alone, what it has would "
                "be the difference of two sums."
            )
        self.waiting |= new
        return False

    def _require_possible(self, request: Request, reply: Reply) -> None:
        """End the run if the sums of a census are what no samples have."""
        try:
            require_sum(request, reply, reply.sums["counts"], self.federation.study, exact=True)
        except MessageError:
            raise TrainingError(
                "the sums of the census are what no samples have: one site at least has sent something else, and masks "
                "hide which; ask each site what it has changed, and begin another run."
            ) from None

    def _say_whose_inputs(self, sums: Tensors) -> None:
        """Say which columns and levels so few sites have that what sums tell of them is of these sites alone."""
        few = held_by_few(self.federation.study, sums)
        if few:
            listed = ", ".join(few[:MOST_LISTED]) + (f" and {len(few) - MOST_LISTED:,} more" * (len(few) > MOST_LISTED))
            self.federation.note(
                f"Fewer than {FEWEST} sites have {listed}: what sums and the model say of these is of those sites."
            )

    def _withheld(self, counts: Tensor, holders: Tensor) -> Tensor:
        """Return the domains [M] that have no head of their own, and say which they are."""
        floor, study = self.federation.rehearsal.floor, self.federation.study
        assert isinstance(floor, Withheld)  # the study is a secure one
        if study.training.row().assigns:  # heads are of learned components, which all sites send
            return torch.zeros_like(counts)
        withheld, names = floor.withheld(counts, holders), study.facts.domains
        listed = ", ".join(name for name, few, rows in zip(names, withheld, counts, strict=True) if few and rows)
        why = f"fewer than {FEWEST} sites or fewer than {floor.least:,.0f} rows are behind it"
        if bool(withheld.all()) and "domain" in study.training.row().used:
            raise TrainingError(
                f"no domain can have a head of its own ({why}): lower floor in the study, or choose a method with one "
                "head, such as fedavg."
            )
        if listed:
            self.federation.note(
                f"Domains without a head of their own, which use the mean of the others': {listed} ({why})."
            )
        return withheld.long()

    def _summed(self, request: Request) -> Reply:
        """Return the sum over sites; an empty one if it was begun over sites of which some are gone."""
        for _ in range(ATTEMPTS):
            attempt = _Attempt(self, request)
            try:
                reply = attempt.reply()
            except FewHoldersError as error:
                reply, request = None, replace(request, withheld=tuple(sorted({*request.withheld, *error.domains})))
                self._say_few(request, error.domains)
            if reply is not None:
                return reply
            self.setup = None
        begun = self.begun(request)
        if begun and request.phase.name == "census":
            raise TrainingError(
                f"the census was begun with {', '.join(begun)}, and not all of them could end it; sites reveal none "
                "over others: begin another run, with another folder (--out)."
            )
        if begun:
            self.federation.note(
                f"The {request.phase.name} phase of round {request.round} was left out: not all sites that its sum was "
                "begun with could end it."
            )
            return Reply(tuple(begun))
        needed = max(FEWEST, self.federation.settings.min_clients)
        raise self.federation.too_few(request, len(attempt.answered), len(self.federation.asked(request)), needed)

    def _say_few(self, request: Request, domains: Sequence[int]) -> None:
        names = ", ".join(self.federation.study.facts.domains[domain] for domain in domains)
        self.federation.note(
            f"The {request.phase.name} phase of round {request.round} is without {names}: too few of the sites that "
            "are left hold it, or too few rows."
        )

    def begun(self, request: Request) -> list[str] | None:
        """Return over which sites a phase was to be revealed; None if it was not yet."""
        return self._begun().get(_place(request))

    def begin(self, request: Request, sites: Sequence[str]) -> None:
        """Write down over which sites a phase is to be revealed, before it is."""
        oldest = request.round - KEPT_ROUNDS  # no coordinator comes back to earlier ones
        recent = {place: each for place, each in self._begun().items() if int(place.split()[0]) > oldest}
        self._write_begun(recent | {_place(request): list(sites)})

    def forget(self, request: Request) -> None:
        """Forget over which sites a phase was to be revealed, since nobody has revealed anything."""
        self._write_begun({place: each for place, each in self._begun().items() if place != _place(request)})

    def _begun(self) -> dict[str, list[str]]:
        path = self.federation.out / BEGUN_FILE
        found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found

    def _write_begun(self, begun: dict[str, list[str]]) -> None:
        with writing(self.federation.out), replacing(self.federation.out / BEGUN_FILE) as temporary:
            temporary.write_text(json.dumps(begun), encoding="utf-8")

    def shut(self, site: str, why: str) -> None:
        """Leave a site out of all later sums, and say why."""
        self.shut_out.add(site)
        self.federation.note(f"{site} takes part in no more sums: {why}")

    def ready(self, sites: Sequence[str]) -> Setup:
        """Return keys for the next sum over these sites, new ones if there are none left or other sites are here."""
        if self.setup is None or self.setup.is_used_up or list(self.asked_for) != list(sites):
            self.setup = set_up(self.tell, sites, self.federation.name, self.federation.study.facts.keys)
            self.asked_for = sites
            for site, why in self.setup.refused.items():
                self.shut(site, why)
        return self.setup

    def tell(self, message: dict[str, Any], sites: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Send a message of the protocol to sites, and return the headers of their answers; name those that fail."""
        link, settings = self.federation.link, self.federation.settings
        found: dict[str, dict[str, Any]] = {}
        for answer in link.ask(pack({"run": self.federation.name, **message}), sites, settings.timeout):
            about, _ = read_answer(answer)
            if about["kind"] == message["kind"]:
                found[answer.site] = about
            else:
                self.federation.events.say(f"{answer.site} gave no {message['kind']}: {why_of(about)}")
        return dict(sorted(found.items()))


class _Attempt:
    """One attempt at a secure sum."""

    def __init__(self, sums: SecureSums, request: Request) -> None:
        self.sums, self.request, self.federation = sums, request, sums.federation
        self.answered: list[str] = []
        self.outcomes: list[Exchanged] = []

    def reply(self) -> Reply | None:
        """Return the sum, or None if too few sites have answered or revealed their shares."""
        here = {*self.federation.link.sites()}
        begun = self.sums.begun(self.request)
        asked = [site for site in self.federation.asked(self.request) if site not in self.sums.shut_out]
        asked = [site for site in asked if begun is None or site in begun]
        self._note([site for site in asked if site not in here], AWAY)
        reachable = [site for site in asked if site in here]
        if begun is not None and reachable != begun:
            return None
        setup = self.sums.ready(reachable)
        self._note([site for site in reachable if site not in setup.sites], "it has exchanged no keys with the others")
        self.federation.begin_phase(self.request, setup.sites, self.outcomes)
        found = self._sum(setup) if len(setup.sites) >= self._needed(setup) else None
        self.federation.write_down(self.request, self.outcomes)
        return found

    def _needed(self, setup: Setup) -> int:
        return max(setup.least, self.federation.settings.min_clients)

    def _sum(self, setup: Setup) -> Reply | None:
        rows = int(self.sums.counts.sum())
        layout = self.federation.rehearsal.layout(self.request, len(setup.sites), rows)
        message = self.federation.message(self.request, secure={**setup.about(), "rows": rows})
        total = self._collected(setup, layout, message)
        # Sites that dropped out may be back, with what they had before or without.
        self.sums.setup = replace(setup, used=setup.used + 1) if self.answered == setup.sites else None
        begun = self.sums.begun(self.request)
        if len(self.answered) < self._needed(setup) or begun not in (None, self.answered):
            return None
        self.sums.begin(self.request, self.answered)
        try:
            unmask(self.sums.tell, setup, self.answered, total, hashlib.sha256(message).digest())
        except FewHoldersError as error:
            if not {*error.domains} <= {*domains_of(each.name for each in layout.fields)}:
                self.federation.events.say("sites complain of domains that are not in the sum: it is asked for again")
                return None
            self.sums.forget(self.request)
            raise
        except UnmaskError as error:
            if isinstance(error, SharesError):
                self.sums.shut(error.site, f"{error}.")
            self.federation.events.say(f"{error}: the phase is asked for again")
            return None
        dtypes = {name: dtype for name, (_, dtype) in self.federation.rehearsal.of_all(self.request).summands.items()}
        return sum_as_reply(self.request, tuple(self.answered), layout.decode(total), dtypes)

    def _collected(self, setup: Setup, layout: Layout, message: bytes) -> Words:
        """Return the sum of all masked replies."""
        total, begun = np.zeros(layout.words, dtype=np.uint64), time.monotonic()
        for answer in self.federation.link.ask(message, setup.sites, self.federation.settings.timeout):
            outcome, words = self._read(answer, layout, time.monotonic() - begun, len(message))
            self.outcomes.append(outcome)
            self.federation.events.answered(outcome)
            if words is not None:
                total += words
                self.answered.append(answer.site)
        self.answered.sort()
        return total

    def _read(self, answer: Answer, layout: Layout, seconds: float, sent: int) -> tuple[Exchanged, Words | None]:
        about, tensors = read_answer(answer)
        spent = about.get("seconds", 0.0), sent, len(answer.content)
        outcome = self.federation.outcome(self.request, answer.site, seconds, *spent)
        if about["kind"] == "stranger":
            self.federation.members.discard(answer.site)  # it has lost its state, and will be asked to join again
        if about["kind"] == "lacks":
            self.federation.adopts(answer.site)
        if about["kind"] != MASKED:
            return replace(outcome, problem=why_of(about)), None
        try:
            require_answer_to(self.federation.place(self.request), about)
            return outcome, _words(tensors, layout)
        except MessageError as problem:
            return replace(outcome, problem=plain(str(problem))), None

    def _note(self, sites: Sequence[str], problem: str) -> None:
        self.outcomes += [self.federation.outcome(self.request, site, problem=problem) for site in sites]


def held_by_few(study: Study, sums: Tensors) -> list[str]:
    """Return the columns and levels that one or two sites have, by the sums of a census."""
    numbers = [column.name for column in study.columns if column.is_numeric]
    levels = [
        f"{column.name} {level}"
        for column in study.columns
        if column.kind == "category"
        for level in ("missing", *map(repr, column.levels))
    ]
    named = {COLUMN_HOLDERS: numbers, LEVEL_HOLDERS: levels}
    return [
        name
        for kind, names in named.items()
        if kind in sums
        for name, holders in zip(names, sums[kind].tolist(), strict=True)
        if 0 < holders < FEWEST
    ]


def _place(request: Request) -> str:
    return f"{request.round} {request.phase.name}"


def _words(tensors: Tensors, layout: Layout) -> Words:
    masked = tensors.get(MASKED)
    if masked is None or masked.dtype != torch.int64 or tuple(masked.shape) != (layout.words,) or len(tensors) > 1:
        raise MessageError(f"it sent something else than {layout.words:,} masked numbers")
    return masked.numpy().view(np.uint64)
