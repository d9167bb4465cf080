"""Saving, loading, predicting."""

import json
import struct

import numpy as np
import pytest
import torch
from torch import nn

import feddar
from conftest import make_cohort
from feddar.errors import UserError
from feddar.methods import METHODS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_a_saved_run_predicts_the_same(tmp_path, method, classes):
    part, test = make_cohort(classes=classes).split()
    run = feddar.train(part, method, test=test, rounds=2)
    run.save(tmp_path / "run")
    again = feddar.load(tmp_path / "run")
    domain = np.array(test.domains)[test.domain]
    client = np.array(test.clients)[test.client]
    np.testing.assert_array_equal(
        run.predict(test.x[0], domain=domain, client=client), again.predict(test.x[0], domain=domain, client=client)
    )
    np.testing.assert_array_equal(run.evaluate(test)["value"], again.evaluate(test)["value"])
    assert again.results().equals(run.results())
    if classes:
        probabilities = again.predict_proba(test.x[0].numpy(), domain=domain, client=client)
        np.testing.assert_allclose(probabilities.sum(1), 1)
        assert set(run.predict(test.x[0], domain=domain, client=client)) <= set(test.classes)


def test_evaluate_is_the_last_round_of_training():
    part, test = make_cohort().split()
    run = feddar.train(part, test=test, rounds=3)
    last = run.history.query("round == 3 and split == 'test'")["value"].to_numpy()
    np.testing.assert_allclose(run.evaluate(test)["value"], last, rtol=1e-6)


def test_own_encoder_must_be_given_again(tmp_path):
    part, test = make_cohort().split()
    run = feddar.train(part, encoder=nn.Linear(6, 4), rounds=1)
    run.save(tmp_path / "run")
    with pytest.raises(UserError, match="encoder="):
        feddar.load(tmp_path / "run")
    again = feddar.load(tmp_path / "run", encoder=nn.Linear(6, 4))
    assert again.evaluate(test).equals(run.evaluate(test))


def test_unknown_names_are_suggested():
    part, test = make_cohort().split()
    run = feddar.train(part, "fedrep", rounds=1)
    x = test.x[0][:1]
    with pytest.raises(UserError, match="domain 'domain-9' was not in training: did you mean 'domain-"):
        run.predict(x, domain=["domain-9"], client=["site-0"])
    with pytest.raises(UserError, match="give client="):
        run.predict(x, domain=["domain-0"])
    with pytest.raises(UserError, match="client 'site-9' was not in training"):
        run.predict(x, domain=["domain-0"], client=["site-9"])
    with pytest.raises(UserError, match="give the domain"):
        feddar.train(part, "feddar-wa", rounds=1).predict(x)


@pytest.fixture
def saved(tmp_path):
    feddar.train(make_cohort(), rounds=1).save(tmp_path)
    return tmp_path / "model.safetensors"


def test_a_damaged_file_is_one_sentence(saved):
    whole = saved.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\x80\x04pickle", whole[8:]):
        saved.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            feddar.load(saved.parent)
    saved.unlink()
    with pytest.raises(UserError, match="there is no run in"):
        feddar.load(saved.parent)


def test_a_newer_format_is_refused(saved):
    whole = saved.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    about = json.loads(header["__metadata__"]["feddar"])
    header["__metadata__"]["feddar"] = json.dumps(about | {"format": 99})
    new = json.dumps(header).encode()
    saved.write_bytes(struct.pack("<Q", len(new)) + new + whole[8 + size :])
    with pytest.raises(UserError, match="format 99"):
        feddar.load(saved.parent)


def test_nothing_is_pickled(saved, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    monkeypatch.setattr("pickle.loads", lambda *_, **__: pytest.fail("pickle was loaded"))
    assert feddar.load(saved.parent).round == 1


def test_what_is_given_to_predict_is_checked():
    import pandas as pd

    part, test = make_cohort().split()
    run = feddar.train(part, rounds=1)
    x, z = test.x[0].numpy(), test.domain_names
    expected = run.predict_proba(x, domain=z)
    np.testing.assert_array_equal(run.predict_proba(test.x[0].requires_grad_(), domain=list(z)), expected)
    np.testing.assert_array_equal(run.predict_proba(pd.DataFrame(x), domain=pd.Series(z)), expected)
    for wrong, message in (
        ({"x": x[:, :1]}, "trained on"),
        ({"x": np.where(x > 1, np.nan, x)}, "not finite"),
        ({"domain": z[:3]}, "domain has 3 entries"),
        ({"domain": [["domain-0"]] * 2}, "has lists in it"),
    ):
        with pytest.raises(UserError, match=message):
            run.predict(**({"x": x, "domain": z} | wrong))


def test_predict_asks_only_for_what_the_method_uses():
    part, test = make_cohort().split()
    x = test.x[0]
    fedavg = feddar.train(part, "fedavg", rounds=1)
    assert np.array_equal(fedavg.predict(x), fedavg.predict(x, domain="domain-1", client=["a new site"] * len(x)))
    fedrep = feddar.train(part, "fedrep", rounds=1)
    assert len(fedrep.predict(x, client="site-0")) == len(x)


def test_numbers_as_domains_can_be_tensors():
    cohort = make_cohort()
    numbered = feddar.Cohort.from_arrays(cohort.x[0], cohort.y, domain=cohort.domain, client=cohort.client)
    run = feddar.train(numbered, "fedrep", rounds=1)
    assert len(run.predict(cohort.x[0], domain=cohort.domain, client=cohort.client)) == len(cohort)
