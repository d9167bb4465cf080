"""A gate in a thread of this process, and whatever is to stand behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from feddar.federation.links.flower.gate import Gate, Limits, Refusals, ServerTls, reserved_socket


@contextmanager
def serving(app: Any, **where: Any) -> Iterator[None]:
    """Serve an ASGI app at ``host`` and ``port``, or on the Unix socket ``uds``, in a thread."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none", **where))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.02)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=5)


@contextmanager
def gate_before(
    superlink: Path,
    keys: frozenset[bytes] | None,
    tell: Callable[[str], None],
    refusals: Path,
    tls: ServerTls | None = None,
    limits: Limits | None = None,
) -> Iterator[int]:
    """Open a gate before a Unix socket in a thread, and give its port."""
    ready, closing = threading.Event(), list[Callable[[], object]]()
    written = Refusals(refusals, tell)

    async def serve() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task
        closing.append(lambda: loop.call_soon_threadsafe(task.cancel))
        gate = Gate(superlink, None if keys is None else lambda: keys, written, limits)
        with suppress(asyncio.CancelledError):
            await gate.serve(listening, tls.context() if tls else None, ready.set)

    with reserved_socket("127.0.0.1:0") as listening:
        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield listening.getsockname()[1]
        finally:
            closing[0]()
            thread.join(timeout=5)
            written.close()


def gates(folder: Path) -> list[int]:
    """Return the processes of gates with a file of theirs in this folder, not those that only watch them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            if str(folder).encode() in (process / "environ").read_bytes() and command[2].endswith(b".gatekeeper"):
                found.append(int(process.name))
        except (OSError, IndexError):
            continue
    return found
