"""A part of the sites in each round: who is asked, that results are those of one process, and what sites refuse."""

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.algorithm.participation import highest_number, number_of
from feddar.algorithm.wire import pack, unpack
from feddar.errors import TrainingError
from feddar.federation.coordinator import CoordinatorEvents, coordinate
from feddar.federation.links.local import LocalLink
from feddar.results.run_folder import read_model
from federation.test_engines import pooled
from helpers.sites import NAMES, local_link, make_sites, make_study, write_tables

ROUNDS, DRAWN = 4, 2


@pytest.fixture
def data(tmp_path):
    return write_tables(tmp_path / "data")


def study_of(data, **training):
    """Return a study in which two of three sites train in a round."""
    study = make_study(data, **{"rounds": ROUNDS, "validation": 0.0} | training)
    return replace(study, training=study.training.model_copy(update={"clients_per_round": DRAWN}))


def drawn(study, number):
    highest = highest_number(study.training, number, NAMES)
    return {name for name in NAMES if number_of(study.training.seed, number, name) <= highest}


@pytest.mark.parametrize(
    "method", ["feddar", "feddar-sa", "ditto", "fedminmax", "fedrod", "afl", "fairfed", "analytic"]
)
def test_results_are_those_of_one_process(data, tmp_path, method):
    study = study_of(data, method=method)
    sites = make_sites(data, tmp_path / "kept", min_cell=1)
    coordinate(study, local_link(sites), tmp_path / "out")
    parts = [site.participation.client.train for site in sites.values()]
    run = feddar.train(pooled(parts), **study.training.model_dump() | {"encoder": study.training.encoder})
    found = named_state(read_model(tmp_path / "out")[1])
    assert run.settings.clients_per_round == DRAWN
    for name, value in named_state(run.state).items():
        torch.testing.assert_close(value, found[name], rtol=0, atol=1e-6)


def test_only_those_that_are_drawn_are_asked_to_train(data, tmp_path):
    study = study_of(data, validation=0.1)
    coordinate(study, local_link(make_sites(data, tmp_path / "kept")), tmp_path / "out")
    asked = pd.read_csv(tmp_path / "out" / "exchanges.csv")
    assert asked["problem"].isna().all()
    for number in range(1, ROUNDS + 1):
        of_round = asked[asked["round"] == number].groupby("phase")["site"].agg(set)
        assert of_round["heads"] == of_round["encoder"] == drawn(study, number)
        assert of_round["pool"] == of_round["validate"] == of_round["measure"] == set(NAMES)
    assert len(Counter(tuple(sorted(drawn(study, number))) for number in range(1, ROUNDS + 1))) > 1


def test_a_stopped_study_goes_on_to_the_same_bits(data, tmp_path):
    study = study_of(data)
    coordinate(study, local_link(make_sites(data, tmp_path / "kept")), tmp_path / "whole")
    sites = make_sites(data, tmp_path / "other")

    def stop(end):
        if end.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coordinate(study, local_link(sites), tmp_path / "out", events=CoordinatorEvents(progress=stop))
    coordinate(study, local_link(sites), tmp_path / "out", resume=True)
    whole, again = (named_state(read_model(tmp_path / name)[1]) for name in ("whole", "out"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_all_that_are_drawn_have_to_answer_where_they_are_few(data, tmp_path):
    study = study_of(data)
    sites = make_sites(data, tmp_path / "kept")
    away = min(drawn(study, 1))

    def answer(message):
        return b"" if b'"name": "heads"' in message else sites[away].answer(message)

    link = LocalLink({name: answer if name == away else sites[name].answer for name in NAMES})
    with pytest.raises(TrainingError, match="1 of 2 sites answered in the heads phase of round 1, and 2 are needed"):
        coordinate(study, link, tmp_path / "out")


def test_a_site_trains_only_where_it_is_drawn_and_is_left_out_of_nothing_else(data, tmp_path):
    study = study_of(data)
    sites, asked = make_sites(data, tmp_path / "kept"), []

    def listening(name):
        def answer(message):
            asked.append(message)
            return sites[name].answer(message)

        return answer

    coordinate(study, LocalLink({name: listening(name) for name in NAMES}), tmp_path / "out")
    heads = next(message for message in asked if b'"name": "heads"' in message)
    (other,) = set(NAMES) - drawn(study, 1)
    assert said(sites[other].answer(heads)) == "this site does not train in round 1."
    about, tensors = unpack(next(message for message in asked if b'"name": "pool"' in message))
    refused = sites[other].answer(pack(about | {"up_to": 5}, tensors))
    assert said(refused) == "the study asks all sites in the pool phase of every round."


def said(answer):
    return unpack(answer)[0]["why"]
