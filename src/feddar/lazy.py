"""Lazy imports: a slow package is imported when one of its names is first used.

``from feddar.lazy import pandas as pd`` is for modules that ``import feddar`` loads; type checkers see the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pandas  # noqa: PLC0414 - exported
else:

    class _LazyPackage:
        def __init__(self, package: str) -> None:
            self._package = package

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._package), name)

    pandas = _LazyPackage("pandas")
