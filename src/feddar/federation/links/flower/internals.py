"""Everything that relies on Flower's private interface: names, messages and behaviour of one version of it.

Public are ``flwr.app``, ``flwr.serverapp``, ``flwr.clientapp``, ``flwr.simulation`` and the documented command lines.
All else that feddar relies on is in this module only, so that it is the one to check for a new version of Flower;
``tests/federation/test_flower_internals.py`` shows what has changed.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from feddar.errors import UserError, one_line
from feddar.federation.links.flower.client_tls import show_certificate
from feddar.federation.links.flower.pace import pause

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.supercore.protobuf.client import ProtobufClient
    from flwr.supercore.runtime import RuntimeHttpClient

    Runtime: TypeAlias = RuntimeHttpClient
    """A connection to a SuperNode or SuperLink on this machine."""

_Client = TypeVar("_Client", bound="ProtobufClient")

VERSION = "1.41.0"
"""The version of Flower that this module was written for."""

# Paths and headers of the SuperLink's HTTP interface.
FLEET_CALLS = "/v1/fleet"
PUBLIC_KEY_HEADER = "flwr-public-key"

CLOCK_AHEAD, CLOCK_BEHIND = 5.0, 305.0
"""By how many seconds a site's clock may differ from the SuperLink's, which refuses its signed times otherwise."""

# Error codes of replies.
CLIENT_APP_FAILED = 2
HALF_SENT = 3
NODE_UNAVAILABLE = 5

# Texts in a SuperNode's log.
CONNECTED = "SuperNode ID:"
CONNECTED_AGAIN = "Connection successful"
NO_CONNECTION = "Connection attempt failed"
RECEIVING = "Receiving:"
SENT = "Sent successfully"
NOT_SENT = ("Failed to send message", "Failed to receive message", "Ignoring")
ALREADY_CONNECTED = "[code: 2004]"
BAD_PRIVATE_KEY = "Unable to parse the private key"
NO_TLS = "SSL/TLS handshake error"

VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
}
"""Environment variables that turn off telemetry and update checks, and let an app start without delay."""

_PULLS: Mapping[str, Any] = {"initial_backoff": 0.05, "backoff_cap": 1.0, "max_tries_per_object": None}
"""How often to poll for a chunk of a message that has not arrived. Flower's default waits a second, then twice as long
each time; the total limit, two hours, is not changed."""


_RETRY = 5
"""The most seconds between two attempts to reach a server that is gone. With Flower's 20, sites would come back late
after a restart of the server."""


_LONGEST_KEY = 2**14
"""No file of a key has more bytes; a pipe can hold as many."""


def require_version() -> None:
    """Raise a ``UserError`` if another version of Flower is installed than ``VERSION``."""
    if (found := version("flwr")) != VERSION:
        raise UserError(f"feddar works with Flower {VERSION}, not {found}: pip install 'feddar[flower]'.")


def hasten_pulls() -> None:
    """Make Flower, in this process, poll for chunks of messages more often (see ``_PULLS``)."""
    from flwr.supercore.inflatable import inflatable_utils

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **_PULLS}


class _Clock:
    """A replacement of the module ``time`` in a SuperNode's loop, which uses only ``sleep``, between two polls.

    Flower sleeps 3 s if no message has come, and half a second if a reply is not ready. Here these are upper limits,
    and the waits are shorter at first. If the loop changes from one kind of wait to the other, what it waited for has
    come.
    """

    def __init__(self) -> None:
        self._most, self._since = 0.0, 0.0

    def sleep(self, most: float) -> None:
        """Sleep for at most ``most`` seconds, shorter if the wait began recently (see ``pace.pause``)."""
        now = time.monotonic()
        if most != self._most:
            self._most, self._since = most, now
        time.sleep(pause(now - self._since, most))


def run_supernode(certificate: Path | None = None, key: Path | None = None) -> None:
    """Run ``flower-supernode`` with the arguments of this process, with shorter waits.

    It signs with the key in a file (in OpenSSH's format), which is read only once and so may be a pipe. With a
    certificate of this key it shows the certificate to the server (mutual TLS), for which Flower has no option.
    """
    from flwr.supercore.retry import http_retry
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode
    from flwr.supernode.fleet_http_client import FleetHttpClient

    hasten_pulls()
    # setattr, since mypy does not allow assignments to names of a module.
    for module, name, ours in ((start_client_internal, "time", _Clock()), (http_retry, "MAX_RETRY_DELAY", _RETRY)):
        setattr(module, name, ours)
    if key:
        content = key.read_bytes()[:_LONGEST_KEY]
        sys.argv.append(f"--auth-supernode-private-key={_piped(content)}")
        if certificate:
            setattr(FleetHttpClient, "__init__", _showing(certificate, content, FleetHttpClient.__init__))  # noqa: B010
    flower_supernode()


def _piped(content: bytes) -> str:
    """Return the path of a pipe from which a short content can be read, once: it is not on the disk."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return f"/dev/fd/{reading}"


def _showing(certificate: Path, key: bytes, original: Callable[..., None]) -> Callable[..., None]:
    """Return ``__init__`` of a client of Flower's that shows a certificate to its server."""

    def init(self: ProtobufClient, *args: Any, verify: ssl.SSLContext, **more: Any) -> None:
        show_certificate(verify, certificate, key)
        original(self, *args, verify=verify, **more)

    return init


def run_superlink(socket: Path, authenticated: bool) -> None:
    """Run ``flower-superlink`` with the arguments of this process on a Unix socket, for which Flower has no option.

    So nobody reaches it who cannot open the socket. If sites are ``authenticated``, Flower verifies their keys; by
    itself it would ask for TLS then, which a Unix socket does not need.
    """
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    config = replace(_parse_superlink_lifespan_config(), enable_supernode_auth=authenticated)
    app = create_app(config, SuperLinkLifespan)
    uvicorn.run(app, uds=str(socket), log_config=get_uvicorn_log_config(console_handler.level))


def run_server_app(superlink: Path, app: Path, settings: Mapping[str, str]) -> None:
    """Submit an app with settings of its run configuration to the SuperLink on a Unix socket, and run its ServerApp.

    The commands ``flwr run`` and ``flower-superexec`` do the same, but know no Unix sockets.
    """
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.superlink.grid import http_grid
    from flwr.superlink.runtime import run_serverapp

    _start_run(superlink, app, settings)
    with _connected(RuntimeHttpClient, superlink, "SuperExec") as client:
        while not (token := acquire(client, TaskType.SERVER_APP)):
            time.sleep(0.1)

    def connect(grid: http_grid.HttpGrid) -> None:
        grid._client = _connected(
            RuntimeHttpClient, superlink, "flwr-serverapp", RuntimeTokenHttpInterceptor(token),
            retry_invoker=make_simple_http_retry_invoker(),
        )  # fmt: skip

    setattr(http_grid.HttpGrid, "_connect", connect)  # noqa: B010
    run_serverapp("", Queue(), token, insecure=True, runtime_dependency_install=False)


def _start_run(superlink: Path, app: Path, settings: Mapping[str, str]) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.fab import Fab

    content = build_fab_from_disk(app)
    bundle = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    with _connected(ControlHttpClient, superlink, "flwr CLI") as client:
        client.StartRun(StartRunRequest(fab=bundle, override_config=user_config_to_proto(dict(settings))))


def register(superlink: Path, keys: Mapping[str, bytes]) -> None:
    """Register public keys (PEM, by site name) at the SuperLink on a Unix socket."""
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.control import ControlHttpClient

    with _connected(ControlHttpClient, superlink, "flwr CLI") as client:
        for name, key in keys.items():
            try:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            except httpx.HTTPError as error:
                raise UserError(f"Flower's SuperLink does not take the key of {name} ({one_line(error)}).") from None


def messages_of(address: str, secret: bytes) -> Runtime:
    """Return a connection to the SuperNode at an address of this machine, for taking over its messages."""
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    method = "/flwr.proto.Runtime/AcquireTask"
    signature = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[method])
    return _connected(RuntimeHttpClient, address, "SuperExec", signature)


def acquire(client: Runtime, kind: str = "flwr-clientapp") -> str:
    """Return the token of the next task of this kind, for a ClientApp a message to answer; empty if there is none."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    return str(client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token)


def task(address: str, token: str) -> Runtime:
    """Return a connection to the SuperNode at an address, for working on one message."""
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return _connected(RuntimeHttpClient, address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))


def answer(client: Runtime, app: ClientApp) -> None:
    """Fetch the message of a task, let the app answer it, and send the reply: an error if the app has none."""
    from flwr.app import Error, Message
    from flwr.common.constant import SubStatus
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    message, context, _, _ = pull_task_input(client)
    try:
        reply = app(message, context)
    except Exception as error:
        reply = Message(Error(CLIENT_APP_FAILED, one_line(error)), reply_to=message)
    push_message(client, reply, context)
    push_task_output(client, context, SubStatus.COMPLETED, "")


def beat(client: Runtime) -> None:
    """Send the SuperNode a heartbeat for a task."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def _connected(
    kind: type[_Client], where: str | Path, component: str, *interceptors: Any, retry_invoker: Any = None
) -> _Client:
    """Return a client of one of Flower's programs, at an address of this machine or a Unix socket, without proxies."""
    import httpx
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version_of_ours = RuntimeVersionHttpInterceptor(component_name=component)
    client = kind(
        "http://superlink" if isinstance(where, Path) else f"http://{where}",
        interceptors=[version_of_ours, *interceptors],
        retry_invoker=retry_invoker,
    )
    client._client.close()
    transport = httpx.HTTPTransport(uds=str(where)) if isinstance(where, Path) else None
    client._client = httpx.Client(transport=transport, timeout=30.0, trust_env=False)
    return client
