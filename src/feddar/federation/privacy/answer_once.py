"""A site answers each phase of a round once: asked again, it sends the reply that it stored; rounds only go forward.

Otherwise a coordinator could ask for the same phase again and again, with one crafted model after another, and learn
from many replies what a single one does not tell. That work failed is an answer, too, and stored as one, and so is that
no training can have made the model; a reply that is too large to be carried is stored like any other. All of these
depend on the samples.
"""

from __future__ import annotations

from pathlib import Path

from feddar.algorithm.protocol import Request
from feddar.algorithm.wire import MessageError, pack, unpack
from feddar.federation.private_folder import private_folder
from feddar.federation.step_files import KEPT_ROUNDS, StepFiles
from feddar.results.run_folder import replacing

NEEDED_BY_LATE = ("census", "adopt")
"""Phases that a site may be asked for in later rounds: by them, one that comes late begins. A census has no model, and
is the same each time."""
ADOPTS = 2
"""The number of ``adopt`` phases that a round may have."""
FAILED = {"kind": "failed", "why": "it failed; its own log says why."}
"""The answer to a phase in which a site's work failed, whatever the reason."""


class AnsweredPhases:
    """The replies of the last rounds of a run, as they were sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stored(self, request: Request) -> bytes | None:
        """Return the reply to this phase of the round, if there was one, whatever the request says now.

        It is marked as sent ``again``: a coordinator that has changed its mind may find that it does not fit.
        """
        kept = self._of_round(request)
        if request.phase.name == "adopt":  # of which a round has two if each client tunes the common model
            kept = [path for path in kept if path == self._files("adopt").path(request)]
        if not kept:
            return None
        try:
            about, tensors = unpack(kept[0].read_bytes())
        except MessageError:  # the file is damaged; what was sent cannot be sent again, and nothing else is
            return pack(FAILED)
        return pack(about | {"again": True, "step": request.step}, tensors)

    def objection(self, request: Request) -> str | None:
        """Return why a phase may not be answered: its round is long ago, so that replies are not kept any more.

        Or it has been answered in as many steps of the round as it can have.
        """
        last = max((number for (number, _), _ in self._files("*").kept()), default=0)
        if request.phase.name not in NEEDED_BY_LATE and request.round <= last - KEPT_ROUNDS:
            return f"rounds only go forward: it has answered in round {last}."
        if len(self._of_round(request)) >= ADOPTS:
            return f"a round has no more than {ADOPTS} {request.phase.name} phases."
        return None

    def keep(self, request: Request, content: bytes) -> None:
        """Store an answer before it is sent, and delete those of rounds that no coordinator can come back to.

        Those to ``adopt`` stay: else each could be asked for anew, without end.
        """
        if request.phase.name == "census":
            return
        private_folder(self.folder)
        with replacing(self._files(request.phase.name).path(request)) as temporary:
            temporary.write_bytes(content)
        adopted = {path for _, path in self._files("adopt").kept()}  # which may be asked for in any later round
        for path in self._files("*").until(request.round - KEPT_ROUNDS):
            if path not in adopted:
                path.unlink()

    def _of_round(self, request: Request) -> list[Path]:
        """Return the replies to the request's phase in its round."""
        return [path for (number, _), path in self._files(request.phase.name).kept() if number == request.round]

    def _files(self, phase: str) -> StepFiles:
        return StepFiles(self.folder, f".{phase}.reply")
