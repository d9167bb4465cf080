"""The options of tables: which columns play which part. They are apart from ``tables``, which takes long to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from feddar.settings import DataSettings

SUFFIXES = (".csv", ".parquet")
"""How the names of tables end."""

ImageSize = Annotated[int, Field(ge=8, le=1024, description="Width and height of images in pixels.")]


class ColumnOptions(DataSettings):
    """What the columns of a table are."""

    client: str | None = Field(None, description="Column that names the client (hospital).")
    domain: str | None = Field(None, description="Column that names the domain (race group, scanner); a,b crosses two.")
    target: str | None = Field(None, description="Column to predict.")
    group: str | None = Field(None, description="Column (patient) whose rows stay together in splits.")
    features: str = Field("", description="Columns to learn from, separated by commas; all others if left out.")
    ignore: str = Field("", description="Columns that are not features, separated by commas.")
    task: Literal["auto", "regression", "classification"] = Field("auto", description="What the target is.")
    positive: str | None = Field(None, description="Of two classes, the positive one; the last in order if left out.")


class TableOptions(ColumnOptions):
    """What the columns of the user's own table are, one of which may lead to images."""

    image: str = Field("", description="Column of image paths, from the table's folder; --features says what else.")
    image_size: ImageSize = 96
