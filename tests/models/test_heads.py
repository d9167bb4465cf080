"""Gradients and curvatures against autograd, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.models import heads

TASKS = ("regression", "binary", "multiclass")


def problem(task, n=40, p=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = 4 if task == "multiclass" else 1
    X = torch.randn(n, p, generator=generator, dtype=torch.float64)
    W = torch.randn(outputs, p, generator=generator, dtype=torch.float64)
    if task == "regression":
        y = torch.randn(n, generator=generator, dtype=torch.float64)
    else:
        y = torch.randint(0, max(outputs, 2), (n,), generator=generator)
    return W, X, y


def total(task, X, y):
    return lambda W: heads.loss(task, X @ W.T, y).sum()


@pytest.mark.parametrize("task", TASKS)
def test_gradient_is_autograd(task):
    W, X, y = problem(task)
    expected = torch.autograd.functional.jacobian(total(task, X, y), W)
    torch.testing.assert_close(heads.gradient(task, W, X, y), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_hessian_is_autograd(task):
    W, X, y = problem(task)
    expected = torch.autograd.functional.hessian(total(task, X, y), W).reshape(W.numel(), W.numel())
    torch.testing.assert_close(heads.curvature(task, "hessian", W, X)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_evidence_is_summed_from_its_definition(task):
    mean, X, y = problem(task)
    own = mean + 0.5 * problem(task, seed=1)[0]
    found = heads.evidence(task, mean, own, X, y)
    torch.testing.assert_close(found["slope"], torch.autograd.functional.jacobian(total(task, X, y), mean))
    line = torch.autograd.functional.hessian(
        lambda t: total(task, X, y)(mean + t * (own - mean)), torch.zeros((), dtype=torch.float64)
    )
    torch.testing.assert_close(found["bend"], line, rtol=1e-9, atol=1e-12)
    residuals = [heads.residual(task, (own @ x)[None], label[None])[0] for x, label in zip(X, y, strict=True)]
    torch.testing.assert_close(found["residuals"], sum(torch.outer(r, r) for r in residuals))
    torch.testing.assert_close(found["gram"], sum(torch.outer(x, x) for x in X))


@pytest.mark.parametrize("task", TASKS)
def test_blocks_are_the_diagonal_of_the_hessian(task):
    W, X, _ = problem(task)
    full = heads.curvature(task, "hessian", W, X)[0].view(W.shape[0], W.shape[1], W.shape[0], W.shape[1])
    blocks = heads.curvature(task, "block", W, X)
    assert blocks.shape == (W.shape[0], W.shape[1], W.shape[1])
    for c, block in enumerate(blocks):
        torch.testing.assert_close(block, full[c, :, c])


@pytest.mark.parametrize("seed", range(5))
def test_gram_bounds_the_softmax_hessian(seed):
    """Boehning: (I - 11'/C)/2 kron X'X is never less than the Hessian, at any head."""
    W, X, _ = problem("multiclass", seed=seed)
    C = len(W)
    factor = 0.5 * (torch.eye(C, dtype=torch.float64) - 1 / C)
    bound = torch.kron(factor, heads.curvature("multiclass", "gram", W, X)[0])
    gap = bound - heads.curvature("multiclass", "hessian", W, X)[0]
    assert torch.linalg.eigvalsh(gap).min() > -1e-10


@pytest.mark.parametrize("task", TASKS)
def test_curvature_adds_over_samples(task):
    W, X, _ = problem(task)
    for kind in heads.CURVATURES:
        parts = heads.curvature(task, kind, W, X[:13]) + heads.curvature(task, kind, W, X[13:])
        torch.testing.assert_close(parts, heads.curvature(task, kind, W, X))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", heads.CURVATURES)
def test_blocks_fit_their_curvature_and_come_back(task, kind):
    W, X, _ = problem(task)
    blocks = heads.as_blocks(kind, W)
    assert (heads.curvature(task, kind, W, X) @ blocks).shape == blocks.shape
    assert torch.equal(heads.from_blocks(kind, blocks, W.shape), W)


@pytest.mark.parametrize("task", TASKS)
def test_loss_and_probabilities_agree(task):
    W, X, y = problem(task)
    scores = X @ W.T
    predicted = heads.probabilities(task, scores)
    if task == "regression":
        expected = 0.5 * (predicted - y) ** 2
    else:
        expected = -predicted[torch.arange(len(y)), y].log()
        torch.testing.assert_close(predicted.sum(1), torch.ones_like(predicted[:, 0]))
    torch.testing.assert_close(heads.loss(task, scores, y), expected)


@given(st.lists(st.integers(0, 3), max_size=3), st.integers(0, 7), st.integers(0, 2**31))
def test_a_symmetric_matrix_comes_back_from_its_triangle(batch, q, seed):
    X = torch.randn(*batch, q, q, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = X + X.mT
    packed = heads.triangle(matrix)
    assert packed.shape == (*batch, q * (q + 1) // 2)
    assert torch.equal(heads.whole(packed), matrix)
    assert torch.equal(heads.triangle(heads.whole(packed)), packed)


@pytest.mark.parametrize("length", [2, 4, 5, 209])
def test_other_lengths_are_no_triangle(length):
    with pytest.raises(ValueError, match=f"{length} numbers"):
        heads.whole(torch.zeros(3, length))
