"""Processes: forked only where it is safe, else spawned, with the same results; here where neither is possible."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.errors import Notice, UserError
from feddar.simulation import allocation, processes
from helpers import children
from helpers.cohorts import make_cohort
from helpers.pretended_device import Machine

PROGRAM = """
import threading
import feddar
from feddar.simulation import processes
from helpers.cohorts import make_cohort

print("begun", flush=True)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(processes.start_method(), flush=True)
print(feddar.train(make_cohort(n=60), "fedavg", rounds=1, jobs=2).round)
"""
"""A program of a user's, without a guard for processes that are spawned."""


@pytest.fixture
def of_others(monkeypatch):
    """This process is somebody else's."""
    monkeypatch.setattr(processes, "_own_process", False)


@pytest.fixture
def another_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.fixture
def collected():
    """What children say, with the numbers of their tasks."""
    said = []

    def run(tasks, jobs=2, device=None):
        processes.run_all(tasks, jobs, lambda *message: said.append(message), pytest.fail, device)
        return said

    return run


def test_a_process_with_other_threads_is_not_forked(of_others, another_thread):
    assert processes.start_method() == "spawn"


def test_a_process_of_ours_is_forked(monkeypatch, another_thread):
    monkeypatch.setattr(processes, "_own_process", True)
    assert processes.start_method() == processes.start_method(torch.device("cpu")) == "fork"


def test_a_mac_does_not_fork(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes.start_method() == "spawn"


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_processes_that_use_cuda_are_not_forked(device):
    assert processes.start_method(torch.device(device)) == "spawn"


def test_spawned_workers_give_the_same_bits(of_others, another_thread):
    """Clients with a state of their own, stacked and alone."""
    cohort = make_cohort(n=600, clients=16)
    one, two = (feddar.train(cohort, "ditto", rounds=2, jobs=jobs) for jobs in (1, 2))
    expected, found = named_state(one.state), named_state(two.state)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert torch.equal(
        two.scores(cohort.x, cohort.domain, cohort.client), one.scores(cohort.x, cohort.domain, cohort.client)
    )


@pytest.mark.more
def test_a_program_is_not_run_again_by_what_it_spawns(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, program], env=surroundings, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("begun\nspawn\n1\n", "", 0)


def test_spawned_children_do_their_tasks_and_note_what_there_is_to_note(of_others, another_thread, collected):
    tasks = [partial(children.say, torch.arange(3) + number) for number in range(3)]
    with pytest.warns(Notice, match="three numbers"):
        said = collected(tasks)
    assert sorted(said, key=lambda each: each[0]) == [(n, {"sum": 3 + 3 * n, "spawned": True}) for n in range(3)]


def test_an_error_in_a_spawned_child_is_raised_here(of_others, another_thread, collected):
    with pytest.raises(UserError, match="this task is wrong"):
        collected([children.fail])


def test_what_cannot_be_handed_over_is_done_here(of_others, another_thread, collected):
    with pytest.warns(Notice, match="cannot be given this work otherwise.*one after another, with the same results"):
        said = collected([lambda send, number=number: send({"here": number}) for number in range(2)])
    assert said == [(0, {"here": 0}), (1, {"here": 1})]


def test_an_encoder_that_cannot_be_handed_over_is_trained_here(of_others, another_thread):
    class Own(torch.nn.Linear):
        pass

    cohort = make_cohort(n=60)
    with pytest.warns(Notice, match="one after another"):
        assert feddar.train(cohort, "fedavg", Own(cohort.x[0].shape[1], 2), rounds=1, jobs=2).round == 1


def test_children_are_spread_over_gpus_by_what_is_free(monkeypatch, tmp_path, collected):
    """Not by their numbers: the second GPU gets the third task as well if the first is still at work."""
    Machine(cuda=2).pretend(monkeypatch)
    monkeypatch.setattr(processes, "start_method", lambda _: "fork")
    taken = []  # by a child, which has its own copy
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)

    def task(number, send):
        send({"gpu": taken})
        while number == 0 and not (tmp_path / "done").exists():
            time.sleep(0.01)
        if number == 2:
            (tmp_path / "done").touch()

    said = collected([partial(task, number) for number in range(3)], device=torch.device("cuda"))
    assert sorted(said, key=lambda each: each[0]) == [(0, {"gpu": [0]}), (1, {"gpu": [1]}), (2, {"gpu": [1]})]


def test_the_c_library_of_others_is_left_as_it_is(of_others, monkeypatch):
    monkeypatch.setattr(allocation, "_glibc", lambda: pytest.fail("it was looked up"))
    with allocation.keeping_freed_memory():
        pass
