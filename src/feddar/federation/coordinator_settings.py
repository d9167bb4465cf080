"""The terms of a federation, which concern the coordinator alone: how it waits for sites, and does without them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from feddar.errors import UserError


class CoordinatorSettings(BaseModel):
    """How the coordinator waits for sites, and does without them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sites: int = Field(2, ge=1, description="How many sites to wait for before the first round.")
    min_clients: int = Field(2, ge=1, description="Stop, leaving a checkpoint, where fewer sites answer.")
    wait: float = Field(600, gt=0, description="Seconds to wait for sites, at the start.")
    timeout: float = Field(600, gt=0, description="Seconds that sites have for their answer in each phase.")

    def model_post_init(self, _: Any) -> None:
        """Check what concerns both."""
        if self.min_clients > self.sites:
            raise UserError(f"min_clients ({self.min_clients}) must not be more than sites ({self.sites}).")
