"""Columns that a site does not have are missing there: in whole runs, predictions and what is said."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.data.columns import Column
from feddar.data.table_options import TableOptions
from feddar.data.tables import read_cohort
from feddar.errors import UserError
from feddar.federation.column_scales import much_wider_than_others
from feddar.federation.coordinator import coordinate
from feddar.federation.study import DisagreementError, Study
from feddar.results.file_prediction import find_run
from helpers.command import feddar as command
from helpers.sites import NAMES, local_link, make_sites, make_study, with_facts, write_tables

LACKED = ("lactate", "smoker", "seen", "ward")
"""Columns of every kind, which hospital-2 does not have."""
ROLES = ["--domain", "race", "--target", "outcome", "--positive", "died"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Give a folder of tables of which one lacks columns, and one of the same tables with these columns empty."""
    folder, empty = (tmp_path_factory.mktemp(name) for name in ("lacking", "empty"))
    write_tables(folder, rows=90)
    for number, name in enumerate(NAMES):
        rng, table = np.random.default_rng([7, number]), pd.read_csv(folder / f"{name}.csv")
        table["race"] = rng.choice(["A", "B", "C"], len(table), p=[0.5, 0.3, 0.2])
        table.insert(2, "smoker", rng.choice(["yes", "no"], len(table)))
        table.insert(3, "seen", [f"2020-0{month}-01" for month in rng.integers(1, 9, len(table))])
        lacked = [*LACKED] if name == "hospital-2" else []
        table.drop(columns=lacked).to_csv(folder / f"{name}.csv", index=False)
        table.assign(**dict.fromkeys(lacked)).to_csv(empty / f"{name}.csv", index=False)
    return folder, empty


def trained(study, tables, folder, **options):
    sites = make_sites(tables, folder / "kept", **options)
    return coordinate(study, local_link(sites), folder / "out"), sites


def require_same(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, msg=lambda text, name=name: name + text, **tolerance)


def test_columns_that_some_tables_lack_are_optional_in_the_study(tables, tmp_path):
    said = " ".join(command("study", tables[0], *ROLES, cwd=tmp_path).split())
    assert "Optional, and missing at sites that lack them: lactate, smoker, seen, ward." in said
    study = Study.read(tmp_path / "study.toml")
    assert [(column.name, column.optional, column.gaps) for column in study.columns if column.optional] == [
        (name, True, True) for name in LACKED
    ]
    assert Study.from_tables(study.tables(), "a message") == study
    said = " ".join(
        command(
            "client", "--explain", "--study", "study.toml", "--data", tables[0] / f"{NAMES[1]}.csv", cwd=tmp_path
        ).split()
    )
    assert "This table lacks lactate, smoker, seen, ward, which the study has as optional" in said


def test_an_example_that_has_all_columns_says_which_are_optional(tables, tmp_path):
    command("study", tables[0] / f"{NAMES[0]}.csv", *ROLES, "--optional", "lactate,ward", cwd=tmp_path)
    study = Study.read(tmp_path / "study.toml")
    with pytest.raises(DisagreementError) as caught:
        study.read_site(tables[0] / f"{NAMES[1]}.csv", "here")
    assert [each.what for each in caught.value.found] == ["column 'smoker'", "column 'seen'"]


@pytest.mark.parametrize("secure", [False, True])
def test_a_lacking_column_is_as_an_empty_one(tables, tmp_path, secure):
    lacking, empty = tables
    study = with_facts(make_study(lacking, dtype="float64"), secure=secure)
    (one, _), (other, _) = (
        trained(study, data, tmp_path / name) for name, data in (("lacking", lacking), ("empty", empty))
    )
    require_same(named_state(one.state), named_state(other.state), rtol=0, atol=0)


def test_secure_sums_and_single_replies_agree(tables, tmp_path):
    runs = [
        trained(with_facts(make_study(tables[0], dtype="float64"), secure=secure), tables[0], tmp_path / str(secure))[0]
        for secure in (False, True)
    ]
    require_same(*(named_state(run.state) for run in runs), rtol=1e-9, atol=1e-9)


def test_sites_come_to_the_weights_of_one_table_with_gaps(tables, tmp_path):
    study = make_study(tables[0], validation=0)
    run, _ = trained(study, tables[0], tmp_path, min_cell=1)
    frames = [pd.read_csv(tables[0] / f"{name}.csv").assign(hospital=name) for name in NAMES]
    pd.concat(frames).to_csv(tmp_path / "one.csv", index=False)
    roles = {"client": "hospital", "domain": "race", "target": "outcome", "positive": "died"}
    cohort = read_cohort(TableOptions(data=str(tmp_path / "one.csv"), **roles))
    kept = torch.cat([
        rows[torch.from_numpy(~site.held_out(study.facts.test, study.training.seed))]
        for site, rows in ((study.read_site(tables[0] / f"{name}.csv", name), cohort.rows_of(torch.tensor([number])))
                           for number, name in enumerate(NAMES))
    ])  # fmt: skip
    pooled = feddar.train(cohort.rows(kept), **study.training.model_dump())
    for name, value in named_state(pooled.state).items():
        torch.testing.assert_close(named_state(run.state)[name], value, rtol=0, atol=1e-6)
    mean = next(value for name, value in named_state(run.state).items() if name.endswith("numbers.mean"))
    torch.testing.assert_close(mean, cohort.rows(kept).numbers.double().nanmean(0).float())


def test_a_column_that_is_nowhere_is_not_said_to_be_wide():
    """A site without the column has the scale 1, which may be much more than that of small numbers elsewhere."""
    columns = [Column("crp", "number", gaps=True, optional=True)]
    small = {"present": torch.tensor([2.0]), "sum": torch.tensor([2e-5]), "squares": torch.tensor([4e-10])}
    nothing = dict.fromkeys(small, torch.zeros(1))
    study = SimpleNamespace(columns=columns)
    assert [*much_wider_than_others(study, {"a": small, "b": small, "c": nothing})] == []
    wide = small | {"sum": torch.tensor([20.0]), "squares": torch.tensor([400.0])}
    assert len([*much_wider_than_others(study, {"a": small, "b": small, "c": wide})]) == 1


def test_the_model_predicts_at_sites_that_lack_the_column(tables, tmp_path):
    _, sites = trained(make_study(tables[0]), tables[0], tmp_path)
    own = find_run(sites["hospital-2"].folder / "model")
    lacking, empty = (pd.read_csv(folder / "hospital-2.csv") for folder in tables)
    scores = [own.predict_proba(table, domain=table["race"]) for table in (lacking, empty)]
    np.testing.assert_array_equal(*scores)
    command(
        "predict", sites["hospital-2"].folder / "model", tables[0] / "hospital-2.csv", "--out", "p.csv", cwd=tmp_path
    )
    found = pd.read_csv(tmp_path / "p.csv")
    np.testing.assert_allclose(found["probability_died"], scores[0][:, 1], atol=1e-6)
    assert found["note"].isna().all()
    with pytest.raises(UserError, match="has no column 'age', which the model needs"):
        own.predict_proba(lacking.drop(columns="age"), domain=lacking["race"])


def test_a_folder_of_one_table_per_client_says_which_columns_may_be_lacking(tables, tmp_path):
    wrong = command("cohort", tables[0], *ROLES, cwd=tmp_path, code=2)
    assert "or --optional lactate,seen,smoker,ward says which may be lacking." in wrong
    shown = command("cohort", tables[0], *ROLES, "--optional", ",".join(LACKED), cwd=tmp_path)
    share = pd.concat([pd.read_csv(tables[0] / f"{name}.csv") for name in NAMES])["ward"].isna().mean()
    assert f"{share:.1%}" in shown
    for name, said in (("race", "'race' is needed in every file"), ("lactose", "has no column 'lactose'")):
        assert said in command(
            "cohort", tables[0], *ROLES, "--optional", ",".join([*LACKED, name]), cwd=tmp_path, code=2
        )
