"""Somebody who gets hold of the files of keys, from a backup for example, and not of their passphrase."""

import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import pytest

from feddar.errors import UserError
from feddar.federation.links.flower.connect import flower_link, flower_site
from feddar.federation.links.flower.gate import ServerTls, reserved_socket
from feddar.federation.links.flower.gatekeeper import Gatekeeper
from feddar.federation.links.flower.programs import free_port
from feddar.federation.private_folder import temporary_folder
from feddar.federation.security.keys import check_client_files, check_server_files, load_clients, make_keys
from feddar.federation.security.passphrase import VARIABLE, Passphrase
from helpers.command import feddar
from helpers.gates import gates

PHRASE = "läuft gut, 3 times"


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, PHRASE)
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"], protect=True)
    return tmp_path / "keys"


def plain_keys(folder):
    """Return the files under a folder that have a private key without a passphrase in them."""
    marks = (b"BEGIN PRIVATE KEY", b"BEGIN OPENSSH PRIVATE KEY", b"BEGIN EC PRIVATE KEY")
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return [path for path in files if any(mark in path.read_bytes() for mark in marks)]


def test_every_key_that_was_made_needs_the_passphrase(keys, monkeypatch):
    assert plain_keys(keys) == []
    assert check_server_files(keys / "server").passphrase == check_client_files(keys / "clients" / "a").passphrase
    assert PHRASE not in repr(check_server_files(keys / "server"))
    monkeypatch.setenv(VARIABLE, "guessed")
    for check, place in ((check_server_files, keys / "server"), (check_client_files, keys / "clients" / "a")):
        with pytest.raises(UserError, match=r"that is not the passphrase of .*\.key"):
            check(place)
    with pytest.raises(UserError, match=r"that is not the passphrase of .*ca\.key"):
        make_keys(keys, clients=["b"])
    assert not (keys / "clients" / "b").exists()


def test_a_command_without_a_terminal_says_where_to_put_it(keys, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(sys, "stdin", StringIO())
    said = feddar("keys", "keys", "--client", "b", cwd=tmp_path, code=2)
    assert f"ca.key has a passphrase: put it into {VARIABLE}, or name a file" in said
    said = feddar("keys", "mine", "--request", "b", "--passphrase", cwd=tmp_path, code=2)
    assert "--passphrase asks for one" in said
    assert not (tmp_path / "mine").exists()


def test_a_file_with_the_passphrase_must_be_ones_own(keys, tmp_path):
    file = tmp_path / "phrase"
    file.touch(0o600)
    with pytest.raises(UserError, match="phrase is empty"):
        check_server_files(keys / "server", passphrase=Passphrase(file))
    file.write_text(f"{PHRASE}\n")
    assert check_server_files(keys / "server", passphrase=Passphrase(file)).passphrase == PHRASE.encode()
    file.chmod(0o644)
    with pytest.raises(UserError, match="others can read it: chmod 600"):
        check_server_files(keys / "server", passphrase=Passphrase(file))
    with pytest.raises(UserError, match="cannot read the passphrase in"):
        check_server_files(keys / "server", passphrase=Passphrase(tmp_path / "absent"))
    feddar("keys", "mine", "--request", "b", "--passphrase-file", "phrase2", cwd=tmp_path, code=2)
    file.chmod(0o600)
    feddar("keys", "mine", "--request", "b", "--passphrase-file", "phrase", cwd=tmp_path)
    assert plain_keys(tmp_path / "mine") == []


@pytest.mark.parametrize(("typed", "made"), [(["one", "one"], True), (["one", "two"], False), (["", ""], False)])
def test_a_passphrase_is_asked_for_twice_at_the_terminal(tmp_path, typed, made):
    here, there = pty.openpty()
    command = [sys.executable, "-m", "feddar.cli", "keys", "mine", "--request", "b", "--passphrase"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=there, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        for line in typed:
            asked = b""
            while not asked.endswith(b": ") and (letter := process.stderr.read(1)):
                asked += letter
            os.write(here, f"{line}\n".encode())  # what is typed before the question is dropped
        process.stderr.read()
    os.close(here)
    os.close(there)
    assert process.returncode == (0 if made else 2)
    assert (tmp_path / "mine" / "client.key").exists() == made
    assert plain_keys(tmp_path) == []


def test_ssh_keygen_gives_a_key_another_passphrase(keys, monkeypatch):
    path = keys / "clients" / "a" / "client.key"
    change = ["ssh-keygen", "-q", "-p", "-m", "PKCS8", "-f", path, "-P", PHRASE, "-N", "another"]
    try:
        subprocess.run(change, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no ssh-keygen here")
    monkeypatch.setenv(VARIABLE, "another")
    assert check_client_files(path.parent).passphrase == b"another"


def test_the_gate_gets_the_passphrase_by_a_pipe_each_time_it_is_opened(keys, tmp_path, monkeypatch):
    server = check_server_files(keys / "server")
    monkeypatch.delenv(VARIABLE)
    tls = ServerTls(server.certificate, server.key, passphrase=server.passphrase)
    trusting = ssl.create_default_context(cafile=server.ca)
    with temporary_folder() as private, reserved_socket("127.0.0.1:0") as reserved:

        def encrypted():
            with (
                socket.create_connection(reserved.getsockname(), 20) as plain,
                trusting.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                return connection.version() is not None

        with Gatekeeper(reserved, private / "superlink", tls, None, tmp_path, private, lambda _: None):
            (first,) = gates(tmp_path)
            assert encrypted()
            files = [path for folder in (private, tmp_path) for path in folder.rglob("*") if path.is_file()]
            told = [Path("/proc", str(first), name).read_bytes() for name in ("cmdline", "environ")]
            for each in (*told, *(path.read_bytes() for path in files)):
                assert PHRASE.encode() not in each and PHRASE.encode().hex().encode() not in each
            os.kill(first, signal.SIGKILL)
            while gates(tmp_path) in ([], [first]):
                time.sleep(0.05)
            assert encrypted()


def test_a_server_without_the_passphrase_says_so_and_asks_nobody(keys):
    server = check_server_files(keys / "server")
    for wrong in (None, b"guessed"):
        with pytest.raises(UserError, match="cannot use the server's certificate and key"):
            ServerTls(server.certificate, server.key, passphrase=wrong).context()


@pytest.mark.slow
def test_keys_with_passphrases_connect_and_are_never_on_the_disk_without(keys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server, client = check_server_files(keys / "server"), check_client_files(keys / "clients" / "a")
    known = {name: each.public_key for name, each in load_clients(keys / "server" / "clients", server.ca).items()}
    address, stop = f"127.0.0.1:{free_port()}", threading.Event()
    tls = ServerTls(server.certificate, server.key, server.ca, server.passphrase)

    def take_part():
        about = (tmp_path / "a", client.ca, client.key, lambda _: None, stop, client.certificate, client.openssh_key())
        flower_site(address, "a", lambda message: message[::-1], *about)

    with flower_link(address, tmp_path / "server", tls, lambda: known, lambda _: None) as link:
        site = threading.Thread(target=take_part, daemon=True)
        site.start()
        while link.sites() != ["a"]:
            stop.wait(0.2)
        assert [answer.content for answer in link.ask(b"abc", ["a"], 60)] == [b"cba"]
        assert plain_keys(keys) == plain_keys(tmp_path / "a") == plain_keys(tmp_path / "server") == []
        stop.set()
        site.join(60)
