"""FedAvg by Flower's simulation on ray, set to be fast: one actor for each core, no evaluation, bare gradient steps.

Each actor loads the work and makes the network once, and keeps both; what Flower does for each client is left: the
weights to it and back as a message, its context, and the average at the server.
"""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers import Ran
from benchmarks.peers.bare_loop import epoch
from benchmarks.work import Network, Work

CORES = 2


@cache
def kept(path: Path) -> tuple[Work, list[tuple[torch.Tensor, torch.Tensor]], Network]:
    """Return what an actor keeps: the work, the samples of its clients and the network."""
    work = Work.load(path)
    return work, work.clients(), work.new_network()


def client_app(path: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        work, clients, network = kept(path)
        x, y = clients[int(context.node_config["partition-id"])]
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        for _ in range(work.knobs.epochs):
            epoch(network, x, y, work.knobs)
        content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def train(path: Path) -> Ran:
    work = Work.load(path)
    times: list[float] = []
    found: list[ArrayRecord] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, _: Context) -> None:
        # A share of the clients is taken of those that are there at that moment, which are not all at the start.
        everyone = len(work.sizes)
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=everyone, min_available_nodes=everyone)
        # Flower calls it before the first round and behind each; it evaluates nothing.
        clock = lambda *_: times.append(time.perf_counter())  # noqa: E731
        result = strategy.start(
            grid, ArrayRecord(work.initial), num_rounds=work.knobs.rounds, timeout=None, evaluate_fn=clock
        )
        found.append(result.arrays)

    run_simulation(
        server,
        client_app(path),
        num_supernodes=len(work.sizes),
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": CORES, "log_to_driver": False}},
    )
    return Ran([after - before for before, after in pairwise(times)], found[0].to_torch_state_dict())
