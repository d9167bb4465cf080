"""A site's side of mutual TLS: the certificate that it shows to the server."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from tempfile import NamedTemporaryFile


def show_certificate(context: ssl.SSLContext, certificate: Path, key: bytes) -> None:
    """Load a certificate with its key, which OpenSSL reads only from files, and not in OpenSSH's format.

    The file for it is encrypted with a password that only this process ever has, as it stays if the process is killed.
    """
    from cryptography.hazmat.primitives import serialization

    password = os.urandom(16).hex()
    encryption = serialization.BestAvailableEncryption(password.encode())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with NamedTemporaryFile(prefix="feddar-") as file:
        file.write(serialization.load_ssh_private_key(key, None).private_bytes(*form, encryption))
        file.flush()
        context.load_cert_chain(certificate, file.name, password)
