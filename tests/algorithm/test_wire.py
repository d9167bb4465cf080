"""Requests and replies as bytes, and what is made of bytes that are neither."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from feddar.algorithm.names import named_reply, named_request, named_weights
from feddar.algorithm.protocol import Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.schedule import planned
from feddar.algorithm.wire import MessageError, as_reply, as_request, pack, reply_header, request_header, unpack
from feddar.methods import METHODS
from feddar.models.parameters import Parameters
from feddar.objectives import Binary
from feddar.settings import Settings

TENSORS = {
    "single": torch.tensor(1.5),
    "whole": torch.arange(6).view(2, 3),
    "small": torch.tensor([1, -2], dtype=torch.int16),
    "pixels": torch.tensor([[0, 255]], dtype=torch.uint8),
    "true": torch.tensor([True, False]),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    "turned": torch.arange(6.0).view(2, 3).T,
    'Überwachung/0 "x"': torch.ones(1),
}

ALL_PHASES = sorted(
    {
        phase
        for name in METHODS
        for round_number in (0, 1, 4)
        for phase in planned(
            Settings(method=name, rounds=4, lr_steps="2:0.1", last=1, validation=0.1), Binary(), round_number
        )
    },
    key=repr,
)


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].nan_to_num(nan=7), value.nan_to_num(nan=7))


def test_tensors_of_every_kind_come_back():
    about, tensors = unpack(pack({"a": [1, "ü"]}, TENSORS))
    assert about == {"a": [1, "ü"]}
    assert_same({name: tensors[name] for name in TENSORS}, TENSORS)
    assert set(tensors) == set(TENSORS)


def test_the_same_content_gives_the_same_bytes():
    backwards = dict(reversed(TENSORS.items()))
    assert pack({"a": 1}, TENSORS) == pack({"a": 1}, backwards)


@pytest.mark.parametrize("phase", ALL_PHASES, ids=lambda phase: f"{phase.name}-{phase.encoder}-{phase.heads}")
def test_requests_of_every_phase_come_back(phase):
    parameters = Parameters({"all": {"w": torch.zeros(2)}}, {"all": torch.ones(1, 2)}, torch.tensor([1.0, 2.0]))
    request = Request(
        phase, 3, 17, parameters, torch.ones(3), torch.ones(1, 4), torch.ones(1, 5), 2, best=1,
        spreads=torch.tensor([0.3, 0.2, 0.1]), candidates=torch.ones(5, 3, 1, 4), directions=torch.ones(4, 2),
        weight_scale=torch.tensor(0.5), class_weights=torch.tensor([[0.6, 3.0]]),
    )  # fmt: skip
    found = as_request(*unpack(pack(request_header(request), named_request(request))))
    assert (found.phase, found.round, found.seed, found.step, found.best) == (phase, 3, 17, 2, 1)
    assert_same(named_request(found), named_request(request))
    assert_same(found.parameters.encoders["all"], parameters.encoders["all"])
    assert_same(found.parameters.heads, parameters.heads)
    tensors = ("domain_weights", "mean_head", "score_range", "spreads", "candidates", "directions")
    for name in (*tensors, "weight_scale", "class_weights"):
        assert torch.equal(getattr(found, name), getattr(request, name))
    assert torch.equal(found.parameters.target, parameters.target)


def test_all_phases_were_tried():
    assert {phase.name for phase in ALL_PHASES} == {
        "census", "adopt", "heads", "encoder", "together", "personal", "pool", "offsets", "validate", "measure",
    }  # fmt: skip


@pytest.mark.parametrize(
    "reply",
    [
        Reply(("a",)),
        Reply(("a",), sums={"counts": torch.tensor([3, 0])}),
        Reply(("a",), heads={"1": TrainedHead(torch.ones(1, 3), 12.0)}),
        Reply(("a",), {"all": TrainedEncoder({"w": torch.ones(2)}, 40.0)}, loss=1 / 3, samples=40),
        Reply(("a",), scores=torch.ones(4, 1)),
    ],
    ids=["adopt", "census", "heads", "encoder", "evaluate"],
)
def test_replies_come_back(reply):
    found = as_reply(("a",), *unpack(pack(reply_header(reply), named_reply(reply))))
    assert (found.client, found.loss, found.samples) == ("a", reply.loss, reply.samples)
    assert named_weights(found) == named_weights(reply)
    assert_same(named_reply(found), named_reply(reply))
    assert (found.encoders.keys(), found.heads.keys()) == (reply.encoders.keys(), reply.heads.keys())
    assert found.sums.keys() == reply.sums.keys()


WHOLE = pack({"kind": "ask", "numbers": list(range(20))}, {"a": torch.arange(5), "b": torch.ones(3)})


@pytest.mark.parametrize("end", range(0, len(WHOLE), 7))
def test_a_part_of_a_message_is_none(end):
    with pytest.raises(MessageError):
        unpack(WHOLE[:end])


NO_TENSORS = save({})
TOO_LONG = b'{"a":{"dtype":"F32","shape":[9999999999],"data_offsets":[0,4]}} '


def message_of(header, body=NO_TENSORS):
    return struct.pack(">Q", len(header)) + header + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(8),
        b"\xff" * 64,
        message_of(b"[1, 2]"),
        message_of(b"null"),
        message_of(b'"text"'),
        message_of(b"{'a': 1}"),
        message_of(b"\xff\xfe"),
        message_of(b"[" * 100_000),
        message_of(b'{"a": ' * 100_000),
        message_of(b'{"a": ' + b"9" * 10_000 + b"}"),
        message_of(b"{}", b""),
        message_of(b"{}", bytes(8)),
        message_of(b"{}", save({"a": torch.ones(9)})[:-1]),
        message_of(b"{}", save({"a": torch.ones(9)}) + b"x"),
        message_of(b"{}", message_of(b'{"a": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}', bytes(4))),
        message_of(b"{}", struct.pack("<Q", len(TOO_LONG)) + TOO_LONG + bytes(4)),
        b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    ],
    ids=map(str, range(18)),
)  # fmt: skip
def test_what_is_no_message(content):
    with pytest.raises(MessageError):
        unpack(content)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(content):
    with pytest.raises(MessageError):
        unpack(content)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_message_with_one_byte_changed_is_read_or_refused(place, change):
    changed = bytearray(WHOLE)
    changed[place] ^= change
    try:
        about, tensors = unpack(bytes(changed))
    except MessageError:
        return
    assert isinstance(about, dict)
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["phase", "round", "seed", "step"]), ANYTHING))
def test_facts_that_are_no_request(about):
    with pytest.raises(MessageError):
        as_request(json.loads(json.dumps(about)), {})


FACTS = st.fixed_dictionaries(
    {}, optional={"loss": st.floats() | ANYTHING, "samples": st.integers() | ANYTHING, "weights": ANYTHING}
)


@given(FACTS, st.none() | st.floats() | ANYTHING)
def test_facts_that_are_a_reply_or_not(about, weight):
    """A head comes with the facts wherever they weigh one."""
    tensors = {}
    if weight is not None:
        about["weights"], tensors = {"heads/0": weight}, {"heads/0": torch.ones(1, 2)}
    about = json.loads(json.dumps(about))
    try:
        reply = as_reply(("a",), about, tensors)
    except MessageError:
        return
    assert named_weights(reply).keys() == tensors.keys()
    assert isinstance(reply.loss, float)
    assert reply.samples >= 0
    assert all(isinstance(weight, float) for weight in named_weights(reply).values())


@pytest.mark.parametrize(
    "change",
    [
        {"phase": {"name": "census", "colour": "blue"}}, {"phase": {}}, {"phase": []}, {"phase": "census"},
        {"round": "1"}, {"round": -1}, {"round": 1.0}, {"round": True}, {"round": None}, {"seed": [1]}, {"step": {}},
    ],
    ids=str,
)  # fmt: skip
def test_requests_of_the_wrong_kind(change):
    sound = request_header(Request(Phase("census"), 0, 0))
    as_request(sound, {})
    with pytest.raises(MessageError):
        as_request(sound | change, {})


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "0"}, {"loss": None}, {"loss": 10**400}, {"loss": True}, {"samples": -1}, {"samples": 1.0},
        {"samples": True}, {"weights": []}, {"weights": {"heads/0": 10**400}}, {"weights": {"heads/0": None}},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_replies_of_the_wrong_kind(change):
    reply = Reply(("a",), heads={"0": TrainedHead(torch.ones(1, 2), 3.0)})
    sound, tensors = reply_header(reply), named_reply(reply)
    as_reply(("a",), sound, tensors)
    with pytest.raises(MessageError):
        as_reply(("a",), sound | change, tensors)


@pytest.mark.parametrize(
    ("weights", "names"),
    [
        ({}, ["heads/0"]),
        ({}, ["encoder/all/w"]),
        ({"heads/0": 1.0}, []),
        ({"heads/0": 1.0}, ["heads/1"]),
        ({"heads/0": 1.0, "encoder/all": 1.0}, ["heads/0"]),
        ({"encoder/all": 1.0}, ["encoder/0/w"]),
        ({"counts": 1.0}, ["counts"]),
    ],
)
def test_weights_and_what_they_weigh_come_together(weights, names):
    about = {"loss": 0.0, "samples": 0, "weights": weights}
    with pytest.raises(MessageError, match="a weight without its tensors, or tensors without a weight"):
        as_reply(("a",), about, {name: torch.ones(1, 2) for name in names})
