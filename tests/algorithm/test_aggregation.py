"""Second-order aggregation against pooled least squares and brute force; invariances as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import feddar
from feddar.algorithm.aggregation import Average, SecondOrder, second_order
from feddar.algorithm.credibility import Credibility
from feddar.errors import UserError
from feddar.models import heads
from feddar.objectives import Multiclass, Regression
from feddar.objectives.objective import CURVATURES

F64 = torch.float64
CLASSES = Multiclass(("a", "b", "c"))
NUMBER = Regression()


def clients(sizes, p=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, p, generator=generator, dtype=F64), torch.randn(n, generator=generator, dtype=F64))
        for n in sizes
    ]


def solved(data):
    """Each client's exact least-squares head with its mean curvature and its count."""
    W = torch.stack([torch.linalg.lstsq(X, y[:, None]).solution[:, 0] for X, y in data])
    H = torch.stack([X.T @ X / len(X) for X, _ in data])
    return W, H, torch.tensor([float(len(X)) for X, _ in data], dtype=F64)


def pooled(data):
    X, y = torch.cat([X for X, _ in data]), torch.cat([y for _, y in data])
    return torch.linalg.lstsq(X, y[:, None]).solution[:, 0]


sizes = st.lists(st.integers(6, 40), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, seed=st.integers(0, 1000))
def test_exact_heads_give_pooled_least_squares(sizes, seed):
    data = clients(sizes, seed=seed)
    torch.testing.assert_close(second_order(*solved(data)), pooled(data), rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(sizes=sizes, seed=st.integers(0, 1000), cut=st.integers(6, 12))
def test_splitting_a_client_in_two_changes_nothing(sizes, seed, cut):
    data = clients([n + 20 for n in sizes], seed=seed)
    X, y = data[0]
    halves = [(X[:cut], y[:cut]), (X[cut:], y[cut:]), *data[1:]]
    torch.testing.assert_close(second_order(*solved(data)), second_order(*solved(halves)), rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(sizes=sizes, seed=st.integers(0, 1000), damping=st.sampled_from([0.0, 0.1, 10.0]))
def test_order_and_clients_without_the_domain_change_nothing(sizes, seed, damping):
    W, H, a = solved(clients(sizes, seed=seed))
    result = second_order(W, H, a, damping)
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(second_order(W[order], H[order], a[order], damping), result, rtol=1e-10, atol=1e-10)
    absent = (torch.cat([W, 99 * W[:1]]), torch.cat([H, H[:1]]), torch.cat([a, torch.zeros(1, dtype=F64)]))
    torch.testing.assert_close(second_order(*absent, damping), result, rtol=1e-10, atol=1e-10)


def test_damping_goes_from_second_order_to_the_average():
    W, H, a = solved(clients([10, 20, 30]))
    average = (a[:, None] * W).sum(0) / a.sum()
    torch.testing.assert_close(second_order(W, H, a, 1e12), average, rtol=1e-9, atol=1e-9)
    distances = [float((second_order(W, H, a, d) - average).norm()) for d in (0.0, 0.1, 1.0, 10.0)]
    assert distances == sorted(distances, reverse=True)


def test_singular_curvature_keeps_the_average_along_flat_directions():
    H = torch.diag(torch.tensor([1.0, 0.0], dtype=F64)).expand(2, 2, 2)
    W = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=F64)
    combined = second_order(W, H, torch.tensor([1.0, 3.0], dtype=F64))
    torch.testing.assert_close(combined, torch.tensor([0.75, 1.5], dtype=F64))


@pytest.mark.parametrize("kind", CURVATURES)
def test_blocks_stream_as_the_matrix_formula(kind):
    """(S + lam I)^-1 (sum a H w + lam w_avg) by brute force, for every form of curvature."""
    generator = torch.Generator().manual_seed(0)
    total, damping = SecondOrder(0.3), 0.3
    S, Hw, Lw, L = 0.0, 0.0, 0.0, 0.0
    for n in (5, 9, 30):
        X = torch.randn(n, 3, generator=generator, dtype=F64)
        W = torch.randn(4, 3, generator=generator, dtype=F64)
        H = heads.curvature(Multiclass(("a", "b", "c", "d")), kind, W, X)
        blocks = heads.as_blocks(kind, W)
        total.add(blocks, H, n)
        S, Hw, Lw, L = S + H, Hw + H @ blocks, Lw + n * blocks, L + n
    lam = damping * S.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(S.shape[-1], dtype=F64)
    expected = torch.linalg.solve(S + lam * identity, Hw + lam * (Lw / L))
    torch.testing.assert_close(total.result(), expected, rtol=1e-9, atol=1e-9)


def test_gram_is_boehnings_bound_with_the_class_factor_cancelled():
    """Aggregating with the full bound, on the part where it is not singular, gives what gram gives."""
    generator = torch.Generator().manual_seed(1)
    gram, full = SecondOrder(0.0), SecondOrder(0.0)
    C = 3
    centre = torch.eye(C, dtype=F64) - 1 / C
    for n in (10, 20):
        X = torch.randn(n, 4, generator=generator, dtype=F64)
        W = centre @ torch.randn(C, 4, generator=generator, dtype=F64)
        G = heads.curvature(CLASSES, "gram", W, X)
        gram.add(heads.as_blocks("gram", W), G, n)
        full.add(heads.as_blocks("hessian", W), torch.kron(0.5 * centre, G[0])[None], n)
    combined = heads.from_blocks("gram", gram.result(), torch.Size((C, 4)))
    torch.testing.assert_close(combined, full.result().view(C, 4), rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(-5, 5)), min_size=1, max_size=8))
def test_average_is_weighted_and_streams(parts):
    average = Average()
    for weight, value in parts:
        average.add({"w": torch.tensor([value], dtype=F64)}, weight)
    expected = sum(w * v for w, v in parts) / sum(w for w, _ in parts)
    assert average.result()["w"].item() == pytest.approx(expected, abs=1e-9)


def test_average_of_one_is_itself_to_the_bit():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    average = Average()
    average.add({"w": value}, 6144)
    assert torch.equal(average.result()["w"], value)


def test_counters_are_not_averaged():
    average = Average()
    average.add({"w": torch.ones(1), "num_batches_tracked": torch.tensor(7)}, 1)
    assert set(average.result()) == {"w"}


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(2, 3), torch.zeros(2, 3, 2), torch.ones(2)),
        (torch.zeros(2, 3), torch.zeros(2, 3, 3), torch.ones(3)),
        (torch.zeros(2, 3), torch.zeros(2, 3, 3), -torch.ones(2)),
        (torch.zeros(2, 3), torch.zeros(2, 3, 3), torch.zeros(2)),
    ],
)
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(UserError):
        feddar.second_order(*arguments)
    with pytest.raises(UserError, match="damping"):
        SecondOrder(-1.0)


def test_single_precision_noise_is_not_taken_for_curvature():
    generator = torch.Generator().manual_seed(0)
    X = [torch.randn(1, 6, generator=generator) for _ in range(2)]
    W = torch.randn(2, 6, generator=generator)
    H = torch.stack([x.T @ x for x in X])
    exact = second_order(W.double(), torch.stack([x.double().T @ x.double() for x in X]), torch.ones(2, dtype=F64))
    torch.testing.assert_close(second_order(W, H, torch.ones(2)).double(), exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(second_order(W.numpy(), H.numpy(), [1.0, 1.0]), second_order(W, H, torch.ones(2)))
    with pytest.raises(UserError, match="finite"):
        second_order(W, H * float("nan"), torch.ones(2))


def domains(sizes, *, spread=1.0, width=4, objective=CLASSES, seed=0):
    """Samples of domains whose heads differ by ``spread``, and the heads: key -> (X, y, W)."""
    generator = torch.Generator().manual_seed(seed)
    outputs = objective.outputs
    common = torch.randn(outputs, width, generator=generator, dtype=F64)
    found = {}
    for m, n in enumerate(sizes):
        W = common + spread * torch.randn(outputs, width, generator=generator, dtype=F64)
        X = torch.randn(n, width, generator=generator, dtype=F64)
        scores = X @ W.T
        if objective == NUMBER:
            y = scores[:, 0] + torch.randn(n, generator=generator, dtype=F64)
        else:
            y = torch.multinomial(torch.softmax(scores, 1), 1, generator=generator)[:, 0]
        found[str(m)] = (X, y, W)
    return found


def mean_of(heads, data):
    return sum(len(data[key][1]) * W for key, W in heads.items()) / sum(len(y) for _, y, _ in data.values())


def credibility(data, objective=CLASSES, pieces=1, copies=1):
    """Every domain's samples, dealt to ``pieces`` clients; ``copies`` is as if each sample came so often."""
    start = {key: W for key, (_, _, W) in data.items()}
    found, mean = Credibility(start), mean_of(start, data)
    for piece in range(pieces):
        for key, (X, y, W) in data.items():
            evidence = heads.evidence(objective, mean, W, X[piece::pieces], y[piece::pieces])
            found.add(key, {name: copies * value for name, value in evidence.items()}, copies * len(y[piece::pieces]))
    return found


@pytest.mark.parametrize("objective", [CLASSES, NUMBER], ids=lambda each: each.task)
def test_credibility_is_its_formula(objective):
    """By brute force: gradients of single samples as long vectors, the covariance as one matrix, its pseudo-inverse."""
    data = domains([30, 80, 200], objective=objective, spread=0.4)
    W = {key: head for key, (_, _, head) in data.items()}
    mean, counts = mean_of(W, data), [len(y) for _, y, _ in data.values()]
    pairs, squares, slopes = 0.0, 0.0, []
    for X, y, own in data.values():
        slopes.append(sum(heads.gradient(objective, mean, X[j : j + 1], y[j : j + 1]).flatten() for j in range(len(y))))
        pairs = pairs + sum(torch.outer(r, r) for r in objective.residual(X @ own.T, y))
        squares = squares + sum(torch.outer(x, x) for x in X)
    L, total = torch.tensor(counts, dtype=F64), sum(counts)
    g = torch.stack(slopes) - L[:, None] / total * sum(slopes)
    covariance = torch.kron(pairs / total, squares / total)
    rank = int(torch.linalg.matrix_rank(covariance, rtol=1e-8))
    Q = sum(v @ torch.linalg.pinv(covariance, rtol=1e-8) @ v / n for v, n in zip(g, counts, strict=True))
    prior = float(rank * (total - (L**2).sum() / total) / (Q - (len(counts) - 1) * rank))
    found = credibility(data, objective)
    assert rank == (8 if objective == CLASSES else 4)
    assert found.prior() == pytest.approx(prior, rel=1e-8)
    moved = {key: 2 * head for key, head in W.items()}
    weighed = found.weighed(moved).heads
    for v, (key, (X, y, head)) in zip(g, data.items(), strict=True):
        away = (head - mean).flatten()
        curvature = heads.curvature(objective, "hessian", mean, X)[0]
        optimum = float(-(v @ away) / (away @ curvature @ away))
        kept = min(1, len(y) / (len(y) + prior) * max(1, optimum))
        torch.testing.assert_close(weighed[key], 2 * (mean + kept * (head - mean)), rtol=1e-8, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(5, 40), min_size=1, max_size=5), seed=st.integers(0, 1000), pieces=st.integers(2, 4))
def test_credibility_does_not_depend_on_who_holds_a_sample_nor_on_order(sizes, seed, pieces):
    data = domains(sizes, seed=seed)
    W = {key: head for key, (_, _, head) in data.items()}
    once, dealt = credibility(data), credibility(data, pieces=pieces)
    backwards = credibility(dict(reversed(data.items())))
    for key, head in once.weighed(W).heads.items():
        torch.testing.assert_close(dealt.weighed(W).heads[key], head, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(backwards.weighed(W).heads[key], head, rtol=1e-7, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(20, 60), min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_credible_heads_lie_between_the_mean_and_their_own_and_keep_all_with_many_samples(sizes, seed):
    data = domains(sizes, spread=2.0, objective=NUMBER, seed=seed)
    W = {key: head for key, (_, _, head) in data.items()}
    mean = mean_of(W, data)
    for key, head in credibility(data, NUMBER).weighed(W).heads.items():
        away, kept = W[key] - mean, head - mean
        torch.testing.assert_close(kept, away * (kept.norm() / away.norm()))
        assert kept.norm() <= away.norm() * (1 + 1e-9)
    for key, head in credibility(data, NUMBER, copies=10**9).weighed(W).heads.items():
        torch.testing.assert_close(head, W[key], rtol=1e-6, atol=1e-6)


def test_credibility_does_not_depend_on_the_features_units():
    """Features X A with heads W A'^-1 give the same scores, and the same shares of the heads are kept."""
    data = domains([20, 60, 150], spread=0.3)
    A = torch.randn(4, 4, generator=torch.Generator().manual_seed(5), dtype=F64)
    mixed = {key: (X @ A, y, W @ torch.linalg.inv(A).T) for key, (X, y, W) in data.items()}
    plain, other = (found.weighed(found.start).heads for found in (credibility(data), credibility(mixed)))
    for key in data:
        torch.testing.assert_close(other[key] @ A.T, plain[key], rtol=1e-8, atol=1e-8)


def test_few_samples_keep_little_and_domains_that_agree_nothing():
    data = domains([2, 2000, 2000], spread=0.3, objective=NUMBER)
    W = {key: head for key, (_, _, head) in data.items()}
    mean, weighed = mean_of(W, data), credibility(data, NUMBER).weighed(W).heads
    kept = [float((weighed[key] - mean).norm() / (W[key] - mean).norm()) for key in W]
    assert kept[0] < 0.3 and min(kept[1:]) > 0.9
    assert credibility(domains([50] * 40, spread=0.0, objective=NUMBER), NUMBER).prior() > 500


def test_the_prior_is_found_where_heads_are_drawn_from_one():
    """Features of unit variance and noise of variance 1: heads of variance 1/prior are worth ``prior`` samples."""
    for prior in (10, 100):
        data = domains([20, 50, 100, 200] * 100, spread=prior**-0.5, objective=NUMBER)
        found = credibility(data, NUMBER)
        assert found.prior() == pytest.approx(prior, rel=0.2)
        assert found.weighed(found.start).difference == pytest.approx(92.5 / (92.5 + prior), rel=0.2)


def test_domains_that_agree_do_not_differ():
    found = credibility(domains([50] * 40, spread=0.0, objective=NUMBER), NUMBER)
    assert found.weighed(found.start).difference < 0.1


def test_a_head_that_stopped_early_keeps_more():
    data = domains([100, 100], spread=0.3, objective=NUMBER)
    best = {key: (X, y, torch.linalg.lstsq(X, y[:, None]).solution.T) for key, (X, y, _) in data.items()}
    mean = mean_of({key: W for key, (_, _, W) in best.items()}, data)
    kept = []
    for share in (1.0, 0.5):
        stopped = {key: (X, y, mean + share * (W - mean)) for key, (X, y, W) in best.items()}
        W = {key: head for key, (_, _, head) in stopped.items()}
        weighed = credibility(stopped, NUMBER).weighed(W).heads
        kept.append([float((weighed[key] - mean).norm() / (W[key] - mean).norm()) for key in W])
    assert max(kept[0]) < 0.99 and min(kept[1]) > max(kept[0])


def test_samples_without_noise_keep_their_heads():
    data = {key: (X, (X @ W.T)[:, 0], W) for key, (X, _, W) in domains([5, 9], objective=NUMBER).items()}
    W = {key: head for key, (_, _, head) in data.items()}
    found = credibility(data, NUMBER)
    assert found.prior() < 1e-6
    for key, head in found.weighed(W).heads.items():
        torch.testing.assert_close(head, W[key])
