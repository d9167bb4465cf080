"""The source `exam`: synthetic hospitals after the paper's private EXAM data, drawn by ``exam_cases``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from feddar.data.sources.source import Source
from feddar.settings import DataSettings

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort
    from feddar.data.sources.exam_cases import ExamData


class ExamOptions(DataSettings):
    """How the synthetic hospitals are drawn."""

    difference: float = Field(1.0, ge=0, description="How far domains differ (0: not at all).")


def exam_cohort(data: ExamData) -> Cohort:
    """Return the drawn cases as a cohort."""
    from feddar.data.cohort import Cohort
    from feddar.data.sources.exam_cases import RACES, SITES

    classes = ("less", "high-flow oxygen")
    return Cohort.from_arrays(
        (data.image, data.record),
        [classes[int(label)] for label in data.y],
        domain=data.race,
        client=data.site,
        domains=RACES,
        clients=SITES,
        classes=classes,
    )


def load(options: ExamOptions, _: int) -> Cohort:
    """Return the cohort, which is the same for every seed."""
    from feddar.data.sources.exam_cases import draw

    return exam_cohort(draw(difference=options.difference))


SOURCE = Source(
    "exam",
    "synthetic: 6 hospitals, 5 race groups, 7,681 cases with records and a chest image, after the paper's EXAM",
    ExamOptions,
    load,
    {"encoder": "exam", "weight_decay": 1e-3},
)
