"""The default engine: all clients on this machine, one after another or spread over worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from feddar.algorithm.engine import Engine
from feddar.algorithm.protocol import NOTHING, OwnState, Reply, Request
from feddar.simulation.processes import may_fork
from feddar.simulation.workers import Participant, Workers


def start(participants: Sequence[Participant], jobs: int) -> Engine:
    """Return the engine for these clients: direct for one job, worker processes for several."""
    workers = min(jobs, len(participants))
    if workers > 1 and may_fork():
        return Workers(participants, workers)
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
        """Return each client's own state."""
        return {name: own for participant in self.participants for name, own in participant.own_states().items()}

    def restore(self, own: dict[str, OwnState]) -> None:
        """Set each client's own state."""
        for participant in self.participants:
            for name in participant.names:
                participant.restore(name, own.get(name, NOTHING))

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""
