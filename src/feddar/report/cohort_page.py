"""The page of a cohort: who holds what, its columns and notes, and a contact sheet of images for each domain.

It shows images of patients, so it is for the site that holds them.
"""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from feddar.data.cohort import Cohort
from feddar.data.image_cache import in_memory
from feddar.report.numbers import counted
from feddar.report.page import rendered, require_packages, require_page_name, save_page
from feddar.report.terminal import label_rate, warnings, what_happens

THUMBNAILS = 6
"""So many images of each domain are on the sheet."""
LARGEST = 96
"""Width and height of a thumbnail in pixels are at most these."""
MOST = 24
"""So many domains, and so many clients, are shown."""


class Thumbnail(NamedTuple):
    """A small image for the page: its address, which holds the image itself, its client and its label."""

    source: str
    client: str
    label: str


def write_cohort_page(cohort: Cohort, data: str, about: str, out: Path, seed: int = 0) -> None:
    """Write the page of a cohort; ``seed`` draws the images of its contact sheet.

    ``data`` is the name or path of its data, and ``about`` says what they are.
    """
    require_page_name(out)
    require_packages("jinja2")
    counts, of = cohort.counts, f"{counted(cohort.clients, 'client')} and {counted(cohort.domains, 'domain')}"
    everyone = np.ones(len(cohort), bool)
    rows = [
        (name, counts[index].tolist(), label_rate(cohort, (cohort.client == index).numpy()))
        for index, name in enumerate(cohort.clients[:MOST])
    ]
    rates = [label_rate(cohort, (cohort.domain == index).numpy()) for index in range(len(cohort.domains))]
    content = {
        "title": f"The cohort {Path(data).name}",
        "about": "" if about == data else about,
        "size": f"{counted(cohort, 'sample')} of {of}",
        "cohort": cohort,
        "rows": rows,
        "totals": counts.sum(0).tolist(),
        "rates": [*rates, label_rate(cohort, everyone)],
        "lines": what_happens(cohort),
        "notes": warnings(cohort),
        "sheets": contact_sheets(cohort, seed),
    }
    save_page(rendered("cohort.html.jinja", **content), out)


def contact_sheets(cohort: Cohort, seed: int) -> dict[str, list[Thumbnail]]:
    """Return a few images of each domain, drawn by the seed; none if the cohort is not of images."""
    if cohort.scaling is None:
        return {}
    names, sheets = cohort.client_names, {}
    for number, domain in enumerate(cohort.domains[:MOST]):
        held = np.flatnonzero(cohort.domain.numpy() == number)
        # A generator for each domain: its images stay the same when another domain is added.
        drawn = np.random.default_rng([seed, number]).permutation(held)[:THUMBNAILS]
        labels = cohort.objective.written(cohort.y[torch.from_numpy(drawn)].numpy())
        pixels = in_memory(cohort.x[0][torch.from_numpy(drawn)])
        sheets[domain] = [
            Thumbnail(_address(image.numpy()), str(names[row]), ", ".join(map(str, label)))
            for image, row, label in zip(pixels, drawn, labels.to_numpy(), strict=True)
        ]
    return sheets


def _address(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    """Return an image [channels, height, width] as a data URL."""
    from PIL import Image

    shown = pixels[0] if len(pixels) != 3 else pixels.transpose(1, 2, 0)
    image = Image.fromarray(shown)
    image.thumbnail((LARGEST, LARGEST))
    with BytesIO() as file:
        image.save(file, "JPEG", quality=85)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
