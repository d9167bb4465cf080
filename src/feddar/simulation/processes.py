"""Runs tasks in parallel in forked child processes, or one after another where forking is not safe.

A child has the parent's memory as it was when it started, so data that was loaded before is shared and nothing is
pickled. It sends messages as JSON over a pipe, and leaves its results in files. A child ends when its parent does,
however the parent ended.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from feddar.errors import Notice, TrainingError, UserError

Message = dict[str, Any]
Send = Callable[[Message], None]
Task = Callable[[Send], None]
OnMessage = Callable[[int, Message], None]
OnLost = Callable[[int], None]

_KINDS: dict[str, type[Exception]] = {"UserError": UserError, "TrainingError": TrainingError}


_own_process = False


def declare_own_process() -> None:
    """Declare that this process runs a feddar command only, so that global options of the process may be changed."""
    global _own_process  # noqa: PLW0603 - it is a fact about the process
    _own_process = True


def is_own_process() -> bool:
    """Return whether this process runs a feddar command only, or is a child that was started here."""
    return _own_process


def may_fork() -> bool:
    """Return whether a child can be forked safely; if not, warn that tasks are done here, one after another.

    A lock that another thread holds at that moment stays locked in the child forever, and system libraries of macOS do
    not support forking. The threads of our own commands hold no lock that a child needs.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        reason = "processes cannot be forked safely on this system"
    elif not is_own_process() and threading.active_count() > 1:
        reason = "other threads run in this process"
    else:
        return True
    warnings.warn(f"{reason}: several jobs are done one after another, with the same results.", Notice, stacklevel=3)
    return False


def run_all(tasks: Iterable[Task], jobs: int, on_message: OnMessage, on_lost: OnLost) -> None:
    """Run tasks, at most ``jobs`` at a time; ``on_message`` gets the number of a task and each of its messages.

    The iterator makes a task when it is about to start. If one raises an error, the others are stopped and the error is
    raised here. ``on_lost`` gets the number of a task whose process ended without finishing it (killed, or out of
    memory).
    """
    if jobs == 1 or not may_fork():
        for number, task in enumerate(tasks):
            task(lambda message, number=number: on_message(number, message))  # type: ignore[misc]
        return
    children = _Children(on_message, on_lost)
    try:
        for number, task in enumerate(tasks):
            while len(children) == jobs:
                children.listen()
            children.start(number, task)
        while len(children):
            children.listen()
    finally:
        children.end()


class _Children:
    """The processes that are running now."""

    def __init__(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self.on_message, self.on_lost = on_message, on_lost
        self.running: dict[Connection, tuple[int, ForkProcess]] = {}

    def __len__(self) -> int:
        return len(self.running)

    def start(self, number: int, task: Task) -> None:
        """Fork a child for the task."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        # The child closes its copies of our ends of the pipes: then its pipe ends when this process ends.
        process = context.Process(target=_work, args=(there, [here, *self.running], task), daemon=True)
        with _holding_back_interrupts():
            fork(process)
        there.close()
        self.running[here] = number, process

    def listen(self) -> None:
        """Wait for messages of children, and pass them on."""
        for link in wait(list(self.running)):
            assert isinstance(link, Connection)
            number, _ = self.running[link]
            try:
                message = json.loads(link.recv_bytes())
            except (EOFError, OSError):
                self._leave(link)
                self.on_lost(number)
                continue
            raise_reported_error(message)
            if "finished" in message:
                self._leave(link)
            else:
                self.on_message(number, message)

    def end(self) -> None:
        """Kill the children that are still running."""
        for _, process in self.running.values():
            process.kill()
        for link in list(self.running):
            self._leave(link)

    def _leave(self, link: Connection) -> None:
        _, process = self.running.pop(link)
        process.join()
        link.close()


def raise_reported_error(message: Message) -> None:
    """Raise the error that a child's message reports, if it reports one."""
    if "wrong" in message:
        raise _KINDS.get(message["kind"], RuntimeError)(message["wrong"])


def fork(process: ForkProcess) -> None:
    """Start a child, which must call ``begin_child`` first, without garbage collection in between."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        process.start()
    finally:
        if enabled:
            gc.enable()


def begin_child() -> None:
    """Keep the parent's objects from being freed: some would wait for threads that a child does not have."""
    gc.freeze()
    gc.enable()
    declare_own_process()


@contextmanager
def _holding_back_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, so that it cannot reach a new child before the child ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(link: Connection, ends: list[Connection], task: Task) -> None:
    begin_child()
    # Ctrl-C reaches the whole process group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for end in ends:
        end.close()
    threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()

    def send(message: Message) -> None:
        link.send_bytes(json.dumps(message).encode())

    try:
        task(send)
        send({"finished": True})
    except (UserError, TrainingError) as error:
        send({"wrong": str(error), "kind": type(error).__name__})
    except Exception:
        send({"wrong": traceback.format_exc(), "kind": "RuntimeError"})
    # At once, without the exit handlers that the parent registered for itself.
    os._exit(0)


def _end_with_parent(link: Connection) -> None:
    """Wait until the pipe ends (the parent never sends anything), then end this process at once."""
    try:
        link.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
