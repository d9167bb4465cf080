"""Experiment trackers such as TensorBoard: callbacks that log each round, and are closed at the end.

To add one, write a class with ``__call__`` and ``close``, and add a line to ``TRACKERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from feddar.algorithm.rounds import Callback, RoundEnd, mean_loss
from feddar.errors import UserError
from feddar.settings import Settings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SCOPES = ("all", "domain", "summary")
"""The scopes that are tracked; metrics of clients, of which there may be thousands, are in metrics.csv only."""


class Tracker(Protocol):
    """A callback that must be closed."""

    def __call__(self, end: RoundEnd) -> None:
        """Log a round."""

    def close(self) -> None:
        """Write what is not yet written, and close the files."""


@contextmanager
def tracking(settings: Settings, folder: Path | None) -> Iterator[list[Callback]]:
    """Yield the callbacks of the tracker in the settings, if any; it writes into the run's folder."""
    with ExitStack() as stack:
        if settings.track is None:
            yield []
            return
        if folder is None:
            raise UserError(f"track {settings.track} needs a folder to write to: give --out (out=... in Python).")
        yield [stack.enter_context(closing(TRACKERS[settings.track](folder, settings)))]


class TensorBoard:
    """Writes event files to ``tensorboard`` in the run's folder: the loss, and metrics as METRIC/SCOPE/NAME.

    Look at them with ``tensorboard --logdir FOLDER``; a comparison's folder shows all of its runs.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tracking needs one more package: pip install 'feddar[tensorboard]'.") from None
        self.folder, self.settings = folder / "tensorboard", settings
        self.kind = SummaryWriter
        self.writer: SummaryWriter | None = None

    def __call__(self, end: RoundEnd) -> None:
        """Log the loss and each metric; after a resume, rounds logged after the last checkpoint are purged."""
        if self.writer is None:
            self.writer = self.kind(str(self.folder), purge_step=end.round)
            self.writer.add_text("settings", _listed(self.settings), end.round)
        self.writer.add_scalar("loss/train", end.loss, end.round)
        if end.validation is not None:
            self.writer.add_scalar("loss/validation", mean_loss(end.validation), end.round)
        if end.test is not None:
            shown = end.test[end.test["scope"].isin(SCOPES)]
            for scope, name, metric, value in zip(
                *(shown[c] for c in ("scope", "name", "metric", "value")), strict=True
            ):
                self.writer.add_scalar(f"{metric}/{scope}/{name}", value, end.round)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()


def _listed(settings: Settings) -> str:
    """Return settings as a Markdown table."""
    rows = [f"| {name} | {value} |" for name, value in settings.model_dump(exclude_none=True).items()]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])


TRACKERS: dict[str, Callable[[Path, Settings], Tracker]] = {"tensorboard": TensorBoard}
