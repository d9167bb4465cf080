"""What every source of samples says about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from feddar.settings import DataSettings

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort


def flag_of(option: str) -> str:
    """Return an option's flag. DATA itself is an argument, and --data the folder in which a set is found."""
    return "--" + {"folder": "data"}.get(option, option).replace("_", "-")


@dataclass(frozen=True)
class Source:
    """A cohort that can be loaded: what it is, the options it has, and the training settings that suit it."""

    name: str
    about: str
    options: type[DataSettings]
    load: Callable[[Any, int], Cohort]
    """Takes the options, as ``options`` made them, and a seed."""
    settings: dict[str, Any] = field(default_factory=dict)
