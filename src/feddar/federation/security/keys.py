"""The folders of keys and certificates of a federation: making them, adding to them, and checking them before use.

A coordinator's folder has the certificate authority (``ca.pem``, ``ca.key``), ``server/`` for the server, with the
certificates of the clients that may take part in ``server/clients/``, and ``clients/NAME/`` to give to each site. A
site that makes its own key has ``client.key`` and ``client.csr``, and only the latter is sent. Every file is readable
by its owner only from the moment it exists, is written completely or not at all, and is never overwritten.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from feddar.errors import UserError
from feddar.federation.private_folder import private_folder
from feddar.federation.security import certificates
from feddar.federation.security.certificates import UNREADABLE, Authority, ClientCertificate, Format, Key, PublicKey
from feddar.federation.security.passphrase import Passphrase, require_own

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

ANY = Passphrase()
"""The passphrase in the environment, or from the terminal, if one is needed."""
OwnKey = Callable[[Path, str], Key]
"""Returns the key in a file, of an authority, server or client; if there is no file, a new key is made and written."""
FORMATS: dict[str, Format] = {"ca": "pkcs8", "server": "pkcs8", "client": "openssh"}


@dataclass(frozen=True)
class KeyFiles:
    """The checked files that a server or client needs for a connection."""

    ca: Path
    certificate: Path
    key: Path
    name: str
    """The common name in the certificate; for a client, its name."""
    not_after: datetime
    passphrase: bytes | None = field(default=None, repr=False)
    """That of the key, if it has one."""

    def private_key(self) -> Key:
        """Return the key of a client."""
        key = certificates.key_from_bytes(_read(self.key), "openssh", self.passphrase)
        assert isinstance(key, Key)  # it was checked with its certificate
        return key

    def openssh_key(self) -> str:
        """Return the key without its passphrase, in OpenSSH's format, for handing it on in memory."""
        key = self.private_key()
        return certificates.key_to_bytes(key, "openssh").decode()


@dataclass(frozen=True)
class MadeKeys:
    """The result of ``make_keys``: what was made in a coordinator's folder."""

    folder: Path
    hosts: tuple[str, ...]
    server_until: datetime
    clients: tuple[ClientCertificate, ...]
    signed: tuple[ClientCertificate, ...]
    """Clients that made their own key."""

    def summary(self) -> str:
        """Return a text that says what was made, who gets which files, what is secret, and what to do next."""
        out, host = self.folder, self.hosts[0]
        address = f"[{host}]:9092" if ":" in host else f"{host}:9092"
        lines = [
            f"For the server ({', '.join(self.hosts)}), valid until {self.server_until:%Y-%m-%d}: {out / 'server'}",
            *(self._for_client(client, "") for client in self.clients),
            *(self._for_client(client, f" (its key: {client.fingerprint})") for client in self.signed),
            f"Secret: {out / 'ca.key'} stays with you, as it lets new clients in; server.key stays with the server.",
        ]
        if self.clients:
            lines.append(
                "Secret: each client.key is for that client alone; hand it over safely, then delete your copy."
            )
        if self.signed:
            lines.append("Compare the key with what the site saw when it made it, by telephone for example.")
        example = next((client.name for client in (*self.clients, *self.signed)), "NAME")
        return "\n".join(
            [
                *lines,
                "Next:",
                f"  feddar server --config study.toml --listen {address} --keys {out / 'server'}",
                f"  feddar client --server {address} --keys {out / 'clients' / example} --data local.csv "
                "--study study.toml",
            ]
        )

    def _for_client(self, client: ClientCertificate, more: str) -> str:
        return (
            f"For {client.name}, valid until {client.not_after:%Y-%m-%d}: {self.folder / 'clients' / client.name}{more}"
        )


@dataclass(frozen=True)
class RequestedKey:
    """The result of ``request_certificate``: a site's own key and its signing request."""

    folder: Path
    name: str
    fingerprint: str

    def summary(self) -> str:
        """Return a text that says what to send to the coordinator, and what comes back."""
        key, request = self.folder / "client.key", self.folder / "client.csr"
        return "\n".join(
            [
                f"Secret: {key} stays here ({self.fingerprint}).",
                f"For the coordinator: {request}, which asks for a certificate for {self.name} and is not secret.",
                "Next, at the coordinator:",
                "  feddar keys OUT --sign client.csr",
                f"and with the ca.pem and client.pem that come back, put into {self.folder}:",
                f"  feddar client --server HOST:PORT --keys {self.folder} --data local.csv --study study.toml",
            ]
        )


def make_keys(
    folder: Path,
    hosts: Sequence[str] = (),
    clients: Sequence[str] = (),
    requests: Sequence[Path] = (),
    days: int = 365,
    now: datetime | None = None,
    *,
    protect: bool = False,
    passphrase: Passphrase = ANY,
) -> MadeKeys:
    """Make what a coordinator's folder does not have yet: authority, server, and clients by name or signing request.

    With ``protect``, keys that are made get a passphrase. One that ``ca.key`` has is needed for signing.
    """
    now = now or datetime.now(UTC)
    hosts = [certificates.check_host(host) for host in hosts]
    if not hosts and not (folder / "server" / "server.pem").exists():
        raise UserError("say where clients will find the server: --server HOST[,HOST...], all its names and addresses.")
    wanted = [certificates.check_name(name) for name in clients]
    asked = [_read_request(path) for path in requests]
    _require_new(folder, [*wanted, *(name for name, _ in asked)])
    new = passphrase.new() if protect else None
    with _writing(folder):
        for place in (folder, folder / "server", folder / "server" / "clients", folder / "clients"):
            private_folder(place)
        own = partial(_own_key, passphrase=passphrase, new=new)
        authority = _authority(folder, now, own)
        certificate = _server(folder, authority, hosts, now, days, own)
        made = [
            _new_client(folder, authority, name, own(_client_key(folder, name), "client").public_key(), now, days)
            for name in wanted
        ]
        signed = [_new_client(folder, authority, name, key, now, days) for name, key in asked]
    known = tuple(certificates.hosts_of(certificate))
    return MadeKeys(folder, known, certificate.not_valid_after_utc, tuple(made), tuple(signed))


def request_certificate(
    folder: Path, name: str, *, protect: bool = False, passphrase: Passphrase = ANY
) -> RequestedKey:
    """Make a site's own key, which never leaves the site, and its certificate signing request."""
    certificates.check_name(name)
    new = passphrase.new() if protect else None
    with _writing(folder):
        private_folder(folder)
        if (folder / "client.csr").exists():
            raise _already(folder / "client.csr")
        key = _own_key(folder / "client.key", "client", passphrase, new)
        _write_new(folder / "client.csr", certificates.new_request(key, name))
    return RequestedKey(folder, name, certificates.fingerprint(certificates.openssh_line(key.public_key())))


def load_clients(
    folder: Path, ca: Path, now: datetime | None = None, refused: Callable[[str], None] | None = None
) -> dict[str, ClientCertificate]:
    """Return the clients whose certificates are in the folder, by name.

    For an invalid certificate ``refused`` is called with the reason, and the rest are loaded; without it, it is raised.
    """
    now = now or datetime.now(UTC)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}, which should hold the certificates of clients.")
    authority = _read_certificate(ca)
    clients: dict[str, ClientCertificate] = {}
    for path in sorted(folder.glob("*.pem")):
        try:
            client = _load_client(path, authority, now)
            twin = next((other.name for other in clients.values() if other.public_key == client.public_key), None)
            if twin is not None:
                raise UserError(f"{path} is for the same key as {twin}: each client needs a key of its own.")
        except UserError as error:
            if refused is None:
                raise
            refused(str(error))
        else:
            clients[client.name] = client
    return clients


def check_server_files(folder: Path, now: datetime | None = None, passphrase: Passphrase = ANY) -> KeyFiles:
    """Return the server's files in a folder; a missing, invalid or expired one is an error."""
    remedy = f"delete it and run: feddar keys {folder.parent} --server HOST"
    return _check_files(folder, "server", remedy, now, passphrase)


def check_client_files(folder: Path, now: datetime | None = None, passphrase: Passphrase = ANY) -> KeyFiles:
    """Return a client's files in a folder; a missing, invalid or expired one is an error."""
    return _check_files(folder, "client", "ask the coordinator for a new one", now, passphrase)


def _check_files(
    folder: Path, role: Literal["server", "client"], remedy: str, now: datetime | None, passphrase: Passphrase
) -> KeyFiles:
    now = now or datetime.now(UTC)
    ca, path, key_path = folder / "ca.pem", folder / f"{role}.pem", folder / f"{role}.key"
    authority, certificate = _read_certificate(ca), _read_certificate(path)
    key, phrase = _read_key(key_path, role, passphrase)
    _require_pair(key_path, key, path, certificate)
    _require_valid(path, certificate, authority, now, remedy)
    try:
        name = certificates.name_of(certificate)
    except UNREADABLE:
        raise UserError(f"{path} does not say whose certificate it is: {remedy}.") from None
    return KeyFiles(ca, path, key_path, name, certificate.not_valid_after_utc, phrase)


def _load_client(path: Path, authority: x509.Certificate, now: datetime) -> ClientCertificate:
    certificates.check_name(path.stem)
    certificate = _read_certificate(path)
    _require_valid(path, certificate, authority, now, "that client cannot take part until it has a new certificate")
    try:
        client = certificates.as_client(certificate)
    except UNREADABLE:
        raise UserError(f"{path} is not the certificate of a client: make one with feddar keys.") from None
    if client.name != path.stem:
        raise UserError(f"{path} is the certificate of '{client.name}': a certificate's file has its client's name.")
    return client


def _require_valid(
    path: Path, certificate: x509.Certificate, authority: x509.Certificate, now: datetime, remedy: str
) -> None:
    if problem := certificates.problem_with(certificate, authority, now):
        if now < certificate.not_valid_before_utc:
            remedy = "compare that clock with the coordinator's"
        raise UserError(f"{path} {problem}: {remedy}.")


def _require_pair(key_path: Path, key: PrivateKeyTypes, path: Path, certificate: x509.Certificate) -> None:
    if key.public_key() != certificate.public_key():
        raise UserError(f"{key_path} is not the key of {path}: put back the pair that was made together.")


# The steps of make_keys, in their order


def _authority(folder: Path, now: datetime, own_key: OwnKey) -> Authority:
    path, key_path = folder / "ca.pem", folder / "ca.key"
    if path.exists() and not key_path.exists():
        raise UserError(f"{key_path}, which signs certificates, is missing: put it back to add to this federation.")
    key = own_key(key_path, "ca")
    if not path.exists():
        _write_new(path, certificates.to_pem(certificates.new_authority(key, now)))
    certificate = _read_certificate(path)
    _require_pair(key_path, key, path, certificate)
    _require_valid(path, certificate, certificate, now, "make all keys of this federation anew, in another folder")
    return Authority(certificate, key)


def _server(
    folder: Path, authority: Authority, hosts: Sequence[str], now: datetime, days: int, own_key: OwnKey
) -> x509.Certificate:
    place = folder / "server"
    path = place / "server.pem"
    if not path.exists():
        key = own_key(place / "server.key", "server")
        _write_new(path, authority.for_server(key.public_key(), hosts, now, days))
    _copy_authority(authority, place)
    certificate = _read_certificate(path)
    _require_valid(path, certificate, authority.certificate, now, "delete it, and run this again with --server HOST")
    unknown = set(hosts).difference(certificates.hosts_of(certificate))
    if unknown:
        raise UserError(f"{path} is not for {', '.join(sorted(unknown))}: delete it to make one for all that you name.")
    return certificate


def _new_client(
    folder: Path, authority: Authority, name: str, key: PublicKey, now: datetime, days: int
) -> ClientCertificate:
    """Certify a client's key. The client can connect once the last file is written."""
    place = private_folder(folder / "clients" / name)
    certificate = authority.for_client(key, name, now, days)
    _copy_authority(authority, place)
    _write_new(place / "client.pem", certificate)
    _write_new(_registered(folder, name), certificate)
    return certificates.as_client(certificates.certificate_from_bytes(certificate))


def _copy_authority(authority: Authority, place: Path) -> None:
    path, content = place / "ca.pem", certificates.to_pem(authority.certificate)
    if not path.exists():
        _write_new(path, content)
    elif _read(path) != content:
        raise UserError(f"{path} is not the authority (CA) of this federation: delete it, and run this again.")


def _client_key(folder: Path, name: str) -> Path:
    """Return the file for the key of a client that is made here, in its folder."""
    return private_folder(folder / "clients" / name) / "client.key"


def _registered(folder: Path, name: str) -> Path:
    return folder / "server" / "clients" / f"{name}.pem"


def _require_new(folder: Path, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"the client {twice} is named twice: each needs a name of its own.")
    for name in names:
        place = folder / "clients" / name
        paths = (_registered(folder, name), place / "client.key", place / "client.pem")
        present = [str(path) for path in paths if path.exists()]
        if present:
            raise UserError(
                f"the client {name} has a key already, which is never overwritten: "
                f"to replace it, delete {', '.join(present)}, and run this again."
            )


# Reading and writing files


def _own_key(path: Path, role: str, passphrase: Passphrase, new: bytes | None) -> Key:
    """Return the key in a file; if there is no file, a new key is made and written, with the new passphrase if any."""
    if not path.exists():
        key = certificates.new_key()
        _write_new(path, certificates.key_to_bytes(key, FORMATS[role], new))
        return key
    known, _ = _read_key(path, role, passphrase)
    if not isinstance(known, Key):
        raise UserError(f"{path} is not a key that feddar made: move it away for a new one.")
    return known


def _read_key(path: Path, role: str, passphrase: Passphrase) -> tuple[PrivateKeyTypes, bytes | None]:
    """Return the key in a file, and its passphrase if it has one."""
    content = _read(path)
    require_own(path, "is a private key")
    phrase = passphrase.of(path) if certificates.has_passphrase(content) else None
    try:
        return certificates.key_from_bytes(content, FORMATS[role], phrase), phrase
    except UNREADABLE:
        if phrase is not None:
            raise UserError(f"that is not the passphrase of {path}.") from None
        form = {"openssh": "OpenSSH's format", "pkcs8": "PEM"}[FORMATS[role]]
        raise UserError(f"{path} is not a private key in {form}, or in PKCS 8 with a passphrase.") from None


def _read_certificate(path: Path) -> x509.Certificate:
    content = _read(path)
    try:
        return certificates.certificate_from_bytes(content)
    except UNREADABLE:
        raise UserError(f"{path} is not a certificate in PEM format.") from None


def _read_request(path: Path) -> tuple[str, PublicKey]:
    content = _read(path)
    try:
        name, key = certificates.request_from_bytes(content)
    except UNREADABLE:
        raise UserError(f"{path} is not a request that `feddar keys --request NAME` made.") from None
    return certificates.check_name(name), key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: check the folder, or make keys with feddar keys.") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None


def _write_new(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, completely or not at all; an existing file is an error."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")  # has mode 0600 from the start
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, this fails if the file exists
    except FileExistsError:
        raise _already(path) from None
    finally:
        Path(temporary).unlink()


def _already(path: Path) -> UserError:
    return UserError(f"{path} exists, and is never overwritten: delete it to replace it.")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}.") from None
