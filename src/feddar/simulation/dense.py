"""Dense layers with ReLU, as the encoder ``mlp`` has them: values and gradients of many clients in closed form.

What comes before the first layer, and is the same for all clients, is computed once for all steps of a phase. Each
layer of all clients is then one batched product of matrices forward and two backward, in the layout in which parameters
are stored. Autograd under ``vmap`` computes the same, with several times as many passes over memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from feddar.models.encoders.tabular import MLP
from feddar.models.model import Body
from feddar.models.parameters import Tensors


@dataclass(frozen=True)
class DenseLayers:
    """An encoder that is a ReLU of one linear layer after another, on inputs that are not trained."""

    inputs: nn.Module
    prefix: str
    """The name of ``inputs`` in the body."""
    layers: tuple[str, ...]
    """The names of the linear layers in the body; each has a bias, and a ReLU after it."""

    def prepared(self, common: Tensors, x: tuple[Tensor, ...]) -> Tensor:
        """Return what the first layer gets of all samples, [n, columns]."""
        start = f"{self.prefix}."
        fixed = {name.removeprefix(start): value for name, value in common.items() if name.startswith(start)}
        found: Tensor = functional_call(self.inputs, fixed, x)
        return found

    def forward(self, own: Tensors, x: Tensor) -> list[Tensor]:
        """Return the batches [C, B, columns] and what each layer makes of them under the stacked parameters ``own``."""
        values = [x]
        for name in self.layers:
            weight, bias = own[f"{name}.weight"], own[f"{name}.bias"]
            values.append(torch.baddbmm(bias[:, None], values[-1], weight.mT).relu_())
        return values

    def backward(self, own: Tensors, values: Sequence[Tensor], slope: Tensor) -> Tensors:
        """Return the gradients in the parameters, by name, from ``forward`` and the gradient in its last values."""
        found: Tensors = {}
        for name, x, pull in self._pulls(own, values, slope):
            found |= {f"{name}.weight": pull.mT @ x, f"{name}.bias": pull.sum(1)}
        return found

    def descend(self, own: Tensors, values: Sequence[Tensor], slope: Tensor, lr: float) -> None:
        """Take a plain gradient step in place: the products that are the gradients are added to the parameters."""
        for name, x, pull in self._pulls(own, values, slope):
            own[f"{name}.weight"].baddbmm_(pull.mT, x, alpha=-lr)
            own[f"{name}.bias"].sub_(pull.sum(1), alpha=lr)

    def _pulls(self, own: Tensors, values: Sequence[Tensor], slope: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each layer, the last first, with what it got and the gradient in what it gave before its ReLU.

        A layer's parameters may be changed once it has been yielded.
        """
        for place in reversed(range(len(self.layers))):
            name = self.layers[place]
            pull = torch.ops.aten.threshold_backward(slope, values[place + 1], 0)
            slope = pull @ own[f"{name}.weight"] if place else slope
            yield name, values[place], pull


def dense_layers(body: nn.Module, common: Tensors) -> DenseLayers | None:
    """Return the body as dense layers, if it is an ``MLP`` whose layers are trained and whose inputs are not.

    ``common`` are those of its tensors that all clients share.
    """
    if not (type(body) is Body and type(body.encoder) is MLP and isinstance(body.scale, nn.Identity)):
        return None
    layers = body.encoder.layers.named_children()
    linear = [f"encoder.layers.{name}" for name, part in layers if isinstance(part, nn.Linear)]
    prefix = "encoder.inputs"
    shared = {f"{prefix}.{name}" for name in body.encoder.inputs.state_dict()} <= common.keys()
    trained = not any(f"{name}.{part}" in common for name in linear for part in ("weight", "bias"))
    if not (shared and trained and isinstance(body.projection, nn.Identity)):
        return None
    return DenseLayers(body.encoder.inputs, prefix, tuple(linear))
