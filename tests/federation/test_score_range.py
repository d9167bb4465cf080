"""Bins of scores are narrow where scores were in the round before: the range is learned, kept, sent and used."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from feddar.algorithm.client import Client
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.wire import unpack
from feddar.data.cohort import Cohort
from feddar.evaluation.from_sums import refined_score_range
from feddar.federation.coordinator import coordinate
from feddar.federation.links.local import LocalLink
from feddar.models.model import build_model
from feddar.models.parameters import Parameters
from feddar.objectives import Binary, Multiclass, MultiLabel
from feddar.objectives.score_bins import BINS, FIRST, next_score_range
from feddar.objectives.scored import Scored
from feddar.results.run_folder import read_model
from feddar.settings import Settings
from helpers.sites import NAMES, make_sites, make_study, write_tables


def sums_of(objective, log_odds, score_range=None):
    """Return what a site says of samples with these log-odds of their classes."""
    predicted = torch.sigmoid(torch.as_tensor(log_odds, dtype=torch.float64))
    if predicted.ndim == 1:
        predicted = torch.stack([1 - predicted, predicted], 1)
    y = torch.arange(len(predicted)) % predicted.shape[1]
    return objective.sums(Scored(y, predicted, torch.zeros_like(y), 1, score_range))


def test_the_range_is_the_mean_and_twice_the_spread_of_log_odds():
    rng = np.random.default_rng(0)
    odds = rng.normal(-3, 0.5, 4000)
    first = refined_score_range({"a": sums_of(Binary(), odds[:1000]), "b": sums_of(Binary(), odds[1000:])}, None)
    assert first.shape == (1, 2)
    assert first[0].tolist() == pytest.approx([odds.mean(), 2 * odds.std()], rel=0.01)
    assert first[0].tolist() != [*FIRST]
    moved = refined_score_range({"a": sums_of(Binary(), odds + 5, first)}, first)
    assert moved[0].tolist() == pytest.approx([odds.mean() + 5, 2 * odds.std()], rel=0.02)


def test_each_class_has_its_own():
    rng = np.random.default_rng(0)
    odds = np.stack([rng.normal(-4, 0.3, 3000), rng.normal(0, 1, 3000), rng.normal(2, 0.1, 3000)], 1)
    found = refined_score_range({"a": sums_of(Multiclass((0, 1, 2)), odds)}, None)
    assert found[:, 0].tolist() == pytest.approx(odds.mean(0).tolist(), abs=0.05)
    assert found[:, 1].tolist() == pytest.approx((2 * odds.std(0)).tolist(), rel=0.05)


def test_each_of_several_outcomes_has_its_own_and_is_counted_by_it():
    rng = np.random.default_rng(0)
    odds = np.stack([rng.normal(-4, 0.3, 3000), rng.normal(2, 0.1, 3000)], 1)
    objective, y = MultiLabel(("died", "icu")), torch.from_numpy(rng.integers(0, 2, (3000, 2)))
    predicted, domain = torch.sigmoid(torch.from_numpy(odds)), torch.zeros(3000, dtype=torch.long)
    first = objective.sums(Scored(y, predicted, domain, 1))
    found = refined_score_range({"a": first}, None)
    assert found[:, 0].tolist() == pytest.approx(odds.mean(0).tolist(), abs=0.05)
    assert found[:, 1].tolist() == pytest.approx((2 * odds.std(0)).tolist(), rel=0.05)
    then = objective.sums(Scored(y, predicted, domain, 1, found))
    filled = [(sums["histogram"].sum((0, 2)) > 0).sum(1) for sums in (first, then)]
    assert (filled[1] > 2 * filled[0]).all()


def test_it_stays_where_nothing_was_told():
    before = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert refined_score_range({}, before) is before
    assert refined_score_range({"a": {"numbers": torch.zeros(1, 4)}}, before) is before
    assert next_score_range(torch.zeros(1, BINS), before) is before
    assert refined_score_range({}, None) is None


def test_a_client_counts_in_the_bins_of_the_range_it_is_sent():
    """Log-odds from 2.99 to 3.01: hardly told apart at first, and each in a bin of its own once it is known where."""
    odds = torch.linspace(2.99, 3.01, 40)
    cohort = Cohort.from_arrays(odds[:, None].numpy(), np.arange(40) % 2)
    model, initial = build_model(cohort, nn.Identity(), Settings(method="fedavg"))
    client = Client("site", cohort, cohort, model)
    request = Request(Phase("measure"), 1, 0, Parameters(initial.encoders, {"all": torch.tensor([[1.0, 0.0]])}))
    at_first = client.answer(request).sums
    assert int((at_first["histogram"].sum(2) > 0).sum()) < 10
    known = refined_score_range({"site": at_first}, None)
    assert float(known[0, 0]) == pytest.approx(3, abs=0.01)
    then = client.answer(replace(request, score_range=known)).sums
    assert int((then["histogram"].sum(2) > 0).sum()) == 40


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


class Listening(LocalLink):
    """A link that notes what is sent and answered in the phase that measures; it may break in a round."""

    def __init__(self, handlers, breaks_in=None):
        super().__init__(handlers)
        self.sent, self.told, self.breaks_in = {}, {}, breaks_in

    def ask(self, message, sites, timeout):
        about, tensors = unpack(message)
        measuring = about["kind"] == "ask" and about["phase"]["name"] == "measure"
        if measuring:
            if about["round"] == self.breaks_in:
                raise ConnectionError
            self.sent[about["round"]] = tensors.get("focus")
        for answer in super().ask(message, sites, timeout):
            if measuring:
                self.told.setdefault(about["round"], {})[answer.site] = unpack(answer.content)[1]
            yield answer


def link_of(tables, folder, **options):
    return Listening({name: site.answer for name, site in make_sites(tables, folder / "kept").items()}, **options)


def test_every_round_has_the_range_of_the_round_before(tables, tmp_path):
    link = link_of(tables, tmp_path)
    run = coordinate(make_study(tables, rounds=3, validation=0), link, tmp_path / "out")
    assert link.sent[1] is None
    expected = None
    for number in (1, 2, 3):
        if number > 1:
            assert torch.equal(link.sent[number], expected)
        # Sums are added in the order of names.
        told = {name: link.told[number][name] for name in NAMES}
        expected = refined_score_range(told, expected)
        assert expected is not None
    assert torch.equal(run.state.score_range, expected)
    assert torch.equal(read_model(tmp_path / "out")[1].score_range, expected)
    assert not torch.equal(link.sent[2], link.sent[3])


def test_a_resumed_run_goes_on_with_its_range(tables, tmp_path):
    study = make_study(tables, rounds=3)
    whole = link_of(tables, tmp_path / "whole")
    coordinate(study, whole, tmp_path / "whole" / "out")
    with pytest.raises(ConnectionError):
        coordinate(study, link_of(tables, tmp_path, breaks_in=3), tmp_path / "out")
    resumed = link_of(tables, tmp_path)
    coordinate(study, resumed, tmp_path / "out", resume=True)
    assert resumed.sent.keys() == {3}
    assert torch.equal(resumed.sent[3], whole.sent[3])
