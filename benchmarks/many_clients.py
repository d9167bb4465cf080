"""Many clients: 1,000 with 64 rows x 20 features each, a small MLP, batches of 32; and how time grows with them.

FedAvg of feddar, which trains such clients together as one batched computation, is timed in turn with pfl and with
Flower's simulation, each at its fastest on two cores, and with itself one client after another. Peers have learned the
same weights as the bare loop in the same order of samples, and so has feddar; the notes say how nearly.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import work
from benchmarks.figures import Figure, Paired
from benchmarks.ours import Round, beside, difference, in_turn, plain, require_same, rounds, trained
from benchmarks.peers import run
from benchmarks.peers.bare_loop import BareLoop
from benchmarks.work import Work, furthest

ROWS, COLUMNS = 64, 20
ONE, TWO = "one process", "two processes"


def figures() -> Iterator[Figure]:
    yield beside_pfl()
    yield beside_flower()
    yield one_by_one()
    yield from growth()


def clients(count: int = 1000, **knobs: float | str) -> Work:
    return work.table(count, ROWS, COLUMNS, **knobs)


def learned(peer: str, **knobs: float) -> str:
    """Verify that a peer and ours learn what the bare loop learns when it takes samples in their order."""
    few = clients(100, rounds=2, **knobs)
    loop = BareLoop(few, order=None)
    for _ in range(few.knobs.rounds):
        loop.next_round()
    require_same("feddar", difference(few))
    return require_same(peer, furthest(loop.weights(), run(peer, few).weights))


def beside_pfl() -> Figure:
    theirs = {ONE: clients(rounds=5), TWO: clients(rounds=5, processes=2)}
    with in_both_settings() as ours:
        ratio, note = beside("pfl_fedavg", theirs, ours)
    same = ", ".join(f"{setting} {learned('pfl_fedavg', processes=n)}" for n, setting in ((1, ONE), (2, TWO)))
    return Figure("pfl round / ours, 1,000 clients", ratio, ">= 20", f"{note}; pfl in {same}")


def beside_flower() -> Figure:
    with in_both_settings() as ours:
        ratio, note = beside("flower_simulation", {"two actors": clients(rounds=3)}, ours)
    name = "Flower simulation round / ours, 1,000 clients"
    return Figure(name, ratio, ">= 100", f"{note}; Flower: {learned('flower_simulation')}")


@contextmanager
def in_both_settings() -> Iterator[dict[str, Round]]:
    with rounds(clients()) as one, rounds(clients(), jobs=2) as two:
        yield {ONE: one, TWO: two}


def one_by_one(device: str = "cpu", most_apart: float = 1e-5) -> Figure:
    crowd = clients(rounds=2, device=device)
    plainly, together = (plain(trained(crowd, batched=batched).state.in_use, crowd) for batched in (False, None))
    with rounds(crowd, batched=False) as alone, rounds(crowd) as batched:
        found = in_turn(alone, batched, 5)
    same = require_same("batched", furthest(plainly, together), most_apart, "one by one")
    note = f"one thread each; {found.note}; after two rounds {same}"
    return Figure("batched clients / one by one, 1,000 clients", found.ratio, ">= 15", note)


def growth() -> Iterator[Figure]:
    """A round's time by client, among many clients over among few, timed in turn."""
    for count in (1000, 10_000):
        with rounds(clients(100)) as few, rounds(clients(count)) as many:
            times = [(many() / count, statistics.median(few() for _ in range(10)) / 100) for _ in range(5)]
        found = Paired(*(tuple(side) for side in zip(*times, strict=True)))
        name = f"time per round and client, {count:,} clients / 100 clients"
        yield Figure(name, found.ratio, "<= 1", f"one thread; {found.note}")
