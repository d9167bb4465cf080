"""The passphrase of private keys: from a file, from the environment, or from whoever sits at the terminal."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path

from feddar.errors import UserError

VARIABLE = "FEDDAR_PASSPHRASE"


@dataclass(frozen=True)
class Passphrase:
    """Where a passphrase comes from: the file, if one is named, else the variable, if it is set, else the terminal."""

    file: Path | None = None

    def of(self, key: Path) -> bytes:
        """Return the passphrase of a key that has one."""
        return self._given() or _asked(f"Passphrase of {key}: ", f"{key} has a passphrase")

    def new(self) -> bytes:
        """Return the passphrase for keys that are being made; at the terminal it has to be typed twice."""
        if given := self._given():
            return given
        first = _asked("Passphrase for the new keys: ", "--passphrase asks for one")
        if _asked("The same once more: ", "") != first:
            raise UserError("the two passphrases differ, and no key was made: try again.")
        return first

    def _given(self) -> bytes:
        if self.file is None:
            return os.environ.get(VARIABLE, "").encode()
        try:
            found = self.file.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise UserError(f"cannot read the passphrase in {self.file}: {error.strerror}.") from None
        require_own(self.file, "has a passphrase")
        if not found:
            raise UserError(f"{self.file} is empty: write the passphrase into it.")
        return found


def require_own(path: Path, what: str) -> None:
    """Refuse a secret file that others can read."""
    if os.name == "posix" and path.is_file() and path.stat().st_mode & 0o077:
        raise UserError(f"{path} {what}, and others can read it: chmod 600 {shlex.quote(str(path))}.")


def _asked(question: str, why: str) -> bytes:
    if not sys.stdin.isatty():
        raise UserError(f"{why}: put it into {VARIABLE}, or name a file that has it with --passphrase-file.")
    answer = getpass(question).encode()
    if not answer:
        raise UserError("a passphrase has at least one letter: try again.")
    return answer
