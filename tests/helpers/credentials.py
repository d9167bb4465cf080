"""Certificates and keys for tests of engines between sites."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


class Credentials:
    """An authority, a server's certificate for this machine and as many sites' keys as are asked for."""

    def __init__(self, folder: Path, days: int = 30) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self._authority = authority = ec.generate_private_key(ec.SECP384R1())
        server = ec.generate_private_key(ec.SECP384R1())
        root = _certificate("authority", "authority", authority, authority, 30)
        leaf = _certificate("server", "authority", server, authority, days)
        self.authority = _write(folder / "authority.pem", root.public_bytes(Encoding.PEM))
        self.certificate = _write(folder / "server.pem", leaf.public_bytes(Encoding.PEM))
        self.key = _write(
            folder / "server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )

    def public(self, name: str) -> bytes:
        """Return a site's public key."""
        return self._key(name).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)

    def private(self, name: str) -> Path:
        """Return the file of a site's private key."""
        content = self._key(name).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        return _write(self._folder / f"{name}.key", content)

    def certified(self, name: str) -> tuple[Path, Path]:
        """Return the files of a site's certificate and private key, both as OpenSSL reads them."""
        certificate = _certificate(name, "authority", self._key(name), self._authority, 30).public_bytes(Encoding.PEM)
        content = self._key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return _write(self._folder / f"{name}.pem", certificate), _write(self._folder / f"{name}.pkcs8", content)

    def in_header(self, name: str) -> bytes:
        """Return a site's public key as it stands, encoded, in the headers of Flower's calls."""
        return self._key(name).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def _key(self, name: str) -> ec.EllipticCurvePrivateKey:
        return self._keys.setdefault(name, ec.generate_private_key(ec.SECP384R1()))


def _write(file: Path, content: bytes) -> Path:
    file.touch(0o600)
    file.write_bytes(content)
    return file


def _certificate(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, days: int
) -> x509.Certificate:
    start = datetime.now(UTC) - timedelta(days=60)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=subject == issuer, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(signer, hashes.SHA384())
    )
