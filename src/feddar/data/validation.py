"""The validation part: samples of the training part that choose the round in use, and train nothing.

Every client divides its own samples, with a seed of its own, so that sites that divide theirs alone come to the same
parts as a simulation of them on one machine.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.cohort import Cohort


def divided(cohort: Cohort, share: float, seed: int, least: int = 1) -> tuple[Cohort, Cohort]:
    """Return the samples to train on and those held out for validation, both sorted by client, with the same names.

    See ``held_out`` for the arguments; columns and levels are those of the whole, so that one model fits both.
    """
    mask, order = held_out(cohort, share, seed, least), np.argsort(cohort.client.numpy(), kind="stable")
    kept, held = (cohort.rows(torch.from_numpy(order[chosen[order]])) for chosen in (~mask, mask))
    return kept, held


def held_out(cohort: Cohort, share: float, seed: int, least: int = 1) -> NDArray[np.bool_]:
    """Return a mask of the samples held out: about ``share`` of each client's, stratified by domain and label.

    The samples of a group (a patient) stay together. A client holds out samples of a domain only if those of at least
    ``least`` patients are held out and those of at least ``least`` are left to train on; so nobody loses the last one.
    """
    light = replace(cohort, x=())  # labels and names are enough, and images would be copied
    mask = np.zeros(len(cohort), bool)
    for number, name in enumerate(cohort.clients):
        rows = cohort.rows_of(torch.tensor([number]))
        part = light.rows(rows)
        mask[rows.numpy()] = _enough_of_each(part, part.held_out(share, _seed(seed, name)), least)
    return mask if cohort.group is None else _whole_groups(cohort.group.numpy(), mask)


def most_held_out(kept: Tensor, share: float, clients: int) -> Tensor:
    """Return how many samples of each domain [M] so many clients hold out at most, if ``kept`` are left; no groups.

    Of n samples of a domain a client holds out less than ``share`` n + 1, and none if none would be left.

    >>> most_held_out(torch.tensor([0, 99]), 0.5, 1)
    tensor([  0., 101.], dtype=torch.float64)
    """
    most = share / (1 - share) * (kept.double() + clients) + clients
    return torch.where(kept > 0, most, 0) if share else torch.zeros_like(most)


def _seed(seed: int, client: str) -> int:
    """Return the seed of a client's division: another than that of the test part, and than other clients'."""
    text = f"{seed}/validation/{client}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _enough_of_each(part: Cohort, mask: NDArray[np.bool_], least: int) -> NDArray[np.bool_]:
    """Return the mask of one client without domains of which too few patients would be held out, or left."""
    unit = np.arange(len(part)) if part.group is None else part.group.numpy()
    domain = part.domain.numpy()
    sizes = [_patients(domain[rows], unit[rows], len(part.domains)) for rows in (mask, ~mask)]
    enough: NDArray[np.bool_] = np.minimum(*sizes) >= least
    kept: NDArray[np.bool_] = mask & enough[domain]
    if part.group is None or (kept == mask).all():
        return kept
    # Patients who are kept back for one domain are missing in their other ones, which may then have too few.
    return _enough_of_each(part, _whole_groups(unit, kept), least)


def _patients(domain: NDArray[np.int64], unit: NDArray[np.int64], domains: int) -> NDArray[np.int64]:
    """Return the number of different patients of each domain."""
    pairs = np.unique(np.stack([domain, unit]), axis=1)
    return np.bincount(pairs[0], minlength=domains)


def _whole_groups(group: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask without groups of which only a part is held out: a patient with samples in several places."""
    split = np.intersect1d(group[mask], group[~mask])
    return mask & ~np.isin(group, split)
