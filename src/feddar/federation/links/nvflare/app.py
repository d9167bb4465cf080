"""The code of a FLARE job: ``Site`` answers messages at each site, and ``Server`` runs the training at the server."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nvflare.collab import CollabCallError, collab
from nvflare.fuel.f3.cellnet.defs import ReturnCode

from feddar.errors import TrainingError, one_line
from feddar.federation.links.link import Answer, Handler
from feddar.federation.links.nvflare import site_file
from feddar.federation.links.nvflare.job import FAILURE, RESULTS, STUDY
from feddar.federation.private_folder import private_folder

_Function = TypeVar("_Function", bound=Callable[..., Any])
# FLARE has no type hints; its decorators return the function they were given.
_publish: Callable[[_Function], _Function] = collab.publish
_main: Callable[[_Function], _Function] = collab.main

LIMIT = 2**31
"""FLARE's serialisation of bytes allows 4 GiB, and a message is in memory several times."""

_WAIT, _STALL, _MISSES = 5.0, 30.0, 3
"""Seconds that a call waits at a site for the answer, further seconds until the call itself times out, and how many
calls in a row may fail before a working site is given up."""

_log = logging.getLogger(__name__)


class _Task:
    """A message at a site, and its answer or problem once it is ``done``."""

    def __init__(self, number: str, message: bytes) -> None:
        self.number, self.message = number, message
        self.done = threading.Event()
        self.answer, self.problem = b"", ""


class Site:
    """The FLARE side of a site: the functions that the server, and no other site, may call.

    Calls are short: for an answer that takes long, the server calls again. So a dead site is noticed, a lost connection
    loses nothing, and FLARE, which waits for open calls before it ends a job, can end it.

    The data is opened with the first message, not at the start of the job, since FLARE ends a job for all sites if one
    cannot start. The reason of a failure stays in this site's log, since the text of an exception may quote the data.
    """

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.task = _Task("", b"")
        self.turn = threading.Lock()

    def open(self, options: dict[str, str]) -> Handler:
        """Return the message handler of a site with these options."""
        from feddar.federation.site import open_site

        return open_site(options)

    @_publish
    def ping(self) -> bytes:
        """Return at once, to show that the site is connected."""
        return b""

    @_publish
    def answer(self, number: str, message: bytes | None, wait: float, context: Any) -> bytes | None:
        """Accept the message of this number, once; return its answer, or None if it takes longer than ``wait``."""
        if context.caller != "server":
            raise PermissionError("only the server may ask")
        if message is not None and number != self.task.number:
            self.task = _Task(number, message)
            # A thread of our own: FLARE would wait for one of its threads before it ends a job, even if it never ends.
            threading.Thread(target=self._work, args=(self.task, context), daemon=True).start()
        task = self.task
        if task.number != number:
            raise LookupError("started anew and lost the message")
        if not task.done.wait(wait):
            return None
        if task.problem:
            raise RuntimeError(task.problem)
        return task.answer

    def _work(self, task: _Task, context: Any) -> None:
        """Answer a message after the earlier ones, unless a later one has come by then."""
        with self.turn:
            if task is not self.task:
                return
            try:
                if self.handler is None:
                    workspace = Path(context.workspace.get_root_dir())
                    self.handler = self.open(site_file.site_options(workspace, context.app.name))
                task.answer = self.handler(task.message)
            except Exception as error:
                _log.exception("no answer to the server")
                failed = "open its data" if self.handler is None else "answer"
                task.problem = f"could not {failed} ({type(error).__name__}: the log of the site says why)"
            task.message = b""
            task.done.set()


class Server:
    """The FLARE side of the server: runs the coordinator with a link to the sites of the job."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options

    def run(self, link: SiteLink, options: dict[str, Any]) -> None:
        """Train, and write results to the folder ``options["out"]``."""
        from feddar.federation.coordinator import run_app

        run_app(link, options)

    @_main
    def main(self, context: Any) -> None:
        """Run the training; the reason of a failure is written to the results."""
        workspace, job = context.workspace, collab.fl_ctx.get_job_id()
        own = site_file.read(Path(workspace.get_site_config_dir()), context.app.name)
        out = Path(own["out"], self.name) if "out" in own else Path(workspace.get_result_root(job), RESULTS)
        private_folder(out)
        (out / FAILURE).unlink(missing_ok=True)
        study = Path(workspace.get_app_dir(job), STUDY)
        try:
            self.run(SiteLink(context), {**self.options, "study": str(study), "out": str(out)})
        except Exception as error:
            (out / FAILURE).write_text(one_line(error) + "\n", encoding="utf-8")
            raise


class SiteLink:
    """The coordinator's end: a ``Link`` to the sites of the running job."""

    limit = LIMIT

    def __init__(self, context: Any) -> None:
        self.context = context
        self.proxies = {proxy.name: proxy for proxy in context.clients}

    def sites(self) -> list[str]:
        """Return the names of the sites that answer a ping."""
        pings = self._gather(lambda site: self._call(site, "ping"), list(self.proxies), _WAIT)
        return sorted(ping.site for ping in pings if not ping.problem)

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Send a message to all these sites at once, and yield their answers as they arrive."""
        return self._gather(lambda site: self._ask_one(site, message, timeout), sites, timeout)

    def close(self) -> None:
        """Do nothing: FLARE ends the job when its main function returns."""

    def _gather(
        self, function: Callable[[str], bytes | None], sites: Sequence[str], timeout: float
    ) -> Iterator[Answer]:
        """Call a function for each site in a thread, and yield the results, or the exceptions as problems."""
        answers: SimpleQueue[Answer] = SimpleQueue()

        def run(site: str) -> None:
            try:
                answers.put(Answer(site, function(site) or b""))
            except _NoAnswerError as problem:
                answers.put(Answer(site, problem=str(problem)))
            except Exception as error:
                answers.put(Answer(site, problem=one_line(error)))

        for site in sites:
            threading.Thread(target=run, args=(site,), daemon=True).start()
        waiting = list(sites)
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                answer = answers.get(timeout=min(left, _WAIT))
                waiting.remove(answer.site)
                yield answer
            if self.context.is_aborted():
                raise TrainingError("the job was aborted in FLARE.")
        yield from (Answer(site, problem=_late(timeout)) for site in waiting)

    def _ask_one(self, site: str, message: bytes, timeout: float) -> bytes:
        """Send a message to a site and call again until its answer is ready, or the site cannot be reached."""
        number, deadline = uuid.uuid4().hex, time.monotonic() + timeout
        to_send: bytes | None = message
        missed = 0
        while (left := deadline - time.monotonic()) > 0:
            try:
                content = self._call(site, "answer", number, to_send, min(left, _WAIT))
            except _LostError:
                missed += 1
                if to_send is not None or missed == _MISSES:
                    raise
                time.sleep(_WAIT)
            else:
                if content is not None:
                    return content
                to_send, missed = None, 0
        raise _NoAnswerError(_late(timeout))

    def _call(self, site: str, name: str, *arguments: Any) -> bytes | None:
        if site not in self.proxies:
            raise _NoAnswerError("not a site of this job")
        try:
            content = getattr(self.proxies[site](timeout=_WAIT + _STALL), name)(*arguments)
        except CollabCallError as error:
            if isinstance(error.cause, TimeoutError) or ReturnCode.TARGET_UNREACHABLE in str(error.cause):
                raise _LostError("cannot be reached") from None
            raise _NoAnswerError(str(error.cause).removeprefix(f"{error.cause_type}: ")) from None
        if not isinstance(content, bytes | None):
            raise _NoAnswerError("sent something else than bytes")
        return content


class _NoAnswerError(Exception):
    """There is no answer, for the reason in the message."""


class _LostError(_NoAnswerError):
    """A site cannot be reached, perhaps only for now."""


def _late(timeout: float) -> str:
    return f"no answer after {timeout:g} seconds"
