"""Second moments of samples; they can be summed over clients, and linear regressions are solved from the sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from feddar.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Moments:
    """The moments of the samples under each of K keys (domains or clients): count [K], X'X [K, d, d], X'y [K, d]."""

    count: Ints
    xx: Floats
    xy: Floats

    @classmethod
    def from_samples(cls, x: Floats, y: Floats, key: Ints, keys: int) -> Moments:
        """Sum the moments of samples x [N, d], y [N] by their key [N] in 0..keys-1."""
        if not len(x) == len(y) == len(key):
            raise UserError(f"x, y and key must be equally long, not {len(x)}, {len(y)} and {len(key)}.")
        if len(key) and not 0 <= key.min() <= key.max() < keys:
            raise UserError(f"Every key must lie in 0..{keys - 1}, but they span {key.min()}..{key.max()}.")
        d = x.shape[1]
        count = np.bincount(key, minlength=keys)
        xx, xy = np.zeros((keys, d, d)), np.zeros((keys, d))
        order = np.argsort(key, kind="stable")
        ends = np.cumsum(count)
        for held in np.flatnonzero(count):
            rows = order[ends[held] - count[held] : ends[held]]
            xx[held] = x[rows].T @ x[rows]
            xy[held] = x[rows].T @ y[rows]
        return cls(count, xx, xy)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the union of both sets of samples."""
        return Moments(self.count + other.count, self.xx + other.xx, self.xy + other.xy)

    def regroup(self, key: Ints, keys: int) -> Moments:
        """Sum over coarser keys: the moments under k are added to those under key[k]."""
        total = Moments(
            np.zeros(keys, dtype=self.count.dtype),
            np.zeros((keys, *self.xx.shape[1:])),
            np.zeros((keys, *self.xy.shape[1:])),
        )
        np.add.at(total.count, key, self.count)
        np.add.at(total.xx, key, self.xx)
        np.add.at(total.xy, key, self.xy)
        return total


def orthonormal(A: Floats) -> Floats:
    """Return an orthonormal basis of the columns of A."""
    return np.asarray(np.linalg.qr(A).Q)
