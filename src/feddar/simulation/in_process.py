"""The default engine: all clients on this machine, one after another or spread over worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from feddar.algorithm.engine import Engine
from feddar.algorithm.protocol import NOTHING, OwnState, Reply, Request
from feddar.models.devices import CPU
from feddar.simulation.handover import NotHandedOverError
from feddar.simulation.processes import warn_of_one_by_one
from feddar.simulation.workers import Participant, Workers


def start(participants: Sequence[Participant], jobs: int, device: torch.device = CPU) -> Engine:
    """Return the engine for these clients: direct for one job, worker processes for several."""
    workers = min(jobs, len(participants))
    if workers > 1:
        try:
            return Workers(participants, workers, device)
        except NotHandedOverError as error:
            warn_of_one_by_one(error)
    return Direct(participants)


class Direct:
    """Clients one after another in this process."""

    def __init__(self, participants: Sequence[Participant]) -> None:
        self.participants = participants

    def joined(self) -> bool:
        """Return False: all clients are known from the start."""
        return False

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Yield the replies of the clients, asked one after another."""
        for participant in self.participants:
            yield from participant.answers(request)

    def own_states(self) -> dict[str, OwnState]:
        """Return the own state of each client that has one."""
        return {name: own for participant in self.participants for name, own in participant.own_states().items()}

    def restore(self, own: dict[str, OwnState]) -> None:
        """Set each client's own state."""
        for participant in self.participants:
            for name in participant.names:
                participant.restore(name, own.get(name, NOTHING))

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""
