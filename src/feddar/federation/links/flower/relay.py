"""A link in the coordinator's process, relayed over a Unix socket to a link in Flower's ServerApp process.

Messages on the socket are pairs of frames: a JSON header and content. Each request has a number, which its answers
repeat, so that answers to a request that was given up can be dropped.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from feddar.errors import TrainingError
from feddar.federation.links.flower import frames
from feddar.federation.links.link import Answer, Link


class RelayLink:
    """The coordinator's end: it has the same sites and answers as the link at the other end."""

    def __init__(self, connection: socket.socket, log: Callable[[str], None]) -> None:
        self._connection = connection
        self._log = log
        self._number = 0
        self.limit = int(next(self._request(limit=True))[0]["limit"])

    def sites(self) -> list[str]:
        """Return the names of the sites that can be reached now."""
        return [str(site) for site in next(self._request(sites=True))[0]["names"]]

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Send a message and yield the answers as they arrive."""
        for about, content in self._request(message, ask=list(sites), timeout=timeout):
            if "site" not in about:
                return
            yield Answer(about["site"], content, about["problem"])

    def close(self) -> None:
        """Close the connection; the other end then ends too."""
        self._connection.close()

    def _request(self, content: bytes = b"", **about: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
        self._number += 1
        number = self._number
        try:
            _send(self._connection, {"number": number, **about}, content)
            while True:
                answer, content = _receive(self._connection)
                if "log" in answer:
                    self._log(answer["log"])
                elif answer["number"] == number:
                    yield answer, content
        except (EOFError, OSError):
            raise TrainingError("Flower's ServerApp ended unexpectedly: see serverapp.log, and resume.") from None


def relay(link: Callable[[Callable[[str], None]], Link], path: str) -> None:
    """Run the ServerApp's end until the coordinator closes; ``link`` returns the link to use, given a log function."""
    with frames.connect(path) as connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        far = link(lambda text: _send(connection, {"log": text}))
        while True:
            about, content = _receive(connection)
            number = about["number"]
            if "ask" in about:
                for answer in far.ask(content, about["ask"], about["timeout"]):
                    about = {"number": number, "site": answer.site, "problem": answer.problem}
                    _send(connection, about, answer.content)
                _send(connection, {"number": number})
            elif "sites" in about:
                _send(connection, {"number": number, "names": far.sites()})
            else:
                _send(connection, {"number": number, "limit": far.limit})


def _send(connection: socket.socket, about: dict[str, Any], content: bytes = b"") -> None:
    frames.send(connection, json.dumps(about).encode())
    frames.send(connection, content)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    return json.loads(frames.receive(connection)), frames.receive(connection)
