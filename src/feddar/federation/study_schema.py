"""The JSON schema of a study file, by which editors complete its options and mark wrong ones."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from feddar.data.columns import Kind
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.study import Facts
from feddar.settings import Settings, checked


class _ColumnTable(BaseModel):
    """A column with more than its kind or its levels."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind = Field("category", description="The kind of the column; category, if it has levels.")
    levels: tuple[str | int, ...] = Field((), description="The levels of a category.")
    gaps: bool = Field(False, description="Whether values may be missing.")
    optional: bool = Field(False, description="Whether sites may lack the column.")
    size: int = Field(96, ge=8, le=1024, description="Width and height of images in pixels.")


class _StudyFile(BaseModel):
    """What all sites agree on."""

    model_config = ConfigDict(extra="forbid")

    study: Facts
    columns: dict[str, Kind | tuple[str | int, ...] | _ColumnTable] = Field(
        description="Each column by its name: its kind, the levels of a category, or a table of both and more."
    )
    training: Settings = checked(Settings, {})
    terms: CoordinatorSettings = checked(CoordinatorSettings, {})


def study_schema() -> dict[str, Any]:
    """Return the JSON schema of a study file: the tables [study], [columns], [training] and [terms]."""
    return _StudyFile.model_json_schema()
