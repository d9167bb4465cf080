"""Weights between sites: the same model as on one machine, plain and secure, and nothing said of few patients."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.label_shift import LABELS
from feddar.algorithm.names import named_state
from feddar.algorithm.offsets import OFFSETS
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import label_shift, phases
from feddar.algorithm.wire import MessageError
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.federation.coordinator import EXCHANGES_FILE, coordinate
from feddar.federation.privacy.minimum_cell import MinimumCell
from feddar.federation.refused import RefusedError
from feddar.federation.rehearsal import build, what_leaves
from feddar.federation.reply_checks import require_census
from feddar.federation.request_checks import PlannedRequests
from feddar.federation.study import DisagreementError, Study
from helpers.cohorts import make_cohort
from helpers.marks import first
from helpers.sites import NAMES, local_link, make_sites, make_study, with_facts, write_tables

BALANCED = {"class_weight": "balanced", "encoder": "mlp", "rounds": 2, "dtype": "float64", "batched": False}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Give tables with weights, of which every site holds every domain; hospital-1 has the heaviest rows."""
    folder = write_tables(tmp_path_factory.mktemp("tables"), rows=90)
    for number, name in enumerate(NAMES):
        rng, table = np.random.default_rng([9, number]), pd.read_csv(folder / f"{name}.csv")
        table["race"] = rng.choice(["A", "B", "C"], len(table), p=[0.5, 0.3, 0.2])
        table["survey"] = (rng.gamma(2, 100, len(table)) * (3 - number) + 1).round(1)
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def weighted_study(tables, secure=False, **training) -> Study:
    study = make_study(tables, **(BALANCED | training))
    columns = tuple(column for column in study.columns if column.name != "survey")
    return with_facts(replace(study, columns=columns), sample_weight="survey", secure=secure)


def run_of(tables, out, secure, min_cell=5, **training):
    study, sites = weighted_study(tables, secure, **training), make_sites(tables, out / "kept", min_cell=min_cell)
    return coordinate(study, local_link(sites), out / "out"), sites


def pooled(parts: list[Cohort]) -> Cohort:
    """What all sites train on, in one cohort."""
    first, joined = parts[0], {}
    for name in ("y", "domain", "weight"):
        joined[name] = torch.cat([getattr(part, name) for part in parts])
    x = tuple(torch.cat(inputs) for inputs in zip(*(part.x for part in parts), strict=True))
    client = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    return replace(first, x=x, client=client, clients=NAMES, **joined)


def assert_same(one, other):
    one, other = named_state(one.state), named_state(other.state)
    assert one.keys() - {"focus"} == other.keys() - {"focus"}  # the range of scores is of sites alone
    for name in one.keys() - {"focus"}:
        torch.testing.assert_close(
            one[name], other[name], rtol=1e-7, atol=1e-8, msg=lambda text, name=name: name + text
        )


def assert_no_problems(folder):
    assert pd.read_csv(folder / "out" / EXCHANGES_FILE)["problem"].isna().all()


@pytest.mark.parametrize("method", first(["feddar"], ["feddar", "feddar-sa", "fedavg"]))
def test_plain_secure_stacked_and_on_one_machine_are_one(tables, tmp_path, method):
    """Without validation and minimum cell, sites train on what one machine would."""
    settings = {"method": method, "validation": 0, "min_cell": 1}
    plain, sites = run_of(tables, tmp_path / "plain", secure=False, **settings)
    secure, _ = run_of(tables, tmp_path / "secure", secure=True, **settings)
    assert_no_problems(tmp_path / "plain")
    assert_no_problems(tmp_path / "secure")
    assert_same(plain, secure)
    together = pooled([site.participation.client.train for site in sites.values()])
    for batched in (False, True):
        assert_same(plain, feddar.train(together, **plain.settings.model_dump() | {"batched": batched}))
    light = replace(together, weight=None)
    other = named_state(feddar.train(light, **plain.settings.model_dump() | {"class_weight": None}).state)
    assert not torch.allclose(other["heads/all" if method == "fedavg" else "heads/0"], heads_of(plain))


@pytest.mark.parametrize("method", first(["feddar-sa"], ["feddar-sa", "fedavg"]))
def test_label_shift_is_the_same_plain_secure_and_on_one_machine(tables, tmp_path, method):
    settings = {"method": method, "validation": 0, "min_cell": 1, "class_weight": None, "label_shift": True}
    plain, sites = run_of(tables, tmp_path / "plain", secure=False, **settings)
    secure, hidden = run_of(tables, tmp_path / "secure", secure=True, **settings)
    assert_no_problems(tmp_path / "plain")
    assert_no_problems(tmp_path / "secure")
    assert not plain.own and not secure.own
    together = pooled([site.participation.client.train for site in sites.values()])
    inside = feddar.train(together, **plain.settings.model_dump())
    for name in NAMES:
        kept = inside.own[name].extra[OFFSETS]
        assert kept.any()
        for site in (sites[name], hidden[name]):
            torch.testing.assert_close(site.participation.client.own.extra[OFFSETS], kept, rtol=1e-7, atol=1e-8)


def test_rates_of_labels_that_no_study_has_are_refused(tables):
    study = weighted_study(tables, method="feddar-sa", class_weight=None, label_shift=True)
    planned_requests = PlannedRequests(study, build(study)[0], torch.tensor([30, 30, 30]))
    phase = label_shift(study.training.row())
    rates = torch.full((3, 1, 2), 0.5, dtype=torch.float64)
    request = Request(phase, 1, 0, label_rates=rates)
    planned_requests.require(request)
    for wrong in (None, rates[:1], rates * 2, -rates, rates * torch.nan):
        with pytest.raises(RefusedError, match="no such rates of labels in the label-shift phase"):
            planned_requests.require(replace(request, label_rates=wrong))
    with pytest.raises(RefusedError, match="the label-shift phase has no model"):
        planned_requests.require(replace(request, parameters=build(study)[1]))
    for other in (weighted_study(tables, method="feddar-sa"), weighted_study(tables, method="fedavg")):
        with pytest.raises(RefusedError, match="the study has no such label-shift phase in round 1"):
            PlannedRequests(other, build(other)[0], torch.tensor([30, 30, 30])).require(request)


def test_sums_of_labels_that_no_samples_have_are_refused():
    counts, labels = torch.tensor([4, 6]), torch.tensor([[[1.0, 3.0]], [[6.0, 0.0]]], dtype=torch.float64)
    require_census({"counts": counts, LABELS: labels}, 100)
    for wrong in (labels * 2, labels.flip(0), labels - torch.tensor([2.0, -2.0])):
        with pytest.raises(MessageError, match="sums of classes by domain that no samples have"):
            require_census({"counts": counts, LABELS: wrong}, 100)


def heads_of(run):
    return next(value for name, value in named_state(run.state).items() if name.startswith("heads/"))


@pytest.mark.parametrize("method", first(["fedminmax"], ["feddar", "fedminmax"]))
def test_with_validation_and_minimum_cell_a_secure_sum_is_the_sum(tables, tmp_path, method):
    runs = [run_of(tables, tmp_path / str(secure), secure, method=method)[0] for secure in (False, True)]
    assert_same(*runs)
    assert_no_problems(tmp_path / "False")
    assert_no_problems(tmp_path / "True")
    losses = [
        run.history[run.history["split"] != "test"].set_index(["round", "split", "scope", "name"]) for run in runs
    ]
    pd.testing.assert_series_equal(losses[0]["value"], losses[1]["value"], rtol=1e-6)
    assert (losses[0]["count"] == losses[0]["count"].round()).all() and losses[0]["count"].max() > 1  # samples


def test_every_tensor_is_shown_beforehand(tables):
    leaving = what_leaves(weighted_study(tables), torch.tensor([30, 30, 30]))
    census = leaving[leaving["phase"] == "census"].set_index("tensor")["shape"]
    assert census["weights"] == (3,) and census["class_sums"] == (1, 2)


def test_a_site_whose_weights_are_wrong_does_not_join(tables, tmp_path):
    study, given = weighted_study(tables), pd.read_csv(tables / "hospital-1.csv")
    for wrong, why in (("-2", "negative"), ("inf", "infinite"), ("heavy", "not a number"), (None, "is empty there")):
        table = given.astype({"survey": object})
        table.loc[4, "survey"] = wrong
        table.to_csv(tmp_path / "site.csv", index=False)
        with pytest.raises(DisagreementError, match=f"line 6: .*{why}") as error:
            study.read_site(tmp_path / "site.csv", "site")
        assert [each.what for each in error.value.found] == ["column 'survey'"]
    given.assign(survey=0).to_csv(tmp_path / "site.csv", index=False)
    with pytest.raises(DisagreementError, match="weights must add up to a positive number"):
        study.read_site(tmp_path / "site.csv", "site")
    given.drop(columns="survey").to_csv(tmp_path / "site.csv", index=False)
    with pytest.raises(DisagreementError, match="there is no column 'survey'"):
        study.read_site(tmp_path / "site.csv", "site")


def test_the_study_names_the_column_and_the_setting(tables, tmp_path):
    study = weighted_study(tables)
    study.write(tmp_path / "study.toml")
    again = Study.read(tmp_path / "study.toml")
    assert (again.facts.sample_weight, again.training.class_weight) == ("survey", "balanced")
    assert again.digest == study.digest != with_facts(study, sample_weight=None).digest
    with pytest.raises(UserError, match="'age' is the sample weight, which is not learned from"):
        with_facts(study, sample_weight="age")._require_sound()


def test_the_minimum_cell_counts_patients_with_a_weight():
    data = make_cohort(40, domains=2, clients=1)
    weight = torch.ones(40, dtype=torch.float64)
    weight[torch.nonzero(data.domain == 0).flatten()[4:]] = 0  # four patients of domain 0 count
    others = torch.nonzero(data.domain == 1).flatten()
    weight[others] = 1e-9
    weight[others[:2]] = 0
    admitted = MinimumCell(5).admit(replace(data, weight=weight))
    assert admitted.domain.unique().tolist() == [1] and len(admitted) == len(others) - 2


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({}, None),
        ({"weight_scale": None}, "no such scale of weights"),
        ({"weight_scale": torch.tensor(0.0)}, "no such scale of weights"),
        ({"weight_scale": torch.tensor(-0.01)}, "no such scale of weights"),
        ({"weight_scale": torch.tensor(torch.nan)}, "no such scale of weights"),
        ({"weight_scale": torch.tensor(torch.inf)}, "no such scale of weights"),
        ({"class_weights": None}, "no such weights of classes"),
        ({"class_weights": torch.tensor([[-1.0, 1.0]])}, "no such weights of classes"),
        ({"class_weights": torch.tensor([[torch.nan, 1.0]])}, "no such weights of classes"),
        ({"class_weights": torch.tensor([[0.5, 3.0]])}, "no such weights of classes"),
        ({"class_weights": torch.tensor([[0.50005, 5000.0]])}, "no such weights of classes"),
        ({"class_weights": torch.tensor([[1.0, 1.0, 1.0]])}, "no such weights of classes"),
    ],
)
def test_a_site_refuses_weights_that_no_study_has(tables, fields, refused):
    study = weighted_study(tables, method="fedavg")
    model, initial = build(study)
    planned = PlannedRequests(study, model, torch.tensor([9, 9, 9]), torch.tensor([[True, True]]))
    (phase,) = phases(study.training.row_in(1), study.training, model.objective, 1)
    fields = {"weight_scale": torch.tensor(0.01), "class_weights": torch.tensor([[5 / 9, 5.0]])} | fields
    request = Request(phase, 1, study.training.seed, initial, **fields)
    if refused is None:
        planned.require(request)
        assert planned.objection(request) is None
        alone = replace(request, class_weights=torch.tensor([[0.0, 1.0]]))
        planned.require(alone)
        assert "a class that this site has rows of is weighted with 0" in planned.objection(alone)
    else:
        with pytest.raises(RefusedError, match=refused):
            planned.require(request)
