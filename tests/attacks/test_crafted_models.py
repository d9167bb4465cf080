"""A malicious coordinator, which sends crafted weights instead of trained ones: a gate that lets one patient through.

With a first layer that is 0 for all but the oldest patient, gradient and curvature of a head, sums over hundreds of
patients, are of that patient alone.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.local_training import encode
from feddar.algorithm.names import named_request
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import phases, pool
from feddar.algorithm.spreads import FIRST_OF_CLIENTS
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.federation.coordinator import coordinate
from feddar.federation.links.link import Answer
from feddar.federation.links.local import LocalLink
from feddar.federation.privacy.plausible_models import HEADS, IMPLAUSIBLE, PlausibleModels
from feddar.federation.rehearsal import build
from feddar.models.heads import full_matrix
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, make_sites, make_study, with_floor, write_tables

RUN = "0123456789abcdef"
MEAN, SCALE = 60.0, 12.0


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), rows=900)


@pytest.fixture
def study(tables):
    return with_floor(make_study(tables, method="feddar", encoder="mlp", validation=0.0, rounds=200, lr=0.003), 3)


def joined(tables, folder, study, **options):
    site = make_sites(tables, folder / "kept", study=study, **options)[NAMES[0]]
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
    request = Request(pool(study.training.row()), number, 0, parameters, step=step, spreads=FIRST_OF_CLIENTS)
    return pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))


def started(study):
    """Return the parameters that the study starts from, with a head for each domain."""
    _, initial = build(study)
    return with_heads_of_domains(study, initial.encoders, next(iter(initial.heads.values())))


def with_heads_of_domains(study, encoders, head):
    return Parameters(encoders, {str(m): head.clone() for m in range(len(study.facts.domains))})


def trains(study, name, number=1, parameters=None, **more):
    """Return the message that asks for a phase of training."""
    planned = phases(study.training.row(), study.training, study.objective, number)
    phase = next(each for each in planned if each.name == name)
    request = Request(phase, number, 0, parameters or started(study), step=2, **more)
    return pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))


def trained_in_first_round(site, study):
    """Let a site answer the first round of an honest run."""
    for name in ("heads", "encoder"):
        assert unpack(site.answer(trains(study, name)))[0]["kind"] == "reply"


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


@pytest.mark.parametrize("honest", [False, True], ids=["at first", "after a round of training"])
def test_no_record_in_two_hundred_requests(tables, tmp_path, study, honest):
    """Whatever it gates on, how strongly, and however many rounds it says have passed: nothing is answered."""
    site = joined(tables, tmp_path, study)
    if honest:
        trained_in_first_round(site, study)
    first, second = oldest(site, 0)
    rng = np.random.default_rng(0)
    for number in range(1, 201):
        threshold = (first + second) / 2 if number % 2 else float(rng.normal())
        parameters = crafted(study, int(rng.integers(2)), threshold, float(rng.choice([0.3, 1, 3, 100])))
        assert unpack(site.answer(asked(study, parameters, number=number))) == (IMPLAUSIBLE, {})


@pytest.mark.parametrize("missed", [1, 2, 4, 9, 150])
def test_rounds_that_are_said_to_have_passed_open_no_gate(tables, tmp_path, missed):
    """Also where the site's own training moves layers far, and many rounds of it would move them anywhere."""
    study = with_floor(make_study(tables, encoder="mlp", validation=0.0, rounds=200, lr=0.01, schedule="constant"), 3)
    site = joined(tables, tmp_path, study)
    trained_in_first_round(site, study)
    about, tensors = unpack(site.answer(asked(study, crafted(study, 0, 1.5), number=1 + missed)))
    assert (about, tensors) == (IMPLAUSIBLE, {})


def test_after_rounds_of_training_a_gate_is_refused_too(tables, tmp_path, study):
    heard = []
    site = joined(tables, tmp_path, study, say=heard.append)
    for number in (1, 2):
        assert unpack(site.answer(trains(study, "encoder", number)))[0]["kind"] == "reply"
    about, tensors = unpack(site.answer(asked(study, crafted(study, 0, 1.5), number=2)))
    assert (about, tensors) == (IMPLAUSIBLE, {})
    assert "of the model is far from what training can have made" in heard[-1]


def long_head(study, site, scale):
    """Return parameters with heads of that scale, whose plane has one patient in it, and the patient's features."""
    parameters, client = started(study), site.participation.client
    features = encode(client.model, pool(study.training.row()), parameters, client.train.x, client.train.domain)
    patient = features[client.train.domain == 0][7].double()
    plane = torch.randn(len(patient), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plane[-1] = -(plane[:-1] @ patient[:-1])  # the last feature is the constant 1
    head = (plane * scale).to(client.model.dtype)[None]
    return with_heads_of_domains(study, parameters.encoders, head), patient


def test_a_long_head_shows_a_patient(tables, tmp_path, study, monkeypatch):
    """So that the next test can fail: all but one are beyond doubt, and curvature is of those who are not."""
    monkeypatch.setattr(PlausibleModels, "objection", lambda *_: None)
    site = joined(tables, tmp_path, study)
    parameters, patient = long_head(study, site, 1e6)
    _, tensors = unpack(site.answer(asked(study, parameters)))
    values, vectors = torch.linalg.eigh(full_matrix(tensors["pooled_curvature/0"]))
    assert float(values[-2] / values[-1]) < 1e-6
    assert float((vectors[:, -1] @ patient).abs() / patient.norm()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("honest", [False, True], ids=["at first", "after a round of training"])
@pytest.mark.parametrize("scale", [1e2, 1e3, 1e6])
def test_long_heads_are_refused(tables, tmp_path, study, scale, honest):
    site = joined(tables, tmp_path, study)
    parameters, _ = long_head(study, site, scale)
    if honest:
        trained_in_first_round(site, study)
    number = 2 if honest else 1
    others = (trains(study, name, number, parameters) for name in ("heads", "encoder"))
    for message in (*others, asked(study, parameters, number), asked(study, parameters, number + 20)):
        assert unpack(site.answer(message)) == (IMPLAUSIBLE, {})


def test_a_head_that_expects_the_outcome_of_nobody_shows_who_alone_has_it(tables, tmp_path, study):
    """Not stopped, as the guide says: training may come to such a head, and the gradient is of that patient."""
    site = joined(tables, tmp_path, study)
    client = site.participation.client
    rows, y = (client.train.domain == 0).nonzero().flatten(), client.train.y.clone()
    y[rows], y[rows[7]] = 0, 1
    client.train = replace(client.train, y=y)
    head = torch.zeros(client.model.outputs, client.model.width)
    head[0, -1] = -9.0
    parameters = with_heads_of_domains(study, started(study).encoders, head)
    _, tensors = unpack(site.answer(asked(study, parameters)))
    # All chances p are alike: the slope is p sum(x) - x of the patient, the curvature's last column p (1 - p) sum(x).
    slope = tensors["pooled_slope/0"].double().flatten()
    column = full_matrix(tensors["pooled_curvature/0"].double())[-1]
    found = column * (slope[-1] + 1) / column[-1] - slope
    train = client.train
    features = encode(client.model, pool(study.training.row()), parameters, train.x, train.domain)[rows].double()
    away = (features - found).norm(dim=1)
    assert int(away.argmin()) == 7
    assert float(away[7]) < 1e-3 * float(away.median())


def test_what_was_seen_of_heads_outlasts_what_is_seen_of_the_encoder(tables, tmp_path, study):
    """Heads are compared with the last that were trained on, not with the first."""
    site = joined(tables, tmp_path, study)
    now = started(study)
    for number in range(1, 5):
        for name in ("heads", "encoder"):
            assert unpack(site.answer(trains(study, name, number, now)))[0]["kind"] == "reply"
        head = now.heads["0"]
        now = with_heads_of_domains(study, now.encoders, head + 0.9 * HEADS / head.numel() ** 0.5)
    far = with_heads_of_domains(study, now.encoders, started(study).heads["0"])
    assert unpack(site.answer(asked(study, far, number=5))) == (IMPLAUSIBLE, {})


def test_a_mean_that_is_not_one_of_the_heads_is_refused(tables, tmp_path):
    """Evidence of how far domains differ is a gradient, at the mean of heads: it is not for any other point."""
    study = make_study(tables, method="feddar", encoder="mlp", validation=0.0, k=200)
    head = started(study).heads["0"]
    for number, (mean, kind) in enumerate([(head + 0.1, "refused"), (head.clone(), "reply")], 1):
        site = joined(tables, tmp_path / str(number), study)
        assert unpack(site.answer(trains(study, "heads", mean_head=mean)))[0]["kind"] == kind


def test_a_scale_that_no_column_has_is_refused(tables, tmp_path, study):
    """A tiny scale would do what a gate does."""
    heard = []
    site = joined(tables, tmp_path, study, say=heard.append)
    parameters = started(study)
    encoder = dict(parameters.encoders["all"])
    name = next(name for name in encoder if name.endswith("numbers.scale"))
    encoder[name] = torch.tensor([1e-4, 1.0])
    assert unpack(site.answer(asked(study, Parameters({"all": encoder}, parameters.heads)))) == (IMPLAUSIBLE, {})
    assert heard[-1].startswith("refused: 'encoder.inputs.numbers.scale' of the model is far from")


class Away(LocalLink):
    """A link that does not reach one site in some rounds."""

    def __init__(self, sites, name, rounds):
        super().__init__({name: site.answer for name, site in sites.items()})
        self.name, self.rounds = name, rounds

    def ask(self, message, sites, timeout):
        gone = [self.name] if unpack(message)[0].get("round") in self.rounds and self.name in sites else []
        yield from super().ask(message, [site for site in sites if site not in gone], timeout)
        yield from (Answer(site, problem="lost") for site in gone)


@pytest.mark.parametrize(
    ("training", "away"),
    [
        ({"lr": 0.05}, ()),
        ({"lr": 0.05, "method": "feddar-sa"}, ()),
        ({"lr": 0.05, "method": "fedavg"}, ()),
        ({"head_epochs": 100, "lr": 0.03}, ()),
        ({"rounds": 6, "lr": 0.003}, (2, 3)),
        ({"rounds": 6, "method": "fedavg"}, (2, 3, 4)),
        ({"method": "fedminmax"}, ()),
        ({"k": 200}, ()),
    ],
)
def test_honest_training_is_never_refused(tables, tmp_path, training, away):
    """Also with a large learning rate, and for a site that misses rounds."""
    study = make_study(tables, **{"method": "feddar", "rounds": 4} | training)
    coordinate(study, Away(make_sites(tables, tmp_path / "kept"), NAMES[1], away), tmp_path / "out")
    exchanges = pd.read_csv(tmp_path / "out" / "exchanges.csv", keep_default_na=False)
    assert {*exchanges["problem"]} == ({"", "lost"} if away else {""})
