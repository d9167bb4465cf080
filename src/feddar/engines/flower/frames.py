"""Bytes over a Unix socket: frames with their length before them, and a server that answers one frame by another."""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from feddar.errors import TrainingError, said
from feddar.federation.link import Handler

_LENGTH = struct.Struct("!Q")
_CONTENT, _PROBLEM = b"\x00", b"\x01"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Give a folder only we can enter, and not in that of a run: a socket's path may have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="feddar-") as folder:
        yield Path(folder)


def listen(path: Path) -> socket.socket:
    """Listen on a new Unix socket that only this user can connect to."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    path.chmod(0o600)
    listening.listen()
    return listening


def connect(path: str | Path) -> socket.socket:
    """Connect to a Unix socket."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, content: bytes) -> None:
    """Send one frame."""
    connection.sendall(_LENGTH.pack(len(content)))
    # The other side may close once it has all, so that even sending nothing more would fail.
    if content:
        connection.sendall(content)


def receive(connection: socket.socket) -> bytes:
    """Receive one frame; ``EOFError`` where the other side has gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view, filled = memoryview(content), 0
    while filled < length:
        count = connection.recv_into(view[filled:])
        if not count:
            raise EOFError("the other side closed the connection")
        filled += count
    return content


@contextmanager
def serve(handler: Handler, path: Path) -> Iterator[None]:
    """Answer frames that come over a new socket at ``path`` by ``handler``, one at a time, in a thread."""
    with listen(path) as listening:
        thread = threading.Thread(target=_answer_all, args=(listening, handler), daemon=True)
        thread.start()
        try:
            yield
        finally:
            # Closing alone would not wake a thread that waits in accept().
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            path.unlink()


def _answer_all(listening: socket.socket, handler: Handler) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        # Who asked may have gone meanwhile.
        with connection, suppress(EOFError, OSError):
            message = receive(connection)
            try:
                answer = _CONTENT + handler(message)
            except Exception as error:
                answer = _PROBLEM + said(error).encode()
            send(connection, answer)


def ask(path: str | Path, message: bytes) -> bytes:
    """Send a frame to whoever serves at ``path`` and return the answer; ``TrainingError`` where its handler failed."""
    with connect(path) as connection:
        send(connection, message)
        answer = receive(connection)
    if answer[:1] == _PROBLEM:
        raise TrainingError(answer[1:].decode())
    return answer[1:]
