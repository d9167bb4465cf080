"""The interface of a link between real sites: it carries bytes to sites, and their answers back.

It does not look at the bytes. At a site, a ``Handler`` returns the bytes of the answer to a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Handler = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Answer:
    """The answer of a site: its content, or the problem if there is none."""

    site: str
    content: bytes = b""
    problem: str = ""


class Link(Protocol):
    """The coordinator's end of a link."""

    limit: int
    """The most bytes that one message may have."""

    def sites(self) -> list[str]:
        """Return the names of the sites that are connected."""

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Send a message to these sites and yield one answer for each, as they arrive.

        For a site that died, failed or did not answer within ``timeout`` seconds, the answer has a ``problem``. An
        answer to an earlier message is never mistaken for one to this message.
        """

    def close(self) -> None:
        """Stop what was started for the link."""
