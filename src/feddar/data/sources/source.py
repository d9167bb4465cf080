"""The declaration of a data source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from feddar.settings import DataSettings

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


def flag_of(option: str) -> str:
    """Return an option's flag; that of ``folder`` is --data, since DATA itself is a positional argument."""
    return "--" + {"folder": "data"}.get(option, option).replace("_", "-")


@dataclass(frozen=True)
class Source:
    """A cohort that can be loaded: its description, its options, and its default training settings."""

    name: str
    about: str
    options: type[DataSettings]
    load: Callable[[Any, int], Cohort]
    """Returns the cohort for an instance of ``options`` and a seed."""
    settings: dict[str, Any] = field(default_factory=dict)
