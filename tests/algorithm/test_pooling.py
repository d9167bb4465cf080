"""Partial pooling of heads: its mathematics by brute force, and the whole round loop with it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import feddar
from feddar.algorithm import rounds
from feddar.algorithm.pooling import Pooling, head_sums, most_probable
from feddar.algorithm.protocol import Reply, Request
from feddar.algorithm.server import epochs_by_evidence, shares_by_evidence
from feddar.data.cohort import Cohort, domain_weights
from feddar.objectives import Binary, Multiclass, Regression

KINDS = {"two": Binary(("no", "yes")), "three": Multiclass(("a", "b", "c")), "number": Regression()}


def quadratics(domains=4, r=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(domains, r + 3, r, generator=generator, dtype=torch.float64)
    return roots.mT @ roots, torch.randn(domains, r, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("variances", [(0.5, 2.0, 0.1), (0.0, 1.0, 0.0)])
def test_the_most_probable_parts_solve_the_whole_system(variances):
    """The unknowns are the common part and every domain's own, as one dense system."""
    H, linear = quadratics()
    M, r = linear.shape
    free = torch.tensor(variances).double() > 0
    precision = torch.zeros((M + 1) * r, (M + 1) * r, dtype=torch.float64)
    right = torch.zeros((M + 1) * r, dtype=torch.float64)
    for m in range(M):
        own = slice((m + 1) * r, (m + 2) * r)
        for first in (slice(0, r), own):
            for second in (slice(0, r), own):
                precision[first, second] += H[m]
            right[first] += linear[m]
        precision[own, own] += torch.diag(1 / torch.tensor(variances).double().clamp_min(1e-14))
    mean = torch.tensor([0.3, -1.0, 2.0]).double()
    precision[:r, :r] += torch.eye(r).double() / 0.7
    right[:r] += mean / 0.7
    covariance = torch.linalg.inv(precision)
    solution = covariance @ right
    common, own, certain, posterior = most_probable(H, linear, torch.tensor(variances).double(), mean, 0.7)
    torch.testing.assert_close(common, solution[:r], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own, solution[r:].view(M, r), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(certain, covariance.diagonal()[:r], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(posterior, covariance.diagonal()[r:].view(M, r), rtol=1e-5, atol=1e-6)
    assert not own[:, ~free].any()


def domains_of(kind, sizes, spread, seed=0, width=4):
    """Features, labels and domains of samples whose heads differ by ``spread``, and the heads they were drawn with."""
    generator = torch.Generator().manual_seed(seed)
    objective, n = KINDS[kind], sum(sizes)
    features = torch.randn(n, width, generator=generator, dtype=torch.float64)
    features[:, -1] = 1
    domain = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    common = torch.randn(objective.outputs, width, generator=generator, dtype=torch.float64)
    own = spread * torch.randn(len(sizes), *common.shape, generator=generator, dtype=torch.float64)
    scores = torch.einsum("np,nop->no", features, (common + own)[domain])
    uniform = torch.rand(n, objective.outputs, generator=generator, dtype=torch.float64)
    y = {
        "two": (uniform < torch.sigmoid(scores))[:, 0].long(),
        "three": (scores - (-uniform.log()).log()).argmax(1),
        "number": scores[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64),
    }[kind]
    return features, y, domain, common + own


def pooled(kind, samples, heads, dealt=None, rounds=1):
    """Pool heads [M, outputs, width] by the sums of clients, to whom samples are dealt."""
    features, y, domain, _ = samples
    dealt = torch.zeros(len(y), dtype=torch.long) if dealt is None else dealt
    spreads = found = None
    for _ in range(rounds):
        pooling = Pooling(KINDS[kind], constant=True)
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
