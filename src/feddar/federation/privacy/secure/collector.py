"""The coordinator's part in secure aggregation: it passes on keys and shares, and takes the masks off a sum."""

from __future__ import annotations

import secrets
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


class UnmaskError(TrainingError):
    """Too few sites have revealed their shares for a sum to be read."""


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


def set_up(ask: Ask, sites: Sequence[str]) -> Setup:
    """Let sites exchange keys and shares for the next sums; those that fail are left out."""
    name = secrets.token_hex(16)
    found = {site: Announced.read(about) for site, about in ask({"kind": "keys", "setup": name}, sites).items()}
    keys = {site: announced for site, announced in found.items() if announced is not None}
    if len(keys) < FEWEST:
        return Setup(name, keys, {}, {})
    entries = {site: announced.as_entry() for site, announced in sorted(keys.items())}
    answers = ask({"kind": "shares", "setup": name, "roster": entries}, sorted(keys))
    given = {site: about for site, about in answers.items() if _has_shares(about, {*keys} - {site})}
    sealed = {site: about["to"] for site, about in given.items()}
    return Setup(name, keys, sealed, {site: about["hashes"] for site, about in given.items()})


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
    sealed = {site: {peer: each[index] for peer, each in setup.sealed[site].items()} for site in setup.sites}
    message = {"kind": "reveal", "setup": setup.name, "index": index, "answered": list(answered), "sealed": sealed}
    revealed = ask(message, answered)
    if len(revealed) < setup.least:
        raise UnmaskError(f"{len(revealed)} sites have revealed their shares, and {setup.least} are needed")
    for site in answered:
        seed = _secret(setup, revealed, site, _hash_of_seed, setup.hashes[site][index])
        add_mask(total, derived(seed, context), subtract=True)
    for site in gone:
        private = _secret(setup, revealed, site, _public, setup.keys[site].keys[index].hex())
        key = X25519PrivateKey.from_private_bytes(private)
        for peer in answered:
            seed = pair_seed(key, setup.keys[peer].keys[index], context)
            add_pair_mask(total, peer, site, seed, undo=True)


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
    raise UnmaskError(f"the shares of '{site}' do not fit together")


def _share(about: Mapping[str, Any], site: str) -> int | None:
    """Return the share of a site's secret in an answer; None if there is none."""
    text = about["shares"].get(site) if isinstance(about.get("shares"), dict) else None
    try:
        share = int(text, 16) if isinstance(text, str) and len(text) <= 132 else None
    except ValueError:
        return None
    return share if share is not None and 0 <= share < shamir.PRIME else None
