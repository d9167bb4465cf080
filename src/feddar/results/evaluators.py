"""Evaluation after each round: from scores if all samples are on this machine, else from sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from feddar.algorithm.protocol import OwnState
from feddar.algorithm.rounds import Ask, Position
from feddar.algorithm.schedule import evaluation
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort
from feddar.evaluation.figures import figures_from_sums
from feddar.evaluation.from_sums import metrics_from_sums, refined_score_range
from feddar.evaluation.metrics import are_many, evaluate
from feddar.evaluation.operating_point import OperatingPoint
from feddar.lazy import pandas as pd
from feddar.objectives.objective import Sums
from feddar.results.figure_files import write_figures
from feddar.results.run import Run

Observe: TypeAlias = "Callable[[Cohort, Tensor], pd.DataFrame]"


def no_evaluation(position: Position, ask: Ask) -> tuple[ServerState, None]:
    """Evaluate nothing, for a training without test samples."""
    return position.state, None


@dataclass(frozen=True)
class FromScores:
    """Evaluates from scores: clients score their test samples; ``Run.scores`` scores those of unknown clients."""

    test: Cohort
    run: Run
    own: Callable[[], dict[str, OwnState]]
    """Returns each client's own state."""
    observe: Observe | None = None
    """Returns further rows of metrics, in rounds that the results may come from."""

    def __call__(self, position: Position, ask: Ask) -> tuple[ServerState, pd.DataFrame | None]:
        """Return the unchanged state, and the metrics; None in a round that need not be tested."""
        counts = self._may_count(position)
        if position.round % self.run.settings.test_every and not counts:
            return position.state, None
        scores = self._scores(position, ask)
        found = evaluate(self.test, scores, by_client=not are_many(self.test))
        if self.observe is not None and counts:
            found = pd.concat([found, self.observe(self.test, scores)], ignore_index=True)
        return position.state, found

    def _may_count(self, position: Position) -> bool:
        """Return whether results may come from this round: the best so far, or without validation one of the last."""
        settings = self.run.settings
        return position.is_best if settings.validation else position.round > settings.rounds - settings.last

    def _scores(self, position: Position, ask: Ask) -> Tensor:
        test, model = self.test, self.run.model
        result = torch.zeros(len(test), model.outputs, dtype=model.dtype)
        phase = evaluation("evaluate", position.method)
        for reply in ask(phase, parameters=position.state.in_use):
            tested = [test.client_numbers[name] for name in reply.clients if name in test.client_numbers]
            if reply.scores is not None:
                result[test.rows_of(torch.tensor(tested, dtype=torch.long))] = reply.scores
        unseen = torch.from_numpy(~np.isin(test.clients, self.run.cohort.clients))[test.client]
        if bool(unseen.any()):
            part = test.rows(unseen)
            now = replace(self.run.at(position), own=self.own())
            result[unseen] = now.scores(part.x, part.domain, part.client_names)
        return result


@dataclass(frozen=True)
class FromSums:
    """Evaluates from sums: clients measure their own test samples and send only sums (between sites)."""

    run: Run
    folder: Path | None = None
    """Where the figures of the model in use are written, before it becomes the one in use."""

    def __call__(self, position: Position, ask: Ask) -> tuple[ServerState, pd.DataFrame]:
        """Return the state with the new range of scores, and the metrics."""
        state, phase = position.state, evaluation("measure", position.method)
        replies = ask(phase, parameters=state.in_use, score_range=state.score_range)
        sums = {reply.client if len(reply.clients) == 1 else None: reply.sums for reply in replies if reply.sums}
        if self.folder is not None and (position.best is None or position.is_best):
            self._write_figures(self.folder, sums, state.score_range)
        updated = replace(state, score_range=refined_score_range(sums, state.score_range))
        return updated, metrics_from_sums(self.run.model.objective, sums, self.run.cohort.domains)

    def _write_figures(self, folder: Path, sums: dict[str | None, Sums], score_range: Tensor | None) -> None:
        objective, domains = self.run.model.objective, self.run.cohort.domains
        point = OperatingPoint.of(self.run.settings)
        thresholds = point.thresholds(None, None, len(domains), len(objective.risk_outcomes))
        figures = figures_from_sums(objective, list(sums.values()), domains, score_range, thresholds)
        if figures is not None:
            write_figures(folder, figures)
