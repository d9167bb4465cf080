"""Files of a site, one for each step of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from feddar.algorithm.protocol import Request

KEPT_ROUNDS = 2
"""The number of rounds whose files are kept; the coordinator's checkpoint is at most one round behind."""


@dataclass(frozen=True)
class StepFiles:
    """The files in a folder, named by round and step; other files there are left alone."""

    folder: Path
    suffix: str

    def path(self, request: Request) -> Path:
        """Return the file of the request's step."""
        return self.folder / f"{request.round}-{request.step}{self.suffix}"

    def kept(self) -> list[tuple[tuple[int, int], Path]]:
        """Return the files there are, each with its round and step, in the order of steps."""
        files = [(re.match(r"(\d+)-(\d+)\.", path.name), path) for path in self.folder.glob(f"*{self.suffix}")]
        return sorted(((int(name[1]), int(name[2])), path) for name, path in files if name)

    def until(self, last: int) -> list[Path]:
        """Return the files of rounds up to that one, in their order."""
        return [path for (number, _), path in self.kept() if number <= last]
