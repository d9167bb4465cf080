"""A link on Flower's Grid, by which a ServerApp sends messages to nodes and collects their replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING

from feddar.federation.links.flower.internals import HALF_SENT, NODE_UNAVAILABLE
from feddar.federation.links.flower.pace import pause
from feddar.federation.links.link import Answer

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

ASK, HELLO = "query", "query.hello"

_SMALL = 2**21
_MOST = 0.5
_POLLS_PER_SECOND = 40
_HELLO_LIFE = 60.0
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What Flower raises where the content of a reply is not what it should be; other errors are those of the Grid."""


def pack(content: bytes) -> RecordDict:
    """Return bytes as a record: a config value, which needs fewest calls, or an array, which Flower sends in chunks.

    Flower transfers the content once, also if it goes to many sites.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if len(content) <= _SMALL:
        return RecordDict({"message": ConfigRecord({"content": content})})
    array = Array(dtype="uint8", shape=(len(content),), stype="bytes", data=content)
    return RecordDict({"message": ArrayRecord({"content": array})})


def unpack(record: RecordDict) -> bytes:
    """Return the bytes in a record; ``ValueError`` if there are none."""
    found: object = None
    if "message" in record.config_records:
        found = record.config_records["message"].get("content")
    elif "message" in record.array_records:
        found = getattr(record.array_records["message"].get("content"), "data", None)
    if not isinstance(found, bytes):
        raise ValueError("sent something else than bytes")
    return found


class GridLink:
    """A link to the sites that are the nodes of a Grid.

    A node's name is the one that its key was registered with. Without keys it has none, and is asked for its name.
    """

    # Flower sends chunks of 5 MB, so it has no limit; but a message is in memory several times on its way.
    limit = 2**30

    def __init__(self, grid: Grid, log: Callable[[str], None]) -> None:
        self._grid = grid
        self._log = log
        self._claimed: dict[int, str] = {}
        self._greeted: set[int] = set()
        self._holders: dict[str, int] = {}
        self._doubles: set[int] = set()

    def sites(self) -> list[str]:
        """Return the names of the connected sites; a new node without a registered name is first asked for it."""
        names = {node.node_id: node.name or self._claimed.get(node.node_id, "") for node in self._grid.get_nodes()}
        self._greet([node for node, name in names.items() if not name])
        self._holders = {site: node for site, node in self._holders.items() if names.get(node) == site}
        for node, site in names.items():
            if site and self._holders.setdefault(site, node) != node and node not in self._doubles:
                self._doubles.add(node)
                self._log(f"ignored a second site that calls itself {site}, while the first is connected.")
        return sorted(self._holders)

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        """Send to all, then poll for replies to these messages; late replies to earlier ones are ignored."""
        begun = time.monotonic()
        self.sites()
        holders = {self._holders[site]: site for site in sites if site in self._holders}
        sent = self._push(pack(message), list(holders), ASK, timeout)
        waiting = {number: holders[node] for number, node in sent.items()}
        yield from [Answer(site, problem="is not connected") for site in sites if site not in waiting.values()]
        for number, reply in self._replies(list(waiting), begun + timeout):
            yield _answer(waiting.pop(number), reply)
        for site in waiting.values():
            yield Answer(site, problem=f"has not answered within {timeout:g} seconds")

    def close(self) -> None:
        """Do nothing: the Grid belongs to the ServerApp."""

    def _push(self, record: RecordDict, nodes: Sequence[int], kind: str, life: float) -> dict[str, int]:
        """Send to all these nodes at once; return the ids of the accepted messages, each with its node."""
        from flwr.app import Message

        messages = [Message(record, node, kind, ttl=life) for node in nodes]
        taken = set(self._grid.push_messages(messages))
        numbered = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        return {number: node for number, node in numbered.items() if number in taken}

    def _replies(self, numbers: Sequence[str], deadline: float) -> Iterator[tuple[str, Message | None]]:
        """Yield the replies to these messages as they arrive (None: unreadable), until all have or the time is over.

        Each is waited for in a thread of its own: Flower announces a reply before the whole of it has arrived, and
        then waits for the rest. One site that dies while it sends would otherwise hold up the answers of all others.
        """
        arrived: SimpleQueue[tuple[str, Message | Exception | None]] = SimpleQueue()
        over = Event()
        for number in numbers:
            least = len(numbers) / _POLLS_PER_SECOND
            Thread(target=self._await, args=(number, least, arrived.put, over), daemon=True).start()
        try:
            for _ in numbers:
                number, reply = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(reply, Exception):
                    raise reply
                yield number, reply
        except Empty:
            return
        finally:
            over.set()

    def _await(
        self, number: str, least: float, put: Callable[[tuple[str, Message | Exception | None]], None], over: Event
    ) -> None:
        """Poll for one reply at intervals of at least so many seconds, and put it, or the error that it met."""
        since = time.monotonic()
        try:
            while not over.is_set():
                for reply in self._grid.pull_messages([number]):
                    return put((number, reply))
                over.wait(max(least, pause(time.monotonic() - since, _MOST)))
        except _UNREADABLE:
            put((number, None))
        except Exception as error:  # which the thread that asked raises
            put((number, error))

    def _greet(self, nodes: list[int]) -> None:
        """Ask nodes for their names, in a thread for each, since an answer may begin to arrive and never end."""
        asked = self._push(pack(b""), [node for node in nodes if node not in self._greeted], HELLO, _HELLO_LIFE)
        self._greeted |= set(asked.values())
        for number, node in asked.items():
            Thread(target=self._learn, args=(number, node), daemon=True).start()

    def _learn(self, number: str, node: int) -> None:
        """Store the name that a node replies with; one that fails is asked again, and left out until it answers."""
        with suppress(Exception):
            for _, reply in self._replies([number], time.monotonic() + _HELLO_LIFE):
                if name := _answer("", reply).content:
                    self._claimed[node] = name.decode(errors="replace")
        self._greeted.discard(node)


def _answer(site: str, reply: Message | None) -> Answer:
    if reply is None:
        return Answer(site, problem="sent something that cannot be read")
    if not reply.has_error():
        try:
            return Answer(site, unpack(reply.content))
        except ValueError as error:
            return Answer(site, problem=str(error))
    if reply.error.code == NODE_UNAVAILABLE:
        return Answer(site, problem="is no longer connected")
    if reply.error.code == HALF_SENT:
        return Answer(site, problem="has sent only a part of its answer")
    return Answer(site, problem=reply.error.reason or f"failed with Flower's error {reply.error.code}")
