"""eICU (Pollard et al., 2018): stays in intensive care units of many US hospitals, which are the clients.

The folder is the database's own, of the open demo (186 hospitals, 2,520 stays) or of the whole: the tables `patient`,
`hospital`, `apacheApsVar` and `apachePredVar` as `.csv.gz` or `.csv`. They become one table with a row for each stay:

- clients: `hospital`, or its `region`; group: `patient`, whose stays are never split between training and test;
- domains: `ethnicity`, `gender`, or both crossed;
- target: `stay`, whether it lasted more than 3 days (an earlier death counts as a short stay), or `death` in hospital;
- features: what is known on admission, and the worst values of the first 24 hours, from which APACHE scores are made.

Left out because they would reveal the outcome: every field of discharge; lengths of stay and of ventilation, mortality,
and their predictions (`apachePatientResult`, which also has selected stays only, and scores made from the same values);
of `apachePredVar`, `diedinhospital`, `dischargelocation` and `activetx`, whose time is not documented. Also left out
are columns that describe the hospital, since they identify the client, and those nearly always missing or constant.

Stays of less than 24 hours are kept. APACHE has few values for these, so their missing values tell a model something
about the length of the stay that a doctor would not know on admission.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.public import PublicOptions
from feddar.data.sources.public_table import PublicTable, numbers_in, read_columns, unreadable

ORIGIN = "https://physionet.org/content/eicu-crd-demo/2.0.1/"
FILES = tuple((f"{name}.csv.gz", f"{name}.csv") for name in ("patient", "hospital", "apacheApsVar", "apachePredVar"))

STAYS = PublicTable(
    name="eicu",
    rows="stays",
    roles={"client": "hospital", "domain": "ethnicity", "target": "stay", "group": "patient"},
    outcomes=("stay", "death"),
    not_features=("hospital", "region", "patient", "ethnicity"),
    unknown_domain="Unknown",
    # A client needs a patient for training and one for testing, a domain one for each of 5 folds.
    fewest={"client": 2, "domain": 5},
)

KEY = "patientunitstayid"
LONG = 3 * 24 * 60
"""Minutes in 3 days."""

ADMISSION = {"gender": "gender", "unittype": "unit", "unitadmitsource": "source", "unitstaytype": "stay_type"}
ADMISSION_NUMBERS = {"unitvisitnumber": "visit", "admissionheight": "height", "admissionweight": "weight"}
"""Columns of the table `patient` that are known on admission, and their names here."""

FIRST_DAY = {
    "temperature": "temperature",
    "heartrate": "heart_rate",
    "meanbp": "mean_pressure",
    "respiratoryrate": "respiratory_rate",
    "urine": "urine",
    "eyes": "gcs_eyes",
    "motor": "gcs_motor",
    "verbal": "gcs_verbal",
    "ph": "ph",
    "pao2": "pao2",
    "pco2": "pco2",
    "fio2": "fio2",
    "wbc": "white_cells",
    "hematocrit": "haematocrit",
    "sodium": "sodium",
    "glucose": "glucose",
    "creatinine": "creatinine",
    "bun": "urea_nitrogen",
    "albumin": "albumin",
    "bilirubin": "bilirubin",
}
"""Numbers of `apacheApsVar`."""

FIRST_DAY_FLAGS = {"meds": "gcs_unable", "intubated": "intubated", "vent": "ventilated", "dialysis": "dialysis"}
"""Truth values of `apacheApsVar`."""

HISTORY_FLAGS = {
    "oobventday1": "ventilated_on_day_1",
    "oobintubday1": "intubated_on_day_1",
    "thrombolytics": "thrombolytics",
    "ima": "mammary_graft",
    "midur": "recent_infarction",
    "readmit": "readmission",
    "diabetes": "diabetes",
    "aids": "aids",
    "hepaticfailure": "hepatic_failure",
    "cirrhosis": "cirrhosis",
    "lymphoma": "lymphoma",
    "leukemia": "leukaemia",
    "metastaticcancer": "metastatic_cancer",
    "immunosuppression": "immunosuppression",
}
"""Truth values of `apachePredVar`; its `electivesurgery` says which surgery, if any, came before the stay."""

DIAGNOSES = (
    "Sepsis", "Rhythm disturbance", "Bleeding", "Diabetic", "Pneumonia", "CHF", "Overdose", "Emphysema", "Infarction",
    "CVA", "Cardiac arrest", "CABG", "Angina", "Coma", "Hemorrhage", "Renal failure", "Hypertension", "Endarterectomy",
    "Chest pain", "GI obstruction", "Drug withdrawal",
)  # fmt: skip
"""The beginnings of frequent admission diagnoses; the hundreds of others become one level, 'other'."""

PLAUSIBLE = {"height": (100, 230), "weight": (25, 350), "urine": (0, 15_000)}
"""Plausible ranges in cm, kg and ml per day; values outside are typing errors and count as missing."""


def cohort(options: PublicOptions) -> Cohort:
    """Read the tables as a cohort with the client, domain and target columns of the options."""
    return STAYS.cohort(read_stays(find_set("eicu", options.folder, files=FILES, origin=ORIGIN)), options)


def read_stays(place: Path) -> pd.DataFrame:
    """Return the table of stays, one row each."""
    text = ("hospitalid", "uniquepid", "ethnicity", "age", "apacheadmissiondx", "hospitaldischargestatus")
    numbers = ("unitdischargeoffset", "hospitaladmitoffset")
    patient = _read(place, "patient", KEY, text=(*text, *ADMISSION), numbers=(*numbers, *ADMISSION_NUMBERS))
    region = _read(place, "hospital", "hospitalid", text=("region",))["region"]
    minutes, status = patient["unitdischargeoffset"], patient["hospitaldischargestatus"]
    stays = pd.DataFrame(
        {
            "hospital": patient["hospitalid"],
            "region": patient["hospitalid"].map(region),
            "patient": patient["uniquepid"],
            "ethnicity": patient["ethnicity"].fillna("Other/Unknown"),
            "stay": (minutes > LONG).map({True: "more than 3 days", False: "3 days or less"}).where(minutes.notna()),
            "death": status.where(status.isin(["Alive", "Expired"])),
            "age": pd.to_numeric(patient["age"].replace("> 89", "90"), errors="coerce"),
            "diagnosis": _grouped(patient["apacheadmissiondx"]),
            "days_in_hospital": (-patient["hospitaladmitoffset"] / (24 * 60)).clip(0, 30),
        }
    )
    names = ADMISSION | ADMISSION_NUMBERS
    table = pd.concat([stays, patient[list(names)].rename(columns=names), *_apache(place, patient.index)], axis=1)
    for name, (low, high) in PLAUSIBLE.items():
        table[name] = table[name].where(table[name].between(low, high))
    return table.reset_index(drop=True)


def _grouped(diagnosis: pd.Series[str]) -> pd.Series[str]:
    """Return the beginning of a frequent diagnosis (``DIAGNOSES``), and 'other' for the rest."""
    found = diagnosis.str.extract(f"^({'|'.join(DIAGNOSES)})")[0]
    return found.fillna("other").where(diagnosis.notna())


def _apache(place: Path, stays: pd.Index[Any]) -> Iterator[pd.DataFrame]:
    """Yield numbers, truth values and the surgery of these stays; missing where APACHE has no row or has -1."""
    physiology = _read(place, "apacheApsVar", KEY, numbers=(*FIRST_DAY, *FIRST_DAY_FLAGS)).replace(-1, np.nan)
    history = _read(place, "apachePredVar", KEY, numbers=(*HISTORY_FLAGS, "electivesurgery")).replace(-1, np.nan)
    yield physiology[list(FIRST_DAY)].rename(columns=FIRST_DAY).reindex(stays)
    for table, names in ((physiology, FIRST_DAY_FLAGS), (history, HISTORY_FLAGS)):
        values = table[list(names)]
        yield (values > 0).astype("boolean").mask(values.isna()).rename(columns=names).reindex(stays)
    surgery = history["electivesurgery"].map({1: "elective", 0: "emergency"}).fillna("none")
    yield surgery.to_frame("surgery").reindex(stays)


def _read(
    place: Path, name: str, key: str, *, text: tuple[str, ...] = (), numbers: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Return these columns of one of the database's tables, indexed by its key."""
    path = next(path for path in (place / f"{name}.csv.gz", place / f"{name}.csv") if path.exists())
    table = read_columns(path, [key, *text, *numbers], ORIGIN, dtype=dict.fromkeys([key, *text], str))
    try:
        if table[key].isna().any() or not table[key].is_unique:
            raise ValueError(f"it has not one row for each {key}")
        for column in numbers:
            table[column] = numbers_in(table[column])
    except ValueError as error:
        raise unreadable(path, error, ORIGIN) from None
    return table.set_index(key)[[*text, *numbers]]
