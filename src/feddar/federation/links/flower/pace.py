"""How long to wait before looking again for something that nobody announces: one rule for all who have to."""

from __future__ import annotations

_LEAST = 0.1


def pause(waited: float, most: float) -> float:
    """Return the seconds until the next look after so many in vain: a tenth of them, within reason.

    So what comes soon is seen at once, what comes late is seen hardly later, and who waits long asks seldom.

    >>> [pause(waited, most=3.0) for waited in (0.0, 10.0, 600.0)]
    [0.1, 1.0, 3.0]
    """
    return min(most, max(_LEAST, waited / 10))
