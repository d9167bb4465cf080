"""Shamir's secret sharing: any ``threshold`` shares of a secret give it back, and fewer say nothing of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
BYTES = 32
"""The length of a secret."""


def split(secret: bytes, holders: int, threshold: int) -> list[int]:
    """Return a share for each holder 1, 2, ...: the values there of a random polynomial with the secret at 0."""
    if len(secret) != BYTES or not 1 <= threshold <= holders:
        raise ValueError(f"a secret of {len(secret)} bytes, {threshold} of {holders} shares")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(coefficients, x) for x in range(1, holders + 1)]


def _value(coefficients: list[int], x: int) -> int:
    """Return the value of a polynomial, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def joined(shares: Mapping[int, int]) -> bytes:
    """Return the secret of which these are shares, by holder; a ``ValueError`` if they are of no secret."""
    total = 0
    for x, y in shares.items():
        others = [other for other in shares if other != x]
        above, below = 1, 1
        for other in others:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    secret = total % PRIME
    if secret >= 1 << 8 * BYTES:
        raise ValueError("these shares are of no secret")
    return secret.to_bytes(BYTES)
