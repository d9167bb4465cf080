"""The command line: it parses options, calls the library and prints. Each module has a group of commands."""

from __future__ import annotations

import os
import sys
import warnings
from errno import EACCES, EDQUOT, ENOSPC, ENOTDIR, EPERM, EROFS
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.core
from rich.markup import escape

from feddar.cli import configuration, installation, paper, runs, sites, using
from feddar.cli.console import console, fail
from feddar.cli.help import WIDTH, Command, Group, said_of
from feddar.errors import Notice, TrainingError, UserError
from feddar.simulation.processes import declare_own_process

# The version of typer that Flower needs writes "\\[required]" if rich is installed, although help is plain text here.
typer.core.HAS_RICH = False

app = typer.Typer(cls=Group, context_settings=WIDTH, pretty_exceptions_enable=False, rich_markup_mode=None)
COMMANDS = {
    "train": (runs.run, runs.cohort, runs.methods, configuration.init),
    "compare": (runs.compare, using.report),
    "use a trained model": (using.predict, using.export, using.card),
    "between sites": (
        sites.example, sites.keys, sites.study, sites.server, sites.client, sites.simulate, sites.flare_job,
    ),
    "the paper": (paper.paper,),
    "the installation": (installation.doctor,),
}  # fmt: skip
"""The commands in the groups in which help shows them."""
for group, commands in COMMANDS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=group)(command)


NOT_ALLOWED = (EACCES, EPERM, EROFS, ENOSPC, EDQUOT, ENOTDIR)
"""Errors of files that are no bug of ours, wherever they occur: the place is read-only, full, or none."""


def main() -> None:
    """Run the command line; for a wrong command or wrong data it prints one sentence, with exit code 2."""
    warnings.showwarning = _show_warning
    declare_own_process()
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which may not be installed here; figures are drawn into files
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="feddar", standalone_mode=False))
    except UserError as error:
        fail(error, 2)
    except TrainingError as error:
        fail(error, 1)
    except OSError as error:
        if error.filename is None or error.errno not in NOT_ALLOWED:
            raise
        fail(f"cannot use {error.filename}: {error.strerror}; choose another place, or ask who may write there.", 2)
    except (KeyboardInterrupt, typer.Abort):
        fail("stopped.", 1)
    except Exception as error:
        # Errors of the parser, whose class is in different modules in different versions.
        if not hasattr(error, "format_message"):
            raise
        fail(said_of(error), 2)


_python_shows_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if issubclass(category, Notice):
        console.print(f"note: {escape(str(message))}", highlight=False)
    else:
        _python_shows_warning(message, category, *place, **more)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"feddar {version('feddar')}", highlight=False)
        raise typer.Exit


@app.callback(epilog="To begin: feddar run exam. More about a command: feddar COMMAND --help")
def about(
    _: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Federated Domain-Aware Representation learning: one model for many hospitals, fair to every group."""
