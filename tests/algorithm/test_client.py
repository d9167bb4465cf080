"""What a client does, against the paper's equations written out with autograd."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save
from torch import nn

from feddar.algorithm.client import Client
from feddar.algorithm.local_training import batches, samples_by_key
from feddar.algorithm.names import named_own, named_reply
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.schedule import phases
from feddar.algorithm.server import reduce_replies, whole_evidence
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort, domain_weights
from feddar.methods import METHODS
from feddar.models.heads import curvature as curvature_at
from feddar.models.heads import evidence, full_matrix
from feddar.models.model import Model, build_model, scores, seeded
from feddar.models.parameters import Parameters
from feddar.objectives import Binary, Multiclass
from feddar.results.evaluators import no_evaluation
from feddar.results.run import Run
from feddar.results.training import run_rounds
from feddar.settings import Settings
from helpers.cohorts import make_cohort
from helpers.encoders import Dropping

F64 = torch.float64


def setup(classes=2, encoder=None, k=None, **shape):
    cohort = make_cohort(classes=classes, **shape)
    model, initial = build_model(cohort, encoder, Settings(k=k, dtype="float64"))
    start = ServerState(initial).by_domain("global", "domain", len(cohort.domains)).in_training
    return cohort, model, start, [Client(name, cohort.at(name), None, model) for name in cohort.clients]


def ask(clients, phase, parameters, **others):
    return [client.answer(Request(phase, 1, 0, parameters, **others)) for client in clients]


def full_batch(name, **options):
    """One step of plain gradient descent on all of a client's samples."""
    return Phase(name, "global", "domain", epochs=1, lr=0.1, batch_size=10**6, **options)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_one_encoder_step_descends_the_mean_over_domains(classes):
    """Equation (obj-erm): re-weighted clients, averaged by L_i / L, minimise (1/M) sum_m R_m."""
    cohort, _model, start, clients = setup(classes, nn.Linear(6, 3))
    phase = full_batch("encoder")
    replies = ask(clients, phase, start, domain_weights=domain_weights(cohort.counts.sum(0)))
    reduced = reduce_replies(phase, replies, start, 0.0, 1)
    assert not reduced.heads

    weight = start.encoders["all"]["encoder.weight"].clone().requires_grad_()
    features = cohort.x[0].to(F64) @ weight.T + start.encoders["all"]["encoder.bias"]
    features = torch.cat([features, torch.ones(len(cohort), 1, dtype=F64)], dim=1)
    every = torch.stack([start.heads[str(m)] for m in range(3)])
    y = cohort.y.to(F64) if classes == 0 else cohort.y
    losses = cohort.objective.loss(scores(features, every, cohort.domain), y)
    risk = torch.stack([losses[cohort.domain == m].mean() for m in range(3)]).mean()
    (slope,) = torch.autograd.grad(risk, weight)
    torch.testing.assert_close(reduced.encoders["all"]["encoder.weight"], weight.detach() - 0.1 * slope)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_one_head_step_descends_each_clients_own_risk(classes):
    cohort, model, start, clients = setup(classes, nn.Linear(6, 3))
    (reply,) = ask(clients[:1], full_batch("heads"), start)
    data = clients[0].train
    for key, rows in samples_by_key("domain", data):
        head = start.heads[key].clone().requires_grad_()
        features = model.frozen_features(data.x, data.domain)[rows]
        risk = cohort.objective.loss(features @ head.T, data.y[rows]).mean()
        (slope,) = torch.autograd.grad(risk, head)
        torch.testing.assert_close(reply.heads[key].head, head.detach() - 0.1 * slope)
        assert reply.heads[key].weight == len(rows)


def test_exact_heads_combine_to_pooled_least_squares():
    """The heads phase and second-order aggregation together, from samples to the head of each domain."""
    cohort, model, start, clients = setup(0, nn.Linear(6, 3), n=300)
    # Newton's step for squared loss: curvature at any head, and a head that is solved exactly.
    phase = full_batch("heads", curvature="hessian")
    replies = []
    for client, reply in zip(clients, ask(clients, phase, start), strict=True):
        heads = dict(reply.heads)
        features = model.frozen_features(client.train.x, client.train.domain)
        for key, rows in samples_by_key("domain", client.train):
            solution = torch.linalg.lstsq(features[rows], client.train.y[rows, None]).solution
            heads[key] = replace(heads[key], head=solution.T)
        replies.append(replace(reply, heads=heads))
    reduced = reduce_replies(phase, replies, start, 0.0, 1)
    features = model.frozen_features((cohort.x[0].to(F64),), cohort.domain)
    for m in range(3):
        rows = cohort.domain == m
        pooled = torch.linalg.lstsq(features[rows], cohort.y[rows, None].to(F64)).solution.T
        torch.testing.assert_close(reduced.heads[str(m)], pooled, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["hessian", "block", "gram"])
def test_heads_of_several_outputs_are_combined_as_the_formula_says(kind):
    """w = S^-1 sum_i L_i H_i w_i with every curvature as one large matrix over all numbers of a head."""
    cohort, model, start, clients = setup(3, nn.Linear(6, 3))
    phase = Phase("heads", "global", "domain", epochs=2, lr=0.1, batch_size=64, curvature=kind)
    replies, damping = ask(clients, phase, start), 0.3
    reduced = reduce_replies(phase, replies, start, damping, 1)
    for m, key in enumerate(("0", "1", "2")):
        outputs, p = start.heads[key].shape
        total, pull = torch.zeros(outputs * p, outputs * p, dtype=F64), torch.zeros(outputs * p, dtype=F64)
        mean = torch.zeros(outputs * p, dtype=F64)
        for client, reply in zip(clients, replies, strict=True):
            rows = client.train.domain == m
            X, head = model.frozen_features(client.train.x, client.train.domain)[rows], reply.heads[key].head
            blocks = curvature_at(cohort.objective, kind, head, X)
            whole = blocks[0] if kind == "hessian" else torch.block_diag(*(blocks.expand(outputs, p, p)))
            total, pull = total + whole, pull + whole @ head.flatten()
            mean = mean + head.flatten() * float(rows.sum()) / float((cohort.domain == m).sum())
        # The damping is a share of the mean curvature of each block.
        size = p if kind == "block" else outputs * p
        scale = total.diagonal().view(-1, size).mean(1).repeat_interleave(size)
        expected = mean + torch.linalg.solve(total + damping * torch.diag(scale), pull - total @ mean)
        torch.testing.assert_close(reduced.heads[key], expected.view(outputs, p))


@pytest.mark.parametrize(("classes", "curvature"), [(0, "hessian"), (2, "hessian"), (4, "gram"), (4, "block")])
def test_matrices_travel_as_triangles_and_a_gram_matrix_that_is_the_curvature_once(classes, curvature):
    cohort, model, start, clients = setup(classes, nn.Linear(6, 3))
    phase = Phase("heads", "global", "domain", epochs=2, lr=0.1, curvature=curvature)
    mean = start.heads["0"] * 0.5
    (reply,) = ask(clients[:1], phase, start, mean_head=mean)
    data = clients[0].train
    outputs, p = mean.shape
    q, blocks = (outputs * p, 1) if curvature == "hessian" else (p, outputs if curvature == "block" else 1)
    for key, rows in samples_by_key("domain", data):
        X = model.frozen_features(data.x, data.domain)[rows]
        sent = reply.heads[key]
        found = whole_evidence(sent)
        for name, value in evidence(cohort.objective, mean, start.heads[key], X, data.y[rows]).items():
            torch.testing.assert_close(found.pop(name), value)
        assert not found
        assert sent.curvature.shape == (blocks, q * (q + 1) // 2)
        assert sent.evidence["residuals"].shape == (outputs * (outputs + 1) // 2,)
        assert ("gram" in sent.evidence) == (classes == 2 or curvature == "block")
        expected = curvature_at(cohort.objective, curvature, sent.head, X)
        torch.testing.assert_close(full_matrix(sent.curvature), expected)
    (unasked,) = ask(clients[:1], phase, start)
    assert not any(whole_evidence(head) for head in unasked.heads.values())


def test_heads_phase_leaves_the_encoder_alone_and_the_encoder_phase_the_heads():
    _cohort, model, start, clients = setup(encoder=Dropping())
    (reply,) = ask(clients[:1], Phase("heads", "global", "domain", epochs=3, lr=0.1), start)
    for name, value in model.body.state_dict().items():
        assert torch.equal(value, start.encoders["all"][name]), name
    assert {name.split("/")[0] for name in named_reply(reply)} == {"heads"}
    (reply,) = ask(clients[:1], Phase("encoder", "global", "domain", epochs=1, lr=0.1), start)
    assert {name.split("/")[0] for name in named_reply(reply)} == {"encoder"}
    sent, statistic = reply.encoders["all"].tensors, "encoder.layers.1.running_mean"
    assert not torch.equal(sent[statistic], start.encoders["all"][statistic])
    assert not any("num_batches" in name for name in sent)


def test_a_client_sends_nothing_for_a_domain_it_lacks():
    cohort, _, start, _ = setup()
    only = cohort.rows((cohort.domain == 1) & (cohort.client == 0))
    model, _ = build_model(cohort, None, Settings(dtype="float64"))
    for phase in (Phase("heads", "global", "domain", lr=0.1, curvature="hessian"), Phase("together", heads="domain")):
        blank = {key: torch.zeros_like(head) for key, head in start.heads.items()}
        full = Parameters({"all": dict(model.body.state_dict())}, blank)
        reply = Client("site-0", only, None, model).answer(Request(phase, 1, 0, full))
        names = {name for name in named_reply(reply) if not name.startswith("encoder")}
        assert "heads/1" in names <= {"heads/1", "curvature/1"}


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
                self.names |= set(named_reply(reply))
            message = save({name: value.contiguous() for name, value in named_reply(reply).items()})
            for name, value in named_own(client.own).items():
                if name in named_reply(reply) or (value.numel() > 1 and value.numpy().tobytes() in message):
                    self.leaks.append((request.phase.name, name))
            yield reply

    def joined(self):
        return False

    def own_states(self):
        return {client.name: client.own for client in self.clients}

    def restore(self, own):
        pass


@pytest.mark.parametrize("method", METHODS)
def test_what_belongs_to_a_client_is_never_on_the_wire(method):
    cohort = make_cohort()
    settings = Settings(method=method, rounds=3)
    model, initial = build_model(cohort, Dropping(), settings)
    engine = Watching(cohort, model)
    run_rounds(Run.begin(settings, model, cohort, initial, ""), engine, no_evaluation, None, [])
    row = METHODS[method]
    assert not engine.leaks
    assert not any("own" in name or "local" in name for name in engine.names)
    groups = {name.split("/")[0] for name in engine.names}
    assert ("encoder" in groups) == (row.encoder != "client")
    assert ("heads" in groups) == (row.heads != "client")
    assert any(client.own for client in engine.clients) == row.keeps_state
    assert any("layers.1" in name for name in engine.names) == ("encoder" in groups and not row.private_norm)


def test_one_sample_is_never_batch_normalised_in_training():
    assert [len(b) for b in batches(65, Phase("encoder", batch_size=32))] == [32, 33]
    assert [len(b) for b in batches(1, Phase("encoder", batch_size=32))] == [1]
    cohort, model, start, _ = setup(encoder=Dropping())
    alone = Client("site-0", cohort.rows(torch.tensor([0])), None, model)
    reply = alone.answer(Request(Phase("encoder", "global", "domain", lr=0.1), 1, 0, start))
    assert named_reply(reply)
    assert all(torch.isfinite(value).all() for value in named_reply(reply).values())


def test_census_sums_counts_and_moments(cohort):
    model, _ = build_model(cohort, None, Settings())
    census = Request(Phase("census"), 0, 0)
    parts = [Client(name, cohort.at(name), None, model).answer(census).sums for name in cohort.clients]
    assert torch.equal(sum(part["counts"] for part in parts), cohort.counts.sum(0))
    torch.testing.assert_close(sum(part["sum"] for part in parts), cohort.x[0].double().sum(0))
    plain, _ = build_model(cohort, nn.Linear(cohort.x[0].shape[1], 3), Settings())
    # What no encoder asks for is not sent.
    assert set(named_reply(Client("all", cohort, None, plain).answer(census))) == {"counts"}


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
    heads, encoder = phases(METHODS["feddar-sa"], settings, Multiclass(("a", "b", "c")), 3)
    assert (heads.name, heads.epochs, heads.curvature) == ("heads", 7, "block")
    assert heads.lr == pytest.approx(0.05)
    assert (encoder.name, encoder.epochs, encoder.curvature) == ("encoder", 1, None)
    assert encoder.lr == pytest.approx(0.01)
    assert [p.name for p in phases(METHODS["fedavg"], settings, Binary(), 1)] == ["together"]
    assert [p.name for p in phases(METHODS["fedavg-ft"], settings, Binary(), 1)] == ["together", "adopt", "personal"]


def test_model_types():
    cohort = make_cohort()
    model, initial = build_model(cohort, None, Settings(k=4, bias=False))
    assert isinstance(model, Model)
    assert isinstance(initial, Parameters)
    assert initial.heads["all"].shape == (1, 4)
    assert isinstance(cohort, Cohort)


def test_clients_with_the_same_samples_shuffle_them_differently():
    cohort, model, start, _ = setup(encoder=nn.Linear(6, 3))
    twins = [Client(name, cohort, None, model) for name in ("a", "b")]
    replies = ask(twins, Phase("encoder", "global", "domain", lr=0.1), start)
    a, b = (reply.encoders["all"].tensors["encoder.weight"] for reply in replies)
    assert not torch.equal(a, b)
