"""A site answers each step of a run once: asked again, it sends the reply that it stored; rounds only go forward.

Otherwise a coordinator could ask the same step again and again, with one crafted model after another, and learn from
many replies what a single one does not tell.
"""

from __future__ import annotations

from pathlib import Path

from feddar.algorithm.protocol import Request
from feddar.federation.step_files import KEPT_ROUNDS, StepFiles
from feddar.results.run_folder import replacing

REPEATABLE = ("census", "adopt")
"""Phases that may be asked for again: a census says the same each time, and an answer to ``adopt`` says nothing."""


class AnsweredSteps:
    """The replies of the last rounds of a run, as they were sent."""

    def __init__(self, folder: Path) -> None:
        self.files = StepFiles(folder, ".reply")

    def stored(self, request: Request) -> bytes | None:
        """Return the reply to this step of the run, if there was one, whatever the request says now."""
        path = self.files.path(request)
        return path.read_bytes() if request.phase.name not in REPEATABLE and path.exists() else None

    def objection(self, request: Request, steps: int) -> str | None:
        """Return why a step may not be answered: it lies before one that was, or beyond the ``steps`` of a round."""
        if request.phase.name in REPEATABLE:
            return None
        if request.step > steps:
            return f"round {request.round} of the study has {steps} steps, and this is step {request.step}."
        last = max((place for place, _ in self.files.kept()), default=(0, 0))
        if (request.round, request.step) <= last:
            return f"rounds only go forward: it has answered step {last[1]} of round {last[0]}."
        return None

    def keep(self, request: Request, content: bytes) -> None:
        """Store a reply before it is sent, and delete those of rounds that no coordinator can come back to."""
        if request.phase.name in REPEATABLE:
            return
        self.files.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.files.path(request)) as temporary:
            temporary.write_bytes(content)
        for path in self.files.until(request.round - KEPT_ROUNDS):
            path.unlink()
