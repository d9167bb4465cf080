"""What a benchmark module gives, a ``Figure``, and how two ways of doing the same work are timed beside each other."""

from __future__ import annotations

import json
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
"""A figure as ``results.json`` has it."""

COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Figure:
    """One measured number; ``target`` is such as "<= 1.05", or empty where there is none."""

    name: str
    value: float
    target: str
    note: str

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if not self.target:
            return None
        sign, number = self.target.split()
        return bool(COMPARISONS[sign](self.value, float(number)))

    def entry(self) -> Entry:
        """Return it as it is written down."""
        names = ("name", "value", "target", "met", "note")
        return {name: getattr(self, name) for name in names}


def record(module: str, path: str) -> None:
    """Write each figure of a module as it comes, one line each, so that a failure later loses none."""
    with Path(path).open("w") as file:
        for figure in import_module(module).figures():
            file.write(json.dumps(figure.entry(), allow_nan=False) + "\n")
            file.flush()


@dataclass(frozen=True)
class Paired:
    """Seconds of two ways of doing the same work, measured in turn."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """First over second, of each repeat."""
        return [one / other for one, other in zip(self.first, self.second, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def note(self) -> str:
        """The range of the ratios, and what was divided by what."""
        return (
            f"{min(self.ratios):.3g} to {max(self.ratios):.3g} in {len(self.ratios)} repeats; median seconds "
            f"{statistics.median(self.first):.3g} / {statistics.median(self.second):.3g}"
        )


def seconds(work: Callable[[], object]) -> float:
    """Return how long the work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(first: Callable[[], object], second: Callable[[], object], repeats: int = 7, warm_up: int = 1) -> Paired:
    """Time both in turn, so that a busy machine slows both; who comes first takes turns too."""
    for _ in range(warm_up):
        first()
        second()
    times: tuple[list[float], list[float]] = [], []
    for repeat in range(repeats):
        turns = list(zip((first, second), times, strict=True))
        for work, taken in turns if repeat % 2 == 0 else turns[::-1]:
            taken.append(seconds(work))
    return Paired(tuple(times[0]), tuple(times[1]))
