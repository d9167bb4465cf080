"""The polling interval, for everything that has to be polled for."""

from __future__ import annotations

_LEAST = 0.1


def pause(waited: float, most: float) -> float:
    """Return the seconds until the next poll after ``waited`` seconds: a tenth of them, between 0.1 and ``most``.

    So the delay is small compared with the wait, and long waits need few polls.

    >>> [pause(waited, most=3.0) for waited in (0.0, 10.0, 600.0)]
    [0.1, 1.0, 3.0]
    """
    return min(most, max(_LEAST, waited / 10))
