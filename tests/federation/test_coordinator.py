"""The coordinator over sites that work, and over sites that do not."""

import re
import shutil
import threading
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
import torch

import feddar
from feddar.algorithm.names import SCORE_RANGE, named_own, named_state
from feddar.algorithm.spreads import LARGEST_POOLED
from feddar.algorithm.wire import pack, unpack
from feddar.data.cohort import Cohort
from feddar.errors import TrainingError, UserError
from feddar.federation.coordinator import EXCHANGES_FILE, STUDY_FILE, CoordinatorEvents, coordinate, run_app
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.links.link import Answer
from feddar.federation.links.local import LocalLink
from feddar.methods import METHODS
from feddar.models.heads import full_matrix
from feddar.results.run_folder import MODEL_FILE, read_model
from helpers.marks import DISTINCT, first
from helpers.sites import NAMES, local_link, make_sites, make_study, write_tables

BAD = NAMES[1]
ROUND = ("heads", "encoder", "pool", "offsets", "validate", "measure")
"""The phases of a round of feddar."""


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


def study_of(tables, method="feddar", terms=None, **training):
    study = make_study(tables, method=method, **({"rounds": 2, "tune_rounds": 1} | training))
    return replace(study, coordinator=study.coordinator.model_copy(update=terms or {}))


def handlers_of(tables, folder, **options):
    return {name: site.answer for name, site in make_sites(tables, folder / "kept", **options).items()}


def spoiled(handler, spoil, phase="heads", round_number=1):
    """Let a site spoil its answer in one phase of one round."""

    def answer(message):
        about, _ = unpack(message)
        if about["kind"] == "ask" and (about["phase"]["name"], about["round"]) == (phase, round_number):
            return spoil(handler, message)
        return handler(message)

    return answer


def changed(change):
    """Spoil a right answer by changing its facts and tensors."""

    def spoil(handler, message):
        about, tensors = unpack(handler(message))
        change(about, tensors)
        return pack(about, tensors)

    return spoil


def fail(handler, message):
    raise OSError("the disk is full")


def trained(tables, folder, study, spoil=None, phase="heads", **options):
    handlers = handlers_of(tables, folder, **options)
    if spoil is not None:
        handlers[BAD] = spoiled(handlers[BAD], spoil, phase)
    return coordinate(study, LocalLink(handlers), folder / "out")


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0, equal_nan=True)


def assert_same_state(first, second):
    assert_same(named_state(first.state), named_state(second.state))


def kept_of(folder, name):
    """Return what a site keeps to itself in the one run that it has taken part in."""
    return named_own(read_model(run_folder(folder / "kept" / name) / "model")[2][name])


def run_folder(kept):
    """Return the folder of the one run that a site has taken part in."""
    (folder,) = (path for path in kept.iterdir() if path.is_dir() and not path.is_symlink())
    return folder


def exchanges(folder):
    return pd.read_csv(folder / "out" / EXCHANGES_FILE, keep_default_na=False)


def problems(folder):
    table = exchanges(folder)
    return [tuple(row) for row in table[table["problem"] != ""][["round", "phase", "site", "problem"]].to_numpy()]


def pooled(study, tables):
    """Return the training and test parts of all sites as one cohort each."""
    parts = []
    for name in NAMES:
        cohort = study.read_site(tables / f"{name}.csv", name)
        parts.append((cohort, torch.from_numpy(cohort.held_out(study.facts.test, study.training.seed))))

    def joined(kept):
        rows = [cohort.rows(kept(mask)) for cohort, mask in parts]
        x = tuple(torch.cat(part) for part in zip(*(each.x for each in rows), strict=True))
        y, domain = torch.cat([each.y for each in rows]), torch.cat([each.domain for each in rows])
        client = torch.cat([torch.full((len(each),), i) for i, each in enumerate(rows)])
        facts = study.facts
        return Cohort(x, y, domain, client, facts.domains, NAMES, study.objective, columns=study.columns)

    return joined(lambda mask: ~mask), joined(lambda mask: mask)


NORMED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, numbers, levels):
        return self.norm(torch.cat([numbers.nan_to_num(2), levels.to(numbers.dtype)], 1))
"""


VARIANTS = {
    "feddar-sa with offsets": ("feddar-sa", {"site_offset": True}),
    "fedavg with label shift": ("fedavg", {"label_shift": True}),
    "feddar with label shift": ("feddar", {"label_shift": True, "site_offset": False}),
    "feddar with large heads": ("feddar", {"k": LARGEST_POOLED}),
    "feddar without validation": ("feddar", {"validation": 0}),
}
"""Further ways to aggregate: corrections of constant terms alone, and heads weighed as a whole."""


@pytest.mark.parametrize("method", [*first(DISTINCT, METHODS), *VARIANTS])
def test_the_same_weights_as_in_process(tables, tmp_path, method, monkeypatch):
    name, more = VARIANTS.get(method, (method, {}))
    study = study_of(tables, name, warmup=int(method == "fedper"), **more)
    if method == "fedbn":  # which keeps nothing to a site unless the encoder has batch norm
        (tmp_path / "normed.py").write_text(NORMED)
        monkeypatch.syspath_prepend(tmp_path)
        feddar.allow_code("normed:Net")
        study = replace(study, training=study.training.model_copy(update={"encoder": "normed:Net"}))
    link = local_link(make_sites(tables, tmp_path / "kept", min_cell=0, study=study))
    run = coordinate(study, link, tmp_path / "out")
    train, test = pooled(study, tables)
    inside = feddar.train(train, test=test, **study.training.model_dump())
    found = named_state(run.state)
    if method == "feddar":
        assert study.training.validation == 0.1
        assert {"domain_spreads", "difference", "spreads", "blend", "trained/0"} <= found.keys()
        assert all(kept_of(tmp_path, each)["offsets"].any() for each in NAMES)
    assert_same(named_state(inside.state), {name: value for name, value in found.items() if name != SCORE_RANGE})
    for name in NAMES if run.method.keeps_state else ():
        kept = kept_of(tmp_path, name)
        assert kept
        assert_same(named_own(inside.own[name]), kept)
    key = ["round", "split", "scope", "name", "metric"]
    both = inside.history.merge(run.history, on=key, suffixes=("", "_merged"), how="outer", validate="one_to_one")
    same = both[~both["metric"].isin(["auc", "auprc"])]  # between sites these come from bins of scores
    pd.testing.assert_series_equal(same["value"], same["value_merged"], check_names=False, rtol=1e-6)
    assert problems(tmp_path) == []


def test_what_is_left_in_the_folder(tables, tmp_path):
    seen = []
    study = study_of(tables)
    events = CoordinatorEvents(seen.append, lambda r, p, o: seen.append((r, p, [each.site for each in o])))
    run = coordinate(study, local_link(make_sites(tables, tmp_path / "kept")), tmp_path / "out", events=events)
    table = exchanges(tmp_path)
    phases = [(0, "census")] + [(r, p) for r in (1, 2) for p in ROUND]
    rows = [tuple(row) for row in table[["round", "phase", "site"]].to_numpy()]
    assert rows == [(*phase, name) for phase in phases for name in NAMES]
    assert (table[["sent", "received"]] > 100).all(axis=None)
    assert (table["seconds"] >= table["working"]).all()
    assert [each for each in seen if isinstance(each, tuple)] == [(r, p, [*NAMES]) for r, p in phases]
    assert feddar.load(tmp_path / "out").cohort.clients == NAMES
    assert run.cohort.counts[2, 1:].tolist() == [0, 0]  # hospital-3 has 2 samples of B, and does not say so
    with pytest.raises(UserError, match="already holds a run"):
        coordinate(study, LocalLink({}), tmp_path / "out")


def hang(handler, message):
    threading.Event().wait(20)
    return handler(message)


def put(name, value):
    return changed(lambda about, tensors: tensors.__setitem__(name, value(tensors.get(name))))


def say(name, value):
    return changed(lambda about, _: about.__setitem__(name, value))


def weigh(key, weight):
    return changed(lambda about, _: about["weights"].__setitem__(key, weight))


FAULTS = {
    "nan": (put("heads/0", lambda w: w * float("nan")), "'heads/0' with values that are not finite"),
    "inf": (put("heads/0", lambda w: w / 0), "'heads/0' with values that are not finite"),
    "shape": (put("heads/0", lambda w: w[:, 1:]), "it sent 'heads/0' as"),
    "type": (put("heads/0", lambda w: w.double()), "it sent 'heads/0' as"),
    "complex": (put("heads/0", lambda w: w.to(torch.complex64)), "it sent 'heads/0' as"),
    "missing": (changed(lambda _, tensors: tensors.pop("heads/0")), "it sent no 'heads/0'"),
    "extra": (put("heads/9", lambda _: torch.ones(1)), "it sent an unexpected 'heads/9'"),
    "no tensors": (changed(lambda _, tensors: tensors.clear()), "it sent no 'bend/0'"),
    "huge": (put("heads/0", lambda w: w + 1e9), "too large to be trained"),
    "huge curvature": (put("curvature/0", lambda c: c * 1e150), "too large to be measured"),
    "curved down": (put("curvature/0", lambda c: -c), "is not the curvature of any loss"),
    "crooked": (put("curvature/0", lambda c: c.flip(-1)), "is not the curvature of any loss"),
    "short curvature": (put("curvature/0", lambda c: c[..., 1:]), "it sent 'curvature/0' as"),
    "short residuals": (put("residuals/0", lambda r: r.repeat(2)), "it sent 'residuals/0' as"),
    "whole curvature": (put("curvature/0", full_matrix), "it sent 'curvature/0' as"),
    "huge evidence": (put("slope/0", lambda s: s + 1e200), "too large to be measured"),
    "negative weight": (weigh("heads/0", -1.0), "it sent the weight -1.0 for 'heads/0', and has told of"),
    "large weight": (weigh("heads/0", 1e6), "it sent the weight 1000000.0 for 'heads/0', and has told of"),
    "nan weight": (weigh("heads/0", float("nan")), "it sent the weight nan for 'heads/0'"),
    "other weight": (weigh("heads/00", 20.0), "a weight without its tensors, or tensors without a weight: 'heads/00'"),
    "odd weight": (weigh("heads/²", 20.0), "a weight without its tensors, or tensors without a weight: 'heads/²'"),
    "no weights": (say("weights", {}), "a weight without its tensors, or tensors without a weight: 'heads/0'"),
    "large loss": (say("loss", 10**400), "a reply has no loss, samples and weights"),
    "nan loss": (say("loss", float("nan")), "sent the loss nan"),
    "samples": (say("samples", 10**9), "it sent a loss over 1000000000, and has told of"),
    "round": (say("round", 2), "it answered another request: round 2 instead of 1"),
    "step": (say("step", 9), "it answered another request: step 9 instead of"),
    "run": (say("run", "x" * 9999), "it answered another request: run 'xxx"),
    "phase": (say("phase", "encoder"), "it answered another request: phase 'encoder' instead of 'heads'"),
    "kind": (say("kind", ["?"]), "it sent no kind of message"),
    "garbage": (lambda *_: b"\x00garbage\xff" * 9, "a message of 81 bytes cannot be read"),
    "nothing": (lambda *_: b"", "a message of 0 bytes cannot be read"),
    "nested": (lambda *_: (100_000).to_bytes(8, "big") + b"[" * 100_000, "cannot be read"),
    "escapes": (lambda *_: pack({"kind": "failed", "why": "\x1b[2J\n" * 999}), "\N{REPLACEMENT CHARACTER}[2J"),
    "error": (fail, "OSError: the disk is full"),
    "hang": (hang, "it has not answered in 3 s"),
}


def study_of_evidence(tables, terms=None):
    """Return a study whose heads phase asks for all there is: curvature, and evidence for credibility."""
    return study_of(tables, "feddar-sa", credibility=True, k=LARGEST_POOLED, rounds=1, terms=terms)


@pytest.fixture(scope="module")
def without(tables, tmp_path_factory):
    """Return a run in which a site gave no answer in a heads phase."""
    return trained(tables, tmp_path_factory.mktemp("without"), study_of_evidence(tables), fail)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_contribution_and_is_named(tables, tmp_path, without, fault):
    spoil, said = FAULTS[fault]
    terms = {"timeout": 3.0} if fault == "hang" else None
    run = trained(tables, tmp_path, study_of_evidence(tables, terms), spoil)
    ((*where, problem),) = problems(tmp_path)
    assert where == [1, "heads", BAD]
    assert said in problem
    assert len(problem) <= 300
    assert problem.isprintable()
    assert_same_state(without, run)


def cell(row, column, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[row, column] = value
        return tensor

    return change


CURVED = "is not the curvature of any loss"
NEW_FAULTS = {
    "slope": ("pool", put("pooled_slope/0", lambda s: s * float("nan")), "'pooled_slope/0' with values that are not"),
    "huge slope": ("pool", put("pooled_slope/0", lambda s: s + 1e200), "too large to be measured"),
    "curved down": ("pool", put("pooled_curvature/0", lambda c: -c), CURVED),
    "crooked": ("pool", put("pooled_curvature/0", lambda c: c.flip(-1)), CURVED),
    "whole": ("pool", put("pooled_curvature/0", full_matrix), "it sent 'pooled_curvature/0' as"),
    "missing": ("pool", changed(lambda _, tensors: tensors.pop("pooled_slope/0")), "it sent no 'pooled_slope/0'"),
    "extra": ("pool", put("pooled_slope/9", lambda _: torch.ones(1)), "it sent an unexpected 'pooled_slope/9'"),
    "errors below 0": ("pool", put("pooled_errors", lambda e: -e), "squares below 0"),
    "errors of others": ("pool", put("pooled_errors", lambda e: e + 1), "it sent 'pooled_errors' over"),
    "moments": ("offsets", put("offset_moments", lambda m: m / 0), "'offset_moments' with values that are not finite"),
    "short moments": ("offsets", put("offset_moments", lambda m: m[:2]), "it sent 'offset_moments' as"),
    "squares": ("offsets", put("offset_moments", cell(0, 0, -1.0)), "which no corrections have"),
    "variances below 0": ("offsets", put("offset_moments", cell(1, 1, -1.0)), "which no corrections have"),
    "too uncertain": ("offsets", put("offset_moments", cell(2, 1, 1e3)), "which no corrections have"),
    "more corrections": ("offsets", put("offset_moments", cell(2, 2, 1e6)), "'offset_moments' over"),
    "fewer corrections": ("offsets", put("offset_moments", cell(0, 2, -1.0)), "'offset_moments' over"),
    "blends below 0": ("validate", put("blends", lambda b: b - 99), "it told validation losses that no samples have"),
    "blends of none": (
        "validate",
        changed(lambda _, tensors: [tensors["validation"].zero_(), tensors["blends"].fill_(1)]),
        "it told validation losses that no samples have",
    ),
    "other blends": ("validate", put("blends", lambda b: b[1:]), "it sent 'blends' as"),
    "no blends": ("validate", changed(lambda _, tensors: tensors.pop("blends")), "it sent no 'blends'"),
}


@pytest.fixture(scope="module")
def without_in(tables, tmp_path_factory):
    """Give runs in which a site's answer in a phase was lost; what it keeps to itself it has kept."""

    def lost(handler, message):
        return handler(message)[:0]

    @cache
    def run(phase):
        return trained(tables, tmp_path_factory.mktemp(phase), study_of(tables, rounds=1), lost, phase)

    return run


@pytest.mark.parametrize("fault", NEW_FAULTS)
def test_a_fault_in_what_pools_and_corrects_heads(tables, tmp_path, without_in, fault):
    phase, spoil, said = NEW_FAULTS[fault]
    run = trained(tables, tmp_path, study_of(tables, rounds=1), spoil, phase)
    found = problems(tmp_path)
    assert [where for *where, _ in found] == [[1, phase, BAD]] * ROUND.count(phase)
    assert all(said in problem for *_, problem in found)
    assert_same_state(without_in(phase), run)


def test_an_earlier_reply_is_not_taken_for_one_to_this_request(tables, tmp_path):
    handlers, earlier = handlers_of(tables, tmp_path), []

    def replay(handler, message):
        earlier.append(handler(message))
        return earlier[0]

    handlers[BAD] = spoiled(spoiled(handlers[BAD], replay), replay, round_number=2)
    coordinate(study_of(tables), LocalLink(handlers), tmp_path / "out")
    assert problems(tmp_path) == [(2, "heads", BAD, "it answered another request: round 1 instead of 2")]


CENSUS_FAULTS = {
    "none": (put("counts", torch.zeros_like), "it told of 0 samples"),
    "too many": (put("counts", lambda c: c + 10**17), "samples, and may have from 1 to 1,000,000"),
    "overflowing": (put("counts", lambda c: c * 0 + 2**62), "samples, and may have from 1 to 1,000,000"),
    "negative": (put("counts", lambda c: c - 20), "it sent 'counts' with counts below 0"),
    "sums": (put("sum", lambda s: s * 1e6), "it told sums that no samples have"),
    "present": (put("present", lambda p: p + 1000), "it told sums that no samples have"),
    "absent": (put("present", lambda p: -p), "it told sums that no samples have"),
    "levels below 0": (put("levels", lambda n: -n), "it told counts of levels that no samples have"),
    "many levels": (put("levels", lambda n: n + 1000), "it told counts of levels that no samples have"),
    "parts of levels": (put("levels", lambda n: n / 7), "it told counts of levels that no samples have"),
}


@pytest.mark.parametrize("fault", CENSUS_FAULTS)
def test_a_wrong_census_keeps_a_site_out_until_it_is_right(tables, tmp_path, fault):
    spoil, said = CENSUS_FAULTS[fault]
    handlers, wrong = handlers_of(tables, tmp_path), [True]

    def once(handler, message):
        return spoil(handler, message) if wrong and wrong.pop() else handler(message)

    handlers[BAD] = spoiled(handlers[BAD], once, "census", 0)
    coordinate(study_of(tables, rounds=1), LocalLink(handlers), tmp_path / "out")
    ((*where, problem),) = problems(tmp_path)
    assert where == [0, "census", BAD]
    assert said in problem
    table = exchanges(tmp_path)
    assert (table["phase"] == "census").sum() == 6
    assert set(table[table["phase"] == "heads"]["site"]) == {*NAMES}


@pytest.mark.parametrize("phase", ["encoder", "measure"])
def test_an_error_in_another_phase(tables, tmp_path, phase):
    run = trained(tables, tmp_path, study_of(tables, rounds=1), fail, phase)
    assert problems(tmp_path) == [(1, phase, BAD, "OSError: the disk is full")]
    clients = run.history.query("scope == 'client'")["name"]
    assert set(clients) == ({*NAMES} if phase == "encoder" else {*NAMES} - {BAD})


def test_risks_are_means_over_those_who_answered(tables, tmp_path):
    """Two sites with the same samples: where one does not answer, the other says as much as both."""
    twins = tmp_path / "twins"
    twins.mkdir()
    for name in NAMES[:2]:
        shutil.copy(tables / f"{NAMES[0]}.csv", twins / f"{name}.csv")
    study = study_of(tables, "fedminmax", minmax_lr=0.5, rounds=1, terms={"sites": 2, "min_clients": 1})
    shares = []
    for spoil in (None, fail):
        folder = tmp_path / str(spoil is None)
        handlers = {name: handler for name, handler in handlers_of(twins, folder).items() if name in NAMES[:2]}
        handlers[BAD] = spoiled(handlers[BAD], spoil, "together") if spoil else handlers[BAD]
        shares.append(coordinate(study, LocalLink(handlers), folder / "out").state.domain_shares)
    torch.testing.assert_close(*shares)


def test_a_number_too_large_for_a_time_is_no_time(tables, tmp_path):
    trained(tables, tmp_path, study_of(tables, rounds=1), say("seconds", 10**400))
    assert problems(tmp_path) == []


@pytest.fixture(scope="module")
def whole_runs(tables, tmp_path_factory):
    """Give runs that nothing disturbed, with their folders."""

    @cache
    def run(method):
        folder = tmp_path_factory.mktemp(method)
        return trained(tables, folder, study_of(tables, method)), folder

    return run


class Killed(BaseException):
    """What ends a coordinator."""


class Dying(LocalLink):
    """A link whose coordinator is killed once all sites have answered a request."""

    def __init__(self, handlers, phase, round_number):
        super().__init__(handlers)
        self.last = (phase, round_number)

    def ask(self, message, sites, timeout):
        answers = [*super().ask(message, sites, timeout)]
        about, _ = unpack(message)
        if about["kind"] == "ask" and (about["phase"]["name"], about["round"]) == self.last:
            raise Killed
        yield from answers


@pytest.mark.parametrize(
    ("method", "phase", "round_number"),
    [
        ("feddar", "census", 0),
        ("feddar", "heads", 1),
        pytest.param("feddar", "encoder", 2, marks=pytest.mark.more),
        pytest.param("feddar", "pool", 2, marks=pytest.mark.more),
        ("feddar", "offsets", 2),
        ("fedrep", "adopt", 1),
        pytest.param("fedrep", "heads", 2, marks=pytest.mark.more),
        pytest.param("fedrep", "encoder", 2, marks=pytest.mark.more),
        ("fedrep", "measure", 2),
        pytest.param("fedavg-ft", "personal", 2, marks=pytest.mark.more),
        ("apfl", "personal", 2),
    ],
)
def test_a_killed_coordinator_goes_on_as_if_it_had_not_been(tables, whole_runs, tmp_path, method, phase, round_number):
    study = study_of(tables, method)
    whole, whole_folder = whole_runs(method)
    with pytest.raises(Killed):
        coordinate(study, Dying(handlers_of(tables, tmp_path), phase, round_number), tmp_path / "out")
    run = coordinate(study, LocalLink(handlers_of(tables, tmp_path)), tmp_path / "out", resume=True)
    assert_same_state(whole, run)
    pd.testing.assert_frame_equal(whole.history, run.history, check_dtype=False)
    for name in NAMES if run.method.keeps_state else ():
        assert_same(kept_of(whole_folder, name), kept_of(tmp_path, name))


@pytest.mark.parametrize(
    ("before", "after"),
    [((0, 2), (0, 1, 2)), ((0, 1, 2), (0, 2)), pytest.param((0, 1, 2), (1, 2), marks=pytest.mark.more)],
)
@pytest.mark.parametrize("phase", ["heads", "measure"])
def test_a_run_that_is_resumed_with_other_sites_ends(tmp_path, before, after, phase):
    """Sites answer once: what they answered before need not fit what is asked now, and must not stop the run."""
    write_tables(tmp_path / "data", rows=24)  # so few that how many directions there are depends on the sites
    study = make_study(tmp_path / "data", method="feddar", patience=9)
    study = replace(study, coordinator=CoordinatorSettings(sites=len(before), min_clients=2, wait=3, timeout=30))
    every = handlers_of(tmp_path / "data", tmp_path)

    def some(numbers):
        return {NAMES[number]: every[NAMES[number]] for number in numbers}

    with pytest.raises(Killed):
        coordinate(study, Dying(some(before), phase, 1), tmp_path / "out")
    run = coordinate(study, LocalLink(some(after)), tmp_path / "out", resume=True)
    assert run.standing.position.round == study.training.rounds


def test_a_site_that_missed_a_phase_answers_it_after_a_resume(tables, tmp_path):
    study = replace(
        study_of(tables, "feddar-sa"), coordinator=CoordinatorSettings(sites=3, min_clients=2, wait=3, timeout=30)
    )
    every = handlers_of(tables, tmp_path)
    away = Away(every, NAMES[1], "heads", 2)
    with pytest.raises(Killed):
        coordinate(study, away, tmp_path / "out")
    link = LocalLink({name: every[name] for name in NAMES[:2]})  # now the third one is away
    assert coordinate(study, link, tmp_path / "out", resume=True).standing.position.round == study.training.rounds


class Away(Dying):
    """A link on which a site is away in one phase; the coordinator is killed after the next."""

    def __init__(self, handlers, site, phase, round_number):
        super().__init__(handlers, "encoder", round_number)
        self.site, self.missed = site, (phase, round_number)

    def ask(self, message, sites, timeout):
        about, _ = unpack(message)
        missed = about["kind"] == "ask" and (about["phase"]["name"], about["round"]) == self.missed
        yield from super().ask(message, [each for each in sites if not (missed and each == self.site)], timeout)
        if missed:
            yield Answer(self.site, problem="it is away")


def test_too_few_answers_stop_the_run_with_a_checkpoint(tables, whole_runs, tmp_path):
    study = study_of(tables, "fedrep")
    handlers = handlers_of(tables, tmp_path)
    broken = handlers | {name: spoiled(handlers[name], fail, "encoder", 2) for name in NAMES[1:]}
    with pytest.raises(TrainingError) as caught:
        coordinate(study, LocalLink(broken), tmp_path / "out")
    assert str(caught.value) == (
        f"1 of 3 sites answered in the encoder phase of round 2, and 2 are needed: see {tmp_path}/out/exchanges.csv; "
        "when they are back, go on with --resume."
    )
    assert read_model(tmp_path / "out")[0]["round"] == 1
    assert len(problems(tmp_path)) == 2
    run = coordinate(study, LocalLink(handlers), tmp_path / "out", resume=True)
    assert_same_state(whole_runs("fedrep")[0], run)


def test_pretrained_weights_survive_a_stop_before_the_first_checkpoint(tables, tmp_path):
    start = trained(tables, tmp_path / "start", study_of(tables, "fedavg", rounds=1))
    trained_encoder, prefix = start.state.encoders["all"], "encoder."
    weights = {n.removeprefix(prefix): v for n, v in trained_encoder.items() if n.startswith(prefix)}
    torch.save(weights, tmp_path / "weights.pt")
    study = study_of(tables, "fedavg", weights=str(tmp_path / "weights.pt"), rounds=1)
    with pytest.raises(Killed):
        coordinate(study, Dying(handlers_of(tables, tmp_path), "together", 1), tmp_path / "out")
    run = coordinate(study, LocalLink(handlers_of(tables, tmp_path)), tmp_path / "out", resume=True)
    assert_same_state(trained(tables, tmp_path / "whole", study), run)


def test_a_run_starts_from_the_weights_that_the_study_names(tables, tmp_path):
    """With a learning rate of next to nothing it ends there, too."""
    other = trained(tables, tmp_path / "other", study_of(tables, "fedavg", rounds=1, seed=5)).state.encoders["all"]
    torch.save({n.removeprefix("encoder."): v for n, v in other.items() if n.startswith("encoder.")}, tmp_path / "w.pt")
    still = {"rounds": 1, "lr": 1e-30, "encoder_epochs": 1}
    given, plain = (
        trained(tables, tmp_path / name, study_of(tables, "fedavg", **still, **weights)).state.encoders["all"]
        for name, weights in (("given", {"weights": str(tmp_path / "w.pt")}), ("plain", {}))
    )
    learned = [name for name in other if name.endswith(("weight", "bias"))]
    assert learned
    for name in learned:
        torch.testing.assert_close(given[name], other[name])
    assert not all(torch.allclose(plain[name], other[name]) for name in learned)


def test_resuming_what_is_not_there_or_another_study(tables, tmp_path):
    study, other = study_of(tables), study_of(tables, lr=0.5)
    with pytest.raises(UserError, match=r"there is no run in .* to resume"):
        coordinate(study, LocalLink({}), tmp_path / "out", resume=True)
    with pytest.raises(Killed):
        coordinate(study, Dying(handlers_of(tables, tmp_path), "heads", 1), tmp_path / "out")
    assert not (tmp_path / "out" / MODEL_FILE).exists()
    with pytest.raises(UserError, match=r"was started with another study: resume it with .*study.toml"):
        coordinate(other, LocalLink({}), tmp_path / "out", resume=True)
    assert feddar.federation.study.Study.read(tmp_path / "out" / STUDY_FILE).digest == study.digest


def test_a_refusal_at_the_start_is_named(tables, tmp_path):
    handlers, said = handlers_of(tables, tmp_path), []
    handlers[BAD] = lambda _: pack({"kind": "refused", "why": "the ethics board says no.\x1b[2J"})
    study = study_of(tables, terms={"wait": 0.6}, rounds=1)
    run = coordinate(study, LocalLink(handlers), tmp_path / "out", events=CoordinatorEvents(say=said.append))
    assert run.cohort.clients == (NAMES[0], NAMES[2])
    assert f"{BAD} does not take part: the ethics board says no.\N{REPLACEMENT CHARACTER}[2J" in said
    handlers[NAMES[0]] = fail
    with pytest.raises(TrainingError) as caught:
        coordinate(study, LocalLink(handlers), tmp_path / "other")
    assert str(caught.value).startswith("1 of 2 sites needed have come in 0.6 s; hospital-1: ")
    assert "; hospital-2: the ethics board says no." in str(caught.value)


class Changing(LocalLink):
    """A link to sites that come and go."""

    def __init__(self, handlers, present):
        super().__init__(handlers)
        self.present = set(present)

    def sites(self):
        return sorted(self.present)


@pytest.mark.parametrize("method", ["feddar", "fedrep", "ditto"])
def test_a_late_site_is_counted_and_takes_part(tables, tmp_path, method):
    study = study_of(tables, method, terms={"sites": 2})
    link = Changing(handlers_of(tables, tmp_path), NAMES[:2])
    events = CoordinatorEvents(progress=lambda _: link.present.add(NAMES[2]))
    run = coordinate(study, link, tmp_path / "out", events=events)
    assert problems(tmp_path) == []
    late = exchanges(tmp_path).query(f"site == '{NAMES[2]}'")
    assert late["phase"].iloc[0] == "census"
    assert set(late["round"]) == {0, 2}
    assert run.cohort.clients == NAMES
    folder = run_folder(tmp_path / "kept" / NAMES[2])
    new = pd.read_csv(tables / f"{NAMES[2]}.csv")
    assert feddar.load(folder / "model").predict(new, domain=new["race"]).shape == (60,)


def test_who_is_not_counted_again_is_not_asked_until_it_is(tables, tmp_path):
    """A third site comes after round 1, and one of the two does not answer the census that this calls for."""
    study = study_of(tables, terms={"sites": 2}, rounds=3)
    handlers, censuses = handlers_of(tables, tmp_path), []

    def second_fails(handler, message):
        censuses.append(message)
        return fail(handler, message) if len(censuses) == 2 else handler(message)

    handlers[BAD] = spoiled(handlers[BAD], second_fails, "census", 0)
    link = Changing(handlers, NAMES[:2])
    coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(progress=lambda _: link.present.add(NAMES[2])))
    table = exchanges(tmp_path)
    assert problems(tmp_path) == [(0, "census", BAD, "OSError: the disk is full")]
    assert set(table[table["site"] == BAD]["round"]) == {0, 1, 3}


def test_a_site_that_goes_away_and_comes_back(tables, tmp_path):
    study = study_of(tables, rounds=3)
    link = Changing(handlers_of(tables, tmp_path), NAMES)
    events = CoordinatorEvents(progress=lambda p: link.present.discard(BAD) if p.round == 1 else link.present.add(BAD))
    coordinate(study, link, tmp_path / "out", events=events)
    away = [(2, phase, BAD, "it is not connected") for phase in ROUND]
    assert problems(tmp_path) == away


@pytest.mark.parametrize("method", ["feddar", "fedrep"])
def test_a_site_that_lost_its_folder_joins_again(tables, tmp_path, method):
    study = study_of(tables, method, rounds=3)
    link = local_link(make_sites(tables, tmp_path / "kept"))

    def lose(progress):
        if progress.round == 1:
            shutil.rmtree(tmp_path / "kept" / BAD)
            link.handlers[BAD] = make_sites(tables, tmp_path / "kept")[BAD].answer

    coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(progress=lose))
    assert {row[0] for row in problems(tmp_path)} == {2}
    assert {row[3] for row in problems(tmp_path)} == {"it has not joined this run."}
    third = exchanges(tmp_path).query("round == 3")
    assert (third["site"] == BAD).sum() == {"feddar": len(ROUND), "fedrep": 4}[method]
    folder = run_folder(tmp_path / "kept" / BAD)
    assert (folder / "model" / MODEL_FILE).exists()


def test_messages_that_are_too_large_are_refused_with_the_number(tables, tmp_path):
    link = local_link(make_sites(tables, tmp_path / "kept"))
    link.limit = 5000
    study = study_of(tables, "fedavg")
    with pytest.raises(TrainingError, match=r"request of the together phase has \d\d,\d{3} bytes, and 5,000 can be"):
        coordinate(study, link, tmp_path / "out")
    link.limit = 50_000
    with pytest.raises(TrainingError, match="0 of 3 sites answered in the measure phase of round 1"):
        coordinate(study, link, tmp_path / "out", resume=True)
    assert {row[2] for row in problems(tmp_path)} == {*NAMES}
    assert all("larger than the 50,000 bytes that can be carried" in row[3] for row in problems(tmp_path))


def test_sites_with_nothing_to_test_on(tables, tmp_path):
    """Every domain's test part is smaller than what may be told."""
    small = tmp_path / "small"
    small.mkdir()
    for name in NAMES:
        pd.read_csv(tables / f"{name}.csv").query("race == 'A'").head(20).to_csv(small / f"{name}.csv", index=False)
    run = trained(small, tmp_path, study_of(tables, rounds=1))
    assert problems(tmp_path) == []
    assert set(run.history["metric"]) == {"loss"}


def test_an_engines_configuration_names_the_study_and_the_folder(tables, tmp_path, capsys):
    study_of(tables, "fedavg", rounds=1).write(tmp_path / "study.toml")
    options = {"study": str(tmp_path / "study.toml"), "out": str(tmp_path / "out")}
    link = local_link(make_sites(tables, tmp_path / "kept"))
    for needed in options:
        with pytest.raises(UserError, match=f"does not say the {needed}: add {needed}='...' to it"):
            run_app(link, {name: value for name, value in options.items() if name != needed})
    run_app(link, options)
    run = feddar.load(tmp_path / "out")
    assert (run.round, run.cohort.clients) == (1, NAMES)
    said = capsys.readouterr().out.splitlines()
    assert f"{NAMES[0]} has joined" in said
    assert any(re.fullmatch(r"round 1 of 1: auc 0\.\d{3}", line) for line in said)
    with pytest.raises(UserError, match="already holds a run"):
        run_app(link, options)
    run_app(link, options | {"resume": True})
    assert "all 1 rounds are done; sites that come get the model once more" in capsys.readouterr().out
