"""Engines carry requests to clients and replies back, and do not look at what is in them.

The same method, seed and data give the same weights on every engine: bit for bit, or up to rounding where small
clients are trained as one computation (``simulation.stacked``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

# Engines between real sites start small processes that only pass on bytes; these must not wait for torch's import.
if TYPE_CHECKING:
    from feddar.algorithm.protocol import OwnState, Reply, Request


class Engine(Protocol):
    """The interface of an engine, as the round loop uses it."""

    def exchange(self, request: Request) -> Iterable[Reply]:
        """Send a request to all clients and return their replies in the order of the clients."""

    def joined(self) -> bool:
        """Return whether clients have joined since the last census."""

    def own_states(self) -> dict[str, OwnState]:
        """Return the own state of each client that has one, for a checkpoint; none between sites."""

    def restore(self, own: dict[str, OwnState]) -> None:
        """Set the clients' own states to what ``own_states`` returned."""

    def close(self) -> None:
        """Stop the processes and free the memory that the engine started."""
