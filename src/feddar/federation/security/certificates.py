"""Makes, signs, reads and checks keys and X.509 certificates in memory; ``keys`` handles their files.

All keys are on the curve P-384, which Flower requires for its nodes. A client's private key is in OpenSSH's format, the
only one that Flower's SuperNode reads; the others are in PKCS 8, which TLS libraries read. With a passphrase all are in
PKCS 8, since OpenSSH's own encryption would need another package.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Literal

from feddar.errors import UserError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise UserError("keys and certificates need the package cryptography: pip install 'feddar[flower]'.") from None

Format = Literal["pkcs8", "openssh"]
Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

CLOCK_SKEW = timedelta(hours=1)
"""How far a site's clock may be behind the coordinator's for a new certificate to be valid at once."""
AUTHORITY_DAYS = 3650
LOCAL = ("localhost", "127.0.0.1")
"""Names that are added to every server's certificate, for clients on the same machine."""
UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension)
"""Exceptions of the package cryptography for invalid content; TypeError if a key has a password."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


@dataclass(frozen=True)
class ClientCertificate:
    """The name, key and period of validity of a client's certificate."""

    name: str
    public_key: bytes
    """One line in OpenSSH's format: the content of the file that `flwr supernode register` takes."""
    not_before: datetime
    not_after: datetime

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the key, by which two people can compare keys."""
        return fingerprint(self.public_key)

    def problem_at(self, now: datetime) -> str:
        """Return why the certificate is not valid at that time; empty if it is."""
        return _out_of_time(self.not_before, self.not_after, now)


def check_name(name: str) -> str:
    """Return the name of a client if it is valid, also as a file name; else it is an error."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"'{name}' cannot be the name of a client: use up to 64 letters, digits, '-', '_' and '.', "
            "beginning and ending with a letter or digit."
        )
    return name


def check_host(host: str) -> str:
    """Return the name or IP address of a server in the form used in certificates; an invalid one is an error."""
    if _is_address(host):
        return str(ip_address(host))
    if not _HOST.fullmatch(host):
        raise UserError(f"'{host}' is not a server's name or IP address: give it without port, such as fl.uni.org.")
    return host.lower()


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def new_key() -> Key:
    """Make a private key."""
    return ec.generate_private_key(ec.SECP384R1())


def key_to_bytes(key: Key, form: Format, passphrase: bytes | None = None) -> bytes:
    """Return a private key as the content of its file."""
    pkcs8, openssh = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase)
        return key.private_bytes(serialization.Encoding.PEM, pkcs8, encryption)
    private = {"pkcs8": pkcs8, "openssh": openssh}[form]
    return key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())


def has_passphrase(content: bytes) -> bool:
    """Return whether the content of a private key's file is encrypted."""
    return b"BEGIN ENCRYPTED PRIVATE KEY" in content


def key_from_bytes(content: bytes, form: Format, passphrase: bytes | None = None) -> PrivateKeyTypes:
    """Read the content of a private key's file."""
    if form == "openssh" and passphrase is None:
        return serialization.load_ssh_private_key(content, None)
    return serialization.load_pem_private_key(content, passphrase)


def openssh_line(key: PublicKey) -> bytes:
    """Return a public key as one line in OpenSSH's format."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def fingerprint(line: bytes) -> str:
    """Return the fingerprint of a public key (a line in OpenSSH's format), as `ssh-keygen -l` shows it."""
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def new_authority(key: Key, now: datetime) -> x509.Certificate:
    """Return the certificate of a federation's own certificate authority (CA), which signs all others."""
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    subject = _named(f"feddar CA {identifier.digest.hex()[:8]}")  # so that two federations have different names
    return (
        _builder(subject, subject, key.public_key(), now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA384())
    )


@dataclass(frozen=True)
class Authority:
    """The certificate authority (CA) that signs: its certificate and key."""

    certificate: x509.Certificate
    key: Key

    def for_server(self, key: PublicKey, hosts: Sequence[str], now: datetime, days: int) -> bytes:
        """Return a certificate (PEM) for a server with all its host names and addresses."""
        names = [
            x509.IPAddress(ip_address(host)) if _is_address(host) else x509.DNSName(host)
            for host in dict.fromkeys((*hosts, *LOCAL))
        ]
        alternatives = x509.SubjectAlternativeName(names)
        builder = self._builder("feddar server", key, ExtendedKeyUsageOID.SERVER_AUTH, now, days)
        return self._signed(builder.add_extension(alternatives, critical=False))

    def for_client(self, key: PublicKey, name: str, now: datetime, days: int) -> bytes:
        """Return a certificate (PEM) for a client's key and name."""
        return self._signed(self._builder(name, key, ExtendedKeyUsageOID.CLIENT_AUTH, now, days))

    def _builder(
        self, name: str, key: PublicKey, purpose: x509.ObjectIdentifier, now: datetime, days: int
    ) -> x509.CertificateBuilder:
        mine = self.certificate
        until = min(now + timedelta(days=days), mine.not_valid_after_utc)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            _builder(_named(name), mine.subject, key, now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(issuer, critical=False)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return to_pem(builder.sign(self.key, hashes.SHA384()))


def to_pem(one: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    """Return a certificate or signing request as PEM."""
    return one.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*allowed: str) -> x509.KeyUsage:
    usages = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    more = ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{usage: usage in allowed for usage in (*usages, *more)})


def new_request(key: Key, name: str) -> bytes:
    """Return a client's certificate signing request (CSR) as PEM, signed with its key to prove that it has the key."""
    return to_pem(x509.CertificateSigningRequestBuilder(_named(name)).sign(key, hashes.SHA384()))


def certificate_from_bytes(content: bytes) -> x509.Certificate:
    """Return the certificate in a PEM file's content."""
    certificate = x509.load_pem_x509_certificate(content)
    certificate.public_key(), certificate.extensions
    return certificate


def request_from_bytes(content: bytes) -> tuple[str, PublicKey]:
    """Return the name and public key in a signing request's content."""
    request = x509.load_pem_x509_csr(content)
    if not request.is_signature_valid:
        raise ValueError("not signed with its own key")
    return name_of(request), client_key(request)


def name_of(one: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Return the common name in a certificate or request; ValueError if there is not exactly one."""
    (common,) = one.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(common.value)


def client_key(one: x509.Certificate | x509.CertificateSigningRequest) -> PublicKey:
    """Return the public key of a client; ValueError if it is not on the curve P-384."""
    key = one.public_key()
    if not (isinstance(key, PublicKey) and isinstance(key.curve, ec.SECP384R1)):
        raise ValueError("not a key on the curve P-384")
    return key


def as_client(certificate: x509.Certificate) -> ClientCertificate:
    """Return a client's certificate as a ``ClientCertificate``; ValueError if it is not for a client."""
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if ExtendedKeyUsageOID.CLIENT_AUTH not in purposes:
        raise ValueError("not made for a client")
    dates = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return ClientCertificate(name_of(certificate), openssh_line(client_key(certificate)), *dates)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses in a server's certificate."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def problem_with(certificate: x509.Certificate, authority: x509.Certificate, now: datetime) -> str:
    """Return why a certificate is not valid at that time, to be put after its name in a sentence; empty if it is."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *UNREADABLE):
        return "was signed by another authority (CA) than that of this federation"
    return _out_of_time(certificate.not_valid_before_utc, certificate.not_valid_after_utc, now)


def _out_of_time(start: datetime, end: datetime, now: datetime) -> str:
    if now < start:
        return f"is not valid before {start:%Y-%m-%d %H:%M} UTC, and the clock here says {now:%Y-%m-%d %H:%M}"
    return f"expired on {end:%Y-%m-%d %H:%M} UTC" if now > end else ""
