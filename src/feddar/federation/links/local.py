"""A link to sites on this machine, a thread each: to try a study out with no engine and no network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from feddar.errors import one_line
from feddar.federation.links.link import Answer, Handler


class LocalLink:
    """Handlers in this process, behind the same interface as an engine's sites."""

    limit = 1 << 40

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = dict(handlers)

    def sites(self) -> list[str]:
        """All of them can be reached."""
        return sorted(self.handlers)

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Let every site work in a thread of its own."""
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
        """Nothing was started that outlives its answer."""

    def _answer(self, site: str, message: bytes, answers: queue.Queue[Answer]) -> None:
        try:
            answers.put(Answer(site, self.handlers[site](message)))
        except Exception as error:
            answers.put(Answer(site, problem=one_line(error)))
