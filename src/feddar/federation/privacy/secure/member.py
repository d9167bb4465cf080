"""A site's part in secure aggregation: its keys and seeds, which are on its disk until the next ones are made."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from feddar.federation.privacy.secure import shamir
from feddar.federation.privacy.secure.fixed_point import Words
from feddar.federation.privacy.secure.masking import (
    AHEAD,
    SEALING,
    Announced,
    Identity,
    add_mask,
    add_pair_mask,
    derived,
    locked,
    pair_seed,
    public_of,
    sum_of,
    threshold,
    unlocked,
)
from feddar.federation.private_folder import private_folder
from feddar.federation.refused import RefusedError
from feddar.federation.study import APART, FEWEST
from feddar.results.run_folder import replacing

State = dict[str, Any]


@dataclass(frozen=True)
class Held:
    """What a site tells other sites, and nobody else, of the domains that it holds."""

    rows: tuple[int, ...]
    """The rows of each domain."""
    least: float
    """The number of rows that must be behind a sum of a domain."""

    @property
    def told(self) -> list[int]:
        """The rows of each domain, up to the number that is needed: how many more there are is not told."""
        return [min(number, max(1, math.ceil(self.least))) for number in self.rows]

    def few(self, domains: Sequence[int], told: Sequence[Sequence[int]]) -> list[int]:
        """Return which domains too few sites hold, or with too few rows, by what each site has told.

        A domain that nobody holds adds nothing to a sum, and is none of them.
        """
        return [domain for domain in domains if self._is_few([each[domain] for each in told if len(each) > domain])]

    def _is_few(self, rows: Sequence[int]) -> bool:
        holders = sum(number > 0 for number in rows)
        return holders > 0 and (holders < FEWEST or sum(rows) < self.least)


class Member:
    """One site in the secure sums of one run."""

    def __init__(
        self, folder: Path, run: str, name: str, identity: Identity, known: Mapping[str, str] | None = None,
        held: Held | None = None,
    ) -> None:  # fmt: skip
        """``known`` are the fingerprints of the keys that all sites are known by, if the study lists them."""
        self.folder, self.run, self.name, self.identity, self.known = folder, run, name, identity, known
        self.held = held or Held((), 0)

    def announce(self, setup: object) -> dict[str, Any]:
        """Make keys for the next sums, forget all earlier ones, and return what the site announces."""
        if not isinstance(setup, str) or not re.fullmatch(r"[0-9a-f]{32}", setup):
            raise RefusedError("keys are asked for without a proper name.")
        keys = [X25519PrivateKey.generate() for _ in range(AHEAD + 1)]
        announced = Announced.by(self.identity, self.run, setup, self.name, [public_of(key) for key in keys])
        self._write({
            "setup": setup, "keys": [key.private_bytes_raw().hex() for key in keys],
            "announced": announced.as_entry(), "used": {}, "revealed": {},
        })  # fmt: skip
        return announced.as_entry()

    def share(self, setup: object, entries: object) -> dict[str, Any]:
        """Check the keys of all sites, and return for each site an encrypted share of each of this site's secrets."""
        state = self._state(setup)
        if "roster" in state:
            raise RefusedError("it has given its shares for these keys already.")
        roster = self._checked(state, entries)
        order, most = sorted(roster), threshold(len(roster))
        sealed: dict[str, list[str]] = {peer: [] for peer in order if peer != self.name}
        kept, seeds = [], []
        for index, private in enumerate(state["keys"][:AHEAD]):
            seed = secrets.token_bytes(shamir.BYTES)
            parts = (shamir.split(secret, len(order), most) for secret in (seed, bytes.fromhex(private)))
            pairs = ([f"{part:x}" for part in pair] for pair in zip(*parts, strict=True))
            shares = dict(zip(order, pairs, strict=True))
            for peer, given in sealed.items():
                context = sum_of("share", self.run, setup, index, self.name, peer)
                content = json.dumps([shares[peer], self.held.told]).encode()
                given.append(locked(_key(state, SEALING), roster[peer].keys[SEALING], content, context).hex())
            kept.append(shares[self.name])
            seeds.append(seed.hex())
        entries_checked = {site: announced.as_entry() for site, announced in roster.items()}
        self._write(state | {"roster": entries_checked, "seeds": seeds, "kept": kept})
        # With these the coordinator can tell that it has put a seed together rightly.
        return {"to": sealed, "hashes": [sum_of("seed", seed).hex() for seed in seeds]}

    def mask(
        self, words: Words, about: State, context: bytes, what: tuple[int, str], domains: Sequence[int] = ()
    ) -> None:
        """Add to words, in place, the masks of this site and of its pairs with all who take part in a sum.

        ``about`` says which keys are used and who takes part, ``context`` is the SHA-256 of the whole request,
        ``what`` the round and phase that are summed, and ``domains`` those that something in the sum is of alone.
        """
        state = self._state(about.get("setup"))
        index = about.get("index")
        if type(index) is not int or not 0 <= index < AHEAD or "seeds" not in state:
            raise RefusedError("there are no such keys.")
        sites = self._enough(about.get("sites"), state["roster"], len(state["roster"]))
        used = {"request": context.hex(), "sites": sites, "what": list(what), "domains": list(domains)}
        if state["used"].get(str(index), used) != used:
            raise RefusedError("these keys have masked another reply.")
        self._write(state | {"used": state["used"] | {str(index): used}})
        key = _key(state, index)
        add_mask(words, derived(bytes.fromhex(state["seeds"][index]), context))
        for peer in sites:
            if peer != self.name:
                seed = pair_seed(key, bytes.fromhex(state["roster"][peer]["keys"][index]), context)
                add_pair_mask(words, self.name, peer, seed)

    def reveal(self, about: State) -> dict[str, Any]:
        """Return this site's shares: of the seeds of those who have answered, and of the keys of those who have not.

        If too few of those who have answered hold a domain that is in the sum, return that instead.
        """
        state = self._state(about.get("setup"))
        index, sealed = about.get("index"), about.get("sealed")
        used = state["used"].get(str(index))
        if type(index) is not int or used is None or not isinstance(sealed, dict):
            raise RefusedError("it has masked nothing with these keys.")
        answered = self._enough(about.get("answered"), used["sites"], len(state["roster"]))
        if state["revealed"].get(str(index), answered) != answered:
            raise RefusedError("it has revealed its shares for others who have answered.")
        opened = {peer: self._opened(state, index, peer, sealed.get(peer)) for peer in used["sites"]}
        few = self.held.few(used["domains"], [told for peer, (_, told) in opened.items() if peer in answered])
        if few:
            return {"few": few}
        self._require_apart(tuple(used["what"]), answered)
        self._write(state | {"revealed": state["revealed"] | {str(index): answered}})
        return {"shares": {peer: pair[0 if peer in answered else 1] for peer, (pair, _) in opened.items() if pair}}

    def _opened(self, state: State, index: int, peer: str, sealed: Any) -> tuple[list[str], list[int]]:
        """Return the shares that a peer has encrypted for this site, and what it holds; nothing if these are none."""
        if peer == self.name:
            return state["kept"][index], self.held.told
        mine = sealed.get(self.name) if isinstance(sealed, dict) else None
        if not isinstance(mine, str) or not re.fullmatch(r"([0-9a-f]{2}){1,10000}", mine):
            return [], []
        context = sum_of("share", self.run, state["setup"], index, peer, self.name)
        public = bytes.fromhex(state["roster"][peer]["keys"][SEALING])
        content = unlocked(_key(state, SEALING), public, bytes.fromhex(mine), context)
        return ([], []) if content is None else _shares_and_rows(content)

    def _checked(self, state: State, entries: object) -> dict[str, Announced]:
        """Return the announced keys of all sites, if each was signed by the site, and this site's own are unchanged."""
        if not isinstance(entries, dict) or entries.get(self.name) != state["announced"] or len(entries) < FEWEST:
            raise RefusedError(f"a secure sum is of at least {FEWEST} sites, of which this is one.")
        roster: dict[str, Announced] = {}
        for site, entry in entries.items():
            announced = Announced.read(entry)
            if announced is None:
                raise RefusedError(f"what '{site:.50}' announced are no keys.")
            objection = announced.objection(self.run, state["setup"], site, self.known)
            if objection:
                raise RefusedError(objection)
            roster[site] = announced
        if len({announced.identity for announced in roster.values()}) < len(roster):
            raise RefusedError("two sites sign with one key.")
        return roster

    def _enough(self, sites: Any, among: Any, roster: int) -> list[str]:
        """Return a list of sites; refuse one that is not of this and enough others, each once, in their order."""
        listed = isinstance(sites, list) and all(isinstance(site, str) for site in sites)
        if not listed or sites != sorted(set(sites)) or not {*sites} <= {*among} or self.name not in sites:
            raise RefusedError("it is not told who takes part in the sum.")
        if len(sites) < threshold(roster):
            raise RefusedError(f"{len(sites)} sites of {roster} are too few for a secure sum.")
        return [*sites]

    def _require_apart(self, what: tuple[int, str], answered: list[str]) -> None:
        """Refuse to reveal a second sum of the same replies over other sites, whose difference would be of few.

        A census is repeated when sites join: then it is over all sites of before and several more. Of any other sets
        the sums could be solved for those of single sites.
        """
        path = self.folder / "sums.json"
        earlier: dict[str, list[list[str]]] = _read(path) or {}
        place, least = f"{what[0]} {what[1]}", APART if what[1] == "census" else math.inf
        before = earlier.get(place, [])
        if any(not {*each} <= {*answered} or 0 < len(answered) - len(each) < least for each in before):
            raise RefusedError(f"the {what[1]} phase of round {what[0]} was summed over other sites before.")
        if answered not in before:
            _write(path, earlier | {place: [*before, answered]})

    def _state(self, setup: object) -> State:
        state = _read(self.folder / "keys.json")
        if state is None or state["setup"] != setup:
            raise RefusedError("it has no such keys: they were replaced.")
        return state

    def _write(self, state: State) -> None:
        _write(self.folder / "keys.json", state)


def _shares_and_rows(content: bytes) -> tuple[list[str], list[int]]:
    """Return what a peer has sealed: two shares, and its rows of each domain; nothing if it is something else."""
    try:
        pair, told = json.loads(content)
        proper = all(isinstance(part, str) for part in pair) and all(type(number) is int for number in told)
    except (ValueError, TypeError):
        return [], []
    return ([*pair], [*told]) if proper and len(pair) == 2 else ([], [])


def _key(state: State, place: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(state["keys"][place]))


def _read(path: Path) -> State | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write(path: Path, content: State) -> None:
    private_folder(path.parent)
    with replacing(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps(content), encoding="utf-8")
