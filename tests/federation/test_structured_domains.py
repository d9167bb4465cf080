"""Domains of several columns between sites: the same weights as in one process, and tables that do not agree."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.data.table_options import TableOptions
from feddar.errors import UserError
from feddar.federation.coordinator import coordinate
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.study import DisagreementError, Study, study_of_table
from feddar.results.file_prediction import find_run
from feddar.settings import Settings
from helpers.sites import NAMES, local_link, make_sites, with_facts, write_tables

LINES = {"A": "old", "B": "old", "C": "new"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Give a folder of tables with lines of machines, to which the machines of a domain belong."""
    folder = write_tables(tmp_path_factory.mktemp("tables"), rows=90)
    for path in folder.glob("*.csv"):
        table = pd.read_csv(path)
        table.assign(line=table["race"].map(LINES)).to_csv(path, index=False)
    return folder


def study_of(tables, domain, **facts):
    options = TableOptions(data=str(tables), domain=domain, target="outcome", positive="died")
    settings = Settings(rounds=3, batch_size=16, lr=1e-2, head_epochs=2)
    coordinator = CoordinatorSettings(sites=3, min_clients=2, wait=5, timeout=30)
    return with_facts(study_of_table("s", options, settings, coordinator), **{"floor": 0.0, "secure": False, **facts})


@pytest.mark.parametrize("domain", ["race,ward", "race/line", "age:spline"])
def test_sites_train_the_same_as_one_process_does(tables, tmp_path, domain):
    study = study_of(tables, domain)
    study.write(tmp_path / "study.toml")
    assert Study.read(tmp_path / "study.toml").digest == study.digest
    study = replace(study, training=study.training.model_copy(update={"validation": 0.0}))
    sites = make_sites(tables, tmp_path / "kept", min_cell=1)
    run = coordinate(study, local_link(sites), tmp_path / "out")
    parts = [site.participation.client.train for site in sites.values()]
    whole = [torch.cat(each) for each in zip(*(part.x for part in parts), strict=True)]
    client = torch.arange(3).repeat_interleave(torch.tensor([len(part) for part in parts]))
    y, domains = (torch.cat([getattr(part, name) for part in parts]) for name in ("y", "domain"))
    together = replace(parts[0], x=tuple(whole), y=y, domain=domains, client=client, clients=NAMES)
    assert together.structure == study.structure
    settings = study.training.model_dump() | {"encoder": study.training.encoder}
    expected = named_state(feddar.train(together, **settings).state)
    found = named_state(run.state)
    assert len(found["domain_spreads"]) == 3 + 2 * len(study.structure.shared())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: name + text)
    assert find_run(tmp_path / "kept" / NAMES[0] / "model").cohort.structure == study.structure


def test_secure_sums_of_structured_domains(tables, tmp_path):
    study = study_of(tables, "age:spline", secure=True)
    run = coordinate(study, local_link(make_sites(tables, tmp_path / "kept")), tmp_path / "out")
    assert len(run.state.domain_spreads) == 5


def test_a_table_that_nests_otherwise_than_the_study_is_named(tables, tmp_path):
    study = study_of(tables, "race/line")
    table = pd.read_csv(tables / "hospital-1.csv")
    other = table.assign(line=table["line"].where(table["race"] != "B", "new"))
    other.to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(DisagreementError, match="domain 'B' belongs to line 'new' here, and to 'old' in the study"):
        study.read_site(tmp_path / "other.csv", "hospital-1")


def test_an_age_outside_of_the_study_has_the_nearest_bin_and_a_text_is_named(tables, tmp_path):
    study = study_of(tables, "age:spline")
    table = pd.read_csv(tables / "hospital-1.csv")
    table.loc[0, "age"] = 140
    table.to_csv(tmp_path / "old.csv", index=False)
    cohort = study.read_site(tmp_path / "old.csv", "hospital-1")
    assert cohort.domain[0] == len(study.facts.domains) - 1
    table.astype({"age": object}).assign(age=["old", *table["age"][1:]]).to_csv(tmp_path / "text.csv", index=False)
    with pytest.raises(DisagreementError, match="line 2: column 'age' holds 'old', which is no number"):
        study.read_site(tmp_path / "text.csv", "hospital-1")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"levels": ("A",)}, "levels for 3 domains"),
        ({"column": "other"}, "factors are not those of the columns"),
        ({"edges": (3.0, 1.0)}, "edges that do not rise"),
        ({"edges": (1.0, 3.0)}, "other levels than its edges say"),
    ],
)
def test_a_study_whose_factors_contradict_it_is_refused(tables, wrong, why):
    study = study_of(tables, "race/line")
    first, *rest = study.facts.factors
    with pytest.raises(UserError, match=why):
        Study.from_tables(with_facts(study, factors=(first.model_copy(update=wrong), *rest)).tables(), "the study")
