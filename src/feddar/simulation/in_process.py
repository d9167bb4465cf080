"""The default engine: all clients on this machine, one after another or spread over worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from feddar.algorithm.engine import Engine
from feddar.algorithm.protocol import OwnState, Reply, Request
from feddar.simulation.processes import may_fork
from feddar.simulation.workers import Party, Workers


def start(parties: Sequence[Party], jobs: int) -> Engine:
    """Return the engine for these clients: direct for one job, worker processes for several."""
    workers = min(jobs, len(parties))
    if workers > 1 and may_fork():
        return Workers(parties, workers)
    return Direct(parties)


class Direct:
    """Clients one after another in this process."""

    def __init__(self, parties: Sequence[Party]) -> None:
        self.parties = parties

    def joined(self) -> bool:
        """Return False: all clients are known from the start."""
        return False

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Yield the replies of the clients, asked one after another."""
        for party in self.parties:
            yield from party.answers(request)

    def private(self) -> dict[str, OwnState]:
        """Return each client's own state."""
        return {name: kept for party in self.parties for name, kept in party.kept().items()}

    def restore(self, private: dict[str, OwnState]) -> None:
        """Set each client's own state."""
        for party in self.parties:
            for name in party.names:
                party.restore(name, private.get(name, OwnState()))

    def close(self) -> None:
        """Do nothing: there are no processes to stop."""
