"""Flower as an engine: links and sockets by themselves, then the real programs on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from feddar.errors import TrainingError, UserError
from feddar.federation.links.flower import connect, frames, gate
from feddar.federation.links.flower.apps import client_app, server_app
from feddar.federation.links.flower.connect import flower_link, flower_site
from feddar.federation.links.flower.gate import ServerTls
from feddar.federation.links.flower.grid import GridLink
from feddar.federation.links.flower.relay import RelayLink, relay
from feddar.federation.links.link import Answer, Handler
from feddar.federation.private_folder import temporary_folder
from helpers.credentials import Credentials
from helpers.gates import gate_before, serving


class TestFrames:
    def test_bytes_of_any_length_pass(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        with frames.listen(path) as listening, frames.connect(path) as here:
            assert path.stat().st_mode & 0o777 == 0o600
            there, _ = listening.accept()
            with there:
                for message in (b"", b"abc", bytes(range(256)) * 40_000):
                    threading.Thread(target=frames.send, args=(here, message)).start()
                    assert frames.receive(there) == message

    def test_who_hangs_up_is_noticed(self, tmp_path: Path) -> None:
        with frames.listen(tmp_path / "socket") as listening:
            with frames.connect(tmp_path / "socket") as here:
                there, _ = listening.accept()
                here.sendall(b"\x00\x00")
            with there, pytest.raises(EOFError):
                frames.receive(there)


class FewSites:
    """A link to sites that answer at once, fail, or never answer."""

    limit = 123

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def sites(self) -> list[str]:
        self._log("looked")
        return ["a", "b"]

    def ask(self, message: bytes, sites: Sequence[str], timeout: float) -> Iterator[Answer]:
        for site in sites:
            yield Answer(site, message * int(timeout)) if site in "ab" else Answer(site, problem="unknown")

    def close(self) -> None:
        pass


@contextmanager
def relayed(tmp_path: Path, log: Callable[[str], None]) -> Iterator[RelayLink]:
    path = tmp_path / "relay"
    with frames.listen(path) as listening:
        other = threading.Thread(target=relay, args=(FewSites, str(path)))
        other.start()
        connection, _ = listening.accept()
    link = RelayLink(connection, log)
    yield link
    link.close()
    other.join(timeout=5)
    assert not other.is_alive()


class TestRelay:
    def test_everything_comes_through(self, tmp_path: Path) -> None:
        heard: list[str] = []
        with relayed(tmp_path, heard.append) as link:
            assert link.limit == 123
            assert link.sites() == ["a", "b"]
            assert heard == ["looked"]
            assert list(link.ask(b"\x00xyz", ["b", "c"], 2)) == [
                Answer("b", b"\x00xyz\x00xyz"),
                Answer("c", problem="unknown"),
            ]

    def test_answers_that_nobody_waited_for_are_dropped(self, tmp_path: Path) -> None:
        with relayed(tmp_path, str) as link:
            assert next(link.ask(b"old", ["a", "b"], 1)) == Answer("a", b"old")
            assert list(link.ask(b"new", ["a", "b"], 1)) == [Answer("a", b"new"), Answer("b", b"new")]

    def test_a_server_app_that_dies_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "relay"
        with frames.listen(path) as listening:
            other = frames.connect(path)
            connection, _ = listening.accept()
        threading.Timer(0.1, other.close).start()
        with connection, pytest.raises(TrainingError, match="ServerApp ended unexpectedly"):
            RelayLink(connection, str)


class Node:
    """A node of a Grid, with our ClientApp."""

    def __init__(self, number: int, handler: Handler, registered: str = "", claims: str = "", delay: float = 0) -> None:
        self.info = SimpleNamespace(node_id=number, name=registered)
        self.delay, self.online = delay, True
        self.app = client_app(lambda node: handler, lambda node: claims)


class OneProcessGrid:
    """Flower's Grid without its programs: a message is answered, after the node's delay, when replies are asked for."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = {node.info.node_id: node for node in nodes}
        self.sent: dict[str, Message] = {}

    def get_nodes(self) -> list[Any]:
        return [node.info for node in self.nodes.values() if node.online]

    def push_messages(self, messages: list[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = message.metadata.__dict__["_message_id"] = f"message {len(self.sent)}"
            self.sent[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Message]:
        replies = []
        for number in numbers:
            message = self.sent[number]
            node = self.nodes[message.metadata.dst_node_id]
            if not node.online:
                replies.append(Message(Error(5, "gone"), reply_to=message))
            elif time.time() > message.metadata.created_at + node.delay:
                replies.append(node.app(message, Context(1, node.info.node_id, {}, RecordDict(), {})))
        return replies


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages be made as in a run."""
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def link_to(*nodes: Node, log: Callable[[str], None] = str) -> GridLink:
    return GridLink(OneProcessGrid(*nodes), log)  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_a_run")
class TestGridLink:
    def test_each_site_answers_for_itself(self) -> None:
        def fail(message: bytes) -> bytes:
            raise ValueError("out of order")

        slow = Node(3, bytes, registered="c", delay=60)
        gone = Node(5, bytes, registered="e")
        link = link_to(Node(1, lambda m: m[::-1], registered="a"), Node(2, fail, registered="b"), slow, gone)
        assert link.sites() == ["a", "b", "c", "e"]
        answers = link.ask(b"\x00abc", ["a", "b", "c", "d", "e"], 0.3)
        first = next(answers)
        gone.online = False
        assert {first.site: first} | {answer.site: answer for answer in answers} == {
            "a": Answer("a", b"cba\x00"),
            "b": Answer("b", problem="ValueError: out of order"),
            "c": Answer("c", problem="has not answered within 0.3 seconds"),
            "d": Answer("d", problem="is not connected"),
            "e": Answer("e", problem="is no longer connected"),
        }

    def test_a_site_that_dies_while_it_sends_holds_up_nobody_else(self) -> None:
        """Flower waits for the rest of a reply that has begun to arrive; here, until the test is over."""

        class Waiting(OneProcessGrid):
            def pull_messages(self, numbers: list[str]) -> list[Message]:
                if any(self.sent[number].metadata.dst_node_id == 1 for number in numbers):
                    over.wait(30)
                return super().pull_messages(numbers)

        over = threading.Event()
        nodes = [Node(number, lambda m: m, registered=name) for number, name in enumerate("abc", start=1)]
        answers = GridLink(Waiting(*nodes), str).ask(b"1", ["a", "b", "c"], 0.5)  # type: ignore[arg-type]
        assert {answer.site: answer for answer in answers} == {
            "a": Answer("a", problem="has not answered within 0.5 seconds"),
            "b": Answer("b", b"1"),
            "c": Answer("c", b"1"),
        }
        over.set()

    def test_an_answer_of_which_a_part_came_is_none(self) -> None:
        node = Node(1, bytes, registered="a")
        node.app = lambda message, context: Message(
            Error(3, "Reply message objects are unavailable."), reply_to=message
        )  # type: ignore
        assert list(link_to(node).ask(b"", ["a"], 5)) == [Answer("a", problem="has sent only a part of its answer")]

    def test_an_error_of_the_grid_is_raised(self) -> None:
        class Broken(OneProcessGrid):
            def pull_messages(self, numbers: list[str]) -> list[Message]:
                raise OSError("no SuperLink")

        with pytest.raises(OSError, match="no SuperLink"):
            list(GridLink(Broken(Node(1, bytes, registered="a")), str).ask(b"", ["a"], 5))  # type: ignore[arg-type]

    def test_a_late_reply_is_not_taken_for_one_to_the_next_message(self) -> None:
        node = Node(1, lambda m: b"to " + m, registered="a", delay=0.3)
        link = link_to(node)
        assert [answer.problem for answer in link.ask(b"first", ["a"], 0.1)] == ["has not answered within 0.1 seconds"]
        time.sleep(0.3)
        assert list(link.ask(b"second", ["a"], 5)) == [Answer("a", b"to second")]

    def test_a_registered_name_counts_and_not_what_the_node_says(self) -> None:
        link = link_to(Node(1, lambda m: b"1", registered="a", claims="b"), Node(2, lambda m: b"2", registered="b"))
        assert [link.sites() for _ in range(3)] == [["a", "b"]] * 3
        assert list(link.ask(b"", ["b"], 5)) == [Answer("b", b"2")]

    def test_without_registered_names_nodes_are_asked(self) -> None:
        link = link_to(Node(1, bytes, claims="x"), Node(2, bytes, claims="y", delay=60))
        while not (sites := link.sites()):
            pass
        assert sites == ["x"]

    def test_two_of_one_name(self) -> None:
        told: list[str] = []
        first, second = Node(1, lambda m: b"1", claims="x"), Node(2, lambda m: b"2", claims="x")
        link = link_to(first, second, log=told.append)
        second.online = False
        while not link.sites():
            pass
        second.online = True
        while not told:
            link.sites()
        assert link.sites() == ["x"]
        assert list(link.ask(b"", ["x"], 5)) == [Answer("x", b"1")]
        assert told == ["ignored a second site that calls itself x, while the first is connected."]
        first.online = False
        assert list(link.ask(b"", ["x"], 5)) == [Answer("x", b"2")]

    @pytest.mark.parametrize("size", [0, 1000, 3_000_000])
    def test_messages_of_any_size_arrive_whole(self, size: int) -> None:
        message = os.urandom(size)
        link = link_to(Node(1, lambda m: m + b"!", registered="a"))
        assert list(link.ask(message, ["a"], 5)) == [Answer("a", message + b"!")]

    def test_who_sends_something_else_than_bytes_has_not_answered(self) -> None:
        records = [
            RecordDict({}),
            RecordDict({"message": ConfigRecord({"content": 7})}),
            RecordDict({"message": ConfigRecord({"other": b"1"})}),
            RecordDict({"message": ArrayRecord({})}),
        ]
        nodes = [Node(number, bytes, registered=str(number)) for number in range(len(records))]
        for node, record in zip(nodes, records, strict=True):
            node.app = lambda message, context, record=record: Message(record, reply_to=message)  # type: ignore
        names = [node.info.name for node in nodes]
        answers = list(link_to(*nodes).ask(b"", names, 5))
        assert answers == [Answer(name, problem="sent something else than bytes") for name in names]

    def test_a_message_that_is_not_taken_is_not_waited_for(self) -> None:
        class Choosy(OneProcessGrid):
            def push_messages(self, messages: list[Message]) -> list[str]:
                return super().push_messages(messages)[1:]

        grid = Choosy(Node(1, lambda m: b"1", registered="a"), Node(2, lambda m: b"2", registered="b"))
        answers = list(GridLink(grid, str).ask(b"", ["a", "b"], 5))  # type: ignore[arg-type]
        assert answers == [Answer("a", problem="is not connected"), Answer("b", b"2")]

    def test_the_server_app_relays_or_runs(self, tmp_path: Path) -> None:
        ran: list[tuple[list[str], dict[str, Any]]] = []
        app = server_app(lambda link, settings: ran.append((link.sites(), settings)))
        grid = OneProcessGrid(Node(1, bytes, registered="a"))
        app(grid, Context(1, 0, {}, RecordDict(), {"socket": "", "study": "x"}))  # type: ignore[arg-type]
        assert ran == [(["a"], {"socket": "", "study": "x"})]
        path = tmp_path / "relay"
        with frames.listen(path) as listening:
            context = Context(1, 0, {}, RecordDict(), {"socket": str(path)})
            threading.Thread(target=app, args=(grid, context)).start()
            connection, _ = listening.accept()
        with connection:
            assert RelayLink(connection, str).sites() == ["a"]
        assert len(ran) == 1

    def test_a_server_app_that_relays_needs_no_torch(self) -> None:
        use = "from feddar.federation.links.flower.apps import server_app; server_app()"
        code = f"{use}; import sys; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


@contextmanager
def behind_gate(
    folder: Path, keys: frozenset[bytes] | None, log: Callable[[str], None]
) -> Iterator[tuple[Any, list[str]]]:
    """Give a client of a gate, and the paths of the calls that came through to the SuperLink's place."""
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    seen: list[str] = []

    async def note(request: Request) -> Response:
        seen.append(request.url.path)
        return Response(await request.body(), headers={"flwr-echo": request.headers.get("flwr-test", "")})

    everything = Starlette(routes=[Route("/{path:path}", note, methods=["GET", "POST"])])
    with (
        temporary_folder() as private,
        serving(everything, uds=str(private / "superlink")),
        gate_before(private / "superlink", keys, log, folder / "refusals.log") as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        yield client, seen


class TestGate:
    def test_calls_of_sites_pass_unchanged(self, tmp_path: Path) -> None:
        with behind_gate(tmp_path, None, str) as (client, seen):
            answer = client.post("/v1/fleet/pull-messages", content=b"\x00body", headers={"flwr-test": "kept"})
            assert (answer.status_code, answer.content, answer.headers["flwr-echo"]) == (200, b"\x00body", "kept")
            assert seen == ["/v1/fleet/pull-messages"]

    def test_answers_and_refusals_have_the_date(self, tmp_path: Path) -> None:
        """By it a site compares its clock with the coordinator's."""
        with behind_gate(tmp_path, None, str) as (client, _):
            for answer in (client.post("/v1/fleet/pull-messages", content=b""), client.get("/")):
                said = parsedate_to_datetime(answer.headers["date"])
                assert abs((datetime.now(UTC) - said).total_seconds()) < 60

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/control/start-run",
            "/v1/control/register-node",
            "/v1/runtime/acquire-task",
            "/health",
            "/docs",
            "/v1/fleet/..%2fcontrol%2fstart-run",
            "/v1/fleet/%2e%2e",
            "/v1/fleet/../control/start-run",
            "//v1/fleet/x",
        ],
    )
    def test_nothing_else_does(self, path: str, tmp_path: Path) -> None:
        with behind_gate(tmp_path, None, str) as (client, seen):
            host, port = client.base_url.host, client.base_url.port
            # By hand, as a client would tidy the path first.
            with socket.create_connection((host, port)) as raw:
                raw.sendall(
                    f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
                )
                assert raw.recv(100).split()[1] in (b"404", b"405")
            assert seen == []

    def test_only_known_keys_come_through_and_each_refusal_is_told_once(self, tmp_path: Path) -> None:
        from base64 import b64encode

        told: list[str] = []
        with behind_gate(tmp_path, frozenset([b"known"]), told.append) as (client, seen):
            for key, status in ((b"known", 200), (b"other", 404), (b"other", 404)):
                headers = {"flwr-public-key": b64encode(key).decode()}
                assert client.post("/v1/fleet/activate-node", headers=headers).status_code == status
            for headers in ({}, {"flwr-public-key": "%%%"}):
                assert client.post("/v1/fleet/activate-node", headers=headers).status_code == 404
            assert seen == ["/v1/fleet/activate-node"]
            assert told == [f"refused a call from 127.0.0.1: {gate.UNKNOWN_KEY}."]

    def test_a_call_has_a_largest_size(self, tmp_path: Path) -> None:
        with behind_gate(tmp_path, None, str) as (client, seen):
            assert client.post("/v1/fleet/push-object", content=bytes(2**24 + 1)).status_code == 413
            assert seen == []


class Talkative:
    """A SuperNode that says these lines, at these seconds of a clock that only it moves."""

    running = True

    def __init__(self, lines: dict[float, str]) -> None:
        self.lines, self.now = dict(lines), 0.0

    def line(self, timeout: float) -> str | None:
        due = [second for second in self.lines if second <= self.now + timeout]
        self.now = max(self.now, min(due)) if due else self.now + timeout
        return self.lines.pop(min(due)) if due else None


class TestLeaving:
    """When a site may stop its SuperNode: not while an answer is on its way to the server."""

    @pytest.mark.parametrize(
        ("lines", "earliest", "latest"),
        [
            ({}, 0, 1),
            ({0: "Receiving: query", 1: "Sent successfully", 90: "Receiving: query", 91: "Sent successfully"}, 92, 95),
            ({80: "Receiving: query", 95: "Sent successfully"}, 96, 99),
            ({80: "Receiving: query", 95: "Failed to send message 7: gone"}, 95, 96),
            ({80: "Receiving: query", 95: "Run ID 3 is not in `RUNNING` status. Ignoring reply message 7."}, 95, 96),
            ({80: "Receiving: query"}, 145, 155),
        ],
    )
    def test_it_leaves_with_its_last_answer(
        self, monkeypatch: pytest.MonkeyPatch, lines: dict[float, str], earliest: float, latest: float
    ) -> None:
        child, stop_at = Talkative(lines), 90.0 if lines else 0.0
        stop = SimpleNamespace(is_set=lambda: child.now >= stop_at)
        monkeypatch.setattr(connect, "time", SimpleNamespace(monotonic=lambda: child.now))
        connect._Watch("server", None, None, str).follow(child, stop)  # type: ignore[arg-type]
        assert earliest <= child.now <= latest


class TestMistakes:
    def test_a_taken_port(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(UserError, match=r"cannot listen on .*: Address already in use"):
                flower_link(address, tmp_path, None, None, str).__enter__()

    @pytest.mark.parametrize("address", ["localhost", "127.0.0.1:x", "127.0.0.1:99999"])
    def test_an_impossible_address(self, tmp_path: Path, address: str) -> None:
        with pytest.raises(UserError, match=r"cannot listen on .*HOST:PORT"):
            flower_link(address, tmp_path, None, None, str).__enter__()

    def test_keys_without_tls(self, tmp_path: Path) -> None:
        key = Credentials(tmp_path).public("a")
        with pytest.raises(UserError, match="client keys need TLS"):
            flower_link("127.0.0.1:0", tmp_path, None, lambda: {"a": key}, str).__enter__()

    def test_missing_and_wrong_files(self, tmp_path: Path) -> None:
        credentials = Credentials(tmp_path)
        missing = tmp_path / "missing.pem"
        with pytest.raises(UserError, match=r"missing\.pem was not found"):
            flower_link("127.0.0.1:0", tmp_path, ServerTls(missing, credentials.key), None, str).__enter__()
        with pytest.raises(UserError, match="the key of a is not a public key"):
            tls = ServerTls(credentials.certificate, credentials.key)
            flower_link("127.0.0.1:0", tmp_path, tls, lambda: {"a": b"rubbish"}, str).__enter__()
        with pytest.raises(UserError, match=r"missing\.pem was not found"):
            flower_site("127.0.0.1:1", "a", bytes, tmp_path, missing, None, str)
        with pytest.raises(UserError, match="a client key needs TLS"):
            flower_site("127.0.0.1:1", "a", bytes, tmp_path, None, credentials.private("a"), str)


SITE = """
import signal, sys, time
from pathlib import Path
from feddar.federation.links.flower.connect import flower_site
from feddar.errors import UserError

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
server, name, folder, authority, key = sys.argv[1:]

def handler(message):
    if message.startswith(b"wait"):
        log("at work")
        time.sleep(float(message[4:]))
    return name.encode() + message

def log(text):
    print(text, flush=True)

try:
    flower_site(server, name, handler, Path(folder), *(Path(f) if f else None for f in (authority, key)), log)
except UserError as error:
    print("refused:", error, flush=True)
"""

SERVER = """
import sys, time
from pathlib import Path
from feddar.federation.links.flower.connect import flower_link

with flower_link(sys.argv[1], Path(sys.argv[2]), None, None, print) as link:
    while link.sites() != ["a"]:
        time.sleep(0.2)
    print([answer.content for answer in link.ask(b"!", ["a"], 60)], flush=True)
    list(link.ask(b"wait600", ["a"], 600))
"""


@contextmanager
def running(code: str, *arguments: str | Path | None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *("" if argument is None else str(argument) for argument in arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def line_of(process: subprocess.Popen[str], beginning: str) -> str:
    """Return the next line that begins so; an error where the process ends before."""
    assert process.stdout
    return next(line.strip() for line in process.stdout if line.startswith(beginning))


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of all processes with a file of theirs in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes() and process.name != str(os.getpid()):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def free_address() -> str:
    with gate.reserved_socket("127.0.0.1:0") as trial:
        return f"127.0.0.1:{trial.getsockname()[1]}"


SIMULATION = """
import sys
from functools import partial
from pathlib import Path
from feddar.federation.links.flower.simulate import simulate

def make_handler(folder, name):
    (folder / name).touch()
    return lambda message: name.encode() + message

def work(link):
    assert link.sites() == ["a", "b"]
    large = bytes(10_000_000)
    return sorted(answer.content == answer.site.encode() + large for answer in link.ask(large, ["a", "b"], 60))

if __name__ == "__main__":
    from simulation import make_handler
    print(simulate(["a", "b"], partial(make_handler, Path(sys.argv[1])), work))
"""


@pytest.mark.slow
@pytest.mark.more
def test_simulation(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "simulation.py").write_text(SIMULATION)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"HOME": str(home), "PYTHONPATH": path}
    # Not in this process: ray leaves files open, which is an error here.
    command = [sys.executable, "-m", "simulation", home]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[True, True]\n", "")
    assert sorted(file.name for file in home.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_sites_with_keys_die_return_and_others_are_kept_out(tmp_path: Path) -> None:
    credentials, stranger = Credentials(tmp_path / "keys"), Credentials(tmp_path / "stranger")
    keys = {name: credentials.public(name) for name in "ab"}
    tls = ServerTls(credentials.certificate, credentials.key)
    address, told = free_address(), list[str]()

    def site(name: str, key: Path | None) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return running(SITE, address, name, folder, credentials.authority, key)

    (tmp_path / "server").mkdir()
    with (
        flower_link(address, tmp_path / "server", tls, lambda: keys, told.append) as link,
        site("b", credentials.private("b")),
    ):
        with site("a", credentials.private("a")) as a, site("c", stranger.private("b")) as unknown:
            wait_until(lambda: link.sites() == ["a", "b"], 60)
            large = os.urandom(10_000_000)
            assert {answer.site: answer.content for answer in link.ask(large, ["a", "b"], 120)} == {
                "a": b"a" + large,
                "b": b"b" + large,
            }
            assert gate.UNKNOWN_KEY in line_of(unknown, "refused: ")
            assert told == [f"refused a call from 127.0.0.1: {gate.UNKNOWN_KEY}."]
            killer = threading.Thread(target=lambda: (line_of(a, "at work"), a.kill()))
            killer.start()
            answers = {answer.site: answer for answer in link.ask(b"wait4", ["a", "b"], 120)}
            killer.join()
            assert answers == {"a": Answer("a", problem="is no longer connected"), "b": Answer("b", b"bwait4")}
            assert link.sites() == ["b"]
        with site("a", credentials.private("a")):
            wait_until(lambda: link.sites() == ["a", "b"], 60)
            assert list(link.ask(b"again", ["a"], 60)) == [Answer("a", b"aagain")]
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trusted", "days", "key", "reason"),
    [
        ("authority", 30, None, "it asks for a client key"),
        ("stranger", 30, "a", "a certificate that is not from the authority"),
        ("authority", -1, "a", "has expired"),
    ],
)
def test_who_is_refused_is_told_why(tmp_path: Path, trusted: str, days: int, key: str | None, reason: str) -> None:
    credentials, stranger = Credentials(tmp_path / "keys", days), Credentials(tmp_path / "stranger")
    authority = (credentials if trusted == "authority" else stranger).authority
    tls, known = ServerTls(credentials.certificate, credentials.key), frozenset([credentials.public("a")])
    with (
        gate_before(tmp_path / "nobody", known, str, tmp_path / "refusals.log", tls) as port,
        pytest.raises(UserError, match=reason),
    ):
        flower_site(
            f"127.0.0.1:{port}", "a", bytes, tmp_path, authority, credentials.private(key) if key else None, str
        )


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("authority", ["keys", "stranger", None])
def test_who_has_no_valid_certificate_is_told_why(tmp_path: Path, authority: str | None) -> None:
    credentials, stranger = Credentials(tmp_path / "keys"), Credentials(tmp_path / "stranger")
    made = {"keys": credentials, "stranger": stranger}
    tls = ServerTls(credentials.certificate, credentials.key, credentials.authority)
    certificate = made[authority].certified("a")[0] if authority else None
    said, stop = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        stop.set()

    with gate_before(tmp_path / "nobody", frozenset(), str, tmp_path / "refusals.log", tls) as port:
        private, address = made[authority or "keys"].private("a"), f"127.0.0.1:{port}"
        arguments = address, "a", bytes, tmp_path, credentials.authority, private, say, stop, certificate
        if authority == "keys":
            with pytest.raises(UserError, match=gate.UNKNOWN_KEY):
                flower_site(*arguments)
        else:
            flower_site(*arguments)
            assert said == [
                f"{address} is there and takes no calls; if it stays so, ask if this site's key is still valid."
            ]


SKEWED = """
import datetime, sys
from pathlib import Path
from flwr.supernode import node_auth_http_interceptor as signing
from feddar.federation.links.flower import internals

right = signing.now
ahead = datetime.timedelta(seconds=float(sys.argv.pop(1)))
signing.now = lambda: right() + ahead
certificate, key = map(Path, sys.argv[1:3])
del sys.argv[1:3]
internals.run_supernode(certificate, key)
"""


@pytest.mark.slow
def test_clocks_that_differ_are_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the clock of the signatures can be changed here, and that by which the site compares."""

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=10)

    credentials, address = Credentials(tmp_path / "keys"), free_address()
    (tmp_path / "skewed.py").write_text(SKEWED)
    skewed = [sys.executable, str(tmp_path / "skewed.py"), "10"]
    tls = ServerTls(credentials.certificate, credentials.key, credentials.authority)
    keys, certificate = {"a": credentials.public("a")}, credentials.certified("a")[0]
    about = (credentials.authority, credentials.private("a"), str, None, certificate)
    with flower_link(address, tmp_path / "server", tls, lambda: keys, str):
        monkeypatch.setattr(connect, "variant", lambda _, *arguments: [*skewed, *map(str, arguments)])
        monkeypatch.setattr(connect, "datetime", Skewed)
        with pytest.raises(UserError, match=rf"here is 1\d seconds ahead of that of {address}.*set both clocks"):
            flower_site(address, "a", bytes, tmp_path / "a", *about)


def test_a_certificate_that_is_not_valid_yet_is_a_matter_of_clocks(tmp_path: Path) -> None:
    said = ["ssl.SSLError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid"]
    watch = connect._Watch("fl.example.org:9092", tmp_path / "ca.pem", tmp_path / "client.key", str)
    with pytest.raises(UserError, match=r"is not valid yet, and the clock here says .* UTC: compare that clock"):
        watch.pause(said)


@pytest.mark.slow
@pytest.mark.more
def test_a_killed_server_leaves_nothing_and_its_sites_find_the_next(tmp_path: Path) -> None:
    address = free_address()
    for name in ("site", "server"):
        (tmp_path / name).mkdir()
    with running(SITE, address, "a", tmp_path / "site", None, None) as site:
        with running(SERVER, address, tmp_path / "server") as server:
            assert line_of(server, "[") == "[b'a!']"
            server.kill()
            wait_until(lambda: processes_of(tmp_path / "server") == [], 30)
        with running(SERVER, address, tmp_path / "server") as server:
            assert line_of(server, "[") == "[b'a!']"
        site.send_signal(signal.SIGKILL)
        wait_until(lambda: processes_of(tmp_path) == [], 30)
