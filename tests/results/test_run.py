"""Saving, loading, predicting."""

import json
import struct

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import feddar
from feddar.errors import UserError
from feddar.methods import METHODS
from helpers.cohorts import make_cohort


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
    run = feddar.train(part, test=test, rounds=3, validation=0)
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
    x = test.x[0][:2]
    run = feddar.train(part, "feddar-wa", rounds=1)
    with pytest.raises(
        UserError, match=r"row 1: domain 'domain-9' was not in training: did you mean 'domain-.*average"
    ):
        run.predict(x, domain=["domain-0", "domain-9"])
    with pytest.raises(UserError, match="row 1: the domain is missing"):
        run.predict(x, domain=["domain-0", None])
    with pytest.raises(UserError, match="give the domain"):
        run.predict(x)
    run = feddar.train(part, "fedrep", rounds=1)
    with pytest.raises(UserError, match="give client="):
        run.predict(x, domain="domain-0")
    with pytest.raises(UserError, match=r"row 0: client 'site-9' was not in training.*unknown_client='average'"):
        run.predict(x, client=["site-9", "site-0"])
    with pytest.raises(UserError, match="unknown option 'unknown_dmain': did you mean 'unknown_domain'"):
        run.predict(x, client="site-0", unknown_dmain="average")


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


def mixture(run, x, weights, names, what):
    """Average the predictions for each name by hand."""
    ask = run.predict if run.cohort.classes is None else run.predict_proba
    return sum(share * ask(x, **{what: name}) for share, name in zip(weights / weights.sum(), names, strict=True))


@pytest.mark.parametrize("method", ["feddar-sa", "separate", "fedavg-di"])
@pytest.mark.parametrize("classes", [0, 2, 3])
def test_an_unknown_domain_gets_the_mixture_of_heads_by_samples(method, classes):
    cohort = make_cohort(classes=classes)
    run = feddar.train(cohort, method, rounds=2, validation=0)
    x = cohort.x[0][:4]
    found = run.predictions(x, domain=["domain-1", "elsewhere", None, ""], unknown_domain="average")
    expected = mixture(run, x, cohort.counts.sum(0).numpy(), cohort.domains, "domain")
    values = found.filter(regex="^probability_|^prediction$").to_numpy().reshape(expected.shape)
    np.testing.assert_allclose(values[1:], expected[1:], rtol=1e-5)
    assert np.abs(values[0] - expected[0]).max() > 1e-4
    known = "all" if method == "fedavg-di" else "domain-1"
    assert found["head"].tolist() == [known, *["average of 3"] * 3]
    assert found["domain_used"].tolist() == ["domain-1", "", "", ""]
    none = "no domain: average of heads"
    assert found["note"].tolist() == ["", "domain 'elsewhere' unknown: average of heads", none, none]
    if classes:
        asked = {"domain": "elsewhere", "unknown_domain": "average"}
        assert (run.predict(x[1:2], **asked) == found["class"][1]).all()
        np.testing.assert_array_equal(run.predict_proba(x[1:], **asked), values[1:])


@pytest.mark.parametrize(("method", "classes"), [("feddar", 2), ("feddar-sa", 3), ("fedavg-di", 0), ("separate", 2)])
def test_a_missing_domain_gets_the_mixture_by_the_shares_at_its_client(method, classes):
    cohort = make_cohort(classes=classes)
    run = feddar.train(cohort, method, rounds=2, validation=0, dtype="float64")
    x, clients = cohort.x[0][:6], ["site-1", "site-1", "site-2", "elsewhere", None, "site-2"]
    domain = ["domain-1", None, "", float("nan"), None, "elsewhere"]
    found = run.predictions(x, domain, clients, missing_domain="mixture", unknown_domain="average")
    values = found.filter(regex="^probability_|^prediction$").to_numpy()

    def shares_at(name):
        counts = run.cohort.counts
        return (counts[run.cohort.client_numbers[name]] if name in run.cohort.clients else counts.sum(0)).double()

    for row in range(1, 6):  # one head after another, in probability
        shares = shares_at(clients[row] if row < 5 else None)
        each = [
            run.predictions(x[row : row + 1], name, [clients[row]]).filter(regex="^probability_|^prediction$")
            for name in cohort.domains
        ]
        expected = sum(float(share) * part.to_numpy() for share, part in zip(shares / shares.sum(), each, strict=True))
        np.testing.assert_allclose(values[row], expected[0], rtol=1e-9, atol=1e-12)
    assert found["head"].tolist()[1:] == ["mixture of 3"] * 4 + ["average of 3"]
    assert found["domain_used"].tolist() == ["domain-1", *[""] * 5]
    notes = [note.split(": ")[1].split(";")[0] for note in found["note"].iloc[1:]]
    at = "mixture of heads by the shares at "
    assert notes == [f"{at}client 'site-1'", f"{at}client 'site-2'", *[f"{at}all clients"] * 2, "average of heads"]
    alone = run.predictions(x, missing_domain="mixture")
    assert set(alone["note"]) == {f"no domain: {at}all clients"}
    assert np.abs(values[1] - alone.filter(regex="^probability_|^prediction$").to_numpy()[1]).max() > 1e-6


def test_a_missing_domain_is_refused_unless_it_is_asked_for():
    cohort = make_cohort()
    run, x = feddar.train(cohort, "feddar-sa", rounds=1), cohort.x[0][:2]
    with pytest.raises(UserError, match=r"the domain is missing.*missing_domain='mixture' .--missing-domain mixture"):
        run.predict(x, domain=["domain-1", None])
    with pytest.raises(UserError, match="the domain is missing"):
        run.predict(x, domain=["elsewhere", None], unknown_domain="average", missing_domain="error")
    with pytest.raises(UserError, match=r"domain 'elsewhere' was not in training.*unknown_domain='average'"):
        run.predict(x, domain=[None, "elsewhere"], missing_domain="mixture")
    with pytest.raises(UserError, match=r"give the domain of each sample.*missing_domain='mixture'"):
        run.predict(x)
    with pytest.raises(UserError, match="missing_domain should be 'error' or 'mixture'"):
        run.predict(x, missing_domain="average")
    assert set(run.predictions(x, domain="", missing_domain="mixture")["head"]) == {"mixture of 3"}


def test_a_domain_that_nobody_held_has_no_part_in_the_mixture():
    cohort = make_cohort()
    held = cohort.rows(cohort.domain != 2)
    run = feddar.train(held, "feddar-wa", rounds=1)
    found = run.predictions(cohort.x[0][:1], domain="elsewhere", unknown_domain="average")
    assert found["head"][0] == "average of 2"


@pytest.mark.parametrize(
    ("method", "head"), [("fedrep", "average of 4"), ("lg-fedavg", "average of 4"), ("ditto", "all")]
)
def test_an_unknown_client_gets_what_the_method_says(method, head):
    cohort = make_cohort()
    run = feddar.train(cohort, method, rounds=1, validation=0)
    x = cohort.x[0][:3]
    found = run.predictions(x, client=["site-1", "elsewhere", None], unknown_client="average")
    assert found["head"].tolist() == ["client site-1", head, head]
    answer = run.method.for_unseen_client
    assert found["note"].tolist() == ["", f"client 'elsewhere' unknown: {answer}", f"no client: {answer}"]
    if head != "all":
        expected = mixture(run, x, cohort.counts.sum(1).numpy(), cohort.clients, "client")
        np.testing.assert_allclose(found["probability_1"][1:], expected[1:, 1], rtol=1e-5)


def test_client_and_domain_can_both_be_unknown():
    cohort = make_cohort()
    run = feddar.train(cohort, "fedper", domain_input=True, rounds=1)
    average = {"unknown_client": "average", "unknown_domain": "average"}
    found = run.predictions(cohort.x[0][:2], client=["x", "site-0"], domain="y", **average)
    assert found["head"].tolist() == ["average of 4", "average of 3"]
    assert found["note"][0].count("; ") == 1


def test_methods_that_do_not_use_the_domain_take_any():
    cohort = make_cohort()
    found = feddar.train(cohort, "fedavg", rounds=1).predictions(cohort.x[0][:2], domain=["elsewhere", None])
    assert found[["domain_used", "head", "note"]].to_numpy().tolist() == [["", "all", ""]] * 2


@pytest.fixture(scope="module")
def on_table():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(size=80), "ward": rng.choice(["A", "B"], 80)})
    return feddar.train(feddar.Cohort.from_arrays(table, table["ward"] == "A"), rounds=1)


def test_an_unknown_category_is_refused_or_taken_as_missing(on_table):
    new = pd.DataFrame({"age": [0.0, 0.0, 0.0], "ward": ["A", "C", None]})
    with pytest.raises(
        UserError, match=r"row 1: column 'ward' holds 'C', which did not occur.*A, B.*--unknown-category"
    ):
        on_table.predict(new)
    found = on_table.predictions(new, unknown_category="missing")
    assert found["note"].tolist() == ["", "ward 'C' unknown: as missing", "ward missing, never so in training"]
    assert found["probability_True"][1] == found["probability_True"][2] != found["probability_True"][0]


def test_what_training_never_saw_missing_becomes_the_mean(on_table):
    mean = float(on_table.state.encoders["all"]["encoder.inputs.numbers.mean"])
    new = pd.DataFrame({"age": [None, mean], "ward": "A"})
    found = on_table.predict_proba(new)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    with pytest.raises(UserError, match="row 1: column 'age' holds 'inf', which is not a number"):
        on_table.predict(pd.DataFrame({"age": [1.0, float("inf")], "ward": "A"}))


def test_new_rows_may_be_closer_than_the_precision_tells(on_table):
    assert len(on_table.predict(pd.DataFrame({"age": [1.0, 1.0 + 1e-12], "ward": "A"}))) == 2
