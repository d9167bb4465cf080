"""Domains of several columns: crossed, nested and ordered; what they share, and what is refused."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import feddar
from feddar.data.cohort import Cohort
from feddar.data.domain_structure import MOST_BINS, Factor, bin_names, domains_in
from feddar.errors import UserError
from feddar.results.run_folder import read_description
from helpers.command import feddar as command

ROLES = ["--client", "site", "--target", "died"]
FAST = ["--schedule", "constant", "--threads", "1"]


def make_table(n=240, seed=0):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "site": rng.choice(["a", "b"], n),
            "race": rng.choice(["White", "Black"], n),
            "sex": rng.choice(["F", "M"], n),
            "age": rng.integers(20, 80, n),
            "scanner": rng.choice(["s1", "s2", "s3"], n),
            "lactate": rng.normal(size=n).round(3),
        }
    )
    table["vendor"] = table["scanner"].map({"s1": "X", "s2": "X", "s3": "Y"})
    return table.assign(died=np.where(rng.random(n) < 1 / (1 + np.exp(-table["lactate"])), "yes", "no"))


@pytest.fixture
def table(tmp_path):
    made = make_table()
    made.to_csv(tmp_path / "study.csv", index=False)
    return made


def test_crossed_columns_share_a_part_for_each_level(table):
    names, structure = domains_in(table, "race,sex")
    assert structure.domains == ["Black, F", "Black, M", "White, F", "White, M"]
    assert names[0] == f"{table['race'][0]}, {table['sex'][0]}"
    races, sexes = structure.shared()
    assert (races @ races.T).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert (sexes @ sexes.T).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]


def test_nested_domains_are_named_by_the_finer_column_and_share_the_coarser_one(table):
    names, structure = domains_in(table, "scanner/vendor")
    assert structure.domains == ["s1", "s2", "s3"]
    assert names.tolist() == table["scanner"].tolist()
    (vendors,) = structure.shared()
    assert (vendors @ vendors.T).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_what_says_no_more_than_the_domains_themselves_is_not_shared(table):
    assert domains_in(table, "race")[1] is None
    _, structure = domains_in(table.assign(one="same"), "race,one")
    assert structure.shared() == []
    train = Cohort.from_arrays(table[["lactate"]], table["died"], domain=table[["race"]], client=table["site"])
    plain = Cohort.from_arrays(table[["lactate"]], table["died"], domain=table["race"], client=table["site"])
    assert train.fingerprint() == plain.fingerprint()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-500, 500), min_size=2, max_size=80).filter(lambda values: len(set(values)) > 1),
    st.sampled_from([1.0, 0.013, 1e4]),
)
def test_bins_are_few_in_order_and_hold_all_numbers_and_none_is_empty(values, scale):
    table = pd.DataFrame({"age": np.array(values) * scale})
    names, structure = domains_in(table, "age:spline")
    (factor,) = structure.factors
    assert 1 <= len(structure.domains) <= MOST_BINS
    assert structure.domains == bin_names(factor.edges)
    assert set(names) == set(structure.domains)
    assert factor.edges[0] <= table["age"].min() <= table["age"].max() < factor.edges[-1]
    place = names.map(structure.domains.index)[table["age"].argsort()]
    assert place.is_monotonic_increasing
    assert not structure.outside([table["age"]])
    if len(structure.domains) > 1:
        (smooth,) = structure.shared()
        alike = smooth @ smooth.T
        torch.testing.assert_close(alike.diagonal(), torch.ones(len(alike)).double())
        assert (alike[0].diff() < 0).all()


def test_ages_get_round_bins_in_their_order_and_numbers_outside_the_nearest(table):
    _, structure = domains_in(table, "age:spline")
    (factor,) = structure.factors
    assert structure.domains[0].startswith("20-")
    assert all(edge % 5 == 0 for edge in factor.edges)
    given = pd.Series([3, 20, 101, np.nan])
    last = structure.domains[-1]
    assert structure.names([given])[:3].tolist() == [structure.domains[0], structure.domains[0], last]
    assert structure.names([given]).isna().tolist() == [False, False, False, True]
    assert structure.outside([given]) == {
        0: f"age 3 is outside of training: as {structure.domains[0]}",
        2: f"age 101 is outside of training: as {last}",
    }


def test_a_column_whose_name_has_a_sign_in_it_is_taken_as_it_is(table, tmp_path):
    odd = table.rename(columns={"race": "race/ethnicity", "sex": "sex, at birth"})
    odd.to_csv(tmp_path / "odd.csv", index=False)
    said = command("cohort", "odd.csv", "--domain", "race/ethnicity", *ROLES, cwd=tmp_path)
    assert "domains: 2" in said
    said = command("cohort", "odd.csv", "--domain", 'race/ethnicity,"sex, at birth"', *ROLES, cwd=tmp_path)
    assert "domains: 4" in said


REFUSED = {
    "lactate,": "lacks a name beside a comma",
    "scanner/": "lacks a name beside a comma or '/'",
    "scanner/vendor:spline": "is ordered and belongs to something",
    "race:spline": "line 2: column 'race' holds",
    "scanner/race": "scanner 's",
    "race/sex": "--domain sex,race",
    "race,age:splin": "no column",
    "race,race": "is named twice",
}


@pytest.mark.parametrize(("domain", "why"), REFUSED.items())
def test_what_makes_no_domain_is_refused(table, tmp_path, domain, why):
    said = " ".join(command("run", "study.csv", "--domain", domain, *ROLES, cwd=tmp_path, code=2).split())
    assert why in said
    assert not [*tmp_path.glob("runs/*")]


@pytest.mark.parametrize("domain", ["race,sex", "scanner/vendor", "age:spline", "race,age:spline"])
def test_domains_of_all_kinds_are_trained_kept_resumed_and_predicted(table, tmp_path, domain):
    again = ["run", "study.csv", "--domain", domain, *ROLES, *FAST, "--out", "my-run"]
    command(*again, "--rounds", "2", cwd=tmp_path)
    run = feddar.load(tmp_path / "my-run")
    _, structure = domains_in(table, domain)
    assert run.cohort.structure == structure
    assert len(run.state.domain_spreads) == 3 + 2 * len(structure.shared())
    assert "age" in [column.name for column in run.cohort.columns]  # a bin is not the number itself
    command(*again, "--resume", "--rounds", "3", cwd=tmp_path)
    new = table.head(4).drop(columns=["died", *(["vendor"] if "vendor" in domain else [])])
    new["age"] = [30, 40, 5, 99]
    new.to_csv(tmp_path / "new.csv", index=False)
    command("predict", "my-run", "new.csv", "--out", "p.csv", "--unknown-domain", "average", cwd=tmp_path)
    predicted = pd.read_csv(tmp_path / "p.csv", keep_default_na=False)
    columns = [new[factor.column] for factor in structure.naming]
    assert predicted["domain"].tolist() == structure.names(columns).map(str).tolist()
    outside = [row for row, note in enumerate(predicted["note"]) if "is outside of training: as" in note]
    assert outside == ([2, 3] if "age" in domain else [])
    about = json.loads(json.dumps(read_description(tmp_path / "my-run")["factors"]))
    assert [Factor(**each) for each in about] == list(structure.factors)


def test_a_data_frame_of_domains_crosses_its_columns(table):
    cohort = Cohort.from_arrays(table[["lactate"]], table["died"], domain=table[["race", "sex"]])
    joined = Cohort.from_arrays(table[["lactate"]], table["died"], domain=table["race"] + ", " + table["sex"])
    assert cohort.domains == joined.domains
    assert torch.equal(cohort.domain, joined.domain)
    assert cohort.structure == domains_in(table, "race,sex")[1]
    assert cohort.fingerprint() != joined.fingerprint()
    with pytest.raises(UserError, match="leave out domains"):
        Cohort.from_arrays(table[["lactate"]], table["died"], domain=table[["race", "sex"]], domains=["a"])


def test_a_run_predicts_by_the_columns_of_its_domains(table, tmp_path):
    x, roles = table[["lactate"]], {"client": table["site"]}
    train = Cohort.from_arrays(x, table["died"], domain=table[["race", "sex"]], **roles)
    run = feddar.train(train, rounds=1, threads=1)
    by_columns = run.predict_proba(x[:9], domain=table[["sex", "race"]][:9])
    np.testing.assert_array_equal(by_columns, run.predict_proba(x[:9], domain=train.domain_names[:9]))
    with pytest.raises(UserError, match="domains are made of sex"):
        run.predict(x[:9], domain=table[["race"]][:9])
    _, structure = domains_in(table, "age:spline")
    names = structure.names([table["age"]])
    run = feddar.train(
        Cohort.from_arrays(x, table["died"], domain=names, structure=structure, **roles), rounds=1, threads=1
    )
    found = run.predictions(x[:2], domain=pd.DataFrame({"age": [200, 30]}))
    assert found["domain_used"].tolist() == [structure.domains[-1], structure.names([pd.Series([30])])[0]]
    assert found["note"].tolist() == [f"age 200 is outside of training: as {structure.domains[-1]}", ""]
