"""Cross-silo tables: 50 clients x 2,000 rows x 40 features, the MLP, batches of 32, one thread.

A round of feddar is timed in turn with a bare PyTorch loop that takes the same gradient steps one client after
another; that both learn the same weights is verified first, in the same order of samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import work
from benchmarks.figures import Figure
from benchmarks.ours import BARE, difference, in_turn, require_same, rounds


def figures() -> Iterator[Figure]:
    silos = work.table(50, 2000, 40)
    same = require_same("feddar", difference(silos.with_knobs(rounds=2)))
    with rounds(silos, BARE) as bare, rounds(silos) as ours:
        found = in_turn(ours, bare, 7)
    note = f"one thread each; {found.note}; {same}"
    yield Figure("FedAvg round, tables, 50 clients / bare loop", found.ratio, "<= 1.05", note)
