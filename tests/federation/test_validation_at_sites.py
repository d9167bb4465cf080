"""Validation between sites: only sums leave them, and each ends with the model, and its own part, of the best round."""

from dataclasses import replace

import pytest
import torch

import feddar
from feddar.algorithm.names import named_own, named_parameters, named_state
from feddar.algorithm.protocol import BLENDS, VALIDATION, OwnState, Phase, Request
from feddar.algorithm.rounds import STEPS_TRIED
from feddar.data.cohort import Cohort
from feddar.evaluation.validation import validation_losses
from feddar.federation.coordinator import CoordinatorEvents, coordinate
from feddar.federation.privacy.minimum_cell import patients_by_domain
from feddar.federation.rehearsal import what_leaves
from feddar.federation.site import OwnParameters
from feddar.federation.study import Study
from feddar.results.run_folder import read_model
from helpers.sites import NAMES, local_link, make_sites, make_study, write_tables

EAGER = {"rounds": 12, "lr": 0.05, "batch_size": 8, "patience": 4, "validation": 0.25}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("data"), rows=90)


def same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def whole(sites) -> Cohort:
    """Return what all sites train on and validate with, in one cohort, in the order of their tables."""
    parts = []
    for site in sites.values():
        study = site.participation.study
        parts.append(study.divided(study.read_site(site.data, site.name))[0])
    x = tuple(torch.cat(inputs) for inputs in zip(*(part.x for part in parts), strict=True))
    client = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    y, domain = (torch.cat([getattr(part, name) for part in parts]) for name in ("y", "domain"))
    return Cohort(x, y, domain, client, parts[0].domains, NAMES, parts[0].objective, columns=parts[0].columns)


@pytest.mark.parametrize("method", ["feddar", "fedavg", "fedrep"])
def test_sites_come_to_what_one_machine_does(data, tmp_path, method):
    study = make_study(data, method=method, **EAGER)
    sites = make_sites(data, tmp_path / "kept", min_cell=1)
    between = coordinate(study, local_link(sites), tmp_path / "out")
    run = feddar.train(whole(sites), **study.training.model_dump())
    losses = [torch.tensor(validation_losses(each.history).to_numpy()) for each in (between, run)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert between.round == run.round < len(losses[0]) < EAGER["rounds"]
    same_tensors(named_parameters(between.state.in_use), named_parameters(run.state.in_use))
    for name in NAMES:
        about, state, own, _ = read_model(sites[name].folder / "model")
        assert about["round"] == run.round
        same_tensors(named_parameters(state.in_use), named_parameters(run.state.in_use))
        if run.method.keeps_own:
            same_tensors(named_own(own[name]), named_own(run.own[name]))


def test_a_site_keeps_its_own_parameters_of_the_best_round(tmp_path):
    kept = OwnParameters(tmp_path)
    for number in range(1, 9):
        for step in (1, 2):
            best = 3 if number > 3 else 0
            request = Request(Phase("heads"), number, 0, step=step, best=best)
            kept.keep(request, OwnState(extra={"mix": torch.tensor([number, step])}))
    assert kept.after_round(3).extra["mix"].tolist() == [3, 2]
    assert kept.after_round(1).extra["mix"].tolist() == [3, 2]  # as if it had joined in round 3
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["3-2", "6-2", "7-1", "7-2", "8-1", "8-2"]


def test_a_run_that_stopped_early_is_over(data, tmp_path):
    study = make_study(data, method="fedrep", **EAGER)
    sites, said = make_sites(data, tmp_path / "kept"), []
    run = coordinate(study, local_link(sites), tmp_path / "out")
    again = coordinate(
        study, local_link(sites), tmp_path / "out", resume=True, events=CoordinatorEvents(say=said.append)
    )
    done = run.standing.position.round
    assert f"all {done} rounds are done; sites that come get the model once more" in said
    assert (again.round, again.standing.position.round) == (run.round, done)
    same_tensors(named_state(again.state), named_state(run.state))


@pytest.mark.parametrize("least", [1, 5])
def test_only_sums_over_enough_patients_leave_a_site(data, tmp_path, least):
    study = make_study(data, **EAGER)
    sites = make_sites(data, tmp_path / "kept", min_cell=least)
    coordinate(
        replace(study, training=study.training.model_copy(update={"rounds": 1})), local_link(sites), tmp_path / "o"
    )
    for site in sites.values():
        client = site.participation.client
        for part in (client.train, client.validation):
            patients = patients_by_domain(part)
            assert ((patients == 0) | (patients >= least)).all()
    frame = what_leaves(study, torch.tensor([9, 9, 0]))
    rows = frame[frame["phase"] == "validate"][["tensor", "shape", "type"]]
    assert [*rows.itertuples(index=False, name=None)] == [
        (VALIDATION, (3, 2), "float64"), (BLENDS, (len(STEPS_TRIED),), "float64"),
    ]  # fmt: skip


def test_a_study_says_the_share(data, tmp_path):
    study = make_study(data)
    assert study.training.validation == 0.1
    study.write(tmp_path / "study.toml")
    assert "validation = 0.1" in (tmp_path / "study.toml").read_text()
    tables = study.tables()
    del tables["training"]["validation"]
    assert Study.from_tables(tables, "here").digest == study.digest


@pytest.mark.parametrize(
    "sums", [[[-1.0, 2.0]] * 3, [[1.0, 0.0]] * 3, [[1.0, 2.5]] * 3, [[1.0, 1e12]] * 3, [[float("nan"), 2.0]] * 3]
)
def test_impossible_sums_are_left_out(data, tmp_path, sums):
    from feddar.algorithm.wire import pack, unpack
    from feddar.federation.links.local import LocalLink

    study = make_study(data, **EAGER | {"rounds": 1})
    sites = make_sites(data, tmp_path / "kept", min_cell=1)

    def wrong(message):
        about, tensors = unpack(sites[NAMES[0]].answer(message))
        if about.get("phase") == "validate":
            tensors[VALIDATION] = torch.tensor(sums, dtype=torch.float64)
        return pack(about, tensors)

    handlers = {name: site.answer for name, site in sites.items()} | {NAMES[0]: wrong}
    run = coordinate(study, LocalLink(handlers), tmp_path / "out")
    others = [site.participation.client.validation for name, site in sites.items() if name != NAMES[0]]
    counted = run.history[(run.history["split"] == "validation") & (run.history["scope"] == "all")]["count"]
    assert counted.item() == sum(map(len, others))
