"""FairFace in the paper's experiments: settings of both scales, and the samples that methods are trained on.

At full scale samples are images for a ResNet-34 with ImageNet weights. At small scale they are feature maps of the
first stages of a pretrained EfficientNet-Lite0, which stay frozen, so that the maps are computed once.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from feddar.comparison.cells import Parts
from feddar.data.images import Scale
from feddar.data.sources import face_images
from feddar.data.sources.data_folder import find_set
from feddar.data.sources.image_pool import Ints, Pool, at_most
from feddar.errors import TrainingError
from feddar.experiments import controlled
from feddar.experiments.common import ExperimentOptions
from feddar.experiments.controlled import Data, Setting
from feddar.models.encoders import networks
from feddar.models.encoders.weights import load_weights
from feddar.results.training import fixed_threads
from feddar.simulation.processes import run_all

WEIGHTS = "resnet34.pth"
WEIGHTS_ORIGIN = "https://download.pytorch.org/models/resnet34-b627a593.pth"
DOMAINS = "the 7 race groups of FairFace"
PARTS: tuple[face_images.Part, face_images.Part] = ("train", "val")
CHUNK, PIECE = 100, 500
"""The number of images that the frozen stages process at once, and the number in a task of a process."""

SMALL = Setting(
    alphas=(0.1, 0.5, 1, 100),
    seeds=3,
    training={
        "encoder": "maps",
        "rounds": 30,
        "warmup": 6,
        "last": 5,
        "lr": 1e-3,
        "lr_steps": "18:0.1",
        "batch_size": 32,
    },
    differs=(
        "Instead of a whole ResNet-34 at 224 pixels, the first five stages of an EfficientNet-Lite0 with ImageNet "
        "weights stay frozen, at 96 pixels, and a convolution and a dense layer above them are trained, without "
        "flips; 30 rounds (6 of FedAvg first) instead of 100 (20), learning rate 1e-3 instead of 1e-4.",
    ),
)
FULL = Setting(
    alphas=(0.1, 0.5, 1, 100),
    seeds=3,
    training={"rounds": 100, "warmup": 20, "last": 10, "lr": 1e-4, "lr_steps": "60:0.1", "batch_size": 32},
    differs=("The batch size, which the paper does not give, is 32.",),
)
SCALES = {"small": SMALL, "full": FULL}
SIZES = {"small": 96, "full": 224}
DIFFERS = (
    "Numbers depend on the copy of FairFace: the set has 86,744 training and 10,954 validation images of 224 pixels, "
    "and a smaller copy gives other accuracies.",
    "The paper does not say how many epochs heads are trained for in a round; here 5.",
)


def samples(
    label: face_images.Label, scale: str, setting: Setting, options: ExperimentOptions
) -> tuple[Data, nn.Module | str]:
    """Return a function that draws training and test samples for alpha and a seed, and the encoder for them."""
    train, val = (face_images.pool(part, label, SIZES[scale], options.data) for part in PARTS)
    tested = at_most(val.samples, setting.test)
    drawn_for = product(setting.alphas, range(setting.seeds))
    draws = {(alpha, seed): controlled.draw(train, setting, alpha, seed) for alpha, seed in drawn_for}
    if scale == "full":
        network, images = networks.resnet34(), val.with_images(tested)
        load_weights(network, _weights(options.data))
        encoder = nn.Sequential(networks.Flip(), network)
        return lambda alpha, seed: (train.with_images(draws[alpha, seed]), images), encoder
    drawn = np.unique(np.concatenate([train.numbers(draw) for draw in draws.values()]))
    options.say(f"{len(drawn) + len(tested):,} images pass through the frozen stages, once")
    seen = frozen_maps(train, drawn, options.jobs)
    maps = replace(tested, x=(frozen_maps(val, val.numbers(tested), options.jobs),))

    def parts(alpha: float, seed: int) -> Parts:
        draw = draws[alpha, seed]
        return replace(draw, x=(seen[np.searchsorted(drawn, train.numbers(draw))],)), maps

    return parts, "maps"


def frozen_maps(pool: Pool, numbers: Ints, jobs: int) -> Tensor:
    """Return the feature maps of these images by the frozen stages; processes write into shared memory."""
    stages = nn.Sequential(Scale(pool.scaling), networks.FrozenStages())
    shape = (len(numbers), *stages(pool.images(numbers[:1])).shape[1:])
    # Anonymous memory: it is shared with forked processes, and unlike /dev/shm it has no limit of its own.
    memory = mmap.mmap(-1, max(1, 4 * math.prod(shape)))
    maps = torch.frombuffer(memory, dtype=torch.float32).view(shape)

    def fill(start: int, _: object) -> None:
        with fixed_threads(1):
            for first in range(start, min(start + PIECE, len(numbers)), CHUNK):
                chunk = slice(first, min(first + CHUNK, start + PIECE))
                maps[chunk] = stages(pool.images(numbers[chunk]))

    def lost(_: int) -> None:
        raise TrainingError("a process ended unexpectedly (out of memory?): run with fewer jobs.")

    run_all((partial(fill, start) for start in range(0, len(numbers), PIECE)), jobs, lambda *_: None, lost)
    return maps


def _weights(folder: str | None) -> Path:
    return find_set("weights", folder, files=(WEIGHTS,), origin=f"{WEIGHTS_ORIGIN}, renamed") / WEIGHTS
