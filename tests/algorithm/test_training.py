"""The round loop: what it computes, that it is reproducible to the bit, and that it can be stopped and resumed."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import feddar
from feddar.algorithm.credibility import Credibility
from feddar.algorithm.names import named_own, named_parameters, named_state
from feddar.algorithm.protocol import Phase, Reply, TrainedEncoder, TrainedHead
from feddar.algorithm.server import refuse_bad
from feddar.algorithm.spreads import LARGEST_POOLED
from feddar.data.cohort import Cohort
from feddar.errors import TrainingError, UserError
from feddar.methods import METHODS
from feddar.models.heads import evidence
from feddar.models.model import build_model, in_precision
from feddar.models.parameters import Parameters
from feddar.results.run import load
from helpers.cohorts import make_cohort
from helpers.encoders import Dropping
from helpers.marks import DISTINCT, first
from helpers.training import train


def same(a, b):
    """Equal to the bit: shared parameters, private ones and metrics."""
    same_tensors(named_state(a.state), named_state(b.state))
    assert a.own.keys() == b.own.keys()
    for client in a.own:
        same_tensors(named_own(a.own[client]), named_own(b.own[client]))
    pd.testing.assert_frame_equal(a.history, b.history, check_exact=True, check_dtype=False)


def same_tensors(here, there):
    assert here.keys() == there.keys()
    for name in here:
        assert torch.equal(here[name], there[name]), name


def close_states(a, b, rtol, atol):
    here, there = named_state(a.state), named_state(b.state)
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(here[name], there[name], rtol=rtol, atol=atol)


@pytest.fixture
def parts(cohort):
    return cohort.split(0.25, 0)


@pytest.mark.parametrize("method", first(DISTINCT, METHODS))
def test_same_seed_same_bits_for_any_number_of_workers(parts, method):
    options = {"test": parts[1], "rounds": 3, "warmup": 1}
    torch.manual_seed(0)
    encoder = Dropping()
    first = train(parts[0], method, encoder, **options)
    torch.manual_seed(123)  # whatever a user does to the global generator must not matter
    same(first, train(parts[0], method, encoder, **options))
    same(first, train(parts[0], method, encoder, jobs=2, **options))
    other = train(parts[0], method, encoder, **(options | {"seed": 1}))
    losses = [run.history.query("metric == 'loss'")["value"] for run in (first, other)]
    assert not np.array_equal(*losses)


@pytest.mark.parametrize("method", first(DISTINCT, METHODS))
def test_stopping_and_resuming_changes_nothing(parts, method, tmp_path):
    options = {"test": parts[1], "warmup": 2}
    whole = train(parts[0], method, dropping(), out=tmp_path / "whole", rounds=5, **options)
    for stop in (1, 2, 3, 4):
        folder = tmp_path / f"stop{stop}"

        def interrupt(now, at=stop):
            if now.round == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(parts[0], method, dropping(), out=folder, rounds=5, progress=interrupt, **options)
        again = train(parts[0], method, dropping(), out=folder, rounds=5, resume=True, jobs=stop % 2 + 1, **options)
        same(whole, again)
        assert (folder / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def dropping():
    with feddar.models.model.seeded(0, "test encoder"):
        return Dropping()


def test_a_run_folder_is_not_overwritten(parts, tmp_path):
    train(parts[0], rounds=1, out=tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        train(parts[0], rounds=1, out=tmp_path / "run")


def test_order_of_clients_does_not_matter():
    cohort = make_cohort(n=300)
    renamed = {name: index for index, name in enumerate(reversed(cohort.clients))}
    flipped = Cohort.from_arrays(
        cohort.x[0], cohort.y, client=[cohort.clients[i] for i in cohort.client], clients=list(renamed),
        domain=[cohort.domains[i] for i in cohort.domain],
    )  # fmt: skip
    a, b = (train(c, rounds=2) for c in (cohort, flipped))
    close_states(a, b, rtol=1e-5, atol=1e-6)


def test_large_damping_is_the_weighted_average(parts):
    wa = train(parts[0], "feddar-wa", rounds=3, dtype="float64")
    sa = train(parts[0], "feddar-sa", rounds=3, dtype="float64", damping=1e12)
    close_states(wa, sa, rtol=1e-8, atol=1e-8)
    other = train(parts[0], "feddar-sa", rounds=3, dtype="float64")
    assert not torch.allclose(wa.state.in_use.heads["0"], other.state.in_use.heads["0"], rtol=1e-4)


def alike():
    """Samples whose domains are made up."""
    cohort = make_cohort(domains=1)
    made_up = np.random.default_rng(0).integers(0, 3, len(cohort))
    return Cohort.from_arrays(cohort.x[0], cohort.y, domain=made_up, client=cohort.client_names)


def large():
    """An encoder under heads of more than 128 numbers, which are weighed as a whole."""
    with feddar.models.model.seeded(0, "test encoder"):
        return nn.Sequential(nn.Linear(6, LARGEST_POOLED), nn.ReLU())


@pytest.mark.parametrize("method", ["feddar-wa", "feddar-sa"])
def test_credibility_weighs_the_heads_in_use_and_leaves_training_as_it_is(method):
    plain, weighed = (train(alike(), method, large(), credibility=on, rounds=4, warmup=1) for on in (False, True))
    assert plain.state.used_heads is None and weighed.state.used_heads is not None
    same_tensors(named_parameters(weighed.state.in_training), named_state(plain.state))
    assert not torch.equal(weighed.state.in_use.heads["0"], plain.state.in_use.heads["0"])


@pytest.mark.parametrize("rounds", [1, 2])
def test_credibility_is_weighed_at_the_heads_from_which_the_round_started(rounds):
    """Heads of more than 128 numbers are weighed as a whole; smaller ones are pooled number by number."""
    cohort = make_cohort(n=120, clients=2, seed=7)
    encoder = large()
    options = {
        "method": "feddar",
        "encoder": encoder,
        "rounds": rounds,
        "dtype": "float64",
        "lr": 1e-2,
        "batch_size": 16,
    }
    run = train(cohort, **options)
    if rounds == 1:
        model, before = build_model(cohort, encoder, run.settings)
        start = {str(m): before.heads["all"] for m in range(3)}
    else:
        previous = train(cohort, **(options | {"rounds": rounds - 1}))
        model, before = previous.model, previous.state.in_training
        start = before.heads
    model.load(before, "all")
    features = model.frozen_features(in_precision(cohort.x, torch.float64), cohort.domain)
    counts = cohort.counts.sum(0)
    mean = sum(counts[m] * start[str(m)] for m in range(3)) / counts.sum()
    expected = Credibility(start)
    for m in range(3):
        rows = cohort.domain == m
        found = evidence(cohort.objective, mean, start[str(m)], features[rows], cohort.y[rows])
        expected.add(str(m), found, float(counts[m]))
    weighed = expected.weighed(run.state.settled.heads).heads
    assert weighed.keys() == run.state.in_use.heads.keys()
    for key, head in weighed.items():
        torch.testing.assert_close(run.state.in_use.heads[key], head, rtol=1e-9, atol=1e-12)


def test_heads_in_use_come_together_where_domains_are_alike():
    kept = {}
    for name, cohort in (("alike", alike()), ("different", make_cohort())):
        state = train(cohort, "feddar", large(), rounds=6).state
        weighed, averaged = (
            torch.stack([used.heads[str(m)] for m in range(3)]).var(0).sum() for used in (state.in_use, state.settled)
        )
        kept[name] = float(weighed / averaged)
    assert kept["alike"] < 0.2 and kept["different"] > 0.9


def test_warm_up_is_fedavg(parts):
    fedavg = train(parts[0], "fedavg", test=parts[1], rounds=3)
    warmed = train(parts[0], "feddar-sa", test=parts[1], rounds=4, warmup=3)
    before = warmed.history[warmed.history["round"] <= 3].reset_index(drop=True)
    pd.testing.assert_frame_equal(fedavg.history, before, check_exact=True)


def test_domain_heads_help_where_domains_differ():
    train_part, test = make_cohort(n=2000).split(0.3)
    found = {}
    for method in ("fedavg", "feddar-wa", "feddar-sa"):
        result = train(train_part, method, test=test, rounds=8, lr=3e-3).results()
        found[method] = result.query("name == 'domain_avg' and metric == 'auc'")["value"].item()
    assert min(found["feddar-wa"], found["feddar-sa"]) > found["fedavg"] + 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
        {"curvature_at": "start"},
        {"curvature": "gram", "damping": 0.0},
        {"k": 3},
        {"reweight": False},
        {"weight_decay": 0.1},
        {"bias": False},
        {"head_lr": 0.1},
        {"lr_steps": "1:0.1"},
    ],
)
def test_every_knob_changes_the_result_and_keeps_it_finite(parts, options):
    method = "feddar-sa" if any(name.startswith("curvature") for name in options) else "feddar"
    plain, turned = train(parts[0], method, rounds=2), train(parts[0], method, rounds=2, **options)
    assert all(torch.isfinite(value).all() for value in named_state(turned.state).values())
    heads = [plain.state.in_use.heads["1"], turned.state.in_use.heads["1"]]
    assert heads[0].shape != heads[1].shape or not torch.equal(*heads)


@pytest.mark.parametrize("kind", ["hessian", "block", "gram"])
def test_many_classes_with_every_curvature(kind):
    part, test = make_cohort(n=800, classes=4).split()
    run = train(part, "feddar-sa", test=test, rounds=4, curvature=kind, lr=3e-3)
    assert run.results().query("name == 'domain_avg' and metric == 'accuracy'")["value"].item() > 0.5


def test_regression_is_learned():
    part, test = make_cohort(n=1500, classes=0).split()
    run = train(part, test=test, rounds=10, lr=3e-3)
    assert run.results().query("name == 'domain_min' and metric == 'r2'")["value"].item() > 0.8


def test_columns_of_any_scale_are_standardised_by_sums_over_clients():
    cohort = make_cohort(n=800)
    scale, shift = torch.tensor([1e4, 1e-4, 1.0, 1.0, 10.0, 1.0]), torch.tensor([3e4, 0.0, -5.0, 0.0, 0.0, 0.0])
    shifted = Cohort.from_arrays(cohort.x[0] * scale + shift, cohort.y, domain=cohort.domain, client=cohort.client)
    run = train(shifted, rounds=1)
    mean, scale = (run.state.encoders["all"][f"encoder.inputs.numbers.{name}"] for name in ("mean", "scale"))
    torch.testing.assert_close(mean, shifted.x[0].mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scale, shifted.x[0].std(0, correction=0), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", ["feddar-sa", "feddar-wa", "fedavg-mh"])
def test_a_domain_no_client_holds_gets_the_mean_head(method):
    cohort = make_cohort(n=200)
    named = Cohort.from_arrays(
        cohort.x[0], cohort.y, domain=cohort.domain_names, domains=[*cohort.domains, "nowhere"],
        client=cohort.client_names,
    )  # fmt: skip
    run = train(named, method, rounds=2, credibility=False)
    shares = named.counts.sum(0) / len(named)
    mean = sum(share * run.state.in_use.heads[str(m)] for m, share in enumerate(shares) if share > 0)
    torch.testing.assert_close(run.state.in_use.heads["3"], mean)
    without = train(cohort, method, rounds=2, credibility=False)
    for m in range(3):
        assert torch.equal(run.state.in_use.heads[str(m)], without.state.in_use.heads[str(m)])


def test_samples_of_a_shared_test_set_need_no_client(parts):
    anywhere = Cohort.from_arrays(
        parts[1].x[0],
        parts[1].y,
        domain=[parts[1].domains[m] for m in parts[1].domain],
        client=["test set"] * len(parts[1]),
    )
    run = train(parts[0], "feddar-sa", test=anywhere, rounds=1)
    assert run.results().query("scope == 'client'")["name"].unique().tolist() == ["test set"]


@pytest.mark.parametrize(
    ("tensor", "weight", "message"),
    [
        ([[float("nan")]], 1.0, "client 'h2' sent 'heads/0'.* not finite in the heads phase of round 7"),
        ([[0.0], [0.0]], 1.0, r"shape \(2, 1\)"),
        ([[0.0]], -1.0, "weight -1"),
    ],
)
def test_bad_replies_are_refused_by_name(tensor, weight, message):
    reply = Reply(("h2",), heads={"0": TrainedHead(torch.tensor(tensor), weight)})
    with pytest.raises(TrainingError, match=message):
        refuse_bad(reply, Phase("heads"), Parameters(heads={"0": torch.zeros(1, 1)}), 7)


def test_divergence_is_one_sentence():
    cohort = make_cohort(classes=0)
    with pytest.raises(TrainingError, match="try a smaller lr"):
        train(cohort, rounds=20, lr=1e6, optimizer="sgd")
    with pytest.raises(TrainingError, match="try a smaller lr"):
        train(cohort, rounds=20, lr=1e6, optimizer="sgd", jobs=2)


def test_an_empty_client_is_named():
    cohort = Cohort.from_arrays(np.zeros((4, 2)), [0, 1, 0, 1], client=["a"] * 4, clients=["a", "b"])
    with pytest.raises(UserError, match="client 'b' has no samples"):
        train(cohort)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "feddar-ssa"}, "did you mean 'feddar-sa'"),
        ({"k": -1}, "k should be greater than or equal to 1; given was -1"),
        ({"learning_rate": 1}, "unknown option 'learning_rate'"),
        ({"encoder": "mpl"}, "did you mean 'mlp'"),
        ({"encoder": "cnn"}, "takes images"),
        ({"encoder": nn.Linear(3, 2)}, "does not take inputs of shape"),
        ({"encoder": nn.Flatten(0)}, "must give \\[batch, features\\]"),
        ({"encoder": "linear"}, "needs k"),
        ({"warmup": 9, "rounds": 9}, "warmup"),
        ({"lr_steps": "a"}, "ROUND:FACTOR"),
        ({"jobs": 2, "threads": 2}, "one thread each"),
        ({"method": "fedavg-mh", "credibility": True}, "trained in turn with a common encoder"),
    ],
)
def test_wrong_options_are_named(cohort, options, message):
    with pytest.raises(UserError, match=message):
        train(cohort, **options)


def test_test_samples_are_matched_by_name(parts):
    turned = Cohort.from_arrays(
        parts[1].x[0], parts[1].y, domain=parts[1].domain_names, domains=parts[1].domains[::-1],
        client=parts[1].client_names, clients=parts[1].clients[::-1],
    )  # fmt: skip
    a, b = (
        train(parts[0], rounds=1, test=test).results().set_index(["scope", "name", "metric"])
        for test in (parts[1], turned)
    )
    pd.testing.assert_frame_equal(a.sort_index(), b.sort_index())


@pytest.mark.parametrize("encoder", [nn.Identity(), nn.Linear(6, 4).requires_grad_(False)])
@pytest.mark.parametrize("method", ["feddar-sa", "fedavg"])
def test_heads_can_be_trained_on_frozen_features(parts, encoder, method):
    run = train(parts[0], method, encoder, rounds=2)
    for name, value in encoder.state_dict().items():
        assert torch.equal(run.state.encoders["all"][f"encoder.{name}"], value)


@pytest.mark.parametrize("method", ["feddar", "fedavg", "ditto", "apfl", "lg-fedavg", "local", "separate"])
def test_an_encoder_may_have_no_parameters_wherever_it_goes(parts, method, tmp_path):
    options = {"test": parts[1], "rounds": 3}
    alone = train(parts[0], method, nn.Identity(), **options)
    same(alone, train(parts[0], method, nn.Identity(), jobs=2, **options))
    train(parts[0], method, nn.Identity(), out=tmp_path / "run", **(options | {"rounds": 1}))
    same(alone, train(parts[0], method, nn.Identity(), out=tmp_path / "run", resume=True, **options))
    pd.testing.assert_frame_equal(
        load(tmp_path / "run", nn.Identity()).evaluate(parts[1]), alone.evaluate(parts[1]), check_exact=True
    )
    stacked = [train(parts[0], method, nn.Identity(), batched=True, jobs=jobs, **options) for jobs in (1, 2)]
    same(*stacked)
    np.testing.assert_allclose(stacked[0].history["value"], alone.history["value"], rtol=1e-3)


class Odd(nn.Module):
    """A transposed weight, an infinite constant, and batch norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).T)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x):
        return self.norm(x @ self.weight)


@pytest.mark.parametrize("jobs", [1, 2])
def test_odd_encoders_train_and_are_saved(parts, tmp_path, jobs):
    train(parts[0], "feddar-sa", Odd(), rounds=2, jobs=jobs, out=tmp_path / "run", batch_size=1)
    assert feddar.load(tmp_path / "run", encoder=Odd()).round == 2
    with pytest.raises(UserError, match="has another encoder"):
        feddar.load(tmp_path / "run", encoder=nn.Linear(6, 4))


def test_divergence_that_stays_at_a_client_is_seen():
    with pytest.raises(TrainingError, match="sent the loss"):
        train(make_cohort(classes=0), "local", rounds=20, lr=1e6, optimizer="sgd")


def test_only_values_that_are_not_finite_are_refused():
    largest, endless = torch.full((3,), torch.finfo(torch.float32).max), torch.tensor([float("inf"), -float("inf")])
    sent = Parameters({"all": {"mask": endless, "other": torch.zeros(2)}}, {"0": largest})
    encoders, heads = {"all": TrainedEncoder({"mask": endless}, 1.0)}, {"0": TrainedHead(largest, 1.0)}
    refuse_bad(Reply(("h",), encoders, heads, {"count": torch.tensor(3)}), Phase("heads"), sent, 1)
    for bad, name in (
        (Reply(("h",), {"all": TrainedEncoder({"other": endless}, 1.0)}), "encoder/all/other"),
        (Reply(("h",), heads={"0": replace(heads["0"], curvature=endless)}), "curvature/0"),
        (Reply(("h",), heads={"0": replace(heads["0"], evidence={"slope": endless})}), "slope/0"),
        (Reply(("h",), sums={"risks": endless}), "risks"),
    ):
        with pytest.raises(TrainingError, match=f"'{name}' with values that are not finite"):
            refuse_bad(bad, Phase("heads"), sent, 1)


def test_a_worker_that_dies_is_one_sentence(parts):
    import multiprocessing

    def kill(_):
        for process in multiprocessing.active_children():
            process.kill()
            process.join()

    with pytest.raises(TrainingError, match="worker process ended unexpectedly"):
        train(parts[0], rounds=3, jobs=2, progress=kill)
    assert not multiprocessing.active_children()


class Failing(nn.Module):
    def forward(self, x):
        if self.training:
            raise KeyError("oops")
        return x


def test_a_failing_encoder_shows_where_from_any_worker(parts):
    with pytest.raises(KeyError, match="oops"):
        train(parts[0], "fedavg", Failing(), rounds=1)
    with pytest.raises(RuntimeError, match="in forward"):
        train(parts[0], "fedavg", Failing(), rounds=1, jobs=2)


def test_resuming_needs_a_folder_rounds_and_metrics(parts, tmp_path):
    with pytest.raises(UserError, match="there is no run in"):
        train(parts[0], out=tmp_path / "none", resume=True)
    train(parts[0], out=tmp_path / "run", rounds=3)
    with pytest.raises(UserError, match="has done 3 rounds already"):
        train(parts[0], out=tmp_path / "run", rounds=2, resume=True)
    for text, said in (
        ('round,value\n1,2,3,4\n5\n"\n', "cannot read the metrics"),
        ("round,value\n1,2\n", "has no column"),
    ):
        (tmp_path / "run" / "metrics.csv").write_text(text)
        with pytest.raises(UserError, match=said):
            train(parts[0], out=tmp_path / "run", rounds=4, resume=True)


def test_what_lives_with_the_clients_is_not_kept_at_the_server(parts):
    state = train(parts[0], "fedrep", rounds=1).state
    assert not any(name.startswith("heads/") for name in named_state(state))
    assert state.encoders and not state.heads
    assert not named_state(train(parts[0], "local", rounds=1, warmup=0).state)


def test_metrics_newer_than_the_model_are_dropped_when_resuming(parts, tmp_path):
    """As after a kill between writing the metrics of a round and its model, or while metrics were written."""
    train(parts[0], test=parts[1], rounds=2, out=tmp_path / "older")
    train(parts[0], test=parts[1], rounds=3, out=tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.csv"
    whole = metrics.read_bytes()
    for missing in (0, 1, 2, 9, 30):
        shutil.copy(tmp_path / "older" / "model.safetensors", tmp_path / "run" / "model.safetensors")
        metrics.write_bytes(whole[: len(whole) - missing])
        train(parts[0], test=parts[1], rounds=3, out=tmp_path / "run", resume=True)
        assert metrics.read_bytes() == whole


def test_the_learning_rate_falls_after_the_round_named():
    settings = feddar.Settings(rounds=9, lr_steps="2:0.1,4:0.5")
    assert [settings.lr_factor(r) for r in (1, 2, 3, 4, 5)] == pytest.approx([1, 1, 0.1, 0.1, 0.05])


def test_the_learning_rate_falls_as_half_a_cosine():
    """From the whole rate in the first round to what would be 0 in the one after the last; steps come on top."""
    settings = feddar.Settings(rounds=4, schedule="cosine")
    half = 0.5**0.5
    expected = [1, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert [settings.lr_factor(r) for r in (1, 2, 3, 4)] == pytest.approx(expected)
    stepped = settings.model_copy(update={"lr_steps": "2:0.1"})
    assert [stepped.lr_factor(r) for r in (1, 2, 3, 4)] == pytest.approx(
        [factor * step for factor, step in zip(expected, (1, 1, 0.1, 0.1), strict=True)]
    )
    assert {settings.model_copy(update={"schedule": each}).lr_factor(3) for each in ("constant", None)} == {1}


@pytest.mark.parametrize("method", ["feddar-sa", "fedavg", "fedrep", "fedminmax", "ditto"])
def test_a_number_is_learned_in_standard_units_and_predicted_in_its_own(method, tmp_path):
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(200, 2)), np.arange(200) % 4
    cost = 20_000 + 5_000 * x[:, 0]
    exact = {"encoder": "mlp", "dtype": "float64", "lr": 0.01, "batch_size": 10}
    cohort = Cohort.from_arrays(x, cost, client=client, domain=client % 2, task="regression", dtype=torch.float64)
    run = train(cohort, method, rounds=15, **exact)
    who = {"domain": cohort.domain_names, "client": cohort.client_names}
    assert np.corrcoef(run.predict(x, **who), cost)[0, 1] > 0.95
    assert abs(run.predict(x, **who).mean() - cost.mean()) < 1_000
    run.save(tmp_path)
    np.testing.assert_array_equal(load(tmp_path).predict(x, **who), run.predict(x, **who))
    # In other units, the same.
    scaled = train(replace(cohort, y=cohort.y / 1000), method, rounds=15, **exact)
    np.testing.assert_allclose(scaled.predict(x, **who) * 1000, run.predict(x, **who), rtol=1e-6)
    plain = train(cohort, method, rounds=2, standardise_target=False)
    assert plain.predict(x, **who).mean() < 1_000


def test_a_run_with_a_domain_that_nobody_holds_is_saved_and_goes_on_as_it_was(tmp_path):
    cohort = make_cohort()
    held = cohort.rows(cohort.domain != 1)
    whole = train(held, rounds=3, out=tmp_path / "whole")
    train(held, rounds=2, out=tmp_path / "cut")
    resumed = train(held, rounds=3, out=tmp_path / "cut", resume=True)
    same_tensors(named_state(resumed.state), named_state(whole.state))
