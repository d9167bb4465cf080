"""The study file, and what is said where a site's table does not fit it."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.algorithm.wire import pack, unpack
from feddar.data.columns import Column
from feddar.data.images import IMAGENET
from feddar.errors import UserError
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.site import seen_in
from feddar.federation.study import DisagreementError, Facts, Study, spoken
from feddar.settings import Settings
from helpers.sites import NAMES, make_sites, make_study, write_tables

KINDS = (
    Column("age", "number"),
    Column("lactate (mmol/l)", "number", gaps=True),
    Column("smoker", "boolean"),
    Column("seen.on", "date", gaps=True),
    Column("Station 'Süd' = \"x\"", "category", ("1", "2", "Größe, groß", 'a "b"', "c=d")),
    Column("ward", "category", ("er", "icu"), gaps=True),
)


def study_of(columns=KINDS, training=None, terms=None, **facts):
    given = {"name": "s", "domain": "race", "target": "outcome", "domains": ("A", "B"), "classes": ("alive", "died")}
    given["secure"] = True
    return Study(
        Facts(**(given | facts)),
        tuple(columns),
        training or Settings(lr=1e-5, rounds=7),
        terms or CoordinatorSettings(),
    )


def table_of(**changes):
    table = {
        "age": [50, 60.5, 70, 41],
        "lactate (mmol/l)": [1.0, None, 2, 3],
        "smoker": ["yes", "no", "no", "yes"],
        "seen.on": ["2020-01-31", "2020-02-01", None, "2021-12-31"],
        KINDS[4].name: ["1", "2", "2", "1"],
        "ward": ["icu", None, "er", "er"],
        "race": ["A", "B", "A", "B"],
        "outcome": ["alive", "died", "alive", "died"],
    }
    return pd.DataFrame(table | changes)


def disagreements(folder, study, table):
    """Return all that is said of a table: to others, and here."""
    path = folder / "table.csv"
    table.to_csv(path, index=False)
    with pytest.raises(DisagreementError) as caught:
        study.read_site(path, "here")
    return [each.what for each in caught.value.found], str(caught.value)


def test_a_study_comes_back_as_it_was(tmp_path):
    study = study_of(group="patient", terms=CoordinatorSettings(sites=5, min_clients=3, wait=1, timeout=2.5))
    study.write(tmp_path / "study.toml")
    found = Study.read(tmp_path / "study.toml")
    assert found == study
    assert found.digest == study.digest
    message = Study.from_tables(json.loads(json.dumps(study.tables())), "a message")
    assert (message, message.digest) == (study, study.digest)


@pytest.mark.parametrize("others", [(), KINDS], ids=["images alone", "images and numbers"])
def test_a_study_of_images_comes_back_and_knows_their_shape(tmp_path, others):
    study = study_of([*others[:2], Column("scan", "image", size=40), *others[2:]])
    study.write(tmp_path / "study.toml")
    assert Study.read(tmp_path / "study.toml") == study
    assert Study.from_tables(json.loads(json.dumps(study.tables())), "a message") == study
    assert (study.image, study_of().image) == ("scan", "")
    cohort = study.cohort(("a", "b"), torch.tensor([[2, 0], [1, 3]]))
    assert cohort.scaling == IMAGENET
    assert cohort.columns == study.columns
    shapes = [(6, 3, 40, 40)] + ([(6, 4), (6, 2)] if others else [])
    assert [tuple(part.shape) for part in cohort.x] == shapes
    assert (cohort.clients, cohort.domains) == (("a", "b"), ("A", "B"))
    assert cohort.counts.tolist() == [[2, 0], [1, 3]]
    assert study_of().cohort(("a",), torch.tensor([[1, 1]])).scaling is None


def test_the_size_of_images_is_known_where_it_is_not_said():
    tables = study_of().tables()
    for said in ("image", {"kind": "image"}):
        study = Study.from_tables(tables | {"columns": {"scan": said}}, "a study")
        assert study.columns == (Column("scan", "image", size=96),)
    for size in (8, 1024):
        study = Study.from_tables(tables | {"columns": {"scan": {"kind": "image", "size": size}}}, "a study")
        assert study.columns == (Column("scan", "image", size=size),)


@pytest.mark.parametrize(
    "classes", [(0, 1), (False, True), ("0", "1"), (1.5, 2.5), ("b", "a"), ("x", "y", "z"), None], ids=str
)
def test_classes_come_back_with_their_types(tmp_path, classes):
    study = study_of(classes=classes)
    study.write(tmp_path / "study.toml")
    found = Study.read(tmp_path / "study.toml").facts.classes
    assert found == classes
    assert [*map(type, found or ())] == [*map(type, classes or ())]


@given(st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=4, unique_by=str.strip))
def test_any_names_come_back(tmp_path_factory, names):
    names = [name for name in names if name.strip() == name and name.isprintable() | (name == "\x7f") and name]
    path = tmp_path_factory.getbasetemp() / "any.toml"
    study = study_of([Column(f"c{name}", "category", tuple(names) or ("x",)) for name in names] or [KINDS[0]])
    study.write(path)
    assert Study.read(path) == study


@pytest.mark.parametrize(
    ("address", "words"),
    [((127, 0, 0, 1), "lusab-babad"), ((63, 84, 220, 193), "gutih-tugad"), ((255, 255, 0, 16), "zuzuz-babib")],
)
def test_digests_are_words_as_they_are_published(address, words):
    assert spoken(bytes(address)) == words


@pytest.mark.parametrize(("sites", "secure"), [(2, False), (3, True)])
def test_sums_are_secure_from_three_sites_on(tmp_path, sites, secure):
    study = study_of(terms=CoordinatorSettings(sites=sites), secure=None)
    study.write(tmp_path / "study.toml")
    assert Study.read(tmp_path / "study.toml").facts.secure is study.facts.secure is secure
    fewer = replace(study, coordinator=CoordinatorSettings(sites=2))
    assert fewer.facts.secure is secure  # a coordinator that waits for fewer sites changes nothing that was agreed on


def test_all_of_the_digest_is_shown():
    words = study_of().digest.split("-")
    assert len(words) * 16 == 256
    assert all(len(word) == 5 for word in words)


def test_the_digest_is_of_what_all_agree_on_and_nothing_else():
    study = study_of()
    assert study_of(terms=CoordinatorSettings(sites=9, min_clients=1, timeout=5)).digest == study.digest
    others = [
        study_of(KINDS[::-1]),
        study_of(KINDS[:-1]),
        study_of(classes=("died", "alive")),
        study_of(domains=("B", "A")),
        study_of(domain="sex"),
        study_of(test=0.3),
        study_of(secure=False),
        study_of(keys={"hospital-1": "SHA256:x"}),
        study_of(max_norm=3.0),
        study_of(training=Settings(lr=1e-5, rounds=8)),
        study_of(training=Settings(lr=1e-5, rounds=7, method="fedrep")),
        study_of([KINDS[0], Column("lactate (mmol/l)", "number"), *KINDS[2:]]),
    ]
    assert len({each.digest for each in [study, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("title", "change", "said"),
    [
        ("study", {"colour": "blue"}, "unknown option 'colour'"),
        ("study", {"domain": ""}, "domain string should match"),
        ("study", {"domain": " , "}, "domain string should match"),
        ("study", {"target": ""}, "target string should have at least 1 character"),
        ("study", {"domains": []}, "domains"),
        ("study", {"domains": ["A", "A"]}, "domains names 'A' twice"),
        ("study", {"domains": [1]}, "domains should be a valid string"),
        ("study", {"classes": ["only"]}, "classes"),
        ("study", {"classes": ["x", "x"]}, "classes names 'x' twice"),
        ("study", {"classes": [1, "1"]}, "classes names 1 twice"),
        ("study", {"target": "age"}, "column 'age' is the target, which is not learned from"),
        ("study", {"group": "ward"}, "column 'ward' is the group, which is not learned from"),
        ("study", {"test": 1}, "test should be less than 1"),
        ("columns", {"age": "numbre"}, "[columns] age has the kind 'numbre': there are number, boolean"),
        ("columns", {"age": 7}, "[columns] age must be a kind"),
        ("columns", {"age": {"kind": "number", "unit": "a"}}, "[columns] age must be a kind"),
        ("columns", {"age": "category"}, "[columns] age: a category, and nothing else, lists its levels"),
        ("columns", {"age": {"kind": "number", "levels": ["a"]}}, "a category, and nothing else"),
        ("columns", {"age": {"levels": "abc"}}, "[columns] age: levels are a list of texts"),
        ("columns", {"age": ["a", "a"]}, "[columns] age: each level is a text of its own"),
        ("columns", {"age": ["a", " a "]}, "[columns] age: each level is a text of its own"),
        ("columns", {"age": {"kind": "number", "gaps": "no"}}, "[columns] age: gaps is true or false"),
        ("columns", {"age": {"kind": "image", "size": 7}}, "the size of images is from 8 to 1024 pixels"),
        ("columns", {"age": {"kind": "image", "size": 1025}}, "the size of images is from 8 to 1024 pixels"),
        ("columns", {"age": {"kind": "image", "size": "big"}}, "the size of images is from 8 to 1024 pixels"),
        ("columns", {"age": {"kind": "image"}, "ward": {"kind": "image"}}, "more than one column of images"),
        ("training", {"rounds": 0}, "rounds should be greater than or equal to 1"),
        ("training", {"method": "fedrap"}, "did you mean 'fedrep'?"),
        ("training", {"participation": 0.5}, "in secure sums all sites train in every round"),
        (
            "training",
            {"clients_per_round": 2},
            "in secure sums all sites train in every round",
        ),
        ("terms", {"sites": 2, "min_clients": 3}, "min_clients (3) must not be more than sites (2)"),
        ("terms", {"timeout": 0}, "timeout should be greater than 0"),
    ],
)
def test_what_is_wrong_in_a_study_is_said_with_where_it_stands(title, change, said):
    tables = study_of().tables()
    with pytest.raises(UserError) as caught:
        Study.from_tables(tables | {title: tables[title] | change}, "the file")
    assert str(caught.value).startswith("the file: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("title", ["study", "columns"])
def test_a_study_without_a_table_it_needs(tmp_path, title):
    tables = study_of().tables()
    with pytest.raises(UserError, match=rf"has no table \[{title}\]"):
        Study.from_tables({name: table for name, table in tables.items() if name != title}, "the file")
    (tmp_path / "a.toml").write_text("[data]\n")
    with pytest.raises(UserError, match="only the tables"):
        Study.read(tmp_path / "a.toml")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_that_fits(tmp_path, suffix):
    path = tmp_path / f"table.{suffix}"
    table = table_of()
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    cohort = study_of().read_site(path, "here")
    assert cohort.domains == ("A", "B")
    assert cohort.clients == ("here",)
    assert cohort.y.tolist() == [0, 1, 0, 1]
    assert cohort.codes.tolist() == [[1, 2], [2, 0], [2, 1], [1, 1]]


def test_a_folder_of_files_is_one_table(tmp_path):
    for number in (0, 2):
        table_of().iloc[number : number + 2].to_csv(tmp_path / f"part-{number}.csv", index=False)
    assert len(study_of().read_site(tmp_path, "here")) == 4
    with pytest.raises(UserError, match=r"there is no table .*nothing: name the CSV or Parquet file of this site"):
        study_of().read_site(tmp_path / "nothing", "here")


@pytest.mark.parametrize(
    ("change", "what", "why"),
    [
        ({"age": None}, "column 'age'", "there is no column 'age': did you mean 'aged'?"),
        ({"race": None}, "column 'race'", "there is no column 'race': "),
        ({"outcome": None}, "column 'outcome'", "there is no column 'outcome': "),
        ({"age": [1, 2, "old", 3]}, "column 'age'", "line 4: column 'age' holds 'old', which is not a number"),
        (
            {"smoker": ["y", "n", "?", "n"]},
            "column 'smoker'",
            "line 4: column 'smoker' holds '?', which is not yes or no",
        ),
        (
            {"seen.on": ["31.1.2020"] * 4},
            "column 'seen.on'",
            "line 2: column 'seen.on' holds '31.1.2020', which is not a",
        ),
        (
            {"ward": ["er", "cardio", "", "er"]},
            "column 'ward'",
            "line 3: column 'ward' holds 'cardio', and the study knows er, icu",
        ),
        (
            {"age": [1, None, 3, None]},
            "column 'age'",
            "line 3: column 'age' is empty there and in 1 more, and the study says",
        ),
        (
            {"race": ["A", "Z", "Z", "B"]},
            "domain column 'race'",
            "domain 'Z' (2 rows) is not in the study: there are: A, B.",
        ),
        (
            {"race": ["A", "a", "A", "B"]},
            "domain column 'race'",
            "domain 'a' (1 rows) is not in the study: did you mean 'A'?",
        ),
        ({"race": ["A", None, "A", "B"]}, "column 'race'", "line 3: column 'race' is empty there; fill it in."),
        (
            {"outcome": ["alive", "Died", "x", "x"]},
            "target column 'outcome'",
            "line 3: 'Died' in column 'outcome' is not in the study, which has alive, died.",
        ),
        (
            {"outcome": [None, "died", "died", "died"]},
            "column 'outcome'",
            "line 2: column 'outcome' is empty there; fill it in.",
        ),
    ],
    ids=str,
)
def test_disagreements(tmp_path, change, what, why):
    table = table_of(**{name: values for name, values in change.items() if values is not None})
    gone = [name for name, values in change.items() if values is None]
    told, said = disagreements(tmp_path, study_of(), table.rename(columns={name: f"{name}d" for name in gone}))
    assert set(told) == {what}
    assert why in said


def test_all_disagreements_are_said_at_once(tmp_path):
    changes = {
        "ward": ["x", "er", "er", "er"],
        "race": ["A", "Z", "A", "B"],
        "outcome": ["alive", "gone", "died", "died"],
    }
    told, said = disagreements(tmp_path, study_of(), table_of(**changes).drop(columns="age"))
    assert told == ["column 'age'", "column 'ward'", "domain column 'race'", "target column 'outcome'"]
    assert said.count("\n  - ") == 4


@pytest.mark.parametrize(("levels", "ending"), [(10, "l8, l9; mend"), (11, "l8, l9, …; mend"), (12, "l8, l9, …; mend")])
def test_of_many_levels_the_first_are_named(tmp_path, levels, ending):
    study = study_of([Column("ward", "category", tuple(f"l{number}" for number in range(levels)))])
    _, said = disagreements(tmp_path, study, table_of(ward=["l0", "else", "l1", "l2"]))
    assert "holds 'else', and the study knows l0, l1, " in said
    assert ending in said


def test_of_many_unknown_domains_some_are_named(tmp_path):
    table = pd.concat([table_of()] * 10, ignore_index=True)
    told, said = disagreements(tmp_path, study_of(), table.assign(race=[f"p{i}" for i in range(40)]))
    assert len(told) == 11
    assert "30 more domains are not in the study." in said


@pytest.mark.parametrize(("values", "said"), [([1, 2.5, "high", "3"], "high"), ([1.0, 2.0, float("inf"), 3], "inf")])
def test_a_number_to_predict_that_is_none(tmp_path, values, said):
    told, why = disagreements(tmp_path, study_of(classes=None), table_of(outcome=values))
    assert told == ["target column 'outcome'"]
    assert f"line 4: '{said}' in column 'outcome' is not a number." in why


@pytest.mark.parametrize(
    ("classes", "values"),
    [
        ((0, 1), ["0", "1", "1", "0"]),
        ((0, 1), [0.0, 1.0, 1.0, 0.0]),
        ((0, 1), [0, 1, 1, 0]),
        (("0", "1"), [0, 1, 1, 0]),
        (("0", "1"), [0.0, 1.0, 1.0, 0.0]),
        ((0.0, 1.0), [0, 1, 1, 0]),
        ((False, True), [False, True, True, False]),
        ((False, True), ["false", "true", "true", "false"]),
        ((False, True), ["FALSE", "TRUE", "TRUE", "FALSE"]),
        (("no", "yes"), ["no ", " yes", "yes", "no"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_class_is_what_is_written(tmp_path, classes, values, suffix):
    path = tmp_path / f"table.{suffix}"
    table = table_of(outcome=values)
    table.to_csv(path, index=False) if suffix == "csv" else table.to_parquet(path)
    cohort = study_of(classes=classes).read_site(path, "here")
    assert cohort.y.tolist() == [0, 1, 1, 0]
    assert cohort.classes == classes


@pytest.mark.parametrize(
    ("levels", "values"),
    [
        (("1", "2", "3A"), ["1", None, "2", "1"]),
        (("01", "02"), ["01", "02", "02", "01"]),
        (("true", "false", "?"), ["true", "false", "true", "true"]),
        (("1.50", "x"), ["1.50", "1.50", "x", None]),
    ],
    ids=str,
)
def test_levels_of_a_site_that_has_only_those_like_numbers(tmp_path, levels, values):
    table_of(ward=values).to_csv(tmp_path / "t.csv", index=False)
    columns = [*KINDS[:-1], Column("ward", "category", levels, gaps=True)]
    found = study_of(columns).read_site(tmp_path / "t.csv", "here").codes[:, 1]
    assert found.tolist() == [0 if value is None else levels.index(value) + 1 for value in values]


def test_a_column_that_a_site_has_no_values_of(tmp_path):
    empty = [None] * 4
    columns = [Column(c.name, c.kind, c.levels, gaps=True) for c in KINDS]
    table_of(**{c.name: empty for c in KINDS}).to_csv(tmp_path / "t.csv", index=False)
    cohort = study_of(columns).read_site(tmp_path / "t.csv", "here")
    assert bool(cohort.numbers.isnan().all())
    assert not bool(cohort.codes.any())


def test_crossed_domains(tmp_path):
    study = study_of(domain="race,sex", domains=("A, f", "A, m", "B, f"))
    table_of(sex=["f", "f", "m", "f"]).to_csv(tmp_path / "t.csv", index=False)
    assert study.read_site(tmp_path / "t.csv", "here").domain_names.tolist() == ["A, f", "B, f", "A, m", "B, f"]
    told, said = disagreements(tmp_path, study, table_of(sex=["f", "m", "m", "f"]))
    assert told == ["domain column 'race,sex'"]
    assert "domain 'B, m' (1 rows)" in said
    told, _ = disagreements(tmp_path, study, table_of())
    assert told == ["column 'sex'"]


def test_what_is_told_to_the_coordinator_holds_no_value(tmp_path):
    write_tables(tmp_path / "data")
    study = make_study(tmp_path / "data")
    table = pd.read_csv(tmp_path / "data" / f"{NAMES[0]}.csv")
    changed = table.assign(ward="SECRET-ward", race="SECRET-race", outcome="SECRET-class").astype({"age": object})
    changed.loc[3, "age"] = "SECRET-age"
    changed.to_csv(tmp_path / "data" / f"{NAMES[0]}.csv", index=False)
    heard = []
    site = make_sites(tmp_path / "data", tmp_path / "kept", ended=heard.append)[NAMES[0]]
    answer = site.answer(pack({"kind": "join", "run": "ab" * 8, "study": study.tables()}))
    assert b"SECRET" not in answer
    assert unpack(answer)[0] == {
        "kind": "refused",
        "why": "its data does not agree with the study in column 'age', column 'ward', domain column 'race', "
        "target column 'outcome'.",
    }
    for name in ("age", "ward", "race", "class"):
        assert f"SECRET-{name}" in heard[0]


def test_spellings_are_merged_where_the_study_says_so(tmp_path):
    table = table_of(race=["A", "b", "a", "B"])
    assert "domain 'b'" in disagreements(tmp_path, study_of(), table)[1]
    read = study_of(spellings="merge").read_site(tmp_path / "table.csv", "here")
    assert read.domain.tolist() == [0, 1, 0, 1]


def test_sites_say_who_sees_a_component_of_one_site():
    said = [seen_in(study_of(training=Settings(method=method))) for method in ("feddar", "ifca")]
    assert [any("component" in sentence for sentence in each) for each in said] == [False, True]
