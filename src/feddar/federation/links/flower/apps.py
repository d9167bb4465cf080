"""The two halves of the Flower app: a ClientApp that answers messages and a ServerApp that runs or relays a training.

At a site, ``feddar client`` runs the ClientApp in its own process. Under a ``flower-supernode`` started by hand, each
message has a process, which opens the site anew. With ``socket`` in the run configuration the ServerApp imports
nothing heavy and only relays for ``feddar server``, which trains; without, it trains itself.
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
    """Return the ClientApp: ``open_site`` makes the handler of a node, ``name`` says what it is called."""
    from flwr.app import Error, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        try:
            handler = (open_site or site_of)(dict(context.node_config))
            return Message(pack(handler(unpack(message.content))), reply_to=message)
        except Exception as error:
            # Left to Flower, it would reach the coordinator as pages, and different ones from each of its engines.
            return Message(Error(internals.CLIENT_APP_FAILED, one_line(error)), reply_to=message)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        called = (name or name_of)(dict(context.node_config))
        return Message(pack(called.encode()), reply_to=message)

    return app


def site_of(node: NodeConfig) -> Handler:
    """Return the handler of a node that was configured by hand."""
    from feddar.federation.site import open_site

    return open_site({key: str(value) for key, value in node.items()})


def name_of(node: NodeConfig) -> str:
    """Return the name that a node's configuration gives it."""
    return str(node["name"])


def server_app(run: Callable[[Link, dict[str, Any]], None] | None = None) -> ServerApp:
    """Return the ServerApp; ``run`` is what it does with its link where it does not relay."""
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
    """Run the training that a run configuration describes."""
    from feddar.federation.coordinator import run_app

    run_app(link, settings)
