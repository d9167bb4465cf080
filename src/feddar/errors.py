"""The two ways a command can end badly, told apart so that the command line can answer each well, and what it notes.

All carry one sentence meant for a person: what is wrong, where, and what to do about it.
"""


class UserError(ValueError):
    """The command or the data is wrong (exit code 2)."""


class TrainingError(RuntimeError):
    """Training itself failed, for example because it diverged (exit code 1)."""


class Notice(UserWarning):
    """Something worth knowing that needs nothing done; the command line prints it as a note."""
