"""A network compiled by torch while it is trained, where this machine has a compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from feddar.errors import Notice

COMPILERS = ("torch._dynamo", "torch._inductor")
"""Errors that are defined in these modules are about compiling, and not about what is computed."""


class Compiled:
    """Calls a module as compiled code, which is made in the first call; where that fails, the module as it is."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.run: Callable[..., Tensor] = torch.compile(module)

    def __call__(self, *x: Tensor) -> Tensor:
        """Return what the module gives."""
        try:
            features: Tensor = self.run(*x)
            return features
        except RuntimeError as error:
            if not type(error).__module__.startswith(COMPILERS):
                raise
            reason = str(error).strip().splitlines()[0]
        message = f"the encoder cannot be compiled here, and is trained without: {reason}"
        warnings.warn(message, Notice, stacklevel=2)
        self.run = self.module
        uncompiled: Tensor = self.module(*x)
        return uncompiled
