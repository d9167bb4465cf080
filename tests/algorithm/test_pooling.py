"""Partial pooling of heads: its mathematics by brute force, and the whole round loop with it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

import feddar
from feddar.algorithm import rounds
from feddar.algorithm.pooling import CURVATURE, SLOPE, Pooling, head_sums, most_probable
from feddar.algorithm.protocol import Reply, Request
from feddar.algorithm.server import epochs_by_evidence, shares_by_evidence
from feddar.algorithm.spreads import covariance_of
from feddar.data.cohort import Cohort, domain_weights
from feddar.data.domain_structure import Factor, bin_names
from feddar.models.heads import full_matrix
from feddar.objectives import Binary, Multiclass, Regression

KINDS = {"two": Binary(("no", "yes")), "three": Multiclass(("a", "b", "c")), "number": Regression()}


def quadratics(domains=4, r=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(domains, r + 3, r, generator=generator, dtype=torch.float64)
    return roots.mT @ roots, torch.randn(domains, r, generator=generator, dtype=torch.float64)


RACES = torch.eye(3, dtype=torch.float64).repeat_interleave(2, 0)[:4]
SEXES = torch.eye(2, dtype=torch.float64).repeat(2, 1)
CROSSED = (RACES[:, :2], SEXES)
"""Four domains: two levels of a factor by two of another."""


@pytest.mark.parametrize("factors", [(), CROSSED], ids=["one factor", "crossed"])
@pytest.mark.parametrize("variances", [(0.5, 2.0, 0.1), (0.0, 1.0, 0.0)])
def test_the_most_probable_heads_are_those_of_the_dense_gaussian(variances, factors):
    """Heads of all domains as one vector, whose covariance is a sum over factors of how cells resemble each other."""
    H, linear = quadratics()
    (M, r), mean, own = linear.shape, torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor(variances).double()
    of_factors = torch.tensor([[0.8, 0.1, 1.0], [1e-12, 0.3, 2.0]]).double()[: len(factors)]
    design = torch.cat([torch.ones(M, 1).double(), *factors], 1)
    wide = torch.cat([torch.full((1, r), 0.7, dtype=torch.float64), *(v.expand(2, r) for v in of_factors)])
    means = torch.cat([mean[None], torch.zeros(len(wide) - 1, r).double()])
    found = most_probable(H, linear, own, design, means, wide)

    one, size = torch.eye(M).double(), M * r
    prior = torch.kron(one, torch.diag(own)) + torch.kron(torch.ones(M, M).double(), 0.7 * torch.eye(r).double())
    for factor, v in zip(factors, of_factors, strict=True):
        prior += torch.kron(factor @ factor.T, torch.diag(v))
    curved = torch.linalg.inv(torch.eye(size).double() + torch.block_diag(*H) @ prior)
    force = curved @ (linear - H @ mean).flatten()
    torch.testing.assert_close(found.cells, mean + (prior @ force).view(M, r))
    known = curved @ torch.block_diag(*H)
    with_own, with_shared = (
        torch.kron(one, torch.diag(own)),
        torch.diag(wide.flatten()) @ torch.kron(design.T.contiguous(), torch.eye(r).double()),
    )
    torch.testing.assert_close(found.own, (with_own @ force).view(M, r))
    torch.testing.assert_close(found.shared, means + (with_shared @ force).view(-1, r))
    for variance, prior_variance, cross in (
        (found.posterior, own.expand(M, r), with_own), (found.certain, wide, with_shared)
    ):  # fmt: skip
        left = prior_variance.flatten() - (cross @ known @ cross.T).diagonal()
        torch.testing.assert_close(variance.flatten(), left, rtol=1e-6, atol=1e-10)
    assert not found.own[:, own == 0].any()


def test_without_factors_the_solution_is_that_of_one_common_part():
    """The formula of pooling before there were factors, with the common part eliminated last."""
    H, linear = quadratics()
    own, mean = (torch.tensor(each, dtype=torch.float64) for each in ([0.5, 2.0, 0.1], [0.3, -1.0, 2.0]))
    step = 0.7
    found = most_probable(
        H, linear, own, torch.ones(4, 1).double(), mean[None], torch.full((1, 3), step, dtype=torch.float64)
    )
    covariance = covariance_of(H, own)
    gain = H @ covariance
    certain = torch.linalg.inv((H - gain @ H).sum(0) + torch.eye(3).double() / step)
    common = certain @ ((linear - (gain @ linear[..., None])[..., 0]).sum(0) + mean / step)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found.common, common, **exact)
    torch.testing.assert_close(found.own, (covariance @ (linear - H @ common)[..., None])[..., 0], **exact)
    posterior = covariance + gain.mT @ certain @ gain
    torch.testing.assert_close(found.posterior, posterior.diagonal(dim1=1, dim2=2), **exact)


def domains_of(kind, sizes, spread, seed=0, width=4, factors=()):
    """Features, labels and domains of samples whose heads differ by ``spread``, and the heads they were drawn with.

    ``factors`` are how domains share parts, and the spread of these.
    """
    generator = torch.Generator().manual_seed(seed)
    objective, n = KINDS[kind], sum(sizes)
    features = torch.randn(n, width, generator=generator, dtype=torch.float64)
    features[:, -1] = 1
    domain = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    common = torch.randn(objective.outputs, width, generator=generator, dtype=torch.float64)
    own = spread * torch.randn(len(sizes), *common.shape, generator=generator, dtype=torch.float64)
    for shared, of_parts in factors:
        parts = of_parts * torch.randn(shared.shape[1], *common.shape, generator=generator, dtype=torch.float64)
        own = own + torch.einsum("mq,qop->mop", shared, parts)
    scores = torch.einsum("np,nop->no", features, (common + own)[domain])
    uniform = torch.rand(n, objective.outputs, generator=generator, dtype=torch.float64)
    y = {
        "two": (uniform < torch.sigmoid(scores))[:, 0].long(),
        "three": (scores - (-uniform.log()).log()).argmax(1),
        "number": scores[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64),
    }[kind]
    return features, y, domain, common + own


def pooled(kind, samples, heads, dealt=None, rounds=1, shared=()):
    """Pool heads [M, outputs, width] by the sums of clients, to whom samples are dealt."""
    features, y, domain, _ = samples
    dealt = torch.zeros(len(y), dtype=torch.long) if dealt is None else dealt
    spreads = found = None
    for _ in range(rounds):
        pooling = Pooling(KINDS[kind], True, shared)
        for client in dealt.unique().tolist():
            mine = dealt == client
            scores = torch.einsum("np,nop->no", features[mine], heads[domain[mine]])
            sums = head_sums(KINDS[kind], features[mine], scores, y[mine], domain[mine])
            pooling.add(Reply((str(client),), sums=sums))
        found = pooling.pooled({str(m): head for m, head in enumerate(heads)}, spreads)
        heads, spreads = torch.stack([found.part(1.0)[str(m)] for m in range(len(heads))]), found.spreads
    return heads, found


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), clients=st.integers(1, 5))
def test_who_holds_a_sample_does_not_matter(seed, clients):
    samples = domains_of("two", (30, 20, 10), 0.5, seed)
    start = torch.zeros(3, 1, 4, dtype=torch.float64)
    dealt = torch.randint(0, clients, (60,), generator=torch.Generator().manual_seed(seed))
    first, second = pooled("two", samples, start)[0], pooled("two", samples, start, dealt)[0]
    torch.testing.assert_close(first, second, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_domains_that_are_one_population_get_one_head_and_those_that_differ_their_own(kind):
    sizes = (400, 400, 400, 400, 400, 400)
    start = torch.zeros(6, KINDS[kind].outputs, 4, dtype=torch.float64)
    alike, differing = (domains_of(kind, sizes, spread) for spread in (0.0, 1.0))
    heads, found = pooled(kind, alike, start, rounds=12)
    assert found.spreads[:2].max() < 0.12
    assert (heads - heads.mean(0)).abs().max() < 0.25
    heads, found = pooled(kind, differing, start, rounds=12)
    assert 0.3 < float(found.spreads[:2].mean()) < 2
    true = differing[3]
    centred = (lambda w: w - w.mean(1, keepdim=True)) if kind == "three" else (lambda w: w)
    assert (centred(heads) - centred(true)).square().mean().sqrt() < 0.3


def test_a_domain_with_few_samples_takes_the_others_head():
    samples = domains_of("number", (2000, 2000, 2000, 3), 0.02)
    start = torch.zeros(4, 1, 4, dtype=torch.float64)
    heads, _ = pooled("number", samples, start, rounds=8)
    assert (heads[3] - heads[:3].mean(0)).abs().max() < 0.1


def evidence(pooling, heads, along, mean, spreads, shared):
    """The log of the likelihood of all labels with all parts integrated out but for a constant, by a dense Gaussian."""
    keys, c, r = pooling.keys, along.constants, along.matrix.shape[1]
    slope, curvature = (torch.stack([pooling.sums[f"{name}/{key}"] for key in keys]) for name in (SLOPE, CURVATURE))
    H = along.matrix.T @ torch.stack([full_matrix(each) for each in curvature]) @ along.matrix
    at = along.coordinates(torch.stack([heads[key].flatten() for key in keys]))
    linear = (H @ (at - mean)[..., None])[..., 0] - slope @ along.matrix
    alike, ones = [torch.eye(len(keys)).double(), *(each @ each.T for each in shared)], torch.ones(len(keys), len(keys))
    wide = [spreads[:2], *spreads[3:].view(-1, 2)]
    variances = [torch.cat([pair[0].expand(c), pair[1].expand(r - c)]) ** 2 for pair in wide]
    prior = torch.kron(ones.double(), spreads[2] ** 2 * torch.eye(r).double())
    prior = prior + sum(torch.kron(a, torch.diag(v)) for a, v in zip(alike, variances, strict=True))
    whole = torch.eye(len(prior)).double() + prior @ torch.block_diag(*H)
    return -torch.logdet(whole) / 2 + linear.flatten() @ torch.linalg.solve(whole, prior @ linear.flatten()) / 2


def test_spreads_of_factors_are_those_of_the_largest_evidence():
    """Found in another way: by following the gradient of the dense evidence in the logarithms of the spreads."""
    samples = domains_of("number", (150, 90, 60, 20), 0.3, seed=3, factors=((CROSSED[0], 1.0), (CROSSED[1], 0.7)))
    features, y, domain, _ = samples
    heads = {str(m): torch.zeros(1, 4, dtype=torch.float64) for m in range(4)}
    pooling = Pooling(KINDS["two"], True, CROSSED)  # a yes or no has no unit of errors, which would move on its own
    y = (y > y.median()).long()
    pooling.add(Reply(("a",), sums=head_sums(KINDS["two"], features, torch.zeros(len(y), 1).double(), y, domain)))
    spreads = None
    for _ in range(100):
        found = pooling.pooled(heads, spreads)
        spreads = found.spreads
    mean = torch.zeros(found.directions.matrix.shape[1]).double()
    free = spreads > 1e-2
    assert free.sum() >= 4
    logs = spreads.log().clone().requires_grad_()
    evidence(pooling, heads, found.directions, mean, logs.exp(), CROSSED).backward()
    assert logs.grad[free].abs().max() < 1e-3
    assert logs.grad[~free].max() < 1e-3  # what is 0 would be no better if it were larger
    best = minimize(
        lambda each: -float(evidence(pooling, heads, found.directions, mean, torch.tensor(each).exp(), CROSSED)),
        np.full(7, -1.0), bounds=[(-9, 2)] * 7,
    )  # fmt: skip
    reached = float(evidence(pooling, heads, found.directions, mean, spreads, CROSSED))
    assert reached > -best.fun - 0.01


def crossing(levels, other):
    """How levels x other domains share the parts of both factors."""
    one, two = torch.eye(levels).double(), torch.eye(other).double()
    return one.repeat_interleave(other, 0), two.repeat(levels, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_of_three_borrows_from_its_margins_and_a_factor_without_effect_has_no_spread(kind):
    first, second = crossing(6, 4)
    third = torch.eye(2).double()[torch.tensor([(m // 4 + m % 4) % 2 for m in range(24)])]
    sizes = (*(250,) * 23, 3)
    samples = domains_of(kind, sizes, 0.0, factors=((first, 0.8), (second, 0.8)))
    start = torch.zeros(24, KINDS[kind].outputs, 4, dtype=torch.float64)
    alone, _ = pooled(kind, samples, start, rounds=12)
    heads, found = pooled(kind, samples, start, rounds=12, shared=(first, second, third))
    centred = (lambda w: w - w.mean(1, keepdim=True)) if kind == "three" else (lambda w: w)
    errors = [(centred(each) - centred(samples[3]))[-1].square().mean().sqrt() for each in (alone, heads)]
    assert errors[1] < 0.25
    assert 2 * errors[1] < errors[0]
    own, of_factors = found.spreads[:2], found.spreads[3:].view(3, 2)
    assert of_factors[:2].min() > 0.3
    assert max(own.max(), of_factors[2, 1]) < 0.1
    assert of_factors[2, 0] < 0.2  # of two levels


def test_a_cell_without_samples_has_what_its_margins_say():
    shared = crossing(4, 4)
    samples = domains_of("number", (*(200,) * 15, 0), 0.0, factors=((shared[0], 1.0), (shared[1], 1.0)))
    start = torch.zeros(16, 1, 4, dtype=torch.float64)
    heads, _ = pooled("number", samples, start, rounds=12, shared=shared)
    assert (heads[15] - samples[3][15]).abs().max() < 0.2
    assert (heads[:15].mean(0) - samples[3][15]).abs().max() > 0.5


def test_ordered_domains_have_heads_that_vary_smoothly():
    edges = tuple(range(0, 110, 10))
    smooth = Factor(column="age", levels=tuple(bin_names(edges)), edges=edges).shared()
    samples = domains_of("two", (400, *(60,) * 3, 4, *(60,) * 4, 400), 0.0, seed=1, factors=((smooth, 1.5),))
    start = torch.zeros(10, 1, 4, dtype=torch.float64)
    alone, heads = (pooled("two", samples, start, rounds=12, shared=each)[0] for each in ((), (smooth,)))
    errors = [(each - samples[3]).square().mean((1, 2)).sqrt() for each in (alone, heads)]
    assert errors[1].mean() < 0.8 * errors[0].mean()
    assert errors[1][4] < 0.7 * errors[0][4]
    assert heads.diff(dim=0).diff(dim=0).abs().mean() < 0.5 * alone.diff(dim=0).diff(dim=0).abs().mean()


def test_a_part_of_the_step_lies_between_drawn_and_stepped_heads():
    samples = domains_of("two", (50, 30), 0.5)
    start = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    _, found = pooled("two", samples, start)
    half = found.part(0.5)
    for key in ("0", "1"):
        torch.testing.assert_close(half[key], (found.drawn[key] + found.stepped[key]) / 2)
    # Without a step heads are only drawn together.
    spread = [
        torch.stack([heads["0"], heads["1"]]).diff(dim=0).norm()
        for heads in ({"0": start[0], "1": start[1]}, found.drawn)
    ]
    assert spread[1] < spread[0]


def table(effect, seed=0, n=4000):
    rng = np.random.default_rng(seed)
    x, domain, client = rng.normal(size=(n, 4)), rng.integers(0, 3, n), rng.integers(0, 3, n)
    w = rng.normal(size=4) + effect * rng.normal(size=(3, 4))
    y = rng.random(n) < 1 / (1 + np.exp(-(x * w[domain]).sum(1)))
    return Cohort.from_arrays(x, y, domain=[f"d{m}" for m in domain], client=[f"c{i}" for i in client])


OPTIONS = {"rounds": 6, "site_offset": False, "threads": 1}


def test_heads_in_use_come_together_in_training_where_domains_are_one_population():
    spreads = {}
    for effect in (0.0, 2.0):
        train, test = table(effect).split(0.3)
        run, plain = (feddar.train(train, "feddar", test=test, credibility=on, **OPTIONS) for on in (True, False))
        spreads[effect] = float(run.state.domain_spreads[1])
        loss = [
            float(each.evaluate(test).query("name == 'domain_avg' and metric == 'log_loss'")["value"].iloc[0])
            for each in (run, plain)
        ]
        assert loss[0] < loss[1] + 0.005
    assert spreads[0.0] < 0.1 < spreads[2.0]


def test_large_heads_are_weighed_as_a_whole_instead():
    train, _ = table(1.0).split(0.3)
    wide = torch.nn.Sequential(torch.nn.Linear(4, 200), torch.nn.ReLU())
    run = feddar.train(train, "feddar", wide, **OPTIONS | {"rounds": 2})
    assert run.state.domain_spreads is None
    assert run.state.used_heads is not None


@pytest.mark.parametrize("width", [8, 200], ids=["pooled", "weighed as a whole"])
def test_clients_are_sent_equal_weights_and_all_epochs_first_and_then_what_evidence_says(monkeypatch, width):
    whole = table(0.0, n=1200)
    train = whole.rows(torch.nonzero((whole.domain > 0) | (torch.arange(len(whole)) % 5 == 0)).flatten())
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU())
    options = OPTIONS | {"validation": 0, "schedule": "constant"}  # else the rate depends on the number of rounds
    before = feddar.train(train, "feddar", encoder, **options | {"rounds": 2}).state.difference
    sent, epochs = {}, {}

    def recorded(phase, number, *rest, **fields):
        sent[number, phase.name] = fields.get("domain_weights")
        epochs[number, phase.name] = phase.epochs
        return Request(phase, number, *rest, **fields)

    monkeypatch.setattr(rounds, "Request", recorded)
    feddar.train(train, "feddar", encoder, **options | {"rounds": 3})
    counts = train.counts.sum(0)
    torch.testing.assert_close(sent[1, "encoder"], domain_weights(counts))
    expected = domain_weights(counts, shares_by_evidence(counts, before, 3))
    torch.testing.assert_close(sent[3, "encoder"], expected)
    assert not torch.allclose(expected, domain_weights(counts))
    assert epochs[1, "heads"] == 5
    assert epochs[3, "heads"] == epochs_by_evidence(5, before, 3) < 5
    assert epochs[3, "encoder"] == 1


def test_validation_says_which_part_of_the_step_is_taken():
    train, _ = table(1.0).split(0.3)
    run = feddar.train(train, "feddar", **OPTIONS)
    assert float(run.state.blend) in (-1, 0, 0.25, 0.5, 0.75, 1)
    without = feddar.train(train, "feddar", validation=0, **OPTIONS)
    assert without.state.blend is None


def test_a_model_so_sure_that_nothing_bends_is_left_as_it_is():
    """With a learning rate far too large all probabilities are 0 or 1, and curvature vanishes."""
    train, test = table(1.0, n=400).split(0.3)
    run = feddar.train(train, "feddar", test=test, rounds=2, lr=500.0, threads=1)
    assert np.isfinite(run.predict_proba(test.x[0], domain=test.domain_names)).all()
