"""What each method is: the equalities between methods, and what each adds, against plain PyTorch loops."""

from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from feddar.algorithm.aggregation import project_to_simplex
from feddar.algorithm.local_training import apfl_step, predict, proximal_step
from feddar.algorithm.mixture import predict_mixed
from feddar.algorithm.names import named_own, named_parameters, named_state
from feddar.algorithm.protocol import Phase
from feddar.algorithm.server import ascend, epochs_by_evidence, shares_by_evidence
from feddar.data.cohort import Cohort, domain_weights
from feddar.errors import UserError
from feddar.methods import METHODS, nearest
from feddar.models.model import build_model, seeded
from feddar.settings import Settings
from helpers.cohorts import make_cohort
from helpers.training import train

METHOD_NAMES = {
    *("local", "fedavg", "fedavg-ft", "separate", "fedavg-separate-ft", "fedavg-mh", "fedavg-di", "fedprox"),
    *("fedprox-ft", "fedminmax", "fedrep", "fedper", "lg-fedavg", "feddar-wa", "feddar-sa", "fedbn", "ditto", "apfl"),
    *("group-dro", "q-ffl", "afl", "analytic", "fairfed", "fedrod", "ifca", "fedem", "feddar-mixture", "feddar"),
}


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        with seeded(0, "test encoder"):
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def equal_states(a, b):
    here, there = named_state(a.state), named_state(b.state)
    assert here.keys() == there.keys()
    for name in here:
        assert torch.equal(here[name], there[name]), name


def scores_of(run, test):
    return run.scores(test.x, test.domain, test.client_names)


@pytest.fixture
def parts():
    return make_cohort().split(0.25, 0)


def test_every_method_of_the_table_is_there():
    assert set(METHODS) == METHOD_NAMES
    for row in METHODS.values():
        assert row.knob is None or row.knob in Settings.model_fields
        assert row.start is None or row.start in METHODS


def test_only_a_name_that_is_really_near_is_suggested():
    assert nearest("age", ["race", "sex"]) == "there are: race, sex."
    assert nearest("Aeg", ["race", "age"]) == "did you mean 'age'?"


def test_all_methods_start_from_the_same_function(parts):
    built = {name: build_model(parts[0], None, Settings(method=name)) for name in METHODS}
    plain, first = built["fedavg"]
    expected = plain.frozen_features(parts[0].x, parts[0].domain) @ first.heads["all"].T
    for name, (model, initial) in built.items():
        assert initial.encoders.keys() == {"all"}
        for each, value in first.encoders["all"].items():
            assert torch.equal(initial.encoders["all"][each], value), name
        features = model.frozen_features(parts[0].x, parts[0].domain)
        torch.testing.assert_close(features @ initial.heads["all"].T, expected)


def test_fedprox_without_a_pull_is_fedavg(parts):
    fedavg = train(parts[0], "fedavg", Normalised(), rounds=3)
    equal_states(train(parts[0], "fedprox", Normalised(), rounds=3, mu=0.0), fedavg)
    strong = train(parts[0], "fedprox", Normalised(), rounds=3, mu=100.0, optimizer="sgd", lr=0.01)
    weak = train(parts[0], "fedprox", Normalised(), rounds=3, mu=0.1, optimizer="sgd", lr=0.01)
    start = train(parts[0], "fedavg", Normalised(), rounds=1, lr=1e-30).state
    moved = [float((run.state.heads["all"] - start.heads["all"]).norm()) for run in (strong, weak)]
    assert 0 < moved[0] < 0.5 * moved[1]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fedavg_with_one_client_is_plain_training(optimizer):
    """Against a loop written with torch's own modules, loss and optimiser, to the bit."""
    cohort = make_cohort(clients=1)
    rounds, lr = 3, 0.01
    run = train(cohort, "fedavg", Normalised(), rounds=rounds, lr=lr, optimizer=optimizer, batch_size=32)

    encoder = Normalised()
    _, initial = build_model(cohort, Normalised(), Settings(method="fedavg"))
    head = initial.heads["all"].clone().requires_grad_()
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    encoder.train()
    for number in range(1, rounds + 1):
        step = kinds[optimizer]([*encoder.parameters(), head], lr=lr)
        with seeded(0, number, "together", "site-0"):
            for batch in torch.randperm(len(cohort)).split(32):
                features = encoder(cohort.x[0][batch])
                features = torch.cat([features, torch.ones(len(batch), 1)], dim=1)
                step.zero_grad()
                losses = nn.functional.binary_cross_entropy_with_logits(
                    (features @ head.T)[:, 0], cohort.y[batch].float(), reduction="none"
                )
                losses.mean().backward()
                step.step()
    assert torch.equal(run.state.heads["all"], head.detach())
    for name, value in encoder.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(run.state.encoders["all"][f"encoder.{name}"], value), name


def test_feddar_wa_with_one_client_and_domain_is_alternating_training():
    cohort = make_cohort(clients=1, domains=1)
    run = train(cohort, "feddar-wa", Normalised(), rounds=2, lr=0.01, head_epochs=3, batch_size=32, dtype="float64")

    x, y = cohort.x[0].double(), cohort.y.double()
    encoder = Normalised().double()
    _, initial = build_model(cohort, Normalised(), Settings(method="feddar-wa", dtype="float64"))
    head = initial.heads["all"].clone().requires_grad_()

    def risk(batch):
        features = torch.cat([encoder(x[batch]), torch.ones(len(batch), 1, dtype=torch.float64)], dim=1)
        return nn.functional.binary_cross_entropy_with_logits((features @ head.T)[:, 0], y[batch])

    for number in (1, 2):
        for phase, parameters, epochs in (("heads", [head], 3), ("encoder", list(encoder.parameters()), 1)):
            encoder.train(phase == "encoder")
            step = torch.optim.Adam(parameters, lr=0.01)
            with seeded(0, number, phase, "site-0"):
                for _ in range(epochs):
                    for batch in torch.randperm(len(cohort)).split(32):
                        encoder.zero_grad(), step.zero_grad()
                        risk(batch).backward()
                        step.step()
    torch.testing.assert_close(run.state.heads["0"], head.detach(), rtol=1e-9, atol=1e-9)
    for name, value in encoder.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(run.state.encoders["all"][f"encoder.{name}"], value, rtol=1e-9, atol=1e-9)


def test_fedavg_with_a_head_for_each_of_one_domain_is_fedavg():
    part, test = make_cohort(domains=1).split()
    several, one = (train(part, name, Normalised(), test=test, rounds=3) for name in ("fedavg-mh", "fedavg"))
    assert torch.equal(several.state.heads["0"], one.state.heads["all"])
    pd.testing.assert_frame_equal(several.history, one.history, check_exact=True)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9}])
def test_separate_is_fedavg_on_each_domain_alone(options):
    cohort = make_cohort(n=500)
    together = train(cohort, "separate", Normalised(), rounds=3, **options)
    for m, name in enumerate(cohort.domains):
        only = cohort.rows(cohort.domain == m)
        alone = Cohort.from_arrays(only.x[0], only.y, domain=only.domain_names, client=only.client_names)
        run = train(alone, "fedavg", Normalised(), rounds=3, **options)
        assert torch.equal(together.state.heads[str(m)], run.state.heads["all"]), name
        for each, value in run.state.encoders["all"].items():
            assert torch.equal(together.state.encoders[str(m)][each], value), (name, each)


def test_fedper_and_fedrep_differ_only_by_schedule():
    told = {"name", "paper", "knob", "alternating"}
    for field in fields(METHODS["fedper"]):
        values = [getattr(METHODS[name], field.name) for name in ("fedper", "fedrep")]
        assert (values[0] == values[1]) or field.name in told
    assert not METHODS["fedper"].alternating and METHODS["fedrep"].alternating
    part, _ = make_cohort().split()
    a, b = train(part, "fedper", rounds=2, alternating=True), train(part, "fedrep", rounds=2)
    equal_states(a, b)


def test_fine_tuning_starts_from_the_common_model_and_never_enters_it(parts):
    plain = train(parts[0], "fedavg", Normalised(), rounds=3)
    tuned = train(parts[0], "fedavg-ft", Normalised(), rounds=3)
    equal_states(tuned, plain)
    for client, own in tuned.own.items():
        assert not torch.equal(own.parameters.heads["own"], plain.state.heads["all"]), client
    still = train(parts[0], "fedavg-ft", Normalised(), rounds=3, tune_factor=1e-30)
    assert still.own.keys() == set(parts[0].clients)
    for own in still.own.values():
        torch.testing.assert_close(own.parameters.heads["own"], plain.state.heads["all"])


@pytest.mark.parametrize("method", ["fedavg-ft", "fedprox-ft"])
def test_fine_tuning_is_one_epoch_of_plain_training_at_a_share_of_the_rate(method):
    """Against torch's own optimiser, however many epochs the common model is trained for."""
    cohort = make_cohort(n=200, clients=1)
    options = {"rounds": 2, "encoder_epochs": 3, "lr": 0.02, "tune_factor": 0.25, "optimizer": "sgd", "batch_size": 64}
    run = train(cohort, method, Normalised(), **options)

    common = run.state.encoders["all"]
    encoder, head = Normalised(), run.state.heads["all"].clone().requires_grad_()
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in common.items()}, strict=False)
    encoder.train()
    step = torch.optim.SGD([*encoder.parameters(), head], lr=0.02 * 0.25)
    with seeded(0, 2, "personal", "site-0"):
        for batch in torch.randperm(len(cohort)).split(64):
            features = torch.cat([encoder(cohort.x[0][batch]), torch.ones(len(batch), 1)], dim=1)
            step.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(
                (features @ head.T)[:, 0], cohort.y[batch].float()
            ).backward()
            step.step()
    own = run.own["site-0"].parameters
    torch.testing.assert_close(own.heads["own"], head.detach())
    for name, value in encoder.named_parameters():
        torch.testing.assert_close(own.encoders["own"][f"encoder.{name}"], value.detach())


@pytest.mark.parametrize("reweight", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_heads_of_clients_are_reweighted_where_that_is_asked_for(batched, reweight):
    """One step of a client's own head: down the mean of its samples' losses, each times the weight of its domain."""
    cohort = make_cohort(n=400, clients=3)
    cohort = cohort.rows((cohort.domain > 0) | (torch.arange(400) % 4 == 0))  # one domain is rare
    told = {"method": "fedrep", "lr": 0.1, "optimizer": "sgd", "dtype": "float64", "reweight": reweight}
    run = train(cohort, encoder=nn.Identity(), rounds=1, head_epochs=1, batch_size=1000, batched=batched, **told)
    model, initial = build_model(cohort, nn.Identity(), Settings(**told))
    weights = domain_weights(cohort.counts.sum(0)) if reweight else torch.ones(3, dtype=torch.float64)
    assert (float(weights.max()) > 2 * float(weights.min())) == reweight
    for name in cohort.clients:
        data = cohort.at(name)
        features = model.frozen_features((data.x[0].double(),), data.domain)
        head = initial.heads["all"].clone().requires_grad_()
        risk = (weights[data.domain] * model.objective.loss(features @ head.T, data.y)).mean()
        (slope,) = torch.autograd.grad(risk, head)
        torch.testing.assert_close(run.own[name].parameters.heads["own"], head.detach() - 0.1 * slope)


def test_separate_fine_tuning_starts_as_fedavg_and_ends_by_domain(parts):
    options = {"test": parts[1], "rounds": 8, "last": 2}
    fedavg, tuned = (train(parts[0], name, **options) for name in ("fedavg", "fedavg-separate-ft"))
    before = [run.history[run.history["round"] <= 6].reset_index(drop=True) for run in (fedavg, tuned)]
    pd.testing.assert_frame_equal(*before, check_exact=True)
    assert {name.split("/")[1] for name in named_state(tuned.state)} == {"0", "1", "2"}
    first = fedavg.history.query("round == 7 and metric == 'auc'")["value"].to_numpy()
    assert not np.array_equal(first, tuned.history.query("round == 7 and metric == 'auc'")["value"].to_numpy())


def test_all_rounds_that_count_are_fine_tuned():
    for rounds, last, tuned in ((20, 5, 5), (8, 5, 5), (40, 5, 10), (3, 5, 2)):
        settings = Settings(method="fedavg-separate-ft", rounds=rounds, last=last)
        rows = [settings.row_in(number).name for number in range(1, rounds + 1)]
        assert rows == ["fedavg"] * (rounds - tuned) + ["fedavg-separate-ft"] * tuned


def test_more_rounds_cannot_be_asked_of_a_method_that_fine_tunes_at_its_end(parts, tmp_path):
    train(parts[0], "fedavg-separate-ft", rounds=4, out=tmp_path / "run")
    with pytest.raises(UserError, match="rounds=4, not 8"):
        train(parts[0], "fedavg-separate-ft", rounds=8, out=tmp_path / "run", resume=True)


def test_the_domain_as_an_input_moves_each_domains_intercept(parts):
    run = train(parts[0], "fedavg-di", rounds=2, lr=0.01)
    test = parts[1]
    model, width = run.model, run.model.width
    other = (test.domain + 1) % 3
    moved = run.scores(test.x, other, None) - run.scores(test.x, test.domain, None)
    head = run.state.heads["all"][0, width - 4 : width - 1]
    torch.testing.assert_close(moved[:, 0], head[other] - head[test.domain], rtol=1e-4, atol=1e-5)
    assert model.domain_columns == 3
    assert head.abs().min() > 0
    with pytest.raises(UserError, match="give the domain"):
        run.predict(test.x[0])


def test_fedbn_keeps_batch_norm_at_home_and_averages_the_rest(parts):
    run = train(parts[0], "fedbn", Normalised(), rounds=2)
    kept = {name for own in run.own.values() for name in named_own(own)}
    assert {name.rsplit(".", 1)[0] for name in kept} == {"encoder/all/encoder.layers.1"}
    assert {"weight", "bias", "running_mean", "running_var"} <= {name.rsplit(".", 1)[1] for name in kept}
    values = [own.parameters.encoders["all"]["encoder.layers.1.running_mean"] for own in run.own.values()]
    assert not torch.equal(values[0], values[1])
    plain = nn.Linear(6, 4)
    equal_states(train(parts[0], "fedbn", plain, rounds=2), train(parts[0], "fedavg", plain, rounds=2))


def test_ditto_is_local_without_a_pull_and_the_common_model_under_a_strong_one(parts):
    options = {"rounds": 3, "optimizer": "sgd", "lr": 0.01}
    common = train(parts[0], "fedavg", Normalised(), **options)
    gaps = []
    for mu in (0.0, 1.0, 60.0):
        run = train(parts[0], "ditto", Normalised(), mu=mu, **options)
        equal_states(run, common)
        heads = [own.parameters.heads["own"] for own in run.own.values()]
        gaps.append(max(float((head - run.state.heads["all"]).norm()) for head in heads))
    assert gaps[0] > gaps[1] > gaps[2] > 0


def test_apfl_mixes_between_the_common_and_a_local_model(parts):
    options = {"rounds": 3, "optimizer": "sgd", "lr": 0.05}
    common = train(parts[0], "fedavg", Normalised(), **options)
    run = train(parts[0], "apfl", Normalised(), **options)
    equal_states(run, common)
    assert run.own.keys() == set(parts[0].clients)
    for own in run.own.values():
        local, mix = own.extra["local/4"][0], own.extra["mix"]
        assert 0 <= mix <= 1 and mix != 0.5
        torch.testing.assert_close(own.parameters.heads["own"], mix * local + (1 - mix) * run.state.heads["all"])
    none = train(parts[0], "apfl", Normalised(), **(options | {"mix": 0.0, "lr": 1e-9}))
    for own in none.own.values():
        torch.testing.assert_close(own.parameters.heads["own"], none.state.heads["all"])


def test_the_steps_of_pull_and_mixture_are_the_gradients_of_what_they_say():
    generator = torch.Generator().manual_seed(0)
    target, anchor, start = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(3))

    def objective(w):
        return (w - target).pow(4).sum()

    seen = []
    w = start.clone().requires_grad_()
    objective(w).backward()
    proximal_step(lambda: seen.append(w.grad.clone()), [w], [anchor], 0.7)()
    wanted = start.clone().requires_grad_()
    (objective(wanted) + 0.35 * (wanted - anchor).square().sum()).backward()
    torch.testing.assert_close(seen[0], wanted.grad)

    mix = torch.tensor(0.3, dtype=torch.float64)
    local, model = start.clone(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    move = apfl_step(lambda: seen.append(local.grad.clone()), [model], [local], [anchor], mix, lr=1e-3)
    torch.testing.assert_close(model.detach(), 0.3 * start + 0.7 * anchor)
    objective(model).backward()
    move()
    v, a = start.clone().requires_grad_(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    objective(a * v + (1 - a) * anchor).backward()
    torch.testing.assert_close(seen[1], v.grad)
    torch.testing.assert_close(mix, 0.3 - 1e-3 * a.grad)


def test_fedminmax_raises_the_worst_domain_and_stays_on_the_simplex():
    part = make_cohort(n=900)
    risks = {}
    shares = [part.counts.sum(0) / len(part)]
    for rounds in (1, 2, 3):
        run = train(part, "fedminmax", rounds=rounds, minmax_lr=0.5)
        shares.append(run.state.domain_shares)
        assert float(shares[-1].sum()) == pytest.approx(1)
        assert (shares[-1] >= 0).all()
    # The first step is along the risks of the common initial model.
    model, initial = build_model(part, None, Settings(method="fedminmax"))
    start = train(part, "fedavg", rounds=1, lr=1e-30)
    scored = start.scores(part.x, part.domain, None)
    risks = torch.stack([model.objective.loss(scored, part.y)[part.domain == m].mean() for m in range(3)])
    assert int((shares[1] - shares[0]).argmax()) == int(risks.argmax())
    torch.testing.assert_close(
        shares[1], project_to_simplex(shares[0].double() + 0.5 * risks.double()), rtol=1e-4, atol=1e-5
    )
    assert named_parameters(initial).keys() <= named_state(run.state).keys()
    equal_states_but_shares(train(part, "fedminmax", rounds=2, minmax_lr=0.0), train(part, "fedavg", rounds=2))


def equal_states_but_shares(a, b):
    here, there = named_state(a.state), named_state(b.state)
    assert here.keys() - there.keys() == {"domain_shares"}
    for name in there:
        torch.testing.assert_close(here[name], there[name], rtol=1e-4, atol=1e-6)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_projection_is_the_nearest_point_of_the_simplex(values):
    given_point = torch.tensor(values, dtype=torch.float64)
    found = project_to_simplex(given_point)
    assert float(found.sum()) == pytest.approx(1)
    assert (found >= 0).all()
    rng = np.random.default_rng(0)
    others = torch.from_numpy(rng.dirichlet(np.ones(len(values)), 200))
    assert ((others - given_point).square().sum(1) >= (found - given_point).square().sum() - 1e-9).all()


def test_ascent_leaves_absent_domains_out():
    moved = ascend(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 2.0, float("nan")]), 0.1, "projected")
    torch.testing.assert_close(moved, torch.tensor([0.45, 0.55, 0.0]))


def test_a_domain_that_nobody_measured_keeps_its_share():
    """A site that misses a phase must not take its domain's weight to zero."""
    moved = ascend(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 2.0, float("nan")]), 0.1, "projected")
    torch.testing.assert_close(moved, torch.tensor([0.45, 0.35, 0.2]))
    far = ascend(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.0, 90.0, float("nan")]), 0.1, "projected")
    torch.testing.assert_close(far, torch.tensor([0.0, 0.8, 0.2]))


def test_exponentiated_ascent_keeps_what_nobody_measured():
    shares, risks = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 2.0, float("nan")])
    raised = shares[:2] * torch.exp(0.1 * risks[:2])
    expected = torch.cat([0.8 * raised / raised.sum(), shares[2:]])
    torch.testing.assert_close(ascend(shares, risks, 0.1, "exponentiated"), expected)
    # A domain whose first site has just joined does not stay at 0 for ever.
    joined = ascend(torch.tensor([0.5, 0.5, 0.0]), torch.zeros(3), 0.1, "exponentiated")
    torch.testing.assert_close(joined, torch.tensor([0.375, 0.375, 0.25]))


@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any),
    difference=st.none() | st.floats(0, 1),
    number=st.integers(1, 50),
)
def test_shares_go_from_equal_ones_to_those_of_samples_as_far_as_domains_are_alike(counts, difference, number):
    counts, known = torch.tensor(counts), None if difference is None else torch.tensor(difference, dtype=torch.float64)
    held = counts > 0
    by_samples, equal = counts.double() / counts.sum(), held.double() / held.sum()
    shares = shares_by_evidence(counts, known, number)
    torch.testing.assert_close(shares.sum(), torch.tensor(1.0).double())
    assert not shares[~held].any()
    settled = shares_by_evidence(counts, known, 21)
    torch.testing.assert_close(settled, by_samples.lerp(equal, 1.0 if difference is None else difference))
    torch.testing.assert_close(shares, equal.lerp(settled, min(1.0, (number - 1) / 20)))
    # Equal shares are the paper's weights; those of samples leave every sample its weight of 1.
    torch.testing.assert_close(domain_weights(counts, equal), domain_weights(counts))
    torch.testing.assert_close(domain_weights(counts, by_samples), held.double())


@given(epochs=st.integers(1, 20), difference=st.none() | st.floats(0, 1), number=st.integers(1, 50))
def test_heads_are_trained_for_fewer_epochs_the_more_domains_are_alike(epochs, difference, number):
    known = None if difference is None else torch.tensor(difference, dtype=torch.float64)
    found = epochs_by_evidence(epochs, known, number)
    assert 1 <= found <= epochs
    if number == 1 or difference is None or difference >= 0.3:
        assert found == epochs
    else:
        assert found >= epochs_by_evidence(epochs, known, number + 1)
        assert found >= epochs_by_evidence(epochs, known / 2, number)
    assert epochs_by_evidence(epochs, torch.tensor(0.0), 6) == 1


def test_shares_generalise_the_re_weighting():
    counts = torch.tensor([30, 10, 0])
    torch.testing.assert_close(domain_weights(counts), domain_weights(counts, torch.tensor([0.5, 0.5, 0.0])))
    natural = domain_weights(counts, torch.tensor([0.75, 0.25, 0.0]).double())
    torch.testing.assert_close(natural, torch.tensor([1.0, 1.0, 0.0]).double())


@pytest.mark.parametrize(
    ("options", "same_as"),
    [
        ({"method": "fedavg", "multi_head": True}, {"method": "fedavg-mh"}),
        ({"method": "fedavg", "domain_input": True}, {"method": "fedavg-di"}),
        (
            {"method": "fedavg", "multi_head": True, "alternating": True, "reweight": True},
            {"method": "feddar-wa"},
        ),
        (
            {"method": "feddar", "reweight": True, "credibility": False, "average": False, "site_offset": False},
            {"method": "feddar-wa"},
        ),
        (
            {"method": "feddar-wa", "credibility": True, "average": True, "site_offset": True},
            {"method": "feddar", "reweight": True},
        ),
        ({"method": "feddar-wa", "aggregation": "second-order"}, {"method": "feddar-sa"}),
        ({"method": "feddar-sa", "aggregation": "average", "k": 4}, {"method": "feddar-wa", "k": 4}),
        (
            {"method": "feddar-sa", "multi_head": False, "aggregation": "average", "alternating": False},
            {"method": "fedavg", "reweight": True},
        ),
    ],
)
def test_the_ablations_combinations_are_options_of_a_row(parts, options, same_as):
    equal_states(train(parts[0], rounds=2, **options), train(parts[0], rounds=2, **same_as))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "feddar-sa", "alternating": False, "k": 4},
        {"method": "fedavg-di", "alternating": True, "reweight": True},
        {"method": "separate", "aggregation": "second-order"},
    ],
)
def test_other_combinations_train(parts, options):
    run = train(parts[0], test=parts[1], rounds=2, **options)
    assert all(torch.isfinite(value).all() for value in named_state(run.state).values())


def test_joint_training_combines_heads_by_the_curvature_at_each_clients_own_encoder(parts):
    options = {"rounds": 2, "dtype": "float64", "alternating": False}
    average = train(parts[0], "feddar-wa", **options)
    close = train(parts[0], "feddar-sa", damping=1e12, **options)
    here, there = named_state(average.state), named_state(close.state)
    assert here.keys() == there.keys()
    for name in here:
        torch.testing.assert_close(here[name], there[name], rtol=1e-8, atol=1e-8)
    second = train(parts[0], "feddar-sa", **options)
    assert not torch.allclose(average.state.heads["0"], second.state.heads["0"], rtol=1e-4)


@pytest.mark.parametrize("name", ["separate", "fedavg-ft", "fedprox-ft", "ditto", "apfl", "local", "fedrep", "fedbn"])
def test_heads_of_domains_are_an_option_of_common_methods_only(parts, name):
    for wanted in (True, False):
        with pytest.raises(UserError, match="multi_head is for methods whose encoder and heads are common"):
            train(parts[0], name, multi_head=wanted)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "local"])
def test_second_order_needs_heads_of_domains(parts, name):
    with pytest.raises(UserError, match="second-order aggregation is for heads of domains"):
        train(parts[0], name, aggregation="second-order")


@pytest.mark.parametrize("classes", [0, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_client_never_seen_gets_what_is_said(name, classes):
    part, test = make_cohort(classes=classes).split()
    run = train(part, name, Normalised(), rounds=2)
    stranger = Cohort.from_arrays(
        test.x[0], test.y, domain=test.domain_names, client=["elsewhere"] * len(test), classes=test.classes
    )
    predictions = run.model.objective.predictions
    found = predictions(scores_of(run, stranger).double())
    row = METHODS[name]
    if row.site_offset or row.decoupled:
        said = "the same model without corrections" if row.site_offset else "the common head alone"
        assert row.for_unseen_client == said
        phase = Phase("evaluate", *row.used)
        common = predict(run.model, phase, run.state.in_use, test.x, test.domain)
        torch.testing.assert_close(found, predictions(common.double()))
        assert not torch.allclose(found, predictions(scores_of(run, test).double()))
    elif row.assigns:
        assert row.for_unseen_client == "the same components, by their shares over all clients"
        shares = run.state.components / run.state.components.sum()
        of_unseen = predict_mixed(run.model, Phase("evaluate", *row.used), run.state.in_use, test.x, shares)
        torch.testing.assert_close(found, predictions(of_unseen.double()))
    elif not row.personal:
        assert row.for_unseen_client == "the same model"
        torch.testing.assert_close(found, predictions(scores_of(run, test).double()))
    elif row.companion:
        assert row.for_unseen_client == "the common model"
        common = train(part, "fedprox" if row.proximal else "fedavg", Normalised(), rounds=2)
        torch.testing.assert_close(found, predictions(scores_of(common, test).double()))
    else:
        assert row.for_unseen_client == "the mean of the clients' predictions, by their samples"
        each = [
            predictions(run.scores(test.x, test.domain, np.array([client] * len(test))).double())
            for client in part.clients
        ]
        shares = part.counts.sum(1).double() / len(part)
        wanted = sum(share * part for share, part in zip(shares, each, strict=True))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    evaluated = train(part, name, Normalised(), rounds=2, test=stranger).results()
    assert evaluated.query("scope == 'client'")["name"].unique().tolist() == ["elsewhere"]
    pd.testing.assert_frame_equal(run.evaluate(stranger)[["scope", "name"]], evaluated[["scope", "name"]])
