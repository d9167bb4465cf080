"""Tuning, the same for every method: the learning rate first, then the method's own hyper-parameter at the best rate.

A candidate is trained on an inner split of the training part and scored there by the mean over domains of the main
metric, of the rounds that results are of; the test part is never used. Every score is saved as soon as it
is known, so a search that was stopped continues with the next candidate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.algorithm.rounds import RoundEnd
from feddar.data.cohort import Cohort
from feddar.errors import TrainingError, UserError
from feddar.methods import find
from feddar.objectives.objective import lower_is_better
from feddar.results.run_folder import replacing, writing
from feddar.results.training import require_same_run, train
from feddar.settings import Settings

TUNING_FILE = "tuning.json"
COLUMNS = ["lr", "knob", "knob_value", "score", "chosen"]
INNER_TEST = 0.2

# The configured rate comes first, so that it is chosen unless another is better.
LR_FACTORS = (1.0, 1 / 3, 3.0)

KNOBS: dict[str, tuple[float, ...]] = {
    "damping": (0.01, 0.1, 1.0),
    "head_epochs": (1, 5, 10),
    "mu": (0.01, 0.1, 0.5),
    "minmax_lr": (0.01, 0.1, 1.0),
    "q": (0.1, 1.0, 5.0),
    "beta": (0.01, 0.1, 1.0),
    "ridge": (1, 10, 100),
    "components": (2, 3, 5),
    "mix": (0.25, 0.5, 0.75),
    "tune_factor": (0.1, 0.5, 1.0),
}
"""The values to try of each setting that is a method's own hyper-parameter (its knob)."""

Point = tuple[float, float | None]
"""A candidate: learning rate and value of the knob (None: the method has no knob)."""


def inner_split(part: Cohort, seed: int) -> tuple[Cohort, Cohort]:
    """Split a training part into an inner training part and a validation part."""
    return part.split(INNER_TEST, seed)


@dataclass
class Search:
    """The search on one training part: the scores of candidates so far, and which candidate is next."""

    settings: Settings
    lower: bool
    """Whether a lower score is better."""
    scores: dict[Point, float] = field(default_factory=dict)

    @property
    def knob(self) -> str | None:
        """The method's own hyper-parameter, if it has one."""
        return find(self.settings.method).knob

    @property
    def length(self) -> int:
        """The number of candidates."""
        return len(LR_FACTORS) + len(self._values())

    def next(self) -> Point | None:
        """Return the next candidate without a score, if any: rates first, then knob values at the best rate."""
        current = getattr(self.settings, self.knob) if self.knob else None
        rates = [(self.settings.rate * factor, current) for factor in LR_FACTORS]
        for point in rates:
            if point not in self.scores:
                return point
        rate, _ = self._best(rates)
        return next((point for value in self._values() if (point := (rate, value)) not in self.scores), None)

    def best(self) -> Point:
        """Return the candidate with the best score; of equal ones the first."""
        return self._best(list(self.scores))

    def options(self, point: Point) -> dict[str, Any]:
        """Return a candidate as options of training."""
        rate, value = point
        return {"lr": rate} | ({self.knob: value} if self.knob else {})

    def _values(self) -> list[float]:
        """Return the knob's values to try, without the configured one, with which the rates were tried."""
        return [value for value in KNOBS[self.knob] if value != getattr(self.settings, self.knob)] if self.knob else []

    def _best(self, points: list[Point]) -> Point:
        def loss(point: Point) -> float:
            score = self.scores[point]
            return math.inf if math.isnan(score) else score if self.lower else -score

        return min(points, key=loss)


def search(
    part: Cohort, options: dict[str, Any], settings: Settings, folder: Path, show: Callable[[int, str, RoundEnd], None]
) -> dict[str, Any]:
    """Train the candidates that have no score yet and return the options of the best."""
    fingerprint = part.fingerprint()
    state = _read(folder, settings, fingerprint) or Search(settings, lower_is_better(part.objective.metrics[0]))
    inner, validation = inner_split(part, settings.seed)
    while (point := state.next()) is not None:
        candidate = state.options(point)
        doing = " ".join(f"{name}={value:.3g}" for name, value in candidate.items() if value is not None)
        progress = partial(show, len(state.scores), f"tuning {doing}, ")
        state.scores[point] = _score(inner, validation, options | candidate, progress)
        with writing(folder):
            _write(folder, state, fingerprint)
    return state.options(state.best())


def chosen(folder: Path, settings: Settings, fingerprint: str) -> dict[str, Any] | None:
    """Return the options that a finished search in this folder has chosen; None if there is no finished search."""
    state = _read(folder, settings, fingerprint)
    return state.options(state.best()) if state is not None and state.next() is None else None


def table(folder: Path, settings: Settings) -> pd.DataFrame:
    """Return lr, knob, knob_value, score and chosen for every candidate of a finished search."""
    state = _load(json.loads((folder / TUNING_FILE).read_text(encoding="utf-8")), settings)
    best = state.best()
    rows = [(rate, state.knob, value, score, (rate, value) == best) for (rate, value), score in state.scores.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def _score(inner: Cohort, validation: Cohort, options: dict[str, Any], progress: Callable[[RoundEnd], None]) -> float:
    try:
        results = train(inner, test=validation, progress=progress, **options | {"track": None}).results()
    except TrainingError:  # training diverged, for example because the rate is too large
        return float("nan")
    main = inner.objective.metrics[0]
    found = results[(results["name"] == "domain_avg") & (results["scope"] == "summary") & (results["metric"] == main)]
    return float(found["value"].iloc[0])


def _read(folder: Path, settings: Settings, fingerprint: str) -> Search | None:
    """Return the saved search in this folder, None if there is none; other data or settings are an error."""
    path = folder / TUNING_FILE
    if not path.exists():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        require_same_run(about, settings, fingerprint, folder)
        return _load(about, settings)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({error}): delete it, and the search begins again.") from None


def _load(about: dict[str, Any], settings: Settings) -> Search:
    scores = {(rate, value): math.nan if score is None else score for rate, value, score in about["scores"]}
    return Search(settings, about["lower"], scores)


def _write(folder: Path, state: Search, fingerprint: str) -> None:
    scores = [(rate, value, None if math.isnan(score) else score) for (rate, value), score in state.scores.items()]
    about = {"fingerprint": fingerprint, "round": 0, "settings": state.settings.model_dump()}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / TUNING_FILE) as temporary:
        temporary.write_text(json.dumps(about | {"lower": state.lower, "scores": scores}, indent=1), encoding="utf-8")
