"""The key that a site is known by to other sites, where it has no certificate: made once, and kept in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from feddar.errors import UserError
from feddar.federation.private_folder import private_folder
from feddar.federation.security.certificates import UNREADABLE, Key, key_from_bytes, key_to_bytes, new_key

IDENTITY_FILE = "identity.key"


def own_identity(folder: Path) -> Key:
    """Return the key in a site's folder, made if there is none."""
    path = folder / IDENTITY_FILE
    if not path.exists():
        private_folder(folder)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key_to_bytes(new_key(), "pkcs8"))
    try:
        key = key_from_bytes(path.read_bytes(), "pkcs8")
    except UNREADABLE:
        key = None
    if not isinstance(key, Key):
        raise UserError(f"{path} is not the key that feddar made there: delete it, and a new one is made.")
    return key
