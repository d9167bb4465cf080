"""Connects a coordinator and sites over Flower: ``flower_link`` at the coordinator, ``flower_site`` at a site."""

from __future__ import annotations

import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from feddar.errors import UserError
from feddar.federation.links.flower import APP, frames, gate, internals
from feddar.federation.links.flower.apps import client_app
from feddar.federation.links.flower.executor import executing
from feddar.federation.links.flower.gate import ServerTls
from feddar.federation.links.flower.programs import Child, command, environment, free_port, program, started, supernode
from feddar.federation.links.flower.relay import RelayLink
from feddar.federation.links.link import Handler
from feddar.federation.private_folder import temporary_folder
from feddar.settings import write_toml

Log = Callable[[str], None]
ClientKeys = Callable[[], Mapping[str, bytes]]

_START_TIME = 120.0


@contextmanager
def flower_link(
    listen: str, folder: Path, tls: ServerTls | None, client_keys: ClientKeys | None, log: Log
) -> Iterator[RelayLink]:
    """Start a SuperLink with our app, let sites connect to ``listen``, and yield the link to them.

    ``client_keys`` returns the public keys of the sites that may connect now, by name, each as a line in OpenSSH's
    format; a site whose key is later removed is refused. Without it every site may connect, under the name that it
    gives itself. Logs are in ``folder``.
    """
    internals.require_version()
    if client_keys and not tls:
        raise UserError("client keys need TLS: give the server's certificate and key too.")
    known = None if client_keys is None else _ValidKeys(client_keys)
    for file in [tls.certificate, tls.key] if tls else []:
        _check_file(file)
    with ExitStack() as stack:
        reserved = stack.enter_context(gate.reserved_socket(listen))
        private = stack.enter_context(temporary_folder())  # a path of a socket has 107 bytes at most
        superlink = _superlink(stack, folder, private, client_keys is not None)
        if client_keys and superlink.authority:
            keys = {name: _public_key(name, key) for name, key in client_keys().items()}
            internals.register(superlink.address, superlink.authority, keys)
        link = _submit(stack, superlink, private, log)
        app = gate.gate(superlink.url, superlink.authority, known, log)
        stack.enter_context(gate.open_gate(app, reserved, tls))
        yield link


class _ValidKeys:
    """The public keys of sites as PEM, as in the headers of Flower's calls; they are read again every few seconds."""

    _FRESH = 5.0

    def __init__(self, client_keys: ClientKeys) -> None:
        self.client_keys = client_keys
        self.keys, self.until = self._look_up()

    def __call__(self) -> frozenset[bytes]:
        """Return the keys that are valid now."""
        if time.monotonic() > self.until:
            self.keys, self.until = self._look_up()
        return self.keys

    def _look_up(self) -> tuple[frozenset[bytes], float]:
        keys = frozenset(_public_key(name, key) for name, key in self.client_keys().items())
        return keys, time.monotonic() + self._FRESH


@dataclass
class _SuperLink:
    child: Child
    address: str
    authority: Path | None
    """Its certificate, if it uses TLS."""
    variables: dict[str, str]

    @property
    def url(self) -> str:
        """Its URL."""
        return f"{'https' if self.authority else 'http'}://{self.address}"


def _superlink(stack: ExitStack, folder: Path, private: Path, keys: bool) -> _SuperLink:
    """Start a SuperLink that listens on this machine only; with ``keys`` it uses TLS, which Flower then requires.

    Its state is in memory only: a coordinator that is restarted resumes from its own checkpoint with a new Flower run,
    sites connect again, and messages of the earlier Flower run are lost.
    """
    port, variables = free_port(), environment(folder / "flower")
    address = f"127.0.0.1:{port}"
    authority = _own_certificate(private) if keys else None
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    if authority:
        files = [
            f"--ssl-ca-certfile={authority}",
            f"--ssl-certfile={authority}",
            f"--ssl-keyfile={private / 'inner.key'}",
        ]
        arguments += ["--enable-supernode-auth", *files]
        trust: dict[str, str | bool] = {"root-certificates": str(authority)}
    else:
        arguments += ["--insecure"]
        trust = {"insecure": True}
    link = {"superlink": {"feddar": {"address": address, **trust}}}
    write_toml(Path(variables["FLWR_HOME"], "config.toml"), link)
    command = [program("flower-superlink"), *arguments]
    child = stack.enter_context(started(command, folder / "superlink.log", variables))
    superlink = _SuperLink(child, address, authority, variables)
    _wait_for(superlink)
    return superlink


def _wait_for(superlink: _SuperLink) -> None:
    import httpx

    verify = ssl.create_default_context(cafile=superlink.authority) if superlink.authority else True
    end = time.monotonic() + _START_TIME
    with httpx.Client(verify=verify, trust_env=False) as client:
        while time.monotonic() < end:
            superlink.child.check()
            try:
                if client.get(superlink.url + internals.HEALTH).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
    raise UserError(f"Flower's SuperLink has not started within {_START_TIME:g} seconds: see {superlink.child.log}.")


def _submit(stack: ExitStack, superlink: _SuperLink, private: Path, log: Log) -> RelayLink:
    path = private / "relay"
    with frames.listen(path) as waiting:
        settings = write_toml(private / "run.toml", {"socket": str(path)})
        command(["run", str(APP), "feddar", f"--run-config={settings}"], superlink.variables)
        waiting.settimeout(1.0)
        end = time.monotonic() + _START_TIME
        while time.monotonic() < end:
            superlink.child.check()
            try:
                connection, _ = waiting.accept()
            except TimeoutError:
                continue
            link = RelayLink(stack.enter_context(connection), log)
            stack.callback(link.close)
            return link
    raise UserError(f"Flower's ServerApp has not started within {_START_TIME:g} seconds: see {superlink.child.log}.")


def flower_site(
    server: str,
    name: str,
    handler: Handler,
    folder: Path,
    root_certificate: Path | None,
    private_key: Path | None,
    log: Log,
    stop: threading.Event | None = None,
    key_in_memory: str = "",
) -> None:
    """Connect to ``server`` by a SuperNode and let ``handler`` answer its messages, until ``stop`` is set.

    If the server is not reachable, this waits until it is. If the server refuses this site, or its certificate is not
    valid, a ``UserError`` says why. Without a root certificate nothing is encrypted, and a key cannot be used.
    ``key_in_memory`` is the content of the private key's file if that has a passphrase, which Flower cannot read.
    """
    internals.require_version()
    for file in (root_certificate, private_key):
        if file:
            _check_file(file)
    if private_key and not root_certificate:
        raise UserError("a client key needs TLS: give the root certificate too.")
    stop = stop or threading.Event()
    variables = environment(folder / "flower")
    with temporary_folder() as private:
        secret = private / "secret"
        secret.write_bytes(os.urandom(32))
        node = write_toml(private / "node.toml", {"name": name})
        arguments = [f"--superlink={server}", f"--node-config={node}"]
        arguments += ["--isolation=process", f"--superexec-auth-secret-file={secret}"]
        arguments += [f"--root-certificates={root_certificate}"] if root_certificate else ["--insecure"]
        # What has no passphrase goes to the SuperNode by its input, and so is never on the disk.
        read_from = "/dev/stdin" if key_in_memory else private_key
        arguments += [f"--auth-supernode-private-key={read_from}"] if read_from else []
        app = client_app(lambda node: handler)
        watch = _Watch(server, root_certificate, private_key, log)
        while not stop.is_set():
            port = free_port()
            command = supernode([*arguments, "--port", str(port)])
            with (
                started(command, folder / "supernode.log", variables, key_in_memory) as child,
                executing(f"127.0.0.1:{port}", secret.read_bytes(), app),
            ):
                watch.follow(child, stop)
            if not stop.is_set():
                stop.wait(watch.pause(list(child.tail)))


class _Watch:
    """Watches a SuperNode's output, and reports to the user what matters."""

    _QUICK_ENDS = 3
    _LAST_ANSWER, _FETCHED = 60.0, 2.0
    """Seconds to wait until the last answer is sent, and then until the server has fetched it: Flower drops answers of
    a node that has disconnected."""
    _SILENCE = 5.0

    def __init__(self, server: str, root_certificate: Path | None, private_key: Path | None, log: Log) -> None:
        self.server, self.root_certificate, self.private_key = server, root_certificate, private_key
        self._log = log
        self._said = ""
        self._quick_ends = 0

    def follow(self, child: Child, stop: threading.Event) -> None:
        """Report until the SuperNode ends or ``stop`` is set; then wait first until a pending answer is sent."""
        leave_at, silent_since, last = 0.0, None, math.inf
        while child.running:
            line = child.line(0.2) or ""
            leave_at = self._leave_at(line, leave_at)
            if stop.is_set():
                last = min(last, time.monotonic() + self._LAST_ANSWER)
                if not line and time.monotonic() > min(leave_at, last):
                    break
            if internals.CONNECTED in line or (silent_since and internals.CONNECTED_AGAIN in line):
                self._quick_ends, silent_since = 0, None
                self._say(f"connected to {self.server}.")
            elif internals.NO_CONNECTION in line:
                silent_since = silent_since or time.monotonic()
            # While it starts and ends, its own child processes briefly log the same message about it.
            if silent_since and time.monotonic() > silent_since + self._SILENCE:
                if not self.root_certificate and _is_encrypted(self.server):
                    raise UserError(f"{self.server} takes encrypted connections only: name this site's --keys.")
                self._say(f"{self.server} does not answer; trying again until it does.")
        while child.line(0.2):
            pass

    def _leave_at(self, line: str, before: float) -> float:
        """Return the time from which no answer is pending, after this line of output (infinite if one is)."""
        if internals.RECEIVING in line:
            return math.inf
        if internals.SENT in line:
            return time.monotonic() + self._FETCHED
        return 0.0 if any(words in line for words in internals.NOT_SENT) else before

    def pause(self, tail: list[str]) -> float:
        """Return the seconds to wait before a restart, by the last lines of output; raise if a restart cannot help."""
        text = " ".join(tail)
        if refusal := self._refusal(text):
            raise UserError(refusal)
        if internals.ALREADY_CONNECTED in text:
            self._say(f"{self.server} has a client with this key already (is another one running?); trying again.")
            return 5.0
        self._say(f"lost the connection to {self.server}; trying again.")
        self._quick_ends += 1
        if self._quick_ends >= self._QUICK_ENDS:
            self._require_clocks_alike()
            raise UserError(f"flower-supernode ended: {tail[-1] if tail else 'it said nothing'}.")
        return 1.0

    def _require_clocks_alike(self) -> None:
        """Refuse to go on if the clocks here and at the server differ too much, of which a SuperNode says nothing."""
        ahead = _clock_ahead(self.server, self.root_certificate) if self.private_key and self.root_certificate else None
        if ahead is not None and not -internals.CLOCK_BEHIND < ahead < internals.CLOCK_AHEAD:
            where = f"{abs(ahead):,.0f} seconds {'ahead of' if ahead > 0 else 'behind'} that of {self.server}"
            raise UserError(f"the clock here is {where}, and Flower refuses that: set both clocks, best by NTP.")

    def _refusal(self, text: str) -> str:
        """Return the message for a problem that the user must solve; empty if there is none in the output."""
        server = self.server
        unknown = f"{gate.UNKNOWN_KEY} ({self.private_key})" if self.private_key else "it asks for a client key"
        reasons = {
            gate.UNKNOWN_KEY: f"{server} refused us: {unknown}; ask the coordinator.",
            internals.BAD_PRIVATE_KEY: f"{self.private_key} is not a private key as `feddar keys` makes them.",
            "certificate has expired": f"the certificate of {server} has expired; the coordinator needs a new one.",
            "certificate is not yet valid": f"the certificate of {server} is not valid yet, and the clock here says "
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC: compare that clock with the coordinator's.",
            "mismatch, certificate is not valid for": f"the certificate of {server} is for another host name.",
            "CERTIFICATE_VERIFY_FAILED": f"{server} has a certificate that is not from the authority in "
            f"{self.root_certificate}: it may not be who it says.",
            internals.NO_TLS: f"{server} offers no secure connection; ask the coordinator.",
        }
        return next((reason for sign, reason in reasons.items() if sign in text), "")

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._log(text)


def _is_encrypted(server: str) -> bool:
    """Return whether a server uses TLS, with any certificate."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as plain, anybody.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False


def _clock_ahead(server: str, root_certificate: Path) -> float | None:
    """Return by how many seconds the clock here is ahead of a server's; None if the server does not tell the time."""
    import httpx

    verify = ssl.create_default_context(cafile=root_certificate)
    try:
        answer = httpx.get(f"https://{server}{internals.HEALTH}", verify=verify, timeout=5.0, trust_env=False)
        return (datetime.now(UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds()
    except (httpx.HTTPError, KeyError, ValueError):
        return None


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"{file} was not found.")


def _public_key(name: str, key: bytes) -> bytes:
    """Return a public key in OpenSSH's format as PEM, as in the headers of Flower's calls."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        loaded = load_ssh_public_key(key)
        if not isinstance(loaded, EllipticCurvePublicKey):
            raise ValueError("Flower knows no other kind")
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(
            f"the key of {name} is not a public key as `feddar keys` makes them (OpenSSH format)."
        ) from None
    return loaded.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _own_certificate(private: Path) -> Path:
    """Make a key and certificate for 127.0.0.1, for TLS between Flower's processes on this machine."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "feddar on this machine")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA384())
    )
    file = private / "inner.pem"
    file.write_bytes(certificate.public_bytes(Encoding.PEM))
    (private / "inner.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file
