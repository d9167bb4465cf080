"""Folders for what is nobody else's business: keys, a site's state, runs between sites, and secrets of a process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
    from os import getuid
except ImportError:  # on Windows, where Flower's programs do not run either
    fcntl = None  # type: ignore[assignment]

_PREFIX, _IN_USE = "feddar-", ".in-use"


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can look into, and return it; one that exists stays as its owner made it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a private folder with a short path that is removed at the end, or, after a kill, at the next start."""
    if fcntl is not None:
        _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "new").open("w") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # which ends with this process, however it ends
            (folder / "new").rename(folder / _IN_USE)  # so that nobody finds the file without its lock
            yield folder


def _remove_abandoned() -> None:
    """Remove temporary folders of this user's processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_IN_USE}"):
        with suppress(OSError):
            if path.parent.lstat().st_uid == getuid() and not path.parent.is_symlink():
                with path.open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent)
