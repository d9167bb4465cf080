"""The engine that distributes clients over worker processes.

Workers are forked where that is safe, so that the data is shared and not copied, and else spawned; each has one thread
and some of the clients, with about as many samples as the others. They are spread over the GPUs there are. For forked
workers, a request's tensors are written once, to shared memory, and replies are read where workers wrote them: pipes
carry only headers and small tensors. Those of spawned workers carry everything. A worker never waits for shared memory:
it continues with its next client while its last reply is being read. Results do not depend, to the bit, on which
worker does the work.
"""

from __future__ import annotations

import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import starmap
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, cast

import torch

from feddar.algorithm.names import named_own, named_reply, named_request, own_from
from feddar.algorithm.protocol import NOTHING, OwnState, Reply, Request
from feddar.algorithm.wire import as_reply, as_request, pack, reply_header, request_header, unpack
from feddar.errors import TrainingError, UserError
from feddar.models.devices import CPU, take_turn
from feddar.models.parameters import Tensors
from feddar.simulation.allocation import keeping_freed_memory
from feddar.simulation.handover import Handover, hand_over_all
from feddar.simulation.processes import begin_child, context_for, raise_reported_error, start_child, start_method
from feddar.simulation.shared_memory import Arena

SMALL = 1 << 16
"""Tensors of at most so many bytes in all are sent through the pipe."""

Message = tuple[dict[str, Any], Tensors]


class Participant(Protocol):
    """The interface of one client (``Client``), or of several that answer together (``Stack``)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its clients."""

    @property
    def samples(self) -> int:
        """The number of training samples of its clients."""

    def answers(self, request: Request) -> Iterator[Reply]:
        """Do the phase of the request, and yield the replies."""

    def own_states(self) -> dict[str, OwnState]:
        """Return the own state of each client that has one, by name."""

    def restore(self, name: str, own: OwnState) -> None:
        """Set a client's own state."""


@dataclass
class _Worker:
    """The parent's side of a worker process."""

    process: BaseProcess
    link: Connection
    replies: Arena | None
    share: list[int]
    """The indices of its clients or stacks, in their order."""
    due: deque[int] = field(default_factory=deque)
    """Those that still have to answer."""


class Workers:
    """Clients spread over processes, each with one thread."""

    def __init__(self, participants: Sequence[Participant], workers: int, device: torch.device = CPU) -> None:
        """``NotHandedOverError`` if processes cannot be forked, and participants cannot be given to others."""
        method = start_method(device)
        forked, context = method == "fork", context_for(method)
        shares = assign_tasks([each.samples for each in participants], workers)
        given = [[participants[position] for position in share] for share in shares]
        self.handovers = [] if forked else hand_over_all(given)
        self.requests = Arena(readers=workers) if forked else None
        self.workers: list[_Worker] = []
        for number, share in enumerate(shares):
            here, there = context.Pipe()
            mine, replies = (given[number], Arena()) if forked else (self.handovers[number], None)
            # A forked worker closes its copies of our ends: then its pipe ends even if this process is killed.
            ends = [here, *(worker.link for worker in self.workers)] if forked else []
            about = (number, (self.requests, replies), device, torch.get_num_threads())
            process = context.Process(target=_work, args=(there, ends, mine, *about), daemon=True)
            start_child(process)
            there.close()
            self.workers.append(_Worker(process, here, replies, share))
        self.holders = {position: worker for worker in self.workers for position in worker.share}
        self.participants = participants

    def joined(self) -> bool:
        """Return False: all clients are known from the start."""
        return False

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Send a request to all workers; receive replies as they come, so that no worker waits; yield them in order."""
        # No reference to a yielded reply is kept here, so that its memory is free as soon as it has been used.
        yield from starmap(_as_reply, self._ask({"ask": request_header(request)}, named_request(request)))

    def own_states(self) -> dict[str, OwnState]:
        """Return copies of the own state of each client that has one, which may be kept for long."""
        found = self._ask({"private": True}, {})
        return {
            about["client"]: own_from({name: value.clone() for name, value in tensors.items()})
            for about, tensors in found
        }

    def restore(self, own: dict[str, OwnState]) -> None:
        """Set each client's own state."""
        self._settle()
        for position, participant in enumerate(self.participants):
            for name in participant.names:
                with _alive():
                    self.holders[position].link.send_bytes(pack({"restore": name}, named_own(own.get(name, NOTHING))))

    def close(self) -> None:
        """Kill the workers and free the shared memory."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.link.close()
        for arena in (self.requests, *(worker.replies for worker in self.workers)):
            if arena is not None:
                arena.close()
        for handover in self.handovers:
            handover.delete()

    def _ask(self, about: dict[str, Any], tensors: Tensors) -> Iterator[Message]:
        """Send a message to all workers, and yield the clients' answers in the order of the clients."""
        self._settle()
        message = _packed(about, tensors, self.requests)
        for worker in self.workers:
            with _alive():
                worker.link.send_bytes(message)
            worker.due.extend(worker.share)
        return self._in_order()

    def _in_order(self) -> Iterator[Message]:
        """Yield the answers to the last message in order; those that come early are kept until their turn."""
        early: defaultdict[int, deque[Message]] = defaultdict(deque)
        for position in range(len(self.participants)):
            due = self.holders[position].due
            while True:
                while early[position]:
                    yield early[position].popleft()
                if not due or due[0] > position:
                    break
                self._collect(early)
            del early[position]

    def _collect(self, early: defaultdict[int, deque[Message]]) -> None:
        for position, message in self._received():
            raise_reported_error(message[0])
            early[position].append(message)

    def _received(self) -> Iterator[tuple[int, Message]]:
        """Wait for messages of workers; yield the index of the client or stack, and the message."""
        links = {worker.link: worker for worker in self.workers if worker.due}
        for link in wait(list(links)):
            worker = links[cast(Connection, link)]
            with _alive():
                message = _unpacked(worker.link.recv_bytes(), worker.replies)
            position = worker.due[0]
            if "finished" in message[0]:
                worker.due.popleft()
                continue
            if "wrong" in message[0]:  # the worker does not go on with its other clients
                worker.due.clear()
            yield position, message

    def _settle(self) -> None:
        """Receive and drop answers to earlier messages that were not read."""
        while any(worker.due for worker in self.workers):
            for _ in self._received():
                pass


def assign_tasks(sizes: list[int], workers: int) -> list[list[int]]:
    """Assign tasks to workers, the largest first, each to the worker with the least; return each worker's task indices.

    >>> assign_tasks([1, 5, 1, 1, 2], 2)
    [[1], [0, 2, 3, 4]]
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        least = loads.index(min(loads))
        shares[least].append(position)
        loads[least] += sizes[position]
    return [sorted(share) for share in shares]


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise TrainingError(
            "a worker process ended unexpectedly (out of memory?): run with fewer jobs, and resume."
        ) from None


def _as_reply(about: dict[str, Any], tensors: Tensors) -> Reply:
    return as_reply(tuple(about["clients"]), about, tensors)


def _packed(about: dict[str, Any], tensors: Tensors, arena: Arena | None) -> bytes:
    """Return a message for a pipe; its tensors are written to shared memory, if there is any, unless they are small."""
    if arena is None or sum(tensor.nbytes for tensor in tensors.values()) <= SMALL:
        return pack(about, tensors)
    return pack(about | {"place": arena.put(tensors)})


def _unpacked(content: bytes, arena: Arena | None, reader: int = 0) -> Message:
    about, tensors = unpack(content)
    return about, arena.get(about["place"], reader) if arena is not None and "place" in about else tensors


@dataclass(frozen=True)
class _WorkerSide:
    """The worker's side: its pipe, its clients and the shared memory."""

    link: Connection
    number: int
    participants: Sequence[Participant]
    requests: Arena | None
    replies: Arena | None
    device: torch.device

    def serve(self) -> None:
        """Receive one message and answer it: for each client or stack its replies, then a message that it is done."""
        about, tensors = _unpacked(self.link.recv_bytes(), self.requests, self.number)
        try:
            if "restore" in about:
                name = about["restore"]
                next(each for each in self.participants if name in each.names).restore(name, own_from(tensors))
                return
            for participant in self.participants:
                for header, found in self._answers(participant, about, tensors):
                    self.link.send_bytes(_packed(header, found, self.replies))
                self.link.send_bytes(pack({"finished": True}))
        except (UserError, TrainingError) as error:
            self.link.send_bytes(pack({"wrong": str(error), "kind": type(error).__name__}))
        except OSError:
            raise
        except Exception:
            self.link.send_bytes(pack({"wrong": traceback.format_exc(), "kind": "RuntimeError"}))

    def _answers(self, participant: Participant, about: dict[str, Any], tensors: Tensors) -> Iterator[Message]:
        if "private" in about:
            for name, own in participant.own_states().items():
                yield {"client": name}, named_own(own)
        else:
            for reply in participant.answers(as_request(about["ask"], tensors)):
                yield {"clients": reply.clients} | reply_header(reply), named_reply(reply)


def _work(
    link: Connection,
    ends: list[Connection],
    given: Sequence[Participant] | Handover,
    number: int,
    arenas: tuple[Arena | None, Arena | None],
    device: torch.device,
    threads: int,
) -> None:
    """Answer messages until the pipe ends."""
    begin_child()
    for end in ends:
        end.close()
    torch.set_num_threads(threads)
    take_turn(device, number)
    participants = _taken(given, link)
    side = _WorkerSide(link, number, participants, *arenas, device)
    # Stacks free only small blocks; keeping these would fragment memory more than it saves time.
    stacked = any(len(participant.names) > 1 for participant in participants)
    with nullcontext() if stacked else keeping_freed_memory(), suppress(EOFError, OSError):
        while True:
            side.serve()


def _taken(given: Sequence[Participant] | Handover, link: Connection) -> Sequence[Participant]:
    """Return the participants of a worker; the parent is told if they cannot be taken over."""
    if not isinstance(given, Handover):
        return given
    try:
        taken: Sequence[Participant] = given.take()
    except Exception:
        link.send_bytes(pack({"wrong": traceback.format_exc(), "kind": "RuntimeError"}))
        raise
    return taken
