"""The settings of the coordinator, the table [terms] of a study: how many sites it needs, and how long it waits."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from feddar.errors import UserError
from feddar.settings import Flag


class CoordinatorSettings(BaseModel):
    """How many sites the coordinator needs, and how long it waits for them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    flag_of_fields: ClassVar[Flag] = Flag("sites")

    sites: Annotated[int, Flag("sites", first=True)] = Field(
        2, ge=1, description="How many sites to wait for before the first round."
    )
    min_clients: int = Field(2, ge=1, description="Stop, leaving a checkpoint, where fewer sites answer.")
    wait: float = Field(600, gt=0, description="Seconds to wait for sites, at the start.")
    timeout: float = Field(600, gt=0, description="Seconds that sites have for their answer in each phase.")

    def model_post_init(self, _: Any) -> None:
        """Check that ``min_clients`` is not more than ``sites``."""
        if self.min_clients > self.sites:
            raise UserError(f"min_clients ({self.min_clients}) must not be more than sites ({self.sites}).")
