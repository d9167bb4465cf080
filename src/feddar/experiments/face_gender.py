"""The paper's table of gender in FairFace: race groups as domains, mixtures from one-sided to equal."""

from __future__ import annotations

from functools import partial

from feddar.experiments import faces
from feddar.experiments.controlled import Task

PAPER = {
    "fedavg": {0.1: (92.0, 71.7, 83.9), 0.5: (89.8, 77.6, 84.5), 1: (91.0, 77.4, 84.2), 100: (90.5, 77.1, 84.7)},
    "fedavg-mh": {0.1: (90.2, 48.7, 78.9), 0.5: (89.2, 77.8, 84.1), 1: (91.6, 76.8, 83.9), 100: (91.1, 77.5, 84.5)},
    "feddar-wa": {0.1: (89.8, 53.4, 80.9), 0.5: (91.5, 76.7, 84.3), 1: (91.2, 76.1, 84.3), 100: (90.0, 76.8, 84.1)},
    "feddar-sa": {0.1: (92.2, 73.4, 85.1), 0.5: (91.3, 78.1, 85.2), 1: (91.4, 78.2, 85.1), 100: (92.2, 78.1, 85.6)},
}

K = 2
"""The paper's choice for gender."""

TASK = Task(
    title="Gender on FairFace",
    domains=faces.DOMAINS,
    paper=PAPER,
    differs=(f"FedDAR-SA has k = {K}, as in the paper.", *faces.DIFFERS),
)

run = partial(faces.run, TASK, "gender", {"k": K})
