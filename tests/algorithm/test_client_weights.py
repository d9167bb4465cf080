"""Methods whose clients count by weights of their own: rounds of each by hand, in float64."""

import math
from dataclasses import replace

import pytest
import torch

from feddar.algorithm.agnostic import ASCENT, LARGEST, counted_by_ascent
from feddar.algorithm.by_gap import FAIRNESS, UNKNOWN, counted_by_gap, values_of
from feddar.algorithm.names import named_state
from feddar.algorithm.protocol import NOTHING, TALLY, Phase, Reply, Request, TrainedHead
from feddar.errors import UserError
from feddar.models.model import build_model
from feddar.settings import Settings, checked
from helpers.by_hand import ONE_STEP, by_hand, encoder, same, slopes
from helpers.cohorts import make_cohort
from helpers.training import train

ROUNDS = 5


@pytest.fixture
def cohort():
    """Give samples of four clients of different sizes."""
    return make_cohort(300).rows(torch.arange(300)[torch.arange(300) % 7 > 2])


def clients_of(cohort):
    return [torch.nonzero(cohort.client == k).flatten() for k in range(len(cohort.clients))]


def next_leaves(leaves, losses, clients, weights):
    """The average, by weights, of what each client has after one step on its mean loss."""
    found = [slopes(leaves, losses, lambda each, rows=rows: each[rows].mean()) for rows in clients]
    total = sum(weights)
    steps = [sum(w * s for w, s in zip(weights, each, strict=True)) / total for each in zip(*found, strict=True)]
    return [leaf - 0.3 * step for leaf, step in zip(leaves, steps, strict=True)]


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("step", [0.3, 4.0])
def test_afl_by_hand(classes, step):
    """The mixture of clients, at first their shares of samples, is multiplied by exp(step F_k) in every round."""
    whole = make_cohort(300, classes=classes)
    cohort = whole.rows(torch.arange(300)[torch.arange(300) % 7 > 2])
    settings = ONE_STEP | {"method": "afl", "minmax_lr": step, "rounds": ROUNDS, "standardise_target": False}
    leaves, losses = by_hand(cohort, **settings)
    clients = clients_of(cohort)
    shares = torch.tensor([len(rows) / len(cohort) for rows in clients], dtype=torch.float64)
    first = shares
    for _ in range(ROUNDS):
        now = losses(leaves)
        leaves = next_leaves(leaves, losses, clients, shares)
        shares = shares * torch.exp(step * torch.stack([now[rows].mean() for rows in clients]))
        shares = shares / shares.sum()
    same(train(cohort, encoder=encoder(), **settings), leaves)
    assert float((shares - first).abs().max()) > 0.005


def test_afl_raises_the_client_that_is_worst_off():
    """Of one client labels are the other way round: its loss falls further than under fedavg."""
    cohort = make_cohort(400, domains=1)
    odd = cohort.client == 3
    cohort = replace(cohort, y=torch.where(odd, 1 - cohort.y, cohort.y))
    options = {"rounds": 30, "lr": 0.01, "validation": 0}
    losses = {
        name: train(cohort, name, encoder(), test=cohort, **options, **more).results().query("metric == 'log_loss'")
        for name, more in {"fedavg": {}, "afl": {"minmax_lr": 0.3}}.items()
    }
    worst = {name: found.query("scope == 'client'")["value"].max() for name, found in losses.items()}
    assert worst["afl"] < 0.8 * worst["fedavg"]


@pytest.mark.parametrize(("method", "knob"), [("afl", "minmax_lr"), ("fairfed", "beta")])
def test_a_step_of_0_is_fedavg_to_the_bit(cohort, method, knob):
    run, plain = (train(cohort, rounds=3, **each) for each in ({"method": method, knob: 0.0}, {"method": "fedavg"}))
    one, other = named_state(run.state), named_state(plain.state)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_of_clients_stay_in_range():
    """However large losses and steps are, the weight is a number that sums over sites can be made of."""
    head = {"all": TrainedHead(torch.zeros(1, 3), 10.0)}
    reply, own = Reply(("a",), heads=head), NOTHING
    for number in range(1, 30):
        tally = torch.tensor([1e12, 1.0], dtype=torch.float64) if number > 1 else None
        loss = torch.tensor(1e15 if number % 9 else 0.0, dtype=torch.float64)
        request = Request(Phase("together", agnostic=1e3), number, 0, tally=tally)
        found, own = counted_by_ascent(request, reply, own, loss, 10.0)
        weight = found.heads["all"].weight
        assert 10 * math.exp(-LARGEST) <= weight <= 10 * math.exp(LARGEST)
        assert bool(found.sums[TALLY].isfinite().all())
    assert own.extra[ASCENT].shape == (2,)


def gaps_by_hand(cohort, losses, scores, rows):
    """The gap between domains and the mean, of samples: the rate of positives found, or the loss."""
    y, z = cohort.y[rows], cohort.domain[rows]
    if len(cohort.classes or ()) == 2:
        right = ((scores[rows] > 0) == (y == 1)).double()
        by_domain = [right[(z == m) & (y == 1)].mean() for m in range(3) if bool(((z == m) & (y == 1)).any())]
        mean = right.mean()
    else:
        by_domain, mean = [losses[rows][z == m].mean() for m in range(3) if bool((z == m).any())], losses[rows].mean()
    gap = float(max(by_domain) - min(by_domain)) if len(by_domain) > 1 else None
    return gap, float(mean)


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("beta", [0.3, 5.0])
def test_fairfed_by_hand(classes, beta):
    """Weights move by -beta (D_k - mean D) of the model two rounds before; one client has one domain, and no gap."""
    cohort = make_cohort(400, classes=classes)
    kept = (torch.arange(400) % 7 > 2) & ((cohort.client != 2) | (cohort.domain == 0))
    cohort = cohort.rows(torch.nonzero(kept).flatten())
    settings = ONE_STEP | {"method": "fairfed", "beta": beta, "rounds": 6, "standardise_target": False}
    leaves, losses = by_hand(cohort, **settings)
    clients = clients_of(cohort)
    weights = [len(rows) / len(cohort) for rows in clients]
    first, distances = weights, []
    for number in range(6):
        if number > 1:
            before = distances[number - 2]
            mean = sum(before) / len(before)
            weights = [max(0.0, w - beta * (d - mean)) for w, d in zip(weights, before, strict=True)]
        now = losses(leaves).detach()
        scores = losses.scores(leaves)
        common = gaps_by_hand(cohort, now, scores, torch.arange(len(cohort)))
        each = [gaps_by_hand(cohort, now, scores, rows) for rows in clients]
        assert [gap is None for gap, _ in each] == [False, False, True, False]
        found = [abs(common[0] - gap) if gap is not None else abs(common[1] - mean) for gap, mean in each]
        distances.append(found)
        leaves = next_leaves(leaves, losses, clients, weights)
    same(train(cohort, encoder=encoder(), **settings), leaves)
    assert max(abs(w - v) for w, v in zip(weights, first, strict=True)) > 0.01
    if beta > 1:
        assert 0.0 in weights


def test_of_few_patients_of_a_class_no_rate_is_told(cohort):
    """Nor is the number of those of the other class, from which it could be subtracted."""
    model, start = build_model(cohort, encoder(), Settings(method="fairfed"))
    request = Request(Phase("together", fair=1.0), 1, 0, start)
    plain = values_of(model, request, start, cohort, 0)
    few = cohort.domain == 1
    few[torch.nonzero(few & (cohort.y == 1)).flatten()[:4]] = False  # all the other samples of domain 1 have class 0
    changed = replace(cohort, y=torch.where(few, 0, cohort.y))
    found = values_of(model, request, start, changed, 5)
    assert bool((plain[:, 1] > 0).all())
    assert found[1].tolist() == [0.0, 0.0]
    assert bool((found[[0, 2], 1] == plain[[0, 2], 1]).all())
    assert found[3, 1] == len(cohort)


def test_a_client_whose_gap_nobody_knows_keeps_its_weight():
    values = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    head = {"all": TrainedHead(torch.zeros(1, 3), 10.0)}
    request, own = Request(Phase("together", fair=1.0), 1, 0), NOTHING
    for _ in range(3):
        reply, own = counted_by_gap(request, Reply(("a",), heads=head), own, values, 10.0)
        assert reply.heads["all"].weight == 10.0
    assert own.extra[FAIRNESS].tolist() == [10.0, UNKNOWN, UNKNOWN, 0.75]


@pytest.mark.parametrize(("method", "by"), [("afl", "loss"), ("fairfed", "gaps")])
def test_second_order_sums_do_not_count_by_weights_of_clients(method, by):
    with pytest.raises(UserError, match=f"{method} counts clients by their {by}"):
        checked(Settings, {"method": method, "multi_head": True, "aggregation": "second-order"})
