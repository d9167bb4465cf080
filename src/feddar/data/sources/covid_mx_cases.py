"""The open data of Mexico's Ministry of Health on COVID-19, in its own layout and codes, one row per patient.

Its daily files are called `YYMMDDCOVID19MEXICO.csv`; they may stay packed. Cases with a positive test become one table:

- clients: the `state` of the medical unit; domains: its `sector`, the health-care system, which decides differently
  about the same patient; sectors with few rows and unknown ones are left out;
- target: `admitted` to hospital or sent home, or `death`;
- features: age, sex, illnesses and habits, days from the first symptoms to the visit, and the week of the visit.

Left out because they come with or after the decision: intensive care, intubation, pneumonia and the date of death.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.public import PublicOptions
from feddar.data.sources.public_table import PublicTable, read_columns, unreadable

ORIGIN = "https://www.gob.mx/salud/documentos/datos-abiertos-152127"
PATTERNS = ("*COVID19MEXICO.csv.gz", "*COVID19MEXICO.csv", "*COVID19MEXICO.zip")

CASES = PublicTable(
    name="covid-mx",
    rows="cases",
    roles={"client": "state", "domain": "sector", "target": "admitted"},
    outcomes=("admitted", "death"),
    not_features=("state", "sector"),
)

SECTORS = {
    "3": "state", "4": "IMSS", "6": "ISSSTE", "8": "PEMEX", "9": "private", "10": "SEDENA", "11": "SEMAR", "12": "SSA",
}  # fmt: skip
"""Health-care systems by code; others have a hundred cases or fewer, or are unknown (99)."""

STATES = (
    "Aguascalientes", "Baja California", "Baja California Sur", "Campeche", "Coahuila", "Colima", "Chiapas",
    "Chihuahua", "Ciudad de México", "Durango", "Guanajuato", "Guerrero", "Hidalgo", "Jalisco", "México", "Michoacán",
    "Morelos", "Nayarit", "Nuevo León", "Oaxaca", "Puebla", "Querétaro", "Quintana Roo", "San Luis Potosí", "Sinaloa",
    "Sonora", "Tabasco", "Tamaulipas", "Tlaxcala", "Veracruz", "Yucatán", "Zacatecas",
)  # fmt: skip
"""The states, whose codes count from 1."""

FLAGS = {
    "EMBARAZO": "pregnant",
    "HABLA_LENGUA_INDIG": "indigenous_language",
    "DIABETES": "diabetes",
    "EPOC": "copd",
    "ASMA": "asthma",
    "INMUSUPR": "immunosuppressed",
    "HIPERTENSION": "hypertension",
    "OTRA_COM": "other_illness",
    "CARDIOVASCULAR": "cardiovascular",
    "OBESIDAD": "obesity",
    "RENAL_CRONICA": "renal",
    "TABAQUISMO": "smoker",
    "OTRO_CASO": "contact",
}
"""Yes (1) or no (2); 97, 98 and 99 are not applicable, unknown and not stated."""

CODES = ("SECTOR", "ENTIDAD_UM", "TIPO_PACIENTE", "SEXO", "EDAD", *FLAGS)
CONFIRMED = {"CLASIFICACION_FINAL": ["1", "2", "3"], "RESULTADO": ["1"]}
"""Values of a confirmed case: in files from October 2020 on, a classification; before, the result of the test."""
DATES = ("FECHA_INGRESO", "FECHA_SINTOMAS", "FECHA_DEF")


def cohort(options: PublicOptions) -> Cohort:
    """Read the newest file as a cohort with the client, domain and target columns of the options."""
    place = find_set("covid_mx", options.folder, files=[PATTERNS], origin=ORIGIN)
    return CASES.cohort(read_cases(max(file for pattern in PATTERNS for file in place.glob(pattern))), options)


def read_cases(path: Path) -> pd.DataFrame:
    """Return the table of confirmed cases, one row each."""
    confirmed = _confirmed_in(path)
    found = read_columns(path, [*CODES, *DATES, confirmed], ORIGIN, dtype=str, encoding_errors="replace")
    raw = found[found[confirmed].isin(CONFIRMED[confirmed])]
    code = {name: pd.to_numeric(raw[name], errors="coerce") for name in CODES}
    visit, symptoms, death = (pd.to_datetime(raw[name], format="%Y-%m-%d", errors="coerce") for name in DATES)
    state = code["ENTIDAD_UM"].map(dict(enumerate(STATES, start=1)))
    cases = {
        "state": state,
        "sector": raw["SECTOR"].str.lstrip("0").map(SECTORS),
        "admitted": code["TIPO_PACIENTE"].map({1: "no", 2: "yes"}),
        "death": death.notna().map({True: "died", False: "alive"}),
        "age": code["EDAD"],
        "sex": code["SEXO"].map({1: "female", 2: "male"}),
        "days_to_visit": (visit - symptoms).dt.days,
        "week": (visit - pd.Timestamp("2020-01-01")).dt.days // 7,
    }
    yes_or_no = {FLAGS[name]: code[name].map({1: True, 2: False}).astype("boolean") for name in FLAGS}
    return pd.DataFrame(cases | yes_or_no).reset_index(drop=True)


def _confirmed_in(path: Path) -> str:
    """Return the column that says whether a case is confirmed."""
    try:
        header = pd.read_csv(path, nrows=0, encoding_errors="replace").columns
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise unreadable(path, error, ORIGIN) from None
    return next((name for name in CONFIRMED if name in header), "RESULTADO")
