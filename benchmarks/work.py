"""The same FedAvg work for feddar, its peers and the bare loop: samples, network, first weights and knobs, as one file.

Peers live in environments without feddar, so the networks are written here in plain torch, as feddar's ``digit-cnn``
and ``mlp`` with one linear head. Samples are random: time does not depend on what is in them, and `make bench` needs
no data set. A plain gradient step, without momentum, is the same arithmetic everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

Tensors = dict[str, Tensor]


class Network(nn.Module):
    """An encoder with one linear head, and its mean loss."""

    def __init__(self, encoder: nn.Module, features: int, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(features, outputs)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(self.encoder(x))
        if scores.shape[1] == 1:
            return functional.binary_cross_entropy_with_logits(scores[:, 0], y)
        return functional.cross_entropy(scores, y)


def digit_cnn() -> Network:
    """The paper's network of six layers for 3 x 28 x 28 digits: 14.2 million parameters."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU()]

    def dense(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]

    halved = [*convolution(3, 64), nn.MaxPool2d(2), *convolution(64, 64), nn.MaxPool2d(2)]
    layers = [*halved, *convolution(64, 128), nn.Flatten(), *dense(128 * 7 * 7, 2048), *dense(2048, 512)]
    return Network(nn.Sequential(*layers), 512, 10)


def mlp(columns: int) -> Network:
    """A network for tables with two hidden layers and one score."""
    return Network(nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()), 32, 1)


NETWORKS: dict[str, Callable[[int], Network]] = {"digit-cnn": lambda _: digit_cnn(), "mlp": mlp}
"""By the name of the encoder in feddar, from the number of columns."""


@dataclass(frozen=True)
class Knobs:
    """How to train. ``threads`` are torch's, in each of the ``processes`` of a peer that can spread over several.

    ``device`` is where ours and the bare loop work.
    """

    network: str
    lr: float = 0.05
    batch_size: int = 32
    epochs: int = 1
    rounds: int = 3
    threads: int = 1
    processes: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Work:
    """Samples of all clients, those of one behind those of another, and how many each holds."""

    knobs: Knobs
    x: Tensor
    y: Tensor
    sizes: list[int]
    initial: Tensors

    def new_network(self) -> Network:
        """Make the network with the first weights."""
        network = NETWORKS[self.knobs.network](self.x.shape[1])
        network.load_state_dict(self.initial)
        return network.train()

    def clients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the samples of each client, as views."""
        return list(zip(self.x.split(self.sizes), self.y.split(self.sizes), strict=True))

    def with_knobs(self, **knobs: float | str) -> Work:
        return replace(self, knobs=replace(self.knobs, **knobs))

    def save(self, path: Path) -> None:
        tensors = {"x": self.x, "y": self.y, "sizes": torch.tensor(self.sizes)}
        tensors |= {f"initial/{name}": value for name, value in self.initial.items()}
        save_file(tensors, path, {"knobs": json.dumps(asdict(self.knobs))})

    @classmethod
    def load(cls, path: Path) -> Work:
        with safe_open(path, "pt") as file:
            knobs = Knobs(**json.loads(file.metadata()["knobs"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dictionary
        x, y, sizes = (tensors.pop(name) for name in ("x", "y", "sizes"))
        return cls(knobs, x, y, sizes.tolist(), {n.removeprefix("initial/"): v for n, v in tensors.items()})


def images(clients: int = 5, samples: int = 500, **knobs: float | str) -> Work:
    """Cross-silo images: the paper's network on random digits."""
    generator = torch.Generator().manual_seed(0)
    n = clients * samples
    x = torch.randn(n, 3, 28, 28, generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)
    return _work(Knobs("digit-cnn", lr=0.01), x, y, [samples] * clients).with_knobs(**knobs)


def table(clients: int, samples: int, columns: int, **knobs: float | str) -> Work:
    """Clients with equal tables, in standard units, and two classes that follow from the columns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * samples, columns, generator=generator, dtype=torch.float64)
    x = ((x - x.mean(0)) / x.std(0, correction=0)).float()
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).float()
    return _work(Knobs("mlp"), x, y, [samples] * clients).with_knobs(**knobs)


def _work(knobs: Knobs, x: Tensor, y: Tensor, sizes: list[int]) -> Work:
    torch.manual_seed(0)
    network = NETWORKS[knobs.network](x.shape[1])
    return Work(knobs, x, y, sizes, network.state_dict())


def furthest(found: Tensors, other: Tensors) -> float:
    """Return the largest difference between parameters of the same names, without the statistics of batch norm."""
    names = [name for name in found if name in other and "running" not in name and "tracked" not in name]
    return max(float((found[name] - other[name]).abs().max()) for name in names)
