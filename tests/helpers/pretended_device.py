"""A pretended GPU: tensors are marked as being on it, and everything is computed on the CPU underneath.

``PretendedDevice`` lets a whole run believe in a device that is not there. It fails where a real one would (an
operation on tensors of both places, NumPy of a tensor on the device, float64 on mps), and where a real one would only
be slow or draw other numbers: a copy that ``feddar.models.devices`` has not made, an index from a Python list, random
numbers drawn on the device. Waiting for the device (``.item()``, ``nonzero``) is counted. As the numbers are those of
the CPU, a run must give the same bits as without it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddar.data.image_cache import in_memory
from feddar.models import devices

ATEN = torch.ops.aten
DRAWS = {"bernoulli", "bernoulli_", "uniform_", "normal_", "random_", "randperm", "rand", "randn", "native_dropout",
         "rand_like", "randn_like", "randint", "multinomial"}  # fmt: skip
WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "bincount", "masked_select"}
MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}


class DeviceError(AssertionError):
    """What would fail, or was not planned, on a real device."""


class PretendedDevice:
    """Use as a context; ``kind`` is cuda or mps."""

    marked: ClassVar[dict[int, StorageWeakRef]] = {}
    """The memory that is on a device, by its address; for all contexts, as some tensors live longer."""

    read_by_itself: ClassVar[dict[int, StorageWeakRef]] = {}
    """The memory that is pinned, in the same way."""

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind, 0)
        self.waits: Counter[str] = Counter()
        """How often the device was waited for, by the phase of training it happened in."""
        self.copies: Counter[str] = Counter()
        """How many tensors went to the device, those to it without waiting (fed), and back."""
        self.inherit = False
        """Whether what torch makes from nothing, within one of its functions, is on the device."""
        self.modes = (_Operations(self), _Functions(self))

    def __enter__(self) -> PretendedDevice:
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        for mode in reversed(self.modes):
            mode.__exit__(*about)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return _storage(tensor)._cdata in self.marked

    def mark(self, tensor: Tensor) -> None:
        """Put the memory of a tensor on the device."""
        if self.device.type == "mps" and tensor.dtype == torch.float64:
            raise DeviceError("float64 on mps, which does not have it")
        storage = _storage(tensor)
        self.marked[storage._cdata] = StorageWeakRef(storage)
        if len(self.marked) % 4096 == 0:
            for key in [key for key, ref in self.marked.items() if ref.expired()]:
                del self.marked[key]

    @classmethod
    def pin(cls, tensor: Tensor) -> Tensor:
        """Return a copy in memory that a device could read by itself."""
        copy = in_memory(tensor).clone()
        cls.read_by_itself[_storage(copy)._cdata] = StorageWeakRef(_storage(copy))
        return copy

    def wait(self) -> None:
        """Count that the device was waited for."""
        names = set(_callers())
        self.waits[next((name for name in ("_train_heads", "_train_encoders") if name in names), "elsewhere")] += 1


class _Functions(TorchFunctionMode):
    """Sees what Python asks of torch: which device it names, and which values it reads."""

    def __init__(self, pretended: PretendedDevice) -> None:
        self.pretended = pretended

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, pretended = dict(kwargs or {}), self.pretended
        if function == Tensor.device.__get__:
            return pretended.device if pretended.holds(args[0]) else function(*args)
        if function in MOVES:
            return self._moved(function.__name__, args, kwargs)
        there = any(pretended.holds(each) for each in _tensors(args, kwargs))
        name = getattr(function, "__name__", "")
        if there and name in ("numpy", "__array__"):
            raise DeviceError("NumPy of a tensor on the device")
        if there and name == "tolist":  # what else reads a value is an operation of its own
            pretended.wait()
        if there and name in ("__getitem__", "__setitem__") and any(isinstance(k, list) for k in tree_keys(args[1])):
            raise DeviceError("an index from a Python list, which is copied to the device each time")
        asked = kwargs.pop("device", None)
        before = pretended.inherit
        pretended.inherit = there if asked is None else torch.device(asked).type != "cpu"
        try:
            return function(*args, **kwargs)
        finally:
            pretended.inherit = before

    def _moved(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        pretended, given = self.pretended, [*rest, *kwargs.values()]
        wanted = {"cpu": devices.CPU, "cuda": pretended.device}.get(name)
        dtype = next((each for each in given if isinstance(each, torch.dtype)), tensor.dtype)
        for each in given:
            if isinstance(each, (torch.device, str)):
                wanted = torch.device(each)
            if isinstance(each, Tensor):
                wanted, dtype = pretended.device if pretended.holds(each) else devices.CPU, each.dtype
        here = pretended.holds(tensor)
        there = here if wanted is None else wanted.type != "cpu"
        if here == there:
            return tensor.to(dtype)
        if "devices.py" not in {code.co_filename.rpartition("/")[2] for code in _codes()}:
            raise DeviceError("a copy to or from the device that was not planned")
        pretended.copies["to" if there else "back"] += 1
        if kwargs.get("non_blocking"):
            if _storage(tensor)._cdata not in pretended.read_by_itself:
                raise DeviceError("a copy that nobody waits for, of memory that is not pinned")
            pretended.copies["fed"] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            copy = tensor.to(dtype, copy=True)
        if there:
            pretended.mark(copy)
        return copy


class _Operations(TorchDispatchMode):
    """Sees every operation, those of gradients, too: all of its tensors must be in one place."""

    def __init__(self, pretended: PretendedDevice) -> None:
        super().__init__()
        self.pretended = pretended

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, pretended = kwargs or {}, self.pretended
        name = function.overloadpacket.__name__
        places = {pretended.holds(each) for each in _tensors(args, kwargs)}
        if len(places) > 1 and not (name == "fill_" and args[1].ndim == 0):  # x[rows] = 1.0, which needs no copy
            raise DeviceError(f"{function} of tensors on both devices")
        there = True in places or (not places and pretended.inherit)
        if there and name in DRAWS:
            raise DeviceError(f"{name}: random numbers are drawn on the CPU, whatever the device")
        if there and (name in WAITS or (name == "index" and _by_mask(args))):
            pretended.wait()
        result = function(*args, **kwargs)
        if there:
            for each in _tensors(result):
                pretended.mark(each)
        return result


def _storage(tensor: Tensor) -> Any:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _tensors(*values: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def tree_keys(key: Any) -> tuple[Any, ...]:
    """Return the parts of an index."""
    return key if isinstance(key, tuple) else (key,)


def _by_mask(args: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1])


def _codes() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _callers() -> Iterator[str]:
    return (code.co_name for code in _codes())


@dataclass(frozen=True)
class Machine:
    """A machine with these GPUs, as far as feddar asks for them."""

    cuda: int = 0
    mps: bool = False
    free: int = 2**40
    """Free memory in bytes."""

    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this machine be such a one for a test."""
        monkeypatch.setattr(devices, "cuda_devices", lambda: self.cuda)
        monkeypatch.setattr(devices, "has_mps", lambda: self.mps)
        monkeypatch.setattr(devices, "free_memory", lambda _: self.free)
        monkeypatch.setattr(devices, "pinned", PretendedDevice.pin)
        monkeypatch.setattr(devices, "overlapping", lambda _: nullcontext([]))


def machine_with(kind: str) -> Machine:
    """Return a machine with one GPU of that kind."""
    return Machine(cuda=int(kind.startswith("cuda")), mps=kind == "mps")
