"""Everything that relies on Flower's private interface: names, messages and behaviour of one version of it.

Public are ``flwr.app``, ``flwr.serverapp``, ``flwr.clientapp``, ``flwr.simulation`` and the documented command lines.
All else that feddar relies on is in this module only, so that it is the one to check for a new version of Flower;
``tests/federation/test_flower_internals.py`` shows what has changed.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from feddar.errors import UserError
from feddar.federation.links.flower.pace import pause

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.supercore.protobuf.client import ProtobufClient
    from flwr.supercore.runtime import RuntimeHttpClient

    Runtime: TypeAlias = RuntimeHttpClient
    """A connection to a SuperNode on this machine."""

_Client = TypeVar("_Client", bound="ProtobufClient")

VERSION = "1.41.0"
"""The version of Flower that this module was written for."""

# Paths and headers of the SuperLink's HTTP interface.
FLEET_CALLS = "/v1/fleet"
HEALTH = "/health"
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


def run_supernode() -> None:
    """Run ``flower-supernode`` with the arguments of this process, with shorter waits."""
    from flwr.supercore.retry import http_retry
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    hasten_pulls()
    # setattr, since mypy does not allow assignments to names of a module.
    for module, name, ours in ((start_client_internal, "time", _Clock()), (http_retry, "MAX_RETRY_DELAY", _RETRY)):
        setattr(module, name, ours)
    flower_supernode()


def register(address: str, authority: Path, keys: Mapping[str, bytes]) -> None:
    """Register public keys (PEM, by site name) at the SuperLink at an address.

    The command ``flwr supernode register`` does the same, but takes two seconds per key.
    """
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.control import ControlHttpClient

    with _connected(ControlHttpClient, address, "flwr CLI", authority=authority) as client:
        for name, key in keys.items():
            try:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            except httpx.HTTPStatusError as error:
                raise UserError(f"Flower does not take the key of {name}: {error.response.text}") from None


def messages_of(address: str, secret: bytes) -> Runtime:
    """Return a connection to the SuperNode at an address of this machine, for taking over its messages."""
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    method = "/flwr.proto.Runtime/AcquireTask"
    signature = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[method])
    return _connected(RuntimeHttpClient, address, "SuperExec", signature)


def acquire(client: Runtime) -> str:
    """Return the token for answering the next message; empty if there is no message."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    return str(client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token)


def task(address: str, token: str) -> Runtime:
    """Return a connection to the SuperNode at an address, for working on one message."""
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return _connected(RuntimeHttpClient, address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))


def answer(client: Runtime, app: ClientApp) -> None:
    """Fetch the message of a task, let the app answer it, and send the reply."""
    from flwr.common.constant import SubStatus
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    message, context, _, _ = pull_task_input(client)
    push_message(client, app(message, context), context)
    push_task_output(client, context, SubStatus.COMPLETED, "")


def beat(client: Runtime) -> None:
    """Send the SuperNode a heartbeat for a task."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def _connected(
    kind: type[_Client], address: str, component: str, *interceptors: Any, authority: Path | None = None
) -> _Client:
    """Return a client of one of Flower's programs on this machine, which ignores the proxy settings."""
    import httpx
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version_of_ours = RuntimeVersionHttpInterceptor(component_name=component)
    client = kind(f"{'https' if authority else 'http'}://{address}", interceptors=[version_of_ours, *interceptors])
    client._client.close()
    verify = ssl.create_default_context(cafile=authority) if authority else False
    client._client = httpx.Client(verify=verify, timeout=30.0, trust_env=False)
    return client
