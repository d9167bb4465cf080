"""``feddar.train`` and ``feddar.load``, whose runs draw themselves and write pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ParamSpec

from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.lazy import pandas as pd
from feddar.results import run as trained
from feddar.results import training
from feddar.results.figure_files import write_figures
from feddar.results.run import Run as TrainedRun
from feddar.results.run_folder import METRICS_COLUMNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run(TrainedRun):
    """A trained model with its settings, metrics and description of the data; ``train`` and ``load`` return it."""

    def plot(self, metric: str | None = None) -> Figure:
        """Return a Matplotlib figure of a metric by domain, and of the losses, by round; by default the main metric."""
        from feddar.report.run_plot import run_plot

        return run_plot(self, metric)

    def report(self, path: str | Path, title: str | None = None, *, test: Cohort | None = None) -> None:
        """Write the page of this run, as ``feddar report`` does from its folder.

        Calibration, decisions and intervals are of the test samples of the training, if that had a folder (``out``),
        or of ``test``; if there were none in training, so are the scores.
        """
        from feddar.report.page import write_page

        if test is None and self.results().empty:
            raise UserError("this run was not evaluated on test samples: give some, as report(path, test=...).")
        if test is None and self.folder is not None and self.folder.is_dir():
            write_page([self.folder], Path(path), title)
            return
        with TemporaryDirectory(prefix="feddar-") as place:
            folder = Path(place) / self.settings.method
            if test is None:
                self.save(folder)
            else:
                self._evaluated(test).save(folder)
                write_figures(folder, self.figures(test))
            write_page([folder], Path(path), title)

    def _evaluated(self, test: Cohort) -> Run:
        """Return the run with metrics of the model in use on these samples, if it has none on others."""
        if not self.results().empty:
            return self
        metrics = self.evaluate(test).assign(round=self.round, split="test")[METRICS_COLUMNS]
        return replace(self, history=pd.concat([self.history, metrics], ignore_index=True))


Arguments = ParamSpec("Arguments")


def _showing_itself(function: Callable[Arguments, TrainedRun]) -> Callable[Arguments, Run]:
    """Return the function with a run that can show itself."""

    @wraps(function)
    def call(*given: Arguments.args, **options: Arguments.kwargs) -> Run:
        return Run(**vars(function(*given, **options)))

    return call


train, load = _showing_itself(training.train), _showing_itself(trained.load)
