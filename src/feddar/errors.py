"""The two ways a command can end badly, told apart so that the command line can answer each well, and what it notes.

All carry one sentence meant for a person: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import textwrap


class UserError(ValueError):
    """The command or the data is wrong (exit code 2)."""


class RowError(UserError):
    """One row of the data is wrong. Who knows the file says its line instead of ``row``, before the ``reason``."""

    def __init__(self, reason: str, row: int) -> None:
        super().__init__(f"row {row}: {reason}")
        self.reason, self.row = reason, row

    def __reduce__(self) -> tuple[type[RowError], tuple[str, int]]:
        return RowError, (self.reason, self.row)


class TrainingError(RuntimeError):
    """Training itself failed, for example because it diverged (exit code 1)."""


class Notice(UserWarning):
    """Something worth knowing that needs nothing done; the command line prints it as a note."""


def printable(text: str) -> str:
    """Return what was written elsewhere with nothing in it that could steer a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def one_line(error: BaseException) -> str:
    """Return on one line what another's exception says, which may be pages."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")
