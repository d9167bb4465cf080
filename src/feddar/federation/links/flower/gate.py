"""A reverse proxy in front of the SuperLink: sites can reach the calls meant for them, and nobody anything else.

Flower's SuperLink serves three interfaces: for sites, for submitting runs and registering keys, and for its own
processes. The last two need no authentication, and the code of a submitted run is executed at each site. So the
SuperLink listens on a Unix socket of this user, and only this proxy can be reached from the network: it has the
server's certificate, and passes on only calls of sites that have a known key, which the SuperLink then verifies.

The gate is a process of its own (``gatekeeper.py`` starts it), so that whoever floods it takes nothing from the
coordinator, and everything that a caller can make it keep has a limit (``Limits``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

from feddar.errors import UserError, one_line
from feddar.federation.links.flower.internals import FLEET_CALLS, PUBLIC_KEY_HEADER

if TYPE_CHECKING:
    import h11
    import httpx

UNKNOWN_KEY = "this key is not among those of the study"

_CALL = re.compile(FLEET_CALLS.encode() + rb"/[a-z-]+")
_PIECE = 2**16
# Headers that concern one connection only (hop-by-hop), and so are not passed on.
_HOP = {b"connection", b"content-encoding", b"content-length", b"host", b"keep-alive", b"transfer-encoding", b"upgrade"}

Refused = Callable[[str, str], None]
"""Is told the address and the reason of each refusal."""


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate (with intermediate certificates) and its private key, as PEM files."""

    certificate: Path
    key: Path
    clients: Path | None = None
    """The authority of the sites' certificates: who has none from it gets no connection (mutual TLS)."""
    passphrase: bytes | None = field(default=None, repr=False)
    """That of the key, if it has one."""

    def context(self) -> ssl.SSLContext:
        """Return the settings of connections; a ``UserError`` if the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without any passphrase OpenSSL would ask for it at the terminal.
            context.load_cert_chain(self.certificate, self.key, self.passphrase or b"")
            if self.clients:
                context.load_verify_locations(self.clients)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise UserError(f"cannot use the server's certificate and key ({one_line(error)}).") from None
        return context


@dataclass(frozen=True)
class Limits:
    """What a gate grants to callers, in bytes and seconds."""

    strangers: int = 200
    """Connections without a known key, of all callers together; the one that has been silent longest has to go."""
    connections: int = 20
    """Connections of one key; Flower's SuperNode has four at most."""
    headers: int = 2**14
    body: int = 2**24
    """One call; Flower sends messages in chunks of 5 MB."""
    memory: int = 2**26
    """The calls of one key at a time; further ones wait."""
    silence: float = 30.0
    """For the handshake, for all headers of a call from the end of the one before, and between pieces of a call."""
    call: float = 600.0
    """For a whole call, and for fetching its answer."""
    farewell: float = 5.0
    """For reading why a call was refused."""


class Refusals:
    """Writes each refusal down in a file, with its time and address, and tells each kind once.

    The file is set aside at a megabyte, when the one that was set aside before it goes, so that nobody can fill a disk.
    """

    _BYTES, _TOLD = 2**20, 1000

    def __init__(self, file: Path, tell: Callable[[str], None]) -> None:
        self._file = RotatingFileHandler(file, maxBytes=self._BYTES, backupCount=1, encoding="utf-8", delay=True)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._tell = tell
        self._told: set[str] = set()

    def __call__(self, host: str, reason: str) -> None:
        """Note that a call from an address was refused for this reason."""
        text = f"refused a call from {host}: {reason}."
        self._file.emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
        if text not in self._told and len(self._told) < self._TOLD:
            self._told.add(text)
            self._tell(text)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RefusalError(Exception):
    """A call that is not passed on: its HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Caller:
    """One connection: where it comes from, the known key that it has shown, and whether a call is being worked on."""

    def __init__(self, host: str, task: asyncio.Task[None]) -> None:
        self.host, self.task = host, task
        self.key: bytes | None = None
        self.certified: bytes | None = None
        self.busy = False


class _Streams:
    """HTTP on one connection: requests come in whole, and answers go out whole, each within its limits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        import h11

        self.reader, self.writer, self.limits = reader, writer, limits
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.headers)

    async def head(self) -> h11.Request | None:
        """Return the head of the next request; None if the caller has closed."""
        import h11

        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
        elif self.http.our_state is not h11.IDLE:
            return None
        async with asyncio.timeout(self.limits.silence):
            event = await self._event()
        return event if isinstance(event, h11.Request) else None

    async def body(self) -> bytes:
        """Return the body of the request whose head was returned."""
        import h11

        pieces: list[bytes] = []
        async with asyncio.timeout(self.limits.call):
            while True:
                async with asyncio.timeout(self.limits.silence):
                    event = await self._event()
                if not isinstance(event, h11.Data):
                    return b"".join(pieces)
                pieces.append(bytes(event.data))

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """Send an answer."""
        import h11

        length = (b"content-length", str(len(content)).encode())
        events = (h11.Response(status_code=status, headers=[*headers, length]), h11.Data(content), h11.EndOfMessage())
        async with asyncio.timeout(self.limits.call):
            for event in events:
                self.writer.write(self.http.send(event) or b"")
            await self.writer.drain()

    async def discard(self) -> None:
        """Read what the caller still sends, for a while: closing before would take the answer from it, too."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.farewell):
                while await self.reader.read(_PIECE):
                    pass

    async def _event(self) -> object:
        import h11

        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(_PIECE))
        return event


class Gate:
    """The gate before the SuperLink on a Unix socket.

    ``keys`` returns the valid keys as PEM; without it all may call. Each refusal is told to ``refused``.
    """

    def __init__(
        self,
        superlink: Path,
        keys: Callable[[], frozenset[bytes]] | None,
        refused: Refused,
        limits: Limits | None = None,
    ) -> None:
        self._superlink, self._keys, self._refused = superlink, keys, refused
        self.limits = limits or Limits()
        self._callers: defaultdict[bytes | None, dict[_Caller, None]] = defaultdict(dict)
        self._held: Counter[bytes | None] = Counter()
        self._freed = asyncio.Condition()

    async def serve(self, listening: socket.socket, tls: ssl.SSLContext | None, ready: Callable[[], None]) -> None:
        """Serve callers of a socket until cancelled; ``ready`` is called when they can connect."""
        import httpx

        listening.setblocking(False)
        listening.listen(self.limits.strangers)
        ready()
        transport = httpx.AsyncHTTPTransport(uds=str(self._superlink))
        async with httpx.AsyncClient(transport=transport, base_url="http://superlink", timeout=60.0) as inner:
            while True:
                try:
                    accepted, address = await asyncio.get_running_loop().sock_accept(listening)
                except OSError:  # no file is left for another connection, or the caller is gone already
                    await asyncio.sleep(0.1)
                    continue
                self._welcome(accepted, str(address[0]), tls, inner)
                await asyncio.sleep(0)  # a flood of callers must not keep those from their turn who have come already

    def _welcome(
        self, accepted: socket.socket, host: str, tls: ssl.SSLContext | None, inner: httpx.AsyncClient
    ) -> None:
        """Start to serve a connection."""

        async def receive() -> None:
            try:
                with self._explained(caller):
                    async with self._opened(accepted, tls) as streams:
                        self._identify(caller, streams.writer)
                        while await self._serve_call(caller, streams, inner):
                            self._enter(caller, caller.key)
            finally:
                self._leave(caller)  # at once, so that nobody refuses it again

        caller = _Caller(host, asyncio.create_task(receive()))
        self._enter(caller, None)

    @asynccontextmanager
    async def _opened(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[_Streams]:
        """Do the TLS handshake on a connection, and yield its streams; it is closed at the end."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(_PIECE)
        protocol = asyncio.StreamReaderProtocol(reader)
        patience = self.limits.silence if tls else None
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=tls, ssl_handshake_timeout=patience
        )
        try:
            yield _Streams(reader, asyncio.StreamWriter(transport, protocol, reader, loop), self.limits)
        finally:
            transport.close()
            loop.call_later(1.0, transport.abort)  # which closes at once, also if the other side does not

    def _enter(self, caller: _Caller, key: bytes | None) -> None:
        """Count a connection as the latest of a known key, or of strangers; the oldest goes if there are too many."""
        self._leave(caller)
        caller.key, caller.busy = key, False
        others = self._callers[key]
        most = self.limits.strangers if key is None else self.limits.connections
        if len(others) >= most:
            oldest = next((each for each in others if not each.busy), next(iter(others)))
            del others[oldest]
            oldest.task.cancel()
            self._refused(oldest.host, "there are too many connections" + ("" if key else " without a known key"))
        others[caller] = None

    def _leave(self, caller: _Caller) -> None:
        others = self._callers[caller.key]
        others.pop(caller, None)
        if not others:
            del self._callers[caller.key]

    def _identify(self, caller: _Caller, writer: asyncio.StreamWriter) -> None:
        """Note the key of a caller that has shown its certificate."""
        encrypted = writer.get_extra_info("ssl_object")
        certificate = encrypted.getpeercert(binary_form=True) if encrypted else None
        if certificate:
            caller.certified = _key_of(certificate)
            if self._keys is not None and caller.certified in self._keys():
                self._enter(caller, caller.certified)

    async def _serve_call(self, caller: _Caller, streams: _Streams, inner: httpx.AsyncClient) -> bool:
        """Pass a call on and answer it; return whether there was one, so that there may be another."""
        request = await streams.head()
        if request is None:
            return False
        try:
            length = self._admit(caller, request)
            async with self._room(caller.key, length):
                body = await streams.body()
                answer = await _passed_on(inner, request, body)
        except RefusalError as refusal:
            self._refused(caller.host, refusal.reason)
            content = json.dumps({"code": 0, "detail": refusal.reason}).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"date", formatdate(usegmt=True).encode()))  # by which a site compares clocks
            await streams.answer(refusal.status, headers, content)
            await streams.discard()
            return False
        await streams.answer(*answer)
        return True

    def _admit(self, caller: _Caller, request: h11.Request) -> int:
        """Return the length of a call's body; a ``RefusalError`` if the call is not to be passed on."""
        headers = dict(request.headers)
        if request.method != b"POST" or not _CALL.fullmatch(request.target):
            raise RefusalError(404, "there is no such call")
        if self._keys is not None:
            key = _decoded(b",".join(value for name, value in request.headers if name == PUBLIC_KEY_HEADER.encode()))
            if key not in self._keys() or caller.certified not in (None, key):
                raise RefusalError(404, UNKNOWN_KEY)
            self._enter(caller, key)
        length = -1 if b"transfer-encoding" in headers else int(headers.get(b"content-length", -1))
        if not 0 <= length <= self.limits.body:
            raise RefusalError(413, f"a call of no stated length, or of more than {self.limits.body} bytes")
        caller.busy = True
        return length

    @asynccontextmanager
    async def _room(self, key: bytes | None, length: int) -> AsyncIterator[None]:
        """Wait until the calls of a key leave room for so many bytes, and keep them within the block."""
        async with asyncio.timeout(self.limits.call), self._freed:
            await self._freed.wait_for(lambda: self._held[key] + length <= self.limits.memory)
            self._held[key] += length
        try:
            yield
        finally:
            self._held[key] -= length
            async with self._freed:
                self._freed.notify_all()

    @contextmanager
    def _explained(self, caller: _Caller) -> Iterator[None]:
        """Report why a connection ends, if not by the caller's will or by ours."""
        import h11

        try:
            yield
        except ConnectionAbortedError:  # which asyncio raises where the handshake takes too long
            self._refused(caller.host, f"no encrypted connection within {self.limits.silence:g} seconds")
        except TimeoutError:
            if caller.key is None or caller.busy:
                self._refused(caller.host, f"no whole call came within {self.limits.silence:g} seconds")
        except h11.RemoteProtocolError as error:
            too_long = error.error_status_hint == 431
            self._refused(
                caller.host, f"headers of more than {self.limits.headers} bytes" if too_long else "this is not HTTP"
            )
        except ssl.SSLError as error:
            self._refused(caller.host, f"no encrypted connection ({_plain(error)})")
        except OSError:
            pass  # the caller is gone


async def _passed_on(
    inner: httpx.AsyncClient, request: h11.Request, body: bytes
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return the SuperLink's answer to a call: its status, headers and content."""
    import httpx

    headers = [(name, value) for name, value in request.headers if name not in _HOP]
    try:
        answer = await inner.post(request.target.decode(), content=body, headers=headers)
    except httpx.TransportError:
        return 503, [], b""
    kept = [(name, value) for name, value in answer.headers.raw if name.lower() not in _HOP]
    return answer.status_code, kept, answer.content


def _decoded(text: bytes) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""


def _key_of(certificate: bytes) -> bytes:
    """Return the public key in a certificate (DER), as in the headers of Flower's calls."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(certificate).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _plain(error: ssl.SSLError) -> str:
    """Return what OpenSSL found wrong, in its words."""
    return getattr(error, "verify_message", "") or (error.reason or one_line(error)).lower().replace("_", " ")


def reserved_socket(address: str) -> socket.socket:
    """Bind HOST:PORT without listening yet: sites that connect before the server is ready fail, and try again."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise UserError(f"cannot listen on {address}: it is not of the form HOST:PORT.")
    try:
        reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host.strip("[]"), int(port)))
    except OSError as error:
        reserved.close()
        raise UserError(f"cannot listen on {address}: {error.strerror}.") from None
    return reserved
