"""A malicious coordinator, which sends crafted weights instead of trained ones: a gate that lets one patient through.

With a first layer that is 0 for all but the oldest patient, gradient and curvature of a head, sums over hundreds of
patients, are of that patient alone.
"""

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.names import named_request
from feddar.algorithm.offsets import SPREADS
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import phases, pool
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.federation.coordinator import coordinate
from feddar.federation.privacy.plausible_models import PlausibleModels
from feddar.federation.rehearsal import build
from feddar.models.heads import full_matrix
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, local_link, make_sites, make_study, with_floor, write_tables

RUN = "0123456789abcdef"
MEAN, SCALE = 60.0, 12.0


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), rows=900)


@pytest.fixture
def study(tables):
    return with_floor(make_study(tables, method="feddar", encoder="mlp", validation=0.0, rounds=200, lr=0.003), 3)


def joined(tables, folder, study):
    site = make_sites(tables, folder / "kept", study=study)[NAMES[0]]
    assert unpack(site.answer(pack({"kind": "join", "run": RUN, "study": study.tables()})))[0]["kind"] == "joined"
    return site


def crafted(study, column, threshold, strength=1.0):
    """Return parameters whose first feature is by how much a column, in standard units, exceeds a threshold."""
    model, initial = build(study)
    encoder = {name: value.clone() for name, value in initial.encoders["all"].items()}
    first, second = (name for name in sorted(encoder) if "layers" in name and name.endswith("weight"))
    for name in (first, second):
        bias = name.replace("weight", "bias")
        encoder[name].zero_()
        encoder[bias].zero_()
        encoder[name][0, column if name == first else 0] = strength
    encoder[first.replace("weight", "bias")][0] = -strength * threshold
    mean, scale = (next(name for name in encoder if name.endswith(f"numbers.{part}")) for part in ("mean", "scale"))
    encoder[mean][column], encoder[scale][column] = MEAN, SCALE
    heads = {str(m): torch.zeros(model.outputs, model.width) for m in range(len(study.facts.domains))}
    return Parameters({"all": encoder}, heads)


def asked(study, parameters, number=1, step=3):
    request = Request(
        pool(study.training.row()), number, 0, parameters, step=step, spreads=torch.tensor(SPREADS, dtype=torch.float64)
    )
    return pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))


def oldest(site, domain):
    """Return the ages of a domain's oldest two patients that the site trains on, in standard units."""
    train = site.participation.client.train
    ages = (train.numbers[train.domain == domain, 0].double() - MEAN) / SCALE
    first, second = ages.sort(descending=True).values[:2].tolist()
    return first, second


def read_age(tensors, threshold):
    """Return the age of the one patient behind a matrix, which is a multiple of its features' outer product."""
    matrix = full_matrix(tensors["pooled_curvature/0"])
    return threshold + float(matrix[0, 0] / matrix[0, -1])


def test_a_gate_shows_a_patient(tables, tmp_path, study, monkeypatch):
    """So that the tests below can fail: this is the attack, and it works where a site takes any model."""
    monkeypatch.setattr(PlausibleModels, "objection", lambda *_: None)
    site = joined(tables, tmp_path, study)
    first, second = oldest(site, 0)
    about, tensors = unpack(site.answer(asked(study, crafted(study, 0, threshold := (first + second) / 2))))
    assert about["kind"] == "reply"
    assert read_age(tensors, threshold) == pytest.approx(first, abs=1e-4)


def test_no_record_in_two_hundred_requests(tables, tmp_path, study):
    """Whatever it gates on, how strongly, in whichever round and phase: nothing is answered."""
    site = joined(tables, tmp_path, study)
    first, second = oldest(site, 0)
    rng = np.random.default_rng(0)
    kinds = []
    for number in range(1, 201):
        threshold = (first + second) / 2 if number % 2 else float(rng.normal())
        parameters = crafted(study, int(rng.integers(2)), threshold, float(rng.choice([0.3, 1, 3, 100])))
        about, tensors = unpack(site.answer(asked(study, parameters, number=1 if number % 3 else 2)))
        kinds.append(about["kind"])
        assert not tensors
    # A round that it has no model of an earlier one for is not the first that a site takes part in.
    assert set(kinds) == {"refused"}


def test_after_rounds_of_training_a_gate_is_refused_too(tables, tmp_path, study):
    site = joined(tables, tmp_path, study)
    _, initial = build(study)
    heads = {str(m): next(iter(initial.heads.values())).clone() for m in range(len(study.facts.domains))}
    for number in (1, 2):
        planned = phases(study.training.row(), study.training, study.objective, number)
        encoder = next(each for each in planned if each.name == "encoder")
        request = Request(encoder, number, 0, Parameters(initial.encoders, heads), step=2)
        message = pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))
        assert unpack(site.answer(message))[0]["kind"] == "reply"
    about, tensors = unpack(site.answer(asked(study, crafted(study, 0, 1.5), number=2)))
    assert (about["kind"], tensors) == ("refused", {})
    assert "is far from what training can have made" in about["why"]


def test_a_scale_that_no_column_has_is_refused(tables, tmp_path, study):
    """A tiny scale would do what a gate does."""
    site = joined(tables, tmp_path, study)
    _, initial = build(study)
    encoder = dict(initial.encoders["all"])
    name = next(name for name in encoder if name.endswith("numbers.scale"))
    encoder[name] = torch.tensor([1e-4, 1.0])
    heads = {str(m): next(iter(initial.heads.values())).clone() for m in range(len(study.facts.domains))}
    about, _ = unpack(site.answer(asked(study, Parameters({"all": encoder}, heads))))
    assert about["why"].startswith("'encoder.inputs.numbers.scale' of the model is far from")


def test_honest_training_is_never_refused(tables, tmp_path):
    """Also with a large learning rate, and for a site that misses rounds."""
    study = make_study(tables, method="feddar", rounds=4, lr=0.05, validation=0.0)
    run = coordinate(study, local_link(make_sites(tables, tmp_path / "kept")), tmp_path / "out")
    assert run.round == 4
    exchanges = pd.read_csv(tmp_path / "out" / "exchanges.csv", keep_default_na=False)
    assert set(exchanges["problem"]) == {""}
