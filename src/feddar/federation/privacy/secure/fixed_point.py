"""Numbers as whole numbers modulo 2^64, which add exactly and in any order, and can be masked.

Changes of parameters have a known limit: they take one word, with as many binary places as fit. Other sums can be of
any size: they take five words of 48 bits each, from 2^127 down to 2^-112, so that the squares of 1e6 rows with numbers
of 1e15 fit. A number that does not fit is refused, and never wrapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.errors import TrainingError
from feddar.models.parameters import Tensors

Words = NDArray[np.uint64]
LIMBS, LIMB_BITS, PLACES = 5, 48, 112
LARGEST = 2.0 ** (LIMBS * LIMB_BITS - PLACES - 1)
MOST_SITES = 2**14
"""So many limbs can be added up in a word."""


class RangeError(TrainingError):
    """A number is too large to be sent."""


@dataclass(frozen=True)
class Field:
    """A tensor of a sum: its name and shape, and what a site may add to each of its numbers at most."""

    name: str
    shape: tuple[int, ...]
    limit: float | None
    """None: any number below ``LARGEST``."""

    @property
    def size(self) -> int:
        """The number of numbers."""
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        """The number of words that they take."""
        return self.size * (LIMBS if self.limit is None else 1)


@dataclass(frozen=True)
class Layout:
    """How the tensors of a sum over so many sites lie in a row of words."""

    fields: tuple[Field, ...]
    sites: int

    @cached_property
    def words(self) -> int:
        """The number of words of all tensors."""
        return sum(field.words for field in self.fields)

    def encode(self, tensors: Tensors) -> Words:
        """Return the words of a site's summands; tensors that it does not have count as zeros."""
        rows = [self._encoded(field, tensors.get(field.name)) for field in self.fields]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *rows])

    def decode(self, words: Words) -> Tensors:
        """Return the tensors of a sum of such words, in float64."""
        found: Tensors = {}
        start = 0
        for field in self.fields:
            part = words[start : start + field.words].view(np.int64)
            values = _from_limbs(part.reshape(LIMBS, -1)) if field.limit is None else self._unscaled(part, field.limit)
            found[field.name] = torch.from_numpy(values).reshape(field.shape)
            start += field.words
        return found

    def _encoded(self, field: Field, tensor: Tensor | None) -> Words:
        if tensor is None:
            return np.zeros(field.words, dtype=np.uint64)
        values = tensor.detach().double().flatten().numpy()
        limit = LARGEST if field.limit is None else field.limit
        if values.size != field.size or not bool((np.abs(values) <= limit).all()):
            raise RangeError(f"its '{field.name}' is larger than {limit:.3g}, the most that fits into a sum of sites")
        whole = _to_limbs(values) if field.limit is None else np.rint(np.ldexp(values, self._places(limit)))
        return whole.astype(np.int64).flatten().view(np.uint64)

    def _unscaled(self, part: NDArray[np.int64], limit: float) -> NDArray[np.float64]:
        return np.ldexp(part.astype(np.float64), -self._places(limit))

    def _places(self, limit: float) -> int:
        """Return how many binary places fit, so that the sum over all sites stays below 2^62."""
        return 62 - math.frexp(limit)[1] - (self.sites - 1).bit_length()


def _to_limbs(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the digits of each number to the base 2^48, with its sign, highest last: [LIMBS, n]; steps are exact."""
    rest, limbs = np.abs(values), np.zeros((LIMBS, values.size))
    for place in reversed(range(LIMBS)):
        limbs[place] = np.floor(np.ldexp(rest, PLACES - LIMB_BITS * place))
        rest = rest - np.ldexp(limbs[place], LIMB_BITS * place - PLACES)
    return limbs * np.sign(values)


def _from_limbs(limbs: NDArray[np.int64]) -> NDArray[np.float64]:
    """Undo ``_to_limbs`` for sums of digits."""
    carried = _carried(limbs)
    # With all digits of one sign nothing cancels, so that small sums are as exact as large ones.
    negative = carried[-1] < 0
    carried = _carried(np.where(negative, -carried, carried))
    total = np.zeros(carried.shape[1])
    for place in range(LIMBS):
        total += np.ldexp(carried[place].astype(np.float64), LIMB_BITS * place - PLACES)
    return np.where(negative, -total, total)


def _carried(limbs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the same numbers with all digits but the highest from 0 to 2^48."""
    limbs = limbs.copy()
    for place in range(LIMBS - 1):
        carry = limbs[place] >> LIMB_BITS
        limbs[place] -= carry << LIMB_BITS
        limbs[place + 1] += carry
    return limbs
