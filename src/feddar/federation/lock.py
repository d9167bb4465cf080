"""A lock on a folder, between processes of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from feddar.federation.private_folder import private_folder

LOCK_FILE = ".lock"


@contextmanager
def alone_in(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder, which is made if there is none; unless it should wait, a locked one is a ``BlockingIOError``."""
    private_folder(folder)
    with (folder / LOCK_FILE).open("a") as lock:
        with suppress(ImportError):  # there is no fcntl on Windows, and so no lock
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
