"""What ``images`` and ``many_clients`` compare with themselves and the bare loop, on a CUDA GPU if there is one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import images, many_clients, work
from benchmarks.figures import Figure
from benchmarks.ours import difference, require_same
from feddar.models.devices import cuda_devices

DEVICE = "cuda:0"
MOST_APART = 1e-3
"""Sums are added in another order on a GPU, so weights are further apart than on a processor."""


def figures() -> Iterator[Figure]:
    if not cuda_devices():
        print("There is no CUDA GPU here: `make bench` measures on the processor.", file=sys.stderr)
        return
    few = work.images(clients=2, samples=96, lr=1e-3, rounds=2, device=DEVICE)
    same = require_same("feddar", difference(few), MOST_APART)
    for figure in (*images.by_method(same, DEVICE), many_clients.one_by_one(DEVICE, MOST_APART)):
        yield replace(figure, name=f"{figure.name}, on a GPU", target="")
