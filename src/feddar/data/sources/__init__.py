"""Cohorts by name, and the user's own tables by path. Each built-in one also suggests settings that suit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from feddar.data.cohort import Cohort
from feddar.data.sources import digits, eicu, exam, fairface, synthetic
from feddar.data.sources.image_pool import Pool
from feddar.data.tables import SUFFIXES, read_table
from feddar.errors import UserError
from feddar.methods import nearest
from feddar.settings import DataSettings


@dataclass(frozen=True)
class Source:
    """A cohort that can be loaded, what it is, and the training settings that suit it."""

    about: str
    load: Callable[[DataSettings, int], Cohort]
    settings: dict[str, Any] = field(default_factory=dict)


def exam_cohort(data: exam.ExamData) -> Cohort:
    """Return a draw of the synthetic hospitals as a cohort."""
    classes = ("less", "high-flow oxygen")
    return Cohort.from_arrays(
        (data.image, data.record),
        [classes[int(label)] for label in data.y],
        domain=data.race,
        client=data.site,
        domains=exam.RACES,
        clients=exam.SITES,
        classes=classes,
    )


def _synthetic(options: DataSettings, seed: int) -> Cohort:
    truth = synthetic.make_truth(seed, alpha=options.alpha or 0.4)
    data = synthetic.draw(truth, options.samples or 20, seed + 1)
    names = [f"client-{i + 1:03d}" for i in range(len(truth.shares))]
    return Cohort.from_arrays(
        data.x,
        data.y,
        domain=data.domain + 1,
        client=[names[i] for i in data.client],
        task="regression",
        dtype=torch.float64,
    )


def _drawn(pool: Pool, options: DataSettings, seed: int) -> Cohort:
    """Draw clients from a pool, as in the paper's experiments with controlled mixtures."""
    wanted: dict[str, Any] = {
        "clients": options.clients,
        "samples": options.samples or 500,
        "alpha": options.alpha or 1,
    }
    return pool.with_images(Cohort.mixture(pool.samples, **wanted, seed=seed))


def _fairface(options: DataSettings, seed: int) -> Cohort:
    return _drawn(fairface.pool("train", options.label, options.image_size, options.folder), options, seed)


BUILT_IN = {
    "exam": Source(
        "synthetic: 6 hospitals, 5 race groups, 7,681 cases with records and a chest image, after the paper's EXAM",
        lambda options, _: exam_cohort(exam.draw(difference=options.difference)),
        {"encoder": "exam", "weight_decay": 1e-3},
    ),
    "synthetic": Source(
        "synthetic: linear regression, 100 clients, 5 domains, 20 features, after the paper's section 5.1",
        _synthetic,
        {
            "encoder": "linear",
            "k": 2,
            "bias": False,
            "dtype": "float64",
            "lr": 0.03,
            "batch_size": 8,
            "damping": 1e-3,
        },
    ),
    "digits": Source(
        "digits: MNIST, USPS, MNIST-M, SVHN and rendered ones as domains; clients are drawn with mixtures Dir(alpha p)",
        lambda options, seed: _drawn(digits.pool("train", options.folder), options, seed),
        {"encoder": "cnn"},
    ),
    "fairface": Source(
        "FairFace: age group or gender, 7 race groups as domains; clients are drawn with mixtures Dir(alpha p)",
        _fairface,
        {"encoder": "efficientnet-lite0+flip", "lr": 1e-4},
    ),
    "eicu": Source(
        "eICU: intensive care at US hospitals; stays of more than 3 days or deaths, ethnicity as domains",
        lambda options, _: eicu.cohort(options),
        {"lr": 0.01, "weight_decay": 0.03},
    ),
}


def find_source(options: DataSettings) -> Source:
    """Return the built-in cohort of that name, or the table at that path."""
    if options.data in BUILT_IN:
        return BUILT_IN[options.data]
    path = Path(options.data)
    if path.exists():
        return Source(f"{path}", lambda chosen, _: read_table(chosen))
    if path.suffix.lower() in SUFFIXES or len(path.parts) > 1:
        raise UserError(f"there is no file or folder {path}.")
    raise UserError(f"unknown cohort '{options.data}': {nearest(options.data, list(BUILT_IN))}")
