"""Answer, in this process, the messages that a SuperNode on this machine receives.

Left to itself a SuperNode starts a process for each message, which installs and runs the app that the server sent. Here
nothing that came over the network is run: a site's code is what the site has installed. And nothing has to start.

For that, this module takes the place of Flower's own executor (``flower-superexec`` and ``flwr-clientapp``), for which
Flower has no public interface: all of its internals that feddar relies on are imported here, from the version pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.supercore.runtime import RuntimeHttpClient

_POLL = 0.1
_HEARTBEAT = 10.0


@contextmanager
def executing(address: str, secret: bytes, app: ClientApp) -> Iterator[None]:
    """Let ``app`` answer what the SuperNode at ``address`` receives, one message after another, in a thread."""
    ended = threading.Event()
    thread = threading.Thread(target=_execute, args=(address, secret, app, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _execute(address: str, secret: bytes, app: ClientApp, ended: threading.Event) -> None:
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

    signature = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=["/flwr.proto.Runtime/AcquireTask"]
    )
    with _client(address, "SuperExec", signature) as client:
        while not ended.wait(_POLL):
            # The SuperNode may be starting, or ending.
            try:
                task = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
                if task.token:
                    _answer(address, task.token, app)
            except (httpx.HTTPError, RuntimeError):
                ended.wait(1.0)


def _answer(address: str, token: str, app: ClientApp) -> None:
    from flwr.common.constant import SubStatus
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    with _client(address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token)) as client, _alive(client):
        message, context, _, _ = pull_task_input(client)
        push_message(client, app(message, context), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")


def _client(address: str, component: str, interceptor: Any) -> RuntimeHttpClient:
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    interceptors = [RuntimeVersionHttpInterceptor(component_name=component), interceptor]
    return RuntimeHttpClient.from_server_address(address, True, None, interceptors)


@contextmanager
def _alive(client: RuntimeHttpClient) -> Iterator[None]:
    """Tell the SuperNode every now and then that work goes on."""
    import httpx
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

    done = threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT):
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                continue

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
