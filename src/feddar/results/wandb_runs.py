"""Runs in Weights & Biases, each that of a folder.

They are kept in files, ``wandb`` in the folder, and sent nowhere before someone says so: WANDB_MODE=online sends them
while they are made, ``wandb sync`` later. WANDB_PROJECT says to which project, else ``feddar``.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from feddar.results.run_folder import replacing, writing
from feddar.results.stored_runs import PROJECT, Figure, configuration, key
from feddar.simulation.processes import is_own_process

WANDB_FILE = "wandb-run"
"""The file in a folder with what Weights & Biases calls the run, and the last round that was logged."""


@dataclass(frozen=True)
class WandbRun:
    """A run in Weights & Biases; one that is opened again is a part of it, which ``wandb sync`` adds to the others."""

    store: ClassVar[str] = "Weights & Biases"
    place: ClassVar[str] = "WANDB_MODE"

    run: Any
    folder: Path

    @classmethod
    def opened(cls, folder: Path) -> WandbRun:
        """Return the run of a folder, which goes on; if there is none, it begins, with its configuration."""
        if not (folder / WANDB_FILE).exists():
            _remember(folder, secrets.token_hex(4), 0)
        return cls._begin(folder, name=folder.resolve().name, config=configuration(folder))

    @classmethod
    def found(cls, folder: Path) -> WandbRun | None:
        """Return the run of a folder; None if it has none."""
        return cls._begin(folder) if (folder / WANDB_FILE).exists() else None

    @classmethod
    def _begin(cls, folder: Path, **labels: Any) -> WandbRun:
        """Return the run with this folder's number; of the machine nothing is noted: no name, code or load."""
        wandb = import_wandb()
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            host="",
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            mode=os.environ.get("WANDB_MODE", "offline"),
            id=_remembered(folder)[0],
            resume="allow",
            reinit="create_new",  # a notebook may have a run of its own
            dir=str(folder),
            allow_val_change=True,
            settings=settings,
            **labels,
        )
        return cls(run, folder)

    def last_round(self) -> int:
        """Return the last round that was logged, 0 if none was."""
        return _remembered(self.folder)[1]

    def log(self, figures: Iterable[Figure], step: int) -> None:
        """Log the figures of a round as metrics METRIC/SCOPE/NAME."""
        self.run.log({key(*names): float(value) for *names, value in figures}, step=step)
        _remember(self.folder, self.run.id, step)

    def log_results(self, figures: Iterable[Figure], step: int) -> None:
        """Put the figures of the round in use into the summary, as result/METRIC/SCOPE/NAME, and the round."""
        results = {key("result", *names): float(value) for *names, value in figures}
        self.run.summary.update({"result/round": step} | results)

    def log_files(self, files: Iterable[Path]) -> None:
        """Keep copies of those of the files that are there."""
        for file in files:
            if file.exists():
                copy = Path(self.run.dir) / file.name
                shutil.copyfile(file, copy)
                self.run.save(str(copy), base_path=self.run.dir, policy="now", glob=False)

    def adopt(self, folder: Path, labels: Mapping[str, Any]) -> None:
        """Show the run of a folder in a group with this one, with labels as its name and in its configuration."""
        if (folder / WANDB_FILE).exists():
            group = f"{self.run.name} {self.run.id}"
            self._begin(folder, group=group, name="/".join(map(str, labels.values())), config=dict(labels)).end(True)

    def end(self, finished: bool) -> None:
        """Say how the run has ended."""
        self.run.finish(exit_code=0 if finished else 1)
        if is_own_process():
            import_wandb().teardown()  # its threads, of which a process that is forked later would have none


def import_wandb() -> Any:
    """Return the package, which is asked not to tell its makers how it is used."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return import_module("wandb")


def _remember(folder: Path, number: str, last: int) -> None:
    with writing(folder), replacing(folder / WANDB_FILE) as temporary:
        temporary.write_text(f"{number} {last}", encoding="utf-8")


def _remembered(folder: Path) -> tuple[str, int]:
    number, last = (folder / WANDB_FILE).read_text(encoding="utf-8").split()
    return number, int(last)
