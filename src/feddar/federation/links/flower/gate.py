"""A reverse proxy in front of the SuperLink: sites can reach the calls meant for them, and nobody anything else.

Flower's SuperLink serves three interfaces on one port: for sites, for submitting runs and registering keys, and for its
own processes. The last two need no authentication, and the code of a submitted run is executed at each site. So the
SuperLink listens on this machine only, with this proxy in front of it: it has the server's certificate, and passes on
only calls of sites that have a known key, which the SuperLink then verifies.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddar.errors import UserError, one_line
from feddar.federation.links.flower.internals import FLEET_CALLS, PUBLIC_KEY_HEADER

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

UNKNOWN_KEY = "this key is not among those of the study"

_CALL = re.compile(r"[a-z-]+")
# Flower sends messages in chunks of 5 MB.
_LARGEST = 16 * 2**20
# Headers that concern one connection only (hop-by-hop), and so are not passed on.
_HOP = {"connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"}


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate (with intermediate certificates) and its private key, as PEM files."""

    certificate: Path
    key: Path
    passphrase: bytes | None = field(default=None, repr=False)
    """That of the key, if it has one."""


def gate(
    superlink: str, authority: Path | None, keys: Callable[[], frozenset[bytes]] | None, log: Callable[[str], None]
) -> Starlette:
    """Return the proxy app for the SuperLink at a URL; ``keys`` returns the valid keys as PEM, None: all may call."""
    import httpx
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    verify = ssl.create_default_context(cafile=authority) if authority else True
    inner = httpx.AsyncClient(base_url=superlink, verify=verify, timeout=60.0, trust_env=False)
    refused: set[tuple[str, str]] = set()

    def refuse(request: Request, status: int, reason: str) -> Response:
        host = request.client.host if request.client else "?"
        if (host, reason) not in refused and len(refused) < 1000:
            refused.add((host, reason))
            log(f"refused a call from {host}: {reason}.")
        return JSONResponse({"code": 0, "detail": reason}, status)

    async def pass_on(request: Request) -> Response:
        call = request.path_params["call"]
        if not _CALL.fullmatch(call):
            return refuse(request, 404, "there is no such call")
        if keys is not None and _key(request) not in keys():
            return refuse(request, 404, UNKNOWN_KEY)
        if not 0 <= int(request.headers.get("content-length", -1)) <= _LARGEST:
            return refuse(request, 413, f"a call of no stated length, or of more than {_LARGEST} bytes")
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        try:
            answer = await inner.post(f"{FLEET_CALLS}/{call}", content=await request.body(), headers=headers)
        except httpx.TransportError:
            return Response(status_code=503)
        passed = {name: value for name, value in answer.headers.items() if name not in _HOP}
        return Response(answer.content, answer.status_code, passed)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with inner:
            yield

    return Starlette(routes=[Route(FLEET_CALLS + "/{call}", pass_on, methods=["POST"])], lifespan=life)


def _key(request: Request) -> bytes:
    try:
        return b64decode(request.headers.get(PUBLIC_KEY_HEADER, ""), validate=True)
    except ValueError:
        return b""


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


@contextmanager
def open_gate(app: Starlette, reserved: socket.socket, tls: ServerTls | None) -> Iterator[None]:
    """Serve the proxy in a thread, until the block ends."""
    import uvicorn

    # Invalid requests from the network should not be shown on the coordinator's screen.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    certificate, key = (str(tls.certificate), str(tls.key)) if tls else (None, None)
    passphrase = tls.passphrase.decode() if tls and tls.passphrase else None
    quiet: dict[str, Any] = {"log_config": None, "access_log": False, "ws": "none"}
    try:
        config = uvicorn.Config(
            app, ssl_certfile=certificate, ssl_keyfile=key, ssl_keyfile_password=passphrase, **quiet
        )
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"cannot use the server's certificate and key ({one_line(error)}).") from None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([reserved],), daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.02)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(timeout=5)
