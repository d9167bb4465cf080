"""A coordinator that reads a patient out of a weighted sum over many, of which the others have next to no weight."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from feddar.algorithm.client import Client
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import Phase, Request
from feddar.data.cohort import Cohort
from feddar.federation.privacy import minimum_cell
from feddar.federation.privacy.minimum_cell import MinimumCell
from feddar.models.heads import full_matrix
from feddar.models.model import build_model
from feddar.models.parameters import Parameters
from feddar.settings import Settings

AGE = 1.25
"""What the one patient has, in standard units."""


class FirstNumber(nn.Module):
    """An encoder that shows the first number as it is."""

    def forward(self, numbers):
        return numbers[:, :1]


def pooled(weights, least=5, patient=None):
    """Return what a site sends of domain B, whose patients have these weights: its curvature, or None."""
    number = 60 + len(weights)
    ages = np.random.default_rng(0).normal(size=number)
    ages[60] = AGE
    domain = ["A"] * 60 + ["B"] * len(weights)
    group = None if patient is None else [*range(60), *(1000 + each for each in patient)]
    cohort = Cohort.from_arrays(
        pd.DataFrame({"age": ages, "other": ages}), np.arange(number) % 2, domain=domain, client=["site"] * number,
        group=group,
    )  # fmt: skip
    cohort = replace(cohort, weight=torch.tensor([1.0] * 60 + list(weights), dtype=torch.float64))
    model, initial = build_model(cohort, FirstNumber(), Settings())
    client = Client("site", cohort, None, model, Processors.of([MinimumCell(least)]))
    heads = {key: torch.zeros(1, 2) for key in "01"}
    sums = client.answer(Request(Phase("pool", "global", "domain"), 1, 0, Parameters(initial.encoders, heads))).sums
    assert "pooled_curvature/0" in sums
    return sums.get("pooled_curvature/1")


def test_a_patient_with_nearly_all_of_the_weight_can_be_read(monkeypatch):
    """So that the tests below can fail: the other 300 patients of the domain hide nothing."""
    monkeypatch.setattr(minimum_cell, "MOST_OF_THE_WEIGHT", 1.0)
    matrix = full_matrix(pooled([1e9] + [1.0] * 300))
    assert float(matrix[0, 1] / matrix[1, 1]) == pytest.approx(AGE, abs=1e-5)


@pytest.mark.parametrize(
    ("weights", "least", "sent"),
    [
        ([1e9] + [1.0] * 300, 5, False),
        ([1000.0] * 4 + [1.0] * 300, 5, False),  # four patients have 93 %
        ([1000.0] * 5 + [1.0] * 300, 5, True),
        ([3.0, 2.0, 1.0, 1.0, 1.0], 5, True),
        ([1.0] * 5, 5, True),
        ([1e9] + [1.0] * 300, 1, True),
    ],
)
def test_nothing_is_sent_of_a_domain_whose_weight_fewer_have_than_the_minimum(weights, least, sent):
    assert (pooled(weights, least) is not None) is sent


def test_patients_count_not_their_rows():
    """One patient with ten rows, and twenty others with next to nothing."""
    weights, patient = [10.0] * 10 + [0.1] * 20, [0] * 10 + [*range(1, 21)]
    assert pooled(weights) is not None
    assert pooled(weights, patient=patient) is None
