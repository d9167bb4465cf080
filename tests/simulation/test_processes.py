"""Forking: only where it is safe, and else the same work here, with a note."""

import sys
import threading
import warnings

import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.errors import Notice
from feddar.simulation import allocation, processes
from helpers.cohorts import make_cohort


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


def test_a_process_with_other_threads_is_not_forked(of_others, another_thread):
    with pytest.warns(Notice, match="other threads run in this process: several jobs are done one after another"):
        assert not processes.may_fork()


def test_a_process_of_ours_is_forked(monkeypatch, another_thread):
    monkeypatch.setattr(processes, "_own_process", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert processes.may_fork()


def test_a_mac_does_not_fork(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.warns(Notice, match="cannot be forked safely"):
        assert not processes.may_fork()


def test_the_results_are_the_same_without_forking(of_others, another_thread):
    cohort = make_cohort(n=120)
    one = feddar.train(cohort, "fedavg", rounds=1)
    with pytest.warns(Notice):
        two = feddar.train(cohort, "fedavg", rounds=1, jobs=2)
    expected = named_state(one.state)
    assert all(torch.equal(value, expected[name]) for name, value in named_state(two.state).items())


def test_the_c_library_of_others_is_left_as_it_is(of_others, monkeypatch):
    monkeypatch.setattr(allocation, "_glibc", lambda: pytest.fail("it was looked up"))
    with allocation.keeping_freed_memory():
        pass
