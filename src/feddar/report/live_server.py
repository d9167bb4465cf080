"""Serves the page of a training on this machine while it runs: from a daemon thread, read-only, to who has its address.

The socket is bound to the loopback address. A path has a secret in it, since other users of this machine can connect
too, and the Host header must be ours, since a foreign web page could give its own name this machine's address (DNS
rebinding). Connections are few, paced and closed after each answer, so that nobody can keep the training from the
processor, however he asks; and the training waits for no answer.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from feddar.errors import UserError
from feddar.report.live import LiveView
from feddar.report.live_page import SCRIPTS, json_of, page_of, script
from feddar.report.page import require_packages

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 16
BETWEEN_CONNECTIONS = 0.01
"""So many seconds lie between two connections at least."""
BETWEEN_STATES = 1.0
"""After so many seconds a question for the state is answered, or at once when the training ends."""
LAST_WORD = 0.5
"""So long, at most, the end waits until a page that asks has heard of it."""
SILENCE = 10.0
"""After so many seconds without a word a connection is closed."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@contextmanager
def serving(view: LiveView, port: int | None = None) -> Iterator[str]:
    """Serve the page of a view within the block, and yield its address; without a port, on one that is free."""
    require_packages("jinja2")
    try:
        server = LiveServer(view, port or 0)
    except OSError as error:
        raise UserError(
            f"the page cannot be served on port {port} of {LOOPBACK}: {error.strerror}; choose another --watch-port, "
            "or say --watch for one that is free."
        ) from None
    threading.Thread(target=server.serve_forever, args=(0.1,), name="live page", daemon=True).start()
    try:
        yield server.address
    finally:
        view.end("The run has ended.")
        server.wait_for_last_word()
        server.shutdown()
        server.server_close()


class LiveServer(ThreadingHTTPServer):
    """The server of one view's page."""

    daemon_threads = True

    def __init__(self, view: LiveView, port: int) -> None:
        self.view = view
        self.slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.rendering = threading.Lock()
        self.state: tuple[float, bool, bytes] = (float("-inf"), False, b"")
        """When the state was last written, whether it was the last one, and its JSON."""
        self.asking, self.last_answer, self.heard_end = 0, float("-inf"), False
        super().__init__((LOOPBACK, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        self.secret = secrets.token_urlsafe(24)
        self.answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "": ("text/html", lambda: page_of(view.known()).encode()),
            "state": ("application/json", self.next_state),
            **{name: ("text/javascript", lambda name=name: script(name)) for name in SCRIPTS},  # type: ignore[misc]
        }

    @property
    def address(self) -> str:
        """The address of the page, which holds its secret."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"

    def server_bind(self) -> None:
        """Bind the socket, without looking up this machine's name, which can take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there are not too many already."""
        time.sleep(BETWEEN_CONNECTIONS)
        if self.slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that breaks off is no matter of the training's."""

    def next_state(self) -> bytes:
        """Return the state after a while, or at once if the training has ended."""
        self.asking += 1
        try:
            self.view.ended.wait(BETWEEN_STATES)
            return self._state()
        finally:
            self.asking -= 1

    def _state(self) -> bytes:
        """Return the state; it is written once for all who ask at about the same time."""
        with self.rendering:
            written, ended, content = self.state
            if not ended and (self.view.ended.is_set() or time.monotonic() - written > BETWEEN_STATES / 2):
                known = self.view.known()
                content = json_of(known)
                self.state = known.now, bool(known.ending), content
            return content

    def wait_for_last_word(self) -> None:
        """Wait until those who follow the page have heard of the end, but not for long."""
        end = time.monotonic() + LAST_WORD
        followed = end - self.last_answer < LAST_WORD + 2 * BETWEEN_STATES
        while (self.asking or (followed and not self.heard_end)) and time.monotonic() < end:
            time.sleep(0.01)

    def answered(self) -> None:
        """Note down that somebody has got a state."""
        self.last_answer, self.heard_end = time.monotonic(), self.view.ended.is_set()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: LiveServer
    timeout = SILENCE
    server_version, sys_version = "feddar", ""

    def do_GET(self) -> None:
        """Answer with the page, its state or its scripts, and with nothing else."""
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        asked, found = self.path.encode(), None
        for name, answer in self.server.answers.items():
            if hmac.compare_digest(asked, f"/{self.server.secret}/{name}".encode()):
                found = answer
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, content = found
        self._send(HTTPStatus.OK, kind, content())
        if kind == "application/json":
            self.server.answered()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the name of the error alone, which repeats nothing of what was asked."""
        self.close_connection = True
        self._send(code, "text/plain", HTTPStatus(code).phrase.encode())

    def _send(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write nothing into the terminal, which shows the training."""
