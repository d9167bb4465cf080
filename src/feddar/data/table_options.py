"""The options of tables: the role of each column. They are not in ``tables``, which is slow to import."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from feddar.settings import DataSettings, Flag

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".xlsx")
"""File name endings of tables."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
"""File name endings of compressed ones, after those."""

ROLE = Flag("data", first=True)
ImageSize = Annotated[int, Field(ge=8, le=1024, description="Width and height of images in pixels.")]


def learned_domains(domain: str | None) -> int | None:
    """Return how many domains are to be learned; None if a column names them.

    >>> learned_domains("auto:4"), learned_domains("race")
    (4, None)
    """
    found = re.fullmatch(r"auto:(\d{1,9})", domain or "")
    return int(found[1]) if found else None


class ColumnOptions(DataSettings):
    """The roles of a table's columns."""

    client: Annotated[str | None, ROLE] = Field(None, description="Column that names the client (hospital).")
    domain: Annotated[str | None, ROLE] = Field(
        None,
        description="Column that names the domain (race group, scanner); a,b crosses two, scanner/vendor are nested, "
        "age:spline is ordered; auto:K reads none and learns K.",
    )
    target: Annotated[str | None, ROLE] = Field(None, description="Column to predict.")
    group: str | None = Field(None, description="Column (patient) whose rows stay together in splits.")
    features: str = Field("", description="Columns to learn from, separated by commas; all others if left out.")
    ignore: str = Field("", description="Columns that are not features, separated by commas.")
    task: Literal["auto", "regression", "classification"] = Field("auto", description="What the target is.")
    positive: str | None = Field(None, description="Of two classes, the positive one; the last in order if left out.")
    categories: str = Field("", description="Columns that are categories though they look like numbers, as a,b.")
    numbers: str = Field("", description="Columns that are numbers though they look like categories, as a,b.")


class TableOptions(ColumnOptions):
    """The roles of the columns of the user's own table, one of which may be paths of images, and how it is written."""

    sample_weight: str | None = Field(
        None, description="Column of weights of samples in training, from 0 on; it is not a feature."
    )
    optional: str = Field("", description="Columns that files of some clients, or sites, may lack, as a,b.")
    missing: str = Field("", description="Values that stand for a missing one, as '?,unknown,-9'.")
    spellings: Literal["ask", "merge", "keep"] = Field(
        "ask", description="Names of clients, domains and classes that differ in letter case or blanks: one, or not."
    )
    incomplete: Literal["error", "drop"] = Field(
        "error", description="Rows without client, domain, target, group or weight: refuse them, or leave them out."
    )
    min_client: int = Field(0, ge=0, description="Fewest rows of a client; smaller ones are left out, or pooled.")
    small_clients: Literal["drop", "pool"] = Field(
        "drop", description="Clients below --min-client: leave them out, or take them as one."
    )
    sep: str = Field("", description="What separates the entries of a CSV file; found by looking if left out.")
    decimal: str = Field("", description="The decimal mark of numbers in a CSV file; found by looking if left out.")
    encoding: str = Field("", description="The encoding of a CSV file; found by looking if left out.")

    image: str = Field("", description="Column of image paths, from the table's folder; --features says what else.")
    image_size: ImageSize = 96
    image_cache: str = Field("", description="Folder to keep decoded images in; beside the run if they are large.")
