"""Answers of sites, as the coordinator reads them: nothing in them is trusted."""

from __future__ import annotations

from typing import Any

from feddar.algorithm.wire import MessageError, unpack
from feddar.errors import printable
from feddar.federation.links.link import Answer
from feddar.models.parameters import Tensors

AWAY = "it is not connected"
"""The problem of a site that cannot be asked."""
LONGEST = 300
"""The longest text, in characters, that is shown of a site's problem."""


def read_answer(answer: Answer) -> tuple[dict[str, Any], Tensors]:
    """Return header and tensors of an answer; a missing or unreadable one becomes a header of the kind ``failed``."""
    if answer.problem:
        return {"kind": "failed", "why": answer.problem}, {}
    try:
        about, tensors = unpack(answer.content)
    except MessageError as error:
        return {"kind": "failed", "why": str(error)}, {}
    return {"kind": "unknown", "why": "it sent no kind of message"} | about, tensors


def why_of(about: dict[str, Any]) -> str:
    """Return the reason that a site gives, as one short printable line."""
    return plain(str(about.get("why")))


def plain(text: str) -> str:
    """Return a site's text, which may be anything, as one short printable line."""
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def require_answer_to(asked: dict[str, Any], about: dict[str, Any]) -> None:
    """Refuse an answer to another request: run, round, step and phase must be those that were asked."""
    for what, wanted in asked.items():
        if about.get(what) != wanted:
            raise MessageError(f"it answered another request: {what} {about.get(what)!r} instead of {wanted!r}")
