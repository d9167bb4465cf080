"""Freed memory is kept while training, and the C library is left as it would be without it."""

import subprocess
import sys

import pytest

from feddar.simulation.allocation import _glibc

# In a process of its own: the C library learns from blocks that were freed before.
PROGRAM = """
import resource, torch
from feddar.simulation.allocation import keeping_freed_memory
from feddar.simulation.processes import declare_own_process
declare_own_process()

def faults(numbers):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(numbers)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with keeping_freed_memory():
    for _ in range(20):
        torch.ones(3 << 20)
print(max([faults(1 << 22) for _ in range(40)][-5:]))
with keeping_freed_memory():
    # Remainders that the library holds back part its first blocks from each other, so it takes some to start with.
    print(max([faults(16 << 20) for _ in range(30)][-10:]))
"""


@pytest.mark.skipif(_glibc() is None, reason="another C library")
def test_a_block_that_was_freed_is_used_again_in_training_and_afterwards():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    afterwards, during = map(int, done.stdout.split())
    assert during < 100
    assert afterwards < 100
