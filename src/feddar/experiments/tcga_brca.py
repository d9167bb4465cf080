"""Breast cancer in The Cancer Genome Atlas as prepared for FLamby (Ogier du Terrail et al., 2022): 1,088 patients.

Clients are the six regions that FLamby makes of the hospitals, the last character of `fold2`; domains are race; the
target is whether the patient is known to have died (`E`). How long each was observed (`T`) is no feature, and deaths
after that are not known, so this asks less than an analysis of survival would.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.public import PublicOptions
from feddar.data.sources.public_table import PublicTable, unreadable
from feddar.settings import checked

ORIGIN = "https://github.com/owkin/FLamby"
FILES = ("brca.csv", "train_test_split.csv")
RACE = "race_"
"""How the names of columns that flag a race begin."""

PATIENTS = PublicTable(
    name="tcga-brca",
    rows="patients",
    roles={"client": "centre", "domain": "race", "target": "died"},
    outcomes=("died",),
    not_features=("centre", "race"),
)


def cohort(folder: str | None) -> Cohort:
    """Read the two files as a cohort."""
    place = find_set("tcga_brca", folder, files=FILES, origin=ORIGIN)
    return PATIENTS.cohort(read_patients(place), checked(PublicOptions, {"data": PATIENTS.name}))


def read_patients(place: Path) -> pd.DataFrame:
    """Return a table with a row for each patient: centre, race, whether they died, and clinical features."""
    clinical, centres = (_read(place / name, needed) for name, needed in zip(FILES, ("E", "fold2"), strict=True))
    joined = clinical.merge(centres, on="pid", validate="one_to_one")
    flags = joined.filter(regex=f"^{RACE}")
    roles = {
        "centre": joined["fold2"].str[-1],
        "race": flags.idxmax(axis=1).astype(str).str.removeprefix(RACE).where(flags.any(axis=1)),
        "died": joined["E"].map({0: "no", 1: "yes"}),
    }
    features = joined.drop(columns=[*flags, "pid", "E", "T", "fold", "fold2"])
    return pd.DataFrame(roles).join(features)


def _read(path: Path, needed: str) -> pd.DataFrame:
    """Return a file's table, which must have patients and the needed column."""
    try:
        table = pd.read_csv(path)
        for name in ("pid", needed):
            if name not in table:
                raise ValueError(f"it has no column '{name}'")
    except (OSError, ValueError) as error:
        raise unreadable(path, error, ORIGIN) from None
    return table
