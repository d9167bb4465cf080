"""Engines move requests and replies, and know nothing of what is in them.

The same method, seed and data give the same weights on each: to the bit, or up to rounding where small clients are
trained together (``simulation.stacked``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

# Engines between real sites start small processes that only pass bytes on, and must not wait there for torch.
if TYPE_CHECKING:
    from feddar.algorithm.protocol import OwnState, Reply, Request


class Engine(Protocol):
    """What the training loop asks of an engine."""

    def exchange(self, request: Request) -> Iterable[Reply]:
        """Send a request to all clients and give their replies in the order of the clients."""

    def joined(self) -> bool:
        """Tell whether clients have come that the census has not counted."""

    def private(self) -> dict[str, OwnState]:
        """Return, for a checkpoint, what each client keeps to itself, where the engine can see it."""

    def restore(self, private: dict[str, OwnState]) -> None:
        """Give clients back what ``private`` returned."""

    def close(self) -> None:
        """End whatever the engine started."""
