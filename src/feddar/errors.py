"""Errors and notes. The command line prints each as one sentence, and each kind of error has its exit code.

A message is written for the user: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import textwrap


class UserError(ValueError):
    """The command or the data is wrong (exit code 2)."""


class RowError(UserError):
    """One row of the data is wrong; a reader that knows the file replaces ``row`` by the line, keeping ``reason``."""

    def __init__(self, reason: str, row: int) -> None:
        super().__init__(f"row {row}: {reason}")
        self.reason, self.row = reason, row

    def __reduce__(self) -> tuple[type[RowError], tuple[str, int]]:
        return RowError, (self.reason, self.row)


class TrainingError(RuntimeError):
    """Training itself failed, for example because it diverged (exit code 1)."""


class Notice(UserWarning):
    """A warning that needs no action; the command line prints it as a note."""


def printable(text: str) -> str:
    """Return text from elsewhere without control characters, which could steer a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def one_line(error: BaseException) -> str:
    """Return another package's exception, which may be pages long, shortened to one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" …")
