"""Frames of bytes over a Unix socket, each with its length in front."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_LENGTH = struct.Struct("!Q")


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
    # The other side may close once it has everything; then even sending 0 bytes would fail.
    if content:
        connection.sendall(content)


def receive(connection: socket.socket) -> bytes:
    """Receive one frame; ``EOFError`` if the other side has closed."""
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
