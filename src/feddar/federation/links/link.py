"""What an engine between real sites has to do: carry bytes to sites, and their answers back.

It knows nothing of what is in them. At a site, a ``Handler`` turns the bytes of a message into those of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Handler = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Answer:
    """What came back from a site: content, or the problem that kept it away."""

    site: str
    content: bytes = b""
    problem: str = ""


class Link(Protocol):
    """The coordinator's end of an engine."""

    limit: int
    """The most bytes that one message may have."""

    def sites(self) -> list[str]:
        """Return the names of the sites that can be reached now."""

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Send a message to these sites and give one answer for each, as they arrive.

        A site that died, failed or has not answered after ``timeout`` seconds has an answer that says so. An answer to
        an earlier message is never taken for one to this.
        """

    def close(self) -> None:
        """End whatever was started."""
