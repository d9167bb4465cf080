"""Tensors in memory that processes share: one process lays them down, those forked from it read them in place.

Nothing has a name that could be left behind: the memory goes with the last process that has it, however that ended.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from mmap import PAGESIZE, mmap
from typing import Any, BinaryIO

import torch
from torch import Tensor

from feddar.models.parameters import Tensors

Place = dict[str, Any]
"""Where tensors lie, and what they are, as JSON can hold it."""

_ALIGNMENT = 64
"""As torch's own memory, so that no operation takes another path, and gives other bits, than with it."""


class Arena:
    """Memory that one process writes and others read; it grows as it has to.

    What was laid down stays untouched until every reader has let go of the last of its tensors: a reader then clears
    its own mark in front of them, so nobody has to say when, and nobody waits.
    """

    def __init__(self, readers: int = 1) -> None:
        """Make it before the processes are forked that are to share it."""
        self.readers = readers
        self.file = _nameless_file()
        self.file.truncate(PAGESIZE)
        self.memory = mmap(self.file.fileno(), PAGESIZE)
        self.laid: dict[int, int] = {}
        """Beginning and end of what may still be read."""

    def put(self, tensors: Tensors) -> Place:
        """Lay tensors down for all readers, and say where."""
        end, places = _aligned(self.readers), {}
        for name, tensor in tensors.items():
            places[name] = end, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            end = _aligned(end + tensor.nbytes)
        begin = self._room(end)
        self.memory[begin : begin + self.readers] = b"\1" * self.readers
        whole = torch.frombuffer(memoryview(self.memory)[begin : begin + end], dtype=torch.uint8)
        for name, tensor in tensors.items():
            _tensor_in(whole, *places[name]).copy_(tensor.detach())
        return {"begin": begin, "size": end, "tensors": places}

    def get(self, place: Place, reader: int = 0) -> Tensors:
        """Return the tensors that lie there, without copying them."""
        begin, end = place["begin"], place["begin"] + place["size"]
        self._reach(end)
        piece = memoryview(self.memory)[begin:end]
        # The tensors hold the piece, which so ends with the last of them.
        weakref.finalize(piece, self.memory.__setitem__, begin + reader, 0).atexit = False
        whole = torch.frombuffer(piece, dtype=torch.uint8)
        return {name: _tensor_in(whole, *about) for name, about in place["tensors"].items()}

    def close(self) -> None:
        """Give the memory back as soon as no tensor lies in it."""
        self.file.close()

    def _room(self, size: int) -> int:
        """Find the first gap of that size between what may still be read, or room behind it."""
        memory, marks = self.memory, self.readers
        self.laid = {begin: end for begin, end in self.laid.items() if any(memory[begin : begin + marks])}
        free = 0
        for begin, end in sorted(self.laid.items()):
            if begin - free >= size:
                break
            free = end
        self.laid[free] = free + size
        self._reach(free + size)
        return free

    def _reach(self, end: int) -> None:
        """See the memory up to there; tensors that lie in it already stay where they are."""
        if end <= len(self.memory):
            return
        size = os.fstat(self.file.fileno()).st_size
        if end > size:  # pages that are never written take no memory
            size = max(end, 2 * size)
            self.file.truncate(size)
        self.memory = mmap(self.file.fileno(), size)


def _nameless_file() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("feddar"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _tensor_in(whole: Tensor, begin: int, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = kind.itemsize * torch.Size(shape).numel()
    return whole[begin : begin + size].view(kind).view(shape)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
