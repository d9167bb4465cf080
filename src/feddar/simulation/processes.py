"""Runs tasks in parallel in child processes: forked where that is safe, else spawned.

A forked child has the parent's memory as it was when it started, so data that was loaded before is shared and nothing
is copied. A spawned one begins anew and is handed its task (``handover``). A child sends messages as JSON over a pipe,
and leaves its results in files. It ends when its parent does, however the parent ended.
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
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from feddar.errors import Notice, TrainingError, UserError, one_line

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext

    import torch

    from feddar.simulation.handover import Handover

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


Method = Literal["fork", "spawn"]


def start_method(device: torch.device | None = None) -> Method:
    """Return how a child that uses ``device`` (None: no GPU) is started.

    It is forked, unless this process may have used CUDA, which a forked one then could not. A lock that another thread
    holds at that moment stays locked in a forked child forever, and system libraries of macOS do not support forking;
    Windows has none. The threads of our own commands hold no lock that a child needs.
    """
    safe = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
    alone = is_own_process() or threading.active_count() == 1
    return "fork" if safe and alone and (device is None or device.type != "cuda") else "spawn"


def context_for(method: Method) -> ForkContext | SpawnContext:
    """Return what starts processes by that method."""
    return multiprocessing.get_context("fork") if method == "fork" else multiprocessing.get_context("spawn")


def warn_of_one_by_one(error: Exception) -> None:
    """Say that tasks are done here, one after another, since they cannot be handed to other processes."""
    warnings.warn(
        "other processes cannot be forked here, and cannot be given this work otherwise "
        f"({one_line(error)}): several jobs are done one after another, with the same results.",
        Notice,
        stacklevel=3,
    )


def run_all(
    tasks: Iterable[Task], jobs: int, on_message: OnMessage, on_lost: OnLost, device: torch.device | None = None
) -> None:
    """Run tasks, at most ``jobs`` at a time; ``on_message`` gets the number of a task and each of its messages.

    The iterator makes a task when it is about to start. If one raises an error, the others are stopped and the error is
    raised here. ``on_lost`` gets the number of a task whose process ended without finishing it (killed, or out of
    memory). Tasks use ``device``; ``cuda`` without a number is spread over the GPUs there are. Those that cannot be
    given to another process where that is needed are run here.
    """
    from feddar.simulation.handover import NotHandedOverError

    children = _Children(jobs, device, on_message, on_lost)
    here = jobs == 1
    try:
        for number, task in enumerate(tasks):
            while len(children) == jobs:
                children.listen()
            try:
                if not here:
                    children.start(number, task)
            except NotHandedOverError as error:
                warn_of_one_by_one(error)
                here = True
            if here:
                task(lambda message, number=number: on_message(number, message))  # type: ignore[misc]
        while len(children):
            children.listen()
    finally:
        children.end()


class _Child(NamedTuple):
    """A process that is running now."""

    number: int
    """That of its task."""
    place: int
    process: BaseProcess
    handover: Handover | None


class _Children:
    """The processes that are running now."""

    def __init__(self, jobs: int, device: torch.device | None, on_message: OnMessage, on_lost: OnLost) -> None:
        self.on_message, self.on_lost = on_message, on_lost
        self.device, self.method = device, start_method(device)
        self.free = list(range(jobs))
        """Places at which no child runs; GPUs are theirs in turn."""
        self.running: dict[Connection, _Child] = {}

    def __len__(self) -> int:
        return len(self.running)

    def start(self, number: int, task: Task) -> None:
        """Start a child for the task, at the first free place."""
        context = context_for(self.method)
        handover = None if self.method == "fork" else _handed_over(task)
        given = task if handover is None else partial(_take_over, handover)
        here, there = context.Pipe()
        # A forked child closes its copies of our ends of the pipes: then its pipe ends when this process ends.
        ends = [here, *self.running] if self.method == "fork" else []
        place = min(self.free)
        process = context.Process(target=_work, args=(there, ends, given, self.device, place), daemon=True)
        start_child(process)
        there.close()
        self.free.remove(place)
        self.running[here] = _Child(number, place, process, handover)

    def listen(self) -> None:
        """Wait for messages of children, and pass them on."""
        for link in wait(list(self.running)):
            assert isinstance(link, Connection)
            number = self.running[link].number
            try:
                message = json.loads(link.recv_bytes())
            except (EOFError, OSError):
                self._leave(link)
                self.on_lost(number)
                continue
            raise_reported_error(message)
            if "finished" in message:
                self._leave(link)
            elif "noted" in message:
                warnings.warn(message["noted"], Notice, stacklevel=2)
            else:
                self.on_message(number, message)

    def end(self) -> None:
        """Kill the children that are still running."""
        for child in self.running.values():
            child.process.kill()
        for link in list(self.running):
            self._leave(link)

    def _leave(self, link: Connection) -> None:
        child = self.running.pop(link)
        child.process.join()
        link.close()
        self.free.append(child.place)
        if child.handover is not None:
            child.handover.delete()


def raise_reported_error(message: Message) -> None:
    """Raise the error that a child's message reports, if it reports one."""
    if "wrong" in message:
        raise _KINDS.get(message["kind"], RuntimeError)(message["wrong"])


def start_child(process: BaseProcess) -> None:
    """Start a child, which must call ``begin_child`` first, without garbage collection or Ctrl-C in between.

    A spawned one must not run the program again that this process runs, which may be anybody's.
    """
    enabled, program = gc.isenabled(), sys.modules["__main__"]
    gc.disable()
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with _holding_back_interrupts():
            process.start()
    finally:
        sys.modules["__main__"] = program
        if enabled:
            gc.enable()


def begin_child() -> None:
    """Begin the work of a child: keep the parent's objects, and leave it to the parent when to stop.

    Some objects would wait, when they are freed, for threads that a forked child does not have.
    """
    gc.freeze()
    gc.enable()
    declare_own_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group


@contextmanager
def _holding_back_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, so that it cannot reach a new child before the child ignores it; Windows cannot."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _handed_over(task: Task) -> Handover:
    from feddar.simulation.handover import hand_over

    return hand_over(task)


def _take_over(handover: Handover, send: Send) -> None:
    """Run a task in a spawned child; the parent says what there is to note, in its own way."""
    python_shows = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, Notice):
            send({"noted": str(message)})
        else:
            python_shows(message, category, *place, **more)

    warnings.showwarning = show
    handover.take()(send)


def _work(link: Connection, ends: list[Connection], task: Task, device: torch.device | None, place: int) -> None:
    begin_child()
    for end in ends:
        end.close()
    threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()

    def send(message: Message) -> None:
        link.send_bytes(json.dumps(message).encode())

    try:
        if device is not None:
            from feddar.models.devices import take_turn

            take_turn(device, place)
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
