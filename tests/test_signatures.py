"""The options that editors, type checkers and help() show are the fields of the settings."""

import inspect
from typing import get_type_hints

import pytest

import feddar
from feddar.options import CompareOptions, EstimatorOptions, Options, TrainOptions, UnknownOptions
from feddar.results.estimators import FedDARClassifier
from feddar.settings import Settings, Unknown

TYPES = {name: field.annotation for name, field in (Settings.model_fields | Unknown.model_fields).items()}
NAMED_BY_FUNCTIONS = {"method", "encoder"}


@pytest.mark.parametrize("options", [Options, CompareOptions, TrainOptions, UnknownOptions])
def test_types_are_those_of_the_fields(options):
    found = get_type_hints(options)
    assert found and found == {name: TYPES[name] for name in found}


def test_no_option_is_left_out():
    assert TrainOptions.__annotations__.keys() == Settings.model_fields.keys() - NAMED_BY_FUNCTIONS
    assert CompareOptions.__annotations__.keys() == TrainOptions.__annotations__.keys() - {"jobs"}
    assert UnknownOptions.__annotations__.keys() == Unknown.model_fields.keys()
    assert EstimatorOptions.__annotations__.keys() == set(FedDARClassifier().get_params())


def test_help_shows_every_option_with_its_default_once():
    train, compare = inspect.signature(feddar.train).parameters, inspect.signature(feddar.compare).parameters
    for name, field in Settings.model_fields.items():
        if name not in NAMED_BY_FUNCTIONS:
            assert train[name].default == compare[name].default == field.default
    assert "options" not in train.keys() | compare.keys() and "method" not in compare
    assert list(train)[:4] == ["cohort", "method", "encoder", "test"]
    for predict in (feddar.Run.predict, feddar.Run.predict_proba, feddar.Run.predictions):
        assert list(inspect.signature(predict).parameters) == ["self", "x", "domain", "client", *Unknown.model_fields]
