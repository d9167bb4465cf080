"""Public tables on files that the tests write in the published layouts, and on the real ones where they are."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from feddar.data.sources import BUILT_IN
from feddar.data.sources.covid_mx_cases import CODES, DATES, FLAGS
from feddar.data.table_options import TableOptions
from feddar.data.tables import read_cohort
from feddar.errors import UserError


def load(name, folder, **options):
    source = BUILT_IN[name]
    return source.load(source.options(data=name, folder=str(folder), **options), 0)


def cases(count=60, **columns):
    number = np.arange(count)
    table = pd.DataFrame(dict.fromkeys((*CODES, *DATES), "1"), index=number)
    table["SECTOR"] = np.array(["4", "12"])[number % 2]
    table["ENTIDAD_UM"] = np.array(["01", "09"])[number // 2 % 2]
    table["TIPO_PACIENTE"] = np.array(["1", "2"])[number // 4 % 2]
    table["EDAD"] = 20 + number
    for place, name in enumerate(FLAGS):
        table[name] = np.array(["1", "2", "97", "98", "99"])[(number + place) % 5]
    table["FECHA_SINTOMAS"], table["FECHA_INGRESO"], table["FECHA_DEF"] = "2020-04-01", "2020-04-08", "9999-99-99"
    return table.assign(RESULTADO="1", NEUMONIA="1", **columns)


def write_cases(folder, table, name="200527COVID19MEXICO.csv.gz"):
    (folder / "covid_mx").mkdir(exist_ok=True)
    table.to_csv(folder / "covid_mx" / name, index=False)


class TestCovid:
    def test_cases_become_samples(self, tmp_path):
        write_cases(tmp_path, cases())
        cohort = load("covid-mx", tmp_path)
        assert cohort.clients == ("Aguascalientes", "Ciudad de México")
        assert cohort.domains == ("IMSS", "SSA")
        assert cohort.classes == ("no", "yes")
        assert cohort.y.tolist() == (np.arange(60) // 4 % 2).tolist()
        values = {column.name: part for column, part in cohort.by_column()}
        assert values["age"].tolist() == list(range(20, 80))
        assert set(values["days_to_visit"].tolist()) == {7}
        assert set(values["week"].tolist()) == {14}
        assert [column.kind for column in cohort.columns if column.name in FLAGS.values()] == ["boolean"] * len(FLAGS)
        np.testing.assert_array_equal(values["pregnant"][:5].numpy(), [1, 0, np.nan, np.nan, np.nan])

    def test_what_comes_after_the_decision_is_no_feature(self, tmp_path):
        write_cases(tmp_path, cases())
        names = {column.name for column in load("covid-mx", tmp_path).columns}
        assert names == {"age", "sex", "days_to_visit", "week", *FLAGS.values()}
        with pytest.raises(UserError, match="'death' is an outcome"):
            load("covid-mx", tmp_path, features="age,death")
        with pytest.raises(UserError, match="leave out --group"):
            load("covid-mx", tmp_path, group="age")

    def test_only_confirmed_cases_of_known_sectors(self, tmp_path):
        table = cases()
        table.loc[:9, "RESULTADO"] = "2"
        table.loc[10:14, "SECTOR"] = "99"
        write_cases(tmp_path, table)
        cohort = load("covid-mx", tmp_path)
        assert len(cohort) == 45
        assert cohort.notes == ("cases whose sector is not known are left out: 5 of 50.",)
        assert len(load("covid-mx", tmp_path, domain="sex")) == 50

    def test_the_newest_file_in_its_newer_layout(self, tmp_path):
        write_cases(tmp_path, cases())
        newer = cases(40).drop(columns="RESULTADO").assign(CLASIFICACION_FINAL=["1", "2", "3", "7"] * 10)
        write_cases(tmp_path, newer, "210101COVID19MEXICO.csv")
        assert len(load("covid-mx", tmp_path)) == 30

    def test_deaths(self, tmp_path):
        table = cases()
        table.loc[:19, "FECHA_DEF"] = "2020-05-01"
        write_cases(tmp_path, table)
        cohort = load("covid-mx", tmp_path, target="death")
        assert cohort.classes == ("alive", "died")
        assert cohort.y.sum() == 20

    def test_a_file_that_is_not_right(self, tmp_path):
        with pytest.raises(UserError, match="has no set 'covid_mx'"):
            load("covid-mx", tmp_path)
        write_cases(tmp_path, cases().drop(columns="EDAD"))
        with pytest.raises(UserError, match=r"cannot read .*MEXICO.csv.gz \(it has no column 'EDAD'\)"):
            load("covid-mx", tmp_path)
        path = tmp_path / "covid_mx" / "200527COVID19MEXICO.csv.gz"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(UserError, match="cannot read"):
            load("covid-mx", tmp_path)


def persons(count=60):
    number = np.arange(count)
    return pd.DataFrame(
        {
            "AGEP": 20.0 + number, "COW": 1.0 + number % 3, "SCHL": 1.0 + number % 24, "MAR": 1.0 + number % 2,
            "OCCP": 10.0 * (number % 7), "POBP": 9.0, "RELP": number % 4 * 1.0, "WKHP": 10.0 + number % 30, "SEX": 1.0,
            "RAC1P": 1.0 + number % 2,
        }
    )  # fmt: skip


class TestIncome:
    def test_files_of_states(self, tmp_path):
        for state in ("MT", "NM"):
            (tmp_path / "acs_income").mkdir(exist_ok=True)
            with gzip.open(tmp_path / "acs_income" / f"{state}.csv.gz", "wt") as file:
                persons().assign(PINCP=np.arange(60) % 4 == 0).to_csv(file, index=False)
        cohort = load("acs-income", tmp_path)
        assert (cohort.clients, cohort.domains) == (("MT", "NM"), ("Black", "White"))
        assert cohort.classes == ("50,000 or less", "over 50,000")
        assert cohort.y.sum() == 30
        kinds = {column.name: column.kind for column in cohort.columns}
        assert {name for name, kind in kinds.items() if kind == "number"} == {"AGEP", "WKHP", "SCHL"}
        assert {name for name, kind in kinds.items() if kind == "category"} == {
            "COW", "MAR", "OCCP", "POBP", "RELP", "SEX"
        }  # fmt: skip

    def test_files_as_folktables_downloads_them(self, tmp_path):
        folder = tmp_path / "acs_income" / "2018" / "1-Year"
        folder.mkdir(parents=True)
        table = persons().assign(PINCP=np.arange(60) * 1000.0 + 30_000, PWGTP=1)
        table["RAC1P"] = 1.0 + np.arange(60) % 9
        table.loc[0, "AGEP"], table.loc[1, "PINCP"], table.loc[2, "WKHP"] = 16, 100, np.nan
        table.to_csv(folder / "psam_p30.csv", index=False)
        table.to_csv(folder / "psam_p35.csv", index=False)
        old = tmp_path / "acs_income" / "2017" / "1-Year"
        old.mkdir(parents=True)
        table.to_csv(old / "psam_p01.csv", index=False)
        cohort = load("acs-income", tmp_path)
        assert cohort.clients == ("MT", "NM")
        assert len(cohort) == 2 * 57
        assert cohort.y.sum() == 2 * 39
        assert set(cohort.domains) == {"White", "Black", "Asian", "Native", "other"}

    def test_a_code_that_is_no_number(self, tmp_path):
        (tmp_path / "acs_income").mkdir()
        table = persons().assign(PINCP=True).astype({"COW": object})
        table.loc[3, "COW"] = "self"
        table.to_csv(tmp_path / "acs_income" / "MT.csv", index=False)
        with pytest.raises(UserError, match=r"MT.csv \(column 'COW' holds 'self' in line 5\)"):
            load("acs-income", tmp_path)


def test_the_real_tables(data_folder: Path):
    if not (data_folder / "covid_mx").is_dir() or not (data_folder / "acs_income").is_dir():
        pytest.skip("the data is not here")
    cohort = load("covid-mx", data_folder)
    assert (len(cohort), len(cohort.clients), len(cohort.domains)) == (77_401, 32, 8)
    assert float(cohort.y.double().mean()) == pytest.approx(0.362, abs=1e-3)
    income = load("acs-income", data_folder)
    assert (len(income), len(income.clients), len(income.domains)) == (105_905, 10, 5)


RAW = {
    "covid": (
        "covid_mx/200527COVID19MEXICO.csv.gz",
        {"client": "ENTIDAD_UM", "domain": "SECTOR", "target": "TIPO_PACIENTE"},
        ["--ignore INTUBADO,UCI.", "--ignore NEUMONIA.", "--ignore FECHA_DEF.", "--missing '97,98,99,9999-99-99'",
         "--categories ENTIDAD_NAC,ENTIDAD_RES,MUNICIPIO_RES.", "'ID_REGISTRO' is left out",
         "the domain 'SECTOR' has names that look like marks of a missing one (99)"],
    ),
    "income": (
        "acs_income", {"domain": "RAC1P", "target": "PINCP"}, ["--categories COW,OCCP,POBP,RELP."],
    ),
    "eicu": (
        "eicu/patient.csv.gz",
        {"client": "hospitalid", "domain": "ethnicity", "target": "hospitaldischargestatus", "incomplete": "drop",
         "missing": "> 89"},
        ["--ignore patientunitstayid.", "--ignore patienthealthsystemstayid.", "--categories wardid,",
         "--ignore hospitaldischargelocation.", "--ignore unitdischargelocation,unitdischargestatus.",
         "'unitadmittime24' is left out: it holds times of day", "--group uniquepid"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "options", "said"), RAW.values(), ids=RAW.keys())
def test_raw_files_are_read_as_they_are_and_their_codes_marks_and_leaks_are_named(path, options, said, data_folder):
    if not (data_folder / path).exists():
        pytest.skip("the data is not here")
    notes = " ".join(read_cohort(TableOptions(data=str(data_folder / path), **options)).notes)
    assert [each for each in said if each not in notes] == []
