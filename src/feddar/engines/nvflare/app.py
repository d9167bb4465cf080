"""What runs inside a FLARE job: at each site a function from bytes to bytes, at the server the run that calls it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nvflare.collab import CollabCallError, collab
from nvflare.fuel.f3.cellnet.defs import ReturnCode

from feddar.engines.nvflare import local
from feddar.engines.nvflare.job import FAILURE, RESULTS, STUDY
from feddar.errors import TrainingError, said
from feddar.federation.link import Answer, Handler

_Function = TypeVar("_Function", bound=Callable[..., Any])
# FLARE is not typed: what its decorators return is what they were given.
_publish: Callable[[_Function], _Function] = collab.publish
_main: Callable[[_Function], _Function] = collab.main

LIMIT = 2**31
"""FLARE streams a message in pieces; its serialisation of bytes ends at 4 GiB, and memory holds each several times."""

_PULSE, _PULSES = 5.0, 3
"""Sites that are waited for are looked after every so many seconds, and given up when missed so many times in a row."""

_UNREACHABLE = "cannot be reached"
_log = logging.getLogger(__name__)


class Site:
    """What a site lets the server, and no other site, call.

    The data is opened with the first message, not with the job: FLARE ends a job for all sites where one cannot start.
    Why something failed stays in this site's log, since the text of an exception may quote the data.
    """

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.turn = threading.Lock()

    def open(self, options: dict[str, str]) -> Handler:
        """Return the handler of messages for a site with these options."""
        from feddar.federation.site import open_site

        return open_site(options)

    @_publish
    def ping(self) -> bytes:
        """Show that the site can be reached."""
        return b""

    @_publish
    def answer(self, message: bytes, timeout: float, context: Any) -> bytes:
        """Return the answer to a message of the server, or raise after ``timeout`` seconds."""
        if context.caller != "server":
            raise PermissionError("only the server may ask")
        answers: SimpleQueue[bytes | Exception] = SimpleQueue()
        # FLARE waits for its own threads before it ends a job, but not for this one should it never end.
        work = threading.Thread(target=lambda: answers.put(self._work(message, timeout, context)), daemon=True)
        work.start()
        try:
            answer = answers.get(timeout=timeout)
        except Empty:
            answer = TimeoutError(f"not done after {timeout:g} seconds")
        if isinstance(answer, Exception):
            raise answer from None
        return answer

    def _work(self, message: bytes, timeout: float, context: Any) -> bytes | Exception:
        """Answer when earlier messages are done with, unless nobody waits for it any more."""
        if not self.turn.acquire(timeout=timeout):
            return TimeoutError("still busy with an earlier message")
        try:
            if self.handler is None:
                self.handler = self.open(local.site_options(Path(context.workspace.get_root_dir()), context.app.name))
            return self.handler(message)
        except Exception as error:
            _log.exception("no answer to the server")
            failed = "open its data" if self.handler is None else "answer"
            return RuntimeError(f"could not {failed} ({type(error).__name__}: the log of the site says why)")
        finally:
            self.turn.release()


class Server:
    """What runs at the server: the coordinator, over a link to the sites of the job."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options

    def run(self, link: SiteLink, options: dict[str, Any]) -> None:
        """Train, and write results to the folder ``options["out"]``."""
        from feddar.federation.coordinator import run_app

        run_app(link, options)

    @_main
    def main(self, context: Any) -> None:
        """Run, and leave the reason of a failure among the results."""
        workspace, job = context.workspace, collab.fl_ctx.get_job_id()
        own = local.read(Path(workspace.get_site_config_dir()), context.app.name)
        out = Path(own["out"], self.name) if "out" in own else Path(workspace.get_result_root(job), RESULTS)
        out.mkdir(parents=True, exist_ok=True)
        (out / FAILURE).unlink(missing_ok=True)
        study = Path(workspace.get_app_dir(job), STUDY)
        try:
            self.run(SiteLink(context), {**self.options, "study": str(study), "out": str(out)})
        except Exception as error:
            (out / FAILURE).write_text(said(error) + "\n", encoding="utf-8")
            raise


class SiteLink:
    """The server's end: a ``Link`` to the sites of the running job."""

    limit = LIMIT

    def __init__(self, context: Any) -> None:
        self.context = context
        self.proxies = {proxy.name: proxy for proxy in context.clients}

    def sites(self) -> list[str]:
        """Return the sites that answer a call now."""
        pings = self._call("ping", (), list(self.proxies), _PULSE)
        return sorted(ping.site for ping in pings if not ping.problem)

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Call all these sites at once and give their answers as they arrive."""
        return self._call("answer", (message, timeout), sites, timeout)

    def close(self) -> None:
        """Nothing to do: FLARE ends the job when its main function returns."""

    def _call(self, name: str, arguments: tuple[Any, ...], sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        # One call for each site: as a group, FLARE keeps failures back until the last site has answered.
        answers: SimpleQueue[Answer] = SimpleQueue()
        for site in sites:
            call = (site, name, arguments, timeout, answers)
            threading.Thread(target=self._call_one, args=call, daemon=True).start()
        waiting = dict.fromkeys(sites, 0)
        # FLARE's timeout counts anew for sending, waiting and receiving: ours is for all of them.
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                arrived = [answers.get(timeout=min(left, _PULSE))]
            except Empty:
                arrived = self._lost(waiting) if left > _PULSE else []
            self._stop_if_aborted()
            for answer in arrived:
                if waiting.pop(answer.site, None) is not None:
                    yield answer
        yield from (Answer(site, problem=f"no answer after {timeout:g} seconds") for site in waiting)

    def _lost(self, waiting: dict[str, int]) -> list[Answer]:
        """Count for how many pulses each site could not be reached, and give those up that are gone.

        FLARE itself says so of new calls only: one under way to a site that died would wait for its whole timeout.
        """
        gone = {ping.site for ping in self._call("ping", (), list(waiting), _PULSE) if ping.problem == _UNREACHABLE}
        waiting.update({site: missed + 1 if site in gone else 0 for site, missed in waiting.items()})
        return [Answer(site, problem=f"{_UNREACHABLE} any more") for site, n in waiting.items() if n >= _PULSES]

    def _call_one(
        self, site: str, name: str, arguments: tuple[Any, ...], timeout: float, answers: SimpleQueue[Answer]
    ) -> None:
        if site not in self.proxies:
            answers.put(Answer(site, problem="not a site of this job"))
            return
        try:
            content = getattr(self.proxies[site](timeout=timeout), name)(*arguments)
            answers.put(Answer(site, content) if isinstance(content, bytes) else Answer(site, problem="sent no bytes"))
        except CollabCallError as error:
            problem = _UNREACHABLE if ReturnCode.TARGET_UNREACHABLE in str(error) else str(error.cause)
            answers.put(Answer(site, problem=problem))
        except Exception as error:
            answers.put(Answer(site, problem=said(error)))

    def _stop_if_aborted(self) -> None:
        if self.context.is_aborted():
            raise TrainingError("the job was aborted in FLARE.")
