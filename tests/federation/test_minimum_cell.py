"""The minimum cell, to the patient: of as many as agreed something is said, of one fewer nothing."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from feddar.algorithm.client import Client
from feddar.algorithm.names import named_request
from feddar.algorithm.processors import Processors
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.data.cohort import Cohort
from feddar.federation.privacy.minimum_cell import MinimumCell, patients_by_domain
from feddar.federation.rehearsal import build
from feddar.federation.site import Site
from feddar.models.model import build_model
from feddar.models.parameters import Parameters
from feddar.objectives.score_bins import BINS
from feddar.settings import Settings
from helpers.sites import NAMES, make_study, write_tables

RUN = "0123456789abcdef"
PER_PATIENT = 3
"""Samples of a patient, where patients have several."""


def cohort_of(patients, grouped=False, missing=0):
    """Return samples of as many patients of each domain as said, each patient's value far from those of others.

    The first patients lack the second number.
    """
    each = PER_PATIENT if grouped else 1
    domain = np.repeat([f"d{m}" for m, count in enumerate(patients) for _ in range(count)], each)
    number = np.repeat(np.arange(sum(patients)), each)
    table = pd.DataFrame({"first": number * 0.37 - 2, "second": np.where(number < missing, np.nan, 0.1 * number)})
    y = (np.arange(len(table)) // each) % 2
    names = [f"d{m}" for m in range(len(patients))]
    return Cohort.from_arrays(
        table, y, domain=domain, domains=names, client=["site"] * len(table), group=number if grouped else None
    )


class FirstNumber(nn.Module):
    """An encoder that shows the first number as it is."""

    def forward(self, numbers):
        return numbers[:, :1]


def client_of(cohort, least, encoder=None):
    model, initial = build_model(cohort, encoder, Settings(method="fedavg"))
    return Client("site", cohort, cohort, model, Processors.of([MinimumCell(least)])), initial


def census_of(cohort, least):
    return client_of(cohort, least)[0].answer(Request(Phase("census"), 0, 0)).sums


def sums_of(cohort, least):
    """Return what is told of test samples whose log-odds are their first number."""
    client, initial = client_of(cohort, least, FirstNumber())
    parameters = Parameters(initial.encoders, {"all": torch.tensor([[1.0, 0.0]])})
    return client.answer(Request(Phase("measure"), 1, 0, parameters)).sums


def told_bins(cohort, least):
    """Return how many samples of each domain are in each bin of scores, [domain, BINS]."""
    return sums_of(cohort, least)["histogram"].sum((1, 2))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("least", [2, 3, 5])
def test_a_domain_with_as_many_patients_is_told_and_one_with_fewer_is_not(least, grouped):
    cohort = cohort_of([least - 1, least, least + 1], grouped)
    each = PER_PATIENT if grouped else 1
    assert census_of(cohort, least)["counts"].tolist() == [0, least * each, (least + 1) * each]
    assert census_of(cohort, least + 1)["counts"].tolist() == [0, 0, (least + 1) * each]
    assert census_of(cohort, 1)["counts"].tolist() == [n * each for n in (least - 1, least, least + 1)]
    assert census_of(cohort, 0)["counts"].tolist() == [n * each for n in (least - 1, least, least + 1)]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("least", [2, 3, 5])
def test_a_column_with_values_of_as_many_patients_has_sums_and_one_with_fewer_has_none(least, grouped):
    each = PER_PATIENT if grouped else 1
    enough, few = (census_of(cohort_of([16], grouped, missing=16 - known), least) for known in (least, least - 1))
    assert enough["present"].tolist() == [16 * each, least * each]
    assert few["present"].tolist() == [16 * each, 0]
    assert float(enough["sum"][1]) == pytest.approx(each * sum(0.1 * n for n in range(16 - least, 16)))
    assert (float(few["sum"][1]), float(few["squares"][1])) == (0, 0)
    assert float(few["sum"][0]) != 0


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("least", [2, 3, 5])
def test_gaps_of_as_many_patients_are_gaps_and_those_of_fewer_are_medians(least, grouped):
    each = PER_PATIENT if grouped else 1
    enough, few = (census_of(cohort_of([16], grouped, missing=gaps), least) for gaps in (least, least - 1))
    assert enough["present"].tolist() == [16 * each, (16 - least) * each]
    assert few["present"].tolist() == [16 * each, 16 * each]
    known = np.repeat(0.1 * np.arange(least - 1, 16), each)
    median = np.sort(known)[(len(known) - 1) // 2]
    assert float(few["sum"][1]) == pytest.approx(known.sum() + (least - 1) * each * median)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("least", [2, 3, 5])
def test_a_bin_of_scores_has_as_many_patients_and_not_one_fewer(least, grouped):
    """Patients of whom no two share a bin: twice as many as agreed fill two bins, and one fewer only one."""
    each = PER_PATIENT if grouped else 1
    apart = told_bins(cohort_of([2 * least], grouped), 0)
    assert sorted(apart[apart > 0].tolist()) == [each] * 2 * least
    for patients, bins in ((2 * least, 2), (2 * least - 1, 1), (3 * least, 3), (least, 1)):
        told = told_bins(cohort_of([patients], grouped), least)
        filled = told[told > 0].tolist()
        assert len(filled) == bins
        assert min(filled) >= least * each
        assert sum(filled) == patients * each


def test_no_bin_is_filled_by_a_domain_with_fewer_patients():
    told = told_bins(cohort_of([4, 5, 11]), 5)
    assert [sorted(row[row > 0].tolist()) for row in told] == [[], [5], [5, 6]]
    assert sums_of(cohort_of([4, 5, 11]), 5)["numbers"][:, 0].tolist() == [0, 5, 11]


def test_a_patient_with_many_samples_is_one_patient():
    """Four patients fill no bin of five, however many samples they have."""
    assert told_bins(cohort_of([4, 10], grouped=True), 5)[0].sum() == 0
    assert told_bins(cohort_of([4 * PER_PATIENT, 10]), 5)[0].sum() == 4 * PER_PATIENT


@pytest.mark.parametrize("grouped", [False, True])
def test_every_domain_has_its_number_of_patients_also_the_last_with_none(grouped):
    assert patients_by_domain(cohort_of([3, 0, 2, 0], grouped)).tolist() == [3, 0, 2, 0]


@pytest.fixture
def tables(tmp_path):
    return write_tables(tmp_path / "data", rows=80)


def answers_at(tables, study, folder, least, requests):
    """Return what a site with that minimum cell answers."""
    site = Site(NAMES[0], tables / f"{NAMES[0]}.csv", folder, min_cell=least, say=lambda _: None)
    assert unpack(site.answer(pack({"kind": "join", "run": RUN, "study": study.tables()})))[0] == {"kind": "joined"}
    found = []
    for request in requests:
        message = pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request))
        found.append(unpack(site.answer(message))[1])
    return found


def test_a_site_tells_of_as_many_as_its_option_says(tables, tmp_path):
    """The option is that of the fewest samples of a domain that this site has, in turn, and of one more."""
    study = make_study(tables, method="fedavg", rounds=1)
    path = tables / f"{NAMES[0]}.csv"
    train, test = study.divided(study.read_site(path, NAMES[0]))
    by_domain = [torch.bincount(part.domain, minlength=3) for part in (train, test)]
    fewest, tested = (int(counts.min()) for counts in by_domain)
    where, where_tested = (int(counts.argmin()) for counts in by_domain)
    assert 2 <= tested < fewest < int(by_domain[0].median())
    census = Request(Phase("census"), 0, 0, step=1)
    measure = Request(Phase("measure"), 1, 0, build(study)[1], step=2)
    for least, told in ((fewest, fewest), (fewest + 1, 0)):
        (counts,) = answers_at(tables, study, tmp_path / f"census {least}", least, [census])
        assert counts["counts"][where] == told
    for least, told in ((tested, tested), (tested + 1, 0)):
        _, sums = answers_at(tables, study, tmp_path / f"measure {least}", least, [census, measure])
        filled = sums["histogram"].sum((1, 2))
        assert sums["numbers"][where_tested, 0] == filled[where_tested].sum() == told
        assert int(filled[filled > 0].min()) >= least
        assert filled.shape == (3, BINS)


def test_the_promise_says_the_number():
    processor = MinimumCell(7)
    assert processor.min_patients == 7
    assert "fewer than 7 patients" in processor.promise
