"""Which round's model is used, as the validation losses in a run's metrics say, and the results that follow from it.

The round loop chooses in the same way while it runs (``algorithm.rounds.Position``); here the choice is computed from
metrics.csv, so that everything that shows results derives it in one place, and anybody can check it.
"""

from __future__ import annotations

from dataclasses import dataclass

from feddar.evaluation.metrics import last_rounds
from feddar.lazy import pandas as pd
from feddar.settings import Settings

SPLIT, LOSS = "validation", "loss"
"""The split and the metric of validation losses in metrics.csv."""
NOTABLE = 0.01
"""The share by which the validation loss must rise above its best, or fall at the end, for a page to mention it."""


@dataclass(frozen=True)
class Choice:
    """The round whose model is used: the one with the lowest validation loss."""

    round: int
    loss: float
    last: int
    """The number of rounds that were trained."""
    last_loss: float
    """The validation loss after the last of them."""
    rounds: int
    """The number of rounds that there could have been."""
    patience: int
    before_end: float
    """The validation loss when three quarters of the trained rounds were over."""

    @property
    def stopped(self) -> bool:
        """Whether training stopped before its last round, since the loss was not getting better."""
        return self.last < self.rounds and self.last - self.round >= self.patience

    @property
    def rise(self) -> float:
        """By which share the validation loss has risen above its best by the last round."""
        return self.last_loss / self.loss - 1 if self.loss > 0 else 0.0

    @property
    def fall(self) -> float:
        """By which share the validation loss fell in the last quarter of the rounds; 0 if it was not at its best."""
        at_best = self.round == self.last == self.rounds
        return 1 - self.loss / self.before_end if at_best and self.before_end > 0 else 0.0


def validation_losses(history: pd.DataFrame) -> pd.Series[float]:
    """Return the mean loss over all validation samples by round; empty without validation."""
    losses: pd.Series[float] = history[_over_all(history)].set_index("round")["value"]
    return losses


def _over_all(history: pd.DataFrame) -> pd.Series[bool]:
    return (history["split"] == SPLIT) & (history["scope"] == "all") & (history["metric"] == LOSS)


def validation_curve(history: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``validation_losses``, with ``validation`` as their scope, to be put below test metrics."""
    return history[_over_all(history)].assign(scope=SPLIT)


def choice_of(losses: pd.Series[float], settings: Settings) -> Choice | None:
    """Return which round these losses choose, of equal ones the first; None if there is none to choose from."""
    found = {int(number): float(loss) for number, loss in zip(losses.index, losses, strict=True)}
    open_to_choice = [number for number in found if settings.may_choose(number)]
    if not open_to_choice:
        return None
    best, last = min(open_to_choice, key=found.__getitem__), max(found)
    before_end = found.get(last - max(1, last // 4), found[last])
    return Choice(best, found[best], last, found[last], settings.rounds, settings.patience, before_end)


def results_in(history: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """Return the test metrics of a run: those of the round in use, or without validation means over the last rounds."""
    choice = choice_of(validation_losses(history), settings)
    if choice is None:
        return last_rounds(history, settings.last)
    return last_rounds(history[history["round"] == choice.round], 1)
