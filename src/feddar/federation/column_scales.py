"""Scales of columns that do not fit together: units may differ between sites, or a site has told false sums.

Neither can be told from the other, so training goes on, and people are told: a column that one site has made a
thousand times as wide as it is elsewhere is nearly constant there, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from torch import Tensor

from feddar.algorithm.local_training import standard_units
from feddar.federation.study import Study
from feddar.models.parameters import Parameters, Tensors

SCALE = "numbers.scale"
"""How the name of the tensor ends by which an encoder of tables divides its numbers."""
MUCH_WIDER = 1000.0
"""From this factor on a scale is said to be much larger than another one."""


def much_wider_than_own(study: Study, parameters: Parameters, own: Tensor | None) -> Iterator[str]:
    """Yield a sentence for each column whose scale in the model is much larger than at the site [p]."""
    if own is None or (scale := _scale_in(parameters)) is None:
        return
    for name, wide, narrow in zip(_numbers(study), scale.tolist(), own.tolist(), strict=True):
        if wide > MUCH_WIDER * narrow > 0:
            yield (
                f"column '{name}' varies by {wide:.3g} at all sites together, and by {narrow:.3g} here: units may "
                "differ, or a site has told false sums; ask the coordinator"
            )


def much_wider_than_others(study: Study, census: Mapping[str, Tensors]) -> Iterator[str]:
    """Yield a sentence for each site and column whose scale is much larger than the median of the others'."""
    scales = {
        site: standard_units(sums["present"], sums["sum"], sums["squares"])[1].tolist()
        for site, sums in census.items()
        if "sum" in sums
    }
    for site, own in scales.items():
        others = [scale for other, scale in scales.items() if other != site]
        for name, wide, *found in zip(_numbers(study), own, *others, strict=True):
            varying = [scale for scale in found if scale != 1]  # a constant column has the scale 1
            if varying and wide != 1 and wide > MUCH_WIDER * median(varying):
                yield (
                    f"Column '{name}' varies by {wide:.3g} at {site}, and by {median(varying):.3g} at other sites: "
                    "units may differ, or the site has told false sums."
                )


def _numbers(study: Study) -> list[str]:
    """Return the names of the columns that are numbers, in the order of the encoder's inputs."""
    return [column.name for column in study.columns if column.is_numeric]


def _scale_in(parameters: Parameters) -> Tensor | None:
    """Return the scale of each number in a model [p], the same in all its encoders; None if there is none."""
    named = (item for part in parameters.encoders.values() for item in part.items())
    return next((value for name, value in named if name.endswith(SCALE)), None)
