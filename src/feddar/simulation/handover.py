"""Hands objects to a process that shares no memory with this one: tensors through a file, all else through its pipe.

The file is mapped by the process that takes them over, so that only what it reads of them is in its memory, and deleted
as soon as it is mapped. Images that are kept in a file stay there.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

_ALIGNMENT = 64
"""The alignment of torch's own memory; with another one, operations may take other paths and give other bits."""


class NotHandedOverError(Exception):
    """An object that another process cannot be given, such as a function that was defined within another."""


class _Place(NamedTuple):
    """Where a tensor is in the file, in bytes, and what it looks like; equal numbers are one tensor."""

    number: int
    begin: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    trained: bool
    parameter: bool


class Handover(NamedTuple):
    """Objects on their way to another process; what they are made of is trusted, since it comes from here."""

    content: bytes
    file: str

    def take(self) -> Any:
        """Return the objects, in the process that they were meant for; this can be done once."""
        return _Reader(self).load()

    def delete(self) -> None:
        """Delete the file, if nobody has taken it."""
        with suppress(OSError):  # Windows keeps a file that is mapped
            Path(self.file).unlink(missing_ok=True)


def hand_over(value: Any) -> Handover:
    """Return a value as it can be given to a process that is spawned; ``NotHandedOverError`` if it cannot be."""
    with _new_file() as (file, name):
        content = io.BytesIO()
        try:
            _Writer(content, file).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, OSError) as error:
            raise NotHandedOverError(str(error)) from error
    return Handover(content.getvalue(), name)


def hand_over_all(values: Iterable[Any]) -> list[Handover]:
    """Return several values as ``hand_over`` does: all or none."""
    found: list[Handover] = []
    try:
        for value in values:
            found.append(hand_over(value))
    except NotHandedOverError:
        for each in found:
            each.delete()
        raise
    return found


@contextmanager
def _new_file() -> Iterator[tuple[BinaryIO, str]]:
    """Open a file that others may not read; it is deleted again after an error."""
    descriptor, name = tempfile.mkstemp(prefix="feddar-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, name
    except BaseException:
        Path(name).unlink()
        raise


class _Writer(pickle.Pickler):
    """Writes tensors to the file, memory that several of them share only once."""

    def __init__(self, content: BinaryIO, file: BinaryIO) -> None:
        super().__init__(content)
        self.file = file
        self.begins: dict[int, int] = {}
        """Where memory is in the file, by its address."""
        self.places: dict[int, _Place] = {}
        self.kept: list[Any] = []
        """Keeps addresses from being used again."""

    def persistent_id(self, value: Any) -> _Place | None:
        """Return the place of a tensor; anything else is part of the content."""
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return None
        if id(value) not in self.places:
            found = value.detach().cpu()
            begin = self._begin(found.untyped_storage()) + found.storage_offset() * found.itemsize
            shape = found.dtype, tuple(found.shape), found.stride(), value.requires_grad
            self.places[id(value)] = _Place(len(self.places), begin, *shape, isinstance(value, nn.Parameter))
            self.kept += [value, found]
        return self.places[id(value)]

    def _begin(self, memory: torch.UntypedStorage) -> int:
        if memory.data_ptr() not in self.begins:
            self.file.write(bytes(-self.file.tell() % _ALIGNMENT))
            self.begins[memory.data_ptr()] = self.file.tell()
            self.file.write(torch.empty(0, dtype=torch.uint8).set_(memory).numpy().data)
        return self.begins[memory.data_ptr()]

    def reducer_override(self, value: Any) -> Any:
        """Say how to make a mapping that cannot be changed."""
        return (_unchangeable, (dict(value),)) if isinstance(value, MappingProxyType) else NotImplemented


def _unchangeable(value: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(value)


class _Reader(pickle.Unpickler):
    """Reads what ``_Writer`` has written."""

    def __init__(self, handover: Handover) -> None:
        super().__init__(io.BytesIO(handover.content))
        size = Path(handover.file).stat().st_size
        # Not shared: what is changed is changed in this process only.
        self.memory = torch.from_file(handover.file, False, size, dtype=torch.uint8).untyped_storage()
        self.found: dict[int, Tensor] = {}
        handover.delete()

    def persistent_load(self, place: _Place) -> Tensor:
        """Return the tensor at a place."""
        if place.number not in self.found:
            bare = torch.empty(0, dtype=place.dtype)
            found = bare.set_(self.memory, place.begin // bare.itemsize, place.size, place.stride)
            made = nn.Parameter(found, place.trained) if place.parameter else found.requires_grad_(place.trained)
            self.found[place.number] = made
        return self.found[place.number]
