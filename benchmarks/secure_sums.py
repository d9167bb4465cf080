"""What secure sums add to a phase: the work at a site and at the coordinator, beside replies in plain text.

Sites of one process answer with a change of as many numbers as a reply of 1 MB or 57 MB in plain text has. Sites work
at the same time in a real federation, so a phase is the longest work of a site, and that of the coordinator for all.
Seconds are those of the processor, with which other work on the machine has little to do.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Paired
from feddar.algorithm.aggregation import Average
from feddar.algorithm.wire import pack, unpack
from feddar.federation.privacy.secure.collector import Setup, set_up, unmask
from feddar.federation.privacy.secure.fixed_point import Field, Layout
from feddar.federation.privacy.secure.masking import Identity
from feddar.federation.privacy.secure.member import Member
from feddar.federation.security.certificates import new_key

SIZES = {"1 MB": (250_000, 15), "57 MB": (14_200_000, 3)}
"""How many numbers a reply has, and how often a phase is measured."""
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
    began = time.process_time()
    message = pack({"kind": "reply"}, {"encoder/all/w": sites.change})
    worked, average = time.process_time(), Average()
    for _ in sites.members:
        average.add(unpack(message)[1], 100.0)
    average.result()
    return worked - began, time.process_time() - worked, len(message)


def secure(sites: Sites) -> tuple[float, float, int]:
    """Return the same of a secure sum."""
    began = time.process_time()
    setup = set_up(sites.ask, sorted(sites.members), "run")
    # All sites have exchanged keys here, which they do at the same time, for eight sums at once.
    exchanged = (time.process_time() - began) / len(sites.members) / 8
    total, spent, received, size = np.zeros(sites.layout.words, dtype=np.uint64), [], 0.0, 0
    for member in sites.members.values():
        began = time.process_time()
        message = sites.masked(member, setup)
        worked = time.process_time()
        total += unpack(message)[1]["masked"].numpy().view(np.uint64)
        spent.append(worked - began)
        received += time.process_time() - worked
        size = len(message)
    began = time.process_time()
    unmask(sites.ask, setup, sorted(sites.members), total, CONTEXT)
    found = sites.layout.decode(total)["encoder/all/w"] / (100 * len(sites.members))
    assert torch.allclose(found, sites.change.double(), atol=1e-8)
    return max(spent) + exchanged, received + time.process_time() - began, size


def figures() -> Iterator[Figure]:
    """Yield how many times as long a phase takes under masking, and how many times the bytes."""
    for name, (size, times) in SIZES.items():
        for number in (3, 10):
            with tempfile.TemporaryDirectory() as folder:
                sites = Sites(Path(folder), number, size)
                secure(sites)
                repeats = [(secure(sites), plain(sites)) for _ in range(times)]
            ours, bare = zip(*repeats, strict=True)
            both = Paired(*(tuple(site + coordinator for site, coordinator, _ in each) for each in (ours, bare)))
            places = (
                " / ".join(f"{median(each[place] for each in one):.3f}" for one in (ours, bare)) for place in (0, 1)
            )
            note = f"{both.note}, at a site {next(places)}, at the coordinator {next(places)}"
            note += f"; bytes x {ours[0][2] / bare[0][2]:.1f}"
            yield Figure(f"phase of secure sums, {name} and {number} sites / plain text", both.ratio, "", note)
