"""A link to sites in this process, a thread each: to try out a study without Flower, FLARE or a network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from feddar.errors import one_line
from feddar.federation.links.link import Answer, Handler


class LocalLink:
    """A link whose sites are handlers in this process."""

    limit = 1 << 40

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = dict(handlers)

    def sites(self) -> list[str]:
        """Return all sites, which are always connected."""
        return sorted(self.handlers)

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Let every site answer in a thread of its own, and yield the answers as they arrive."""
        answers: queue.Queue[Answer] = queue.Queue()
        for site in sites:
            threading.Thread(target=self._answer, args=(site, message, answers), daemon=True).start()
        waiting, end = set(sites), time.monotonic() + timeout
        while waiting:
            try:
                answer = answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            waiting.discard(answer.site)
            yield answer
        for site in sorted(waiting):
            yield Answer(site, problem=f"it has not answered in {timeout:g} s")

    def close(self) -> None:
        """Do nothing: threads end with their answer."""

    def _answer(self, site: str, message: bytes, answers: queue.Queue[Answer]) -> None:
        try:
            answers.put(Answer(site, self.handlers[site](message)))
        except Exception as error:
            answers.put(Answer(site, problem=one_line(error)))
