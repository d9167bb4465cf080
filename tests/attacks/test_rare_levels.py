"""A coordinator that looks which embeddings have moved: a level that one patient has would show that patient."""

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.client import Client
from feddar.algorithm.names import named_reply
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import Request
from feddar.algorithm.schedule import census, phases
from feddar.data.cohort import Cohort
from feddar.data.columns import Column
from feddar.federation.privacy.minimum_cell import MinimumCell
from feddar.models.model import build_model
from feddar.settings import Settings

LEVELS = ("icu", "er", "ward", "rare", "other")
COLUMNS = (Column("age", "number", gaps=True), Column("place", "category", LEVELS, gaps=True))


def table_of(rare, gaps=10, rows=60):
    rng = np.random.default_rng(0)
    place = rng.choice(["icu", "er", "ward"], rows).astype(object)
    place[:gaps] = None
    place[gaps : gaps + rare] = "rare"
    return pd.DataFrame({"age": rng.normal(60, 10, rows), "place": place})


def replies_of(table, encoder, least=5, group=None):
    """Return what the site says in the census and in a round of FedAvg."""
    y, domain = np.arange(len(table)) % 2, np.where(np.arange(len(table)) % 3, "A", "B")
    cohort = Cohort.from_arrays(table, y, domain=domain, client=["site"] * len(table), columns=COLUMNS, group=group)
    settings = Settings(method="fedavg", rounds=1)
    model, initial = build_model(cohort, encoder, settings)
    client = Client("site", cohort, cohort, model, Processors.of([MinimumCell(least)]))
    asked = [census(settings, cohort.objective), *phases(settings.row(), settings, cohort.objective, 1)]
    replies = [client.answer(Request(phase, place, 0, initial)) for place, phase in enumerate(asked)]
    return {name: value for reply in replies for name, value in named_reply(reply).items()}, initial


def moved(encoder, **table):
    """Return the rows of embeddings that have moved, the first of missing values."""
    found, initial = replies_of(table_of(**table), encoder)
    name = next(name for name in found if name.endswith("levels.0.weight"))
    before = initial.encoders["all"][name.removeprefix("encoder/all/")]
    return (found[name] != before).any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("encoder", ["mlp", "wide"])
@pytest.mark.parametrize("gaps", [0, 2, 10])
def test_the_reply_is_the_same_to_the_bit_as_without_the_level(encoder, gaps):
    rare = table_of(rare=1, gaps=gaps)
    without = rare.assign(place=rare["place"].where(rare["place"] != "rare", None))
    one, other = (replies_of(table, encoder)[0] for table in (rare, without))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value), name


@pytest.mark.parametrize("encoder", ["mlp", "wide"])
def test_the_reply_is_the_same_to_the_bit_as_without_a_measurement_that_few_have(encoder):
    """A rare test that four patients had done, and none at all."""
    rare, none = table_of(rare=0), table_of(rare=0)
    rare["age"] = np.where(np.arange(len(rare)) < 4, [1000.0 + n for n in range(len(rare))], np.nan)
    none["age"] = np.nan
    one, other, seen = (replies_of(table, encoder, least)[0] for table, least in ((rare, 5), (none, 5), (rare, 1)))
    assert all(torch.equal(other[name], value) for name, value in one.items())
    assert any(not torch.equal(other[name], value) for name, value in seen.items())


def test_without_the_minimum_the_level_shows():
    """So that the test above can fail: this is the attack, and it works."""
    rare = table_of(rare=1)
    found, initial = replies_of(rare, "mlp", least=1)
    name = next(name for name in found if name.endswith("levels.0.weight"))
    before = initial.encoders["all"][name.removeprefix("encoder/all/")]
    assert (found[name] != before).any(1).tolist() == [True, True, True, True, True, False]


def test_from_the_minimum_on_a_level_is_learned_and_no_embedding_is_of_fewer():
    assert moved("mlp", rare=5) == [0, 1, 2, 3, 4]
    assert moved("mlp", rare=4) == [0, 1, 2, 3]
    assert moved("mlp", rare=4, gaps=0) == [1, 2, 3]


def test_patients_count_not_their_rows():
    rare = table_of(rare=6)
    one_patient = np.arange(len(rare))
    one_patient[10:16] = 10
    found, initial = replies_of(rare, "mlp", group=one_patient)
    name = next(name for name in found if name.endswith("levels.0.weight"))
    before = initial.encoders["all"][name.removeprefix("encoder/all/")]
    assert torch.equal(found[name][4], before[4])
