"""Which cases of a test that has many run every time, and which with ``make test-more``."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

DISTINCT = ("fedavg", "fedrep", "apfl", "fedminmax", "feddar-mixture", "feddar")
"""Methods that between them have every kind of state: one head, heads of clients and of domains, a second model at a
client, weights of domains at the server, learned components, second-order sums and credibility."""


def first(always: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases for ``parametrize``, a tuple being several arguments; those not ``always`` run are more."""

    def more(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.more)

    return [case if case in always else more(case) for case in cases]
