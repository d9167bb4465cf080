"""Clients that are trained together end where they would one by one."""

import dataclasses
import gc
import tracemalloc
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import feddar
from feddar.algorithm.client import Client
from feddar.algorithm.local_training import batch_size_for, batches, seeded_for
from feddar.algorithm.names import named_own, named_state
from feddar.algorithm.protocol import Phase, PhaseName, Request
from feddar.algorithm.rounds import RoundEnd
from feddar.algorithm.server import reduce_replies
from feddar.algorithm.spreads import FIRST_OF_CLIENTS
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort, domain_weights
from feddar.errors import TrainingError, UserError
from feddar.methods import METHODS
from feddar.models.model import build_model
from feddar.settings import Settings
from feddar.simulation.dense import DenseLayers
from feddar.simulation.stacked import (
    UNDERSTOOD,
    SampleSets,
    Stack,
    _most,
    make_clients,
    stackable,
    steps_in_epoch,
    supports,
)
from helpers.marks import DISTINCT, first

SIZES = [40, 33, 7, 40, 12, 1, 34, 64, 65, 2, 9, 33]


def cohort_of(task, sizes=SIZES, seed=0, domains=3):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    client = np.repeat([f"h{i:02}" for i in range(len(sizes))], sizes)
    domain = rng.choice([f"d{m}" for m in range(domains)], n)
    x = rng.standard_normal((n, 5))
    score = x @ rng.standard_normal(5) + (domain == "d0") * x[:, 0]
    y = {
        "regression": score * 40 + 7,
        "binary": np.where(score > 0, "yes", "no"),
        "multiclass": np.digitize(score, [-1, 0, 1]),
    }[task]
    shuffled = rng.permutation(n)
    kind = "regression" if task == "regression" else "classification"
    return Cohort.from_arrays(x[shuffled], y[shuffled], domain=domain[shuffled], client=client[shuffled], task=kind)


def both(cohort, method, encoder="mlp", **options):
    options = {"rounds": 3, "batch_size": 8, "lr": 0.05, "dtype": "float64", "optimizer": "sgd"} | options
    return [feddar.train(cohort, method, encoder, batched=batched, **options) for batched in (True, False)]


def assert_same(one, other, rtol=1e-8, atol=1e-10):
    assert one.own.keys() == other.own.keys()
    kept = ((named_own(one.own[name]), named_own(other.own[name])) for name in one.own)
    for here, there in ((named_state(one.state), named_state(other.state)), *kept):
        assert here.keys() == there.keys()
        for name, value in here.items():
            torch.testing.assert_close(value, there[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("method", first(DISTINCT, METHODS))
def test_every_method_ends_where_it_would_one_by_one(method):
    cohort = cohort_of("binary")
    one, other = both(cohort, method, rounds=4, momentum=0.5, weight_decay=0.01, test=cohort)
    assert_same(one, other)
    np.testing.assert_allclose(one.history["value"], other.history["value"], rtol=1e-8)


@pytest.mark.parametrize("task", ["regression", "multiclass"])
@pytest.mark.parametrize("method", ["fedavg", "fedavg-mh", "fedrep", "feddar-sa"])
def test_other_tasks(task, method):
    assert_same(*both(cohort_of(task), method, lr=0.02))


@pytest.mark.parametrize("curvature", ["hessian", "block", "gram"])
@pytest.mark.parametrize("at", ["start", "final"])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_curvature(task, curvature, at):
    assert_same(*both(cohort_of(task), "feddar-sa", curvature=curvature, curvature_at=at, encoder_epochs=2))


@pytest.mark.parametrize("method", ["fedavg", "feddar-sa", "fedrep"])
def test_adam_and_single_precision(method):
    cohort = cohort_of("binary")
    assert_same(*both(cohort, method, optimizer="adam", lr=0.001), rtol=1e-5, atol=1e-7)
    assert_same(*both(cohort, method, dtype="float32"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedavg-mh", "feddar-sa", "fedprox"])
def test_plain_steps_in_closed_form(method, monkeypatch):
    """Without momentum the products go into the parameters themselves, and more clients fit the cache."""
    cohort, taken = cohort_of("multiclass"), []
    descend = DenseLayers.descend
    monkeypatch.setattr(DenseLayers, "descend", lambda *args, **how: taken.append(descend(*args, **how)))
    assert_same(*both(cohort, method, encoder_epochs=2))
    assert bool(taken) == (method != "fedprox")
    model, _ = build_model(cohort, "mlp", Settings())
    clients = [_most(model, 3, 40, Settings(method=method, optimizer="sgd", momentum=each)) for each in (0, 0.5)]
    assert (clients[0] > clients[1]) == (method != "fedprox")


@pytest.mark.parametrize("method", ["fedavg", "feddar-sa", "ditto"])
def test_workers_and_stacks_give_the_same_bits(method):
    cohort = cohort_of("binary")
    one, two = (feddar.train(cohort, method, "mlp", batched=True, rounds=2, batch_size=8, jobs=jobs) for jobs in (1, 2))
    assert_same(one, two, rtol=0, atol=0)


def test_a_stacked_run_that_is_resumed_is_the_same(tmp_path):
    cohort, options = cohort_of("binary"), {"encoder": "mlp", "batched": True, "batch_size": 8, "schedule": "constant"}
    whole = feddar.train(cohort, "ditto", rounds=3, **options)
    feddar.train(cohort, "ditto", rounds=1, out=tmp_path / "run", **options)
    resumed = feddar.train(cohort, "ditto", rounds=3, out=tmp_path / "run", resume=True, **options)
    assert_same(whole, resumed, rtol=0, atol=0)


def table_of(sizes, seed=1):
    """A table with gaps and categories, of which no client has all levels, for clients with so many samples."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    client = np.repeat([f"h{i:02}" for i in range(len(sizes))], sizes)
    frame = pd.DataFrame({"age": rng.normal(60, 9, n), "sex": rng.choice(2, n)})
    frame["ward"] = rng.choice(["a", "b", "c"], n)
    frame["plan"] = [f"{name}-{place}" for name, place in zip(client, rng.integers(0, 3, n), strict=True)]
    frame.loc[frame.index[::3], "plan"] = "public"
    frame.loc[frame.index[::7], "age"] = np.nan
    frame.loc[frame.index[::11], "ward"] = None
    return Cohort.from_arrays(
        frame, rng.choice(2, n), client=client, domain=rng.integers(0, 2, n), task="classification"
    )


@pytest.mark.parametrize("encoder", ["mlp", "wide"])
@pytest.mark.parametrize("method", ["fedavg-di", "feddar-sa", "fedprox", "feddar", "fedrep", "ditto", "separate"])
def test_categories_gaps_and_columns_of_the_domain(method, encoder):
    cohort = table_of([40] * 10)
    assert_same(*both(cohort, method, encoder, validation=0.2))


def test_batches_by_the_samples_of_each_client():
    """Clients of a stack take equally many steps, in batches of different sizes."""
    sizes = [280, 300, 520, 560, 600, 40, 41, 33, 1100]
    cohort = table_of(sizes)
    settings = Settings(batched=True, batch_size=0)
    model, _ = build_model(cohort, "wide", settings)
    stacked = {participant.names for participant in make_clients(cohort, None, model, settings)}
    steps = {name: steps_in_epoch(size, 0) for name, size in zip(cohort.clients, sizes, strict=True)}
    assert all(len({steps[name] for name in names}) == 1 for names in stacked)
    together = [names for names in stacked if len(names) > 1]
    by_name = dict(zip(cohort.clients, sizes, strict=True))
    assert any(len({batch_size_for(by_name[name], 0) for name in names}) > 1 for names in together)
    assert_same(*both(cohort, "feddar", "wide", batch_size=0, lr=0.01, rounds=2))


def test_an_encoder_of_ones_own_made_of_known_parts():
    encoder = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))
    assert_same(*both(cohort_of("binary"), "feddar-sa", encoder, k=3))
    encoder[0].requires_grad_(False)
    one, other = both(cohort_of("binary"), "fedavg", encoder)
    assert_same(one, other)
    assert torch.equal(one.state.encoders["all"]["encoder.0.weight"], encoder[0].weight.double())


def test_encoders_that_cannot_be_stacked():
    assert not stackable(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not stackable(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    cohort, encoder = cohort_of("binary"), nn.Sequential(nn.Linear(5, 4), nn.Dropout())
    model, _ = build_model(cohort, encoder, Settings())
    assert all(isinstance(participant, Client) for participant in make_clients(cohort, None, model, Settings()))
    with pytest.raises(UserError, match="cannot train clients together"):
        feddar.train(cohort, "fedavg", encoder, batched=True, rounds=1)


def test_encoders_that_share_parameters_or_have_hooks_are_not_stacked():
    layer = nn.Linear(5, 5)
    tied = nn.Sequential(layer, nn.ReLU(), layer)
    hooked = nn.Sequential(nn.Linear(5, 5))
    hooked[0].register_forward_hook(lambda module, given, found: found - found.mean(0))
    for encoder in (tied, hooked):
        assert not stackable(encoder)
        run = feddar.train(cohort_of("binary", [20] * 10), "fedavg", encoder, rounds=1)
        assert run.round == 1


def test_an_encoder_may_have_infinite_constants():
    encoder = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    encoder.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    assert_same(*both(cohort_of("binary"), "fedminmax", encoder))


def test_a_test_set_that_lacks_clients_and_has_unknown_ones():
    cohort = cohort_of("binary")
    test = dataclasses.replace(cohort, clients=(*cohort.clients[:-2], "elsewhere", "nowhere"))
    for method in ("feddar-sa", "fedrep"):
        one, other = both(cohort, method, test=test)
        np.testing.assert_allclose(one.history["value"], other.history["value"], rtol=1e-8)


def test_stacked_where_it_pays():
    cohort = cohort_of("binary", [64] * 30 + [200] * 3 + [10] * 9)
    model, _ = build_model(cohort, "mlp", Settings())
    participants = make_clients(cohort, None, model, Settings())
    assert sorted(len(participant.names) for participant in participants) == [1, 1, 1, 9, 30]
    assert sorted(name for participant in participants for name in participant.names) == sorted(cohort.clients)
    wide, _ = build_model(cohort, nn.Sequential(nn.Linear(5, 100_000), nn.Linear(100_000, 2)), Settings())
    assert len(make_clients(cohort, None, wide, Settings())) == len(cohort.clients)
    assert len(make_clients(cohort, None, model, Settings(batched=False))) == len(cohort.clients)


@pytest.mark.parametrize(("method", "phase"), [("fedavg", "together"), ("feddar-sa", "heads"), ("fedrep", "encoder")])
def test_a_client_that_diverges_is_named(method, phase):
    cohort = cohort_of("regression", [20] * 10)
    x = cohort.x[0].clone()
    x[cohort.client == 4] *= 1e30
    wild = dataclasses.replace(cohort, x=(x,))
    with pytest.raises(TrainingError, match=f"client 'h04' sent .* in the {phase} phase"):
        feddar.train(wild, method, nn.Linear(5, 3), batched=True, rounds=1, optimizer="sgd", lr=0.1)


@given(
    sizes=st.lists(st.integers(1, 40) | st.integers(250, 600), min_size=1, max_size=12),
    batch_size=st.integers(0, 50),
    epochs=st.integers(1, 3),
)
def test_batches_are_those_that_each_client_draws(sizes, batch_size, epochs):
    phase = Phase("together", epochs=epochs, batch_size=batch_size)
    request = Request(phase, 3, 0)
    names = [f"client {number}" for number in range(len(sizes))]
    sets = SampleSets(torch.tensor(sizes), phase, [seeded_for(request, name).seed for name in names], torch.float64)
    starts = np.cumsum(sizes) - sizes
    for alike in sets.of_equal_steps():
        found = list(sets.batches(alike))
        for place, number in enumerate(alike.tolist()):
            with seeded_for(request, names[number]):
                wanted = list(batches(sizes[number], phase))
            assert len(found) == len(wanted) == epochs * steps_in_epoch(sizes[number], batch_size)
            for (_, rows, share), expected in zip(found, wanted, strict=True):
                there = share[place] > 0
                assert (rows[place][there] - starts[number]).tolist() == expected.tolist()
                torch.testing.assert_close(share[place].sum(), torch.tensor(1.0, dtype=torch.float64))


@dataclasses.dataclass(frozen=True)
class LaterPhase(Phase):
    """A phase with a field that no stack knows of."""

    clip: float = 0.0


START = {"epochs": 2, "lr": 0.1, "batch_size": 8}
OTHER = {
    "encoder": ("client", "domain"), "heads": ("client", "domain"), "epochs": (3,), "lr": (0.2,),
    "optimizer": ("adam",), "momentum": (0.5,), "weight_decay": (0.1,), "batch_size": (5,),
    "curvature": ("hessian", "block", "gram"), "curvature_at": ("start",), "mu": (0.3,), "mix": (0.5,), "q": (2.0,),
    "agnostic": (0.4,), "fair": (0.4,), "balanced": (True,), "added_heads": (True,),
    "assigns": ("client", "sample"), "private_norm": (True,), "target": (True,), "risks": (True,), "offsets": (True,),
    "class_weight": (True,), "label_shift": (True,),
}  # fmt: skip
"""For each field of a phase, values that are neither its default nor what the tests start from."""
CHANGES = [(name, field, value) for name in get_args(PhaseName) for field in OTHER for value in OTHER[field]]


def plain_phase(name, kind=Phase, **fields):
    """A phase as it may be asked for, with some training where it trains."""
    return kind(name, **((START if "lr" in UNDERSTOOD.get(name, ()) else {}) | fields))


def two_alike(kind="regression"):
    """Twice the same stack of clients that have models of their own, and a request with parameters for any phase."""
    cohort = cohort_of(kind, [22, 24, 23, 23])  # of equally many steps in batches of 8 and of 5
    model, initial = build_model(cohort, "mlp", Settings(dtype="float64"))
    by_domain = ServerState(initial).by_domain("domain", "domain", 3).in_training
    units = torch.tensor([7.0, 40.0], dtype=torch.float64) if kind == "regression" else None
    parameters = dataclasses.replace(by_domain.changed(initial.encoders, initial.heads), target=units)
    settings = Settings(dtype="float64", batched=True, batch_size=8)
    stacks = [participant for _ in range(2) for participant in make_clients(cohort, cohort, model, settings, cohort)]
    assert all(isinstance(stack, Stack) and len(stack.names) == 4 for stack in stacks) and len(stacks) == 2

    def request(phase):
        if phase.name == "census":
            return Request(phase, 0, 0)
        spreads = FIRST_OF_CLIENTS if phase.name in ("pool", "offsets") else None
        rates = torch.tensor([[[0.4, 0.6]]] * 3, dtype=torch.float64) if phase.name == "label-shift" else None
        asked = {"spreads": spreads, "label_rates": rates}
        return Request(phase, 1, 0, parameters, domain_weights(cohort.counts.sum(0)), **asked)

    for stack in stacks:
        list(stack.answers(request(Phase("adopt", "client", "client"))))
    return *stacks, request


def test_every_field_of_a_phase_is_tried():
    assert OTHER.keys() == {field.name for field in dataclasses.fields(Phase)} - {"name"}
    for field in dataclasses.fields(Phase):
        assert all(value not in (field.default, START.get(field.name)) for value in OTHER.get(field.name, ()))
    assert UNDERSTOOD.keys() <= set(get_args(PhaseName))
    assert set().union(*UNDERSTOOD.values()) <= OTHER.keys()


@pytest.mark.parametrize(("name", "field", "value"), CHANGES)
def test_a_stack_understands_a_field_or_its_clients_answer_one_by_one(name, field, value):
    changed = dataclasses.replace(Phase(name), **{field: value})
    if field not in UNDERSTOOD.get(name, ()):
        assert not supports(changed)
    if (name, field) == ("encoder", "mix"):
        return  # a mixture is of whole models: a client cannot do this either
    stack, clients, request = two_alike(
        "binary" if name == "label-shift" or field in ("class_weight", "label_shift") else "regression"
    )
    # Curvature is of heads of domains; where it is taken matters if there is some.
    others = {"heads": "domain"} if field.startswith("curvature") else {}
    others |= {"curvature": "hessian"} if field == "curvature_at" and name == "heads" else {}
    asked = request(plain_phase(name, **(others | {field: value})))
    together, alone = list(stack.answers(asked)), list(clients._one_by_one(asked))
    assert len(together) == (1 if supports(asked.phase) else len(stack.names))
    assert len(alone) == len(stack.names)
    assert_same_answers(asked, together, alone)
    for client, own in clients.own_states().items():
        torch.testing.assert_close(named_own(stack.own_states()[client]), named_own(own), rtol=1e-8, atol=1e-10)


def assert_same_answers(asked, together, alone):
    """What the server makes of them is the same."""
    close = {"rtol": 1e-8, "atol": 1e-10}
    assert [name for reply in together for name in reply.clients] == [reply.client for reply in alone]
    one, other = (reduce_replies(asked.phase, replies, asked.parameters, 0.01, 1) for replies in (together, alone))
    torch.testing.assert_close((one.encoders, one.heads), (other.encoders, other.heads), **close)
    assert one.loss == pytest.approx(other.loss, rel=1e-9, nan_ok=True)
    assert (one.risks is None) == (other.risks is None)
    for name in {name for reply in alone for name in reply.sums}:
        parts = ([reply.sums[name] for reply in replies] for replies in (together, alone))
        merge = torch.vstack if name == "counts" else sum
        torch.testing.assert_close(*map(merge, parts), **close)
    if asked.phase.name == "evaluate":
        torch.testing.assert_close(*(torch.cat([reply.scores for reply in replies]) for replies in (together, alone)))


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_field_that_is_new_makes_clients_answer_one_by_one(name):
    assert supports(plain_phase(name)) and supports(plain_phase(name, LaterPhase))
    phase = plain_phase(name, LaterPhase, clip=1.0)
    assert not supports(phase)
    stack, _, request = two_alike("binary" if name == "label-shift" else "regression")
    assert len(list(stack.answers(request(plain_phase(name))))) == 1
    replies = list(stack.answers(request(phase)))
    assert [reply.clients for reply in replies] == [(client,) for client in stack.names]


def test_a_field_that_is_new_and_has_no_plain_default_makes_clients_answer_one_by_one():
    later = dataclasses.make_dataclass(
        "LaterPhase", [("layers", tuple, dataclasses.field(default_factory=tuple))], bases=(Phase,), frozen=True
    )
    assert supports(Phase("together")) and not supports(later("together", layers=(1,)))


def bytes_kept(clients: int) -> int:
    """Return what Python objects take at the end of a round beyond what there was before training."""
    rows = np.arange(4 * clients)
    cohort = Cohort.from_arrays((rows % 7)[:, None] / 7.0, rows % 2, client=rows // 4, domain=rows % 2)
    kept: list[int] = []

    def look(_: RoundEnd) -> None:
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        feddar.train(cohort, "fedavg", encoder="mlp", rounds=1, validation=0, callbacks=[look])
    finally:
        tracemalloc.stop()
    return kept[0]


def test_hardly_anything_is_kept_for_each_client():
    """Their names, and states with nothing in them, took fifty bytes for each through the whole round loop."""
    bytes_kept(20)
    few, many = bytes_kept(100), bytes_kept(1100)
    assert (many - few) / 1000 < 40
