"""The command line, run in this process."""

import io
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from unittest.mock import patch

from feddar.cli import main

COLUMNS = ["--client", "hospital", "--domain", "race", "--target", "outcome"]


def feddar(*arguments, cwd, code=0):
    """Run the command line here, as `feddar ...` would; starting Python for each would take seconds."""
    said, wrong, ended = io.StringIO(), io.StringIO(), 0
    with (
        chdir(cwd),
        redirect_stdout(said),
        redirect_stderr(wrong),
        patch.object(sys, "argv", ["feddar", *map(str, arguments)]),
    ):
        try:
            main()
        except SystemExit as end:
            ended = end.code
    assert (ended or 0) == code, said.getvalue() + wrong.getvalue()
    if code == 2:
        assert wrong.getvalue().count("\n") == 1, wrong.getvalue()
    return said.getvalue() if code == 0 else wrong.getvalue()


def names_in(folder):
    return {path.name for path in folder.iterdir()}
