"""Weights from a file, for any encoder: safetensors, or a state dict that torch saved. Only tensors are loaded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from feddar.errors import UserError, one_line

LAST_LAYERS = ("fc.", "_fc.", "classifier.", "class_layers.out.", "head.")
"""Names of a classifier's last layer, which maps features to classes, in well-known networks."""

# Names in torchvision's DenseNet lack MONAI's level `layers`; older files also have a dot before the number.
_DENSE_LAYER = re.compile(r"(denselayer\d+)\.(norm|conv)\.?([12])\.")


def load_weights(network: nn.Module, path: Path) -> list[str]:
    """Load a file's tensors into the network; return the names of a classifier's last layer, which are not used."""
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    given = {_known_as(name, expected): tensor for name, tensor in _read(path).items()}
    unused = [name for name in given if name not in expected and name.startswith(LAST_LAYERS)]
    taken = {name: tensor for name, tensor in given.items() if name not in unused}
    problems = _misfits(taken, expected)
    if problems:
        more = f" ({len(problems) - 1} more do not fit either)" * (len(problems) > 1)
        raise _unusable(path, f"{problems[0]}{more}; use a file of this very encoder")
    network.load_state_dict(taken)
    return unused


def _read(path: Path) -> Mapping[str, Tensor]:
    advice = "save a network's state_dict()"
    try:
        if path.suffix == ".safetensors":
            tensors: Any = load_file(path)
        else:
            with warnings.catch_warnings(action="ignore"):
                tensors = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise _unusable(path, "there is no such file") from None
    except (OSError, SafetensorError) as error:
        raise _unusable(path, f"{one_line(error).removesuffix('.')}; {advice}") from None
    except Exception:
        # torch's own message is not shown: it explains how to load the file anyway, which would run the code in it.
        reason = "it is damaged or holds more than tensors, which is never loaded"
        raise _unusable(path, f"{reason}; {advice} as safetensors") from None
    if not isinstance(tensors, Mapping) or not tensors:
        raise _unusable(path, f"it holds no tensors by name; {advice}")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise _unusable(path, f"'{name}' is no tensor; {advice}")
    return tensors


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(f"cannot use the weights in {path}: {reason}.")


def _known_as(name: str, expected: Mapping[str, torch.Size]) -> str:
    renamed = _DENSE_LAYER.sub(r"\1.layers.\2\3.", name)
    return renamed if renamed in expected else name


def _misfits(given: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> list[str]:
    """Return messages about tensors that do not fit: wrong shapes first, since they explain most."""
    shapes = [
        f"'{name}' has the shape {list(tensor.shape)}, and the encoder's has {list(expected[name])}"
        for name, tensor in given.items()
        if name in expected and tensor.shape != expected[name]
    ]
    # Files of old versions of torch lack batch norm's counter, which is not needed.
    lacking = [name for name in expected if name not in given and not name.endswith("num_batches_tracked")]
    return [
        *shapes,
        *(f"it lacks '{name}' of shape {list(expected[name])}" for name in lacking),
        *(f"the encoder has no '{name}', of shape {list(given[name].shape)}" for name in given if name not in expected),
    ]
