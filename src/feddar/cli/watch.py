"""The options --watch and --watch-port, by which a command shows its training as a page on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from feddar.cli.console import console
from feddar.errors import TrainingError, UserError

if TYPE_CHECKING:
    from feddar.report.live import LiveView

Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        rich_help_panel="output",
        hidden=True,
        help="Show the training as it goes, as a page for browsers on this machine.",
    ),
]
WatchPort = Annotated[
    int | None,
    typer.Option(
        "--watch-port",
        rich_help_panel="output",
        hidden=True,
        min=1,
        max=2**16 - 1,
        help="The same, on this port [default: one that is free].",
    ),
]


@contextmanager
def watching(
    wanted: bool, port: int | None, unit: Literal["client", "site"], title: str, about: str, folder: Path
) -> Iterator[LiveView | None]:
    """Serve the page of a training within the block, if it is wanted, print its address, and yield what it shows."""
    if not wanted and port is None:
        yield None
        return
    from feddar.report.live import LiveView
    from feddar.report.live_server import serving

    view = LiveView(title, about, unit, folder.resolve())
    with serving(view, port) as address:
        console.print(f"Watch it on this machine, while it runs: {address}", highlight=False, soft_wrap=True)
        try:
            yield view
        except (UserError, TrainingError) as error:
            view.end(f"Ended by an error: {error}")
            raise
        except KeyboardInterrupt:
            view.end(f"Stopped. What is done is in {view.known().folder}, and --resume goes on from there.")
            raise
        view.end(f"Finished. The results are in {view.known().folder}.")
