"""Private offsets: their mathematics by brute force, and the whole round loop with them on one machine.

Between sites they are tested with the methods, in tests/federation/test_coordinator.py.
"""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.algorithm.offsets import OFFSETS, SPREADS, ScoredSamples, every_pair, likeliest
from feddar.data.cohort import Cohort
from feddar.objectives import Binary, Multiclass, MultiLabel, Regression

KINDS = {
    "two": Binary(("no", "yes")),
    "three": Multiclass(("a", "b", "c")),
    "number": Regression(),
    "several": MultiLabel(("a", "b")),
}


def samples_of(kind, n=60, domains=3, seed=0, effect=0.0):
    generator = torch.Generator().manual_seed(seed)
    objective = KINDS[kind]
    scores = torch.randn(n, objective.outputs, generator=generator, dtype=torch.float64)
    domain = torch.randint(0, domains - 1, (n,), generator=generator)  # the last domain has no samples
    shifted = scores + effect * (1 + domain[:, None])
    uniform = torch.rand(n, objective.outputs, generator=generator, dtype=torch.float64)
    if kind == "number":
        y = shifted[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64)
    elif kind == "three":
        y = (shifted - (-uniform.log()).log()).argmax(1)
    else:
        y = (uniform < torch.sigmoid(shifted)).long()
        y = y[:, 0] if kind == "two" else y
    return ScoredSamples(objective, scores, y, domain, domains)


def log_joint(samples, a, b, spreads):
    """Return the log-likelihood of labels and offsets, written down directly."""
    losses = samples.objective.loss(samples.scores + a + b[samples.domain], samples.y) / samples.unit
    return -losses.sum() - 0.5 * (a / spreads[0]).square().sum() - 0.5 * (b / spreads[1]).square().sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spreads", [(0.3, 1.0), (3.0, 0.1), (1.0, 3.0)])
def test_the_offsets_are_the_mode_by_autograd(kind, spreads):
    samples = samples_of(kind, effect=0.7)
    found = samples.fitted(torch.tensor([spreads]))
    a, b = found.client[0].clone().requires_grad_(), found.cell[0].clone().requires_grad_()
    slopes = torch.autograd.grad(log_joint(samples, a, b, spreads), (a, b))
    for slope in slopes:
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=2e-5)
    assert not found.cell[0, -1].any()  # no samples, no offset


@pytest.mark.parametrize("spreads", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_spread_of_zero_leaves_no_offset(spreads):
    found = samples_of("two", effect=1).fitted(torch.tensor([spreads, (3.0, 3.0)]))
    assert bool(found.client[0].any()) == bool(spreads[0])
    assert bool(found.cell[0].any()) == bool(spreads[1])
    assert found.total[1].any()


@pytest.mark.parametrize("spreads", [(0.3, 1.0), (1.0, 0.0), (0.0, 0.3), (1.0, 1.0)])
def test_the_marginal_likelihood_by_numerical_integration(spreads):
    """Two domains and one output: the integral over a, b_1 and b_2, with the densities' constants."""
    samples = samples_of("two", n=40, domains=3)
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    density = weights / weights.sum()
    a = (spreads[0] * nodes)[:, None] if spreads[0] else np.zeros((1, 1))
    b = (spreads[1] * nodes)[None] if spreads[1] else np.zeros((1, 1))
    offsets = a + b
    total = np.ones(offsets.shape[0])
    for domain in range(2):
        rows = samples.domain == domain
        score, y = samples.scores[rows, 0].numpy(), samples.y[rows].numpy()
        shifted = score[:, None, None] + offsets
        likelihood = np.exp(-np.logaddexp(0, np.where(y[:, None, None] == 1, -shifted, shifted)).sum(0))
        total *= likelihood @ (density if spreads[1] else np.ones(1))
    exact = np.log(total @ (density if spreads[0] else np.ones(1)))
    assert float(samples.fitted(torch.tensor([spreads])).log_likelihood) == pytest.approx(exact, abs=0.05)


def test_a_number_has_its_marginal_likelihood_exactly():
    """For squared errors Laplace's method is exact: labels are normal with a known covariance."""
    samples, spreads = samples_of("number", n=20), (0.8, 1.6)
    same = (samples.domain[:, None] == samples.domain).double()
    covariance = samples.unit * torch.eye(20, dtype=torch.float64) + spreads[0] ** 2 + spreads[1] ** 2 * same
    errors = samples.y - samples.scores[:, 0]
    exact = torch.distributions.MultivariateNormal(torch.zeros(20, dtype=torch.float64), covariance).log_prob(errors)
    constant = 10 * np.log(2 * np.pi * samples.unit)
    found = float(samples.fitted(torch.tensor([spreads])).log_likelihood)
    assert found - constant == pytest.approx(float(exact), abs=1e-6)


@pytest.mark.parametrize(("effect", "least", "most"), [(0.0, 0.0, 0.1), (1.5, 1.0, 3.0)])
def test_the_likeliest_spread_follows_the_effects(effect, least, most):
    sites = [samples_of("two", n=400, seed=seed, effect=effect * (-1) ** seed) for seed in range(12)]
    found = likeliest(torch.stack([site.fitted(every_pair()).log_likelihood for site in sites]).sum(0))
    assert least <= float(found.max()) <= most


def test_of_equally_likely_spreads_the_smallest_is_taken():
    assert likeliest(torch.zeros(len(SPREADS) ** 2)).tolist() == [0, 0]


def planted(n=1800, effect=1.5, seed=0):
    """Clients x domains whose labels differ in level only: what offsets are for."""
    rng = np.random.default_rng(seed)
    client, domain = rng.integers(0, 3, n), rng.integers(0, 2, n)
    x = rng.normal(size=(n, 4))
    level = effect * np.where((client + domain) % 2, 1, -1)
    y = rng.random(n) < 1 / (1 + np.exp(-(x[:, 0] + level)))
    return Cohort.from_arrays(x, y, domain=[f"d{m}" for m in domain], client=[f"h{i}" for i in client])


OPTIONS = {"rounds": 4, "validation": 0, "last": 1, "lr": 0.01, "threads": 1}


def figure(run, metric, name="domain_avg"):
    found = run.results()
    return float(found[(found["name"] == name) & (found["metric"] == metric)]["value"].iloc[0])


@pytest.fixture(scope="module")
def parts():
    return planted().split(0.3)


@pytest.fixture(scope="module")
def run(parts):
    return feddar.train(parts[0], "feddar", test=parts[1], site_offset=True, **OPTIONS)


def test_they_pay_where_sites_differ(parts, run):
    without = feddar.train(parts[0], "feddar", test=parts[1], **OPTIONS)
    assert figure(run, "auc") > figure(without, "auc") + 0.1
    assert figure(run, "log_loss") < figure(without, "log_loss") - 0.1
    # Training is the same: only what is added at the client differs.
    for name, value in named_state(without.state).items():
        assert torch.equal(value, named_state(run.state)[name])
    assert set(run.own["h0"].extra) == {OFFSETS}
    assert (run.own["h0"].extra[OFFSETS][0] * run.own["h0"].extra[OFFSETS][1]).item() < 0


def test_they_cost_next_to_nothing_where_sites_do_not_differ():
    train, test = planted(effect=0.0).split(0.3)
    with_and_without = [
        feddar.train(train, "feddar", test=test, site_offset=given, **OPTIONS) for given in (True, False)
    ]
    first, second = (figure(each, "log_loss") for each in with_and_without)
    assert first < second + 0.003


def test_a_client_never_seen_and_no_client_have_the_common_model(parts, run):
    x = parts[1].x[0][:5].numpy()
    common = run.predict_proba(x, domain=["d0"] * 5)
    np.testing.assert_array_equal(run.predict_proba(x, domain=["d0"] * 5, client=["new"] * 5), common)
    assert not np.allclose(run.predict_proba(x, domain=["d0"] * 5, client=["h0"] * 5), common)
    explained = run.predictions(x, domain=["d0"] * 5, client=["new", "h0", "h1", "h2", "h0"])
    assert explained["note"].iloc[0] == "client 'new' unknown: the same model without offsets"
    assert (explained["note"].iloc[1:] == "").all()
    assert (explained["head"] == "d0").all()


def test_saved_and_loaded_it_predicts_the_same(parts, run, tmp_path):
    run.save(tmp_path / "run")
    again = feddar.load(tmp_path / "run")
    assert torch.equal(again.own["h1"].extra[OFFSETS], run.own["h1"].extra[OFFSETS])
    test = parts[1]
    pd.testing.assert_frame_equal(again.evaluate(test), run.evaluate(test))
    assert figure(run, "auc") == pytest.approx(
        float(run.evaluate(test).query("name == 'domain_avg' and metric == 'auc'")["value"].iloc[0])
    )


def offsets_of(run):
    return torch.stack([run.own[client].extra[OFFSETS] for client in run.cohort.clients])


def test_two_workers_and_a_resumed_run_end_with_the_same_bits(parts, run, tmp_path):
    train = partial(feddar.train, parts[0], "feddar", site_offset=True)
    assert torch.equal(offsets_of(train(**OPTIONS, jobs=2)), offsets_of(run))
    train(**OPTIONS | {"rounds": 2}, out=tmp_path)
    assert torch.equal(offsets_of(train(**OPTIONS, out=tmp_path, resume=True)), offsets_of(run))


def test_a_stack_falls_back_and_ends_where_clients_do_one_by_one(parts):
    train = partial(feddar.train, parts[0], "feddar", site_offset=True, dtype="float64", **OPTIONS)
    first, second = (offsets_of(train(batched=given)) for given in (True, False))
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedbn"])
def test_methods_without_heads_of_domains_refuse_them(parts, method):
    with pytest.raises(feddar.UserError, match="site_offset is for heads of domains"):
        feddar.train(parts[0], method, site_offset=True)


@pytest.mark.parametrize("task", ["three", "number", "several"])
def test_other_outcomes_have_them(task):
    cohort = planted(n=600)
    level = (2 * cohort.y - 1 + cohort.x[0][:, 0]).numpy()
    y = {"three": np.digitize(level, [-1, 1]), "number": 10 * level, "several": np.stack([level > 0, level > 1], 1)}
    other = Cohort.from_arrays(cohort.x[0], y[task], domain=cohort.domain_names, client=cohort.client_names)
    train, test = other.split(0.3)
    metric = "mse" if task == "number" else "log_loss"
    with_them, without = (
        figure(feddar.train(train, "feddar", test=test, site_offset=given, **OPTIONS), metric)
        for given in (True, False)
    )
    assert with_them < without


def test_the_file_of_a_client_has_its_offsets(parts, run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    x = parts[1].x[0][:7].numpy()
    for client in ("h0", None):
        run.export(tmp_path / "model.onnx", client)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        found = session.run(None, {session.get_inputs()[0].name: x, "domain": np.zeros(7, np.int64)})[0]
        expected = run.predict_proba(x, domain=["d0"] * 7, **({"client": [client] * 7} if client else {}))
        np.testing.assert_allclose(found, expected, atol=1e-5)
