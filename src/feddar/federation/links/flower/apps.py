"""The two parts of the Flower app: a ClientApp that answers messages, and a ServerApp that trains or relays.

At a site, ``feddar client`` runs the ClientApp in its own process. Under a ``flower-supernode`` that was started by
hand, each message has a new process, which opens the site again. With ``socket`` in the run configuration, the
ServerApp imports nothing heavy and only relays for ``feddar server``, which trains; without it, it trains itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from feddar.errors import one_line
from feddar.federation.links.flower import internals
from feddar.federation.links.flower.grid import GridLink, pack, unpack
from feddar.federation.links.flower.relay import relay
from feddar.federation.links.link import Handler, Link

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

NodeConfig = dict[str, Any]


def client_app(
    open_site: Callable[[NodeConfig], Handler] | None = None, name: Callable[[NodeConfig], str] | None = None
) -> ClientApp:
    """Return the ClientApp; ``open_site`` returns the handler of a node, and ``name`` its name."""
    from flwr.app import Error, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        try:
            handler = (open_site or site_of)(dict(context.node_config))
            return Message(pack(handler(unpack(message.content))), reply_to=message)
        except Exception as error:
            # Flower would send the whole traceback to the coordinator, in a form that depends on its engine.
            return Message(Error(internals.CLIENT_APP_FAILED, one_line(error)), reply_to=message)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        called = (name or name_of)(dict(context.node_config))
        return Message(pack(called.encode()), reply_to=message)

    return app


def site_of(node: NodeConfig) -> Handler:
    """Return the handler of a node from its configuration (for a SuperNode started by hand)."""
    from feddar.federation.site import open_site

    return open_site({key: str(value) for key, value in node.items()})


def name_of(node: NodeConfig) -> str:
    """Return the name in a node's configuration."""
    return str(node["name"])


def server_app(run: Callable[[Link, dict[str, Any]], None] | None = None) -> ServerApp:
    """Return the ServerApp; without ``socket`` in its configuration it calls ``run`` with its link."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        internals.hasten_pulls()
        settings = dict(context.run_config)
        if settings.get("socket"):
            relay(partial(GridLink, grid), str(settings["socket"]))
        else:
            (run or training)(GridLink(grid, print), settings)

    return app


def training(link: Link, settings: dict[str, Any]) -> None:
    """Train as the run configuration says."""
    from feddar.federation.coordinator import run_app

    run_app(link, settings)
