"""Answers, in this process, the messages that a SuperNode on this machine receives.

By default a SuperNode starts a process for each message, which installs and runs the app that the server sent. Here no
code from the network is run, only what the site has installed, and no process has to be started. This module replaces
Flower's own executor (``flower-superexec`` and ``flwr-clientapp``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from feddar.federation.links.flower import internals
from feddar.federation.links.flower.pace import pause

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

_MOST = 0.5
_HEARTBEAT = 10.0


@contextmanager
def executing(address: str, secret: bytes, app: ClientApp) -> Iterator[None]:
    """Answer the messages of the SuperNode at ``address`` with ``app``, one after another, in a thread."""
    ended = threading.Event()
    thread = threading.Thread(target=_execute, args=(address, secret, app, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _execute(address: str, secret: bytes, app: ClientApp, ended: threading.Event) -> None:
    internals.hasten_pulls()
    since = time.monotonic()
    with internals.messages_of(address, secret) as client:
        while not ended.wait(pause(time.monotonic() - since, _MOST)):
            # Errors are expected while the SuperNode starts or ends. And no message, whatever is in it, may end this
            # thread: the site would stay connected, and never answer again.
            try:
                if token := internals.acquire(client):
                    _answer(address, token, app)
                    since = time.monotonic()
            except Exception:
                ended.wait(_MOST)


def _answer(address: str, token: str, app: ClientApp) -> None:
    with internals.task(address, token) as client, _alive(client):
        internals.answer(client, app)


@contextmanager
def _alive(client: internals.Runtime) -> Iterator[None]:
    """Send the SuperNode heartbeats while a message is being answered."""
    import httpx

    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT):
            try:
                internals.beat(client)
            except httpx.HTTPError:
                continue

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
