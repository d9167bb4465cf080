"""An honest but curious coordinator, which reads patients out of second-order sums: of a reply, or over sites.

The encoder is known, and a table's columns can be enumerated: of all records that there could be, those whose features
lie in the span of a domain's matrix are the patients. It works as long as a domain has fewer rows than a head has
columns, and the slope then tells their labels.
"""

from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.wire import as_request, unpack
from feddar.data.cohort import Cohort
from feddar.data.table_options import TableOptions
from feddar.federation import secure_sums
from feddar.federation.coordinator import coordinate
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.links.local import LocalLink
from feddar.federation.privacy.answer_log import read_log
from feddar.federation.privacy.second_order_floor import SecondOrderFloor
from feddar.federation.privacy.secure.summands import sum_as_reply
from feddar.federation.rehearsal import build
from feddar.federation.site import Site
from feddar.federation.study import study_of_table
from feddar.models.heads import full_matrix
from feddar.settings import Settings
from helpers.sites import local_link, make_sites, make_study, with_facts, with_floor
from helpers.sites import write_tables as write_small_tables

LEVELS = {"sex": 2, "ward": 4, "smoker": 3, "stage": 5, "sign": 6, "origin": 7}
"""The columns and how many levels each has: 5,040 records there could be."""
NAMES = ("north", "south", "west")
CURVATURES = ("pooled_curvature", "curvature", "gram")


def named(table):
    """Return a table of level numbers with names of levels, which are categories."""
    return table[list(LEVELS)].map(lambda level: f"l{level}")


def records():
    """Return all records that there could be, as patients of domain B."""
    every = pd.DataFrame(list(product(*(range(n) for n in LEVELS.values()))), columns=list(LEVELS))
    return named(every).assign(y=0, z="B")


def write_tables(folder, few, classes):
    """Write a table for each site: many rows of domain A, and ``few`` rows of B."""
    folder.mkdir()
    for number, name in enumerate(NAMES):
        rng, rows = np.random.default_rng(number), 300 + few
        table = pd.DataFrame({column: rng.integers(0, n, rows) for column, n in LEVELS.items()})
        y = (rng.random(rows) < 0.2 + 0.1 * table["stage"]) * rng.integers(1, classes, rows)
        table = named(table).assign(y=y, z=["A"] * 300 + ["B"] * few)
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def study_for(tables, method, encoder):
    options = TableOptions(data=str(tables), domain="z", target="y")
    settings = Settings(method=method, encoder=encoder, rounds=1, validation=0.0, warmup=0, last=1)
    return study_of_table(
        "attacked", options, settings, CoordinatorSettings(sites=3, min_clients=3, wait=5, timeout=60)
    )


class Curious(LocalLink):
    """The coordinator's link, which keeps every request with what comes of it: one site's reply, or the sum."""

    def __init__(self, sites):
        super().__init__({name: site.answer for name, site in sites.items()})
        self.kept = []

    def ask(self, message, sites, timeout):
        about, sent = unpack(message)
        for answer in super().ask(message, sites, timeout):
            if answer.site == NAMES[0] and about["kind"] == "ask":
                self.kept.append((as_request(about, sent), unpack(answer.content)[1]))
            yield answer

    def sum_as_reply(self, request, clients, sums, dtypes):
        self.kept.append((request, sums))
        return sum_as_reply(request, clients, sums, dtypes)


def found_in(study, link):
    """Return the numbers of the records that lie in the span of a matrix of domain B in what was kept."""
    model, _ = build(study)
    every = read_all(study, records())
    found = set()
    for request, tensors in link.kept:
        for name in (f"{kind}/1" for kind in CURVATURES if f"{kind}/1" in tensors):
            model.load(request.parameters, "all")
            features = model.frozen_features(every.x, every.domain).double()
            matrix = full_matrix(tensors[name].double()).reshape(-1, model.width, model.width)[0]
            values, vectors = torch.linalg.eigh(matrix)
            flat = vectors[:, values < 1e-9 * values[-1]]
            if flat.shape[1]:
                outside = (features @ flat).norm(dim=1) / features.norm(dim=1)
                found |= set((outside < 1e-5).nonzero().flatten().tolist())
    return found


def read_all(study, table):
    return Cohort.from_arrays(
        table[list(LEVELS)], table["y"], domain=table["z"], client=["a"] * len(table),
        objective=study.objective, domains=study.facts.domains, columns=study.columns,
    )  # fmt: skip


def attacked(tmp_path, few, floor, secure=False, method="feddar", encoder=None, classes=2):
    """Return the records of domain B at a site, at all of them if sums are secure, and those the coordinator finds."""
    tables = write_tables(tmp_path / "tables", few, classes)
    study = with_facts(study_for(tables, method, encoder), floor=float(floor), secure=secure)
    sites = {
        name: Site(name, tables / f"{name}.csv", tmp_path / name, study=study, say=lambda _: None) for name in NAMES
    }
    link = Curious(sites)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_sums, "sum_as_reply", link.sum_as_reply)
        coordinate(study, link, tmp_path / "out")
    trained = [sites[name].participation.client.train for name in (NAMES if secure else NAMES[:1])]
    every = read_all(study, records()).codes.tolist()
    truth = {every.index(row) for each in trained for row in each.codes[each.domain == 1].tolist()}
    return truth, found_in(study, link)


WAYS = {
    "pooled heads": {"encoder": "mlp"},
    "credibility of large heads": {"encoder": "mlp", "classes": 5},
    "second-order aggregation": {"encoder": "mlp", "method": "feddar-sa"},
    "closed form": {"encoder": "mlp", "method": "analytic"},
}


@pytest.mark.parametrize(("secure", "few"), [(False, 12), (True, 7)])
@pytest.mark.parametrize("way", WAYS)
def test_without_a_floor_patients_can_be_read(tmp_path, way, secure, few):
    """So that the test below can fail: this is the attack, and it works on a reply and on a sum over three sites."""
    truth, found = attacked(tmp_path, few=few, floor=0, secure=secure, **WAYS[way])
    assert len(truth) >= 8
    assert truth <= found
    assert len(found) <= 2 * len(truth)


@pytest.mark.parametrize("few", [7, 20, 40])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "defaults"])
def test_with_the_floor_of_a_study_nobody_can(tmp_path, way, few, secure):
    truth, found = attacked(tmp_path, few=few, floor=3, secure=secure, **WAYS.get(way, {}))
    assert truth
    assert not found


def test_the_floor_is_for_each_domain_and_each_site():
    floor = SecondOrderFloor(3.0, 10)
    assert floor.few(torch.tensor([29, 30, 0])) == {"0", "2"}
    assert "from 30 rows on, 3 for each of a head's 10 columns" in floor.promise


def test_a_site_without_curvature_counts_in_the_average_of_a_head(tmp_path):
    """Where no site may send curvature, second-order aggregation is the weighted average."""
    write_small_tables(tmp_path / "data")
    found = {}
    for method, floor in (("feddar-sa", 1e6), ("feddar-wa", 0), ("feddar-sa", 0)):
        study = with_floor(make_study(tmp_path / "data", method=method, validation=0.0), floor)
        folder = tmp_path / f"{method}-{floor}"
        run = coordinate(study, local_link(make_sites(tmp_path / "data", folder / "kept")), folder / "out")
        found[method, floor] = run.state.heads
    held_back, average, second = found.values()
    for key, head in average.items():
        torch.testing.assert_close(held_back[key], head)
    assert any(not torch.allclose(second[key], head, rtol=1e-3) for key, head in average.items())


def test_evidence_of_one_domain_among_several_says_nothing_of_their_differences(tmp_path):
    write_small_tables(tmp_path / "data", rows=90)
    study = make_study(tmp_path / "data", method="feddar")
    model, _ = build(study)
    only_one = with_floor(study, 60 / model.width)  # one site has 60 rows and more, of A
    run = coordinate(only_one, local_link(make_sites(tmp_path / "data", tmp_path / "kept")), tmp_path / "out")
    sent = {len(entry.tensors) for entry in read_log(tmp_path / "kept" / "hospital-3").entries if entry.phase == "pool"}
    assert sent == {3}  # slope and curvature of A, and errors
    assert run.state.difference is None
    whole = coordinate(study, local_link(make_sites(tmp_path / "data", tmp_path / "all")), tmp_path / "whole")
    assert whole.state.difference is not None
