"""feddar on the work that its peers are given: rounds one at a time, to be timed in turn with those of another."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import feddar
from benchmarks.figures import Paired
from benchmarks.peers import run
from benchmarks.peers.bare_loop import BareLoop
from benchmarks.work import Tensors, Work, furthest
from feddar.data.cohort import Cohort
from feddar.models.model import build_model, seeded
from feddar.models.parameters import ALL, Parameters
from feddar.results.run import Run
from feddar.settings import Settings
from feddar.simulation.allocation import keeping_freed_memory
from feddar.simulation.processes import declare_own_process

declare_own_process()  # as that of `feddar run` is

SEED = 0
BARE, BARE_KEEPING = "bare loop", "bare loop that keeps freed memory"
Round = Callable[[], float]
"""Runs a round, and returns its seconds."""


def cohort_of(work: Work, domains: int = 1) -> Cohort:
    """Return the samples as feddar takes them, with domains spread evenly over every client."""
    number = torch.arange(len(work.sizes)).repeat_interleave(torch.tensor(work.sizes))
    domain = torch.arange(len(work.y)) % domains
    return Cohort.from_arrays(
        work.x, work.y.long(), client=number.tolist(), domain=domain.tolist(), task="classification"
    )


def options_of(work: Work, **options: Any) -> dict[str, Any]:
    """Return the options by which feddar does the work, and others."""
    knobs = work.knobs
    same = {"lr": knobs.lr, "batch_size": knobs.batch_size, "encoder_epochs": knobs.epochs, "threads": knobs.threads}
    same |= {"device": knobs.device}
    return (
        {"encoder": knobs.network, "optimizer": "sgd", "seed": SEED, "validation": 0, "schedule": "constant"}
        | same
        | options
    )


def trained(work: Work, **options: Any) -> Run:
    """Train FedAvg for the rounds of the work."""
    return feddar.train(cohort_of(work), "fedavg", **options_of(work, rounds=work.knobs.rounds, **options))


@contextmanager
def rounds(work: Work, method: str = "fedavg", domains: int = 1, **options: Any) -> Iterator[Round]:
    """Start a training in a process of its own that waits before every round; give a function that runs the next.

    The first round comes with all that is done once: it is run here, and its time is nobody's. ``method`` may be BARE,
    the bare loop. Neither finds memory or threads that the other has left, as in a program of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.safetensors"
        work.save(path)
        program = [sys.executable, "-m", "benchmarks.ours", path, method, str(domains), json.dumps(options)]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            assert process.stdin is not None and process.stdout is not None

            def next_round() -> float:
                print("next", file=process.stdin)
                return heard()

            def heard() -> float:
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"{method} ended before its round did.")
                return float(line)

            heard()
            yield next_round
            process.stdin.close()


def serve(work: Work, method: str, domains: int, options: dict[str, Any]) -> None:
    """Run rounds as they are asked for, and say the seconds of each; a round is all between two reports of progress."""
    begun = time.perf_counter()

    def wait(seconds: float) -> bool:
        print(seconds, flush=True)
        return bool(sys.stdin.readline())

    def between(_: object) -> None:
        nonlocal begun
        if not wait(time.perf_counter() - begun):
            sys.exit()
        begun = time.perf_counter()

    if method in (BARE, BARE_KEEPING):
        with keeping_freed_memory() if method == BARE_KEEPING else nullcontext():
            loop = BareLoop(work)
            while wait(loop.next_round()):
                pass
    else:
        cohort, known = cohort_of(work, domains), options_of(work, **options)
        feddar.train(cohort, method, rounds=1_000_000, progress=between, **known)


def in_turn(first: Round, second: Round, repeats: int) -> Paired:
    """Time rounds of both in turn, so that a busy machine slows both."""
    times = [(first(), second()) for _ in range(repeats)]
    return Paired(*(tuple(side) for side in zip(*times, strict=True)))


def beside(peer: str, theirs: dict[str, Work], ours: dict[str, Round]) -> tuple[float, str]:
    """Time runs of a peer in each of its settings, and after each of them rounds of ours in each of ours.

    Returns the ratio of medians in the settings in which each is fastest, and in words how it came about. The first
    round of a peer's run is to warm up.
    """
    found: dict[str, list[float]] = {}
    mine: dict[str, list[float]] = {setting: [] for setting in ours}
    for setting, work in theirs.items():
        found[setting] = run(peer, work).seconds[1:]
        for each, next_round in ours.items():
            mine[each] += [next_round() for _ in found[setting]]
    peers, feddars = (min(map(statistics.median, each.values())) for each in (found, mine))
    return peers / feddars, f"median seconds: theirs {told(found)}; ours {told(mine)}; the fastest of each counts"


def told(times: dict[str, list[float]]) -> str:
    """Say how long a round takes in each setting."""
    return ", ".join(
        f"{setting} {statistics.median(taken):.3g} ({min(taken):.3g} to {max(taken):.3g})"
        for setting, taken in times.items()
    )


def require_same(what: str, apart: float, most: float = 1e-4, other: str = "the bare loop") -> str:
    """Refuse to compare the times of what did not learn the same weights; returns how far they are apart, in words."""
    if not apart <= most:
        raise RuntimeError(f"{what} and {other} learn weights that are {apart:.2g} apart, more than {most:g}.")
    return f"weights {apart:.1g} from {other}'s"


def difference(work: Work, **options: Any) -> float:
    """Return how far weights of ours are from those of the bare loop that takes samples in the same order."""
    cohort = cohort_of(work)
    _, initial = build_model(cohort, work.knobs.network, Settings(seed=SEED))
    same = Work(work.knobs, work.x, work.y, work.sizes, work.initial | plain(initial, work))

    def order(round_number: int, client: int, samples: int) -> Tensor:
        with seeded(SEED, round_number, "together", cohort.clients[client]):
            return torch.randperm(samples)

    loop = BareLoop(same, order)
    for _ in range(work.knobs.rounds):
        loop.next_round()
    return furthest(loop.weights(), plain(trained(work, **options).state.in_use, work))


def plain(parameters: Parameters, work: Work) -> Tensors:
    """Return feddar's parameters under the names of the plain network, whose layers come in the same order."""
    encoder = [value for name, value in parameters.encoders[ALL].items() if not name.startswith("encoder.inputs.")]
    encoder = [value for value in encoder if value.is_floating_point()]
    head = parameters.heads[ALL]
    names = [name for name, value in work.initial.items() if value.is_floating_point()]
    return dict(zip(names, [*encoder, head[:, :-1], head[:, -1]], strict=True))


if __name__ == "__main__":
    given, method, domains, options = sys.argv[1:]
    serve(Work.load(Path(given)), method, int(domains), json.loads(options))
