"""eICU: from the database's own tables to a cohort, with their quirks, and what is said when something is wrong."""

import gzip

import numpy as np
import pandas as pd
import pytest

from feddar.data.sources import BUILT_IN, data_folder
from feddar.data.sources import eicu_stays as eicu
from feddar.errors import UserError

GROUPS = ("Caucasian", "African American", "", "Other/Unknown")
PER_HOSPITAL = 10
REGIONS = {"11": "Midwest", "12": "South", "13": ""}


def write_sets(place, packed=True):
    """Write three hospitals with ten patients each, of whom the first returns; -1, gaps and '> 89' included."""
    place.mkdir(parents=True)
    rows, apache, predicted = [], [], []
    for h, hospital in enumerate(REGIONS):
        for number in [*range(PER_HOSPITAL), 0]:
            stay = 1000 + len(rows)
            rows.append(
                {
                    "patientunitstayid": stay,
                    "gender": ("Male", "Female")[number % 2],
                    "age": "> 89" if number == 0 else str(40 + number),
                    "ethnicity": GROUPS[number % 4],
                    "hospitalid": hospital,
                    "apacheadmissiondx": ("Sepsis, pulmonary", "Burns", "")[number % 3],
                    "admissionheight": 1.7 if number == 1 else 170 + number,
                    "hospitaladmitoffset": -720 * number,
                    "hospitaldischargelocation": "Home",
                    "hospitaldischargestatus": ("Alive", "Expired", "Alive", "")[number % 4],
                    "hospitaldischargeoffset": 9000,
                    "unittype": "MICU" if number < 5 else "SICU",
                    "unitadmitsource": "Floor",
                    "unitvisitnumber": 1,
                    "unitstaytype": "admit",
                    "admissionweight": 60 + number,
                    "unitdischargeoffset": 4321 if number % 3 == 0 else 4320,
                    "uniquepid": f"{h}-{number}",
                }
            )
            if number != 9:  # APACHE scored all but one
                apache.append(dict.fromkeys((*eicu.FIRST_DAY, *eicu.FIRST_DAY_FLAGS), 1))
                apache[-1] |= {"patientunitstayid": stay, "ph": -1 if number % 2 else 7.4, "vent": number % 2}
                predicted.append(dict.fromkeys((*eicu.HISTORY_FLAGS, "diedinhospital", "activetx"), 0))
                predicted[-1] |= {"patientunitstayid": stay, "electivesurgery": {0: 1, 1: 0}.get(number)}
    hospitals = [{"hospitalid": key, "numbedscategory": "<100", "region": region} for key, region in REGIONS.items()]
    tables = {"patient": rows, "hospital": hospitals, "apacheApsVar": apache, "apachePredVar": predicted}
    for name, table in tables.items():
        pd.DataFrame(table).to_csv(place / f"{name}.csv{'.gz' * packed}", index=False)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.delenv(data_folder.VARIABLE, raising=False)
    write_sets(tmp_path / "eicu")
    return tmp_path / "eicu"


def load(place, **options):
    return BUILT_IN["eicu"].load(BUILT_IN["eicu"].options(data="eicu", folder=str(place.parent), **options), 0)


def rewrite(place, name, change):
    path = place / f"{name}.csv.gz"
    change(table := pd.read_csv(path, dtype=str))
    table.to_csv(path, index=False)


def test_hospitals_are_clients_ethnic_groups_domains_and_long_stays_the_label(place):
    cohort = load(place)
    assert cohort.clients == ("11", "12", "13")
    assert cohort.domains == ("African American", "Caucasian", "Other/Unknown")  # what is missing is unknown
    assert cohort.counts.tolist() == [[3, 4, 4]] * 3
    assert cohort.classes == ("3 days or less", "more than 3 days")
    assert cohort.y.tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1] * 3  # three days and a minute
    assert not cohort.notes


def test_features_are_known_on_the_first_day(place):
    columns = {column.name: column for column in load(place).columns}
    known = {"age", "diagnosis", "days_in_hospital", "surgery"}
    for names in (eicu.ADMISSION, eicu.ADMISSION_NUMBERS, eicu.FIRST_DAY, eicu.FIRST_DAY_FLAGS, eicu.HISTORY_FLAGS):
        known |= set(names.values())
    assert set(columns) == known
    assert columns["ventilated"].kind == "boolean"
    assert columns["surgery"].levels == ("elective", "emergency", "none")
    assert columns["diagnosis"].levels == ("Sepsis", "other")
    assert "gender" not in {column.name for column in load(place, domain="gender").columns}
    assert "unit" not in {column.name for column in load(place, client="unit").columns}


def test_quirks_of_the_tables_are_understood(place):
    first = eicu.read_stays(place).iloc[: PER_HOSPITAL + 1]
    assert first["age"].tolist() == [90, *range(41, 50), 90]
    assert first["ph"].dropna().tolist() == [7.4] * 6  # -1 is missing, and so is a row
    assert first["height"].isna().tolist() == [False, True] + [False] * 9  # metres for centimetres
    assert first["ventilated"].tolist()[:4] == [False, True, False, True]
    assert first["ventilated"].isna().tolist() == [number == 9 for number in range(11)]
    assert first["days_in_hospital"].tolist()[:3] == [0, 0.5, 1]
    assert first["diagnosis"].isna().sum() == 3


def test_regions_deaths_and_crossed_domains_by_the_options_that_tables_have(place):
    cohort = load(place, client="region", target="death", domain="ethnicity,gender")
    assert cohort.clients == ("Midwest", "South")
    assert cohort.classes == ("Alive", "Expired")
    assert cohort.domains == ("African American, Female", "Caucasian, Male")
    assert cohort.notes == (
        "stays whose death is not known are left out: 6 of 33.",
        "stays whose region is not known are left out: 9 of 33.",
        "stays whose domain has fewer than 5 patients (Other/Unknown, Male) are left out: 4 of 33.",
    )


def test_outcomes_that_are_not_yes_or_no_are_refused_together(place):
    with pytest.raises(UserError, match="the label 'stay' is 'more than 3 days', not yes or no"):
        load(place, target="stay,death")


def test_stays_of_a_patient_are_together_in_every_fold(place):
    cohort = load(place)
    for train, test in cohort.folds(5):
        assert not set(train.group.tolist()) & set(test.group.tolist())
    assert len(cohort.group.unique()) == 3 * PER_HOSPITAL


def test_clients_and_domains_too_small_to_divide_are_left_out_and_counted(place):
    def change(table):
        table.loc[table.index[:10], "hospitalid"] = "12"  # one patient stays behind at hospital 11
        table.loc[table.index[[12, 23, 24]], "gender"] = "Unknown"

    rewrite(place, "patient", change)
    cohort = load(place, domain="gender")
    assert cohort.clients == ("12", "13")
    assert cohort.domains == ("Female", "Male")
    assert cohort.notes == (
        "stays whose client has fewer than 2 patients (11) are left out: 1 of 33.",
        "stays whose domain has fewer than 5 patients (Unknown) are left out: 3 of 33.",
    )
    assert len(cohort) == 33 - 4
    list(cohort.folds(5))


def test_tables_that_are_not_packed_are_read_as_well(place, tmp_path):
    write_sets(tmp_path / "plain" / "eicu", packed=False)
    assert load(tmp_path / "plain" / "eicu").fingerprint() == load(place).fingerprint()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "dead"}, r"no column 'dead': did you mean 'death'\?"),
        ({"features": "age,ph2"}, "no column 'ph2'"),
        ({"features": "age,death"}, "'death' is an outcome, known afterwards only"),
        ({"group": "hospital"}, "leave out --group"),
    ],
)
def test_wrong_options_are_one_sentence(place, options, said):
    with pytest.raises(UserError, match=said):
        load(place, **options)


def test_chosen_features_are_the_only_ones(place):
    assert [column.name for column in load(place, features="age,ethnicity,ph", domain="gender").columns] == [
        "age", "ethnicity", "ph"
    ]  # fmt: skip
    assert "ph" not in {column.name for column in load(place, ignore="ph").columns}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lambda path: path.write_bytes(b"patientunitstayid"),
        lambda path: path.write_bytes(gzip.compress(b"")),
        lambda path: path.write_bytes(gzip.compress(b"patientunitstayid,gender\n1,Male\n")),
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) * 2)),
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"4320", b"long"))),
    ],
    ids=["truncated", "not packed", "empty", "columns", "twice", "text among numbers"],
)
def test_a_damaged_table_is_named_with_where_to_get_it(place, damage):
    damage(place / "patient.csv.gz")
    with pytest.raises(UserError, match=r"patient\.csv\.gz .*physionet\.org"):
        load(place)


def test_a_missing_table_is_named_with_where_to_get_it(place):
    (place / "apacheApsVar.csv.gz").unlink()
    with pytest.raises(UserError, match=r"lacks apacheApsVar\.csv\.gz: get it from https://physionet\.org"):
        load(place)
    for path in place.iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"has no set 'eicu': put patient\.csv\.gz, .* \(from https://physionet\.org"):
        load(place)


def test_the_demo_itself(data_folder):
    if not (data_folder / "eicu").is_dir():
        pytest.skip(f"no eICU demo in {data_folder}")
    cohort = load(data_folder / "eicu")
    assert (len(cohort), len(cohort.clients), len(cohort.domains)) == (2520, 186, 6)
    assert cohort.counts.sum(0).tolist() == [231, 30, 2010, 115, 12, 122]
    assert cohort.y.sum() == 549
    assert len(cohort.group.unique()) == 1841
    deaths = load(data_folder / "eicu", client="region", target="death")
    assert deaths.clients == ("Midwest", "Northeast", "South", "West")
    assert len(deaths) == 2283
    numbers = cohort.x[0].numpy()
    assert not (numbers == -1).any()
    assert np.nanmax(numbers[:, 0]) == 90
    for train, test in cohort.folds(5):
        assert not set(train.group.tolist()) & set(test.group.tolist())
