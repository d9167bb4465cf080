"""Freed memory is kept while training."""

import resource

import pytest
import torch

from feddar.allocation import _glibc, keeping_freed_memory


@pytest.mark.skipif(_glibc() is None, reason="another C library")
def test_a_large_block_that_was_freed_is_used_again():
    def faults(numbers=16 << 20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(numbers)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with keeping_freed_memory():
        # Remainders that the library holds back part its first blocks from each other, so it takes some to start with.
        found = [faults() for _ in range(30)]
        assert max(found[-10:]) < 100
    assert torch.ones(16 << 20).sum() == 16 << 20
    # Blocks of a usual size are used again afterwards, too.
    found = [faults(1 << 20) for _ in range(10)]
    assert max(found[-5:]) < 100
