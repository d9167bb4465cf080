"""Bytes that a client sends and receives in a round, for weighted-average and second-order aggregation.

10 classes, k = 64, one client with samples of 5 domains, a small CNN of 20 thousand parameters. Requests and replies
of the two phases of a round are packed as they are between sites (``algorithm.wire.pack``), and their lengths added.
Random images serve: lengths do not depend on them.
"""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.figures import Figure
from feddar.algorithm.client import Client
from feddar.algorithm.names import named_reply, named_request
from feddar.algorithm.protocol import Reply, Request
from feddar.algorithm.wire import pack, reply_header, request_header
from feddar.data.cohort import Cohort
from feddar.models.model import build_model
from feddar.objectives.objective import CURVATURES
from feddar.results.evaluators import no_evaluation
from feddar.results.run import Run
from feddar.results.training import run_rounds
from feddar.settings import Settings
from feddar.simulation.in_process import Direct

DOMAINS, CLASSES, K = 5, 10, 64
PHASES = ("heads", "encoder")


class Counting(Direct):
    """An engine that counts the bytes of requests and replies by phase."""

    def __init__(self, client: Client) -> None:
        super().__init__([client])
        self.ways: dict[str, dict[str, int]] = {"down": {}, "up": {}}

    def exchange(self, request: Request) -> Iterator[Reply]:
        self.ways["down"][request.phase.name] = len(pack(request_header(request), named_request(request)))
        for reply in super().exchange(request):
            self.ways["up"][request.phase.name] = len(pack(reply_header(reply), named_reply(reply)))
            yield reply


def small_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 4 * 4, K))


def one_round(cohort: Cohort, method: str, curvature: str | None) -> Counting:
    settings = Settings(method=method, curvature=curvature, rounds=1, head_epochs=1, warmup=0)
    model, initial = build_model(cohort, small_cnn(), settings)
    engine = Counting(Client(cohort.clients[0], cohort, None, model))
    run_rounds(Run.begin(settings, model, cohort, initial, ""), engine, no_evaluation, None, [])
    return engine


def figures() -> Iterator[Figure]:
    torch.set_num_threads(1)
    generator = torch.manual_seed(0)
    images = torch.randn(500, 1, 28, 28, generator=generator)
    y, z = (torch.randint(0, most, (500,), generator=generator) for most in (CLASSES, DOMAINS))
    cohort = Cohort.from_arrays(images, y, domain=z, classes=range(CLASSES))
    variants = {"WA": ("feddar-wa", None)} | {f"SA {kind}": ("feddar-sa", kind) for kind in CURVATURES}
    engines = {name: one_round(cohort, *variant) for name, variant in variants.items()}
    for name, engine in engines.items():
        lengths = {f"{phase} {way}": counted[phase] for phase in PHASES for way, counted in engine.ways.items()}
        note = ", ".join(f"{what} {length:,}" for what, length in lengths.items())
        yield Figure(
            f"bytes per client and round, {name}, 10 classes, k=64, 5 domains", sum(lengths.values()), "", note
        )
    gram, hessian, plain = (engines[name].ways["up"]["heads"] for name in ("SA gram", "SA hessian", "WA"))
    note = f"whole replies of the heads phase, {gram:,} / {hessian:,} bytes; WA sends {plain:,}"
    yield Figure("SA traffic gram / hessian, 10 classes, k=64", gram / hessian, "<= 0.02", note)
    both = [
        sum(sum(counted.values()) for counted in engines[f"SA {kind}"].ways.values()) for kind in ("gram", "hessian")
    ]
    note = f"{both[0]:,} / {both[1]:,} bytes up and down, with a small encoder; the larger it is, the less it matters"
    yield Figure("the same, whole round with encoder", both[0] / both[1], "", note)
