"""All that feddar knows of Flower beyond its public interface: names, words and habits of one version of it.

Public are ``flwr.app``, ``flwr.serverapp``, ``flwr.clientapp``, ``flwr.simulation`` and the command lines that are
documented. Whatever else is relied on stands here and nowhere else, so that a new version means reading one module;
``tests/federation/test_flower_internals.py`` says where it breaks.
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
"""The version that all of this was read in."""

# What a SuperLink serves over HTTP, and how it is called.
FLEET_CALLS = "/v1/fleet"
HEALTH = "/health"
PUBLIC_KEY_HEADER = "flwr-public-key"

# Its numbers for what kept a reply away.
CLIENT_APP_FAILED = 2
NODE_UNAVAILABLE = 5

# What a SuperNode says on its way, as it says it.
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
"""Environment variables under which its programs send nothing to their makers, and start an app without delay."""

_PULLS: Mapping[str, Any] = {"initial_backoff": 0.05, "backoff_cap": 1.0, "max_tries_per_object": None}
"""How often to look for a piece of a message that is still on its way. Left to itself Flower waits a second, then
twice as long each time; how long in all, two hours, stays as it is."""


_RETRY = 5
"""The most seconds between two attempts to reach a server that is gone; Flower's own 20 keep sites away that long when
it is back."""


def require_version() -> None:
    """Raise a ``UserError`` where another version of Flower is installed than the one this was written for."""
    if (found := version("flwr")) != VERSION:
        raise UserError(f"feddar works with Flower {VERSION}, not {found}: pip install 'feddar[flower]'.")


def hasten_pulls() -> None:
    """Have what Flower does in this process fetch messages without its long waits for pieces of them."""
    from flwr.supercore.inflatable import inflatable_utils

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **_PULLS}


class _Clock:
    """The module ``time``, as far as a SuperNode's loop uses it: to sleep, between one look and the next.

    It sleeps 3 s where no message has come, and half a second where a reply is not there yet. These are the longest
    now; where it turns from one kind of waiting to the other, what it waited for has come.
    """

    def __init__(self) -> None:
        self._most, self._since = 0.0, 0.0

    def sleep(self, most: float) -> None:
        """Sleep, but no longer than it makes sense after the wait so far."""
        now = time.monotonic()
        if most != self._most:
            self._most, self._since = most, now
        time.sleep(pause(now - self._since, most))


def run_supernode() -> None:
    """Be ``flower-supernode``, with the arguments of this process, in less of a leisure."""
    from flwr.supercore.retry import http_retry
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    hasten_pulls()
    # The types of modules do not let what is in them be replaced.
    for module, name, ours in ((start_client_internal, "time", _Clock()), (http_retry, "MAX_RETRY_DELAY", _RETRY)):
        setattr(module, name, ours)
    flower_supernode()


def register(address: str, authority: Path, keys: Mapping[str, bytes]) -> None:
    """Have the SuperLink at an address know these public keys, as PEM, by their names.

    ``flwr supernode register`` does the same, and takes two seconds for each.
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
    """Connect to the SuperNode at an address of this machine to take the messages it receives."""
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    method = "/flwr.proto.Runtime/AcquireTask"
    signature = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[method])
    return _connected(RuntimeHttpClient, address, "SuperExec", signature)


def acquire(client: Runtime) -> str:
    """Return the token under which to answer the next message, or nothing where there is none."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    return str(client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token)


def task(address: str, token: str) -> Runtime:
    """Connect to the SuperNode at an address to work on one message."""
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return _connected(RuntimeHttpClient, address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))


def answer(client: Runtime, app: ClientApp) -> None:
    """Fetch the message of a task, let the app answer it, and hand over the reply."""
    from flwr.common.constant import SubStatus
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    message, context, _, _ = pull_task_input(client)
    push_message(client, app(message, context), context)
    push_task_output(client, context, SubStatus.COMPLETED, "")


def beat(client: Runtime) -> None:
    """Tell the SuperNode that work on a task goes on."""
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    client.SendTaskHeartbeat(SendTaskHeartbeatRequest())


def _connected(
    kind: type[_Client], address: str, component: str, *interceptors: Any, authority: Path | None = None
) -> _Client:
    """Return a client of one of Flower's programs on this machine, which is no business of a proxy's."""
    import httpx
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version_of_ours = RuntimeVersionHttpInterceptor(component_name=component)
    client = kind(f"{'https' if authority else 'http'}://{address}", interceptors=[version_of_ours, *interceptors])
    client._client.close()
    verify = ssl.create_default_context(cafile=authority) if authority else False
    client._client = httpx.Client(verify=verify, timeout=30.0, trust_env=False)
    return client
