"""The log of a site: a line for every answer before it leaves, chained by hashes, so that a change is noticed.

Every line has the SHA-256 of the line before it. Whoever changes, takes out or puts in a line breaks the chain there,
or has to write all lines after it anew. That, and cutting lines off at the end, is seen by whoever has noted down the
hash that the log ended with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from feddar.algorithm.wire import MessageError, unpack
from feddar.errors import UserError, printable
from feddar.federation.private_folder import private_folder

LOG_FILE = "answers.jsonl"
FIRST = "0" * 64
"""What stands in the first line for the hash of the line before it."""
LONGEST = 64
"""The number of characters that a name from a message may have in the log."""


class AnswerLog:
    """The log in a site's folder, to which lines are added."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_FILE

    def write(self, message: bytes, answer: bytes) -> None:
        """Add the line of an answer, and return when it is on the disk: only then may the answer leave."""
        private_folder(self.path.parent)
        with self.path.open("a+b") as file:
            entry = described(message, answer, _last_hash(file.fileno()))
            file.write(entry.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def described(message: bytes, answer: bytes, before: str) -> Entry:
    """Return what the log says of a message and its answer: when, of which step, sizes, hashes and what is in it."""
    try:
        asked, _ = unpack(message)
    except MessageError:
        asked = {"kind": "unreadable"}
    about, tensors = unpack(answer)
    phase = asked.get("phase")
    return Entry(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        asked=_short(asked.get("kind")),
        run=_short(asked.get("run")),
        round=_number(asked.get("round")),
        step=_number(asked.get("step")),
        phase=_short(phase.get("name")) if isinstance(phase, Mapping) else "",
        request=hashlib.sha256(message).hexdigest(),
        received=len(message),
        answer=about["kind"],
        reply=hashlib.sha256(answer).hexdigest(),
        sent=len(answer),
        tensors={name: list(value.shape) for name, value in sorted(tensors.items())},
        before=before,
    )


class Entry(BaseModel):
    """A line of the log."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    time: str
    asked: str
    """The kind of message that was answered."""
    run: str
    round: int | None
    step: int | None
    phase: str
    request: str
    """The SHA-256 of the message."""
    received: int
    answer: str
    """The kind of the answer."""
    reply: str
    """The SHA-256 of the answer."""
    sent: int
    tensors: dict[str, list[int]]
    """The shape of each tensor in the answer."""
    before: str
    """The SHA-256 of the line before."""


@dataclass(frozen=True)
class VerifiedLog:
    """The lines of a log whose chain is whole."""

    entries: list[Entry]
    end: str
    """The hash of the last line."""

    def goes_on_from(self, noted: str) -> bool:
        """Return whether the log once ended with that hash, and so has all that it had then."""
        return noted in (self.end, *(entry.before for entry in self.entries))


def read_log(folder: Path) -> VerifiedLog:
    """Read the log in a site's folder; a line that does not follow from the one before it is an error."""
    path = folder / LOG_FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"there is no log of answers in {folder}: no site has answered from there.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    end, entries = FIRST, []
    # What follows the last line break was never finished, and so its answer never left.
    for number, line in enumerate(lines[:-1], start=1):
        entry = _parsed(line)
        if entry is None or entry.before != end:
            raise UserError(
                f"line {number} of {path} does not follow from the one before it: the log was changed, or lines were "
                "taken out."
            )
        entries.append(entry)
        end = _hash(line + b"\n")
    return VerifiedLog(entries, end)


def _parsed(line: bytes) -> Entry | None:
    """Return the entry in a line; None if there is none."""
    try:
        return Entry.model_validate_json(line)
    except ValidationError:
        return None


def _last_hash(file: int) -> str:
    """Return the hash of the last finished line of an open file; one that a kill left unfinished is cut off."""
    end, last = os.fstat(file).st_size, b""
    for last, start in _lines_from_the_end(file, end):
        if last.endswith(b"\n"):
            break
        os.ftruncate(file, start)
    return _hash(last) if last.endswith(b"\n") else FIRST


def _lines_from_the_end(file: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from the last to the first, each with where it starts."""
    while end > 0:
        start, line = end, b""
        while start > 0 and b"\n" not in line[:-1]:
            size = min(4096, start)
            start -= size
            line = os.pread(file, size, start) + line
        begin = line[:-1].rfind(b"\n") + 1
        yield line[begin:], start + begin
        end = start + begin


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _short(name: object) -> str:
    return " ".join(printable(name).split())[:LONGEST] if isinstance(name, str) else ""


def _number(value: object) -> int | None:
    return value if type(value) is int and abs(value) < 2**53 else None
