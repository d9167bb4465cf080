"""The default engine: all clients on this machine, one after another or spread over worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

from feddar.engines import Engine
from feddar.engines.workers import Workers
from feddar.model import Tensors
from feddar.phases import Client, Reply, Request


def start(clients: list[Client], jobs: int) -> Engine:
    """Return the engine for these clients: direct for one job, worker processes for several."""
    workers = min(jobs, len(clients))
    if workers > 1 and "fork" in multiprocessing.get_all_start_methods():
        return Workers(clients, workers)
    return Direct(clients)


class Direct:
    """Clients one after another in this process."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients

    def joined(self) -> bool:
        """Nobody comes later."""
        return False

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Ask each client in turn."""
        for client in self.clients:
            yield client.answer(request)

    def private(self) -> dict[str, Tensors]:
        """Return what each client keeps to itself."""
        return {client.name: client.private for client in self.clients}

    def restore(self, private: dict[str, Tensors]) -> None:
        """Give clients back what they kept to themselves."""
        for client in self.clients:
            client.private = dict(private.get(client.name, {}))

    def close(self) -> None:
        """Nothing was started."""
