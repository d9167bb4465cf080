"""The bound of changes: training that runs away moves no tensor by more than the study says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddar.algorithm.names import named_parameters, named_request
from feddar.algorithm.protocol import Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.wire import as_reply, pack, request_header, unpack
from feddar.federation.privacy.norm_bound import NormBound, bound_of, length
from feddar.federation.privacy.secure.summands import is_change
from feddar.federation.rehearsal import Rehearsal, build
from feddar.models.parameters import Parameters
from helpers.sites import NAMES, make_sites, make_study, with_facts, write_tables

RUN = "0123456789abcdef"
ROWS = torch.tensor([10])


def bounded(factor, sent, change):
    """Return head and encoder after the bound, both sent as ``sent`` and trained to ``sent + change``."""
    request = Request(Phase("together"), 1, 0, Parameters({"all": {"layer": sent}}, {"all": sent}))
    trained = sent + change
    reply = Reply(("a",), {"all": TrainedEncoder({"layer": trained}, 1.0)}, {"all": TrainedHead(trained, 1.0)})
    found = NormBound(factor).process(request, reply, ROWS)
    return found.heads["all"].head, found.encoders["all"].tensors["layer"]


@given(seed=st.integers(0, 1000), size=st.floats(1e-3, 1e6), factor=st.floats(0.1, 100))
def test_no_change_is_longer_than_the_bound_and_its_direction_is_kept(seed, size, factor):
    generator = torch.Generator().manual_seed(seed)
    sent, change = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    change *= size
    for found in bounded(factor, sent, change):
        if length(change) <= bound_of(sent, factor):
            assert torch.equal(found, sent + change)
        else:
            assert length(found - sent) == pytest.approx(bound_of(sent, factor))
            torch.testing.assert_close((found - sent) / length(found - sent), change / length(change))


@pytest.mark.parametrize("max_norm", [0.01, 10.0])
def test_a_site_sends_no_more_than_the_study_allows(tmp_path, max_norm):
    """Through a whole request, with a rate at which training runs away."""
    tables = write_tables(tmp_path / "tables")
    study = with_facts(make_study(tables, method="fedavg", lr=1.0), max_norm=max_norm)
    site = make_sites(tables, tmp_path / "kept", study=study)[NAMES[0]]
    site.answer(pack({"kind": "join", "run": RUN, "study": study.tables()}))
    _, initial = build(study)
    phase = Phase("together", epochs=1, lr=1.0, batch_size=study.training.batch_size, optimizer="adam")
    request = Request(phase, 1, 0, initial, step=1)
    about, tensors = unpack(
        site.answer(pack({"kind": "ask", "run": RUN, **request_header(request)}, named_request(request)))
    )
    reply = as_reply(("a",), about, tensors)
    heads = {key: part.head for key, part in reply.heads.items()}
    trained = named_parameters(Parameters({key: part.tensors for key, part in reply.encoders.items()}, heads))
    before = named_parameters(initial)
    moves = {name: length(value - before[name]) / bound_of(before[name], max_norm) for name, value in trained.items()}
    assert max(moves.values()) == pytest.approx(1)


@pytest.mark.parametrize("max_norm", [0.01, 10.0])
def test_whatever_words_a_site_adds_a_secure_sum_of_changes_has_a_range(tmp_path, max_norm):
    """The range follows from the bound and the rows: 8 times what all sites may add at most, by rounding to bits."""
    study = with_facts(make_study(write_tables(tmp_path), method="fedavg"), max_norm=max_norm, secure=True)
    rehearsal, sites, rows = Rehearsal(study), 3, 100
    request = Request(Phase("together"), 1, 0, rehearsal.initial)
    layout, sent = rehearsal.layout(request, sites, rows), named_parameters(rehearsal.initial)
    largest = np.full(layout.words, 2**63 - 1, dtype=np.uint64)
    found = {name: float(value.max()) for name, value in layout.decode(largest).items() if is_change(name)}
    assert found
    for name, value in found.items():
        most = sites * rows * bound_of(sent[name], max_norm)
        assert most <= value <= 8 * most
