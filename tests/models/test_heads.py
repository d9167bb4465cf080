"""Gradients and curvatures of linear heads against autograd, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.models import heads
from feddar.objectives.objective import CURVATURES
from helpers.objectives import EXAMPLES, TASKS, draw_problem


@pytest.fixture(params=TASKS)
def objective(request):
    return EXAMPLES[request.param]


def total(objective, X, y):
    return lambda W: objective.loss(X @ W.T, y).sum()


def test_gradient_is_autograd(objective):
    W, X, y = draw_problem(objective)
    expected = torch.autograd.functional.jacobian(total(objective, X, y), W)
    torch.testing.assert_close(heads.gradient(objective, W, X, y), expected, rtol=1e-10, atol=1e-12)


def test_gradient_of_a_weighted_loss_is_autograd(objective):
    W, X, y = draw_problem(objective)
    weight = torch.linspace(0, 3, len(y), dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda W: (weight * objective.loss(X @ W.T, y)).sum(), W)
    torch.testing.assert_close(heads.gradient(objective, W, X, y, weight), expected, rtol=1e-10, atol=1e-12)


def test_hessian_is_autograd(objective):
    W, X, y = draw_problem(objective)
    expected = torch.autograd.functional.hessian(total(objective, X, y), W).reshape(W.numel(), W.numel())
    torch.testing.assert_close(heads.curvature(objective, "hessian", W, X)[0], expected, rtol=1e-10, atol=1e-12)


def test_evidence_is_summed_from_its_definition(objective):
    mean, X, y = draw_problem(objective)
    own = mean + 0.5 * draw_problem(objective, seed=1)[0]
    found = heads.evidence(objective, mean, own, X, y)
    torch.testing.assert_close(found["slope"], torch.autograd.functional.jacobian(total(objective, X, y), mean))
    line = torch.autograd.functional.hessian(
        lambda t: total(objective, X, y)(mean + t * (own - mean)), torch.zeros((), dtype=torch.float64)
    )
    torch.testing.assert_close(found["bend"], line, rtol=1e-9, atol=1e-12)
    residuals = [objective.residual((own @ x)[None], label[None])[0] for x, label in zip(X, y, strict=True)]
    torch.testing.assert_close(found["residuals"], sum(torch.outer(r, r) for r in residuals))
    torch.testing.assert_close(found["gram"], sum(torch.outer(x, x) for x in X))


def test_blocks_are_the_diagonal_of_the_hessian(objective):
    W, X, _ = draw_problem(objective)
    full = heads.curvature(objective, "hessian", W, X)[0].view(W.shape[0], W.shape[1], W.shape[0], W.shape[1])
    blocks = heads.curvature(objective, "block", W, X)
    assert blocks.shape == (W.shape[0], W.shape[1], W.shape[1])
    for c, block in enumerate(blocks):
        torch.testing.assert_close(block, full[c, :, c])


@pytest.mark.parametrize("seed", range(5))
def test_gram_bounds_the_softmax_hessian(seed):
    """Boehning: (I - 11'/C)/2 kron X'X is never less than the Hessian, at any head."""
    objective = EXAMPLES["multiclass"]
    W, X, _ = draw_problem(objective, seed=seed)
    C = len(W)
    factor = 0.5 * (torch.eye(C, dtype=torch.float64) - 1 / C)
    bound = torch.kron(factor, heads.curvature(objective, "gram", W, X)[0])
    gap = bound - heads.curvature(objective, "hessian", W, X)[0]
    assert torch.linalg.eigvalsh(gap).min() > -1e-10


def test_curvature_adds_over_samples(objective):
    W, X, _ = draw_problem(objective)
    for kind in CURVATURES:
        parts = heads.curvature(objective, kind, W, X[:13]) + heads.curvature(objective, kind, W, X[13:])
        torch.testing.assert_close(parts, heads.curvature(objective, kind, W, X))


@pytest.mark.parametrize("kind", CURVATURES)
def test_blocks_fit_their_curvature_and_come_back(objective, kind):
    W, X, _ = draw_problem(objective)
    blocks = heads.as_blocks(kind, W)
    assert (heads.curvature(objective, kind, W, X) @ blocks).shape == blocks.shape
    assert torch.equal(heads.from_blocks(kind, blocks, W.shape), W)


@pytest.mark.parametrize("kind", CURVATURES)
def test_curvature_times_heads_is_the_sum_of_clients_products(objective, kind):
    """Of clients with heads of their own, without any one's curvature."""
    clients = [draw_problem(objective, n=n, seed=n) for n in (7, 20, 33)]
    at = [draw_problem(objective, seed=100 + n)[0] for n in range(3)]
    expected = sum(
        heads.curvature(objective, kind, start, X) @ heads.as_blocks(kind, W)
        for start, (W, X, _) in zip(at, clients, strict=True)
    )
    scores = torch.cat([X @ start.T for start, (_, X, _) in zip(at, clients, strict=True)])
    own, features = torch.cat([X @ W.T for W, X, _ in clients]), torch.cat([X for _, X, _ in clients])
    found = heads.curvature_times_heads(objective, kind, scores, own, features)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 7), st.integers(0, 2**31))
def test_a_symmetric_matrix_comes_back_from_its_triangle(batch, q, seed):
    X = torch.randn(*batch, q, q, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = X + X.mT
    packed = heads.triangle(matrix)
    assert packed.shape == (*batch, q * (q + 1) // 2)
    assert torch.equal(heads.full_matrix(packed), matrix)
    assert torch.equal(heads.triangle(heads.full_matrix(packed)), packed)


@pytest.mark.parametrize("length", [2, 4, 5, 209])
def test_other_lengths_are_no_triangle(length):
    with pytest.raises(ValueError, match=f"{length} numbers"):
        heads.full_matrix(torch.zeros(3, length))
