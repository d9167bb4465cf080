"""Images that are larger than memory: decoded once, kept in a file, and read from there when they are used.

The file is named by a digest of what it was made from (paths, sizes and times of the images, and the size in pixels),
so a changed image makes another one, which replaces it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from feddar.data.images import decoded, read_images
from feddar.errors import UserError

LARGEST_SHARE = 0.25
"""Images may take this share of the memory: splits copy them, and training needs memory, too."""
_ATEN = torch.ops.aten
_ROWS = (_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.index_select.default, _ATEN.index.Tensor)
_SAME = (_ATEN.detach.default, _ATEN.alias.default)


class ImagesTooLargeError(UserError):
    """Images that would take much of the memory; they can be kept in a file instead."""


def images_for(files: Sequence[Path], size: int, folder: Path | None = None) -> Tensor:
    """Return images as RGB [n, 3, size, size]: in memory, or with ``folder`` in a file there (``StoredImages``)."""
    return read_images(files, size) if folder is None else _kept(files, size, folder)


def require_room(count: int, size: int) -> None:
    """Refuse to hold so many images in memory if they take too much of it."""
    needed, there = count * 3 * size * size, memory_size()
    if needed > LARGEST_SHARE * there:
        raise ImagesTooLargeError(
            f"{count:,} images of {size} x {size} pixels take {needed / 1e9:.1f} GB, much of a memory of "
            f"{there / 1e9:.1f} GB: keep them in a file (--image-cache FOLDER), or make them smaller (--image-size)."
        )


def memory_size() -> int:
    """Return the size of the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class StoredImages(Tensor):
    """Images [n, channels, height, width] that stay in a file: rows are chosen without reading them.

    Whatever else is done with them reads the chosen ones, so it should be done to a batch.
    """

    stored: Tensor
    """All images of the file, mapped into memory."""
    chosen: Tensor
    """The indices of these images in the file."""

    file: Path | None
    """The file, if another process can open it."""

    @staticmethod
    def __new__(cls, stored: Tensor, chosen: Tensor, _: Path | None = None) -> StoredImages:
        """Return a tensor with shape and dtype, and without values of its own."""
        shape = (len(chosen), *stored.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=stored.dtype)

    def __init__(self, stored: Tensor, chosen: Tensor, file: Path | None = None) -> None:
        self.stored, self.chosen, self.file = stored, chosen, file

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say how another process makes it: from the file, of which nothing is copied."""
        if self.file is None:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return _opened, (self.file, self.stored.shape[-1], self.chosen)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StoredImages({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do to the indices what chooses rows, and anything else to the images themselves."""
        if function in _SAME:
            return args[0]
        if _chooses_rows(function, args):
            chosen = function(args[0].chosen, *args[1:], **(kwargs or {}))
            return StoredImages(args[0].stored, chosen, args[0].file) if chosen.ndim == 1 else args[0].stored[chosen]
        return function(*tree_map(in_memory, args), **tree_map(in_memory, dict(kwargs or {})))


def _chooses_rows(function: Any, args: Sequence[Any]) -> bool:
    if function not in _ROWS:
        return False
    if function is _ATEN.index.Tensor:
        return len(args[1]) == 1
    return len(args) == 1 or args[1] == 0  # along the first axis


def in_memory(value: Any) -> Any:
    """Return stored images as an ordinary tensor, and anything else as it is."""
    return value.stored[value.chosen] if isinstance(value, StoredImages) else value


def _kept(files: Sequence[Path], size: int, folder: Path) -> Tensor:
    """Return images from the file in the folder; it is written first, unless it is there and made from the same."""
    path = folder / f"images-{_digest(files, size)}.pixels"
    if not path.is_file() or path.stat().st_size != len(files) * 3 * size * size:
        try:
            _write(files, size, path)
        except OSError as error:
            raise UserError(
                f"cannot keep images in {folder}: {error.strerror or error}; choose another folder with --image-cache."
            ) from None
    return _opened(path, size, torch.arange(len(files)))


def _opened(path: Path, size: int, chosen: Tensor) -> StoredImages:
    """Return the chosen images of a file, of ``size`` pixels each way."""
    stored = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).view(-1, 3, size, size)
    return StoredImages(stored, chosen, path.absolute())


def _digest(files: Sequence[Path], size: int) -> str:
    """Return a hash of the images' size in pixels, and of each file's path, length and time of change.

    A file that is missing counts as such: writing will name it.
    """
    digest = hashlib.sha256(f"{size}".encode())
    for file in files:
        about = file.stat() if file.is_file() else None
        digest.update(repr((str(file.absolute()), about and (about.st_size, about.st_mtime_ns))).encode())
    return digest.hexdigest()[:16]


def _write(files: Sequence[Path], size: int, path: Path) -> None:
    """Write the pixels under a temporary name and rename the file; those of former images are deleted."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # they are patients' images
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for batch in decoded(files, size):
                file.write(batch.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    for former in path.parent.glob("images-*.pixels"):
        if former != path:
            former.unlink()
