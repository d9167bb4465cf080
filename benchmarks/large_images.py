"""Memory of training on images that are larger than it: 50,000 synthetic ones of 224 x 224 pixels, from a file.

Two processes do the same, one after the other: they make a cohort of paths with ``image_cache`` and train a network
for a round with a test set. The first decodes all images. The network is a linear one on coarse pixels, since what is
measured is the way of the images; ``ENCODER=cnn`` takes the small one of feddar, and much longer.

What counts is the peak of the memory that is the process's own (RssAnon and RssShmem), read a few times in a second:
pages of the cache are the system's, which takes them back when it needs them. ``COUNT=5000 python -m benchmarks
large_images`` does it with fewer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.memory import status

COUNT, SIZE, DISTINCT = int(os.environ.get("COUNT", "50000")), 224, 500
ENCODER = os.environ.get("ENCODER", "linear on coarse pixels")


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        make_pictures(folder)
        first, second = measured_apart(folder), measured_apart(folder)
        cache = sum(file.stat().st_size for file in (folder / "cache").iterdir())
    about = f"{ENCODER}; {COUNT:,} synthetic images of {SIZE} x {SIZE} pixels, {DISTINCT} of them distinct"
    note = f"{about}; cache {cache / 1e9:.1f} GB; the first run {first['peak'] / 1e9:.2f}; one process and thread"
    yield Figure("large images: GB beyond the cache, at most", second["peak"] / 1e9, "<= 2", note)
    note = f"{about}; the first run, which decodes them, {first['ready']:.0f} s; training {second['training']:.0f} s"
    yield Figure("large images: seconds until a second run trains", second["ready"], "<= 10", note)


def make_pictures(folder: Path) -> None:
    """Write a few pictures of smooth noise, and link them under as many names as there are to be."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(DISTINCT):
        coarse = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
    for number in range(DISTINCT, COUNT):
        os.link(folder / f"{number % DISTINCT}.jpg", folder / f"{number}.jpg")


def measured_apart(folder: Path) -> dict[str, float]:
    """Measure in a process of its own."""
    program = f"import json; from benchmarks.large_images import measured; print(json.dumps(measured({str(folder)!r})))"
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(folder: str) -> dict[str, float]:
    """Return the peak of the process's own memory in bytes, and seconds until it trains and of training."""
    import pandas as pd
    from torch import nn

    from feddar import Cohort, train
    from feddar.data.columns import Column

    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            peak[0] = max(peak[0], status("RssAnon") + status("RssShmem"))

    watching = threading.Thread(target=watch)
    watching.start()
    begun = time.monotonic()
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"file": [f"{folder}/{number}.jpg" for number in range(COUNT)]})
    label, client, domain = (rng.integers(2, size=COUNT) for _ in range(3))
    columns = [Column("file", "image", size=SIZE)]
    cohort = Cohort.from_arrays(
        frame, label, client=client, domain=domain, columns=columns, image_cache=f"{folder}/cache"
    )
    learned, test = cohort.split(0.2)
    ready = time.monotonic() - begun
    coarse = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * (SIZE // 32) ** 2, 16))
    encoder = coarse if ENCODER.startswith("linear") else ENCODER
    train(learned, "fedavg", encoder=encoder, test=test, rounds=1, validation=0, threads=1, jobs=1)
    training = time.monotonic() - begun - ready
    ended.set()
    watching.join()
    return {"peak": float(peak[0]), "ready": ready, "training": training}
