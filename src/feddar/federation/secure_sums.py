"""Phases as secure sums: the coordinator gets one reply, the sum over all sites that answered (``privacy.secure``).

A site that drops out before its masked reply has come is left out of the sum; with too few left the phase is asked
again, with new keys, and sites send what they have stored. The sums of the census are stored too: asked for again with
one site more or less, they would say what that site has.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from feddar.algorithm.protocol import WITHHELD, Reply, Request
from feddar.algorithm.wire import MessageError, pack, unpack
from feddar.errors import TrainingError
from feddar.federation.answers import read_answer, require_answer_to, why_of
from feddar.federation.links.link import Answer
from feddar.federation.privacy.secure.collector import Setup, UnmaskError, set_up, unmask
from feddar.federation.privacy.secure.fixed_point import Layout, Words
from feddar.federation.privacy.secure.summands import HOLDERS, sum_as_reply
from feddar.federation.privacy.withheld import Withheld
from feddar.federation.reply_checks import require_sum
from feddar.federation.study import APART, FEWEST
from feddar.models.parameters import Tensors
from feddar.results.run_folder import replacing, writing

if TYPE_CHECKING:
    from feddar.federation.coordinator import Exchanged, Federation

CENSUS_FILE = "census.bin"
MASKED = "masked"
ATTEMPTS = 3
"""How often a phase is asked for."""


class SecureSums:
    """The secure sums of one run, over the sites of a federation."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.setup: Setup | None = None
        self.asked_for: Sequence[str] = ()
        """The sites that the keys in use were asked of."""
        self.counts = torch.zeros(len(federation.study.facts.domains), dtype=torch.long)
        """The rows of each domain over all sites, as the census says."""

    def of(self, request: Request) -> Reply:
        """Return the sum over sites of their replies to a request, as a reply of several clients."""
        if request.phase.name == "census":
            return self._census(request)
        reply = self._summed(request)
        everyone = {*reply.clients} == self.federation.counted_sites
        try:
            require_sum(request, reply, self.counts, self.federation.study, exact=everyone)
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
        if not sites or len(federation.members - {*sites}) >= APART:
            reply = self._summed(request)
            sites, sums = reply.clients, reply.sums
            require_sum(request, reply, sums["counts"], federation.study, exact=True)
            with writing(federation.out), replacing(path) as temporary:
                temporary.write_bytes(pack({"sites": list(sites)}, sums))
        self.counts, federation.counted_sites = sums["counts"], frozenset(sites)
        federation.counted({"all sites": self.counts})
        found = {name: value for name, value in sums.items() if name != HOLDERS}
        return Reply(sites, sums=found | {WITHHELD: self._withheld(sums["counts"], sums[HOLDERS])})

    def _withheld(self, counts: Tensor, holders: Tensor) -> Tensor:
        """Return the domains [M] that have no head of their own, and say which they are."""
        floor, study = self.federation.rehearsal.floor, self.federation.study
        assert isinstance(floor, Withheld)  # the study is a secure one
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
        for _ in range(ATTEMPTS):
            attempt = _Attempt(self, request)
            reply = attempt.reply()
            if reply is not None:
                return reply
            self.setup = None
        needed = max(FEWEST, self.federation.settings.min_clients)
        raise self.federation.too_few(request, len(attempt.answered), len(self.federation.asked(request)), needed)

    def ready(self, sites: Sequence[str]) -> Setup:
        """Return keys for the next sum over these sites, new ones if there are none left or other sites are here."""
        if self.setup is None or self.setup.is_used_up or list(self.asked_for) != list(sites):
            self.setup, self.asked_for = set_up(self.tell, sites), sites
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
        asked = self.federation.asked(self.request)
        self._note([site for site in asked if site not in here], "it is not connected")
        reachable = [site for site in asked if site in here]
        setup = self.sums.ready(reachable)
        self._note([site for site in reachable if site not in setup.sites], "it has exchanged no keys with the others")
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
        if len(self.answered) < self._needed(setup):
            return None
        try:
            unmask(self.sums.tell, setup, self.answered, total, hashlib.sha256(message).digest())
        except UnmaskError as error:
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
            self.federation.members.discard(
                answer.site
            )  # it has lost its state folder, and will be asked to join again
        if about["kind"] == "lacks":
            self.federation.adopts(answer.site)
        if about["kind"] != MASKED:
            return replace(outcome, problem=why_of(about)), None
        try:
            require_answer_to(self.federation.place(self.request), about)
            return outcome, _words(tensors, layout)
        except MessageError as problem:
            return replace(outcome, problem=str(problem)), None

    def _note(self, sites: Sequence[str], problem: str) -> None:
        self.outcomes += [self.federation.outcome(self.request, site, problem=problem) for site in sites]


def _words(tensors: Tensors, layout: Layout) -> Words:
    masked = tensors.get(MASKED)
    if masked is None or masked.dtype != torch.int64 or tuple(masked.shape) != (layout.words,) or len(tensors) > 1:
        raise MessageError(f"it sent something else than {layout.words:,} masked numbers")
    return masked.numpy().view(np.uint64)
