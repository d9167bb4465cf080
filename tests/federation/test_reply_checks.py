"""What a sum over sites must look like, and what a site takes out of its reply: each check by itself."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from feddar.algorithm.protocol import TALLY, Phase, Reply, Request, TrainedEncoder, TrainedHead
from feddar.algorithm.wire import MessageError
from feddar.federation.privacy.withheld import Withheld
from feddar.federation.rehearsal import ReplyFormat
from feddar.federation.reply_checks import require_census, require_counts, require_parts, require_sum
from feddar.models.parameters import ALL
from helpers.sites import make_study, write_tables

COUNTS = torch.tensor([20, 10, 5])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make_study(write_tables(tmp_path_factory.mktemp("tables")))


def summed(encoder=35.0, head=10.0, samples=35, loss=1.0):
    """Return a sum over three sites with these numbers of samples behind it."""
    encoders = {ALL: TrainedEncoder({"w": torch.ones(2)}, encoder)}
    heads = {"1": TrainedHead(torch.ones(1, 2), head)}
    return Reply(("a", "b", "c"), encoders, heads, loss=loss, samples=samples)


@pytest.mark.parametrize("exact", [True, False])
def test_a_sum_over_all_samples_is_taken(study, exact):
    require_sum(Request(Phase("together"), 1, 0), summed(), COUNTS, study, exact=exact)


def test_a_sum_over_fewer_is_taken_if_sites_were_left_out(study):
    fewer = summed(encoder=20.0, head=4.0, samples=20)
    require_sum(Request(Phase("together"), 1, 0), fewer, COUNTS, study, exact=False)
    with pytest.raises(MessageError, match="it is over 20 samples"):
        require_sum(Request(Phase("together"), 1, 0), fewer, COUNTS, study, exact=True)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "odd", [{"encoder": 36.0}, {"encoder": -1.0}, {"head": 11.0}, {"head": -1.0}, {"samples": 36}, {"samples": -1}]
)
def test_a_sum_over_samples_that_nobody_has_is_refused(study, exact, odd):
    with pytest.raises(MessageError, match="samples for"):
        require_sum(Request(Phase("together"), 1, 0), summed(**odd), COUNTS, study, exact=exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("odd", "taken"),
    [
        ({"encoder": 0.1, "head": 400.0}, True),
        ({"encoder": 1e33}, False),
        ({"head": -1.0}, False),
        ({"samples": 36}, False),
    ],
)
def test_where_sites_count_by_loss_a_sum_has_a_factor(study, exact, odd, taken):
    with nullcontext() if taken else pytest.raises(MessageError, match="samples for"):
        require_sum(Request(Phase("together", q=1.0), 1, 0), summed(**odd), COUNTS, study, exact=exact)


def test_sums_for_the_weights_of_sites_are_not_below_0(study):
    reply = replace(summed(), sums={TALLY: torch.tensor([1.0, -1.0], dtype=torch.float64)})
    with pytest.raises(MessageError, match="it sent 'tally' with numbers below 0"):
        require_sum(Request(Phase("together", agnostic=1.0), 1, 0), reply, COUNTS, study, exact=True)


@pytest.mark.parametrize(
    ("weight", "taken"), [(0.0, True), (7.5, True), (-1.0, False), (float("nan"), False), (1e33, False), (None, False)]
)
def test_where_sites_count_by_loss_a_weight_has_a_factor(weight, taken):
    form = ReplyFormat({}, ("heads/1",), True, {})
    heads = {} if weight is None else {"1": TrainedHead(torch.ones(1, 2), weight)}
    with nullcontext() if taken else pytest.raises(MessageError, match="it sent the weight"):
        require_counts(form, Reply(("a",), {}, heads, samples=35), COUNTS, by_factor=True)
    if weight == 7.5:
        with pytest.raises(MessageError, match=r"it sent the weight 7\.5 for 'heads/1', and has told of 10"):
            require_counts(form, Reply(("a",), {}, heads, samples=35), COUNTS)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((10.5, 24.5, 0.0), None),
        ((10.5, 24.5), "it did not send each component"),
        ((10.5, 24.5, 1.0), "it sent components of 36 samples, and has told of 35"),
        ((-1.0, 24.5, 11.5), "it sent components of 35 samples"),
        ((float("nan"), 24.5, 10.5), "it sent components of nan samples"),
    ],
)
def test_learned_components_are_of_all_samples_together(study, parts, why):
    form = ReplyFormat({}, ("heads/0", "heads/1", "heads/2"), True, {})
    heads = {str(m): TrainedHead(torch.ones(1, 2), weight) for m, weight in enumerate(parts)}
    with nullcontext() if why is None else pytest.raises(MessageError, match=why):
        require_parts(form, Reply(("a",), {}, heads, samples=35), COUNTS)


@pytest.mark.parametrize(("weight", "taken"), [(35.0, True), (12.3, True), (36.0, False), (-1.0, False)])
def test_a_learned_component_is_of_no_more_than_all_samples(study, weight, taken):
    """Whatever the domains are: there are more components than these, and of each any part of the samples may be."""
    request = Request(Phase("together", "domain", "domain", assigns="sample"), 1, 0)
    reply = Reply(("a", "b", "c"), {}, {"7": TrainedHead(torch.ones(1, 2), weight)}, {}, None, 1.0, 35)
    with nullcontext() if taken else pytest.raises(MessageError, match=f"it is over {weight:g} samples for 'heads/7'"):
        require_sum(request, reply, COUNTS, study, exact=True)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_sum_of_losses_that_is_not_finite_is_refused(study, loss):
    with pytest.raises(MessageError, match="its loss is"):
        require_sum(Request(Phase("together"), 1, 0), summed(loss=loss), COUNTS, study, exact=True)


@pytest.mark.parametrize(
    ("factor", "why"), [(1.0, None), (-1.0, "is not the curvature of any loss"), (1e150, "too large to be measured")]
)
def test_a_sum_of_curvatures_that_no_loss_has_is_refused(study, factor, why):
    curvature = factor * torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64)  # the upper triangle of a matrix
    reply = replace(summed(), heads={"1": TrainedHead(torch.ones(1, 2), 10.0, curvature)})
    with nullcontext() if why is None else pytest.raises(MessageError, match=why):
        require_sum(Request(Phase("heads"), 1, 0), reply, COUNTS, study, exact=True)


@pytest.mark.parametrize(
    ("weights", "classes", "why"),
    [
        ([20.0, 9.5, 0.0], [[19.5, 10.0]], None),
        ([20.0, -1.0, 0.0], [[10.0, 9.0]], "sums of weights that no samples have"),
        ([20.0, 9.5, 1.0], [[20.5, 10.0]], "sums of weights that no samples have"),  # of a domain without samples
        ([0.0, 0.0, 0.0], [[0.0, 0.0]], "sums of weights that no samples have"),
        ([20.0, 9.5, 0.0], [[30.5, -1.0]], "sums of classes that no samples have"),
        ([20.0, 9.5, 0.0], [[19.5, 11.0]], "sums of classes that no samples have"),
    ],
)
def test_a_census_with_weights_that_no_samples_have_is_refused(weights, classes, why):
    told = {"weights": torch.tensor(weights).double(), "class_sums": torch.tensor(classes).double()}
    with nullcontext() if why is None else pytest.raises(MessageError, match=why):
        require_census({"counts": torch.tensor([20, 10, 0])} | told, 100)


def test_all_that_is_of_a_withheld_domain_alone_stays_at_the_site():
    names = [f"{kind}/{key}" for kind in ("pooled_slope", "pooled_curvature") for key in "012"]
    reply = Reply(
        ("a",),
        {key: TrainedEncoder({"w": torch.ones(2)}, 5.0) for key in (ALL, "0", "1", "2")},
        {key: TrainedHead(torch.ones(1, 2), 5.0) for key in "012"},
        {"counts": COUNTS} | {name: torch.ones(2) for name in names},
    )
    found = Withheld(3.0).process(Request(Phase("heads"), 1, 0, withheld=(0, 2)), reply, COUNTS)
    assert [*found.encoders] == [ALL, "1"]
    assert [*found.heads] == ["1"]
    assert [*found.sums] == ["counts", "pooled_slope/1", "pooled_curvature/1"]


@pytest.mark.parametrize(("rows", "holders", "withheld"), [(30, 3, False), (30, 2, True), (29, 3, True), (0, 0, True)])
def test_a_domain_is_withheld_below_three_holders_or_the_least_rows(rows, holders, withheld):
    assert Withheld(30.0).withheld(torch.tensor([rows]), torch.tensor([holders])).tolist() == [withheld]
