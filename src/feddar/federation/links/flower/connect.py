"""Connects a coordinator and sites over Flower: ``flower_link`` at the coordinator, ``flower_site`` at a site."""

from __future__ import annotations

import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from feddar.errors import UserError
from feddar.federation.links.flower import frames, internals
from feddar.federation.links.flower.apps import client_app
from feddar.federation.links.flower.client_tls import show_certificate
from feddar.federation.links.flower.executor import executing
from feddar.federation.links.flower.gate import UNKNOWN_KEY, ServerTls, reserved_socket
from feddar.federation.links.flower.gatekeeper import ClientKeys, Gatekeeper, KnownKeys
from feddar.federation.links.flower.programs import Child, environment, free_port, started, variant
from feddar.federation.links.flower.relay import RelayLink
from feddar.federation.links.link import Handler
from feddar.federation.private_folder import temporary_folder
from feddar.settings import write_toml

Log = Callable[[str], None]

_START_TIME = 120.0


@contextmanager
def flower_link(
    listen: str, folder: Path, tls: ServerTls | None, client_keys: ClientKeys | None, log: Log
) -> Iterator[RelayLink]:
    """Start a SuperLink with our app, let sites connect to ``listen``, and yield the link to them.

    ``client_keys`` returns the public keys of the sites that may connect now, by name, each as a line in OpenSSH's
    format: a site whose key is added later is let in, and one whose key is removed is refused. Without it every site
    may connect, under the name that it gives itself. Logs are in ``folder``.
    """
    internals.require_version()
    if client_keys and not tls:
        raise UserError("client keys need TLS: give the server's certificate and key too.")
    if tls:
        for file in (tls.certificate, tls.key):
            _check_file(file)
        tls.context()  # report files that cannot be used before anything is started
    with ExitStack() as stack:
        reserved = stack.enter_context(reserved_socket(listen))
        private = stack.enter_context(temporary_folder())  # a path of a socket has 107 bytes at most
        superlink = private / "superlink"
        keys = KnownKeys(client_keys, superlink, private / "keys.json") if client_keys else None
        _start(stack, superlink, folder, "known" if keys else "any")
        link = _submit(stack, superlink, folder, private, log)
        stack.enter_context(Gatekeeper(reserved, superlink, tls, keys, folder, private, log))
        yield link


def _start(stack: ExitStack, superlink: Path, folder: Path, sites: str) -> None:
    """Start a SuperLink on a Unix socket.

    Its state is in memory only: a coordinator that is restarted resumes from its own checkpoint with a new Flower run,
    sites connect again, and messages of the earlier Flower run are lost.
    """
    arguments = ["--insecure", "--isolation=process", "--disable-runtime-dependency-installation"]
    command = variant("superlink", superlink, sites, *arguments)
    child = stack.enter_context(started(command, folder / "superlink.log", environment(folder / "flower")))
    end = time.monotonic() + _START_TIME
    while time.monotonic() < end:
        child.check()
        try:
            return frames.connect(superlink).close()
        except OSError:
            time.sleep(0.1)
    raise UserError(f"Flower's SuperLink has not started within {_START_TIME:g} seconds: see {child.log}.")


def _submit(stack: ExitStack, superlink: Path, folder: Path, private: Path, log: Log) -> RelayLink:
    """Start the ServerApp, and return the link that it relays."""
    path = private / "relay"
    with frames.listen(path) as waiting:
        command = variant("serverapp", superlink, path)
        child = stack.enter_context(started(command, folder / "serverapp.log", environment(folder / "flower")))
        waiting.settimeout(1.0)
        end = time.monotonic() + _START_TIME
        while time.monotonic() < end:
            child.check()
            try:
                connection, _ = waiting.accept()
            except TimeoutError:
                continue
            link = RelayLink(stack.enter_context(connection), log)
            stack.callback(link.close)
            return link
    raise UserError(f"Flower's ServerApp has not started within {_START_TIME:g} seconds: see {child.log}.")


def flower_site(
    server: str,
    name: str,
    handler: Handler,
    folder: Path,
    root_certificate: Path | None,
    private_key: Path | None,
    log: Log,
    stop: threading.Event | None = None,
    certificate: Path | None = None,
    key_in_memory: str = "",
) -> None:
    """Connect to ``server`` by a SuperNode and let ``handler`` answer its messages, until ``stop`` is set.

    If the server is not reachable, this waits until it is. If the server refuses this site, or its certificate is not
    valid, a ``UserError`` says why. Without a root certificate nothing is encrypted, and a key cannot be used. If there
    is a ``certificate`` of the key, the server gets to see it. ``key_in_memory`` is the content of the private key's
    file if that has a passphrase, which Flower cannot read.
    """
    internals.require_version()
    for file in (root_certificate, private_key, certificate):
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
        identity = certificate or "", "/dev/stdin" if key_in_memory else private_key or ""
        app = client_app(lambda node: handler)
        watch = _Watch(server, root_certificate, private_key, log, certificate, key_in_memory)
        while not stop.is_set():
            port = free_port()
            command = variant("supernode", *identity, *arguments, "--port", str(port))
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

    def __init__(
        self,
        server: str,
        root_certificate: Path | None,
        private_key: Path | None,
        log: Log,
        certificate: Path | None = None,
        key_in_memory: str = "",
    ) -> None:
        self.server, self.root_certificate, self.private_key = server, root_certificate, private_key
        self._log, self._certificate, self._key_in_memory = log, certificate, key_in_memory
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
                self._explain_silence()
                silent_since = time.monotonic()
        while child.line(0.2):
            pass

    def _explain_silence(self) -> None:
        """Report that calls fail; raise an error if the server and this site do not agree on encryption."""
        if not _is_encrypted(self.server, self._shown(_anybody())):
            self._say(f"{self.server} does not answer; trying again until it does.")
        elif not self.root_certificate:
            raise UserError(f"{self.server} takes encrypted connections only: name this site's --keys.")
        else:
            # A server that does not accept a certificate closes the connection without a word.
            self._say(
                f"{self.server} is there and takes no calls; if it stays so, ask if this site's key is still valid."
            )

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
        ahead = _clock_ahead(self.server, self._tls()) if self.private_key and self.root_certificate else None
        if ahead is not None and not -internals.CLOCK_BEHIND < ahead < internals.CLOCK_AHEAD:
            where = f"{abs(ahead):,.0f} seconds {'ahead of' if ahead > 0 else 'behind'} that of {self.server}"
            raise UserError(f"the clock here is {where}, and Flower refuses that: set both clocks, best by NTP.")

    def _tls(self) -> ssl.SSLContext:
        """Return the settings of a connection to the server as the SuperNode has it."""
        return self._shown(ssl.create_default_context(cafile=self.root_certificate))

    def _shown(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Return settings by which the server is shown this site's certificate, if there is one."""
        if self._certificate and self.private_key:
            key = self._key_in_memory.encode() or self.private_key.read_bytes()
            show_certificate(context, self._certificate, key)
        return context

    def _refusal(self, text: str) -> str:
        """Return the message for a problem that the user must solve; empty if there is none in the output."""
        server = self.server
        unknown = f"{UNKNOWN_KEY} ({self.private_key})" if self.private_key else "it asks for a client key"
        reasons = {
            UNKNOWN_KEY: f"{server} refused us: {unknown}; ask the coordinator.",
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


def _anybody() -> ssl.SSLContext:
    """Return the settings of a connection to whoever is there, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _is_encrypted(server: str, tls: ssl.SSLContext) -> bool:
    """Return whether a server uses TLS."""
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as plain, tls.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False


def _clock_ahead(server: str, tls: ssl.SSLContext) -> float | None:
    """Return by how many seconds the clock here is ahead of a server's; None if the server does not tell the time."""
    import httpx

    try:
        answer = httpx.get(f"https://{server}", verify=tls, timeout=5.0, trust_env=False)  # refused, with the date
        return (datetime.now(UTC) - parsedate_to_datetime(answer.headers["date"])).total_seconds()
    except (httpx.HTTPError, KeyError, ValueError):
        return None


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"{file} was not found.")
