"""What our link adds to FLARE: seconds to start, per exchange and for 50 MB each way, beside a bare Collab script.
Both run in the same simulator, at the same two sites, with the same traffic, taking turns, so that other work on the
machine falls on both. The numbers include FLARE's own. This file is also what the simulator runs at server and sites,
which know nothing of the package it is in.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.collab import collab

from feddar.federation.links.link import Handler
from feddar.federation.links.nvflare import app
from feddar.federation.links.nvflare.job import write_job
from feddar.federation.links.nvflare.simulator import simulate

if TYPE_CHECKING:
    from benchmarks.figures import Figure

SIZES = {"1 kB": (1_000, 30), "1 MB": (1_000_000, 10), "50 MB": (50_000_000, 6)}


class Site(app.Site):
    def open(self, options: dict[str, str]) -> Handler:
        return lambda message: message

    @collab.publish
    def bare(self, message: bytes) -> bytes:
        return message


class Server(app.Server):
    def run(self, link: app.SiteLink, options: dict[str, Any]) -> None:
        record: dict[str, Any] = {"started": time.time()}
        sites = link.sites()
        for name, (size, times) in SIZES.items():
            message = bytes(size)
            ours: list[float] = []
            bare: list[float] = []
            for turn in range(times + 1):
                # Whoever comes second frees the memory of the first: they take turns in that too.
                for seconds in (ours, bare) if turn % 2 else (bare, ours):
                    began = time.perf_counter()
                    if seconds is ours:
                        contents = [answer.content for answer in link.ask(message, sites, 300)]
                    else:
                        contents = [content for _, content in collab.clients(timeout=300).bare(message)]
                    seconds.append(time.perf_counter() - began)
                    assert contents == [message] * len(sites)
            # The first exchange opens what the others use.
            record[name] = [statistics.median(ours[1:]), statistics.median(bare[1:])]
        record["ended"] = time.time()
        Path(options["out"], "record.json").write_text(json.dumps(record))


def figures() -> Iterator[Figure]:
    from benchmarks.figures import Figure

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        job = write_job("", root / "job", min_sites=2)
        shutil.copy(__file__, job / "app/custom/feddar_job.py")
        sites = {f"site-{number}": {"data": "none"} for number in (1, 2)}
        began = time.time()
        results = simulate(job, root / "work", sites, timeout=900)
        ended = time.time()
        record = json.loads((results / "record.json").read_text())
    print(f"start {record['started'] - began:.1f} s, end {ended - record['ended']:.1f} s")
    for name, (_, times) in SIZES.items():
        ours, bare = record[name]
        note = f"median seconds {ours:.3f} / {bare:.3f}, {times} exchanges, 2 sites"
        yield Figure(f"exchange on FLARE, {name} each way / bare Collab script", ours / bare, "", note)
