"""Replies are added as they arrive, in one order whatever that of their arrival, and are not kept."""

import weakref
from collections import Counter
from itertools import permutations

import pytest
import torch

from feddar.algorithm.names import named_state
from feddar.algorithm.protocol import Reply
from feddar.algorithm.server import Reduction
from feddar.algorithm.wire import as_reply, unpack
from feddar.federation import coordinator
from feddar.federation.coordinator import coordinate, in_order
from feddar.federation.links.link import Answer
from helpers.sites import NAMES, make_sites, make_study, write_tables

SITES = ("a", "b", "c", "d")


def arrival(order, events, silent=()):
    """Give replies in that order, and note when each is asked for."""
    for site in order:
        events.append(f"came {site}")
        yield site, None if site in silent else Reply((site,))


def events_of(order, silent=()):
    """Return when replies come and when they are given."""
    events = []
    for reply in in_order(SITES, arrival(order, events, silent)):
        events.append(f"given {reply.client}")
    return events


def test_what_arrives_in_order_is_given_at_once():
    assert events_of("abcd") == [f"{what} {site}" for site in SITES for what in ("came", "given")]


def test_what_arrives_early_waits_for_those_before_it():
    assert events_of("dcba") == [f"came {site}" for site in "dcba"] + [f"given {site}" for site in "abcd"]
    assert events_of("acbd") == ["came a", "given a", "came c", "came b", "given b", "given c", "came d", "given d"]


def test_nobody_waits_for_a_site_that_has_no_reply():
    assert events_of("bacd", silent="a") == [
        "came b", "came a", "given b", "came c", "given c", "came d", "given d",
    ]  # fmt: skip
    assert events_of("abcd", silent="abcd") == [f"came {site}" for site in "abcd"]


@pytest.mark.parametrize("order", [*permutations(SITES)], ids="".join)
def test_each_is_given_as_soon_as_nothing_before_it_is_awaited(order):
    came, given = set(), []
    for event in events_of(order):
        what, site = event.split()
        if what == "came":
            # Whatever could be given before this one came, was.
            due = next((place for place, each in enumerate(SITES) if each not in came), len(SITES))
            assert given == [*SITES[:due]]
            came.add(site)
        else:
            given.append(site)
    assert given == [*SITES]


class OneByOne:
    """A link to sites that answer one after the other, when they are waited for."""

    limit = 1 << 40

    def __init__(self, handlers, order, events):
        self.handlers, self.order, self.events = handlers, order, events

    def sites(self):
        return sorted(self.handlers)

    def ask(self, message, sites, timeout):
        about, _ = unpack(message)
        for site in self.order(sorted(sites)):
            if about["kind"] == "ask":
                self.events.append(("answers", about["round"], about["phase"]["name"], site))
            yield Answer(site, self.handlers[site](message))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


def trained(tables, folder, order, monkeypatch):
    """Train, and return the run, what happened in its heads phase, and how many replies were held at each addition."""
    events, replies, held = [], [], []

    def noted(*args):
        reply = as_reply(*args)
        replies.append(weakref.ref(reply))
        return reply

    def add(reduction, reply, before=Reduction.add):
        before(reduction, reply)
        events.append(("added", reduction.phase.name, reply.client))
        if reduction.phase.name == "heads":
            held.append(sum(each() is not None for each in replies))

    monkeypatch.setattr(coordinator, "as_reply", noted)
    monkeypatch.setattr(Reduction, "add", add)
    handlers = {name: site.answer for name, site in make_sites(tables, folder / "kept").items()}
    run = coordinate(make_study(tables, rounds=1), OneByOne(handlers, order, events), folder / "out")
    monkeypatch.undo()
    return run, [(event[0], event[-1]) for event in events if "heads" in event], held


def test_the_coordinator_adds_replies_as_they_arrive_and_holds_only_those_that_are_early(tables, tmp_path, monkeypatch):
    run, events, held = trained(tables, tmp_path / "sorted", list, monkeypatch)
    assert events == [(what, name) for name in NAMES for what in ("answers", "added")]
    assert held == [1, 1, 1]
    other, events, held = trained(tables, tmp_path / "reversed", lambda sites: sites[::-1], monkeypatch)
    assert events == [("answers", name) for name in NAMES[::-1]] + [("added", name) for name in NAMES]
    assert held[0] == 3
    first, second = named_state(run.state), named_state(other.state)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_reply_is_added_once(tables, tmp_path, monkeypatch):
    _, events, _ = trained(tables, tmp_path, lambda sites: [*sites[1:], sites[0]], monkeypatch)
    assert Counter(name for what, name in events if what == "added") == Counter(NAMES)


def test_parts_of_a_reply_come_in_the_order_of_their_weights():
    """A file of tensors has no order, and one that differs would show in the last bits of sums over heads."""
    weights = {"encoder/all": 9.0, "heads/2": 5.0, "heads/10": 3.0, "heads/0": 1.0}
    tensors = {"heads/0": torch.zeros(1, 2), "heads/10": torch.ones(1, 2), "encoder/all/w": torch.ones(3)}
    tensors |= {"heads/2": torch.full((1, 2), 2.0), "slope/0": torch.ones(1, 2)}
    reply = as_reply(("a",), {"loss": 0.0, "samples": 9, "weights": weights}, tensors)
    assert [*reply.heads] == ["2", "10", "0"]
    assert {key: head.weight for key, head in reply.heads.items()} == {"2": 5.0, "10": 3.0, "0": 1.0}
    assert [float(head.head[0, 0]) for head in reply.heads.values()] == [2.0, 1.0, 0.0]
    assert {key: [*head.evidence] for key, head in reply.heads.items()} == {"2": [], "10": [], "0": ["slope"]}
    assert reply.encoders["all"].weight == 9.0
