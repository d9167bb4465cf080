"""A coordinator that weighs domains as it likes: with a weight for one domain alone, a sum is of those who hold it."""

import pytest
import torch

from feddar.algorithm.names import named_request
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import phases
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.federation.privacy.plausible_models import IMPLAUSIBLE
from feddar.federation.rehearsal import build
from feddar.federation.request_checks import PlannedRequests
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, make_sites, make_study, write_tables

RUN = "0123456789abcdef"
ONLY_C = (0.0, 0.0, 1.0)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


def joined(tables, folder, study, name=NAMES[2]):
    """Return a site that takes part; hospital-3 has rows of domain A alone to train on."""
    site = make_sites(tables, folder / "kept", study=study)[name]
    assert unpack(site.answer(pack({"kind": "join", "run": RUN, "study": study.tables()})))[0] == {"kind": "joined"}
    return site


def weighed(study, weights):
    """Return the request to train an encoder with these weights of domains."""
    phase, (_, initial) = phases(study.training.row(), study.training, study.objective, 1)[-1], build(study)
    by_domain = study.training.row().heads == "domain"
    keys = [str(m) for m in range(len(study.facts.domains))] if by_domain else ["all"]
    heads = {key: initial.heads["all"].clone() for key in keys}
    return Request(phase, 1, 0, Parameters(initial.encoders, heads), torch.tensor(weights, dtype=torch.float64), step=2)


def ask(site, request):
    return unpack(site.answer(pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))))


def moved(request, tensors):
    """Return by how much a reply moves the encoder."""
    sent = request.parameters.encoders["all"]
    return sum(float((tensors[f"encoder/all/{name}"] - value).norm()) for name, value in sent.items())


def test_a_weight_for_one_domain_leaves_the_others_out(tables, tmp_path, monkeypatch):
    """So that the tests below can fail: what is left of a sum is of the sites that hold the domain."""
    monkeypatch.setattr(PlannedRequests, "objection", lambda *_: None)
    study = make_study(tables, method="feddar")
    request = weighed(study, ONLY_C)
    without, holder = (
        moved(request, ask(joined(tables, tmp_path / name, study, name), request)[1]) for name in (NAMES[2], NAMES[0])
    )
    assert without == 0 < holder


@pytest.mark.parametrize("method", ["feddar", "feddar-wa", "feddar-sa"])
def test_a_domain_of_the_site_counts(tables, tmp_path, method):
    """One that it does not hold may have the weight 0: perhaps nobody does."""
    study = make_study(tables, method=method)
    site = joined(tables, tmp_path / "A", study)
    assert ask(site, weighed(study, ONLY_C)) == (IMPLAUSIBLE, {})
    # Asked again, it does not say which domain it is.
    assert ask(site, weighed(study, (1, 0, 0)))[0]["kind"] == "refused"
    assert ask(joined(tables, tmp_path / "B", study), weighed(study, (1, 0, 0)))[0]["kind"] == "reply"


@pytest.mark.parametrize(
    ("method", "weights", "why"),
    [
        ("feddar", (1e-9, 1e-9, 1), "are not such as"),
        ("feddar", (0.3, 1, 1), "are not such as"),
        ("feddar", (-1, 1, 1), "are not such as"),
        ("fedminmax", (-1, 1, 1), "are not such as"),
        ("feddar", (float("nan"), 1, 1), "are not finite"),
        ("fedavg", (1, 1, 1), "has no weights of domains in the together phase"),
        ("ditto", (1, 1, 1), "has no weights of domains in the personal phase"),
    ],
)
def test_weights_that_no_run_has_are_refused_at_every_site(tables, tmp_path, method, weights, why):
    study = make_study(tables, method=method)
    about, tensors = ask(joined(tables, tmp_path, study), weighed(study, weights))
    assert (about["kind"], tensors) == ("refused", {})
    assert why in about["why"]


@pytest.mark.parametrize(
    ("method", "weights"), [("feddar", (1 / 3, 300.0, 5.0)), ("feddar", (1, 1, 1)), ("fedminmax", (0, 0, 3.0))]
)
def test_weights_that_runs_have_are_taken(tables, tmp_path, method, weights):
    study = make_study(tables, method=method)
    assert ask(joined(tables, tmp_path, study), weighed(study, weights))[0]["kind"] == "reply"
