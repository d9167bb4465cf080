"""Keys of a federation: what TLS libraries and Flower make of them, who may read them, and what is refused."""

import errno
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

import feddar.federation.security
from feddar.errors import UserError
from feddar.federation.security import certificates
from feddar.federation.security.keys import (
    check_client_files,
    check_server_files,
    load_clients,
    make_keys,
    request_certificate,
)
from helpers.command import feddar as command

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder, ["fl.example.org", "192.0.2.7"], ["north", "south"], now=NOW)
    return folder


def certificate_in(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def clients_of(keys, now=NOW, **options):
    return load_clients(keys / "server" / "clients", keys / "server" / "ca.pem", now, **options)


# What others make of the certificates


@pytest.mark.parametrize("host", ["fl.example.org", "192.0.2.7", "localhost", "127.0.0.1"])
def test_the_server_is_verified_under_each_of_its_names_and_no_other(keys, host):
    def verify(name, ca=keys / "ca.pem", now=NOW):
        subject = x509.IPAddress(ip_address(name)) if name[0].isdigit() else x509.DNSName(name)
        builder = PolicyBuilder().store(Store([certificate_in(ca)])).time(now)
        return builder.build_server_verifier(subject).verify(certificate_in(keys / "server" / "server.pem"), [])

    assert len(verify(host)) == 2
    make_keys(keys.with_name("other"), ["fl.example.org"], now=NOW)
    for wrong in ({"ca": keys.with_name("other") / "ca.pem"}, {"now": NOW + 366 * DAY}, {"now": NOW - DAY}):
        with pytest.raises(VerificationError):
            verify(host, **wrong)
    with pytest.raises(VerificationError):
        verify("other.example.org")


def test_clients_are_verified_as_clients_and_not_as_servers(keys):
    # A site is no host on the network, so its certificate has no name of one.
    policy = ExtensionPolicy.webpki_defaults_ee().may_be_present(
        x509.SubjectAlternativeName, Criticality.AGNOSTIC, lambda *_: None
    )
    builder = PolicyBuilder().store(Store([certificate_in(keys / "ca.pem")])).time(NOW)
    builder = builder.extension_policies(ca_policy=ExtensionPolicy.webpki_defaults_ca(), ee_policy=policy)
    verifier = builder.build_client_verifier()
    assert len(verifier.verify(certificate_in(keys / "clients" / "north" / "client.pem"), []).chain) == 2
    with pytest.raises(VerificationError):
        verifier.verify(certificate_in(keys / "server" / "server.pem"), [])


def handshake(server, ca, host):
    """Connect over TLS on loopback, as strictly as Python can; return what was said, or raise the client's error."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(server / "server.pem", server / "server.key")
    theirs = ssl.create_default_context(cafile=ca)
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT

    def serve(listener):
        connection, _ = listener.accept()
        try:
            with ours.wrap_socket(connection, server_side=True) as secure:
                secure.sendall(b"welcome")
        except OSError:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=10) as plain,
                theirs.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return secure.recv(100)
        finally:
            thread.join()


def test_tls_takes_the_right_authority_name_and_time_only(tmp_path):
    good, other, old = tmp_path / "good", tmp_path / "other", tmp_path / "old"
    for folder in (good, other):
        make_keys(folder, ["fl.example.org"], ["north"])
    make_keys(old, ["fl.example.org"], ["north"], days=30, now=datetime.now(UTC) - 31 * DAY)
    ca = good / "clients" / "north" / "ca.pem"
    assert handshake(good / "server", ca, "fl.example.org") == b"welcome"
    assert handshake(good / "server", ca, "127.0.0.1") == b"welcome"
    for server, root, host, reason in (
        (good, other / "ca.pem", "fl.example.org", "unable to get local issuer|self.signed"),
        (good, ca, "elsewhere.example.org", "Hostname mismatch"),
        (old, old / "ca.pem", "fl.example.org", "expired"),
    ):
        with pytest.raises(ssl.SSLCertVerificationError, match=reason):
            handshake(server / "server", root, host)


def test_grpc_takes_them(tmp_path):
    grpc = pytest.importorskip("grpc")
    make_keys(tmp_path / "keys", ["fl.example.org"], ["north"])
    make_keys(tmp_path / "other", ["fl.example.org"])
    place = tmp_path / "keys" / "server"
    pair = [(place / "server.key").read_bytes(), (place / "server.pem").read_bytes()]
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        for folder, works in (("keys", True), ("other", False)):
            credentials = grpc.ssl_channel_credentials((tmp_path / folder / "ca.pem").read_bytes())
            with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                ready = grpc.channel_ready_future(channel)
                if works:
                    ready.result(timeout=20)
                else:
                    with pytest.raises(grpc.FutureTimeoutError):
                        ready.result(timeout=1)
                ready.cancel()
    finally:
        server.stop(None).wait()


def test_flower_reads_the_keys_of_clients(keys):
    flower = pytest.importorskip("flwr.supercore.primitives.asymmetric")
    from flwr.cli.supernode.register import try_load_public_key

    client = clients_of(keys)["north"]
    # as a SuperNode does
    private = load_ssh_private_key((keys / "clients" / "north" / "client.key").read_bytes(), None)
    assert isinstance(private.curve, ec.SECP384R1)
    (keys / "north.pub").write_bytes(client.public_key)
    assert try_load_public_key(keys / "north.pub") == flower.public_key_to_bytes(private.public_key())


# Files


def test_everything_is_private_from_its_first_moment(tmp_path, monkeypatch):
    link, seen = os.link, []

    def look(source, target):
        seen.append(stat.S_IMODE(Path(source).stat().st_mode))
        link(source, target)

    monkeypatch.setattr(os, "link", look)
    before = os.umask(0)
    try:
        make_keys(tmp_path / "deep" / "keys", ["fl.example.org"], ["north"])
        request_certificate(tmp_path / "site", "south")
    finally:
        os.umask(before)
    paths = [*(tmp_path / "deep").rglob("*"), tmp_path / "site", *(tmp_path / "site").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600} == set(seen)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    names = {str(path.relative_to(tmp_path / "deep" / "keys")) for path in paths[1:] if "site" not in path.parts}
    assert names == {
        "ca.pem", "ca.key", "server", "server/ca.pem", "server/server.pem", "server/server.key", "server/clients",
        "server/clients/north.pem", "clients", "clients/north", "clients/north/ca.pem", "clients/north/client.pem",
        "clients/north/client.key",
    }  # fmt: skip


@pytest.mark.parametrize("written", range(9))
def test_a_full_disk_leaves_no_half_of_a_file_and_the_next_call_goes_on(tmp_path, monkeypatch, written):
    whole, sync = [], os.fsync

    def full(file):
        if len(whole) == written:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole.append(file)
        sync(file)

    folder = tmp_path / "keys"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left"):
            make_keys(folder, ["fl.example.org"], ["north"])
    assert len(contents(folder)) == written
    assert all(b"-----END" in content for content in contents(folder).values())
    for name in ("client.key", "client.pem"):
        (folder / "clients" / "north" / name).unlink(missing_ok=True)  # as the next call says
    make_keys(folder, ["fl.example.org"], ["north"])
    check_server_files(folder / "server")
    check_client_files(folder / "clients" / "north")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_clients_are_added_and_nothing_is_overwritten(keys):
    before = contents(keys)
    make_keys(keys, clients=["east"], now=NOW + 5 * DAY)
    assert contents(keys).items() >= before.items()
    assert list(clients_of(keys, NOW + 6 * DAY)) == ["east", "north", "south"]
    before = contents(keys)
    with pytest.raises(
        UserError, match=r"south has a key already.* delete .*south\.pem, .*south/client\.key, .*/client\.pem,"
    ):
        make_keys(keys, clients=["west", "south"], now=NOW)
    with pytest.raises(UserError, match=r"is not for other\.org: delete it"):
        make_keys(keys, ["other.org"], ["west"], now=NOW)
    with pytest.raises(UserError, match="west is named twice"):
        make_keys(keys, clients=["west", "west"], now=NOW)
    assert contents(keys) == before


def test_a_client_is_replaced_once_its_files_are_deleted(keys):
    old = clients_of(keys)["north"]
    (keys / "server" / "clients" / "north.pem").unlink()
    assert list(clients_of(keys)) == ["south"]
    with pytest.raises(UserError, match=r"north has a key already.* delete .*north/client\.key, .*client\.pem,"):
        make_keys(keys, clients=["north"], now=NOW)
    for name in ("client.key", "client.pem"):
        (keys / "clients" / "north" / name).unlink()
    make_keys(keys, clients=["north"], now=NOW)
    check_client_files(keys / "clients" / "north", NOW)
    assert clients_of(keys)["north"].public_key != old.public_key


def test_a_deleted_server_certificate_is_made_anew_for_the_same_key(keys):
    key = (keys / "server" / "server.key").read_bytes()
    (keys / "server" / "server.pem").unlink()
    make_keys(keys, ["new.example.org"], days=7, now=NOW + 400 * DAY)
    assert (keys / "server" / "server.key").read_bytes() == key
    assert check_server_files(keys / "server", NOW + 401 * DAY).not_after == NOW + 407 * DAY


def test_no_certificate_outlives_its_authority(keys):
    make_keys(keys, clients=["late"], days=3650, now=NOW + 300 * DAY)
    end = certificate_in(keys / "ca.pem").not_valid_after_utc
    assert clients_of(keys, NOW + 301 * DAY)["late"].not_after == end
    with pytest.raises(UserError, match=r"ca\.pem expired on .*: make all keys of this federation anew"):
        make_keys(keys, clients=["later"], now=end + DAY)


def test_a_server_s_certificate_that_no_longer_counts_is_named_when_adding(keys):
    with pytest.raises(UserError, match=r"server\.pem expired on .*: delete it, and run this again with --server"):
        make_keys(keys, clients=["east"], now=NOW + 366 * DAY)
    for name in ("ca.pem", "ca.key"):
        (keys / name).unlink()
    with pytest.raises(UserError, match=r"server/ca\.pem is not the authority"):
        make_keys(keys, clients=["east"], now=NOW)
    (keys / "server" / "ca.pem").unlink()
    with pytest.raises(UserError, match=r"server\.pem was signed by another authority .*: delete it"):
        make_keys(keys, clients=["east"], now=NOW)


def test_without_the_authority_s_own_key_nothing_is_signed(keys, tmp_path):
    make_keys(tmp_path / "other", ["fl.example.org"], now=NOW)
    (keys / "ca.key").unlink()
    with pytest.raises(UserError, match=r"ca\.key, which signs certificates, is missing"):
        make_keys(keys, clients=["east"], now=NOW)
    shutil.copy(tmp_path / "other" / "ca.key", keys / "ca.key")
    with pytest.raises(UserError, match=r"ca\.key is not the key of .*ca\.pem"):
        make_keys(keys, clients=["east"], now=NOW)


# A site's own key


def test_a_site_s_own_key_never_leaves_it(keys, tmp_path):
    site = tmp_path / "site"
    asked = request_certificate(site, "west")
    key = (site / "client.key").read_bytes()
    made = make_keys(keys, requests=[site / "client.csr"], now=NOW)
    handed = keys / "clients" / "west"
    assert {path.name for path in handed.iterdir()} == {"ca.pem", "client.pem"}
    for path in handed.iterdir():
        shutil.copy(path, site)
    files = check_client_files(site, NOW)
    assert (files.name, files.key) == ("west", site / "client.key")
    assert made.signed == (clients_of(keys)["west"],)
    assert made.signed[0].fingerprint == asked.fingerprint
    with pytest.raises(UserError, match=r"client\.csr exists, and is never overwritten"):
        request_certificate(site, "west")
    assert (site / "client.key").read_bytes() == key
    with pytest.raises(UserError, match="west has a key already"):
        make_keys(keys, requests=[site / "client.csr"], now=NOW)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"nonsense", "is not a request"),
        (certificates.new_request(ec.generate_private_key(ec.SECP256R1()), "west"), "is not a request"),
        (certificates.new_request(rsa.generate_private_key(65537, 2048), "west"), "is not a request"),
        (certificates.new_request(certificates.new_key(), "../west"), "cannot be the name of a client"),
    ],
    ids=["nonsense", "other curve", "RSA", "path"],
)
def test_bad_requests_are_refused(keys, content, reason):
    (keys / "bad.csr").write_bytes(content)
    before = contents(keys)
    with pytest.raises(UserError, match=reason):
        make_keys(keys, requests=[keys / "bad.csr"], now=NOW)
    assert contents(keys) == before


def test_a_request_whose_signature_is_another_s_is_refused(keys):
    request = x509.load_pem_x509_csr(certificates.new_request(certificates.new_key(), "west"))
    der = bytearray(request.public_bytes(certificates.serialization.Encoding.DER))
    place = der.find(b"west")
    der[place : place + 4] = b"east"
    forged = x509.load_der_x509_csr(bytes(der))
    (keys / "forged.csr").write_bytes(certificates.to_pem(forged))
    with pytest.raises(UserError, match="is not a request"):
        make_keys(keys, requests=[keys / "forged.csr"], now=NOW)


# Names


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", ".a", "-a", "a.", "a b", "a\n", "é", "a" * 65])
def test_bad_names_of_clients_are_refused(tmp_path, name):
    for make in (lambda: make_keys(tmp_path, ["a.org"], [name]), lambda: request_certificate(tmp_path, name)):
        with pytest.raises(UserError, match="cannot be the name of a client"):
            make()
    assert not list(tmp_path.iterdir())


def test_good_names_of_clients_are_taken(tmp_path):
    names = ["a", "Hospital-3", "st.mary_2", "0", "x" * 64]
    make_keys(tmp_path, ["a.org"], names, now=NOW)
    assert set(clients_of(tmp_path)) == set(names)


@pytest.mark.parametrize("host", ["", "a.org:9092", "https://a.org", "*.a.org", "a b", "[::1]", "ä.org", "a..org"])
def test_bad_hosts_are_refused(tmp_path, host):
    with pytest.raises(UserError, match="is not a server's name or IP address"):
        make_keys(tmp_path, [host])
    assert not list(tmp_path.iterdir())


def test_hosts_are_compared_as_certificates_have_them(tmp_path):
    for _ in range(2):
        made = make_keys(tmp_path, ["2001:DB8::0:1", "FL.example.org"])
    assert made.hosts == ("2001:db8::1", "fl.example.org", "localhost", "127.0.0.1")
    assert "--listen [2001:db8::1]:9092" in made.summary()


# Loading


def test_clients_are_loaded_with_their_key_and_dates(keys):
    loaded = clients_of(keys)
    assert list(loaded) == ["north", "south"]
    north = loaded["north"]
    assert north.not_after == NOW + 365 * DAY
    assert north.public_key != loaded["south"].public_key
    assert not north.problem_at(NOW)
    assert not north.problem_at(NOW - timedelta(minutes=59))
    assert north.problem_at(NOW - timedelta(minutes=61)).startswith("is not valid before 2030-05-01 11:00 UTC")
    assert north.problem_at(NOW + 366 * DAY) == "expired on 2031-05-01 12:00 UTC"


def spoiled(keys):
    """Return what the certificate of north could be instead, by what is wrong with it."""
    ca, clients = certificate_in(keys / "ca.pem"), keys / "server" / "clients"
    authority = certificates.Authority(ca, certificates.key_from_bytes((keys / "ca.key").read_bytes(), "pkcs8"))
    own = certificates.new_key()
    key, weak = certificates.new_key().public_key(), ec.generate_private_key(ec.SECP256R1()).public_key()
    twin = certificate_in(clients / "east.pem").public_key()
    return {
        "expired": authority.for_client(key, "north", NOW - 9 * DAY, 8),
        "early": authority.for_client(key, "north", NOW + DAY, 8),
        "other": certificates.Authority(certificates.new_authority(own, NOW), own).for_client(key, "north", NOW, 8),
        "forged": certificates.Authority(ca, own).for_client(key, "north", NOW, 8),
        "nonsense": b"nonsense",
        "empty": b"",
        "name": (clients / "south.pem").read_bytes(),
        "server": (keys / "server" / "server.pem").read_bytes(),
        "authority": (keys / "ca.pem").read_bytes(),
        "curve": authority.for_client(weak, "north", NOW, 8),
        "twin": authority.for_client(twin, "north", NOW, 8),
    }


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("expired", "expired on 2030-04-30 12:00 UTC"),
        ("early", "is not valid before 2030-05-02 11:00 UTC"),
        ("other", "was signed by another authority"),
        ("forged", "was signed by another authority"),
        ("nonsense", "is not a certificate in PEM format"),
        ("empty", "is not a certificate in PEM format"),
        ("name", "is the certificate of 'south'"),
        ("server", "is not the certificate of a client"),
        ("authority", "is not the certificate of a client"),
        ("curve", "is not the certificate of a client"),
        ("twin", "is for the same key as east"),
    ],
)
def test_a_bad_certificate_is_refused_with_its_reason_and_the_others_are_loaded(keys, how, reason):
    make_keys(keys, clients=["east"], now=NOW)
    (keys / "server" / "clients" / "north.pem").write_bytes(spoiled(keys)[how])
    with pytest.raises(UserError, match=rf"north\.pem {reason}"):
        clients_of(keys)
    refused = []
    assert list(clients_of(keys, refused=refused.append)) == ["east", "south"]
    assert len(refused) == 1
    assert reason in refused[0]


def test_a_missing_folder_or_authority_is_an_error(keys):
    with pytest.raises(UserError, match="there is no folder"):
        load_clients(keys / "absent", keys / "ca.pem", NOW)
    with pytest.raises(UserError, match=r"there is no file .*ca\.pem"):
        load_clients(keys / "server" / "clients", keys / "absent" / "ca.pem", NOW)


# Checking before use


def test_good_files_are_found(keys):
    files = check_server_files(keys / "server", NOW)
    assert (files.ca.name, files.certificate.name, files.key.name) == ("ca.pem", "server.pem", "server.key")
    assert files.not_after == NOW + 365 * DAY
    assert check_client_files(keys / "clients" / "south", NOW).name == "south"


@pytest.mark.parametrize("role", ["server", "client"])
def test_files_that_cannot_be_used_are_named(keys, role):
    place = keys / ("server" if role == "server" else "clients/north")
    check = check_server_files if role == "server" else check_client_files
    for name in ("ca.pem", f"{role}.pem", f"{role}.key"):
        (place / name).rename(place / "away")
        with pytest.raises(UserError, match=rf"there is no file .*{name}"):
            check(place, NOW)
        (place / name).mkdir()
        with pytest.raises(UserError, match=rf"cannot read .*{name}: Is a directory"):
            check(place, NOW)
        (place / name).rmdir()
        (place / name).touch(mode=0o600)
        with pytest.raises(UserError, match=rf"{name} is not a (certificate|private key) in"):
            check(place, NOW)
        (place / "away").replace(place / name)
    with pytest.raises(UserError, match=rf"{role}\.pem expired on 2031-05-01 12:00 UTC: (delete it and run|ask)"):
        check(place, NOW + 366 * DAY)
    with pytest.raises(UserError, match=rf"{role}\.pem is not valid before .*: compare that clock"):
        check(place, NOW - DAY)
    for mode in (0o640, 0o604, 0o620, 0o601):
        (place / f"{role}.key").chmod(mode)
        with pytest.raises(UserError, match=rf"others can read it: chmod 600 .*{role}\.key"):
            check(place, NOW)
    (place / f"{role}.key").chmod(0o600)
    check(place, NOW)


def test_files_that_do_not_belong_together_are_refused(keys, tmp_path):
    make_keys(tmp_path / "other", ["fl.example.org"], now=NOW)
    ours, theirs = keys / "server", tmp_path / "other" / "server"
    shutil.copy(theirs / "server.key", ours / "server.key")
    with pytest.raises(UserError, match=r"server\.key is not the key of .*server\.pem"):
        check_server_files(ours, NOW)
    shutil.copy(theirs / "server.pem", ours / "server.pem")
    with pytest.raises(UserError, match=r"server\.pem was signed by another authority"):
        check_server_files(ours, NOW)


def test_a_client_s_key_that_flower_cannot_read_is_refused(keys):
    path = keys / "clients" / "north" / "client.key"
    key = certificates.key_from_bytes(path.read_bytes(), "openssh")
    path.write_bytes(certificates.key_to_bytes(key, "pkcs8"))
    with pytest.raises(UserError, match=r"client\.key is not a private key in OpenSSH's format"):
        check_client_files(path.parent, NOW)


# The command


def test_the_command_says_what_goes_where(tmp_path):
    said = command("keys", "out", "--server", "fl.example.org, 192.0.2.7", "--client", "north", cwd=tmp_path)
    until = datetime.now(UTC) + 365 * DAY
    assert f"For north, valid until {until:%Y-%m-%d}: out/clients/north" in said
    assert "Secret: out/ca.key" in said
    assert "feddar server --config study.toml --listen fl.example.org:9092 --keys out/server\n" in said
    assert (
        "feddar client --server fl.example.org:9092 --keys out/clients/north --data local.csv --study study.toml\n"
        in said
    )
    said = command("keys", "site", "--request", "south", cwd=tmp_path)
    (mark,) = re.findall(r"SHA256:[\w+/]+", said)
    said = command("keys", "out", "--sign", "site/client.csr", "--days", 10, cwd=tmp_path)
    assert mark in said
    place = tmp_path / "out" / "server"
    check_server_files(place)
    loaded = load_clients(place / "clients", place / "ca.pem")
    assert loaded["south"].not_after < datetime.now(UTC) + 10 * DAY < loaded["north"].not_after


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--client", "north"], "say where clients will find the server"),
        (["--server", "a.org", "--client", "../north"], "cannot be the name"),
        (["--server", "a.org", "--request", "north"], "--request is for a site"),
        (["--server", "a.org", "--sign", "absent.csr"], "there is no file absent.csr"),
        (["--server", "a.org", "--days", 0], "--days"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_writes_nothing(tmp_path, options, reason):
    assert reason in command("keys", "out", *options, cwd=tmp_path, code=2)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write to file" in command("keys", "file", "--server", "a.org", cwd=tmp_path, code=2)


def test_without_cryptography_it_says_what_to_install(tmp_path, monkeypatch):
    for name in ("certificates", "keys"):
        monkeypatch.delitem(sys.modules, f"feddar.federation.security.{name}")
        monkeypatch.delattr(feddar.federation.security, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "pip install 'feddar[flower]'" in command("keys", "out", "--request", "north", cwd=tmp_path, code=2)


def test_the_examples_of_the_documentation_run(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()
    lines = [line for block in re.findall(r"^```\n(.*?)^```", text, flags=re.S | re.M) for line in block.splitlines()]
    examples = [shlex.split(line, comments=True) for line in lines]
    assert len(examples) > 3
    for program, *arguments in examples:
        if program == "feddar":
            command(*arguments, cwd=tmp_path)
        else:
            assert program in {"rm", "cp"}
            subprocess.run([program, *arguments], cwd=tmp_path, check=True)
    place = tmp_path / "keys" / "server"
    check_server_files(place)
    assert set(load_clients(place / "clients", place / "ca.pem")) == {"north", "south", "east"}
    assert check_client_files(tmp_path / "my-keys").name == "east"
