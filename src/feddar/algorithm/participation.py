"""Which clients train in a round, where only a part of them does.

Every client has a number of its own in each round, drawn from (seed, round, client); those with the lowest ones train.
So a request says only up to which number, clients find out by themselves whether they are meant, and who trains
depends neither on the engine nor on whether a run was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from feddar.algorithm.protocol import EVERYBODY, Request
from feddar.models.model import seeded
from feddar.settings import Settings

TRAINING = ("adopt", "heads", "encoder", "together", "personal")
"""The phases that only those who train in a round may be asked for; all others ask everybody."""


def takes_part(request: Request, client: str) -> bool:
    """Return whether a client answers a request."""
    return request.up_to == EVERYBODY or number_of(request.seed, request.round, client) <= request.up_to


def number_of(seed: int, round_number: int, client: str) -> int:
    """Return the number of a client in a round, from 0 to below 2^63."""
    return seeded(seed, round_number, "participation", client).seed


def highest_number(settings: Settings, round_number: int, clients: Collection[str]) -> int:
    """Return the highest number of the clients that train in a round, where only a part of them does."""
    return sorted(number_of(settings.seed, round_number, each) for each in clients)[_how_many(settings, clients) - 1]


def _how_many(settings: Settings, clients: Collection[str]) -> int:
    """Return how many clients train in a round: at least one, and not more than there are."""
    share = len(clients) if settings.participation is None else math.ceil(settings.participation * len(clients))
    return min(share, settings.clients_per_round or share)
