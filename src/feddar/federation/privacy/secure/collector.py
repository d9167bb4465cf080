"""The coordinator's part in secure aggregation: it passes on keys and shares, and takes the masks off a sum."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from feddar.errors import TrainingError
from feddar.federation.privacy.secure import shamir
from feddar.federation.privacy.secure.fixed_point import Words
from feddar.federation.privacy.secure.masking import (
    AHEAD,
    Announced,
    add_mask,
    add_pair_mask,
    derived,
    pair_seed,
    public_of,
    sum_of,
    threshold,
)
from feddar.federation.study import FEWEST

Ask = Callable[[dict[str, Any], Sequence[str]], dict[str, dict[str, Any]]]
"""Sends a message to sites, and returns the headers of their answers by site; of sites that failed there is none."""


ASKED = 3
"""How often sites are asked to reveal."""


class UnmaskError(TrainingError):
    """Too few sites have revealed their shares for a sum to be read."""


class SharesError(UnmaskError):
    """The shares that a ``site`` has given to others are none."""

    def __init__(self, site: str) -> None:
        super().__init__(f"the shares that {site} gave to others do not fit together")
        self.site = site


class FewHoldersError(UnmaskError):
    """Sites reveal nothing, since too few of those who answered hold some ``domains``, or with too few rows."""

    def __init__(self, domains: Sequence[int]) -> None:
        super().__init__("too few sites that hold a domain, or too few of its rows, are left in the sum")
        self.domains = domains


@dataclass(frozen=True)
class Setup:
    """Keys and shares that sites have exchanged for the next sums."""

    name: str
    keys: Mapping[str, Announced]
    """The announced keys of all sites that shares are for."""
    sealed: Mapping[str, Mapping[str, list[str]]]
    """The encrypted shares of each site that has given some, by whom they are for; these sites can take part."""
    hashes: Mapping[str, list[str]]
    """The hashes of these sites' seeds."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why the keys of other sites are not used."""
    used: int = 0
    """How many sums they were used for."""
    order: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(sorted(self.keys)))

    @property
    def sites(self) -> list[str]:
        """The sites that can take part in a sum."""
        return sorted(self.sealed)

    @property
    def least(self) -> int:
        """The least number of sites that must answer, and reveal."""
        return threshold(len(self.keys))

    @property
    def is_used_up(self) -> bool:
        """Whether there are no keys left for another sum."""
        return self.used >= AHEAD

    def about(self) -> dict[str, Any]:
        """Return which keys a request is masked with, and who takes part."""
        return {"setup": self.name, "index": self.used, "sites": self.sites}


def set_up(ask: Ask, sites: Sequence[str], run: str, known: Mapping[str, str] | None = None) -> Setup:
    """Let sites of a run exchange keys and shares for the next sums; those that fail are left out.

    ``known`` are the fingerprints of the keys that sites are known by, if the study lists them.
    """
    name = secrets.token_hex(16)
    found = {site: Announced.read(about) for site, about in ask({"kind": "keys", "setup": name}, sites).items()}
    owners = Counter(announced.identity for announced in found.values() if announced is not None)
    keys: dict[str, Announced] = {}
    refused: dict[str, str] = {}
    for site, announced in found.items():
        if announced is None:
            refused[site] = "what it announced are no keys."
        elif objection := announced.objection(run, name, site, known):
            refused[site] = objection
        elif owners[announced.identity] > 1:
            refused[site] = "another site signs with the same key."
        else:
            keys[site] = announced
    if len(keys) < FEWEST:
        return Setup(name, keys, {}, {}, refused)
    entries = {site: announced.as_entry() for site, announced in sorted(keys.items())}
    answers = ask({"kind": "shares", "setup": name, "roster": entries}, sorted(keys))
    given = {site: about for site, about in answers.items() if _has_shares(about, {*keys} - {site})}
    sealed = {site: about["to"] for site, about in given.items()}
    return Setup(name, keys, sealed, {site: about["hashes"] for site, about in given.items()}, refused)


def _has_shares(about: Mapping[str, Any], peers: set[str]) -> bool:
    to, hashes = about.get("to"), about.get("hashes")
    if not isinstance(to, dict) or to.keys() != peers or not isinstance(hashes, list) or len(hashes) != AHEAD:
        return False
    return all(isinstance(each, list) and len(each) == AHEAD for each in to.values())


def unmask(ask: Ask, setup: Setup, answered: Sequence[str], total: Words, context: bytes) -> None:
    """Take all masks off a sum over the sites that have answered, in place, by the shares that these reveal.

    ``context`` is the SHA-256 of the request that they answered. Too few shares are an ``UnmaskError``.
    """
    index, gone = setup.used, [site for site in setup.sites if site not in answered]
    revealed = _revealed(ask, setup, answered)
    for site in answered:
        seed = _secret(setup, revealed, site, _hash_of_seed, setup.hashes[site][index])
        add_mask(total, derived(seed, context), subtract=True)
    for site in gone:
        private = _secret(setup, revealed, site, _public, setup.keys[site].keys[index].hex())
        key = X25519PrivateKey.from_private_bytes(private)
        for peer in answered:
            seed = pair_seed(key, setup.keys[peer].keys[index], context)
            add_pair_mask(total, peer, site, seed, undo=True)


def _revealed(ask: Ask, setup: Setup, answered: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what sites reveal, of at least as many as are needed; those of whom nothing came are asked again."""
    sealed = {site: {peer: each[setup.used] for peer, each in setup.sealed[site].items()} for site in setup.sites}
    about = {"setup": setup.name, "index": setup.used, "answered": list(answered), "sealed": sealed}
    revealed: dict[str, dict[str, Any]] = {}
    for _ in range(ASKED):
        revealed |= ask({"kind": "reveal", **about}, [site for site in answered if site not in revealed])
        few = [each for each in map(_few, revealed.values()) if each]
        # One site alone may be wrong, or want to keep others from going on.
        if 2 * len(few) > len(revealed):
            raise FewHoldersError(sorted({domain for each in few for domain in each}))
        if len(revealed) - len(few) >= setup.least:
            return revealed
    raise UnmaskError(f"{len(revealed)} sites have revealed their shares, and {setup.least} are needed")


def _few(about: Mapping[str, Any]) -> list[int]:
    """Return the domains of which a site says that too little is behind the sum; none if it reveals its shares."""
    few = about.get("few")
    listed = isinstance(few, list) and all(type(domain) is int for domain in few)
    return few if listed and isinstance(few, list) else []


def _hash_of_seed(seed: bytes) -> str:
    return sum_of("seed", seed.hex()).hex()


def _public(private: bytes) -> str:
    return public_of(X25519PrivateKey.from_private_bytes(private)).hex()


def _secret(
    setup: Setup, revealed: Mapping[str, Mapping[str, Any]], site: str, known: Callable[[bytes], str], wanted: str
) -> bytes:
    """Return the secret of a site from the shares of others, leaving one out if all together are not right.

    ``known`` of the secret must be what is ``wanted``.
    """
    found = ((setup.order.index(peer) + 1, _share(about, site)) for peer, about in revealed.items())
    shares = {x: y for x, y in found if y is not None}
    tries = [shares, *({x: y for x, y in shares.items() if x != left_out} for left_out in shares)]
    for some in tries:
        if len(some) < threshold(len(setup.order)):
            continue
        try:
            secret = shamir.joined(some)
        except ValueError:
            continue
        if known(secret) == wanted:
            return secret
    raise SharesError(site)


def _share(about: Mapping[str, Any], site: str) -> int | None:
    """Return the share of a site's secret in an answer; None if there is none."""
    text = about["shares"].get(site) if isinstance(about.get("shares"), dict) else None
    try:
        share = int(text, 16) if isinstance(text, str) and len(text) <= 132 else None
    except ValueError:
        return None
    return share if share is not None and 0 <= share < shamir.PRIME else None
