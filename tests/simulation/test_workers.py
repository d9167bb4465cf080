"""Workers: replies in order and unharmed, whoever is slow, stops listening, fails or is killed."""

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from feddar.algorithm.protocol import OwnState, Phase, Reply, Request, TrainedHead
from feddar.errors import TrainingError, UserError
from feddar.models.parameters import Parameters
from feddar.simulation.workers import SMALL, Workers, assign_tasks

LARGE = SMALL  # numbers of four bytes


class Echo:
    """A client that answers with what it was sent, times its number."""

    def __init__(self, number, samples=1, act=lambda request: None):
        self.names, self.number, self.samples, self.act = (f"c{number}",), number, samples, act
        self.own = OwnState()

    def answers(self, request):
        self.act(request)
        head = request.parameters.heads["x"]
        if "first" not in self.own.extra:
            self.own = self.own.changed(extra={"first": head})  # no copy: it must last all the same
        yield Reply(self.names, heads={"x": TrainedHead(head * self.number, 1.0)}, loss=0.5, samples=self.number)

    def own_states(self):
        return {self.names[0]: self.own}

    def restore(self, _, kept):
        self.own = kept


def request(value, size=LARGE):
    return Request(Phase("together"), 1, 0, Parameters(heads={"x": torch.full((size,), float(value))}))


@pytest.fixture
def working():
    started = []

    def start(clients, workers=2):
        started.append(Workers(clients, workers))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def right(replies, value, clients=5):
    assert [reply.client for reply in replies] == [f"c{number}" for number in range(clients)]
    for number, reply in enumerate(replies):
        assert reply.heads["x"].head.eq(value * number).all()
        assert (reply.samples, reply.loss, reply.heads["x"].weight) == (number, 0.5, 1.0)
        assert reply.heads.keys() == {"x"} and not (reply.encoders or reply.sums)
    return True


class Collected:
    """Garbage of the parent that must not be freed in a child."""

    def __init__(self, parent, path):
        self.itself, self.parent, self.path = self, parent, path

    def __del__(self):
        if os.getpid() != self.parent:
            self.path.touch()


def test_garbage_of_the_parent_is_not_freed_by_workers(working, tmp_path):
    path = tmp_path / "freed"
    gc.disable()  # or it would be gone before
    Collected(os.getpid(), path)
    engine = working([Echo(number, 1, lambda _: gc.collect()) for number in range(2)])
    assert right(list(engine.exchange(request(1))), 1, 2)
    gc.enable()
    assert not path.exists()


@pytest.mark.parametrize("size", [1, LARGE])
def test_replies_that_are_kept_stay_as_they_were(working, size):
    engine = working([Echo(number) for number in range(5)])
    kept = {value: list(engine.exchange(request(value, size))) for value in range(1, 6)}
    assert all(right(replies, value) for value, replies in kept.items())


def test_memory_does_not_grow_with_what_was_answered_before(working):
    engine = working([Echo(number) for number in range(4)])
    for value in range(20):
        for reply in engine.exchange(request(value)):
            assert reply.heads["x"].head.eq(value * reply.samples).all()
    taken = [os.fstat(arena.file.fileno()).st_size for arena in [engine.requests, *(w.replies for w in engine.workers)]]
    assert max(taken) <= 16 * 4 * LARGE


def test_nobody_waits_for_a_slow_client(working):
    """The first client answers only when the last one has, which is at another worker."""
    over = multiprocessing.get_context("fork").Event()

    def wait(_):
        assert over.wait(60)

    clients = [Echo(0, 9, wait), *(Echo(number) for number in range(1, 9)), Echo(9, 1, lambda _: over.set())]
    engine = working(clients)
    assert engine.workers[0].share == [0]
    assert right(list(engine.exchange(request(7))), 7, 10)


def test_an_exchange_that_was_given_up_does_not_disturb_the_next(working):
    def fail(asked):
        if asked.parameters.heads["x"][0] == 2:
            raise UserError("two is too many")

    engine = working([Echo(number, 1, fail) for number in range(5)])
    given_up = iter(engine.exchange(request(1)))
    assert next(given_up).client == "c0"
    for _ in range(2):
        with pytest.raises(UserError, match="two is too many"):
            list(engine.exchange(request(2)))
    assert right(list(engine.exchange(request(3))), 3)
    next(iter(engine.exchange(request(4))))
    assert engine.own_states()["c1"].extra["first"].eq(1).all()
    next(iter(engine.exchange(request(5))))
    engine.restore({})
    assert right(list(engine.exchange(request(6))), 6)
    assert engine.own_states()["c4"].extra["first"].eq(6).all()


def test_what_clients_keep_is_theirs_and_comes_back(working):
    engine = working([Echo(number) for number in range(3)], 3)
    for value in (1, 2, 3):
        assert right(list(engine.exchange(request(value))), value, 3)
    kept = engine.own_states()
    assert all(kept[name].extra["first"].eq(1).all() for name in ("c0", "c1", "c2"))
    more = OwnState(Parameters({"own": {"w": torch.full((3,), 5.0)}}, {"own": torch.ones(1, 2)}))
    engine.restore({"c1": OwnState(extra={"first": torch.full((2 * LARGE,), 9.0)}), "c2": more})
    assert right(list(engine.exchange(request(4))), 4, 3)
    found = engine.own_states()
    assert found["c0"].extra["first"].eq(4).all()
    assert found["c1"].extra["first"].eq(9).all()
    assert found["c2"].parameters.encoders["own"]["w"].eq(5).all()
    assert found["c2"].parameters.heads["own"].eq(1).all()
    assert kept["c1"].extra["first"].eq(1).all()


def test_a_worker_that_dies_at_work_is_one_sentence(working):
    engine = working([Echo(0), Echo(1, 1, lambda _: os._exit(1))])
    with pytest.raises(TrainingError, match="ended unexpectedly"):
        list(engine.exchange(request(1)))
    with pytest.raises(TrainingError, match="ended unexpectedly"):
        list(engine.exchange(request(1)))


def test_nothing_is_left_of_a_parent_that_is_killed():
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    here, there = multiprocessing.Pipe()

    def parent():
        engine = Workers([Echo(0), Echo(1)], 2)
        list(engine.exchange(request(1)))
        there.send_bytes(" ".join(str(worker.process.pid) for worker in engine.workers).encode())
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    there.close()
    workers = [int(pid) for pid in here.recv_bytes().split()]
    assert all(running(pid) for pid in workers)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    until = time.monotonic() + 20
    while any(running(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(running(pid) for pid in workers)
    assert not Path("/dev/shm").exists() or set(Path("/dev/shm").iterdir()) <= before


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_samples_are_spread_evenly_and_always_alike():
    sizes = [7, 100, 30, 30, 50, 20, 3]
    shares = assign_tasks(sizes, 3)
    assert shares == assign_tasks(sizes, 3) == [[1], [4, 5], [0, 2, 3, 6]]
    assert assign_tasks([5] * 5, 2) == [[0, 2, 4], [1, 3]]
