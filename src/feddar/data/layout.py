"""The layout of a sample's inputs: which are images, numbers and categories, and in which order an encoder gets them.

A table becomes up to three arrays: images, numbers with NaN where one is missing, and the numbers of categories'
levels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from feddar.data.columns import Column

InputKind = Literal["image", "numbers", "categories", "other"]


@dataclass(frozen=True)
class Input:
    """Kind, shape and dtype of one input array; the shape is without its first dimension, the samples."""

    kind: InputKind
    shape: tuple[int, ...]
    dtype: torch.dtype


def layout_of(x: Iterable[Tensor]) -> tuple[Input, ...]:
    """Return the layout of input arrays."""
    return tuple(Input(_kind(part), tuple(part.shape[1:]), part.dtype) for part in x)


def _kind(part: Tensor) -> InputKind:
    if part.ndim == 2:
        return "numbers" if part.is_floating_point() else "categories"
    return "image" if part.ndim == 4 else "other"


def layout_for(columns: Sequence[Column]) -> tuple[Input, ...]:
    """Return the layout of a table with these columns; a table of categories alone has an empty array of numbers."""
    sizes = [column.size for column in columns if column.kind == "image"]
    measured = sum(column.is_numeric for column in columns)
    named = sum(column.kind == "category" for column in columns)
    found = [Input("image", (3, size, size), torch.uint8) for size in sizes[:1]]
    if measured or named or not sizes:
        found.append(Input("numbers", (measured,), torch.float32))
    if named:
        found.append(Input("categories", (named,), torch.int16))
    return tuple(found)
