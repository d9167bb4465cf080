"""What a client does, against the paper's equations written out with autograd."""

import threading
import time

import pandas as pd
import pytest
import torch
from safetensors.torch import save
from torch import nn

from feddar.algorithm.client import MEAN, Client, evidence_in
from feddar.algorithm.local import batches, held
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.schedule import phases
from feddar.algorithm.server import reduce_replies
from feddar.data.cohort import Cohort, domain_weights
from feddar.methods import METHODS
from feddar.models.heads import curvature as curved
from feddar.models.heads import evidence, loss, whole
from feddar.models.model import Model, build_model, scores, seeded
from feddar.results.run import Run
from feddar.results.training import Trainer
from feddar.settings import Settings
from helpers.cohorts import make_cohort

F64 = torch.float64


def setup(classes=2, encoder=None, k=None, **shape):
    cohort = make_cohort(classes=classes, **shape)
    model, state = build_model(cohort, encoder, Settings(k=k, dtype="float64"))
    domains = {f"heads/{m}": state["heads/all"].clone() for m in range(len(cohort.domains))}
    state = {name: value for name, value in state.items() if name != "heads/all"} | domains
    return cohort, model, state, [Client(name, cohort.at(name), None, model) for name in cohort.clients]


def ask(clients, phase, state):
    return [client.answer(Request(phase, 1, 0, state)) for client in clients]


def full_batch(name, **options):
    """One step of plain gradient descent on all of a client's samples."""
    return Phase(name, "global", "domain", epochs=1, lr=0.1, batch_size=10**6, **options)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_one_encoder_step_descends_the_mean_over_domains(classes):
    """Equation (obj-erm): re-weighted clients, averaged by L_i / L, minimise (1/M) sum_m R_m."""
    cohort, _model, state, clients = setup(classes, nn.Linear(6, 3))
    phase = full_batch("encoder")
    replies = ask(clients, phase, state | {"domain_weights": domain_weights(cohort.counts.sum(0))})
    changed = reduce_replies(phase, replies, state, 0.0, 1).changed

    weight = state["encoder/all/encoder.weight"].clone().requires_grad_()
    features = cohort.x[0].to(F64) @ weight.T + state["encoder/all/encoder.bias"]
    features = torch.cat([features, torch.ones(len(cohort), 1, dtype=F64)], dim=1)
    every = torch.stack([state[f"heads/{m}"] for m in range(3)])
    y = cohort.y.to(F64) if classes == 0 else cohort.y
    losses = loss(cohort.task, scores(features, every, cohort.domain), y)
    risk = torch.stack([losses[cohort.domain == m].mean() for m in range(3)]).mean()
    (slope,) = torch.autograd.grad(risk, weight)
    torch.testing.assert_close(changed["encoder/all/encoder.weight"], weight.detach() - 0.1 * slope)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_one_head_step_descends_each_clients_own_risk(classes):
    cohort, model, state, clients = setup(classes, nn.Linear(6, 3))
    (reply,) = ask(clients[:1], full_batch("heads"), state)
    data = clients[0].train
    for key, rows in held("domain", data):
        head = state[f"heads/{key}"].clone().requires_grad_()
        features = model.frozen_features(data.x, data.domain)[rows]
        risk = loss(cohort.task, features @ head.T, data.y[rows]).mean()
        (slope,) = torch.autograd.grad(risk, head)
        torch.testing.assert_close(reply.tensors[f"heads/{key}"], head.detach() - 0.1 * slope)
        assert reply.weights[f"heads/{key}"] == len(rows)


def test_exact_heads_combine_to_pooled_least_squares():
    """The heads phase and second-order aggregation together, from samples to the head of each domain."""
    cohort, model, state, clients = setup(0, nn.Linear(6, 3), n=300)
    # Newton's step for squared loss: curvature at any head, and a head that is solved exactly.
    phase = full_batch("heads", curvature="hessian")
    replies = ask(clients, phase, state)
    for client, reply in zip(clients, replies, strict=True):
        features = model.frozen_features(client.train.x, client.train.domain)
        for key, rows in held("domain", client.train):
            solution = torch.linalg.lstsq(features[rows], client.train.y[rows, None]).solution
            reply.tensors[f"heads/{key}"] = solution.T
    changed = reduce_replies(phase, replies, state, 0.0, 1).changed
    features = model.frozen_features((cohort.x[0].to(F64),), cohort.domain)
    for m in range(3):
        rows = cohort.domain == m
        pooled = torch.linalg.lstsq(features[rows], cohort.y[rows, None].to(F64)).solution.T
        torch.testing.assert_close(changed[f"heads/{m}"], pooled, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("classes", "curvature"), [(0, "hessian"), (2, "hessian"), (4, "gram"), (4, "block")])
def test_matrices_travel_as_triangles_and_a_gram_matrix_that_is_the_curvature_once(classes, curvature):
    cohort, model, state, clients = setup(classes, nn.Linear(6, 3))
    phase = Phase("heads", "global", "domain", epochs=2, lr=0.1, curvature=curvature)
    (reply,) = ask(clients[:1], phase, state | {MEAN: state["heads/0"] * 0.5})
    data = clients[0].train
    outputs, p = state["heads/0"].shape
    q, blocks = (outputs * p, 1) if curvature == "hessian" else (p, outputs if curvature == "block" else 1)
    for key, rows in held("domain", data):
        X = model.frozen_features(data.x, data.domain)[rows]
        found = evidence_in(reply.tensors, key)
        known = (state["heads/0"] * 0.5, state[f"heads/{key}"], X, data.y[rows])
        for name, value in evidence(cohort.task, *known).items():
            torch.testing.assert_close(found.pop(name), value)
        assert not found
        assert reply.tensors[f"curvature/{key}"].shape == (blocks, q * (q + 1) // 2)
        assert reply.tensors[f"residuals/{key}"].shape == (outputs * (outputs + 1) // 2,)
        assert (f"gram/{key}" in reply.tensors) == (classes == 2 or curvature == "block")
        at = reply.tensors[f"heads/{key}"]
        torch.testing.assert_close(whole(reply.tensors[f"curvature/{key}"]), curved(cohort.task, curvature, at, X))
    assert not evidence_in(reply.tensors, "9")


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x):
        return self.layers(x)


def test_heads_phase_leaves_the_encoder_alone_and_the_encoder_phase_the_heads():
    _cohort, model, state, clients = setup(encoder=WithBatchNorm())
    (reply,) = ask(clients[:1], Phase("heads", "global", "domain", epochs=3, lr=0.1), state)
    for name, value in model.body.state_dict().items():
        assert torch.equal(value, state[f"encoder/all/{name}"]), name
    assert {name.split("/")[0] for name in reply.tensors} == {"heads"}
    (reply,) = ask(clients[:1], Phase("encoder", "global", "domain", epochs=1, lr=0.1), state)
    assert {name.split("/")[0] for name in reply.tensors} == {"encoder"}
    assert not torch.equal(
        reply.tensors["encoder/all/encoder.layers.1.running_mean"], state["encoder/all/encoder.layers.1.running_mean"]
    )
    assert not any("num_batches" in name for name in reply.tensors)


def test_a_client_sends_nothing_for_a_domain_it_lacks():
    cohort, _, state, _ = setup()
    only = cohort.rows((cohort.domain == 1) & (cohort.client == 0))
    model, _ = build_model(cohort, None, Settings(dtype="float64"))
    for phase in (Phase("heads", "global", "domain", lr=0.1, curvature="hessian"), Phase("together", heads="domain")):
        full = {name: torch.zeros_like(v) if "heads" in name else v for name, v in state.items()}
        full |= {f"encoder/all/{n}": v for n, v in model.body.state_dict().items()}
        reply = Client("site-0", only, None, model).answer(Request(phase, 1, 0, full))
        assert {name for name in reply.tensors if not name.startswith("encoder")} <= {"heads/1", "curvature/1"}


class Watching:
    """An engine that serialises every reply, as one between sites would, and looks for private values in the bytes."""

    def __init__(self, cohort, model):
        self.clients = [Client(name, cohort.at(name), None, model) for name in cohort.clients]
        self.names = set()
        self.leaks = []

    def exchange(self, request):
        for client in self.clients:
            reply = client.answer(request)
            if request.phase.name != "census":
                self.names |= set(reply.tensors)
            message = save({name: value.contiguous() for name, value in reply.tensors.items()})
            for name, value in client.private.items():
                if name in reply.tensors or (value.numel() > 1 and value.numpy().tobytes() in message):
                    self.leaks.append((request.phase.name, name))
            yield reply

    def joined(self):
        return False

    def private(self):
        return {client.name: client.private for client in self.clients}

    def restore(self, private):
        pass


@pytest.mark.parametrize("method", METHODS)
def test_what_belongs_to_a_client_is_never_on_the_wire(method):
    cohort = make_cohort()
    settings = Settings(method=method, rounds=3)
    model, state = build_model(cohort, WithBatchNorm(), settings)
    engine = Watching(cohort, model)
    run = Run(settings, model, cohort, state, {}, 0, METHODS["fedavg"], pd.DataFrame(), "")
    Trainer(run, engine).train()
    row = METHODS[method]
    assert not engine.leaks
    assert not any("own" in name or "local" in name for name in engine.names)
    groups = {name.split("/")[0] for name in engine.names}
    assert ("encoder" in groups) == (row.encoder != "client")
    assert ("heads" in groups) == (row.heads != "client")
    assert any(client.private for client in engine.clients) == row.personal
    assert any("layers.1" in name for name in engine.names) == ("encoder" in groups and not row.private_norm)


def test_one_sample_is_never_batch_normalised_in_training():
    assert [len(b) for b in batches(65, Phase("encoder", batch_size=32))] == [32, 33]
    assert [len(b) for b in batches(1, Phase("encoder", batch_size=32))] == [1]
    cohort, model, state, _ = setup(encoder=WithBatchNorm())
    alone = Client("site-0", cohort.rows(torch.tensor([0])), None, model)
    reply = alone.answer(Request(Phase("encoder", "global", "domain", lr=0.1), 1, 0, state))
    assert all(torch.isfinite(value).all() for value in reply.tensors.values())


def test_census_sums_counts_and_moments(cohort):
    model, _ = build_model(cohort, None, Settings())
    census = Request(Phase("census"), 0, 0, {})
    parts = [Client(name, cohort.at(name), None, model).answer(census).tensors for name in cohort.clients]
    assert torch.equal(sum(part["counts"] for part in parts), cohort.counts.sum(0))
    torch.testing.assert_close(sum(part["sum"] for part in parts), cohort.x[0].double().sum(0))
    plain, _ = build_model(cohort, nn.Linear(cohort.x[0].shape[1], 3), Settings())
    assert set(Client("all", cohort, None, plain).answer(census).tensors) == {
        "counts"
    }  # what no encoder asks for is not sent


def test_seeded_depends_on_its_arguments_and_leaves_the_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with seeded(0, "a"):
        first = torch.rand(3)
    with seeded(0, "a"):
        assert torch.equal(torch.rand(3), first)
    with seeded(0, "b"):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_do_not_draw_from_each_others_seeds():
    def draw(number, found):
        with seeded(0, number):
            first = torch.rand(3)
            time.sleep(0.05)
            found[number] = torch.cat([first, torch.rand(3)])

    alone, together = {}, {}
    for number in range(3):
        draw(number, alone)
    threads = [threading.Thread(target=draw, args=(number, together)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[number], together[number]) for number in range(3))


def test_phases_follow_the_settings():
    settings = Settings(method="feddar-sa", head_epochs=7, lr=0.1, head_lr=0.5, lr_steps="2:0.1", curvature="block")
    heads, encoder = phases(METHODS["feddar-sa"], settings, "multiclass", 3)
    assert (heads.name, heads.epochs, heads.curvature) == ("heads", 7, "block")
    assert heads.lr == pytest.approx(0.05)
    assert (encoder.name, encoder.epochs, encoder.curvature) == ("encoder", 1, None)
    assert encoder.lr == pytest.approx(0.01)
    assert [p.name for p in phases(METHODS["fedavg"], settings, "binary", 1)] == ["together"]
    assert [p.name for p in phases(METHODS["fedavg-ft"], settings, "binary", 1)] == ["together", "adopt", "personal"]


def test_model_types():
    cohort = make_cohort()
    model, state = build_model(cohort, None, Settings(k=4, bias=False))
    assert isinstance(model, Model)
    assert state["heads/all"].shape == (1, 4)
    assert isinstance(cohort, Cohort)


def test_clients_with_the_same_samples_shuffle_them_differently():
    cohort, model, state, _ = setup(encoder=nn.Linear(6, 3))
    twins = [Client(name, cohort, None, model) for name in ("a", "b")]
    a, b = ask(twins, Phase("encoder", "global", "domain", lr=0.1), state)
    assert not torch.equal(a.tensors["encoder/all/encoder.weight"], b.tensors["encoder/all/encoder.weight"])
