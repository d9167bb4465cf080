"""What tests of devices share: nothing that one pretended device made is left for the next."""

from collections.abc import Iterator

import pytest

from feddar.models import heads


@pytest.fixture(autouse=True)
def forgotten_places() -> Iterator[None]:
    """Forget the indices that were kept for a device of that name."""
    heads._places.cache_clear()
    yield
    heads._places.cache_clear()
