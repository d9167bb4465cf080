"""What is said of what leaves a site, against what does."""

from dataclasses import replace

import pytest
import torch

from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.wire import unpack
from feddar.federation.coordinator import coordinate
from feddar.federation.links.local import LocalLink
from feddar.federation.rehearsal import Rehearsal, what_leaves
from feddar.methods import METHODS
from helpers.sites import NAMES, make_sites, make_study, write_tables

COLUMNS = ["round", "phase", "tensor", "shape", "type", "bytes"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


def sent_by_all(tables, folder, study):
    """Train, and return for each site what it sent: the columns above."""
    sent = {name: [] for name in NAMES}

    def listening(name, handler):
        def answer(message):
            about, tensors = unpack(reply := handler(message))
            if about["kind"] == "reply":
                sent[name] += [
                    (
                        about["round"], about["phase"], tensor, tuple(value.shape),
                        str(value.dtype).removeprefix("torch."), value.numel() * value.element_size(),
                    )
                    for tensor, value in tensors.items()
                ]  # fmt: skip
            return reply

        return answer

    sites = make_sites(tables, folder / "kept")
    coordinate(study, LocalLink({n: listening(n, site.answer) for n, site in sites.items()}), folder / "out")
    return sent


@pytest.mark.parametrize("method", METHODS)
def test_what_is_said_to_leave_a_site_is_what_leaves_it(tables, tmp_path, method):
    """The run has one round for each stage, as what is said."""
    two_stages = method == "fedavg-separate-ft"
    warmup = int(method in ("feddar-sa", "fedrep"))
    rounds = 1 + two_stages + warmup
    study = make_study(tables, method=method, rounds=rounds, tune_rounds=1, warmup=warmup)
    sent = sent_by_all(tables, tmp_path, study)
    for name, rows in ((NAMES[0], [9, 9, 9]), (NAMES[2], [9, 0, 0])):
        said = what_leaves(study, torch.tensor(rows))
        assert set(said[COLUMNS].itertuples(index=False, name=None)) == set(sent[name])
        assert len(said) == len(sent[name])
        assert [*dict.fromkeys(said["method"])] == (["fedavg", method] if two_stages or warmup else [method])


def test_all_rounds_of_a_stage_send_the_same(tables, tmp_path):
    study = make_study(tables, rounds=3, lr_steps="1:0.5", warmup=1)
    sent = sent_by_all(tables, tmp_path, study)[NAMES[0]]
    said = what_leaves(study, torch.tensor([9, 9, 9]))
    assert {each[1:] for each in sent} == {each[1:] for each in said[COLUMNS].itertuples(index=False, name=None)}
    assert {each[1:] for each in sent if each[0] == 2} == {each[1:] for each in sent if each[0] == 3}


def test_a_rehearsal_depends_on_the_phase_the_domains_and_the_evidence(tables):
    study = make_study(tables)
    rehearsal = Rehearsal(study)
    common = rehearsal.initial.heads["all"]
    parameters = rehearsal.initial.changed({}, {str(m): common.clone() for m in range(3)})
    phase = Phase("heads", "global", "domain", epochs=500, lr=0.1)
    request = Request(phase, 1, 0, parameters)
    plain = rehearsal.expected(request, torch.tensor([9, 0, 9]))
    assert set(plain.tensors) == set(plain.weights) == {"heads/0", "heads/2"}
    assert not plain.samples
    with_evidence = replace(request, mean_head=common)
    assert set(rehearsal.expected(with_evidence, torch.tensor([0, 9, 0])).tensors) == {
        f"{n}/1" for n in ("heads", "slope", "bend", "residuals", "gram")
    }
    encoder = Request(Phase("encoder", "global", "domain"), 1, 0, parameters)
    form = rehearsal.expected(encoder, torch.tensor([0, 9, 0]))
    assert (form.weights, form.samples) == (("encoder/all",), True)
    assert form.tensors["encoder/all/encoder.layers.0.bias"] == ((128,), torch.float32)
    validate = Request(Phase("validate", "global", "domain"), 1, 0, parameters)
    assert set(rehearsal.expected(validate, torch.tensor([0, 9, 0])).tensors) == {"validation"}
    candidates = torch.stack([parameters.heads[str(m)] for m in range(3)]).repeat(5, 1, 1, 1)
    compared = rehearsal.expected(replace(validate, candidates=candidates), torch.tensor([0, 9, 0]))
    assert compared.tensors == {"validation": ((3, 2), torch.float64), "blends": ((5,), torch.float64)}
