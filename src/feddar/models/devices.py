"""Devices: where a model does its work, and how tensors get there and back.

A client's work (parameters, batches, optimiser, curvature) is done on the model's device. What is drawn at random,
sent, aggregated and stored is on the CPU, so that a run can go on on another device. Only the functions here move
tensors from one to the other.

Sums over samples are in float64, on the device; where a device does not have float64 (mps), tensors in float64 stay on
the CPU, and so do the sums.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from feddar.data.image_cache import in_memory
from feddar.errors import Notice, UserError

CPU = torch.device("cpu")
LARGEST_SHARE = 0.5
"""Inputs of a client stay on the device if they take at most this share of its free memory, else they follow batch by
batch."""
SHARE_OF_GROUPS = 0.25
"""Small clients that are trained together take about this share of the free memory, all processes together."""

Moved = TypeVar("Moved")


def find_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device of that name (``Settings.device``); one that is not there, or lacks the dtype, is an error.

    ``auto`` is the first of cuda, mps and cpu that this machine has. ``cuda`` without a number is the current one of a
    process: processes are spread over all there are (``take_turn``).
    """
    device = torch.device(_first_available() if name == "auto" else name)
    there = {"cpu": 1, "cuda": cuda_devices(), "mps": int(has_mps())}[device.type]
    if (device.index or 0) >= there:
        raise UserError(f"there is no device '{name}' here: choose {' or '.join(devices_here())} (--device).")
    if dtype == torch.float64 and not has_float64(device):
        raise UserError(f"the device {device} has no float64: set dtype to float32, or choose another device.")
    return device


def _first_available() -> str:
    return "cuda" if cuda_devices() else "mps" if has_mps() else "cpu"


def devices_here() -> list[str]:
    """Return the names of all devices of this machine."""
    return ["cpu", *(f"cuda:{number}" for number in range(cuda_devices())), *(["mps"] if has_mps() else [])]


def cuda_devices() -> int:
    """Return the number of CUDA devices, without initialising CUDA."""
    return torch.cuda.device_count()


def has_mps() -> bool:
    """Return whether there is a GPU of Apple's."""
    return torch.backends.mps.is_available()


def has_float64(device: torch.device) -> bool:
    """Return whether a device can compute in float64."""
    return device.type != "mps"


def free_memory(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, to be used again
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def fits(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    """Return whether tensors may stay on a device, beside what else is there."""
    return device.type == "cpu" or sum(each.nbytes for each in tensors) <= LARGEST_SHARE * free_memory(device)


def memory_of_groups(device: torch.device, jobs: int) -> int:
    """Return the bytes of a GPU that small clients may take that one of so many processes trains together."""
    return int(SHARE_OF_GROUPS * free_memory(device)) // jobs


def take_turn(device: torch.device, number: int) -> None:
    """Let ``cuda`` be another device in each process: of the devices there are, that of this process's number."""
    if device.type == "cuda" and device.index is None:
        torch.cuda.set_device(number % cuda_devices())


def default_jobs(name: str) -> int:
    """Return how many processes suit a device: one for each processor, or one for each GPU."""
    device = find_device(name)
    if device.type == "cpu":
        return os.cpu_count() or 1
    return cuda_devices() if device.type == "cuda" and device.index is None else 1


def seed_devices(seed: int) -> None:
    """Seed the generators of devices that are used, for encoders of users that draw there."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    elif torch.backends.mps.is_built() and has_mps():
        torch.mps.manual_seed(seed)


def moved(value: Moved, device: torch.device) -> Moved:
    """Return a value with the tensors in it on a device: a tensor, or a mapping, tuple, list or dataclass of such.

    Tensors in float64 stay on the CPU if the device does not have it.
    """
    found: Any = value
    if isinstance(value, Tensor):
        there = value.device.type == device.type or (value.dtype == torch.float64 and not has_float64(device))
        found = value if there else value.to(device)
    elif isinstance(value, Mapping):
        found = {name: moved(each, device) for name, each in value.items()}
    elif isinstance(value, (tuple, list)):
        found = type(value)(moved(each, device) for each in value)
    elif is_dataclass(value):
        parts = {each.name: moved(getattr(value, each.name), device) for each in fields(value)}
        found = replace(cast(Any, value), **parts)
    return cast(Moved, found)


def beside(value: Moved, other: Tensor) -> Moved:
    """Return a value with the tensors in it where another tensor is."""
    return moved(value, other.device)


def fed(x: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return the inputs of a batch on a device; those on the CPU get to CUDA while it computes the batch before."""
    if device.type != "cuda":
        return moved(x, device)
    with overlapping(device) as copies:
        for part in x:
            copies.append(part if part.device.type == "cuda" else pinned(part).to(device, non_blocking=True))
    return tuple(copies)


@contextmanager
def overlapping(device: torch.device) -> Iterator[list[Tensor]]:
    """Let a GPU make the copies in the list while it computes; what it is asked to do next waits for them."""
    computing, copying = torch.cuda.current_stream(device), copy_stream(device)
    copies: list[Tensor] = []
    with torch.cuda.stream(copying):
        yield copies
    computing.wait_stream(copying)
    for each in copies:
        each.record_stream(computing)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU in which batches are copied to it."""
    return torch.cuda.Stream(device)


def pinned(tensor: Tensor) -> Tensor:
    """Return a tensor in memory that a GPU can read by itself, without anybody waiting."""
    there: Tensor = in_memory(tensor)
    return there.pin_memory()


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor in the precision of another, and where that is."""
    return tensor.to(other.device, other.dtype)


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, for sums: where it is, or on the CPU if its device does not have float64."""
    return (tensor if has_float64(tensor.device) else tensor.to(CPU)).double()


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers of a module to a device, unless they are there; all of them are in one place."""
    first = next(chain(module.parameters(), module.buffers()), None)
    if first is not None and first.device.type != device.type:
        module.to(device)


def say_if_moved(before: str, now: str) -> None:
    """Say that a run goes on on another device than it was started on."""
    if before != now:
        warnings.warn(
            f"this run was started on {before} and goes on on {now}: the last digits of its results may differ.",
            Notice,
            stacklevel=2,
        )
