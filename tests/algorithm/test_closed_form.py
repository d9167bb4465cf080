"""Heads of domains in closed form, against least squares on all samples in one place."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.nn import functional

from feddar.algorithm.closed_form import closed_form_heads, length_of_scores, scale_of_labels
from feddar.algorithm.names import named_state
from feddar.algorithm.pooling import CURVATURE, SLOPE, Pooling, head_sums
from feddar.algorithm.protocol import Reply
from feddar.objectives import Binary, Multiclass, MultiLabel, Regression
from helpers.by_hand import encoder, features_by_hand
from helpers.cohorts import make_cohort
from helpers.training import train


def labels_by_hand(cohort):
    """Numbers, or centred one-hot labels times the constant of a step from zero, [n, outputs]."""
    classes = len(cohort.classes or ())
    if not classes:
        return cohort.y.double()[:, None]
    if classes == 2:
        return 4 * (cohort.y.double()[:, None] - 0.5)
    return classes * (functional.one_hot(cohort.y, classes).double() - 1 / classes)


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("ridge", [0.0, 25.0])
def test_the_whole_loop_ends_with_least_squares(classes, ridge):
    """The encoder is that of FedAvg to the bit; heads have no gradient of the sum of squares with its ridge."""
    cohort = make_cohort(300, classes=classes)
    options = {"rounds": 3, "dtype": "float64", "standardise_target": False}
    run = train(cohort, "analytic", encoder(), ridge=ridge, **options)
    plain = named_state(train(cohort, "fedavg", encoder(), **options).state)
    found = named_state(run.state)
    body = [value for name, value in found.items() if name.startswith("encoder/")]
    assert all(torch.equal(found[name], value) for name, value in plain.items() if name.startswith("encoder/"))
    assert torch.equal(found["trained/all"], plain["heads/all"])

    _, _, features = features_by_hand(cohort, dtype="float64")
    x, y = features([*body, None]), labels_by_hand(cohort)
    s = x.square().mean()

    def least(x, y, anchor):
        """The minimum of |y - x w'|^2 + ridge s |w - anchor|^2, as least squares with more rows."""
        pull = (ridge * s).sqrt() * torch.eye(x.shape[1], dtype=torch.float64)
        return torch.linalg.lstsq(torch.cat([x, pull]), torch.cat([y, pull @ anchor.T])).solution.T

    common = least(x, y, torch.zeros_like(found["heads/0"]))
    for m in range(3):
        mine = cohort.domain == m
        torch.testing.assert_close(found[f"heads/{m}"], least(x[mine], y[mine], common), rtol=1e-7, atol=1e-8)
    if ridge:
        assert float((found["heads/0"] - common).norm()) > 0.1


@pytest.mark.parametrize(
    ("objective", "scale"),
    [(Binary(), 4), (Multiclass(("a", "b", "c", "d", "e")), 5), (MultiLabel(("a", "b", "c")), 4), (Regression(), 1)],
)
def test_a_step_from_zero_is_least_squares_times_a_constant(objective, scale):
    """The whole Hessian at zero heads, by autograd, leads to the same head as the Gram matrix and the constant."""
    assert scale_of_labels(objective) == pytest.approx(scale)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = {
        "binary": torch.arange(60) % 2,
        "multiclass": torch.arange(60) % 5,
        "multilabel": torch.randint(0, 2, (60, 3), generator=generator).double(),
        "regression": torch.randn(60, generator=generator, dtype=torch.float64),
    }[objective.task]

    def loss(head):
        return objective.loss(x @ head.view(objective.outputs, 4).T, y).sum()

    zero = torch.zeros(objective.outputs * 4, dtype=torch.float64)
    step = -torch.linalg.pinv(hessian(loss, zero), rtol=1e-10) @ jacobian(loss, zero)
    scores = torch.zeros(60, objective.outputs, dtype=torch.float64)
    total = Pooling(objective, constant=False)
    total.add(Reply(("a",), sums=head_sums(objective, x, scores, y, torch.zeros(60, dtype=torch.long), kind="gram")))
    heads = closed_form_heads(total, 0.0, 1)
    torch.testing.assert_close(heads["0"].flatten(), step, rtol=1e-8, atol=1e-8)


def test_a_domain_without_sums_has_the_head_of_all():
    cohort = make_cohort(200)
    total = Pooling(cohort.objective, constant=True)
    x, zero = cohort.x[0].double(), torch.zeros(200, 1, dtype=torch.float64)
    sums = head_sums(cohort.objective, x, zero, cohort.y, cohort.domain, kind="gram")
    assert closed_form_heads(total, 1.0, 3) is None
    for name in (f"{SLOPE}/2", f"{CURVATURE}/2"):
        del sums[name]
    total.add(Reply(("a",), sums=sums))
    heads = closed_form_heads(total, 1.0, 3)
    known = cohort.domain < 2
    x, y = x[known], labels_by_hand(cohort)[known]
    pull = x.square().sum() / x.shape[1] / 200  # the number of samples is that of all
    common = torch.linalg.solve(x.T @ x + pull * torch.eye(6, dtype=torch.float64), x.T @ y).T
    torch.testing.assert_close(heads["2"], common)
    assert not torch.allclose(heads["0"], common)
    by, most = length_of_scores(total)
    assert 0 < by <= most


def test_gaps_between_domains_that_no_common_head_closes():
    """With the same inputs and opposite labels, FedAvg knows nothing, and heads in closed form nearly all."""
    cohort = make_cohort(600, domains=2, clients=3)
    y = ((cohort.x[0][:, 0] > 0) ^ (cohort.domain == 1)).long()
    part, test = replace(cohort, y=y).split(0.3, 0)
    runs = {name: train(part, name, encoder(), test=test, rounds=5).results() for name in ("fedavg", "analytic")}
    worst = {name: run.query("metric == 'auc' & scope == 'domain'")["value"].min() for name, run in runs.items()}
    assert worst["analytic"] > 0.85
    assert worst["fedavg"] < 0.6
