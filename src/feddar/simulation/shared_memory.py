"""Tensors in shared memory: one process writes them, and processes forked from it read them in place.

The memory has no name in the file system: it is freed with the last process that has it, however that ended.
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
"""Position, dtype and shape of tensors in the memory, as JSON can hold them."""

_ALIGNMENT = 64
"""The alignment of torch's own memory; with another one, operations may take other paths and give other bits."""


class Arena:
    """Memory that one process writes and others read; it grows when needed.

    Tensors that were written stay until every reader has dropped the last of them: a reader then clears its own mark in
    front of them. So no messages are needed to free memory, and nobody waits.
    """

    def __init__(self, readers: int = 1) -> None:
        """Must be made before the processes that share it are forked."""
        self.readers = readers
        self.file = _nameless_file()
        self.file.truncate(PAGESIZE)
        self.memory = mmap(self.file.fileno(), PAGESIZE)
        self.laid: dict[int, int] = {}
        """Beginning and end of each block that may still be read."""

    def put(self, tensors: Tensors) -> Place:
        """Write tensors for all readers, and return their place."""
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
        """Return the tensors at a place, without copying them."""
        begin, end = place["begin"], place["begin"] + place["size"]
        self._reach(end)
        piece = memoryview(self.memory)[begin:end]
        # The tensors keep `piece` alive, so it is finalized after the last of them.
        weakref.finalize(piece, self.memory.__setitem__, begin + reader, 0).atexit = False
        whole = torch.frombuffer(piece, dtype=torch.uint8)
        return {name: _tensor_in(whole, *about) for name, about in place["tensors"].items()}

    def close(self) -> None:
        """Close the file; its memory is freed when no tensor uses it any more."""
        self.file.close()

    def _room(self, size: int) -> int:
        """Return the start of the first gap of that size between blocks still in use, or of the space after them."""
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
        """Map the memory up to ``end``; tensors in the old mapping stay valid."""
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
