"""Keys, seeds and masks: what sites agree on in pairs, and the key stream that hides a reply."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from feddar.federation.privacy.secure.fixed_point import Words
from feddar.federation.security.certificates import fingerprint
from feddar.federation.study import FEWEST

AHEAD = 8
"""The number of sums that keys and shares are exchanged for at once."""
SEALING = AHEAD
"""The place of the key that shares are encrypted for, after those of the sums: no share of it is ever given."""
_LONGEST = 1000
"""The longest public key, in characters."""
_BLOCK = 1 << 20
"""Words of key stream that are made at a time, so that they stay in the processor's cache."""


def threshold(sites: int) -> int:
    """Return how many of so many sites must answer, and reveal their shares: more than two thirds, and three."""
    return max(FEWEST, 2 * sites // 3 + 1)


def sum_of(*parts: object) -> bytes:
    """Return the SHA-256 of values that JSON can hold, which no other values have."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def public_of(key: X25519PrivateKey) -> bytes:
    """Return the public key of a private one."""
    return key.public_key().public_bytes_raw()


def pair_seed(key: X25519PrivateKey, peer: bytes, context: bytes) -> bytes:
    """Return 32 bytes that only the holders of both keys know, and that are others for every context."""
    return derived(key.exchange(X25519PublicKey.from_public_bytes(peer)), context)


def derived(secret: bytes, context: bytes) -> bytes:
    """Return 32 bytes by a secret and a context (HKDF with SHA-256)."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"feddar " + context).derive(secret)


def add_mask(words: Words, seed: bytes, *, subtract: bool = False) -> None:
    """Add the key stream of a seed (AES-256 in counter mode) to words, in place, modulo 2^64."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(8 * min(_BLOCK, len(words)))
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK]
        mask = np.frombuffer(stream.update(zeros[: 8 * len(part)]), dtype="<u8")
        part += -mask if subtract else mask


def add_pair_mask(words: Words, own: str, peer: str, seed: bytes, *, undo: bool = False) -> None:
    """Add the mask of a pair of sites to the words of one of them; the other subtracts the same."""
    add_mask(words, seed, subtract=(own > peer) != undo)


def locked(key: X25519PrivateKey, peer: bytes, content: bytes, context: bytes) -> bytes:
    """Return content encrypted for a peer; ``context`` says from whom to whom, and must be another each time."""
    return ChaCha20Poly1305(pair_seed(key, peer, context)).encrypt(bytes(12), content, None)


def unlocked(key: X25519PrivateKey, peer: bytes, content: bytes, context: bytes) -> bytes | None:
    """Undo ``locked``; None if it was not encrypted by the peer for this context."""
    try:
        return ChaCha20Poly1305(pair_seed(key, peer, context)).decrypt(bytes(12), content, None)
    except (InvalidTag, ValueError):
        return None


@dataclass(frozen=True)
class Identity:
    """The key that a site is known by, with which it signs."""

    key: ec.EllipticCurvePrivateKey

    @property
    def public(self) -> str:
        """The public key as a line in OpenSSH's format."""
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        return self.key.public_key().public_bytes(*form).decode()

    def signed(self, content: bytes) -> bytes:
        """Return the signature of content."""
        return self.key.sign(content, ec.ECDSA(hashes.SHA256()))


def is_signed(public: str, signature: bytes, content: bytes) -> bool:
    """Return whether the holder of a public key, a line in OpenSSH's format, has signed the content."""
    try:
        key = serialization.load_ssh_public_key(public.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def fingerprint_of(public: str) -> str:
    """Return the fingerprint of a public key, as ``feddar keys`` prints it."""
    return fingerprint(public.encode())


@dataclass(frozen=True)
class Announced:
    """The keys that a site announces, one for each of the next sums and one to encrypt for, signed."""

    keys: tuple[bytes, ...]
    identity: str
    signature: bytes

    @classmethod
    def by(cls, identity: Identity, run: str, setup: str, site: str, keys: Sequence[bytes]) -> Announced:
        """Return a site's keys, signed for this run and setup."""
        signature = identity.signed(_announcement(run, setup, site, keys))
        return cls(tuple(keys), identity.public, signature)

    @classmethod
    def read(cls, entry: Any) -> Announced | None:
        """Return what ``as_entry`` made; None if it is something else."""
        try:
            keys = tuple(bytes.fromhex(key) for key in entry["keys"])
            found = cls(keys, str(entry["identity"]), bytes.fromhex(entry["signature"]))
        except (KeyError, TypeError, ValueError):
            return None
        proper = len(keys) == AHEAD + 1 and {len(key) for key in keys} == {32} and len(found.identity) <= _LONGEST
        return found if proper else None

    def as_entry(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {"keys": [k.hex() for k in self.keys], "identity": self.identity, "signature": self.signature.hex()}

    def objection(self, run: str, setup: str, site: str, known: Mapping[str, str] | None) -> str | None:
        """Return why nobody should use these keys as a site's; None if all is well.

        ``known`` are the fingerprints of the keys that sites are known by, if the study lists them.
        """
        if not is_signed(self.identity, self.signature, _announcement(run, setup, site, self.keys)):
            return f"the keys of '{site:.50}' are not signed by that site."
        if known is not None and known.get(site) != fingerprint_of(self.identity):
            return f"the study does not list the key of '{site:.50}'."
        if not all(map(_hides, self.keys)):
            return f"the keys of '{site:.50}' hide nothing."
        return None


def _hides(public: bytes) -> bool:
    """Return whether secrets can be agreed on with a public key: with a few of them everybody has the same one."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def _announcement(run: str, setup: str, site: str, keys: Sequence[bytes]) -> bytes:
    return b"feddar keys " + sum_of(run, setup, site, [key.hex() for key in keys])
