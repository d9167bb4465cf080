"""An honest but curious coordinator of secure sums, which looks for what one site alone has.

Here is what it can find, so that documentation and notes of a run say no more and no less than that.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.wire import unpack
from feddar.federation import secure_sums
from feddar.federation import site as site_module
from feddar.federation.coordinator import CoordinatorEvents, coordinate
from feddar.federation.links.link import Answer
from feddar.federation.links.local import LocalLink
from feddar.federation.privacy.secure.summands import sum_as_reply, summands
from feddar.federation.site import Site
from feddar.federation.study import Study
from helpers.sites import NAMES, make_study, with_facts, write_tables

FOUR = (*NAMES, "hospital-4")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Give tables of four sites which hold every domain; hospital-1 alone has a test, and a ward."""
    folder = write_tables(tmp_path_factory.mktemp("tables"), rows=120)
    for number, name in enumerate(FOUR):
        rng, table = np.random.default_rng([3, number]), pd.read_csv(folder / f"{NAMES[number % 3]}.csv")
        table["race"] = rng.choice(["A", "B", "C"], len(table), p=[0.5, 0.3, 0.2])
        table["crp"] = rng.gamma(2, 10, len(table)).round(1) if name == FOUR[0] else np.nan
        table["ward"] = np.where(rng.random(len(table)) < 0.2, "burns" if name == FOUR[0] else "er", table["ward"])
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def study_of(tables, **training) -> Study:
    study = with_facts(make_study(tables, **({"rounds": 2, "validation": 0.0} | training)), secure=True)
    return replace(study, coordinator=study.coordinator.model_copy(update={"sites": 4, "min_clients": 3}))


class Lossy(LocalLink):
    """A link that loses the answers of a site to a phase of a round."""

    def __init__(self, sites, site="", place=()):
        super().__init__({name: each.answer for name, each in sites.items()})
        self.site, self.place = site, place

    def ask(self, message, sites, timeout):
        about, _ = unpack(message)
        lost = about["kind"] == "ask" and (about["round"], about["phase"]["name"]) == self.place
        for answer in super().ask(message, sites, timeout):
            yield Answer(answer.site, problem="lost") if lost and answer.site == self.site else answer


def run_of(tables, folder, study, monkeypatch, *lost):
    """Run a study; return what sites add to sums and say, what the coordinator says, and all sums that it learns."""
    heard, said, added, learned = {name: [] for name in FOUR}, [], {}, {}
    sites = {name: Site(name, tables / f"{name}.csv", folder / name, say=heard[name].append) for name in FOUR}

    def kept(request, clients, sums, dtypes):
        learned[request.round, request.phase.name] = sums
        return sum_as_reply(request, clients, sums, dtypes)

    def adds(request, reply):
        added[reply.client, request.round, request.phase.name] = summands(request, reply)
        return summands(request, reply)

    monkeypatch.setattr(secure_sums, "sum_as_reply", kept)
    monkeypatch.setattr(site_module, "summands", adds)
    coordinate(study, Lossy(sites, *lost), folder / "out", events=CoordinatorEvents(say=said.append))
    return added, heard, said, learned


def test_a_column_and_a_level_that_one_site_has_are_its_own_sums_and_are_named(tables, tmp_path, monkeypatch):
    study = study_of(tables)
    added, _, said, learned = run_of(tables, tmp_path, study, monkeypatch)
    own, census = added[FOUR[0], 0, "census"], learned[0, "census"]
    place = [column.name for column in study.columns if column.is_numeric].index("crp")
    assert float(own["present"][place]) == float(own["counts"].sum()) > 0
    for name in ("present", "sum", "squares"):
        assert float(census[name][place]) == pytest.approx(float(own[name][place]))
    told = [line for line in said if line.startswith("Fewer than 3 sites have ")]
    named = "crp, ward missing" if bool(census["levels"][0]) else "crp"
    assert told == [
        f"Fewer than 3 sites have {named}, ward 'burns': what sums and the model say of these is of those sites."
    ]
    optional = with_facts(study)
    optional = replace(
        optional, columns=tuple(replace(column, optional=column.name == "crp") for column in study.columns)
    )
    _, heard, _, _ = run_of(tables, tmp_path / "optional", optional, monkeypatch)
    warned = (
        "sites may lack crp: if fewer than 3 sites have such a column, the coordinator sees sums of these sites alone"
    )
    assert all(warned in lines for lines in heard.values())


def test_columns_that_all_have_are_not_named(tables, tmp_path, monkeypatch):
    columns = ("age", "lactate")
    study = study_of(tables)
    study = replace(study, columns=tuple(column for column in study.columns if column.name in columns))
    *_, said, _ = run_of(tables, tmp_path, study, monkeypatch)
    assert not [line for line in said if line.startswith("Fewer than 3 sites have ")]


@pytest.mark.parametrize(("rate", "found"), [(0.5, False), (1e-7, True)])
def test_of_a_site_that_drops_out_the_difference_tells_its_rows(tables, tmp_path, monkeypatch, rate, found):
    """What it has trained, too, if the model has hardly moved from one round to the next."""
    study = study_of(
        tables, method="feddar-wa", lr=rate, schedule="constant", dtype="float64", optimizer="sgd", batch_size=999
    )
    added, *_, learned = run_of(tables, tmp_path, study, monkeypatch, FOUR[1], (2, "heads"))
    difference = {name: value - learned[2, "heads"][name] for name, value in learned[1, "heads"].items()}
    own = added[FOUR[1], 1, "heads"]
    for name in own:
        if name.startswith("weight/"):
            assert float(difference[name]) == pytest.approx(float(own[name]))
    heads = [name for name in own if name.startswith("heads/")]
    ours, theirs = (torch.stack([each[name] for name in heads]) for each in (difference, own))
    away = float((ours - theirs).norm() / theirs.norm())
    assert (away < 1e-3) if found else (away > 0.3)
