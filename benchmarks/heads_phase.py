"""What a heads phase with five epochs costs, in forward passes over the data.

The encoder is frozen in that phase, so each sample's feature is computed once; the target is less than 1.5 passes.
"""

from collections.abc import Iterator

import torch

from benchmarks.figures import Figure, Paired, paired
from feddar.algorithm.client import Client
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort
from feddar.models.model import build_model
from feddar.objectives.objective import CURVATURES, Curvature
from feddar.settings import Settings


def ratio(cohort: Cohort, curvature: Curvature | None) -> Paired:
    model, initial = build_model(cohort, "cnn", Settings(k=64))
    start = ServerState(initial).by_domain("global", "domain", len(cohort.domains)).in_training
    client = Client("all", cohort, None, model)
    phase = Phase("heads", "global", "domain", epochs=5, lr=1e-3, optimizer="adam", curvature=curvature)
    request = Request(phase, 1, 0, start)
    client.answer(request)
    return paired(lambda: client.answer(request), lambda: model.frozen_features(cohort.x, cohort.domain))


def figures() -> Iterator[Figure]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    n = 500
    images = torch.randn(n, 3, 28, 28, generator=generator)
    digits, domains = (torch.randint(0, most, (n,), generator=generator) for most in (10, 5))
    cohort = Cohort.from_arrays(images, digits, domain=domains, classes=range(10))
    for curvature in (None, *CURVATURES):
        found = ratio(cohort, curvature)
        about = f"curvature {curvature}" if curvature else "no curvature"
        name = f"heads phase of 5 epochs / forward pass, 10 classes, k=64, {about}"
        yield Figure(name, found.ratio, "< 1.5", found.note)
