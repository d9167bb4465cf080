import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import PolynomialFeatures

from feddar.data.sources import exam_cases as exam
from feddar.data.sources.exam import exam_cohort
from feddar.errors import UserError
from feddar.models.encoders import build_encoder


@pytest.fixture(scope="module")
def data() -> exam.ExamData:
    return exam.draw(seed=0)


def some_states(n: int = 2000) -> exam.State:
    rng = np.random.default_rng(0)
    return exam.State(rng.standard_normal((n, len(exam.FEATURES))), rng.standard_normal((n, 2)))


def test_shapes_and_types(data: exam.ExamData) -> None:
    n = sum(exam.SITE_SIZES)
    assert n == 7681
    assert data.image.shape == (n, 1, exam.SIZE, exam.SIZE)
    assert data.record.shape == (n, len(exam.FEATURES)) == (n, 20)
    assert data.image.dtype == data.record.dtype == np.float32
    assert data.y.shape == data.race.shape == data.site.shape == data.logit.shape == (n,)
    assert set(data.y.tolist()) == {0, 1}
    assert all(np.isfinite(values).all() for values in (data.image, data.record, data.logit))
    assert abs(data.record.mean()) < 0.2
    assert data.record.std(axis=0) == pytest.approx(np.ones(20), abs=0.1)


def test_shares_are_the_published_ones(data: exam.ExamData) -> None:
    for site, size, shares in zip(exam.SITES, exam.SITE_SIZES, exam.SHARES, strict=True):
        race = data.race[data.site == site]
        assert len(race) == size
        # The published percentages are rounded, and a person is not divisible.
        measured = [100 * np.mean(race == name) for name in exam.RACES]
        assert measured == pytest.approx(shares, abs=0.15)


def test_label_rates_are_the_published_ones(data: exam.ExamData) -> None:
    for site, rate in zip(exam.SITES, exam.LABEL_RATES, strict=True):
        assert 100 * data.y[data.site == site].mean() == pytest.approx(rate, abs=0.1)


def test_label_rates_hold_whatever_the_difference() -> None:
    data = exam.draw_counts(np.full((6, 5), 40), seed=3, difference=3.0)
    for site, rate in zip(exam.SITES, exam.LABEL_RATES, strict=True):
        assert data.y[data.site == site].sum() == round(2 * rate)


def test_every_race_has_positive_cases(data: exam.ExamData) -> None:
    assert all(data.y[data.race == race].sum() >= 10 for race in exam.RACES)


def test_a_seed_gives_the_same_bits() -> None:
    counts = np.full((6, 5), 20)
    draws = [exam.draw_counts(counts, seed, difference=1.0) for seed in (0, 0, 1)]
    for first, second, third in zip(*draws, strict=True):
        assert np.array_equal(first, second)
        assert not np.array_equal(first, third)


@pytest.mark.parametrize("difference", [-0.1, float("nan"), float("inf")])
def test_an_impossible_difference_is_refused(difference: float) -> None:
    with pytest.raises(UserError, match="difference"):
        exam.draw(difference=difference)


def test_without_difference_race_does_not_matter() -> None:
    factor = exam.factors(some_states())
    by_race = [exam.true_logit(factor, np.full(len(factor), race), 0.0) for race in range(len(exam.RACES))]
    assert all(np.array_equal(logit, by_race[0]) for logit in by_race)


def test_differences_grow_with_the_knob() -> None:
    factor = exam.factors(some_states())
    white, black = np.zeros(len(factor), dtype=np.int64), np.ones(len(factor), dtype=np.int64)
    apart = [
        np.std(exam.true_logit(factor, white, difference) - exam.true_logit(factor, black, difference))
        for difference in (0.5, 1.0, 2.0)
    ]
    assert apart[1] == pytest.approx(2 * apart[0])
    assert apart[2] == pytest.approx(4 * apart[0])


def test_no_race_reads_a_factor_in_reverse() -> None:
    for extra in exam.DIFFERENCES.values():
        assert (np.array(exam.WEIGHTS) + np.array(extra) > 0).all()


def test_the_logit_is_a_function_of_the_case_and_the_race_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[exam.Floats] = []

    def remember(_: np.random.Generator, opacity: exam.Floats) -> exam.Images:
        seen.append(opacity)
        return np.zeros((len(opacity), 1, 1, 1), dtype=np.float32)

    monkeypatch.setattr(exam, "render", remember)
    data = exam.draw(seed=0)
    state = exam.State(data.record.astype(np.float64), np.concatenate(seen))
    race = np.array([exam.RACES.index(name) for name in data.race])
    # No site is asked for, and yet the logits of all sites come out.
    assert exam.true_logit(exam.factors(state), race, 1.0) == pytest.approx(data.logit, abs=1e-4)


def test_labels_follow_the_logit_at_every_site(data: exam.ExamData) -> None:
    chance = 1 / (1 + np.exp(-data.logit))
    for site in exam.SITES:
        for group in (chance > 0.5, chance <= 0.5):
            here = (data.site == site) & group
            spread = np.sqrt(np.sum(chance[here] * (1 - chance[here])))
            assert abs(data.y[here].sum() - chance[here].sum()) < 4 * spread


def test_label_chances_are_exact_and_their_number_is_the_expected_one() -> None:
    chance = np.tile([0.1, 0.3, 0.6], 10)
    logit = np.log(chance / (1 - chance))
    draws = np.array([exam._labels(np.random.default_rng(seed), logit) for seed in range(2000)])
    assert (draws.sum(axis=1) == 10).all()
    assert draws.mean(axis=0) == pytest.approx(chance, abs=0.04)


def test_the_true_logit_predicts_well_in_every_race(data: exam.ExamData) -> None:
    for race in exam.RACES:
        here = data.race == race
        assert 0.9 < roc_auc_score(data.y[here], data.logit[here]) < 0.99


def zones(image: exam.Images) -> exam.Floats:
    """Mean grey of the eight by eight squares of each image."""
    squares = image.reshape(len(image), 8, exam.SIZE // 8, 8, exam.SIZE // 8)
    return np.asarray(squares.mean(axis=(2, 4)).reshape(len(image), -1), dtype=np.float64)


def explained(x: exam.Floats, y: exam.Floats) -> exam.Floats:
    """R squared on the second half of a linear regression on the first."""
    half = len(x) // 2
    guess = LinearRegression().fit(x[:half], y[:half]).predict(x[half:])
    return np.asarray(1 - np.mean((guess - y[half:]) ** 2, axis=0) / np.var(y[half:], axis=0))


def test_the_image_shows_the_opacities() -> None:
    state = some_states(3000)
    image = exam.render(np.random.default_rng(1), state.opacity)
    assert (explained(zones(image), exam.factors(state)[:, -2:]) > 0.8).all()


def test_the_record_does_not_tell_what_the_image_shows(data: exam.ExamData) -> None:
    some = slice(3000)
    pairs = PolynomialFeatures(degree=2, include_bias=False).fit_transform(data.record[some])
    assert (explained(pairs, zones(data.image[some])) < 0.05).all()


def test_encoder_maps_a_batch_to_features_and_learns_everywhere(data: exam.ExamData) -> None:
    encoder = build_encoder("exam", exam_cohort(data), None).train()
    out = encoder(torch.from_numpy(data.image[:12]), torch.from_numpy(data.record[:12]))
    assert out.shape == (12, 32)
    out.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
