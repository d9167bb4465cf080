"""Whole runs in which the coordinator learns only sums over sites."""

import html
import re
from dataclasses import asdict, replace
from io import StringIO

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from feddar.algorithm.names import named_state
from feddar.algorithm.protocol import EVERYBODY
from feddar.algorithm.schedule import census
from feddar.algorithm.wire import pack, unpack
from feddar.errors import TrainingError
from feddar.federation.coordinator import EXCHANGES_FILE, CoordinatorEvents, coordinate
from feddar.federation.links.link import Answer
from feddar.federation.links.local import LocalLink
from feddar.federation.privacy.secure.masking import Identity, fingerprint_of
from feddar.federation.privacy.withheld import Withheld
from feddar.federation.security.certificates import new_key
from feddar.federation.site import Site
from feddar.methods import METHODS
from feddar.report.federation import show_federated
from feddar.report.page import write_page
from feddar.results.run_folder import notes_in
from helpers.sites import NAMES, local_link, make_sites, make_study, with_facts, write_tables

FOUR = (*NAMES, "hospital-4")
FIVE = (*FOUR, "hospital-5")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Give tables of which every site holds every domain."""
    folder = write_tables(tmp_path_factory.mktemp("tables"), rows=90)
    for number, name in enumerate(NAMES):
        table = pd.read_csv(folder / f"{name}.csv")
        table["race"] = np.random.default_rng([9, number]).choice(["A", "B", "C"], len(table), p=[0.5, 0.3, 0.2])
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def run_of(tables, folder, secure, link=local_link, events=None, **training):
    study = with_facts(make_study(tables, **({"rounds": 2, "tune_rounds": 1} | training)), secure=secure)
    sites = make_sites(tables, folder / "kept")
    return coordinate(study, link(sites), folder / "out", events=events)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_weights_as_without(tables, tmp_path, method):
    plain, secure = (
        run_of(tables, tmp_path / str(each), each, method=method, dtype="float64") for each in (False, True)
    )
    one, other = (named_state(run.state) for run in (plain, secure))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: name + text)
    kinds = ["scope", "name", "metric"]
    figures = [
        run.history[run.history["scope"] == "domain"].set_index([*kinds, "round"])["value"] for run in (plain, secure)
    ]
    pd.testing.assert_series_equal(*figures, rtol=1e-6)


def test_of_single_sites_nothing_is_known(tables, tmp_path):
    run = run_of(tables, tmp_path, secure=True)
    assert run.cohort.clients == ("all sites",)
    assert "client" not in set(run.history["scope"])


class Watched(LocalLink):
    """A link that keeps what sites answer, and lets some of it be lost."""

    def __init__(self, sites, lost=lambda about, site: False):
        super().__init__({name: site.answer for name, site in sites.items()})
        self.lost, self.answers = lost, []

    def ask(self, message, sites, timeout):
        about, _ = unpack(message)
        for answer in super().ask(message, sites, timeout):
            if self.lost(about, answer.site):
                yield Answer(answer.site, problem="it was lost")
            else:
                self.answers.append((about, answer.site, unpack(answer.content)))
                yield answer


def test_nothing_but_masked_numbers_leaves_a_site(tables, tmp_path):
    links = []
    run_of(tables, tmp_path, True, link=lambda sites: links.append(Watched(sites)) or links[0], method="feddar-sa")
    for about, _, (answer, tensors) in links[0].answers:
        if about["kind"] == "ask":
            assert {*tensors} == {"masked"}
            assert {*answer} == {"kind", "run", "round", "step", "phase", "seconds"}
        else:
            assert not tensors


@pytest.fixture(scope="module")
def four(tables, tmp_path_factory):
    """Give tables of four sites."""
    folder = tmp_path_factory.mktemp("four")
    for number, name in enumerate(FOUR):
        table = pd.read_csv(tables / f"{NAMES[number % 3]}.csv").sample(frac=0.9, random_state=number)
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def four_sites(four, folder, names=FOUR):
    return {name: Site(name, four / f"{name}.csv", folder / name, say=lambda _: None) for name in names}


def study_of_four(four, **training):
    study = with_facts(make_study(four, **({"rounds": 2} | training)), secure=True)
    terms = study.coordinator.model_copy(update={"sites": 4, "min_clients": 3, "wait": 3.0})
    return replace(study, coordinator=terms)


def problems(folder):
    table = pd.read_csv(folder / EXCHANGES_FILE, keep_default_na=False)
    return [(row.round, row.phase, row.site) for row in table.itertuples() if row.problem]


@pytest.mark.parametrize("step", ["keys", "shares", "ask", "reveal"])
def test_a_site_that_drops_out_of_a_phase_costs_its_part_of_it(four, tmp_path, step):
    """What comes out is the result of a plain run in which the same site does not answer the same phase."""
    once = []

    def lost(about, site):
        hit = about["kind"] == step and site == FOUR[1] and (len(once) == 0)
        if hit:
            once.append(about)
        return hit

    study = study_of_four(four, method="feddar-wa", dtype="float64", validation=0.0)
    link = Watched(four_sites(four, tmp_path / "secure"), lost)
    found = coordinate(study, link, tmp_path / "out")
    if step == "reveal":  # its masked reply is part of the sum: others reveal their shares of its seed
        assert problems(tmp_path / "out") == []
    else:
        assert problems(tmp_path / "out")[0] == (0, "census", FOUR[1])
    assert found.round == 2


def test_a_site_lost_in_a_later_phase_is_left_out_of_its_sum_alone(four, tmp_path):
    study = study_of_four(four, method="feddar-wa", dtype="float64", validation=0.0)

    def lost(about, site):
        return about["kind"] == "ask" and site == FOUR[1] and (about["round"], about["phase"]["name"]) == (1, "encoder")

    secure = coordinate(study, Watched(four_sites(four, tmp_path / "secure"), lost), tmp_path / "out")
    plain = coordinate(
        with_facts(study, secure=False), Watched(four_sites(four, tmp_path / "plain"), lost), tmp_path / "plain-out"
    )
    assert problems(tmp_path / "out") == problems(tmp_path / "plain-out") == [(1, "encoder", FOUR[1])]
    one, other = (named_state(run.state) for run in (plain, secure))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9)


def test_too_few_sites_end_the_run_and_it_can_go_on(tables, tmp_path):
    study = with_facts(make_study(tables, rounds=2, dtype="float64"), secure=True)
    away = {"on": True}

    def lost(about, site):
        hit = about["kind"] == "ask" and site == NAMES[0] and about["round"] == 2
        return away["on"] and hit

    link = Watched(make_sites(tables, tmp_path / "kept"), lost)
    with pytest.raises(TrainingError, match="2 of 3 sites answered in the heads phase of round 2, and 3 are needed"):
        coordinate(study, link, tmp_path / "out")
    away["on"] = False
    sites = make_sites(tables, tmp_path / "kept")
    resumed = coordinate(study, Watched(sites), tmp_path / "out", resume=True)
    whole = coordinate(study, local_link(make_sites(tables, tmp_path / "other")), tmp_path / "whole")
    for name, value in named_state(whole.state).items():
        torch.testing.assert_close(named_state(resumed.state)[name], value, rtol=0, atol=0)


def test_a_phase_that_was_begun_without_a_site_is_ended_without_it_after_a_resume(four, tmp_path):
    """The coordinator is stopped after a sum over three sites; resumed, it finds all four, who reveal no other sum."""
    study = study_of_four(four, method="feddar-wa", dtype="float64", validation=0.0)

    def missing(about, site):
        return about["kind"] == "ask" and site == FOUR[1] and (about["round"], about["phase"]["name"]) == (1, "heads")

    def stopped(about, site):
        if about["kind"] == "ask" and (about["round"], about["phase"]["name"]) == (1, "encoder"):
            raise KeyboardInterrupt
        return missing(about, site)

    whole = coordinate(study, Watched(four_sites(four, tmp_path / "whole"), missing), tmp_path / "whole-out")
    with pytest.raises(KeyboardInterrupt):
        coordinate(study, Watched(four_sites(four, tmp_path / "kept"), stopped), tmp_path / "out")
    resumed = coordinate(study, Watched(four_sites(four, tmp_path / "kept")), tmp_path / "out", resume=True)
    assert resumed.round == 2
    for name, value in named_state(whole.state).items():
        torch.testing.assert_close(named_state(resumed.state)[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_sum_that_one_site_keeps_from_being_read_is_left_out_and_so_is_that_site(four, tmp_path, first):
    """It gives shares that are none: without its seed the sum of its first phase stays masked."""
    study = study_of_four(four, method="feddar-wa", validation=0.0)
    sites = four_sites(four, tmp_path / "kept")
    link, honest = Watched(sites), sites[FOUR[3]].answer

    def spoiled(message):
        about, tensors = unpack(honest(message))
        if about["kind"] == "shares":  # the first is for the census
            right = about["hashes"][:first]
            about["hashes"] = [*right, *["0" * 64] * (len(about["hashes"]) - first)]
        return pack(about, tensors)

    link.handlers[FOUR[3]] = spoiled
    said = []
    events = CoordinatorEvents(say=said.append)
    if first == 0:
        with pytest.raises(TrainingError, match=r"the census was begun with .* begin another run"):
            coordinate(study, link, tmp_path / "out", events=events)
        return
    assert coordinate(study, link, tmp_path / "out", events=events).round == 2
    assert any(line.startswith(f"{FOUR[3]} takes part in no more sums: the shares that") for line in said)
    assert any(line.startswith("The heads phase of round 1 was left out") for line in said)


def test_a_domain_of_which_too_few_holders_are_left_is_left_out_of_the_sum(tmp_path):
    """hospital-1 and three others hold C; when two of them drop out, two are left, and nobody reveals their sum."""
    folder = write_tables(tmp_path / "tables", rows=90)
    names = tuple(f"hospital-{number}" for number in range(1, 8))
    for number, name in enumerate(names):
        table = pd.read_csv(folder / f"{NAMES[0]}.csv").sample(frac=0.9, random_state=number)
        races = ["A", "B", "C"] if number < 4 else ["A", "B"]
        table["race"] = np.random.default_rng(number).choice(races, len(table))
        table.to_csv(folder / f"{name}.csv", index=False)
    study = with_facts(make_study(folder, method="feddar-wa", validation=0.0), secure=True)
    study = replace(study, coordinator=study.coordinator.model_copy(update={"sites": 7, "min_clients": 3}))

    def lost(about, site):
        gone = about["kind"] == "ask" and (about["round"], about["phase"]["name"]) == (1, "heads")
        return gone and site in names[:2]

    said, link = [], Watched(four_sites(folder, tmp_path / "kept", names), lost)
    run = coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(say=said.append))
    assert run.round == study.training.rounds
    assert any(line.startswith("The heads phase of round 1 is without C: too few") for line in said)
    assert not any("round 2 is without" in line for line in said)


def test_a_coordinator_cannot_lie_about_who_holds_a_domain(tmp_path):
    """Only hospital-1 and hospital-2 hold B and C; a coordinator asks for their heads nevertheless."""
    tables = write_tables(tmp_path / "tables", rows=90)
    study = with_facts(make_study(tables, method="feddar-wa", validation=0.0), secure=True)
    said, link = [], Watched(make_sites(tables, tmp_path / "kept"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Withheld, "withheld", lambda _, counts, __: torch.zeros_like(counts))
        coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(say=said.append))
    refused = [line for line in said if line.startswith("The heads phase of round") and "is without B, C" in line]
    assert len(refused) == study.training.rounds
    revealed = [answer for about, _, (answer, _) in link.answers if about["kind"] == "reveal"]
    assert any(answer.get("few") == [1, 2] for answer in revealed)


@pytest.mark.parametrize("few", [10**6, -1, 0])
def test_sites_that_complain_of_domains_that_are_not_in_a_sum_end_no_coordinator(tables, tmp_path, few):
    """Two of three do; a census has no domain that it could be without."""
    study = with_facts(make_study(tables, method="fedavg"), secure=True)
    link, said = Watched(make_sites(tables, tmp_path / "kept")), []

    def complaining(honest):
        def answer(message):
            content = honest(message)
            return pack({"kind": "reveal", "few": [few]}) if unpack(content)[0]["kind"] == "reveal" else content

        return answer

    link.handlers |= {name: complaining(link.handlers[name]) for name in NAMES[1:]}
    with pytest.raises(TrainingError, match=r"the census was begun with .* begin another run"):
        coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(say=said.append))
    assert said.count("sites complain of domains that are not in the sum: it is asked for again") == 3


def test_sites_whose_keys_the_study_does_not_list_take_no_part_and_the_others_go_on(four, tmp_path):
    sites = four_sites(four, tmp_path / "kept")
    for site in sites.values():
        site.identity = new_key()
    keys = {name: fingerprint_of(Identity(site.identity).public) for name, site in sites.items()}
    study = with_facts(study_of_four(four, rounds=2), keys=keys | {FOUR[3]: keys[FOUR[0]]})
    said = []
    run = coordinate(study, Watched(sites), tmp_path / "out", events=CoordinatorEvents(say=said.append))
    assert run.round == 2
    assert f"{FOUR[3]} takes part in no more sums: the study does not list the key of '{FOUR[3]}'." in said


def test_a_resumed_run_does_not_ask_for_the_census_again(four, tmp_path):
    """With one site less the difference of the two would be what that site has."""
    study = study_of_four(four, rounds=2)
    coordinate(replace(study, training=study.training), Watched(four_sites(four, tmp_path / "kept")), tmp_path / "out")
    link = Watched(four_sites(four, tmp_path / "kept", FOUR[:3]))
    coordinate(study, link, tmp_path / "out", resume=True)
    assert not [about for about, *_ in link.answers if about.get("round") == 0]


@pytest.mark.parametrize("late", [FIVE[3:4], FIVE[3:]])
def test_one_site_that_comes_late_waits_for_a_second_one(four, tmp_path, late):
    study = study_of_four(four, rounds=3, validation=0.0)
    study = replace(study, coordinator=study.coordinator.model_copy(update={"sites": 3}))
    sites = four_sites(four, tmp_path / "kept")
    sites[FIVE[4]] = Site(FIVE[4], four / f"{FOUR[3]}.csv", tmp_path / "kept" / FIVE[4], say=lambda _: None)
    link = Watched({name: sites[name] for name in FIVE[:3]})

    def come(end):
        link.handlers |= {name: sites[name].answer for name in late}

    said = []
    run = coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(say=said.append, progress=come))
    asked = {(site, about["round"]) for about, site, _ in link.answers if site in late and about["kind"] == "ask"}
    waits = [line for line in said if line.startswith(f"{late[0]} has come late and waits")]
    assert {f"{name} has joined" for name in late} <= {*said}
    if len(late) == 1:
        assert (asked, len(waits)) == (set(), 1)
        assert waits[0] in notes_in(tmp_path / "out")
    else:
        assert (asked, waits) == ({(name, number) for name in late for number in (0, 2, 3)}, [])
    assert run.round == 3


def test_a_plain_request_is_refused_in_a_study_with_secure_sums(tables, tmp_path):
    """Else a coordinator could ask for single replies after all."""
    study = with_facts(make_study(tables), secure=True)
    sites = make_sites(tables, tmp_path / "kept", study=study)
    run = "0123456789abcdef"
    for site in sites.values():
        assert unpack(site.answer(pack({"kind": "join", "run": run, "study": study.tables()})))[0]["kind"] == "joined"
    phase = asdict(census(study.training, study.objective))
    about = {"kind": "ask", "run": run, "phase": phase, "round": 0, "step": 1, "seed": 0, "best": 0, "up_to": EVERYBODY}
    answer, tensors = unpack(sites[NAMES[0]].answer(pack(about)))
    assert (answer["kind"], tensors) == ("refused", {})
    assert "has only secure sums" in answer["why"]
    other = with_facts(study, secure=False)
    answer, _ = unpack(sites[NAMES[0]].answer(pack({"kind": "join", "run": "ab" * 8, "study": other.tables()})))
    assert answer["why"] == "the study offered is not the one it agreed to."


def test_domains_of_few_sites_or_rows_have_no_head_of_their_own(tmp_path):
    """hospital-3 holds neither B nor C: their heads would be of two sites, each of which knows its own part."""
    tables = write_tables(tmp_path / "tables", rows=90)
    said = []
    study = with_facts(make_study(tables, method="feddar-wa", validation=0.0), secure=True)
    link = Watched(make_sites(tables, tmp_path / "kept"))
    run = coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(say=said.append))
    listed = "Domains without a head of their own, which use the mean of the others': B, C (fewer than 3 sites"
    assert any(line.startswith(listed) for line in said)
    write_page([tmp_path / "out"], tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text())
    assert listed in page and f"feddar-wa in the study “{study.facts.name}”" in page
    assert f"feddar simulate --config {tmp_path / 'out' / 'study.toml'} --data TABLES" in page
    console = Console(file=StringIO(), width=200)
    show_federated(console, run, tmp_path / "out")
    shown = console.file.getvalue()
    assert listed in shown and "mean domain, log-loss" in shown
    coarse = r"Test samples of A \((\d+)\).* are few for 3 sites"
    assert all(re.search(coarse, text) for text in (page, shown, "\n".join(said)))
    heads = run.state.heads
    torch.testing.assert_close(heads["1"], heads["0"])
    torch.testing.assert_close(heads["2"], heads["0"])
    worked_out = [{*unpack(path.read_bytes())[1]} for path in (tmp_path / "kept").rglob("*.heads.reply")]
    assert worked_out
    assert not any({"heads/1", "heads/2"} & names for names in worked_out)
    with pytest.raises(TrainingError, match="no domain can have a head of its own"):
        high = with_facts(study, floor=1e6)
        coordinate(high, Watched(make_sites(tables, tmp_path / "again")), tmp_path / "high")
    coordinate(
        replace(high, training=high.training.model_copy(update={"method": "fedavg"})),
        Watched(make_sites(tables, tmp_path / "third")), tmp_path / "one-head",
    )  # fmt: skip


def test_a_sum_that_jumps_is_said_and_left_out(four, tmp_path):
    """One site sends its parameters times -30 through our own code: nobody sees its reply, but the sum jumps."""
    study = study_of_four(four, method="fedavg", rounds=4, validation=0.0)
    sites = four_sites(four, tmp_path / "kept")
    hostile = sites[FOUR[3]]
    answer = hostile.answer

    def spoiled(message):
        about, _ = unpack(message)
        if about["kind"] == "ask" and about["round"] == 3 and about["phase"]["name"] == "together":
            participation = hostile.participation
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(participation, "masked", minus_30(participation, participation.masked))
                return answer(message)
        return answer(message)

    said = []
    link = Watched(sites)
    link.handlers[FOUR[3]] = spoiled
    run = coordinate(study, link, tmp_path / "out", events=CoordinatorEvents(say=said.append))
    jumped = [line for line in said if "jumped" in line]
    assert len(jumped) == 1
    assert jumped[0].startswith("The sum of the together phase of round 3 has jumped and was left out")
    assert run.round == 4
    assert all(bool(value.isfinite().all()) for value in named_state(run.state).values())


def minus_30(participation, masked):
    """Return what masks a reply, of parameters times -30."""

    def spoiled(request, content, terms, digest):
        about, tensors = unpack(content)
        tensors = {name: -30 * value if name.startswith("encoder/") else value for name, value in tensors.items()}
        return masked(request, pack(about, tensors), terms, digest)

    return spoiled
