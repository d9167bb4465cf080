"""What commands share: the console, errors, and options that several commands have."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

# A file or pipe has no width; 200 keeps tables from being wrapped.
console = Console(width=None if sys.stdout.isatty() else 200)

Out = Annotated[
    Path | None,
    typer.Option("--out", rich_help_panel="output", help="Folder for the results; a new one under runs/ if left out."),
]
Resume = Annotated[bool, typer.Option("--resume", rich_help_panel="output", help="Go on with what is in --out.")]


def allow(names: list[str] | None) -> None:
    """Allow encoders that are code and that the user has named here; they may lie in the current folder."""
    if not names:
        return
    from feddar.models.encoders.own import allow_code

    allow_code(*names)
    if "" not in sys.path:
        sys.path.append("")


Device = Annotated[
    str,
    typer.Option("--device", help="Where the model works: cpu, cuda, cuda:N, mps or auto (the first GPU)."),
]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="MODULE:NAME",
        callback=allow,
        help="Import this encoder, if a file names it.",
        rich_help_panel="safety",
        hidden=True,
    ),
]
"""The permission to run code that a study, a configuration or a run names; it is given while options are read."""


def permission(encoder: str | None) -> list[str]:
    """Return the options that allow a run's encoder again, where it is code."""
    return ["--allow-code", encoder] if encoder and ":" in encoder else []


def fail(what: object, code: int) -> NoReturn:
    """End the command with one line of error and an exit code."""
    sys.stdout.flush()
    print(f"feddar: {what}", file=sys.stderr)
    sys.exit(code)


def say_written(path: Path) -> None:
    """Print which file or folder was written."""
    console.print(f"Written: [bold]{escape(str(path))}[/bold]", highlight=False)


def folder_for(out: Path | None, data: str, method: str) -> Path:
    """Return the given folder, or the first free one under runs/."""
    if out is not None:
        return out
    stem = Path("runs") / f"{Path(data).stem or 'data'}-{method}"
    return next(
        path
        for path in (stem if n == 1 else stem.with_name(f"{stem.name}-{n}") for n in range(1, sys.maxsize))
        if not path.exists()
    )


@contextmanager
def stoppable(again: list[str] | None = None) -> Iterator[None]:
    """On Ctrl-C, end with one line, which says how to continue if there is a command for that."""
    try:
        yield
    except KeyboardInterrupt:
        fail(f"stopped; go on with: {shlex.join(again)}" if again else "stopped.", 1)


@contextmanager
def stoppable_by_signal(again: list[str] | None = None) -> Iterator[None]:
    """Do the same as ``stoppable``, also on SIGTERM, by which services are stopped."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # Not by raising SIGINT, which background jobs of a shell ignore.
    signal.signal(signal.SIGTERM, stop)
    with stoppable(again):
        yield
