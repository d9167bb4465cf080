"""Learned domains: responsibilities, shares and training against brute force, and planted domains that are found."""

import numpy as np
import pytest
import torch
from torch import nn

from feddar.algorithm.mixture import (
    LOST,
    STEPS,
    Mixture,
    assigned,
    begun,
    begun_again,
    component_losses,
    component_scores,
    mixed,
    with_all_components,
    with_enough,
)
from feddar.algorithm.protocol import Phase, Reply, Request
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.models.model import build_model
from feddar.objectives.logistic import Binary
from feddar.objectives.multilabel import MultiLabel
from feddar.objectives.softmax import Multiclass
from feddar.objectives.squared import Regression
from feddar.settings import Settings, checked
from helpers.cohorts import make_cohort
from helpers.training import train

LEARNING = ("ifca", "fedem", "feddar-mixture")


class Same(nn.Module):
    """An encoder without parameters."""

    def forward(self, x):
        return x


def planted(seed=0, clients=20, samples=100, domains=3, classes=0, pure=False, features=8):
    """Return samples whose labels depend on x by another linear rule in each domain, in other shares at each client."""
    rng = np.random.default_rng(seed)
    rule, x = rng.normal(size=(domains, features)), rng.normal(size=(clients * samples, features))
    holder = np.repeat(np.arange(clients), samples)
    shares = np.eye(domains)[np.arange(clients) % domains] if pure else rng.dirichlet([0.4] * domains, clients)
    domain = np.array([rng.choice(domains, p=shares[i]) for i in holder])
    scores = (x * rule[domain]).sum(1) + 0.1 * rng.normal(size=len(x))
    names = {"domain": [f"domain-{m}" for m in domain], "client": [f"client-{i:02d}" for i in holder]}
    return Cohort.from_arrays(x, scores if classes == 0 else (scores > 0).astype(int), **names)


def rand_index(one, other):
    """Return the adjusted Rand index of two partitions (Hubert and Arabie, 1985)."""
    table = np.zeros((max(one) + 1, max(other) + 1))
    np.add.at(table, (one, other), 1)
    pairs, rows, columns, all_pairs = (
        (each * (each - 1) / 2).sum() for each in (table, table.sum(1), table.sum(0), np.array(len(one)))
    )
    expected = rows * columns / all_pairs
    return (pairs - expected) / ((rows + columns) / 2 - expected)


def found_in(run):
    """Return the most probable component of each training sample, by the responsibilities of its client."""
    phase, found = Phase("heads", *run.method.used), []
    for name in run.cohort.clients:
        data = run.cohort.at(name)
        mean, scale = (torch.tensor([0.0, 1.0]) if (units := run.state.in_use.target) is None else units).unbind()
        y = data.y if run.state.in_use.target is None else (data.y - mean) / scale
        scores = component_scores(run.model, phase, run.state.in_use, data.x)
        losses, weight = component_losses(run.model.objective, scores, y), torch.ones(len(data)).double()
        found.append(Mixture.of(run.own[name]).responsibilities(losses, weight, run.method.assigns).argmax(1))
    return torch.cat(found).numpy(), torch.cat([run.cohort.at(name).domain for name in run.cohort.clients]).numpy()


def expected_steps(losses, steps, units):
    """Return responsibilities and shares of EM with these losses, sample by sample."""
    n, count = losses.shape
    shares, errors = np.full(count, 1 / count), 1.0

    def responsible():
        rows = [[shares[m] * np.exp(-losses[j, m] / errors) for m in range(count)] for j in range(n)]
        return np.array([[each / sum(row) for each in row] for row in rows])

    for _ in range(steps):
        r = responsible()
        shares = np.array([(1 + sum(r[:, m])) / (count + n) for m in range(count)])
        errors = sum(2 * r[j, m] * losses[j, m] for j in range(n) for m in range(count)) / n if units else errors
    return responsible(), shares


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_round_is_a_step_of_em(classes, weighted):
    """One step of gradient descent for two clients, by EM in numpy and gradients by autograd."""
    cohort = make_cohort(n=60, clients=2, classes=classes)
    weight = torch.rand(len(cohort), dtype=torch.float64) + 0.5 if weighted else None
    weight = None if weight is None else weight / weight.mean()
    given = cohort.x[0].double().numpy(), cohort.y.numpy()
    cohort = Cohort.from_arrays(*given, client=cohort.client_names, weight=weight, dtype=torch.float64)
    lr, options = 0.3, {"encoder": "custom", "dtype": "float64", "standardise_target": False}
    run = train(cohort, "fedem", Same(), rounds=1, lr=lr, optimizer="sgd", batch_size=1000, dtype="float64",
                standardise_target=False)  # fmt: skip
    model, initial = build_model(cohort, Same(), Settings(method="fedem", **options))
    start = begun(ServerState(initial), "domain", 3, 0).heads
    sums = dict.fromkeys(start, 0.0)
    masses = dict.fromkeys(start, 0.0)
    for name in cohort.clients:
        data = cohort.at(name)
        features = torch.cat([data.x[0], torch.ones(len(data), 1, dtype=torch.float64)], 1)
        own = torch.ones(len(data), dtype=torch.float64) if weight is None else data.weight
        losses = torch.stack([model.objective.loss(features @ start[key].T, data.y) for key in start], 1)
        if not weighted:
            r, shares = expected_steps(losses.numpy(), STEPS, classes == 0)
            np.testing.assert_allclose(run.own[name].extra["shares"], shares, rtol=1e-9)
        else:
            kept = Mixture.of(run.own[name])
            r = kept.responsibilities(losses, own, "sample").numpy()
        for m, key in enumerate(start):
            part = own * torch.from_numpy(r[:, m])
            head = start[key].clone().requires_grad_()
            loss = (part * model.objective.loss(features @ head.T, data.y)).sum() / part.sum()
            (slope,) = torch.autograd.grad(loss, head)
            sums[key] = sums[key] + float(part.sum()) * (start[key] - lr * slope)
            masses[key] += float(part.sum())
    for key in start:
        torch.testing.assert_close(run.state.heads[key], sums[key] / masses[key], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(run.state.components, [*masses.values()], rtol=1e-9)


def test_steps_for_the_shares_never_lower_the_likelihood():
    losses, one = 3 * torch.rand(50, 4, generator=torch.Generator().manual_seed(0)).double(), torch.ones(50).double()

    def likelihood(mixture):  # with the prior that one sample of each component makes
        return (torch.logsumexp(mixture.shares.log() - losses, 1).sum() + mixture.shares.log().sum()).item()

    mixture, found = Mixture.equal(4), []
    for _ in range(10):
        found.append(likelihood(mixture))
        responsible = mixture.responsibilities(losses, one, "sample")
        mixture = mixture.fitted(losses, responsible, one, "sample", units=False)
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1


def test_all_samples_of_a_client_are_of_the_component_with_the_least_loss():
    losses = torch.tensor([[0.0, 2.0], [3.0, 2.0]]).double()
    equal, one = Mixture.equal(2), torch.ones(2).double()
    assert equal.responsibilities(losses, one, "client").tolist() == [[1, 0], [1, 0]]
    assert equal.responsibilities(losses, torch.tensor([1.0, 3.0]).double(), "client").tolist() == [[0, 1], [0, 1]]
    assert equal.settled(losses, one, "client", units=False).shares.tolist() == [1, 0]


@pytest.mark.parametrize("objective", [Binary(), Multiclass((0, 1, 2)), MultiLabel(("a", "b")), Regression()])
def test_scores_of_a_mixture_give_the_mean_prediction(objective):
    scores = torch.randn(40, 3, objective.outputs, generator=torch.Generator().manual_seed(1)).double()
    shares = torch.tensor([0.2, 0.5, 0.3]).double()
    wanted = sum(share * objective.predictions(each) for share, each in zip(shares, scores.unbind(1), strict=True))
    torch.testing.assert_close(objective.predictions(mixed(objective, scores, shares)), wanted)
    assert bool(mixed(objective, 1e4 * scores, shares).isfinite().all())


def test_a_component_of_few_patients_is_not_sent():
    """Its samples are of the others; patients with several rows count once."""
    data = make_cohort(n=8)
    responsible = torch.tensor([[0.5, 0.4, 0.1]] * 6 + [[0.0, 0.0, 1.0]] * 2).double()
    assert torch.equal(with_enough(responsible, data, 0), responsible)
    found = with_enough(responsible, data, 3)
    assert found.tolist() == [[1, 0, 0]] * 8  # the others are of 2.4 and 2.6 patients
    torch.testing.assert_close(with_enough(responsible, data, 2.5)[0], torch.tensor([5 / 6, 0, 1 / 6]).double())
    together = Cohort.from_arrays(data.x[0], data.y, group=[0, 0, 0, 0, 1, 1, 2, 3])
    assert with_enough(responsible, together, 2).tolist() == [[0, 0, 1]] * 8  # the others are of 1 and 0.8


def test_samples_stand_once_for_each_of_their_components():
    data = make_cohort(n=5)
    responsible = torch.tensor([[0.25, 0.75], [1, 0], [0, 1], [0.5, 0.5], [1, 0]]).double()
    part = assigned(data, responsible)
    assert part.domain.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert part.weight.tolist() == [0.25, 1, 0.5, 1, 0.75, 1, 0.5]
    assert torch.equal(part.y, data.y[[0, 1, 3, 4, 0, 2, 3]])


def test_a_reply_has_every_component():
    _, initial = build_model(make_cohort(), "mlp", Settings())
    sent = begun(ServerState(initial), "domain", 3, 0).in_training
    request = Request(Phase("together", "domain", "domain", assigns="client"), 1, 0, sent)
    reply = with_all_components(request, Reply(("one",)))
    assert [(part.weight, torch.equal(part.head, sent.heads[key])) for key, part in reply.heads.items()] == [
        (0.0, True)
    ] * 3
    assert {*reply.encoders} == {"0", "1", "2"} and not any(part.weight for part in reply.encoders.values())


def test_a_lost_component_begins_again_beside_the_largest():
    _, initial = build_model(make_cohort(), "mlp", Settings())
    state = begun(ServerState(initial), "domain", 3, 0)
    assert not torch.equal(state.heads["0"], state.heads["1"])
    assert begun_again(state, 0, 2) is state
    moved = ServerState(state.in_training, components=torch.tensor([100.0, 300 * LOST / 4, 200]))
    again = begun_again(moved, 0, 2)
    assert torch.equal(again.heads["0"], state.heads["0"]) and torch.equal(again.heads["2"], state.heads["2"])
    away, before = (again.heads["1"] - state.heads["2"]).norm(), (state.heads["1"] - state.heads["2"]).norm()
    assert 0 < away < 0.3 * before
    assert not torch.equal(again.heads["1"], begun_again(moved, 0, 3).heads["1"])


def test_known_domains_play_no_part_in_training():
    cohort = planted(clients=4, samples=30)
    one = Cohort.from_arrays(cohort.x[0], cohort.y, client=cohort.client_names)
    for method in LEARNING:
        here, there = (train(each, method, "mlp", rounds=2).state.heads for each in (cohort, one))
        assert all(torch.equal(here[key], there[key]) for key in here)


@pytest.mark.parametrize("classes", [0, 2])
def test_clusters_of_clients_are_found(classes):
    cohort = planted(clients=12, samples=60, pure=True, classes=classes)
    run = train(cohort, "ifca", "linear", k=8, lr=0.03, rounds=12)
    assert rand_index(*found_in(run)) == 1
    assert all(sorted(own.extra["shares"].tolist()) == [0, 0, 1] for own in run.own.values())


@pytest.mark.parametrize("method", ["fedem", "feddar-mixture"])
def test_planted_domains_are_found(method):
    part, test = planted(samples=75).split(0.2)
    options = {"k": 8, "lr": 0.03, "rounds": 10, "last": 1, "head_epochs": 3}
    run = train(part, method, "linear", test=test, **options)
    assert rand_index(*found_in(run)) >= 0.8
    loss, other = (
        each.results().query("scope == 'all' and metric == 'mse'")["value"].item()
        for each in (run, train(part, "fedavg", "linear", test=test, **options))
    )
    assert loss < 0.8 * other


@pytest.mark.parametrize("given", [{"multi_head": True}, {"domain_input": True}, {"aggregation": "second-order"}])
def test_what_needs_known_domains_is_refused(given):
    with pytest.raises(UserError, match=f"{next(iter(given))} is for domains that are known, and feddar-mixture"):
        checked(Settings, {"method": "feddar-mixture", **given})


def test_the_head_that_answers_is_named():
    cohort = make_cohort()
    run = train(cohort, "fedem", "mlp", rounds=1)
    assert set(run.predictions(cohort.x[0], client="site-1")["head"]) == {"components at site-1"}
    unseen = run.predictions(cohort.x[0], client="elsewhere", unknown_client="average")
    assert set(unseen["head"]) == {"components"}
    assert "the same components, by their shares over all clients" in unseen["note"][0]
    assert set(unseen["domain_used"]) == {""}
