"""scikit-learn's own checks, and its tools around the estimators."""

import pickle
import sys

import joblib
import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import feddar
from feddar.results.estimators import FedDARClassifier, FedDARRegressor
from feddar.settings import Settings, Unknown
from helpers.cohorts import make_cohort

FAST = {"rounds": 8, "head_epochs": 1, "lr": 0.02}
EAGER = {"method": "feddar-wa", "encoder": "mlp", "rounds": 8, "lr": 0.02, "batch_size": 32} | {
    "schedule": "constant", "validation": 0,
}  # fmt: skip
"""Settings with which few samples are learned in few rounds."""


def cannot_hold(estimator):
    """Return the checks that no estimator of this kind passes, and why."""
    batches = "batches and validation samples are drawn by row, so a repeated row is not trained on as one of weight 2"
    every = {"check_sample_weight_equivalence_on_dense_data": batches}
    by_class = {"check_class_weight_classifiers": "class_weight is 'balanced' or None, not a weight for each class"}
    return every | (by_class if isinstance(estimator, FedDARClassifier) else {})


@parametrize_with_checks([FedDARClassifier(**FAST), FedDARRegressor(**FAST)], expected_failed_checks=cannot_hold)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def samples(classes=2, n=240):
    """Return a frame with a column of domains and one of clients, and labels that depend on the domain."""
    cohort = make_cohort(n=n, classes=classes)
    frame = pd.DataFrame(cohort.x[0].numpy(), columns=list("abcdef"))
    frame["race"], frame["hospital"] = cohort.domain_names, cohort.client_names
    return frame, cohort.y.numpy() if classes == 0 else np.array(["no", "yes", "so"])[cohort.y]


ROLES = {"domain": "race", "client": "hospital"}


def test_parameters_are_the_settings():
    found = FedDARClassifier().get_params()
    assert set(found) == (set(Settings.model_fields) - {"seed"}) | set(Unknown.model_fields) | {"random_state"}
    assert found["rounds"] == Settings().rounds
    assert clone(FedDARRegressor(lr=0.5, encoder="mlp")).get_params()["lr"] == 0.5
    with pytest.raises(TypeError, match="no parameter 'round': did you mean 'rounds'"):
        FedDARClassifier(round=3)
    with pytest.raises(feddar.UserError, match="rounds should be greater than or equal to 1"):
        FedDARClassifier(rounds=0).fit(*samples())


def test_weights_are_those_of_training():
    frame, y = samples()
    weight = np.random.default_rng(0).gamma(1, 1, len(y))
    given = {"rounds": 2, "dtype": "float32", "class_weight": "balanced"}
    model = FedDARClassifier(**given).fit(frame, y, **ROLES, sample_weight=weight)
    x, roles = frame[list("abcdef")], {role: frame[name] for role, name in ROLES.items()}
    run = feddar.train(feddar.Cohort.from_arrays(x, y, **roles, weight=weight), **given)
    np.testing.assert_array_equal(model.predict_proba(frame), run.predict_proba(x, **roles))
    plain = FedDARClassifier(rounds=2, dtype="float32").fit(frame, y, **ROLES)
    assert not np.allclose(model.predict_proba(frame), plain.predict_proba(frame))
    with pytest.raises(ValueError, match="Negative values"):
        FedDARClassifier(**given).fit(frame, y, **ROLES, sample_weight=-weight)


@pytest.mark.parametrize("method", ["feddar-sa", "fedrep", "fedavg"])
def test_it_is_the_method_itself(method):
    frame, y = samples()
    model = FedDARClassifier(method=method, rounds=2, dtype="float32", random_state=3).fit(frame, y, **ROLES)
    x, roles = frame[list("abcdef")], {role: frame[name] for role, name in ROLES.items()}
    run = feddar.train(feddar.Cohort.from_arrays(x, y, **roles), method, rounds=2, seed=3)
    np.testing.assert_array_equal(model.predict_proba(frame), run.predict_proba(x, **roles))
    np.testing.assert_array_equal(model.predict(frame), run.predict(x, **roles))
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.feature_names_in_.tolist() == frame.columns.tolist()
    assert model.score(frame, y) == np.mean(model.predict(frame) == y)
    given = FedDARClassifier(**model.get_params()).fit(x, y, **roles)
    np.testing.assert_array_equal(given.predict_proba(x, **roles), model.predict_proba(frame))


def test_domains_are_columns_or_arrays_and_unknown_ones_as_asked():
    frame, y = samples()
    model = FedDARClassifier(rounds=1).fit(frame, y, **ROLES)
    other = frame.assign(race="elsewhere")
    with pytest.raises(feddar.UserError, match="domain 'elsewhere' was not in training"):
        model.predict(other)
    gaps, with_gaps = frame.assign(race=None), model.set_params(missing_domain="mixture")
    mixed = with_gaps.run_.predict_proba(
        frame.drop(columns=[*ROLES.values()]), None, frame[ROLES["client"]], missing_domain="mixture"
    )
    np.testing.assert_allclose(with_gaps.predict_proba(gaps), mixed)
    average = model.set_params(unknown_domain="average").predict_proba(other)
    np.testing.assert_allclose(model.predict_proba(frame, domain=["elsewhere"] * len(frame)), average)
    with pytest.raises(feddar.UserError, match="domain='rice' is not a column of X: did you mean 'race'"):
        FedDARClassifier().fit(frame, y, domain="rice")
    with pytest.raises(feddar.UserError, match="X is not a data frame"):
        FedDARClassifier().fit(frame[["a", "b"]].to_numpy(), y, domain="race")


def test_a_frame_may_have_gaps_categories_and_dates():
    frame, y = samples()
    frame["ward"] = pd.Categorical(np.where(frame["a"] > 0, "A", "B"))
    frame["day"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(len(frame)), "D")
    frame.loc[::5, ["b", "ward"]] = None
    model = FedDARClassifier(rounds=1).fit(frame, y, **ROLES)
    assert [column.kind for column in model.run_.cohort.columns] == ["number"] * 6 + ["category", "date"]
    assert np.isfinite(model.predict_proba(frame)).all()
    array = frame[list("abc")].to_numpy()
    model = FedDARClassifier(rounds=1).fit(np.nan_to_num(array), y)
    assert np.isfinite(model.predict_proba(array)).all()


def test_images_and_own_encoders():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 1, 8, 8)).astype(np.float32), np.arange(40) % 2
    model = FedDARClassifier(rounds=1, dtype="float32").fit(x, y)
    assert model.predict(x).shape == (40,)
    own = FedDARClassifier(rounds=1, encoder=nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    assert clone(own).fit(x, y).predict_proba(x).shape == (40, 2)


def test_a_pickled_model_predicts_the_same_and_holds_no_samples(tmp_path):
    frame, y = samples()
    frame["a"] += 12345.678
    model = FedDARClassifier(rounds=1).fit(frame, y, **ROLES)
    joblib.dump(model, tmp_path / "model.joblib")
    again = joblib.load(tmp_path / "model.joblib")
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))
    numbers = sum(value.numel() for value in model.run_.model.body.state_dict().values())
    assert len(pickle.dumps(model)) < 100_000 + 24 * numbers  # encoders to compute with, in training and averaged
    assert all(not part.any() for part in (*again.run_.cohort.x, again.run_.cohort.y))
    model.run_.save(tmp_path / "run")
    loaded = feddar.load(tmp_path / "run")
    x, roles = frame[list("abcdef")], {role: frame[name] for role, name in ROLES.items()}
    np.testing.assert_array_equal(loaded.predict_proba(x, **roles), model.predict_proba(frame))


def test_pipeline_and_search_with_columns():
    frame, y = samples()
    scores = cross_val_score(FedDARClassifier(**EAGER), frame, y, cv=2, params=ROLES)
    assert scores.min() > 0.7
    search = GridSearchCV(FedDARClassifier(rounds=1), {"lr": [1e-4, 1e-2], "method": ["fedavg", "feddar-wa"]}, cv=2)
    search.fit(frame, y, **ROLES)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.predict(frame).shape == y.shape
    x, z = frame[list("abcdef")], frame["race"].to_numpy()
    pipe = make_pipeline(StandardScaler(), FedDARClassifier(rounds=1)).fit(x, y, feddarclassifier__domain=z)
    assert pipe.predict_proba(x, domain=z).shape == (len(y), 2)


def test_metadata_routing():
    frame, y = samples()
    x, z = frame[list("abcdef")], frame["race"].to_numpy()
    with sklearn.config_context(enable_metadata_routing=True):
        roles = {"domain": True, "client": True}
        model = FedDARClassifier(rounds=1).set_fit_request(**roles).set_score_request(**roles)
        model = model.set_predict_request(**roles).set_predict_proba_request(**roles)
        pipe = make_pipeline(StandardScaler(), model)
        search = GridSearchCV(pipe, {"feddarclassifier__lr": [1e-3, 1e-2]}, cv=2)
        search.fit(x, y, domain=z, client=frame["hospital"].to_numpy())
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()
        assert pipe.fit(x, y, domain=z).predict(x, domain=z).shape == y.shape


def test_regression():
    frame, y = samples(classes=0)
    model = TransformedTargetRegressor(FedDARRegressor(rounds=10, lr=0.02), transformer=StandardScaler())
    model.fit(frame, 1000 + 50 * y, **ROLES)
    assert model.score(frame, 1000 + 50 * y) > 0.7


def test_random_state_is_the_seed():
    frame, y = samples()

    def weights(state):
        return FedDARClassifier(rounds=1, random_state=state).fit(frame, y, **ROLES).run_.state.heads["0"]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(weights(np.random.RandomState(4)), weights(np.random.RandomState(4)))
    assert not torch.equal(weights(None), weights(None))


def test_the_estimators_alone_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "feddar.results.estimators")
    with pytest.raises(ImportError, match=r"pip install 'feddar\[sklearn\]'"):
        feddar.FedDARClassifier  # noqa: B018
    assert all(getattr(feddar, name) for name in feddar.__all__)
