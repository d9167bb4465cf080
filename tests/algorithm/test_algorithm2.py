"""Algorithm 2: its parts against closed forms, and the whole against a plain loop over clients."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.algorithm import algorithm2 as linear
from feddar.data.moments import Moments
from feddar.data.sources import synthetic_samples as synthetic
from feddar.errors import UserError

seeds = st.integers(0, 2**32 - 1)


def some_moments(rng, counts, d=6):
    """Return samples with so many per key, in random order, and their moments."""
    key = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    x, y = rng.standard_normal((len(key), d)), rng.standard_normal(len(key))
    return x, y, key, Moments.from_samples(x, y, key, len(counts))


def assert_same(one: Moments, other: Moments):
    np.testing.assert_array_equal(one.count, other.count)
    np.testing.assert_allclose(one.xx, other.xx, atol=1e-12)
    np.testing.assert_allclose(one.xy, other.xy, atol=1e-12)


def test_moments_are_the_sums_of_products_by_key():
    x, y, key, moments = some_moments(np.random.default_rng(0), [4, 0, 9])
    for held in range(3):
        assert moments.count[held] == (key == held).sum()
        np.testing.assert_allclose(moments.xx[held], sum(np.outer(v, v) for v in x[key == held]) + np.zeros((6, 6)))
        np.testing.assert_allclose(moments.xy[held], (x * y[:, None])[key == held].sum(axis=0))


@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=4), st.floats(0, 1))
def test_moments_add_over_splits_in_any_order(seed, counts, share):
    rng = np.random.default_rng(seed)
    x, y, key, whole = some_moments(rng, counts)
    order, cut = rng.permutation(len(key)), int(share * len(key))
    halves = [Moments.from_samples(x[part], y[part], key[part], len(counts)) for part in (order[:cut], order[cut:])]
    assert_same(halves[0] + halves[1], whole)


@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_regrouping_equals_summing_by_the_coarser_key(seed, counts):
    x, y, key, fine = some_moments(np.random.default_rng(seed), counts)
    coarser = np.arange(len(counts)) % 2
    assert_same(fine.regroup(coarser, 3), Moments.from_samples(x, y, coarser[key], 3))


@pytest.mark.parametrize(("y", "key"), [([1.0], [0, 1]), ([1.0, 2.0], [0, 2]), ([1.0, 2.0], [-1, 0])])
def test_moments_refuse_what_does_not_fit(y, key):
    with pytest.raises(UserError):
        Moments.from_samples(np.ones((2, 3)), np.array(y), np.array(key), 2)


def test_heads_are_least_squares_of_minimum_norm():
    rng = np.random.default_rng(1)
    x, y, key, moments = some_moments(rng, [20, 1, 0, 3])
    B = linear.random_start(6, 3, rng)
    W = linear.solve_heads(B, moments)
    for held in (0, 1, 3):
        expected = np.linalg.lstsq(x[key == held] @ B, y[key == held])[0]
        np.testing.assert_allclose(W[held], expected, rtol=1e-7)
    assert (W[2] == 0).all()


@pytest.mark.parametrize("counts", [[7, 0, 2], [9], [1, 1, 4]])
def test_gradient_is_that_of_the_mean_over_keys_of_mean_half_squared_errors(counts):
    rng = np.random.default_rng(2)
    x, y, key, moments = some_moments(rng, counts)
    B, W = linear.random_start(6, 2, rng), rng.standard_normal((len(counts), 2))
    variable = torch.tensor(B, requires_grad=True)
    residual = torch.tensor(y) - ((torch.tensor(x) @ variable) * torch.tensor(W[key])).sum(dim=1)
    loss = torch.stack([residual[torch.tensor(key == held)].square().mean() / 2 for held in np.unique(key)]).mean()
    loss.backward()
    np.testing.assert_allclose(linear.gradient(B, W, moments), variable.grad.numpy(), atol=1e-12)


def test_step_is_the_gradient_step_with_orthonormal_columns():
    rng = np.random.default_rng(3)
    *_, moments = some_moments(rng, [7, 5])
    B, W = linear.random_start(6, 2, rng), rng.standard_normal((2, 2))
    after = linear.step(B, W, moments, eta=0.1)
    np.testing.assert_allclose(after.T @ after, np.eye(2), atol=1e-12)
    assert linear.distance(after, B - 0.1 * linear.gradient(B, W, moments)) < 1e-12
    assert linear.distance(after, B) > 1e-3


@given(seeds, st.integers(1, 6))
def test_distance_is_symmetric_bounded_and_blind_to_the_basis(seed, k):
    rng = np.random.default_rng(seed)
    A, B = linear.random_start(6, k, rng), linear.random_start(6, k, rng)
    mixed = B @ (rng.standard_normal((k, k)) + 4 * np.eye(k))
    d = linear.distance(A, B)
    assert 0 <= d <= 1 + 1e-12
    assert d == pytest.approx(linear.distance(B, A), abs=1e-9)
    assert d == pytest.approx(linear.distance(A, mixed), abs=1e-9)
    assert linear.distance(A, A) < 1e-14


@pytest.mark.parametrize("angle", [1e-12, 1e-9, 1e-4, 0.3, np.pi / 2])
def test_distance_is_the_sine_of_the_largest_angle_however_small(angle):
    A = np.eye(5)[:, :2]
    B = A.copy()
    B[:, 1] = np.cos(angle) * A[:, 1] + np.sin(angle) * np.eye(5)[:, 4]
    assert linear.distance(A, B) == pytest.approx(np.sin(angle), rel=1e-3)


def test_moment_start_takes_the_leading_eigenvectors():
    truth = synthetic.make_truth(4, clients=50)
    sample = synthetic.draw(truth, 2000, 4, noise=0)
    start = linear.moment_start(sample.x, sample.y, 2)
    Z = sum(y**2 * np.outer(x, x) for x, y in zip(sample.x[:500], sample.y[:500], strict=True))
    expected = np.linalg.eigh(Z)[1][:, -2:]
    assert linear.distance(linear.moment_start(sample.x[:500], sample.y[:500], 2), expected) < 1e-10
    assert linear.distance(start, truth.B) < 0.15


def test_fit_equals_algorithm_2_written_as_a_loop_over_clients():
    truth = synthetic.make_truth(5, d=8, clients=12)
    data = synthetic.draw(truth, 15, 5)
    start, eta, M = linear.random_start(8, 2, np.random.default_rng(5)), 1.3, len(truth.W)
    B = start
    for _ in range(4):
        W = loop_heads(B, data, M)
        total = np.zeros_like(B)
        for m in range(M):
            held = np.flatnonzero(data.domain == m)
            slopes = [(W[m] @ B.T @ data.x[j] - data.y[j]) * np.outer(data.x[j], W[m]) for j in held]
            total += sum(slopes) / len(held)
        B = np.linalg.qr(B - eta * total / M).Q
    moments = Moments.from_samples(data.x, data.y, data.domain, M)
    fit = linear.fit(moments, start, rounds=4, eta=eta)
    np.testing.assert_allclose(fit.coefficients(), loop_heads(B, data, M) @ B.T, atol=1e-10)


def loop_heads(B, data, domains):
    """Solve (sum_i A_im) w_m = sum_i a_im, adding over clients as a server would."""
    heads = []
    for m in range(domains):
        A, a = np.zeros((2, 2)), np.zeros(2)
        for i in np.unique(data.client):
            X, y = data.x[(data.client == i) & (data.domain == m)], data.y[(data.client == i) & (data.domain == m)]
            A, a = A + B.T @ X.T @ X @ B, a + B.T @ X.T @ y
        heads.append(np.linalg.solve(A, a))
    return np.array(heads)


@pytest.mark.parametrize("random", [True, False])
def test_without_noise_the_truth_is_recovered(random):
    truth = synthetic.make_truth(6)
    data = synthetic.draw(truth, 10, 6, noise=0)
    start = linear.random_start(20, 2, np.random.default_rng(6)) if random else linear.moment_start(data.x, data.y, 2)
    fit = linear.fit(Moments.from_samples(data.x, data.y, data.domain, 5), start, rounds=200, eta=5.0)
    assert linear.distance(fit.B, truth.B) < 1e-12
    np.testing.assert_allclose(fit.coefficients(), truth.coefficients, atol=1e-12)


def test_a_domain_nobody_holds_leaves_the_others_alone():
    truth = synthetic.make_truth(7)
    data = synthetic.draw(truth, 10, 7, noise=0)
    start = linear.random_start(20, 2, np.random.default_rng(7))
    five = linear.fit(Moments.from_samples(data.x, data.y, data.domain, 5), start, rounds=20, eta=5.0)
    six = linear.fit(Moments.from_samples(data.x, data.y, data.domain, 6), start, rounds=20, eta=5.0)
    np.testing.assert_allclose(six.B, five.B, atol=1e-12)
    assert (six.W[5] == 0).all()


def test_new_samples_are_drawn_twice_a_round_first_for_the_heads():
    rng = np.random.default_rng(8)
    sets = [some_moments(rng, [9, 9])[-1] for _ in range(6)]
    asked = []

    def draw(call):
        asked.append(call)
        return sets[call]

    start = linear.random_start(6, 2, rng)
    last = list(islice(linear.representations(draw, start, 0.2), 4))[-1]
    B = start
    for number in (0, 2, 4):
        B = linear.step(B, linear.solve_heads(B, sets[number]), sets[number + 1], 0.2)
    assert asked == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(last, B)


def test_averaged_heads_weigh_the_clients_own_by_their_samples():
    rng = np.random.default_rng(9)
    *_, parts = some_moments(rng, [6, 2, 4])
    B = linear.random_start(6, 2, rng)
    own = linear.solve_heads(B, parts)
    W = linear.average_heads(parts, np.array([0, 0, 1]), 3)(B, parts)
    np.testing.assert_allclose(W, [(6 * own[0] + 2 * own[1]) / 8, own[2], [0, 0]])


def test_averaging_misses_what_second_order_aggregation_finds():
    truth = synthetic.make_truth(10)
    data = synthetic.draw(truth, 5, 10, noise=0)
    pairs, pair = np.unique(data.client * 5 + data.domain, return_inverse=True)
    parts = Moments.from_samples(data.x, data.y, pair, len(pairs))
    start = linear.random_start(20, 2, np.random.default_rng(10))
    averaged = linear.average_heads(parts, pairs % 5, 5)
    by_domain = parts.regroup(pairs % 5, 5)
    wa, more = (linear.fit(by_domain, start, rounds, 5.0, averaged) for rounds in (200, 400))
    assert linear.distance(wa.B, truth.B) > 1e-3
    assert linear.distance(more.B, truth.B) > 1e-3
    assert linear.distance(linear.fit(by_domain, start, 200, 5.0).B, truth.B) < 1e-10


def test_least_squares_is_the_pseudo_inverse_and_ridge_its_penalised_form():
    x, y, key, moments = some_moments(np.random.default_rng(11), [15, 3])
    for held in range(2):
        X, target = x[key == held], y[key == held]
        np.testing.assert_allclose(linear.least_squares(moments)[held], np.linalg.pinv(X) @ target, rtol=1e-7)
        ridge = np.linalg.solve(X.T @ X + 0.5 * np.eye(6), X.T @ target)
        np.testing.assert_allclose(linear.least_squares(moments, ridge=0.5)[held], ridge, rtol=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda moments, start: linear.fit(moments, start, rounds=-1, eta=1.0),
        lambda moments, start: linear.fit(moments, start, rounds=1, eta=0.0),
        lambda moments, start: linear.fit(moments, start, rounds=1, eta=np.nan),
        lambda moments, start: linear.least_squares(moments, ridge=-1.0),
        lambda moments, start: linear.random_start(3, 4, np.random.default_rng(0)),
        lambda moments, start: linear.moment_start(np.ones((4, 3)), np.ones(4), 0),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(wrong):
    rng = np.random.default_rng(12)
    *_, moments = some_moments(rng, [5])
    with pytest.raises(UserError, match=r"\.$"):
        wrong(moments, linear.random_start(6, 2, rng))
