"""The table of methods. A method is data: which scope holds each group of parameters, and how it is trained.

Adding a method is adding a row. ``scope`` says who shares a group of parameters: everyone (``global``), everyone
with samples of that domain (``domain``), or nobody (``client``: it never leaves the client).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from feddar.errors import UserError

Scope = Literal["global", "domain", "client"]


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    encoder: Scope
    heads: Scope
    alternating: bool
    """Heads first, then the encoder; otherwise both together."""
    second_order: bool
    reweighted: bool
    paper: str

    @property
    def personal(self) -> bool:
        """Whether some parameters stay with their client."""
        return "client" in (self.encoder, self.heads)


_FEDDAR = "Zhong 2022"
_FEDAVG = "McMahan 2017"
_FEDREP = "Collins 2021"

_ROWS = (
    #      name         encoder   heads     alternating second_order reweighted paper
    Method("local", "client", "client", False, False, False, "-"),
    Method("fedavg", "global", "global", False, False, False, _FEDAVG),
    Method("fedrep", "global", "client", True, False, False, _FEDREP),
    Method("fedavg-mh", "global", "domain", False, False, False, _FEDAVG),
    Method("feddar-wa", "global", "domain", True, False, True, _FEDDAR),
    Method("feddar-sa", "global", "domain", True, True, True, _FEDDAR),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def nearest(name: str, names: list[str]) -> str:
    """Return a hint naming the closest of ``names``, or all of them if none is close."""
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(names)}."


def find(name: str) -> Method:
    """Return the method of that name; an unknown one is an error that suggests the nearest."""
    if name not in METHODS:
        raise UserError(f"unknown method '{name}': {nearest(name, list(METHODS))}")
    return METHODS[name]
