"""What a stranger does at a coordinator's door: every attack has an end of its own, and goes to this machine only."""

from __future__ import annotations

import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

CALL = "/v1/fleet/push-object"


class Intruder:
    """Somebody who reaches a coordinator at a port of this machine; with files, one who has a certificate and key."""

    def __init__(self, port: int, tls: bool = True, certificate: Path | None = None, key: Path | None = None) -> None:
        self.port = port
        self._tls: ssl.SSLContext | None = None
        if tls:
            self._tls = ssl.create_default_context()
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
            if certificate:
                self._tls.load_cert_chain(certificate, key)

    def connect(self) -> socket.socket:
        """Return a new connection."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        try:
            return self._tls.wrap_socket(plain) if self._tls else plain
        except OSError:
            plain.close()
            raise

    @contextmanager
    def idle(self, count: int) -> Iterator[list[socket.socket]]:
        """Hold so many connections open within the block, without a word on any of them."""
        with ExitStack() as stack:
            held = []
            for _ in range(count):
                with suppress(OSError):  # refused, as it should be
                    held.append(stack.enter_context(self.connect()))
            yield held

    def short_headers(self, size: int) -> int:
        """Send a call with short headers of so many bytes in all; return how many were taken."""
        return self._send(b"".join(b"a%07d:b\r\n" % number for number in range(1000)), size)

    def long_header(self, size: int) -> int:
        """Send a call with one header of so many bytes, in small pieces; return how many were taken."""
        with suppress(OSError), self.connect() as connection:
            connection.sendall(f"POST {CALL} HTTP/1.1\r\nHost: x\r\na: ".encode())
            return _sent(connection, b"x" * 1000, size)
        return 0

    def _send(self, piece: bytes, size: int) -> int:
        with suppress(OSError), self.connect() as connection:
            connection.sendall(f"POST {CALL} HTTP/1.1\r\nHost: x\r\n".encode())
            return _sent(connection, piece, size)
        return 0

    @contextmanager
    def held_bodies(self, count: int, public_key: bytes, size: int = 2**24) -> Iterator[int]:
        """Announce so many bodies in the name of a key, send each but for its last byte, and hold; give the bytes."""
        head = f"POST {CALL} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
        head += f"flwr-public-key: {b64encode(public_key).decode()}\r\n\r\n"
        with ExitStack() as stack:
            taken = 0
            for _ in range(count):
                with suppress(OSError):
                    connection = stack.enter_context(self.connect())
                    connection.settimeout(2)
                    connection.sendall(head.encode())
                    taken += _sent(connection, bytes(2**16), size - 1)
            yield taken

    def answer(self, request: bytes, seconds: float = 20) -> bytes:
        """Send these bytes, and return what comes back until the other side closes or so many seconds are over."""
        found, end = b"", time.monotonic() + seconds
        with suppress(OSError), self.connect() as connection:
            connection.sendall(request)
            while time.monotonic() < end and (more := connection.recv(2**16)):
                found += more
        return found


def _sent(connection: socket.socket, piece: bytes, size: int) -> int:
    sent = 0
    with suppress(OSError):
        while sent < size:
            connection.sendall(piece[: size - sent])
            sent += len(piece[: size - sent])
    return sent
