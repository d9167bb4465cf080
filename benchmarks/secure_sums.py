"""What secure sums add to a phase: the work at a site and at the coordinator, beside replies in plain text.

Sites of one process answer with a change of as many numbers as a reply of 1 MB or 57 MB in plain text has. Sites work
at the same time in a real federation, so a phase is the longest work of a site, and that of the coordinator for all.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure
from feddar.algorithm.aggregation import Average
from feddar.algorithm.wire import pack, unpack
from feddar.federation.privacy.secure.collector import Setup, set_up, unmask
from feddar.federation.privacy.secure.fixed_point import Field, Layout
from feddar.federation.privacy.secure.masking import Identity
from feddar.federation.privacy.secure.member import Member
from feddar.federation.security.certificates import new_key

SIZES = {"1 MB": 250_000, "57 MB": 14_200_000}
CONTEXT = hashlib.sha256(b"a request").digest()


class Sites:
    """Sites of one process, with the same change each."""

    def __init__(self, folder: Path, number: int, size: int) -> None:
        names = [f"site-{place:02}" for place in range(number)]
        self.members = {name: Member(folder / name, "run", name, Identity(new_key())) for name in names}
        self.change = torch.randn(size)
        self.layout = Layout((Field("encoder/all/w", (size,), 1e6),), number)

    def ask(self, message: dict[str, Any], sites: list[str]) -> dict[str, dict[str, Any]]:
        """Return the answers to a message of the protocol."""
        return {site: self._answer(self.members[site], message) for site in sites}

    def _answer(self, member: Member, message: dict[str, Any]) -> dict[str, Any]:
        match message["kind"]:
            case "keys":
                return member.announce(message["setup"])
            case "shares":
                return member.share(message["setup"], message["roster"])
            case _:
                return member.reveal(message)

    def masked(self, member: Member, setup: Setup) -> bytes:
        """Return a site's masked reply."""
        words = self.layout.encode({"encoder/all/w": self.change.double() * 100})
        member.mask(words, setup.about(), CONTEXT, (1, "encoder"))
        return pack({"kind": "masked"}, {"masked": torch.from_numpy(words.view(np.int64))})


def plain(sites: Sites) -> tuple[float, float, int]:
    """Return the seconds of a site and of the coordinator, and the bytes of a reply, in plain text."""
    began = time.perf_counter()
    message = pack({"kind": "reply"}, {"encoder/all/w": sites.change})
    worked, average = time.perf_counter(), Average()
    for _ in sites.members:
        average.add(unpack(message)[1], 100.0)
    average.result()
    return worked - began, time.perf_counter() - worked, len(message)


def secure(sites: Sites) -> tuple[float, float, int]:
    """Return the same of a secure sum."""
    began = time.perf_counter()
    setup = set_up(sites.ask, sorted(sites.members), "run")
    # All sites have exchanged keys here, which they do at the same time, for eight sums at once.
    exchanged = (time.perf_counter() - began) / len(sites.members) / 8
    total, spent, received, size = np.zeros(sites.layout.words, dtype=np.uint64), [], 0.0, 0
    for member in sites.members.values():
        began = time.perf_counter()
        message = sites.masked(member, setup)
        worked = time.perf_counter()
        total += unpack(message)[1]["masked"].numpy().view(np.uint64)
        spent.append(worked - began)
        received += time.perf_counter() - worked
        size = len(message)
    began = time.perf_counter()
    unmask(sites.ask, setup, sorted(sites.members), total, CONTEXT)
    found = sites.layout.decode(total)["encoder/all/w"] / (100 * len(sites.members))
    assert torch.allclose(found, sites.change.double(), atol=1e-8)
    return max(spent) + exchanged, received + time.perf_counter() - began, size


def figures() -> Iterator[Figure]:
    """Yield how many times as long a phase takes under masking, and how many times the bytes."""
    for name, size in SIZES.items():
        for number in (3, 10):
            with tempfile.TemporaryDirectory() as folder:
                sites = Sites(Path(folder), number, size)
                secure(sites)
                ours, bare = secure(sites), plain(sites)
            note = (
                f"seconds at a site {ours[0]:.3f} / {bare[0]:.3f}, at the coordinator {ours[1]:.3f} / {bare[1]:.3f}; "
                f"bytes x {ours[2] / bare[2]:.1f}"
            )
            yield Figure(
                f"phase of secure sums, {name} and {number} sites / plain text", sum(ours[:2]) / sum(bare[:2]), "", note
            )
