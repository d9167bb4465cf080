"""Every kind of outcome: its loss against autograd, its link, its metrics and its facts."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from feddar.errors import UserError
from feddar.objectives import KINDS, Binary, Multiclass, Regression, from_facts, with_classes
from feddar.objectives.labels import LabelColumns
from feddar.objectives.objective import CURVATURES
from feddar.objectives.scored import Scored
from feddar.objectives.softmax import PIECE
from helpers.objectives import EXAMPLES, TASKS, draw_labels, draw_problem


@pytest.fixture(params=TASKS)
def objective(request):
    return EXAMPLES[request.param]


def draw_scores(objective, n=40, seed=0):
    W, X, y = draw_problem(objective, n, seed=seed)
    return X @ W.T, y


def second_derivatives(objective, scores, y):
    """d2loss/dscore2 of each sample, [n, outputs, outputs], by autograd."""
    return torch.stack(
        [
            torch.autograd.functional.hessian(lambda s, label=label: objective.loss(s[None], label[None]).sum(), one)
            for one, label in zip(scores, y, strict=True)
        ]
    )


def as_kind(kind, second):
    """What a kind of curvature has of second derivatives [n, outputs, outputs]."""
    eye = torch.eye(second.shape[-1], dtype=second.dtype)
    return {"hessian": second, "block": second * eye, "gram": eye.expand_as(second)}[kind]


def test_every_kind_has_an_example():
    assert {kind.task: kind for kind in KINDS} == {task: type(example) for task, example in EXAMPLES.items()}


def test_the_slope_of_the_loss_is_the_residual(objective):
    scores, y = draw_scores(objective)
    (expected,) = torch.autograd.grad(objective.loss(scores.requires_grad_(), y).sum(), scores)
    assert expected.shape == (len(y), objective.outputs)
    torch.testing.assert_close(objective.residual(scores.detach(), y), expected, rtol=1e-10, atol=1e-12)


def test_the_residual_leaves_scores_and_labels_alone(objective):
    scores, y = draw_scores(objective)
    before = scores.clone(), y.clone()
    objective.residual(scores, y)
    assert torch.equal(scores, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize("kind", CURVATURES)
def test_the_bend_is_the_second_derivative_along_a_direction(objective, kind):
    scores, y = draw_scores(objective)
    along = draw_scores(objective, seed=1)[0]
    expected = torch.einsum("nab,nb->na", as_kind(kind, second_derivatives(objective, scores, y)), along)
    torch.testing.assert_close(objective.bend(kind, scores, along), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", CURVATURES)
def test_curvature_is_made_of_second_derivatives(objective, kind):
    scores, y = draw_scores(objective)
    X = draw_problem(objective, p=3, seed=2)[1]
    second = as_kind(kind, second_derivatives(objective, scores, y))
    if kind == "hessian":
        expected = torch.einsum("nab,ni,nj->aibj", second, X, X).reshape(1, second.shape[1] * 3, second.shape[1] * 3)
    elif kind == "block":
        expected = torch.einsum("naa,ni,nj->aij", second, X, X)
    else:
        expected = (X.T @ X)[None]
    torch.testing.assert_close(objective.curvature(kind, scores, X), expected, rtol=1e-10, atol=1e-12)


def test_the_default_curvature_is_known_and_a_gram_matrix_where_it_says_so(objective):
    assert objective.default_curvature in CURVATURES
    scores, _ = draw_scores(objective)
    X = draw_problem(objective, p=3, seed=2)[1]
    for kind in CURVATURES:
        found = objective.curvature(kind, scores, X)
        gram = found.shape == (1, 3, 3) and torch.allclose(found[0], X.T @ X)
        assert objective.is_gram(kind) == gram
    assert not objective.is_gram(None)


def test_the_exact_curvature_of_many_classes_is_added_in_pieces():
    objective = EXAMPLES["multiclass"]
    scores, _ = draw_scores(objective, n=PIECE + 7)
    X = draw_problem(objective, n=PIECE + 7, p=2, seed=2)[1]
    parts = [objective.curvature("hessian", scores[rows], X[rows]) for rows in (slice(0, 100), slice(100, None))]
    torch.testing.assert_close(objective.curvature("hessian", scores, X), sum(parts))


def test_loss_and_predictions_agree(objective):
    scores, y = draw_scores(objective)
    predicted = objective.predictions(scores)
    if objective.in_units:
        expected = 0.5 * (predicted - y) ** 2
    elif objective.classes is None:
        expected = -torch.where(y == 1, predicted, 1 - predicted).log().sum(1)
    else:
        expected = -predicted[torch.arange(len(y)), y].log()
        torch.testing.assert_close(predicted.sum(1), torch.ones_like(predicted[:, 0]))
    torch.testing.assert_close(objective.loss(scores, y), expected)


@given(st.sampled_from(TASKS), st.integers(0, 2**31), st.floats(0.01, 20))
@example("multilabel", 2311, 20.0)
def test_scores_of_undoes_predictions(task, seed, largest):
    """Up to scores of 20: a probability nearer to 1 is too coarse a number to tell log-odds from."""
    objective = EXAMPLES[task]
    drawn = draw_scores(objective, n=5, seed=seed)[0]
    scores = largest * drawn / drawn.abs().max()
    predicted = objective.predictions(scores)
    back = objective.scores_of(predicted)
    assert back.shape == scores.shape
    torch.testing.assert_close(objective.predictions(back), predicted)
    moved = back - scores  # the softmax does not see what is added to all scores
    torch.testing.assert_close(moved, moved.mean(1, keepdim=True).expand_as(moved), rtol=1e-5, atol=1e-5)


def test_decisions_are_the_most_probable_class(objective):
    scores, _ = draw_scores(objective)
    predicted = objective.predictions(scores)
    if objective.in_units:
        with pytest.raises(NotImplementedError):
            objective.decisions(predicted)
        np.testing.assert_array_equal(objective.labels(predicted.numpy()), predicted)
        return
    decided = objective.decisions(predicted)
    if objective.classes is None:
        assert decided.tolist() == (predicted > 0.5).long().tolist() == objective.labels(predicted.numpy()).tolist()
        return
    assert decided.tolist() == predicted.argmax(1).tolist()
    assert objective.labels(predicted.numpy()).tolist() == [objective.classes[number] for number in decided]


@pytest.mark.parametrize(
    "made",
    [
        *EXAMPLES.values(),
        Binary((0, 1)),
        Binary((False, True)),
        Multiclass((1, 2.5, "c")),
        Multiclass(tuple(range(30))),
    ],
    ids=repr,
)
def test_facts_make_the_objective_again(made):
    again = from_facts(json.loads(json.dumps(made.facts())))
    assert again == made
    assert type(again) is type(made)
    assert list(map(type, again.classes or ())) == list(map(type, made.classes or ()))
    assert made.facts()["task"] == made.task
    assert hash(again) == hash(made)


def test_facts_of_an_unknown_kind_are_refused_by_name():
    for facts in ({"task": "ranking"}, {}):
        with pytest.raises(UserError, match="is not known: there are multilabel, regression, binary, multiclass"):
            from_facts(facts)


def test_the_number_of_classes_says_the_kind():
    assert with_classes(None) == Regression()
    assert with_classes(("a", "b")) == Binary(("a", "b"))
    assert with_classes(("a", "b", "c")) == Multiclass(("a", "b", "c"))


def sums_of(objective, y, predicted, domain, domains=2):
    found = objective.sums(Scored(y, predicted, domain, domains))
    return {name: values.numpy() for name, values in found.items()}


@pytest.mark.parametrize("seed", range(3))
def test_metrics_from_sums_are_those_of_the_samples(objective, seed):
    """Exactly, but for the areas under curves, which are those of scores in bins."""
    scores, y = draw_scores(objective, n=800, seed=seed)
    domain = torch.arange(800) % 3 % 2
    predicted = objective.predictions(scores)
    sums = sums_of(objective, y, predicted, domain)
    for m in range(2):
        rows = domain == m
        exact = objective.measure(y[rows].numpy(), predicted[rows].numpy())
        found = objective.measure_sums(**{name: values[m] for name, values in sums.items()})
        assert set(found) == set(exact) == set(objective.metrics)
        for name, value in exact.items():
            assert found[name] == pytest.approx(value, rel=0.005 if name.startswith("au") else 1e-9, abs=1e-9), name
        assert sums["numbers"][m, 0] == int(rows.sum())
    pooled = objective.measure_sums(**{name: values.sum(0) for name, values in sums.items()})
    exact = objective.measure(y.numpy(), predicted.numpy())
    assert pooled == pytest.approx(exact, rel=0.005)


def test_sums_add_over_clients_and_a_domain_without_samples_has_none(objective):
    scores, y = draw_scores(objective, n=60)
    predicted, domain = objective.predictions(scores), torch.arange(60) % 2
    whole = sums_of(objective, y, predicted, domain, 3)
    first, second = (
        sums_of(objective, y[rows], predicted[rows], domain[rows], 3) for rows in (slice(25), slice(25, 60))
    )
    for name, values in whole.items():
        np.testing.assert_allclose(first[name] + second[name], values, rtol=1e-12)
        assert not values[2].any()


def test_metrics_are_scikit_learns(objective):
    scores, y = draw_scores(objective, n=200)
    predicted = objective.predictions(scores).numpy()
    found = objective.measure(y.numpy(), predicted)
    if objective.in_units:
        expected = {
            "mse": sklearn_metrics.mean_squared_error(y, predicted),
            "rmse": sklearn_metrics.root_mean_squared_error(y, predicted),
            "mae": sklearn_metrics.mean_absolute_error(y, predicted),
            "r2": sklearn_metrics.r2_score(y, predicted),
        }
    elif objective.classes is None:
        expected = {
            "auc": sklearn_metrics.roc_auc_score(y, predicted, average="macro"),
            "auprc": sklearn_metrics.average_precision_score(y, predicted, average="macro"),
        }
        found = {name: found[name] for name in expected}  # the others are in test_multilabel.py
    else:
        several = {"multi_class": "ovr"} if objective.outputs > 1 else {}
        share = predicted if several else predicted[:, 1]
        expected = {
            "auc": sklearn_metrics.roc_auc_score(y, share, **several),
            "auprc": sklearn_metrics.average_precision_score(y, share),
            "accuracy": sklearn_metrics.accuracy_score(y, predicted.argmax(1)),
            "log_loss": sklearn_metrics.log_loss(y, predicted),
        }
        expected["brier"] = ((predicted - np.eye(predicted.shape[1])[y]) ** 2).sum(1).mean() / (1 if several else 2)
    assert found == pytest.approx(expected)


def test_several_parts_are_measured_as_one_by_one(objective):
    scores, y = draw_scores(objective, n=90)
    predicted = objective.predictions(scores).numpy().reshape(3, 30, *objective.predictions(scores).shape[1:])
    labels = y.numpy().reshape(3, 30, *y.shape[1:])
    parts = objective.measure_parts(labels, predicted)
    for place in range(3):
        alone = objective.measure(labels[place], predicted[place])
        assert {name: values[place] for name, values in parts.items()} == pytest.approx(alone)


def test_labels_that_say_nothing_have_the_shape_and_type_of_labels(objective):
    y = draw_labels(objective, 6, torch.Generator().manual_seed(0))
    blank = objective.blank(6)
    assert blank.shape == y.shape
    assert blank.is_floating_point() == y.is_floating_point()
    objective.loss(torch.zeros(6, objective.outputs), blank)


def test_predictions_are_written_and_read_back(objective):
    predicted = objective.predictions(draw_scores(objective)[0]).numpy()
    table = pd.DataFrame(objective.columns(predicted))
    np.testing.assert_array_equal(objective.from_columns(table), predicted)


TOLD = {
    "binary": ([0, 1, 1, 1], "two classes, 'no' and the positive class 'yes'"),
    "multiclass": ([0, 1, 1, 3], "one of 4 classes: a 25.0%, b 50.0%, c 0.0%, d 25.0%"),
    "regression": ([1.5, -2.0, 8.0, 2.5], "a number, from -2 to 8"),
    "multilabel": ([[0, 1, 0], [1, 1, 0], [0, 1, 1], [0, 1, 0]], "died 25.0%, icu 100.0%, pain 25.0%"),
}


def test_what_a_person_is_told_of_labels(objective):
    labels, said = TOLD[objective.task]
    assert objective.described(np.array(labels)).endswith(said)
    rates = {"regression": "2.5", "multiclass": "b", "multilabel": "25.0 / 100.0 / 25.0"}
    titles = {"regression": "mean label", "multiclass": "most common", "multilabel": "% died / icu / pain"}
    if objective.task in rates:
        assert (objective.rate_title(), objective.rate(np.array(labels))) == (
            titles[objective.task],
            rates[objective.task],
        )


def test_labels_are_written_as_they_were_read(objective):
    labels = np.array(TOLD[objective.task][0])
    table = objective.written(labels)
    read = objective.read(LabelColumns.of(table))
    np.testing.assert_array_equal(read, labels)
    if objective.task == "multilabel":
        assert [*table.columns] == [*objective.names]


def test_a_summary_adds_up_what_is_predicted(objective):
    """In two pieces, as of a long table, put together as the objective says."""
    scores, _ = draw_scores(objective, 30)
    predicted = objective.predictions(scores).numpy()
    pieces = [objective.summary(pd.DataFrame(objective.columns(part))) for part in (predicted[:11], predicted[11:])]
    ways = objective.summary_ways()
    totals = {name: pd.concat(pieces)[name].agg(way) for name, way in ways.items()}
    found = objective.summarised(totals, 30)
    if objective.task == "regression":
        assert [*found] == ["least", "mean", "greatest"]
        assert [*found.values()] == pytest.approx([predicted.min(), predicted.mean(), predicted.max()])
    elif objective.task == "multilabel":
        assert found == dict(zip(objective.names, (predicted > 0.5).sum(0).tolist(), strict=True))
    else:
        decided = predicted.argmax(1).tolist()
        assert found == {name: decided.count(number) for number, name in enumerate(objective.names)}


@pytest.mark.parametrize(
    ("names", "kind"), [((0, 1), np.int64), ((0.5, 1.5), np.float64), (("a", "b"), np.str_), ((1, "a"), object)]
)
def test_predicted_classes_have_the_type_of_their_names(names, kind):
    found = Binary(names).labels(np.array([[0.9, 0.1], [0.2, 0.8]]))
    assert found.tolist() == [*names]
    assert [type(each) for each in found.tolist()] == [type(name) for name in names]
    assert np.issubdtype(found.dtype, kind)


def test_the_headline_is_the_metric_that_is_asked_for_in_any_spelling():
    assert Binary().headline(None) == "auc" and Binary().headline("Log-Loss") == "log_loss"
    assert with_classes(("a", "b", "c")).headline("macro AUC".replace(" ", "-")) == "auc"
    with pytest.raises(UserError, match="no metric 'mae' of this outcome: choose one of auc, auprc"):
        Binary().headline("mae")
