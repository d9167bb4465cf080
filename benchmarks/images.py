"""Cross-silo images: clients with 500 digits each, the paper's network of 14.2 million parameters, batches of 32.

A round of feddar is timed in turn with a bare PyTorch loop that takes the same gradient steps (``peers.bare_loop``),
each in a process of its own, and with pfl, on random images. Where two workers are not said, everyone has one process
with two threads; beside pfl, each may also have two processes, and the faster setting of each counts. That ours and
the bare loop learn the same is verified first, in the same order of samples, on whole batches: a small last batch under
batch norm makes float's last bits grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks import work
from benchmarks.figures import Figure, Paired
from benchmarks.ours import BARE, BARE_KEEPING, beside, difference, in_turn, require_same, rounds

THREADS, DOMAINS, REPEATS = 2, 5, 3
TWO_THREADS, TWO_PROCESSES = "two threads", "two processes"


def figures() -> Iterator[Figure]:
    same = require_same("feddar", difference(work.images(clients=2, samples=96, lr=1e-3, rounds=2)))
    yield from by_method(same)
    yield beside_pfl()
    yield two_workers(same)


def by_method(same: str, device: str = "cpu") -> Iterator[Figure]:
    """FedAvg, FedRep, FedDAR-SA and the bare loop, all in turn."""
    silos = work.images(threads=THREADS, device=device)
    with ExitStack() as stack:
        fedavg = stack.enter_context(rounds(silos))
        fedrep = stack.enter_context(rounds(silos, "fedrep", head_epochs=5))
        second_order = stack.enter_context(rounds(silos, "feddar-sa", DOMAINS, head_epochs=5, k=64))
        bare = stack.enter_context(rounds(silos, BARE))
        keeping = stack.enter_context(rounds(silos, BARE_KEEPING))
        times = [(bare(), fedavg(), fedrep(), second_order(), keeping()) for _ in range(REPEATS)]
    loops, averages, representations, curvatures, kept = zip(*times, strict=True)
    keeps = "the bare loop under `allocation.keeping_freed_memory`, as ours"
    yield compared("FedAvg round, images, 1 worker / bare loop", averages, loops, "<= 1.05", same)
    yield compared("FedAvg round, images, 1 worker / bare loop that keeps freed memory too", averages, kept, "", keeps)
    yield compared("FedRep round with 5 head epochs / bare FedAvg loop", representations, loops, "<= 1.5")
    name = "FedDAR-SA round with 5 head epochs, k=64 / FedAvg round"
    yield compared(name, curvatures, averages, "<= 1.45", f"{DOMAINS} domains")


def compared(name: str, ours: tuple[float, ...], other: tuple[float, ...], target: str, *more: str) -> Figure:
    """Return the ratio of these seconds, measured with the same threads."""
    found = Paired(ours, other)
    return Figure(name, found.ratio, target, "; ".join([f"{THREADS} threads each", found.note, *more]))


def two_workers(same: str) -> Figure:
    silos = work.images(clients=6, threads=2)
    with rounds(silos, BARE) as bare, rounds(silos, threads=1, jobs=2) as ours:
        found = in_turn(ours, bare, REPEATS)
    name = "FedAvg round, images, 6 clients, 2 workers / bare loop on the same"
    note = f"2 workers of one thread, bare loop with 2 threads; {found.note}; {same}"
    return Figure(name, found.ratio, "<= 0.9", note)


def beside_pfl() -> Figure:
    theirs = {
        TWO_THREADS: work.images(rounds=REPEATS + 1, threads=2),
        TWO_PROCESSES: work.images(rounds=REPEATS + 1, processes=2),
    }
    with rounds(work.images(threads=2)) as threads, rounds(work.images(), jobs=2) as workers:
        ratio, note = beside("pfl_fedavg", theirs, {TWO_THREADS: threads, TWO_PROCESSES: workers})
    return Figure("pfl round / ours, images", ratio, ">= 1.2", f"{note}; ours keeps freed memory, pfl does not")
