"""Freed memory is kept for the next tensor, instead of going back to the system at once.

The C library gives blocks of 32 MB and more back as soon as they are freed. The gradient of a large layer is one, new
in every step, and the system has to find and clear each of its pages again: a sixth of the time of training the
paper's network for digits.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from feddar.simulation.processes import is_ours

# Options of glibc's mallopt, and the values that it comes to by itself once large blocks have been freed. It no longer
# does so after the first call, so all of them are put where they would be.
_BLOCKS_OF_THEIR_OWN, _MOST_BLOCKS = -4, 65_536
_LEAST_OF_THEIR_OWN, _LARGE = -3, 32 << 20
_KEPT_AT_THE_END, _USUALLY_KEPT, _ALL = -1, 64 << 20, (1 << 31) - 1


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory, where the C library can be told to (glibc), and give it back in the end.

    What it is told holds for the whole process and cannot be put back to the letter: so only a process of ours is told.
    """
    library = _glibc() if is_ours() else None
    if library is None:
        yield
        return
    library.mallopt(_BLOCKS_OF_THEIR_OWN, 0)
    library.mallopt(_KEPT_AT_THE_END, _ALL)
    try:
        yield
    finally:
        library.mallopt(_BLOCKS_OF_THEIR_OWN, _MOST_BLOCKS)
        library.mallopt(_LEAST_OF_THEIR_OWN, _LARGE)
        library.mallopt(_KEPT_AT_THE_END, _USUALLY_KEPT)
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
