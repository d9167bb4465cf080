import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddar.data.sources import synthetic_samples as synthetic
from feddar.errors import UserError


def test_the_truth_has_the_papers_shape_and_scale():
    truth = synthetic.make_truth(0)
    assert truth.B.shape == (20, 2)
    assert truth.W.shape == (5, 2)
    assert truth.shares.shape == (100, 5)
    np.testing.assert_allclose(truth.B.T @ truth.B, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(truth.W.T @ truth.W, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(truth.spectrum, np.full(2, 5**-0.5))
    np.testing.assert_allclose(truth.shares.sum(axis=1), 1)
    np.testing.assert_allclose(truth.coefficients[3], truth.B @ truth.W[3])


def test_small_alpha_gives_clients_one_domain_and_large_alpha_all():
    assert synthetic.make_truth(0, alpha=0.01).shares.max(axis=1).mean() > 0.95
    assert synthetic.make_truth(0, alpha=1000).shares.max(axis=1).mean() < 0.25


def test_shares_spread_as_dirichlet_alpha_times_the_uniform_prior():
    shares = synthetic.make_truth(0, clients=5000, alpha=0.4).shares
    np.testing.assert_allclose(shares.mean(axis=0), 0.2, atol=0.02)
    np.testing.assert_allclose(shares.var(axis=0), 0.2 * 0.8 / (0.4 + 1), rtol=0.05)


def test_samples_follow_truth_shares_and_noise():
    truth = synthetic.make_truth(1, clients=3, alpha=5)
    sample = synthetic.draw(truth, 20_000, 1, noise=0.1)
    assert sample.x.shape == (60_000, 20)
    for client, shares in enumerate(truth.shares):
        held = sample.domain[sample.client == client]
        np.testing.assert_allclose(np.bincount(held, minlength=5) / 20_000, shares, atol=0.02)
    residual = sample.y - (sample.x * truth.coefficients[sample.domain]).sum(axis=1)
    assert residual.std() == pytest.approx(0.1, rel=0.02)
    np.testing.assert_allclose(np.cov(sample.x.T), np.eye(20), atol=0.03)


def test_seeds_decide_everything():
    truth, again, other = (synthetic.make_truth(seed) for seed in (2, 2, 3))
    np.testing.assert_array_equal(truth.W, again.W)
    assert not np.array_equal(truth.W, other.W)
    for one, same in zip(synthetic.draw(truth, 5, 7), synthetic.draw(again, 5, 7), strict=True):
        np.testing.assert_array_equal(one, same)
    assert not np.array_equal(synthetic.draw(truth, 5, 7).x, synthetic.draw(truth, 5, 8).x)


@given(st.integers(0, 1000), st.integers(1, 30), st.integers(1, 8))
def test_drawn_moments_are_those_of_as_many_noise_free_samples(seed, samples, clients):
    rng = np.random.default_rng(seed)
    truth = synthetic.make_truth(rng, d=6, clients=clients)
    moments = synthetic.draw_moments(truth, samples, rng)
    assert moments.count.sum() == samples * clients
    for count, xx, xy, coefficients in zip(moments.count, moments.xx, moments.xy, truth.coefficients, strict=True):
        assert np.linalg.matrix_rank(xx, tol=1e-9) <= min(count, 6)
        np.testing.assert_allclose(xy, xx @ coefficients, atol=1e-10)


@pytest.mark.parametrize("samples", [2, 9])
def test_drawn_moments_have_the_spread_of_wishart_matrices(samples):
    rng = np.random.default_rng(3)
    truth = synthetic.make_truth(rng, d=4, k=1, domains=1, clients=1)
    drawn = np.array([synthetic.draw_moments(truth, samples, rng).xx[0] for _ in range(8000)])
    np.testing.assert_allclose(drawn.mean(axis=0), samples * np.eye(4), atol=0.25)
    np.testing.assert_allclose(drawn.var(axis=0), samples * (1 + np.eye(4)), rtol=0.15)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": 6}, {"clients": 0}, {"alpha": 0.0}, {"alpha": np.nan}])
def test_impossible_truths_are_refused(wrong):
    with pytest.raises(UserError, match=r"\.$"):
        synthetic.make_truth(0, **wrong)


@pytest.mark.parametrize(("samples", "noise"), [(0, 0.1), (5, -1.0), (5, np.nan)])
def test_impossible_samples_are_refused(samples, noise):
    with pytest.raises(UserError, match=r"\.$"):
        synthetic.draw(synthetic.make_truth(0), samples, 0, noise=noise)
