"""Runs the apps on Flower's simulation engine: sites are in Ray actors on one machine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from feddar.errors import TrainingError
from feddar.federation.links.flower.apps import NodeConfig, client_app
from feddar.federation.links.flower.grid import GridLink
from feddar.federation.links.flower.internals import VARIABLES
from feddar.federation.links.link import Handler, Link
from feddar.federation.private_folder import temporary_folder

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

T = TypeVar("T")

_START_TIME = 300.0
_handlers: dict[str, Handler] = {}
"""The sites that this process (an actor) has opened. A site's next message goes to any free actor."""


def simulate(names: list[str], make_handler: Callable[[str], Handler], work: Callable[[Link], T]) -> T:
    """Call ``work`` with a link to simulated sites, and return its result.

    ``make_handler`` is sent to other processes, so it must be an importable function, or a ``partial`` of one. It is
    called once per site and process: state of a site that must survive a message has to be on disk.
    """
    with temporary_folder() as folder, _variables(str(folder)):
        return _simulate(names, make_handler, work, str(folder))


def _simulate(names: list[str], make_handler: Callable[[str], Handler], work: Callable[[Link], T], folder: str) -> T:
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    results: list[T] = []
    failures: list[BaseException] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            results.append(work(_link_to_all(grid, len(names))))
        except BaseException as error:
            failures.append(error)

    def site(node: NodeConfig) -> Handler:
        name = names[int(node["partition-id"])]
        return cached(name, make_handler)

    def name(node: NodeConfig) -> str:
        return names[int(node["partition-id"])]

    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app=server,
        client_app=client_app(site, name),
        num_supernodes=len(names),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"logging_level": logging.ERROR, "log_to_driver": False, "_temp_dir": folder},
        },
    )
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def _variables(folder: str) -> Iterator[None]:
    """Turn off telemetry of Flower and Ray, and keep their files out of the user's home, within the block."""
    before = dict(os.environ)
    os.environ |= {"FLWR_HOME": folder, **VARIABLES}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def cached(name: str, make_handler: Callable[[str], Handler]) -> Handler:
    """Return a site's handler, which is made on first use in this process."""
    if name not in _handlers:
        _handlers[name] = make_handler(name)
    return _handlers[name]


def _link_to_all(grid: Grid, count: int) -> GridLink:
    link = GridLink(grid, logging.getLogger("feddar").warning)
    end = time.monotonic() + _START_TIME
    while len(link.sites()) < count:
        if time.monotonic() > end:
            raise TrainingError(f"Flower's simulation has not started within {_START_TIME:g} seconds.")
        time.sleep(0.1)
    return link
