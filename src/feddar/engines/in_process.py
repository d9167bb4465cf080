"""The default engine: all clients on this machine, one after another or spread over worker processes.

Workers are forked, so that the data is shared and not copied; each holds every n-th client, with one thread. Requests
and replies go to them as safetensors, as they would over a network. Which worker does the work changes no bit of it.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from feddar.engines import Engine
from feddar.errors import TrainingError, UserError
from feddar.messages import as_reply, as_request, pack, reply_header, request_header, unpack
from feddar.model import Tensors
from feddar.phases import Client, Reply, Request


class Party(Protocol):
    """One client, or several that speak as one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Whom it speaks for."""

    def answers(self, request: Request) -> Iterator[Reply]:
        """Do what is asked."""

    def kept(self) -> dict[str, Tensors]:
        """Return what each client keeps to itself."""

    def restore(self, private: dict[str, Tensors]) -> None:
        """Give clients back what they kept to themselves."""


def start(clients: Sequence[Party], jobs: int) -> Engine:
    """Return the engine for these clients: direct for one job, worker processes for several."""
    workers = min(jobs, len(clients))
    if workers > 1 and "fork" in multiprocessing.get_all_start_methods():
        return Workers(clients, workers)
    return Direct(clients)


class _Fixed:
    """The clients are those that there were at the start."""

    def joined(self) -> bool:
        """Nobody comes later."""
        return False


class Direct(_Fixed):
    """Clients one after another in this process."""

    def __init__(self, parties: Sequence[Party]) -> None:
        self.parties = parties

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Ask each in turn."""
        for party in self.parties:
            yield from party.answers(request)

    def private(self) -> dict[str, Tensors]:
        """Return what each client keeps to itself."""
        return {name: kept for party in self.parties for name, kept in party.kept().items()}

    def restore(self, private: dict[str, Tensors]) -> None:
        """Give clients back what they kept to themselves."""
        for party in self.parties:
            party.restore(private)

    def close(self) -> None:
        """Nothing was started."""


class Workers(_Fixed):
    """Clients spread over forked processes, each with one thread."""

    def __init__(self, clients: list[Client], workers: int) -> None:
        self.names = [client.name for client in clients]
        context = multiprocessing.get_context("fork")
        self.links: list[Connection] = []
        self.processes = []
        for number in range(workers):
            here, there = context.Pipe()
            self.links.append(here)
            # A worker closes its copies of our ends: then it sees the pipe end even if we are killed.
            arguments = (there, clients[number::workers], list(self.links))
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)

    def exchange(self, request: Request) -> Iterator[Reply]:
        """Send to all workers; take replies as they come, so that none waits, and give them in the clients' order."""
        message = pack({"ask": request_header(request)}, request.tensors)
        for link in self.links:
            with self._alive():
                link.send_bytes(message)
        for position, (about, tensors) in self._in_order():
            yield as_reply(self.names[position], about, tensors)

    def private(self) -> dict[str, Tensors]:
        """Fetch what each client keeps to itself."""
        for link in self.links:
            self._send(link, {"private": True})
        return {self.names[position]: tensors for position, (_, tensors) in self._in_order()}

    def restore(self, private: dict[str, Tensors]) -> None:
        """Give clients back what they kept to themselves."""
        for position, name in enumerate(self.names):
            self._send(self._link(position), {"restore": name}, private.get(name, {}))

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.kill()
        for process, link in zip(self.processes, self.links, strict=True):
            process.join()
            link.close()

    def _link(self, position: int) -> Connection:
        return self.links[position % len(self.links)]

    def _in_order(self) -> Iterator[tuple[int, tuple[dict[str, Any], Tensors]]]:
        """Give one answer for each client in order, holding those that come early."""
        due = {number: number for number in range(len(self.links))}
        early: dict[int, tuple[dict[str, Any], Tensors]] = {}
        for position in range(len(self.names)):
            while position not in early:
                for link in wait([self.links[number] for number, next_ in due.items() if next_ < len(self.names)]):
                    number = self.links.index(cast(Connection, link))
                    early[due[number]] = self._receive(due[number])
                    due[number] += len(self.links)
            yield position, early.pop(position)

    def _receive(self, position: int) -> tuple[dict[str, Any], Tensors]:
        with self._alive():
            about, tensors = unpack(self._link(position).recv_bytes())
        if "wrong" in about:
            kinds: dict[str, type[Exception]] = {"UserError": UserError, "TrainingError": TrainingError}
            raise kinds.get(about["kind"], RuntimeError)(about["wrong"])
        return about, tensors

    def _send(self, link: Connection, about: dict[str, Any], tensors: Tensors | None = None) -> None:
        with self._alive():
            link.send_bytes(pack(about, tensors))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise TrainingError(
                "a worker process ended unexpectedly (out of memory?): run with fewer jobs, and resume."
            ) from None


def _work(link: Connection, clients: list[Client], ends: list[Connection]) -> None:
    """Serve requests until the pipe ends."""
    for end in ends:
        end.close()
    # Ctrl-C reaches the whole process group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            about, tensors = unpack(link.recv_bytes())
            try:
                _serve(link, clients, about, tensors)
            except (UserError, TrainingError) as error:
                link.send_bytes(pack({"wrong": str(error), "kind": type(error).__name__}))
            except OSError:
                raise
            except Exception:
                link.send_bytes(pack({"wrong": traceback.format_exc(), "kind": "RuntimeError"}))


def _serve(link: Connection, clients: list[Client], about: dict[str, Any], tensors: Tensors) -> None:
    if "ask" in about:
        request = as_request(about["ask"], tensors)
        for client in clients:
            reply = client.answer(request)
            link.send_bytes(pack(reply_header(reply), reply.tensors))
    elif "private" in about:
        for client in clients:
            link.send_bytes(pack({}, client.private))
    else:
        next(client for client in clients if client.name == about["restore"]).private = tensors
