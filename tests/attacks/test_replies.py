"""Messages and replies that are not what they should be: they cost who sends them, and nobody else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from feddar.federation.links.flower import connect, executor, gatekeeper, internals
from feddar.federation.links.flower.apps import client_app
from feddar.federation.links.flower.connect import flower_link, flower_site
from feddar.federation.links.flower.gate import ServerTls
from feddar.federation.links.flower.grid import GridLink
from feddar.federation.links.flower.programs import free_port
from feddar.federation.links.link import Answer
from helpers.credentials import Credentials


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages be made as in a run."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize("kind", ["train", "evaluate.other", "query.unknown", "query"])
def test_a_message_of_any_kind_has_an_answer(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from flwr.supernode.runtime import run_clientapp

    message = Message(RecordDict({"other": ConfigRecord({"x": 1})}), 1, kind)
    sent: list[Any] = []
    context = Context(1, 1, {"name": "a"}, RecordDict(), {})
    monkeypatch.setattr(run_clientapp, "pull_task_input", lambda client: (message, context, None, None))
    monkeypatch.setattr(run_clientapp, "push_message", lambda client, reply, context: sent.append(reply))
    monkeypatch.setattr(run_clientapp, "push_task_output", lambda *_: sent.append("done"))
    internals.answer(None, client_app(lambda node: bytes))  # type: ignore[arg-type]
    reply, done = sent
    assert (reply.error.code, done) == (internals.CLIENT_APP_FAILED, "done")


def test_no_message_ends_the_thread_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, tokens = threading.Event(), iter(["bad", "", "worse", "good"])

    def answer(address: str, token: str, app: object) -> None:
        if token != "good":
            raise {"bad": ValueError, "worse": KeyError}[token](token)
        answered.set()

    @contextmanager
    def messages(address: str, secret: bytes) -> Iterator[None]:
        yield

    monkeypatch.setattr(internals, "messages_of", messages)
    monkeypatch.setattr(internals, "acquire", lambda client: next(tokens, ""))
    monkeypatch.setattr(executor, "_answer", answer)
    with executor.executing("127.0.0.1:1", b"", client_app()):
        assert answered.wait(30)


class Nodes:
    """A Grid whose nodes reply as these functions do, called when their replies are looked for."""

    def __init__(self, **replies: Callable[[Message], Message]) -> None:
        self.replies, self.sent = dict(enumerate(replies.values(), start=1)), dict[str, Message]()
        self.infos = [SimpleNamespace(node_id=number, name=name) for number, name in enumerate(replies, start=1)]

    def get_nodes(self) -> list[Any]:
        return self.infos

    def push_messages(self, messages: list[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.sent))
            self.sent[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        return [
            self.replies[message.metadata.dst_node_id](message) for message in map(self.sent.get, numbers) if message
        ]


def well(message: Message) -> Message:
    return Message(RecordDict({"message": ConfigRecord({"content": b"well"})}), reply_to=message)


@pytest.mark.usefixtures("in_a_run")
@pytest.mark.parametrize("error", [ValueError("no head"), KeyError("0" * 64), TypeError("Array"), RecursionError()])
def test_a_reply_that_cannot_be_read_costs_its_site_only(error: Exception) -> None:
    def broken(message: Message) -> Message:
        raise error

    link = GridLink(Nodes(a=broken, b=well), str)  # type: ignore[arg-type]
    assert {answer.site: answer for answer in link.ask(b"", ["a", "b"], 20)} == {
        "a": Answer("a", problem="sent something that cannot be read"),
        "b": Answer("b", b"well"),
    }


@pytest.mark.usefixtures("in_a_run")
def test_a_name_that_is_announced_and_never_comes_holds_up_nobody() -> None:
    over = threading.Event()

    def never(message: Message) -> Message:
        over.wait(60)
        return well(message)

    nodes = Nodes(a=well, b=never)
    for info in nodes.infos:
        info.name = ""
    link, end = GridLink(nodes, str), time.monotonic() + 30  # type: ignore[arg-type]
    while link.sites() != ["well"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert list(link.ask(b"", ["well"], 20)) == [Answer("well", b"well")]
    assert not over.is_set()
    over.set()


STRANGE_SERVER = """
import sys
from pathlib import Path
from feddar.federation.links.flower import APP, grid, internals

original = grid.GridLink._push

def push(self, record, nodes, kind, life):
    strange = kind == grid.ASK and grid.unpack(record).startswith(b"as ")
    return original(self, record, nodes, grid.unpack(record)[3:].decode() if strange else kind, life)

grid.GridLink._push = push
internals.run_server_app(Path(sys.argv[1]), APP, {"socket": sys.argv[2]})
"""

HALF_NODE = """
import sys
from pathlib import Path
from flwr.supernode import start_client_internal
from feddar.federation.links.flower import internals

start_client_internal.push_object_contents_from_iterable = lambda *_, **__: None
key, certificate = sys.argv[1:3]
del sys.argv[1:3]
internals.run_supernode(*(Path(file) if file else None for file in (key, certificate)))
"""


@contextmanager
def site(address: str, name: str, folder: Path, made: Credentials) -> Iterator[None]:
    """Run a site that answers with its name, in a thread."""
    stop, place = threading.Event(), folder / name
    place.mkdir()
    arguments = (address, name, lambda _: name.encode(), place, made.authority, made.private(name), str, stop)
    thread = threading.Thread(target=flower_site, args=(*arguments, made.certified(name)[0]), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(90)


def until(link: Any, sites: list[str]) -> None:
    end = time.monotonic() + 240
    while link.sites() != sites:
        assert time.monotonic() < end, link.sites()
        time.sleep(0.2)


def listening_ports(folder: Path) -> set[int]:
    """Return the TCP ports that processes listen on which have a file of theirs in this folder."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                inodes |= {str(file.readlink()) for file in (process / "fd").iterdir()}
        except OSError:
            continue
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@pytest.mark.slow
@pytest.mark.more
def test_the_real_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent replies, messages of other kinds, a key that comes later, and a SuperLink that only we can reach."""
    original, made, names = connect.variant, Credentials(tmp_path / "keys"), ["a", "half"]

    def variant(name: str, *arguments: str | Path) -> list[str]:
        codes = {"serverapp": STRANGE_SERVER, "supernode": HALF_NODE if "half.pem" in str(arguments[0]) else ""}
        code = codes.get(name, "")
        return [sys.executable, "-c", code, *map(str, arguments)] if code else original(name, *arguments)

    monkeypatch.setattr(connect, "variant", variant)
    tls, port = ServerTls(made.certificate, made.key, made.authority), free_port()
    address, server = f"127.0.0.1:{port}", tmp_path / "server"
    server.mkdir()
    with flower_link(address, server, tls, lambda: {name: made.public(name) for name in names}, str) as link:
        assert listening_ports(server) == {port}
        with site(address, "a", tmp_path, made), site(address, "half", tmp_path, made):
            until(link, ["a", "half"])
            assert {answer.site: answer for answer in link.ask(b"x", ["a", "half"], 10)} == {
                "a": Answer("a", b"a"),
                "half": Answer("half", problem="has not answered within 10 seconds"),
            }
            for kind in (b"train", b"evaluate.other", b"query.unknown"):
                (answer,) = link.ask(b"as " + kind, ["a"], 60)
                assert "No " + kind.decode().split(".")[0] in answer.problem
            assert list(link.ask(b"x", ["a"], 60)) == [Answer("a", b"a")]
            names.append("late")
            time.sleep(2 * gatekeeper._FRESH)  # a site that comes before its key is known is refused, and ends
            with site(address, "late", tmp_path, made):
                until(link, ["a", "half", "late"])
                assert list(link.ask(b"x", ["late"], 60)) == [Answer("late", b"late")]
