"""A second pretended GPU, by torch's own FakeTensorMode: tensors on it say that they are on ``cuda``.

What torch itself knows of devices is asked here: its rules for every operation refuse tensors of two devices, and say
shape, dtype and device of each result. Every such tensor has a twin on the CPU with its values, on which the same
operation is done. So steps that depend on data go on, and a run must give the same bits as without the device. What is
on the CPU is left as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

CPU = torch.device("cpu")
ATEN = torch.ops.aten
LOAD = torch.load
DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException)


class FakeDevice(TorchDispatchMode):
    """Use as a context; tensors that are moved to ``cuda`` in it are torch's fake ones, each with a twin."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.copies: Counter[str] = Counter()
        """How many tensors went to the device and back."""
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.functions = _Functions(self)
        self.inherit = False
        """Whether what torch makes from nothing, within one of its functions, is on the device."""

    def __enter__(self) -> FakeDevice:
        self.fakes.__enter__()  # beneath this one, it also keeps torch from looking for CUDA
        super().__enter__()
        self.functions.__enter__()
        torch.load = _load_values  # within its mode torch itself would load shapes only
        return self

    def __exit__(self, *about: Any) -> None:
        torch.load = LOAD
        self.functions.__exit__(*about)
        super().__exit__(*about)
        self.fakes.__exit__(*about)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.device.type == "cuda"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return CPU  # to its core, which would look for CUDA; Python and the fake mode know better
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = not tensors and self.inherit
        if not made and not any(map(self.holds, tensors)) and (asked is None or asked.type == "cpu"):
            with _disable_current_modes():
                return function(*args, **kwargs)
        if made or function.overloadpacket.__name__.startswith("new_"):  # with the device that the core believes in
            kwargs = {**kwargs, "device": self.device}
        with _disable_current_modes():
            real = function(*tree_map(twin_of, args), **tree_map(twin_of, kwargs))
        return self._with_twins(self._found(function, args, kwargs, real), real)

    def _found(self, function: Any, args: Any, kwargs: Any, real: Any) -> Any:
        """Return what torch says that an operation gives on the device.

        Where that depends on data, or torch asks CUDA how it would do it, only its rule for devices is asked.
        """
        if function is ATEN._to_copy.default:
            self.copies["to"] += not isinstance(args[0], FakeTensor)
            return self._fake_of(real)
        try:
            return function(*args, **kwargs)
        except DEPENDS_ON_DATA:
            pass
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        FakeTensor._find_common_device(function, tree_leaves((args, kwargs)))
        return tree_map(self._fake_of, real)

    def _fake_of(self, real: Any) -> Any:
        """Return a tensor on the device that looks as this one; what is no tensor is returned to the CPU as it is."""
        if not isinstance(real, Tensor):
            return real
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=self.device)

    def _with_twins(self, found: Any, real: Any) -> Any:
        """Return what an operation gives: tensors of the device with their twins, and real ones of the CPU."""
        values, shape = tree_flatten(found)
        pairs = list(zip(values, tree_leaves(real), strict=True))
        if pairs and isinstance(pairs[0][0], Tensor):  # what else is kept for gradients may differ between devices
            assert (pairs[0][0].shape, pairs[0][0].dtype) == (pairs[0][1].shape, pairs[0][1].dtype)
        return tree_unflatten([self._one(*pair) for pair in pairs], shape)

    def _one(self, found: Any, real: Any) -> Any:
        if not isinstance(found, Tensor) or found.device.type == "cpu":
            return real
        found = found if found.shape == real.shape else self._fake_of(real)
        found.twin = real
        return found


class _Functions(TorchFunctionMode):
    """Sees what Python asks of torch, whose core believes that tensors of the device are on the CPU."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = dict(kwargs or {}), self.device
        if function == Tensor.data.__set__ and device.holds(args[1]):  # type: ignore[attr-defined]
            args[0].twin = twin_of(args[1])
        if function in (Tensor.to, Tensor.cpu) and device.holds(args[0]) and _to_the_cpu(function, args, kwargs):
            device.copies["back"] += 1
            dtype = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), None)
            with _disable_current_modes():
                return twin_of(args[0]).to(dtype or args[0].dtype, copy=True)
        if function is Tensor.__deepcopy__ and device.holds(args[0]):  # torch would look at its memory
            return args[0].detach().clone().requires_grad_(args[0].requires_grad)
        before = device.inherit
        device.inherit = any(isinstance(each, Tensor) and device.holds(each) for each in tree_leaves((args, kwargs)))
        try:
            return function(*args, **kwargs)
        finally:
            device.inherit = before


def _load_values(*args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return LOAD(*args, **kwargs)


def _to_the_cpu(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    places = [torch.device(each) for each in (*args[1:], *kwargs.values()) if isinstance(each, (str, torch.device))]
    return function is Tensor.cpu or any(place.type == "cpu" for place in places)


def twin_of(value: Any) -> Any:
    """Return the twin of a tensor on the device, the CPU instead of the device, and anything else as it is."""
    if isinstance(value, torch.device):
        return CPU
    return getattr(value, "twin", value) if isinstance(value, Tensor) else value
