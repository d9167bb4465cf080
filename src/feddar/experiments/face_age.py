"""The paper's table of age groups in FairFace: race groups as domains, mixtures from one-sided to equal."""

from __future__ import annotations

from functools import partial

from feddar.experiments import faces
from feddar.experiments.controlled import Task

PAPER = {
    "fedavg": {0.1: (44.1, 37.3, 39.8), 0.5: (44.3, 38.9, 41.0), 1: (44.0, 38.7, 40.8), 100: (45.0, 40.9, 42.4)},
    "fedavg-mh": {0.1: (46.8, 32.4, 39.8), 0.5: (49.1, 34.9, 40.0), 1: (51.1, 34.7, 40.3), 100: (49.6, 36.4, 39.8)},
    "feddar-wa": {0.1: (47.7, 32.7, 39.8), 0.5: (47.3, 38.2, 41.0), 1: (49.6, 40.0, 42.8), 100: (47.1, 38.9, 41.4)},
    "feddar-sa": {0.1: (49.0, 40.0, 42.9), 0.5: (47.8, 40.6, 42.8), 1: (48.6, 41.1, 43.9), 100: (48.3, 40.2, 42.8)},
}

K = 16
"""The paper tunes k and does not give it."""

TASK = Task(
    title="Age on FairFace",
    domains=faces.DOMAINS,
    paper=PAPER,
    differs=(f"FedDAR-SA has k = {K}; the paper does not give the k it chose.", *faces.DIFFERS),
)

run = partial(faces.run, TASK, "age", {"k": K})
