"""Strangers at the coordinator's door: idle connections, endless headers, bodies that never end, borrowed keys."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from feddar.errors import UserError
from feddar.federation.links.flower import connect, gate, gatekeeper, internals
from feddar.federation.links.flower.gate import Limits, ServerTls, reserved_socket
from feddar.federation.links.flower.gatekeeper import Gatekeeper, KeysIn, KnownKeys
from feddar.federation.private_folder import temporary_folder
from helpers.credentials import Credentials
from helpers.gates import gate_before, gates, serving
from helpers.intruder import CALL, Intruder

SMALL = Limits(strangers=10, connections=5, headers=2**12, body=2**16, memory=2**17, silence=1.0, farewell=0.2)


class Door:
    """A gate with TLS before something that counts the calls which come through; ``a`` and ``b`` are known sites."""

    def __init__(self, folder: Path, credentials: Credentials, port: int, passed: list[int], told: list[str]) -> None:
        self.folder, self.credentials, self.port, self.passed, self.told = folder, credentials, port, passed, told
        self.stranger = Intruder(port)

    def call(
        self, name: str = "a", key: str | None = None, certified: bool = True, size: int = 5, patience: float = 20
    ) -> int:
        """Return the status of a call with a site's certificate and key, or with another's key."""
        trust = ssl.create_default_context(cafile=self.credentials.authority)
        if certified:
            trust.load_cert_chain(*self.credentials.certified(name))
        headers = {"flwr-public-key": b64encode(self.credentials.in_header(key or name)).decode()}
        with httpx.Client(verify=trust, trust_env=False, timeout=patience) as client:
            return client.post(f"https://127.0.0.1:{self.port}{CALL}", content=bytes(size), headers=headers).status_code

    def insider(self, name: str = "b") -> Intruder:
        """Return somebody with the certificate of a known site."""
        return Intruder(self.port, True, *self.credentials.certified(name))

    def refusals(self, reason: str) -> int:
        """Return how many refusals for this reason are written down, each with its time and address."""
        text = (self.folder / "refusals.log").read_text() if (self.folder / "refusals.log").exists() else ""
        line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} refused a call from 127\.0\.0\.1: " + reason
        return len(re.findall(line, text))


def echo(passed: list[int]) -> Starlette:
    """Return what stands in the SuperLink's place: it takes every call, and notes its size."""

    async def take(request: Request) -> Response:
        passed.append(len(await request.body()))
        return Response(b"taken")

    return Starlette(routes=[Route("/{path:path}", take, methods=["POST"])])


@contextmanager
def door(folder: Path, limits: Limits = SMALL, mutual: bool = True) -> Iterator[Door]:
    credentials, passed, told = Credentials(folder / "keys"), list[int](), list[str]()
    tls = ServerTls(credentials.certificate, credentials.key, credentials.authority if mutual else None)
    known = frozenset(credentials.in_header(name) for name in "ab")
    with (
        temporary_folder() as private,
        serving(echo(passed), uds=str(private / "superlink")),
        gate_before(private / "superlink", known, told.append, folder / "refusals.log", tls, limits) as port,
    ):
        yield Door(folder, credentials, port, passed, told)


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def open_ones(connections: list[Any]) -> int:
    """Return how many of these connections the other side has not closed."""
    still = 0
    for connection in connections:
        connection.settimeout(0.01)
        try:
            still += connection.recv(1) != b""
        except TimeoutError:
            still += 1
        except OSError:
            pass
    return still


@pytest.mark.parametrize(
    ("mutual", "tls", "reasons"),
    [
        (True, True, ["no encrypted connection"]),
        (False, True, ["there are too many connections without a known key", "no whole call came within 1 seconds"]),
        (True, False, ["there are too many connections without a known key", "no encrypted connection within 1 sec"]),
    ],
)
def test_idle_connections_are_closed_and_sites_come_through(
    tmp_path: Path, mutual: bool, tls: bool, reasons: list[str]
) -> None:
    with door(tmp_path, mutual=mutual) as there, Intruder(there.port, tls).idle(60) as held:
        assert [there.call(name) for name in "ab"] == [200, 200]
        assert open_ones(held) <= SMALL.strangers
        eventually(lambda: open_ones(held) == 0)
        assert all(there.refusals(reason) for reason in reasons)
        eventually(lambda: sum(there.refusals(reason) for reason in reasons) == 60)
        assert len(there.told) == len(reasons)


def test_one_site_can_take_the_connections_of_itself_only(tmp_path: Path) -> None:
    with door(tmp_path) as there, there.insider("b").idle(30) as held:
        assert [there.call(name) for name in "aab"] == [200, 200, 200]
        eventually(lambda: open_ones(held) == 0)
        assert there.refusals("there are too many connections") >= 20


@pytest.mark.parametrize("attack", ["short_headers", "long_header"])
def test_headers_have_an_end(tmp_path: Path, attack: str) -> None:
    with door(tmp_path) as there:
        taken = getattr(there.insider("b"), attack)(50_000_000)
        assert taken < 20_000_000  # what fits into the buffers of the two sockets
        eventually(lambda: there.refusals(f"headers of more than {SMALL.headers} bytes") == 1)
        assert there.call() == 200


def test_headers_that_come_byte_by_byte_have_an_end(tmp_path: Path) -> None:
    with door(tmp_path, mutual=False) as there, there.stranger.connect() as connection:
        begun = time.monotonic()
        with pytest.raises(OSError, match=r"EOF|reset|pipe"):
            while time.monotonic() < begun + 30:
                connection.sendall(b"P")
                time.sleep(0.1)
        eventually(lambda: there.refusals("no whole call came within 1 seconds") == 1)
        assert there.call() == 200


def test_bodies_that_never_end_take_the_memory_of_their_key_only(tmp_path: Path) -> None:
    size = SMALL.body
    with door(tmp_path, replace(SMALL, silence=60)) as there:
        with there.insider("b").held_bodies(4, there.credentials.in_header("b"), size) as taken:
            assert taken == 4 * (size - 1)  # two of them are in the buffers of sockets
            assert there.call("a", size=size) == 200
            with pytest.raises(httpx.TimeoutException):
                there.call("b", size=size, patience=1)
        assert there.call("b", size=size) == 200
        assert set(there.passed) == {size}


def test_a_body_is_given_up_when_no_more_of_it_comes(tmp_path: Path) -> None:
    with (
        door(tmp_path) as there,
        there.insider("b").held_bodies(2, there.credentials.in_header("b"), SMALL.body) as taken,
    ):
        assert taken
        assert there.call("b", size=SMALL.body) == 200  # waits until the two are given up
        eventually(lambda: there.refusals("no whole call came within 1 seconds") == 2)


def test_who_has_no_certificate_of_the_authority_says_nothing(tmp_path: Path) -> None:
    request = f"POST {CALL} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    other = Credentials(tmp_path / "others")
    with door(tmp_path) as there:
        assert there.stranger.answer(request) == b""
        eventually(lambda: there.refusals(r"no encrypted connection \(peer did not return a certificate\)") == 1)
        assert Intruder(there.port, True, *other.certified("a")).answer(request) == b""
        eventually(lambda: there.refusals("no encrypted connection") == 2)
        assert Intruder(there.port, tls=False).answer(request) == b""
        eventually(lambda: there.refusals("no encrypted connection") == 3)
        assert there.passed == []


def test_a_key_is_not_lent(tmp_path: Path) -> None:
    with door(tmp_path) as there:
        assert there.call("a", key="b") == 404
        assert there.call("c") == 404  # certified, but not of this study
        assert there.refusals(gate.UNKNOWN_KEY) == 2
        assert there.passed == []
        assert there.call("a") == 200


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n{a}",
        "Transfer-Encoding: chunked\r\n{a}",
        "Content-Length: 5\r\n{a}{b}",
        "Content-Length: 5\r\n{b}{a}",
        "Content-Length: 70000\r\n{a}",
        "Content-Length: -5\r\n{a}",
        "Content-Length: 5\r\nContent-Length: 6\r\n{a}",
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(tmp_path: Path, headers: str) -> None:
    with door(tmp_path, mutual=False) as there:
        keys = {name: f"flwr-public-key: {b64encode(there.credentials.in_header(name)).decode()}\r\n" for name in "ab"}
        text = f"POST {CALL} HTTP/1.1\r\nHost: x\r\n{headers.format(**keys)}\r\n5\r\nabcde\r\n0\r\n\r\n"
        answer = there.stranger.answer(text.encode())
        assert answer == b"" or answer.split()[1] in (b"404", b"413")
        assert there.passed == []
        assert there.call("a", certified=False) == 200


class Kept:
    """A gate in its own process, whose sites' keys can be changed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.credentials = folder, Credentials(folder / "keys")
        self.registered, self.told, self.names = list[str](), list[str](), ["a"]
        monkeypatch.setattr(internals, "register", lambda _, keys: self.registered.extend(keys))
        monkeypatch.setattr(gatekeeper, "_FRESH", 0.2)

    def keys(self) -> dict[str, bytes]:
        if not self.names:
            raise UserError("there is no folder with keys.")
        return {name: self.credentials.public(name) for name in self.names}

    @contextmanager
    def opened(self) -> Iterator[Door]:
        passed = list[int]()
        made = self.credentials
        tls = ServerTls(made.certificate, made.key, made.authority)
        with (
            temporary_folder() as private,
            serving(echo(passed), uds=str(private / "superlink")),
            reserved_socket("127.0.0.1:0") as reserved,
        ):
            keys = KnownKeys(self.keys, private / "superlink", private / "keys.json")
            with Gatekeeper(reserved, private / "superlink", tls, keys, self.folder, private, self.told.append):
                yield Door(self.folder, made, reserved.getsockname()[1], passed, self.told)


def test_keys_come_and_go_while_the_gate_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, monkeypatch)
    with kept.opened() as there:
        assert [there.call("a"), there.call("b")] == [200, 404]
        kept.names = ["a", "b"]
        eventually(lambda: there.call("b") == 200)
        kept.names = []  # which is an error, that is told once; until it is mended all stays as it was
        eventually(lambda: "there is no folder with keys." in kept.told)
        kept.names = ["b"]
        eventually(lambda: there.call("a") == 404)
        assert there.call("b") == 200
        assert kept.registered == ["a", "b"]
        assert kept.told.count("there is no folder with keys.") == 1
        assert kept.told.count(f"refused a call from 127.0.0.1: {gate.UNKNOWN_KEY}.") == 1
        assert there.refusals(gate.UNKNOWN_KEY) >= 2
    assert gates(tmp_path) == []


def test_a_gate_that_is_killed_opens_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, monkeypatch)
    with kept.opened() as there:
        (process,) = gates(tmp_path)
        os.kill(process, signal.SIGKILL)
        eventually(lambda: gates(tmp_path) not in ([], [process]))
        assert there.call("a") == 200
        assert kept.told == ["the gate ended unexpectedly, and is open again."]


def test_the_file_of_keys_is_read_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(["one"]))
    keys = KeysIn(file)
    assert keys() == {b"one"}
    file.write_text(json.dumps(["two"]))
    os.utime(file, ns=(1, 1))
    assert keys() == {b"two"}


def test_the_log_of_refusals_does_not_fill_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(gate.Refusals, "_BYTES", 2**14)
    written = gate.Refusals(tmp_path / "refusals.log", told.append)
    for number in range(1100):
        written(f"10.0.{number // 256}.{number % 256}", "no whole call came within 30 seconds")
    written.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2**15 + 2**10
    assert len(told) == 1000


def test_a_site_that_looks_whether_the_coordinator_is_there_is_no_stranger(tmp_path: Path) -> None:
    said: list[str] = []
    with door(tmp_path) as there:
        certificate, _ = there.credentials.certified("a")
        key = there.credentials.private("a")
        server = f"127.0.0.1:{there.port}"
        connect._Watch(server, there.credentials.authority, key, said.append, certificate)._explain_silence()
        with suppress(OSError):
            there.stranger.connect().close()
        eventually(lambda: there.refusals("no encrypted connection") > 0)
        assert there.call() == 200
        assert there.refusals("") == 1
    assert said[0].startswith(f"{server} is there and takes no calls")
