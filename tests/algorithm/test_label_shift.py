"""Label shift: factors of classes by brute force, and the whole loop where it holds and where it does not.

Between sites it is tested with the methods, in tests/federation.
"""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit

import feddar
from feddar.algorithm.client import Client
from feddar.algorithm.label_shift import LABELS, PRIOR, label_rates, label_sums, log_factors
from feddar.algorithm.offsets import OFFSETS
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.schedule import census, planned
from feddar.algorithm.weighting import CLASSES
from feddar.data.cohort import Cohort
from feddar.errors import UserError
from feddar.federation.privacy.minimum_cell import MinimumCell
from feddar.models.model import build_model
from feddar.objectives import Binary, Multiclass, MultiLabel
from feddar.settings import Settings
from helpers.onnx_files import require_files_of_clients


def test_with_one_domain_factors_are_those_of_smoothed_rates():
    counts = torch.tensor([[[[30.0, 10.0, 0.0]]], [[[0.0, 0.0, 400.0]]]], dtype=torch.float64)
    rates = label_rates(counts.sum(0), by_domain=True)
    n = counts.sum((1, 2, 3))
    found = log_factors(counts, n, rates).exp()
    expected = (counts[:, 0] + PRIOR * rates) / (n[:, None, None] + PRIOR) / rates
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_with_several_domains_they_lead_to_the_rates_at_the_client(seed):
    """For two classes the factor is the root of one equation, found here by bisection."""
    rng = np.random.default_rng(seed)
    sums = torch.from_numpy(rng.integers(0, 40, (3, 4, 1, 2)) * rng.integers(0, 2, (3, 4, 1, 1))).double() + 1
    rates = label_rates(torch.from_numpy(rng.integers(1, 100, (4, 1, 2))).double(), by_domain=True)
    found = log_factors(sums, sums.sum((1, 2, 3)), rates)
    for client, factors in zip(sums[:, :, 0].numpy(), found[:, 0].numpy(), strict=True):
        held, positive = client.sum(1), rates[:, 0, 1].numpy()
        expected = held @ positive / held.sum()
        wanted = (client[:, 1].sum() + PRIOR * expected) / (held.sum() + PRIOR)

        def off(move, held=held, positive=positive, wanted=wanted):
            return held @ expit(logit(positive) + move) / held.sum() - wanted

        assert factors[1] - factors[0] == pytest.approx(brentq(off, -20, 20, xtol=1e-13), abs=1e-8)


def test_domains_of_other_rates_alone_are_no_label_shift():
    """A client that has each domain's labels at the rates of all clients is not corrected, whatever its mixture."""
    rates = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]], dtype=torch.float64)
    sums = torch.tensor([300.0, 20.0])[:, None, None] * rates
    torch.testing.assert_close(log_factors(sums[None], torch.tensor([320]), rates), torch.zeros(1, 1, 2).double())
    over_all = label_rates(torch.tensor([[[90.0, 10.0]], [[20.0, 80.0]]], dtype=torch.float64), by_domain=False)
    assert log_factors(sums.sum(0)[None, None], torch.tensor([320]), over_all).abs().max() > 0.3


def test_a_client_without_samples_of_a_class_and_a_class_that_nobody_has_have_finite_factors():
    rates = torch.tensor([[[0.5, 0.5, 0.0]], [[0.0, 0.0, 0.0]]], dtype=torch.float64)
    sums = torch.zeros(2, 2, 1, 3, dtype=torch.float64)
    sums[0, 0, 0, 0] = 1000
    found = log_factors(sums, torch.tensor([1000, 0]), rates)
    assert found.isfinite().all()
    assert found[0, 0, 1] == pytest.approx(np.log(PRIOR / 1010))
    assert not found[0, 0, 2] and not found[1].any()


KINDS = {
    "two": (Binary(("no", "yes")), np.array([0, 1, 1])),
    "three": (Multiclass(("a", "b", "c")), np.array([0, 2, 1])),
    "several": (MultiLabel(("a", "b")), np.array([[0, 1], [1, 1], [0, 0]])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_classes_are_those_of_probabilities(kind):
    objective, y = KINDS[kind]
    marks = objective.class_marks(torch.from_numpy(y))
    scores = torch.randn(3, objective.outputs, dtype=torch.float64)
    factors = torch.randn(marks.shape[1:], dtype=torch.float64)
    before, after = (objective.predictions(s) for s in (scores, scores + objective.scores_of_factors(factors)))
    if kind == "several":
        before, after = (torch.stack([1 - p, p], 2) for p in (before, after))
    else:
        before, after = before[:, None], after[:, None]
    expected = before * factors.exp()
    torch.testing.assert_close(after, expected / expected.sum(2, keepdim=True))


RATES = (0.1, 0.3, 0.5, 0.7, 0.9)


def planted(kind="label", n=8000, seed=0):
    """Return clients with other rates of labels, and the true log-odds of each sample, [n].

    ``label``: features of each class are the same at all clients; ``covariate``: classes by features are.
    """
    rng = np.random.default_rng(seed)
    client, domain = rng.integers(0, len(RATES), n), rng.integers(0, 2, n)
    rate = np.array(RATES)[client]
    if kind == "label":
        y = rng.random(n) < rate
        x = rng.normal(size=(n, 3))
        x[:, 0] += np.where(y, 1, -1) * (1 + domain) / 2
        odds = logit(rate) + x[:, 0] * (1 + domain)
    else:
        x = rng.normal(size=(n, 3)) + 2 * logit(rate)[:, None] * np.array([1, 0, 0]) / 2
        odds = 1.2 * x[:, 0] * (1 + domain) / 2
        y = rng.random(n) < expit(odds)
    cohort = Cohort.from_arrays(
        x, y, domain=[f"d{m}" for m in domain], client=[f"h{i}" for i in client], dtype=torch.float64
    )
    return cohort, odds


OPTIONS = {
    **{"encoder": "linear", "k": 3, "rounds": 15, "lr": 0.02, "threads": 1, "validation": 0, "schedule": "cosine"},
    **{"last": 1, "dtype": "float64", "optimizer": "adam", "batch_size": 256},
}


def losses(kind, method, **options):
    """Return the log-loss of test samples without and with label shift, and that of the true posterior."""
    train, _ = planted(kind)
    test, odds = planted(kind, seed=1)
    found = []
    for shifted in (False, True):
        run = feddar.train(train, method, test=test, label_shift=shifted, **OPTIONS, **options)
        results = run.results().query("scope == 'all' and metric == 'log_loss'")
        found.append(float(results["value"].iloc[0]))
    y = test.y.numpy()
    return *found, float(np.logaddexp(0, np.where(y == 1, -odds, odds)).mean())


@pytest.mark.parametrize(
    ("method", "options"),
    [("feddar-wa", {}), ("fedavg-di", {}), ("feddar", {"site_offset": False}), ("separate", {})],
)
def test_where_labels_are_shifted_it_comes_near_the_true_posterior(method, options):
    without, corrected, true = losses("label", method, **options)
    assert without - true > 0.1
    assert corrected - true < 0.2 * (without - true)


@pytest.mark.parametrize("method", ["feddar-wa"])
def test_where_features_are_shifted_it_costs(method):
    """Then the common model is right as it is, and rates of labels differ for that reason alone."""
    without, corrected, true = losses("covariate", method)
    assert without - true < 0.03
    assert corrected - without > 0.05


@pytest.mark.parametrize("kind", ["label", "covariate"])
def test_corrections_that_sites_fit_are_near_the_truth_in_both(kind):
    (train, _), (test, odds) = planted(kind), planted(kind, seed=1)
    results = feddar.train(train, "feddar", test=test, **OPTIONS).results()
    found = float(results.query("scope == 'all' and metric == 'log_loss'")["value"].iloc[0])
    true = float(np.logaddexp(0, np.where(test.y.numpy() == 1, -odds, odds)).mean())
    assert found - true < 0.005


SHORT = OPTIONS | {"rounds": 3}


@pytest.fixture(scope="module")
def parts():
    return planted(n=600)[0].split(0.3)


@pytest.fixture(scope="module")
def run(parts):
    return feddar.train(parts[0], "fedavg", test=parts[1], label_shift=True, **SHORT)


def offsets_of(run):
    return torch.stack([run.own[client].extra[OFFSETS] for client in run.cohort.clients])


def test_what_is_kept_is_the_difference_of_log_odds(parts, run):
    train = parts[0]
    positive = np.array([train.y[train.client == k].double().mean() for k in range(5)])
    n, all_rate = train.counts.sum(1).numpy(), float(train.y.double().mean())
    smoothed = (n * positive + PRIOR * all_rate) / (n + PRIOR)
    found = offsets_of(run)
    np.testing.assert_allclose(found[:, 0, 0, -1], logit(smoothed) - logit(all_rate), rtol=1e-8)
    assert not found[..., :-1].any()


def test_a_client_never_seen_has_the_common_model_and_others_say_which(parts, run):
    x = parts[1].x[0][:2]
    common = run.predict_proba(x)
    found = run.predictions(x, client=["new", "h0"])
    assert found["note"].tolist() == ["client 'new' unknown: the same model without corrections", ""]
    assert found["head"].tolist() == ["all"] * 2
    np.testing.assert_array_equal(run.predict_proba(x, client="new"), common)
    moved = logit(run.predict_proba(x, client="h0")[:, 1]) - logit(common[:, 1])
    np.testing.assert_allclose(moved, float(offsets_of(run)[0, 0, 0, -1]), rtol=1e-9)


def test_two_workers_and_a_resumed_run_end_with_the_same_bits(parts, run, tmp_path):
    train = partial(feddar.train, parts[0], "fedavg", test=parts[1], label_shift=True)
    again = train(**SHORT, jobs=2)
    assert torch.equal(offsets_of(again), offsets_of(run))
    train(**SHORT | {"rounds": 2, "schedule": "constant"}, out=tmp_path)
    resumed = train(**SHORT | {"schedule": "constant"}, out=tmp_path, resume=True)
    whole = train(**SHORT | {"schedule": "constant"})
    assert torch.equal(offsets_of(resumed), offsets_of(whole))
    pd.testing.assert_frame_equal(resumed.results(), whole.results())
    loaded = feddar.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.evaluate(parts[1]), whole.evaluate(parts[1]))


@pytest.mark.parametrize("method", ["fedavg", "feddar-sa", "fedavg-di"])
def test_a_stack_ends_where_clients_do_one_by_one(parts, method):
    train = partial(feddar.train, parts[0], method, test=parts[1], label_shift=True, **SHORT)
    one, other = (train(batched=given) for given in (True, False))
    torch.testing.assert_close(offsets_of(one), offsets_of(other), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(one.results()["value"], other.results()["value"], rtol=1e-6)


def test_other_outcomes_have_it(parts):
    train, level = parts[0], (2 * parts[0].y - 1 + parts[0].x[0][:, 0]).numpy()
    for y in (np.digitize(level, [-1, 1]), np.stack([level > 0, level > 1], 1)):
        other = Cohort.from_arrays(train.x[0], y, domain=train.domain_names, client=train.client_names)
        fit, test = other.split(0.3)
        options = SHORT | {"dtype": "float32", "rounds": 8}
        found = [
            feddar.train(fit, "feddar-wa", test=test, label_shift=given, **options).results() for given in (False, True)
        ]
        first, second = (
            float(each.query("scope == 'all' and metric == 'log_loss'")["value"].iloc[0]) for each in found
        )
        assert second < first


def test_the_file_of_a_client_has_its_correction(parts, run, tmp_path):
    require_files_of_clients(run, parts[1].x[0][:7].numpy(), tmp_path / "model.onnx")


def test_sums_by_domain_hide_classes_of_few_patients(parts):
    sums = label_sums(parts[0].objective, parts[0], 0)
    expected = [[int(((parts[0].domain == m) & (parts[0].y == c)).sum()) for c in (0, 1)] for m in (0, 1)]
    assert sums[:, 0].tolist() == expected
    few = parts[0].rows((parts[0].y == 0) | (torch.arange(len(parts[0])) < 5))
    told = label_sums(few.objective, few, 20)
    assert (told[:, 0, 1] == 19 / 2).all()
    assert told.sum((1, 2)).tolist() == few.counts.sum(0).tolist()


def test_sums_over_all_domains_do_not_tell_what_sums_by_domain_hide(parts):
    positive = parts[0].y == 1
    few = parts[0].rows(~positive | (parts[0].domain == 0) | (positive.cumsum(0) < 6))
    model, _ = build_model(few, "mlp", Settings())
    client = Client("a site", few, None, model, Processors((MinimumCell(20),)))
    asked = Request(Phase("census", class_weight=True, label_shift=True), 0, 0)
    sums = client.answer(asked).sums
    assert int((few.domain[few.y == 1] == 1).sum()) < 20
    assert sums[LABELS][1, 0, 1] == 19 / 2
    torch.testing.assert_close(sums[CLASSES], sums[LABELS].sum(0))


def test_clients_are_asked_for_it_only_with_the_option():
    objective = Binary(("no", "yes"))
    asked = Settings(method="fedavg", label_shift=True, validation=0.1)
    assert census(asked, objective) == Phase("census", label_shift=True)
    assert [phase.name for phase in planned(asked, objective, 1)][-3:] == ["label-shift", "validate", "measure"]
    assert all(phase.offsets for phase in planned(asked, objective, 1)[-2:])
    assert "label-shift" not in [phase.name for phase in planned(Settings(method="fedavg"), objective, 1)]


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("feddar", {}, "feddar corrects its heads for each site, which has it already"),
        ("fedrep", {}, "label_shift is for models that are common, with a constant term"),
        ("ditto", {}, "label_shift is for models that are common, with a constant term"),
        ("fedavg", {"bias": False}, "label_shift is for models that are common, with a constant term"),
    ],
)
def test_methods_that_cannot_have_it_refuse_it(parts, method, options, why):
    with pytest.raises(UserError, match=why):
        feddar.train(parts[0], method, label_shift=True, **options)
    assert Settings(label_shift=True).fitted_to("feddar").label_shift is None
    assert Settings(label_shift=True).fitted_to("fedavg").label_shift


def test_numbers_to_predict_refuse_it():
    cohort = Cohort.from_arrays(np.ones((8, 1)), np.arange(8.0) / 3, task="regression")
    with pytest.raises(UserError, match="label_shift is for classes, and what is predicted here is a number"):
        feddar.train(cohort, "fedavg", label_shift=True)
