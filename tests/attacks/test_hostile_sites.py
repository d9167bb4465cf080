"""A site that tries to move the model by more than its share, or tells of rows that it does not have."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from feddar.algorithm.names import CURVED, named_state
from feddar.algorithm.wire import pack, unpack
from feddar.errors import TrainingError
from feddar.federation import site as site_module
from feddar.federation.coordinator import CoordinatorEvents, coordinate
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.links.local import LocalLink
from feddar.federation.site import Site
from helpers.sites import NAMES, make_study, with_facts, write_tables

HOSTILE = "hospital-4"
SITES = (*NAMES, HOSTILE)
TRAINING = ("heads", "encoder", "together")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Give tables of four sites, of which the hostile one has 1 % of the rows."""
    folder = write_tables(tmp_path_factory.mktemp("tables"), rows=700)
    for number, name in enumerate(NAMES):
        table = pd.read_csv(folder / f"{name}.csv")
        table["race"] = np.random.default_rng(number).choice(["A", "B", "C"], len(table))
        table.to_csv(folder / f"{name}.csv", index=False)
    pd.concat([table[table["race"] == domain].head(9) for domain in "ABC"]).to_csv(
        folder / f"{HOSTILE}.csv", index=False
    )
    return folder


def study_of(tables, secure, **training):
    study = make_study(tables, **({"rounds": 4, "method": "feddar-wa"} | training))
    terms = CoordinatorSettings(sites=4, min_clients=3, wait=3, timeout=60)
    return with_facts(replace(study, coordinator=terms), secure=secure)


def run_of(tables, folder, study, spoil):
    """Return the run in which the hostile site spoils its replies by ``spoil``, and what was said."""
    sites = {name: Site(name, tables / f"{name}.csv", folder / name, say=lambda _: None) for name in SITES}
    handlers = {name: site.answer for name, site in sites.items()}
    handlers[HOSTILE] = spoil(sites[HOSTILE])
    said = []
    run = coordinate(study, LocalLink(handlers), folder / "out", events=CoordinatorEvents(say=said.append))
    return run, said


def in_training(message):
    about, _ = unpack(message)
    return about["kind"] == "ask" and about["phase"]["name"] in TRAINING


def multiplied(factor):
    """Return a site that sends its parameters times a factor."""

    def spoil(site):
        def answer(message):
            about, tensors = unpack(site.answer(message))
            changed = {name: factor * value if _is_parameter(name) else value for name, value in tensors.items()}
            return pack(about, changed if in_training(message) else tensors)

        return answer

    return spoil


def silent(site):
    """Return a site that does not train."""
    return lambda message: pack({"kind": "failed", "why": "no"}) if in_training(message) else site.answer(message)


def answer_with(site, message, change):
    """Return a site's answer to a message, with its reply changed before it is masked, whatever the bounds say."""
    participation = site.participation
    masked = participation.masked
    participation.masked = lambda request, content, *terms: masked(request, change(content), *terms)
    try:
        return site.answer(message)
    finally:
        participation.masked = masked


def masked_times(factor):
    """Return a site that multiplies its parameters by a factor before it masks them, whatever the bounds say."""

    def multiplied(content):
        about, tensors = unpack(content)
        return pack(about, {name: factor * value if _is_parameter(name) else value for name, value in tensors.items()})

    def spoil(site):
        def answer(message):
            if site.participation is None or not in_training(message):
                return site.answer(message)
            return answer_with(site, message, multiplied)

        return answer

    return spoil


def _is_parameter(name):
    return name.startswith(("encoder/", "heads/")) and not re.search(r"(mean|scale|counts|total)$", name)


@pytest.mark.parametrize("method", ["fedavg", "feddar-wa", "feddar-sa"])
def test_in_plain_text_the_result_is_that_of_a_run_without_its_training(tables, tmp_path, method):
    study = study_of(tables, secure=False, method=method)
    attacked, _ = run_of(tables, tmp_path / "attacked", study, multiplied(-300.0))
    without, _ = run_of(tables, tmp_path / "without", study, silent)
    named = pd.read_csv(tmp_path / "attacked" / "out" / "exchanges.csv", keep_default_na=False).query("problem != ''")
    assert set(named["site"]) == {HOSTILE}
    assert set(named["round"]) == {1, 2, 3, 4}
    assert named["problem"].str.startswith("it would move the model by").all()
    one, other = named_state(attacked.state), named_state(without.state)
    assert all(torch.equal(other[name], value) for name, value in one.items())


def test_under_masking_the_run_ends_and_says_in_which_round_the_sum_jumped(tables, tmp_path):
    study = study_of(tables, secure=True, method="fedavg")
    honest, _ = run_of(tables, tmp_path / "honest", study, lambda site: site.answer)
    attacked, said = run_of(tables, tmp_path / "attacked", study, masked_times(-300.0))
    jumps = [line for line in said if "has jumped" in line]
    assert jumps[0].startswith("The sum of the together phase of round 1 has jumped and was left out")
    assert attacked.round >= 1
    losses = [
        run.history.query("split == 'test' and metric == 'log_loss' and scope == 'all'")["value"]
        for run in (honest, attacked)
    ]
    # What it can do is keep a phase from counting: the model in use is no worse than before training.
    assert losses[1].iloc[-1] < 0.75
    assert losses[0].iloc[-1] < losses[1].iloc[-1]


def told(phase, change, weigh=float):
    """Return a site that changes what it tells in a phase, in plain text or before it is masked; its weights, too."""

    def spoil(site):
        def changed(content):
            about, tensors = unpack(content)
            if about["kind"] != "reply" or about["phase"] != phase:
                return content
            return pack(about | {"weights": {k: weigh(v) for k, v in about["weights"].items()}}, change(tensors))

        def answer(message):
            participation = site.participation
            if participation is None or participation.secure is None:
                return changed(site.answer(message))
            return answer_with(site, message, changed)

        return answer

    return spoil


def slope_added(tensors):
    return {name: value + 1e5 if name.startswith("pooled_slope") else value for name, value in tensors.items()}


def losses_of(run):
    """Return the log-loss on test samples by round."""
    found = run.history.query("split == 'test' and metric == 'log_loss' and scope == 'all'")
    return found.set_index("round")["value"]


def loss_of(run):
    return losses_of(run).iloc[-1]


@pytest.mark.parametrize("secure", [False, True])
def test_a_false_slope_does_not_move_pooled_heads(tables, tmp_path, secure):
    study = study_of(tables, secure=secure, method="feddar", validation=0.2)
    honest, quiet = run_of(tables, tmp_path / "honest", study, lambda site: site.answer)
    attacked, said = run_of(tables, tmp_path / "attacked", study, told("pool", slope_added))
    named = pd.read_csv(tmp_path / "attacked" / "out" / "exchanges.csv", keep_default_na=False).query("problem != ''")
    jumps = [line for line in said if "The sum of the pool phase of round 1 has jumped" in line]
    assert bool(jumps) is secure
    assert set(named["site"] + named["phase"]) == (set() if secure else {f"{HOSTILE}pool"})
    assert not [line for line in quiet if "jumped" in line]
    assert loss_of(attacked) < loss_of(honest) + 0.05


def test_a_false_product_of_curvature_and_head_does_not_move_heads(tables, tmp_path, monkeypatch):
    study = study_of(tables, secure=True, method="feddar-sa")
    _, quiet = run_of(tables, tmp_path / "honest", study, lambda site: site.answer)
    found = site_module.summands

    def falsified(request, reply):
        added = found(request, reply)
        hostile = reply.clients == (HOSTILE,)
        return {k: v + 1e6 if hostile and k.startswith(f"{CURVED}/") else v for k, v in added.items()}

    monkeypatch.setattr(site_module, "summands", falsified)
    attacked, said = run_of(tables, tmp_path / "attacked", study, lambda site: site.answer)
    assert [line for line in said if line.startswith("The sum of the heads phase of round 1 has jumped")]
    assert not [line for line in quiet if "jumped" in line]
    assert loss_of(attacked) < 0.75


@pytest.mark.parametrize("secure", [False, True])
def test_validation_rows_that_no_site_can_have_held_out_are_refused(tables, tmp_path, secure):
    """It has some 8 rows of each domain to train on, and all sites have some 600."""
    study = study_of(tables, secure=secure, validation=0.2, rounds=2)

    def claims(tensors):
        more = torch.tensor([0.0, 1000.0], dtype=torch.float64)
        return tensors | {"validation": tensors["validation"] + more}

    _, said = run_of(tables, tmp_path / "attacked", study, told("validate", claims))
    named = pd.read_csv(tmp_path / "attacked" / "out" / "exchanges.csv", keep_default_na=False).query("problem != ''")
    problems = [*named["problem"], *said]
    assert any("it told validation losses that no samples have" in problem for problem in problems)
    assert set(named["site"]) == (set() if secure else {HOSTILE})


def flattered(site):
    """Return a site that tells a slope false by little, and losses by which the step that follows looks best.

    The round after that step looks best, too.
    """

    def changed(content):
        about, tensors = unpack(content)
        if about["kind"] == "reply" and about["phase"] == "pool":
            tensors = {k: value + float(k.startswith("pooled_slope")) for k, value in tensors.items()}
        if about["kind"] == "reply" and about["phase"] == "validate":
            tensors = dict(tensors)
            if "blends" in tensors:
                tensors["blends"] = tensors["blends"] + 1e6 * (torch.arange(len(tensors["blends"])) < 5)
            if about["round"] != 2:
                tensors["validation"] = tensors["validation"] + torch.tensor([1e6, 0.0], dtype=torch.float64)
        return pack(about, tensors)

    return lambda message: site.answer(message) if site.participation is None else answer_with(site, message, changed)


@pytest.mark.parametrize("share", [0.2, 0.0])
def test_false_validation_losses_in_secure_sums_are_not_noticed_and_without_validation_nobody_asks(
    tables, tmp_path, share
):
    """What remains possible, as docs/deploy.md says: losses have no bound, and sums do not show whose they are."""
    study = study_of(tables, secure=True, method="feddar", validation=share)
    honest, _ = run_of(tables, tmp_path / "honest", study, lambda site: site.answer)
    attacked, said = run_of(tables, tmp_path / "attacked", study, flattered)
    before, after = (losses_of(run)[run.round] for run in (honest, attacked))  # of the round in use
    print(f"validation {share}: log-loss {before:.2f}, attacked {after:.2f}")
    assert not [line for line in said if "jumped" in line]
    assert after > before + 0.5 if share else after < before + 0.05


@pytest.mark.parametrize("weigh", [lambda _: 0.0, lambda weight: weight - 1, lambda weight: -weight])
def test_a_sum_over_other_samples_than_those_of_the_census_is_left_out(tables, tmp_path, weigh):
    study = study_of(tables, secure=True, method="fedavg", rounds=2)
    _, said = run_of(tables, tmp_path, study, told("together", dict, weigh))
    jumps = [line for line in said if "The sum of the together phase of round" in line]
    assert len(jumps) == 2
    assert all("samples for 'encoder/all', and sites have told of" in line for line in jumps)


@pytest.mark.parametrize("false", [
    {"counts": torch.tensor([-(10**4), 2 * 10**4, 10])}, {"counts": torch.tensor([10**8, 10, 10])},
    {"squares": torch.full((2,), -1e9, dtype=torch.float64)}, {"levels": torch.full((3,), 0.5, dtype=torch.float64)},
])  # fmt: skip
def test_a_census_that_no_samples_have_ends_a_run_of_secure_sums(tables, tmp_path, false):
    """Masks hide whose it is, and nothing that follows would mean anything."""
    study = study_of(tables, secure=True, rounds=2)
    with pytest.raises(TrainingError, match="the sums of the census are what no samples have"):
        run_of(tables, tmp_path, study, told("census", lambda tensors: tensors | false))
    assert not (tmp_path / "out" / "census.bin").exists()


def far_apart(tensors):
    present = tensors["present"]
    return tensors | {"sum": present * 1e9, "squares": present * 1.01e18}


@pytest.mark.parametrize("secure", [False, True])
def test_a_column_that_false_sums_flatten_is_named_at_other_sites_once(tables, tmp_path, secure):
    study, said = study_of(tables, secure=secure, rounds=2), []
    sites = {name: Site(name, tables / f"{name}.csv", tmp_path / name, say=said.append) for name in SITES}
    handlers = {name: site.answer for name, site in sites.items()}
    handlers[HOSTILE] = told("census", far_apart)(sites[HOSTILE])
    noted = []
    coordinate(study, LocalLink(handlers), tmp_path / "out", events=CoordinatorEvents(say=noted.append))
    lines = [line for line in said if line.startswith("column 'lactate' varies by")]
    assert len(lines) == len(SITES)
    assert lines[0].endswith("units may differ, or a site has told false sums; ask the coordinator")
    notes = [line for line in noted if line.startswith("Column 'lactate' varies by 1e+08 at hospital-4, and by")]
    assert len(notes) == (0 if secure else 1)


def test_a_site_that_must_be_caught_up_is_judged_like_others(tables, tmp_path):
    """It says that it lacks parameters of its own, and sends what it likes when it is asked again."""
    study, asked = study_of(tables, secure=False, method="fedrep", rounds=2), set()

    def spoil(site):
        spoiled = multiplied(-300.0)(site)

        def answer(message):
            if in_training(message) and message not in asked:
                asked.add(message)
                return pack({"kind": "lacks"})
            return spoiled(message)

        return answer

    run_of(tables, tmp_path / "attacked", study, spoil)
    named = pd.read_csv(tmp_path / "attacked" / "out" / "exchanges.csv", keep_default_na=False).query("problem != ''")
    assert named["problem"].str.startswith("it would move the model by").any()


def test_rows_that_no_site_may_have_are_refused(tables, tmp_path):
    """10^8 rows would take gigabytes at every site, and give all the weight to one."""
    study = study_of(tables, secure=False)

    def claims(site):
        def answer(message):
            about, tensors = unpack(site.answer(message))
            asked, _ = unpack(message)
            if asked["kind"] == "ask" and asked["phase"]["name"] == "census":
                tensors["counts"] = torch.full_like(tensors["counts"], 10**8 // 3)
            return pack(about, tensors)

        return answer

    attacked, _ = run_of(tables, tmp_path / "attacked", study, claims)
    assert int(attacked.cohort.counts.sum()) < 10**4
    assert HOSTILE not in attacked.cohort.clients
