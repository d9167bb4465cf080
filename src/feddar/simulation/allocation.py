"""Keeps freed memory for the next tensor, instead of returning it to the system at once.

The C library returns blocks of 32 MB and more to the system as soon as they are freed. The gradient of a large layer is
such a block, new in every step, and the system has to map and clear its pages each time: a sixth of the training time
of the paper's network for digits.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from feddar.simulation.processes import is_own_process

# Options of glibc's mallopt, and the values to which glibc itself raises them once large blocks have been freed. After
# a call of mallopt it no longer adjusts them, so at the end all are set to these values.
_M_MMAP_MAX, _DEFAULT_MMAP_MAX = -4, 65_536
_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 << 20
_M_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD, _NEVER = -1, 64 << 20, (1 << 31) - 1


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory, if the C library is glibc, and return it to the system at the end.

    The options are global to the process and cannot be restored exactly, so this is done only in processes of our own.
    """
    library = _glibc() if is_own_process() else None
    if library is None:
        yield
        return
    library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD)
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
