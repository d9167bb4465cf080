"""Messages and studies that are nearly right: whatever is changed in them, only our own sentences come back.

``FEDDAR_FUZZ=100000 pytest -s -m more tests/attacks/test_fuzzed_messages.py`` tries so many of each, and prints what
they took.
"""

import json
import os
import random
import re
import resource
import struct
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from feddar.algorithm.names import named_request
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import planned
from feddar.algorithm.wire import MessageError, as_reply, as_request, pack, request_header, unpack
from feddar.errors import TrainingError, UserError
from feddar.federation.privacy.secure.collector import set_up
from feddar.federation.privacy.secure.masking import AHEAD
from feddar.federation.rehearsal import build
from feddar.federation.study import Study
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, make_sites, make_study, with_facts, write_tables

RUN = "0123456789abcdef"
ODD = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "a", "0" * 300, "../../x",
    "\x00", "\ud800", [], [[]], [1, "a"], {}, {"a": {}}, [None] * 50, "all", "client",
)  # fmt: skip
"""Values that a field may have instead of its own."""
RENEWED = 100
"""After so many messages there is another site: one that has answered everything sends what it stored, and works no
more, and one whose keys were replaced takes part in no sum."""


def many(number):
    """Return how many there are where there is time for it."""
    return pytest.param(int(os.environ.get("FEDDAR_FUZZ", number)), marks=pytest.mark.more)


@contextmanager
def within(megabytes):
    """Require that all that is done inside takes no more memory than this."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{grown:.0f} MB more memory")
    assert grown < megabytes


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "secure"])
def study(tables, request):
    return with_facts(make_study(tables, method="feddar"), secure=request.param)


def opened(tables, folder, study, say):
    """Return a site that has joined a run, and has exchanged keys with others if sums are secure; and the messages."""
    sites = make_sites(tables, folder, study=study, say=say)
    for site in sites.values():
        site.answer(pack({"kind": "join", "run": RUN, "study": study.tables()}))

    def ask(message, names):
        return {name: unpack(sites[name].answer(pack({"run": RUN, **message})))[0] for name in names}

    keys = set_up(ask, NAMES, RUN) if study.facts.secure else None
    return sites[NAMES[0]], messages(study, keys)


def messages(study, keys=None):
    """Return one proper message of each kind, as header and tensors; of secure sums by the keys that sites have."""
    setup = keys.name if keys else "ab" * 16
    roster = {name: keys.keys[name].as_entry() if keys else {} for name in NAMES}
    sealed = {name: {to: each[0] for to, each in keys.sealed[name].items()} if keys else {} for name in NAMES}
    model, initial = build(study)
    heads = {str(m): next(iter(initial.heads.values())).clone() for m in range(len(study.facts.domains))}
    found = [({"kind": "join", "run": RUN, "study": study.tables()}, {})]
    for number in (0, 1, 2):
        for step, phase in enumerate(planned(study.training, model.objective, number)):
            parameters = Parameters(initial.encoders, heads) if number else Parameters()
            request = Request(phase, number, 0, parameters, step=step + 1)
            about = {"kind": "ask", "run": RUN, "limit": 10**9, **request_header(request)}
            secure = {"setup": setup, "index": len(found) % AHEAD, "sites": list(NAMES), "rows": 1000}
            found.append((about | {"secure": secure}, named_request(request)))
    found.append(({"kind": "keys", "run": RUN, "setup": "cd" * 16}, {}))
    found.append(({"kind": "shares", "run": RUN, "setup": setup, "roster": roster}, {}))
    reveal = {"setup": setup, "index": 0, "answered": list(NAMES), "sealed": sealed}
    found.append(({"kind": "reveal", "run": RUN, **reveal}, {}))
    counts = [10] * len(study.facts.domains)
    found.append(({"kind": "finish", "run": RUN, "round": 1, "counts": counts}, named_request(request)))
    return found


def changed(value, rng):
    """Return a value with something in it changed, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.random():
            case chance if chance < 0.1:
                return {name: each for name, each in value.items() if name != key}
            case chance if chance < 0.2:
                return value | {rng.choice(["", "x", "kind", "a/b", key + "x"]): rng.choice(ODD)}
            case _:
                return value | {key: changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], changed(value[place], rng), *value[place + 1 :]]
    return rng.choice(ODD)


def fuzzed(about, tensors, rng):
    """Return the bytes of a message that was changed in its header, its tensors or its bytes."""
    kind = rng.random()
    if kind < 0.6:
        about = changed(about, rng)
    elif kind < 0.8 and tensors:
        name = rng.choice(sorted(tensors))
        other = rng.choice([
            torch.zeros(0), torch.zeros(3, 3), torch.full((2,), float("nan")), torch.ones(5, dtype=torch.long),
            tensors[name] * float("inf"), tensors[name].flatten(), torch.zeros(()),
        ])  # fmt: skip
        tensors = {**tensors, rng.choice([name, "x", "heads/9", "encoder/all/x/y", "counts"]): other}
    apart = {name: tensor.clone() for name, tensor in tensors.items()}
    content = bytearray(pack(about if isinstance(about, dict) else {"kind": about}, apart))
    if kind >= 0.8:
        for _ in range(rng.randrange(1, 5)):
            place = rng.randrange(min(len(content), 4000))
            content[place] = rng.randrange(256)
        if rng.random() < 0.3:
            content = content[: rng.randrange(len(content))]
    return bytes(content)


@pytest.mark.parametrize("number", [1500, many(8000)])
def test_a_site_answers_every_message(tables, tmp_path, study, number):
    rng, said, slowest = random.Random(number), [], 0.0
    site, proper = opened(tables, tmp_path / "0", study, said.append)
    with within(200):
        for count in range(1, number + 1):
            message, begun = fuzzed(*rng.choice(proper), rng), time.process_time()
            about, _tensors = unpack(site.answer(message))
            slowest = max(slowest, time.process_time() - begun)
            assert isinstance(about["kind"], str)
            if count % RENEWED == 0:
                site, proper = opened(tables, tmp_path / str(count), study, said.append)
    print(f"{number:,} messages, the slowest {slowest:.2f} s of the processor")
    odd = {line for line in said if re.match(r"failed: [A-Z]\w+(Error|Exception)", line)}
    assert not odd


@pytest.mark.parametrize("number", [2000, many(50_000)])
def test_messages_are_read_or_refused(study, number):
    rng, proper = random.Random(number), messages(study)
    with within(200):
        for _ in range(number):
            with suppress(MessageError):
                about, tensors = unpack(fuzzed(*rng.choice(proper), rng))
                as_request(about, tensors)
                as_reply(("a",), about, tensors)


def test_a_length_beyond_the_message_is_refused():
    for length in (2**63, 2**64 - 1, 10**12):
        with pytest.raises(MessageError):
            unpack(struct.pack(">Q", length) + json.dumps({"kind": "a"}).encode())


@pytest.mark.parametrize("number", [500, many(50_000)])
def test_studies_are_read_or_refused(study, number):
    rng, tables = random.Random(number), study.tables()
    with within(200):
        for _ in range(number):
            other = tables
            for _ in range(rng.randrange(1, 4)):
                other = changed(other, rng)
            if isinstance(other, dict):
                with suppress(UserError, TrainingError):
                    assert isinstance(Study.from_tables(other, "the study").digest, str)
