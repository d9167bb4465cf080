"""Private corrections: their mathematics by brute force, and the whole round loop with them on one machine.

Between sites they are tested with the methods, in tests/federation/test_coordinator.py.
"""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import feddar
from feddar.algorithm.names import named_state
from feddar.algorithm.offsets import OFFSETS, Cells, CorrectedSamples, next_spreads
from feddar.algorithm.spreads import Directions, constants_only, directions
from feddar.data.cohort import Cohort
from feddar.objectives import Binary, Multiclass, MultiLabel, Regression
from helpers.onnx_files import require_files_of_clients

KINDS = {
    "two": Binary(("no", "yes")),
    "three": Multiclass(("a", "b", "c")),
    "number": Regression(),
    "several": MultiLabel(("a", "b")),
}
WIDTH, DOMAINS = 3, 3


def samples_of(kind, n=60, seed=0, effect=0.0):
    """Samples whose last domain is empty; scores are off by ``effect`` in the other domains."""
    generator = torch.Generator().manual_seed(seed)
    objective = KINDS[kind]
    features = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    features[:, -1] = 1
    scores = torch.randn(n, objective.outputs, generator=generator, dtype=torch.float64)
    domain = torch.randint(0, DOMAINS - 1, (n,), generator=generator)
    shifted = scores + effect * (1 + domain[:, None]) * features[:, :1]
    uniform = torch.rand(n, objective.outputs, generator=generator, dtype=torch.float64)
    if kind == "number":
        y = shifted[:, 0] + torch.randn(n, generator=generator, dtype=torch.float64)
    elif kind == "three":
        y = (shifted - (-uniform.log()).log()).argmax(1)
    else:
        y = (uniform < torch.sigmoid(shifted)).long()
        y = y[:, 0] if kind == "two" else y
    curvature = objective.curvature("hessian", scores, features)[0]
    along = directions(curvature, objective.outputs, True)
    return CorrectedSamples(objective, features, scores, y, one_client(domain, DOMAINS), along)


def one_client(domain, domains):
    return Cells(torch.zeros_like(domain), domain, 1, domains)


def log_joint(samples, a, b, spreads):
    """Return the log-likelihood of labels and corrections, written down directly."""
    c = samples.along.constants
    moved = torch.einsum("nor,nr->no", samples.design, a + b[samples.cells.place])
    losses = samples.objective.loss(samples.scores + moved, samples.y) / samples.unit
    parts = zip((a[:c], a[c:], b[:, :c], b[:, c:]), spreads, strict=True)
    return -losses.sum() - 0.5 * sum((part / spread).square().sum() for part, spread in parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spreads", [(0.3, 0.2, 1.0, 0.1), (3.0, 1.0, 0.1, 1.0), (1.0, 0.1, 3.0, 3.0)])
def test_corrections_are_the_mode_and_their_moments_those_of_the_normal_around_it(kind, spreads):
    samples = samples_of(kind, effect=0.7)
    found, c = samples.fitted(torch.tensor(spreads)), samples.along.constants
    a, b = found.client[0].clone().requires_grad_(), found.cell[0, : DOMAINS - 1].clone().requires_grad_()
    for slope in torch.autograd.grad(log_joint(samples, a, b, spreads), (a, b)):
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-3)
    assert not found.cell[0, -1].any()  # no samples, no correction

    def joint(flat):
        return log_joint(samples, flat[: len(a)], flat[len(a) :].view_as(b), spreads)

    at = torch.cat([a.detach(), b.detach().flatten()])
    variances = torch.linalg.inv(-torch.autograd.functional.hessian(joint, at)).diagonal()
    both = ((a[None], variances[None, : len(a)]), (b, variances[len(a) :].view_as(b)))
    parts = [(mode[:, some], v[:, some]) for mode, v in both for some in (slice(c), slice(c, None))]
    for row, (mode, variance) in zip(found.moments, parts, strict=True):
        expected = torch.stack([mode.detach().square().sum(), variance.sum(), torch.tensor(mode.numel()).double()])
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("spreads", [(0.0, 1, 1, 1), (1.0, 0, 1, 1), (1.0, 1, 0, 1), (1.0, 1, 1, 0), (0.0, 0, 0, 0)])
def test_a_spread_of_zero_leaves_no_correction(spreads):
    samples = samples_of("two", effect=1)
    found, c = samples.fitted(torch.tensor(spreads)), samples.along.constants
    parts = [part[..., some] for part in (found.client, found.cell) for some in (slice(c), slice(c, None))]
    assert [bool(part.any()) for part in parts] == [bool(spread) for spread in spreads]


def test_steep_corrections_are_found_without_running_away():
    """Labels that a correction could separate: the likelihood alone has no maximum."""
    features = torch.linspace(-5, 5, 40, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.0]) + torch.tensor(
        [0, 1.0]
    )
    y, domain = (features[:, 0] > 0).long(), torch.zeros(40, dtype=torch.long)
    along = Directions(torch.eye(2, dtype=torch.float64).flip(0), 1)
    samples = CorrectedSamples(KINDS["two"], features, torch.zeros(40, 1), y, one_client(domain, 1), along)
    found = samples.fitted(torch.tensor([1.0, 1.0, 3.0, 3.0]))
    assert 1 < float(found.cell[0, 0, 1]) < 10
    assert found.moments.isfinite().all()


def test_the_spreads_settle_where_the_likelihood_of_all_labels_is_largest():
    """For a number the marginal likelihood is that of a normal with a known covariance."""
    generator = torch.Generator().manual_seed(3)
    n, sites = 12, 40
    domain = torch.arange(n) % 2
    same = (domain[:, None] == domain).double()
    true = torch.eye(n, dtype=torch.float64) + 0.5**2 + 0.8**2 * same
    draws = torch.linalg.cholesky(true) @ torch.randn(n, sites, generator=generator, dtype=torch.float64)
    errors = list(draws.T)
    along = constants_only(1, 1)
    clients = [
        CorrectedSamples(KINDS["number"], torch.ones(n, 1), torch.zeros(n, 1), y, one_client(domain, 2), along)
        for y in errors
    ]
    for client in clients:
        client.unit = torch.ones(1, dtype=torch.float64)
    spreads = torch.tensor([0.3, 0.05, 0.3, 0.05], dtype=torch.float64)
    for _ in range(200):
        spreads = next_spreads(spreads, sum(client.fitted(spreads).moments for client in clients))

    def likelihood(site, cell):
        covariance = torch.eye(n, dtype=torch.float64) + site**2 + cell**2 * same
        normal = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=torch.float64), covariance)
        return sum(normal.log_prob(y) for y in errors)

    found = spreads[[0, 2]]
    at = found.clone().requires_grad_()
    slopes = torch.autograd.grad(likelihood(*at), at)[0]
    assert slopes.abs().max() < 0.02
    assert 0.2 < float(found[0]) < 0.9
    assert 0.5 < float(found[1]) < 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_several_clients_at_once_get_what_each_gets_alone(kind):
    along, spreads = samples_of(kind).along, torch.tensor([0.4, 0.1, 0.7, 0.2])
    parts = zip(*[_raw(kind, size, seed) for seed, size in enumerate((40, 25, 60))], strict=True)
    features, scores, y, domain = map(torch.cat, parts)
    owner = torch.arange(3).repeat_interleave(torch.tensor([40, 25, 60]))
    found = CorrectedSamples(KINDS[kind], features, scores, y, Cells(owner, domain, 3, DOMAINS), along).fitted(spreads)
    moments = torch.zeros(4, 3, dtype=torch.float64)
    for number in range(3):
        mine = owner == number
        cells = one_client(domain[mine], DOMAINS)
        single = CorrectedSamples(KINDS[kind], features[mine], scores[mine], y[mine], cells, along).fitted(spreads)
        torch.testing.assert_close(found.client[number], single.client[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.cell[number], single.cell[0], rtol=1e-6, atol=1e-6)
        moments += single.moments
    torch.testing.assert_close(found.moments, moments, rtol=1e-5, atol=1e-8)


def _raw(kind, n, seed):
    made = samples_of(kind, n=n, seed=seed, effect=seed)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    features[:, -1] = 1
    return features, made.scores, made.y, made.cells.number[made.cells.place]


@pytest.mark.parametrize("kind", KINDS)
def test_directions_are_uncorrelated_and_slopes_leave_the_mean_of_the_scores(kind):
    objective = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(200, 4, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.tensor([1.0, 5, 0.1, 1]).double()
    )
    features[:, -1] = 1
    scores = torch.randn(200, objective.outputs, generator=generator, dtype=torch.float64)
    curvature = objective.curvature("hessian", scores, features)[0]
    along = directions(curvature, objective.outputs, True)
    found, c = along.matrix.T @ curvature @ along.matrix, along.constants
    unit = curvature.view(objective.outputs, 4, objective.outputs, 4)[:, -1, :, -1].diagonal().mean()
    torch.testing.assert_close(
        found[c:, c:], unit * torch.eye(len(found) - c, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(found[:c, c:], torch.zeros_like(found[:c, c:]), rtol=0, atol=1e-6 * float(unit))
    # A softmax does not change when all scores of a sample move together: these directions are left out.
    assert (c, len(found)) == ((2, 8) if kind == "three" else (objective.outputs, 4 * objective.outputs))
    again = Directions.of(along.matrix, objective.outputs)
    assert again.constants == c
    heads = torch.randn(2, len(curvature), generator=generator, dtype=torch.float64)
    back = along.coordinates(heads) @ along.matrix.T
    torch.testing.assert_close((back - heads) @ curvature, torch.zeros_like(heads), rtol=0, atol=1e-6)


def planted(n=1800, effect=1.5, seed=0):
    """Clients x domains whose labels differ in level only: what offsets are for."""
    rng = np.random.default_rng(seed)
    client, domain = rng.integers(0, 3, n), rng.integers(0, 2, n)
    x = rng.normal(size=(n, 4))
    level = effect * np.where((client + domain) % 2, 1, -1)
    y = rng.random(n) < 1 / (1 + np.exp(-(x[:, 0] + level)))
    return Cohort.from_arrays(x, y, domain=[f"d{m}" for m in domain], client=[f"h{i}" for i in client])


OPTIONS = {"rounds": 4, "last": 1, "lr": 0.01, "threads": 1, "validation": 0, "schedule": "constant"}


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
    without = feddar.train(parts[0], "feddar", test=parts[1], site_offset=False, **OPTIONS)
    assert figure(run, "auc") > figure(without, "auc") + 0.1
    assert figure(run, "log_loss") < figure(without, "log_loss") - 0.1
    assert set(run.own["h0"].extra) == {OFFSETS}
    first, second = run.own["h0"].extra[OFFSETS][:, 0, -1].tolist()
    assert first * second < 0


def test_training_is_the_same_with_them_and_without(parts):
    """Only heads for use, and what is added at the client, differ; but evidence, and weights by it, allow for them."""
    fixed = OPTIONS | {"reweight": True, "rounds": 3}
    one, other = (feddar.train(parts[0], "feddar", site_offset=given, **fixed).state for given in (True, False))
    here, there = named_state(one), named_state(other)
    assert here.keys() - there.keys() == {"spreads"}
    assert any(name.startswith("trained/") for name in there)
    for name, value in there.items():
        if name.startswith(("encoder/", "trained/")):
            assert torch.equal(value, here[name]), name
    assert not torch.equal(here["domain_spreads"], there["domain_spreads"])


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
    assert explained["note"].iloc[0] == "client 'new' unknown: the same model without corrections"
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


def test_corrections_of_the_round_before_have_no_part_in_the_next(parts, tmp_path):
    """Else heads and corrections that fit each other badly drive each other on, and both grow from round to round."""
    train = partial(feddar.train, parts[0], "feddar", site_offset=True)
    whole = named_state(train(**OPTIONS).state)
    train(**OPTIONS | {"rounds": 2}, out=tmp_path)
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        kept, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    moved = {name: value + 5 * name.endswith(OFFSETS) for name, value in kept.items()}
    save_file(moved, path, facts)
    found = named_state(train(**OPTIONS, out=tmp_path, resume=True).state)
    assert any(not torch.equal(moved[name], value) for name, value in kept.items())
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


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
    require_files_of_clients(run, parts[1].x[0][:7].numpy(), tmp_path / "model.onnx")
