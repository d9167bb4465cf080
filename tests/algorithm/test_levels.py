"""Levels of categories: what the census counts, and how embeddings are averaged by the samples of each level."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.algorithm.client import Client
from feddar.algorithm.local_training import (
    batch_size_for,
    batches,
    counted,
    embeddings_of,
    weighed_by_levels,
)
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.server import reduce_replies
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort
from feddar.federation.privacy.minimum_cell import MinimumCell
from feddar.models.model import build_model
from feddar.settings import Settings
from feddar.simulation.stacked import Stack, make_clients
from helpers.training import train

CENSUS = Request(Phase("census"), 0, 0)
TOGETHER = Phase("together", epochs=2, lr=0.1, batch_size=8)


def table(sizes=(30, 26, 28, 31), seed=0, visits=1):
    """Samples with two categories; each client has a plan of its own, and some values are missing.

    Patients have so many samples each.
    """
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    client = np.repeat([f"h{i}" for i in range(len(sizes))], sizes)
    plan = np.where(rng.random(n) < 0.5, "public", client)
    frame = pd.DataFrame({"age": rng.normal(60, 9, n), "plan": plan, "ward": rng.choice(list("abcde"), n)})
    frame.loc[::6, "ward"] = None
    roles = {"client": client, "domain": rng.choice(["x", "y"], n), "group": np.arange(n) // visits}
    return Cohort.from_arrays(frame, rng.integers(0, 2, n), **roles)


def counts_of(cohort, column, levels):
    codes = cohort.codes[:, column].tolist()
    return [codes.count(level) for level in range(levels)]


def setting(cohort, batched=False):
    """Return a model whose embeddings know the counts, the parameters, and participants in float64."""
    settings = Settings(dtype="float64", batched=batched, batch_size=8)
    model, initial = build_model(cohort, "wide", settings)
    levels = torch.tensor([n for column in range(2) for n in counts_of(cohort, column, LEVELS[column])])
    state = ServerState(initial).trained({"all": counted(model, levels, float(len(cohort)))}, {})
    return model, state.in_training, make_clients(cohort, None, model, settings)


LEVELS = (6, 6)
"""Of the plan: missing, four of clients and the public one; of the ward: missing and five."""


def test_the_census_counts_every_level():
    cohort = table()
    model, _, clients = setting(cohort)
    assert [len(part.counts) for part in embeddings_of(model).values()] == [*LEVELS]
    for client in clients:
        mine = cohort.at(client.name)
        found = client.answer(CENSUS).sums["levels"]
        assert found.tolist() == [n for column in range(2) for n in counts_of(mine, column, LEVELS[column])]


def test_stacks_count_what_their_clients_count():
    cohort = table()
    _, _, clients = setting(cohort)
    _, _, (stack,) = setting(cohort, batched=True)
    assert isinstance(stack, Stack)
    (reply,) = stack.answers(CENSUS)
    torch.testing.assert_close(reply.sums["levels"], sum(client.answer(CENSUS).sums["levels"] for client in clients))
    for place, client in enumerate(clients):
        for name, counts in client.levels.items():
            assert torch.equal(stack.levels[name][place], counts)


@pytest.mark.parametrize("minimum", [0, 2, 5, 8])
@pytest.mark.parametrize("visits", [1, 2])
def test_levels_of_too_few_patients_are_not_counted(minimum, visits):
    """Patients count, not their visits."""
    cohort = table(visits=visits)
    model, _, _ = setting(cohort)
    left_out = 0
    for name in cohort.clients:
        part = cohort.at(name)
        client = Client(name, part, None, model, Processors((MinimumCell(minimum),)))
        found = client.answer(CENSUS).sums["levels"].split(LEVELS)
        for column, counts in enumerate(found):
            assert int(counts.sum()) == len(part)
            for level, n in enumerate(counts_of(part, column, LEVELS[column])):
                patients = set(part.group[part.codes[:, column] == level].tolist())
                if level and 0 < len(patients) < minimum:
                    assert counts[level] == 0
                    left_out += 1
                elif level:  # what is left out may count for the most frequent one
                    assert counts[level] >= n
    assert bool(left_out) == (minimum > 0)


def test_what_a_client_learns_of_a_level_with_too_few_patients_stays_there():
    cohort = table()
    model, start, _ = setting(cohort)
    client = Client("h0", cohort.at("h0"), None, model, Processors((MinimumCell(5),)))
    sent = client.answer(Request(TOGETHER, 1, 0, start)).encoders["all"].tensors
    changed = 0
    for name, counts in client.levels.items():
        same = (sent[f"{name}.weight"] == start.encoders["all"][f"{name}.weight"]).all(1)
        assert torch.equal(same, counts == 0)
        changed += int((~same).sum())
    assert changed


def test_without_counted_embeddings_levels_are_not_counted():
    cohort = table()
    model, _ = build_model(cohort, "mlp", Settings())
    for minimum in (0, 5):
        client = Client("h0", cohort.at("h0"), None, model, Processors((MinimumCell(minimum),)))
        assert client.levels == {}
        assert "levels" not in client.answer(CENSUS).sums


def test_the_model_has_the_counts_of_all_clients():
    cohort = table()
    run = train(cohort, "fedavg", rounds=1)
    state = run.state.encoders["all"]
    for column, name in enumerate(embeddings_of(run.model)):
        assert state[f"{name}.counts"].tolist() == counts_of(cohort, column, LEVELS[column])
        assert state[f"{name}.total"].tolist() == [len(cohort)]


@given(seed=st.integers(0, 1000), clients=st.integers(1, 5), rows=st.integers(1, 4))
def test_the_average_by_samples_of_what_is_sent_is_that_by_the_samples_of_each_level(seed, clients, rows):
    generator = torch.Generator().manual_seed(seed)
    n = torch.randint(0, 4, (clients, rows), generator=generator).double()
    samples = n.sum(1) + torch.randint(1, 9, (clients,), generator=generator)  # the others have other levels
    start = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    ends = torch.randn(clients, rows, 2, generator=generator, dtype=torch.float64)
    before = {"e.weight": start, "e.counts": n.sum(0), "e.total": samples.sum()[None]}
    one_by_one = torch.stack(
        [weighed_by_levels(before, {"e.weight": ends[i]}, {"e": n[i]}, samples[i])["e.weight"] for i in range(clients)]
    )
    together = weighed_by_levels(before, {"e.weight": ends}, {"e": n}, samples)["e.weight"]
    torch.testing.assert_close(together, one_by_one)
    average = torch.einsum("i,irk->rk", samples / samples.sum(), one_by_one)
    for r in range(rows):
        total = sum(n[i, r] * ends[i, r] for i in range(clients))
        expected = total / n[:, r].sum() if n[:, r].any() else start[r]
        torch.testing.assert_close(average[r], expected)


@pytest.mark.parametrize("batched", [False, True])
def test_the_round_averages_each_level_by_its_own_samples_and_the_rest_by_those_of_clients(batched):
    cohort = table()
    model, start, participants = setting(cohort, batched)
    request = Request(TOGETHER, 1, 0, start)
    found = reduce_replies(TOGETHER, [each for one in participants for each in one.answers(request)], start, 0.0, 1)
    ends = {}
    for name in cohort.clients:  # a client that counts no levels sends what it has trained
        client = Client(name, cohort.at(name), None, model)
        client.levels = {}
        ends[name] = client.answer(request).encoders["all"].tensors
    embeddings = list(embeddings_of(model))
    for name, value in found.encoders["all"].items():
        module = name.removesuffix(".weight")
        if module in embeddings:
            column = embeddings.index(module)
            n = torch.tensor([counts_of(cohort.at(each), column, LEVELS[column]) for each in cohort.clients])
        else:
            n = cohort.counts.sum(1, keepdim=True)
        shares = n.double() / n.sum(0).clamp_min(1)
        after = torch.stack([ends[each][name] for each in cohort.clients])
        begin = start.encoders["all"][name]
        shape = (*shares.shape, *[1] * (after.ndim - 2)) if module in embeddings else (-1, *[1] * (after.ndim - 1))
        expected = begin + (shares.view(shape) * (after - begin)).sum(0)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("n", "size"),
    [
        (1, 32),
        (255, 32),
        (256, 32),
        (511, 32),
        (512, 64),
        (1023, 64),
        (1024, 128),
        (2047, 128),
        (2048, 256),
        (9**9, 256),
    ],
)
def test_batches_are_about_an_eighth_of_the_samples(n, size):
    assert batch_size_for(n, 0) == size
    assert batch_size_for(n, 17) == 17


def test_batches_have_the_size_for_the_samples():
    assert [len(batch) for batch in batches(520, Phase("encoder", batch_size=0))] == [64] * 8 + [8]
    assert [len(batch) for batch in batches(520, Phase("encoder", batch_size=256))] == [256, 256, 8]
    assert [len(batch) for batch in batches(20, Phase("encoder", batch_size=0))] == [20]
