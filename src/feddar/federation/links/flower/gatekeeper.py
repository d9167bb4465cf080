"""Runs the gate in a process of its own, and tells it who may come.

In the coordinator's process, ``Gatekeeper`` starts the gate, tells it the keys of sites as they come and go, reports
what it refuses, and starts it again should it end. The gate's process is ``python -m
feddar.federation.links.flower.gatekeeper SETTINGS``, which inherits the coordinator's listening socket. The passphrase
of the server's key comes by its standard input, in hexadecimal digits, and so is neither in a file nor in an argument.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Mapping
from pathlib import Path

from feddar.errors import UserError
from feddar.federation.links.flower import internals
from feddar.federation.links.flower.gate import Gate, Refusals, ServerTls
from feddar.federation.links.flower.programs import Child, environment

Log = Callable[[str], None]
ClientKeys = Callable[[], Mapping[str, bytes]]

_START_TIME = 60.0
_FRESH = 5.0
_OPEN = "open"


class KnownKeys:
    """The public keys of sites: registered at the SuperLink, and in a file for the gate."""

    def __init__(self, client_keys: ClientKeys, superlink: Path, file: Path) -> None:
        self._client_keys, self._superlink, self.file = client_keys, superlink, file
        self._registered: set[bytes] = set()
        self._read()  # report what is no key before anything is started

    def refresh(self) -> None:
        """Let in sites whose keys have come since the last time, and no longer those whose keys have gone."""
        keys = self._read()
        new = {name: key for name, key in keys.items() if key not in self._registered}
        if new:
            internals.register(self._superlink, new)
            self._registered |= set(new.values())
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps([key.decode() for key in keys.values()]), encoding="ascii")
        temporary.replace(self.file)

    def _read(self) -> dict[str, bytes]:
        return {name: _public_key(name, key) for name, key in self._client_keys().items()}


class KeysIn:
    """The keys in a file of ``KnownKeys``, as they are now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = 0
        self._keys = frozenset[bytes]()

    def __call__(self) -> frozenset[bytes]:
        """Return the keys as PEM; the file is read again after it has changed."""
        changed = self._file.stat().st_mtime_ns
        if changed != self._changed:
            self._keys = frozenset(key.encode() for key in json.loads(self._file.read_text(encoding="ascii")))
            self._changed = changed
        return self._keys


class Gatekeeper:
    """Lets sites come through a gate to the SuperLink on a Unix socket, within a ``with`` block.

    ``reserved`` is the socket to listen on. In ``folder`` the gate writes down each refusal; ``private`` is a folder
    only for this user.
    """

    def __init__(
        self, reserved: socket.socket, superlink: Path, tls: ServerTls | None, keys: KnownKeys | None, folder: Path,
        private: Path, log: Log,
    ) -> None:  # fmt: skip
        self._reserved, self._keys, self._folder, self._log = reserved, keys, folder, log
        self._settings = private / "gate.json"
        self._passphrase = (tls and tls.passphrase) or b""
        files = [tls.certificate, tls.key, tls.clients] if tls else []
        facts = {
            "listening": reserved.fileno(),
            "superlink": str(superlink),
            "keys": str(keys.file) if keys else None,
            "tls": [file and str(file) for file in files],
            "refusals": str(folder / "refusals.log"),
        }
        self._settings.write_text(json.dumps(facts), encoding="utf-8")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._problem = ""

    def __enter__(self) -> None:
        """Open the gate."""
        if self._keys:
            self._keys.refresh()
        self._child = self._started()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Close the gate."""
        self._ended.set()
        self._thread.join()
        self._child.stop()

    def _started(self) -> Child:
        """Return a new gate, once it is open."""
        command = [sys.executable, "-m", __name__, str(self._settings)]
        variables = environment(self._folder / "flower")
        log, files = self._folder / "gate.log", [self._reserved.fileno()]
        child = Child(command, log, variables, self._passphrase.hex(), files)
        end = time.monotonic() + _START_TIME
        while child.line(0.1) != _OPEN:
            child.check()
            if time.monotonic() > end:
                child.stop()
                raise UserError(f"the gate has not opened within {_START_TIME:g} seconds: see {child.log}.")
        return child

    def _keep(self) -> None:
        """Report refusals, refresh the keys and start a gate that has ended again, until the gate is to be closed."""
        due = time.monotonic() + _FRESH
        while not self._ended.is_set():
            line = self._child.line(0.5) or ""
            if line.startswith("refused "):
                self._log(line)
            try:
                if not self._child.running:
                    self._child = self._started()
                    self._log("the gate ended unexpectedly, and is open again.")
                if self._keys and time.monotonic() > due:
                    due = time.monotonic() + _FRESH
                    self._keys.refresh()
            except (UserError, OSError) as error:
                self._say(str(error))

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._log(problem)


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


def main() -> None:
    """Run the gate in this process, as the file of settings says."""
    facts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    SSLProtocol.max_size = 2**15  # a buffer that asyncio keeps for each connection, with 256 kB if it is not told less
    tls = _tls(*facts["tls"]).context() if facts["tls"] else None
    keys = KeysIn(Path(facts["keys"])) if facts["keys"] else None
    refusals = Refusals(Path(facts["refusals"]), lambda text: print(text, flush=True))
    gate = Gate(Path(facts["superlink"]), keys, refusals)
    with socket.socket(fileno=facts["listening"]) as listening:
        asyncio.run(gate.serve(listening, tls, lambda: print(_OPEN, flush=True)))


def _tls(certificate: str, key: str, clients: str | None) -> ServerTls:
    """Return these files, with the passphrase that comes by the standard input."""
    passphrase = bytes.fromhex(sys.stdin.read()) or None
    return ServerTls(Path(certificate), Path(key), Path(clients) if clients else None, passphrase)


if __name__ == "__main__":
    main()
