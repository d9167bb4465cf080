"""Flat names: what is written under them comes back in its place, and nothing else with it."""

from itertools import product

import pytest
import torch

from feddar.algorithm.names import (
    EVIDENCE,
    named_own,
    named_parameters,
    named_reply,
    named_request,
    named_state,
    named_weights,
    own_from,
    parameters_from,
    reply_from,
    request_tensors,
    state_from,
)
from feddar.algorithm.protocol import OwnState, Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.state import ServerState
from feddar.models.parameters import Parameters


def tensors(*names, start=0.0):
    return {name: torch.full((2,), start + place) for place, name in enumerate(names)}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


PARAMETERS = Parameters(
    {"all": tensors("layers.0.weight", "odd/name"), "1": tensors("layers.0.weight", start=5.0)},
    tensors("0", "1", start=10.0),
    torch.tensor([3.0, 4.0]),
)


OF_EVIDENCE = ("spreads", "domain_spreads", "difference", "blend")


AVERAGED = Parameters(
    {"all": tensors("layers.0.weight", "odd/name", start=70.0), "1": tensors("layers.0.weight", start=75.0)},
    tensors("0", "1", start=80.0),
    PARAMETERS.target,
)


@pytest.mark.parametrize(
    ("averaged", "used", "shares", "score_range", "evidence"), list(product([False, True], repeat=5))
)
def test_the_servers_state_comes_back(averaged, used, shares, score_range, evidence):
    state = ServerState(
        PARAMETERS,
        AVERAGED if averaged else None,
        tensors("0", "1", start=20.0) if used else None,
        torch.tensor([0.25, 0.75]) if shares else None,
        torch.tensor([[1.0, 2.0]]) if score_range else None,
        **(tensors(*OF_EVIDENCE, start=40.0) if evidence else {}),
    )
    found = state_from(named_state(state))
    assert found.encoders.keys() == {"all", "1"}
    for key, expected in PARAMETERS.encoders.items():
        same(found.encoders[key], expected)
    same(found.heads, PARAMETERS.heads)
    same(named_parameters(found.in_use), named_parameters(state.in_use))
    same(named_parameters(found.settled), named_parameters(state.settled))
    assert (found.averaged is None) == (not averaged)
    assert (found.used_heads is None) == (not used and not averaged)
    assert torch.equal(found.in_training.target, PARAMETERS.target)
    given_or_not = {"domain_shares": shares, "score_range": score_range} | dict.fromkeys(OF_EVIDENCE, evidence)
    for name, given in given_or_not.items():
        value = getattr(found, name)
        assert torch.equal(value, getattr(state, name)) if given else value is None
    assert "target" not in named_state(ServerState(Parameters({}, tensors("all"))))


def test_every_tensor_of_a_request_comes_back_in_its_place():
    names = ("domain_weights", "mean_head", "score_range", "spreads", "candidates", "directions")
    request = Request(Phase("offsets"), 1, 0, PARAMETERS, **tensors(*names, start=60.0))
    found = request_tensors(dict(reversed(named_request(request).items())))
    for name in names:
        assert torch.equal(found[name], getattr(request, name)), name
    same(found["parameters"].heads, PARAMETERS.heads)
    empty = request_tensors(named_request(Request(Phase("offsets"), 1, 0)))
    assert all(empty[name] is None for name in names)


def test_what_stays_with_a_client_comes_back():
    own = OwnState(PARAMETERS, {"mix": torch.tensor(0.5), "local/0": torch.ones(3)})
    found = own_from(named_own(own))
    same(found.extra, own.extra)
    same(found.parameters.heads, PARAMETERS.heads)
    same(found.parameters.encoders["all"], PARAMETERS.encoders["all"])
    assert torch.equal(found.parameters.target, PARAMETERS.target)
    assert not own_from({})


def test_a_reply_comes_back_in_every_field():
    """Also with a key that no client has, since a reply may hold anything."""
    heads = {
        "1": TrainedHead(torch.ones(1, 2), 5.0, torch.full((3,), 2.0), torch.full((4,), 3.0), tensors(*EVIDENCE)),
        "0": TrainedHead(torch.zeros(1, 2), 4.0),
        "odd/key": TrainedHead(torch.full((1, 2), 7.0), 1.0, evidence=tensors(EVIDENCE[0], start=9.0)),
    }
    encoders = {"1": TrainedEncoder(tensors("a", "b/c"), 5.0), "0": TrainedEncoder(tensors("a", start=3.0), 4.0)}
    reply = Reply(("site",), encoders, heads, tensors("risks", "counts"), torch.ones(4, 1), 2.5, 9)
    backwards = dict(reversed(named_reply(reply).items()))
    found = reply_from(("site",), backwards, named_weights(reply), 2.5, 9)
    assert (found.clients, found.loss, found.samples) == (("site",), 2.5, 9)
    same(found.sums, reply.sums)
    assert torch.equal(found.scores, reply.scores)
    assert [*found.encoders] == ["1", "0"]
    assert [*found.heads] == ["1", "0", "odd/key"]
    for key, encoder in encoders.items():
        assert found.encoders[key].weight == encoder.weight
        same(found.encoders[key].tensors, encoder.tensors)
    for key, trained in heads.items():
        assert found.heads[key].weight == trained.weight
        assert torch.equal(found.heads[key].head, trained.head)
        same(found.heads[key].evidence, trained.evidence)
        for name in ("curvature", "curvature_times_head"):
            value, expected = getattr(found.heads[key], name), getattr(trained, name)
            assert value is None if expected is None else torch.equal(value, expected)


def test_other_names_are_left_alone():
    found = parameters_from(tensors("encoder/short", "local/0/weight", "headsman/0", "encoder/all/w", "heads/0"))
    assert found.encoders.keys() == {"all"}
    assert found.encoders["all"].keys() == {"w"}
    assert found.heads.keys() == {"0"}
    assert found.target is None
