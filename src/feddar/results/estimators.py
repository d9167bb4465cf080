"""scikit-learn estimators: ``FedDARClassifier`` and ``FedDARRegressor``.

``domain`` and ``client`` are arrays with a name for each sample, or the name of a column of the data frame X, which is
then not a feature. Left out, there is one domain and one client. Prediction uses the columns that were named in
``fit``, unless others are given; so a grid search or cross-validation, which splits X, splits them with it.

>>> import pandas as pd
>>> from feddar.results.estimators import FedDARClassifier
>>> X = pd.DataFrame({"age": [40, 50, 60, 70] * 4, "race": ["a", "a", "b", "b"] * 4})
>>> y = ["no", "yes", "yes", "no"] * 4
>>> model = FedDARClassifier(rounds=1).fit(X, y, domain="race")
>>> model.predict_proba(X[:3]).shape, model.run_.cohort.domains
((3, 2), ('a', 'b'))
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, Self, Unpack

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from feddar.data.cohort import Cohort
from feddar.data.columns import Column
from feddar.errors import UserError
from feddar.methods import nearest
from feddar.models.devices import CPU, move_module
from feddar.options import EstimatorOptions, parameters_of
from feddar.results.training import train
from feddar.settings import Settings, Unknown

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
except ImportError:
    raise ImportError(
        "FedDARClassifier and FedDARRegressor need scikit-learn: pip install 'feddar[sklearn]'."
    ) from None


def _parameters() -> list[inspect.Parameter]:
    """Return the constructor's parameters: every setting of training and prediction, with its name and default.

    There are two exceptions: scikit-learn's name for the seed is ``random_state``; and the default dtype is float64,
    since scikit-learn requires that a sample's prediction does not change by 1e-7 with the other samples in the batch.
    """
    found = parameters_of(Settings, Unknown)
    seed = found.pop("seed")
    return [*(found | {"dtype": found["dtype"].replace(default="float64")}).values(), seed.replace(name="random_state")]


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """The common base class of classifier and regressor."""

    run_: Any

    def __init__(self, **parameters: Unpack[EstimatorOptions]) -> None:
        given: dict[str, Any] = {**parameters}
        for parameter in _parameters():
            setattr(self, parameter.name, given.pop(parameter.name, parameter.default))
        if given:
            name = next(iter(given))
            hint = nearest(name, [parameter.name for parameter in _parameters()])
            raise TypeError(f"{type(self).__name__} has no parameter '{name}': {hint}")

    # scikit-learn reads the parameters' names from the signature.
    __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *_parameters()]
    )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    def _fit(self, X: Any, y: Any, domain: Any, client: Any, sample_weight: Any, **about_y: Any) -> Self:
        self.domain_column_ = domain if isinstance(domain, str) else None
        self.client_column_ = client if isinstance(client, str) else None
        features, z, c = self._divided(X, domain, client)
        columns = None
        if isinstance(X, np.ndarray) and X.ndim == 2:
            # Every column of a plain array is a number.
            columns = [Column(str(name), "number", gaps=bool(features[name].isna().any())) for name in features]
        options = {name: getattr(self, name) for name in Settings.model_fields if name != "seed"}
        precision = torch.float32 if options["dtype"] == "float32" else torch.float64
        w = None if sample_weight is None else _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        about = {"columns": columns, "dtype": precision, **about_y}
        cohort = Cohort.from_arrays(features, y, domain=z, client=c, weight=w, **about)
        run = train(cohort, **options, seed=self._seed())
        # A fitted estimator may be pickled and given to others, so it must not contain the samples.
        self.run_ = replace(run, cohort=cohort.without_values())
        move_module(run.model.body, CPU)
        for parameter in run.model.body.parameters():  # training leaves them in one memory, which each would pickle
            parameter.data = parameter.data.clone()
        return self

    def _seed(self) -> int:
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _checked(self, X: Any, **about: Any) -> Any:
        """Check X, and y if given, as scikit-learn does; the columns of a data frame may be of any type."""
        if isinstance(X, pd.DataFrame):
            return validate_data(self, X, skip_check_array=True, **about)
        return validate_data(self, X, ensure_all_finite="allow-nan", allow_nd=True, **about)

    def _checked_both(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        X, y = self._checked(X, y=y)
        labels: NDArray[Any] = column_or_1d(y, warn=True)
        check_consistent_length(X, labels)
        assert_all_finite(labels, input_name="y")
        return X, labels

    def _divided(self, X: Any, domain: Any, client: Any) -> tuple[Any, Any, Any]:
        """Return features, domains and clients; domains and clients may be given as columns of X."""
        named = {"domain": domain, "client": client}
        for what, name in named.items():
            if isinstance(name, str):
                if not isinstance(X, pd.DataFrame) or name not in X.columns:
                    columns = list(map(str, X.columns)) if isinstance(X, pd.DataFrame) else []
                    hint = nearest(name, columns) if columns else "X is not a data frame."
                    raise UserError(f"{what}='{name}' is not a column of X: {hint}")
                named[what] = X[name]
        held = [name for name in (self.domain_column_, self.client_column_) if name is not None]
        if isinstance(X, pd.DataFrame):
            X = X.drop(columns=held)
        elif X.ndim == 2:
            X = pd.DataFrame(X, columns=[str(place) for place in range(X.shape[1])])
        return X, named["domain"], named["client"]

    def _predicted(self, X: Any, domain: Any, client: Any) -> NDArray[np.floating]:
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        domain = self.domain_column_ if domain is None else domain
        client = self.client_column_ if client is None else client
        features, z, c = self._divided(X, domain, client)
        unknown = {name: getattr(self, name) for name in Unknown.model_fields}
        ask = self.run_.predict if self.run_.cohort.classes is None else self.run_.predict_proba
        found: NDArray[np.floating] = ask(features, z, c, **unknown)
        return found


class FedDARClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier with one encoder for all domains and a head for each, trained by federated learning over clients.

    Parameters are those of ``feddar.Settings`` (``random_state`` is the seed; ``encoder`` may also be a module of your
    own) and ``unknown_domain``, ``unknown_client``, ``unknown_category`` (see ``Run.predict``). After ``fit``,
    ``run_`` is the trained ``Run``, to save or evaluate, and ``classes_`` are the classes in the order of
    ``predict_proba``.
    """

    classes_: NDArray[Any]

    def fit(self, X: Any, y: Any, domain: Any = None, client: Any = None, sample_weight: Any = None) -> Self:
        """Train on X [samples, features] (or images), y, and each sample's domain, client and weight in training."""
        X, y = self._checked_both(X, y)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        about = {"task": "classification", "classes": self.classes_.tolist()}
        return self._fit(X, y, domain, client, sample_weight, **about)

    def predict_proba(self, X: Any, domain: Any = None, client: Any = None) -> NDArray[np.floating]:
        """Return the probability of each class, [samples, classes]."""
        return self._predicted(X, domain, client)

    def predict(self, X: Any, domain: Any = None, client: Any = None) -> NDArray[Any]:
        """Return the most probable class of each sample."""
        most_probable = self.predict_proba(X, domain, client).argmax(1)
        labels: NDArray[Any] = self.classes_[most_probable]
        return labels

    def score(self, X: Any, y: Any, domain: Any = None, client: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy."""
        return float(accuracy_score(y, self.predict(X, domain, client), sample_weight=sample_weight))


class FedDARRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regressor with one encoder for all domains and a head for each, trained by federated learning over clients.

    Parameters and attributes are those of ``FedDARClassifier``. y is standardised for training; predictions are in the
    units of y.
    """

    def fit(self, X: Any, y: Any, domain: Any = None, client: Any = None, sample_weight: Any = None) -> Self:
        """Train on X [samples, features] (or images), y, and each sample's domain, client and weight in training."""
        X, y = self._checked_both(X, y)
        return self._fit(X, np.asarray(y, np.float64), domain, client, sample_weight, task="regression")

    def predict(self, X: Any, domain: Any = None, client: Any = None) -> NDArray[np.floating]:
        """Return a number for each sample."""
        return self._predicted(X, domain, client)

    def score(self, X: Any, y: Any, domain: Any = None, client: Any = None, sample_weight: Any = None) -> float:
        """Return R², the coefficient of determination."""
        return float(r2_score(y, self.predict(X, domain, client), sample_weight=sample_weight))
