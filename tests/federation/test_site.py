"""What a site answers, what it keeps to itself, and what it refuses."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import feddar
from feddar.algorithm.names import named_parameters, named_request
from feddar.algorithm.protocol import Phase, Request
from feddar.algorithm.rounds import STEPS_TRIED
from feddar.algorithm.schedule import is_pooled, phases, planned
from feddar.algorithm.spreads import FIRST_OF_CLIENTS, LARGEST_POOLED
from feddar.algorithm.state import ServerState
from feddar.algorithm.wire import pack, request_header, unpack
from feddar.cli import app
from feddar.data.table_options import TableOptions
from feddar.errors import UserError
from feddar.federation.coordinator import coordinate
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.influence import TRAINED
from feddar.federation.links.local import LocalLink
from feddar.federation.lock import LOCK_FILE
from feddar.federation.privacy.answer_log import LOG_FILE
from feddar.federation.rehearsal import build
from feddar.federation.site import MIN_CELL, Site, open_site
from feddar.federation.study import study_of_table
from feddar.methods import METHODS
from feddar.models.encoders.own import PERMITTED
from feddar.models.parameters import Parameters
from feddar.settings import Settings
from helpers.sites import NAMES, local_link, make_sites, make_study, with_facts, write_tables

RUN = "0123456789abcdef"
SMALL = NAMES[2]
"""Has 60 samples: 58 of A, 2 of B, and none of C."""


@pytest.fixture
def folder(tmp_path):
    write_tables(tmp_path / "data")
    return tmp_path


def site_of(folder, name=NAMES[0], **options):
    return make_sites(folder / "data", folder / "kept", **options)[name]


def files_in(folder):
    """Return the files in a folder, but for a site's log and lock."""
    return {path for path in folder.rglob("*") if path.is_file() and path.name not in (LOG_FILE, LOCK_FILE)}


def join(site, study, run=RUN):
    return unpack(site.answer(pack({"kind": "join", "run": run, "study": study.tables()})))[0]


def ask(site, request, **about):
    """Return facts and tensors of the answer to a request."""
    message = pack({"kind": "ask", "run": RUN, **request_header(request)} | about, named_request(request))
    return unpack(site.answer(message))


def parameters_of(study):
    """Return parameters for a first round of any method."""
    _, initial = build(study)
    row = study.training.row_in(1)
    by_domain = ServerState(initial).by_domain(*row.common, len(study.facts.domains)).in_training
    return initial.changed(by_domain.encoders, by_domain.heads)


def requests_of(study):
    """Give all requests of a first round, census included."""
    parameters, model, settings = parameters_of(study), build(study)[0], study.training
    objective, pooled = model.objective, is_pooled(settings.row(), model)
    yield Request(planned(settings, objective, 0)[0], 0, 0, step=1)
    for step, phase in enumerate(planned(settings, objective, 1), 1):
        request = Request(phase, 1, 0, parameters, step=step)
        if phase.name == "pool" and not (pooled or settings.row().closed_form):
            continue
        if settings.row().credible and not pooled and phase.name == "heads":
            request = replace(request, mean_head=parameters.heads["0"].clone())
        if phase.name in ("pool", "offsets") and settings.row().site_offset:
            request = replace(request, spreads=FIRST_OF_CLIENTS)
        if phase.name == "offsets" and pooled and settings.validation:
            request = replace(request, directions=torch.eye(model.outputs * model.width, dtype=torch.float64))
        if phase.name == "validate" and pooled:
            heads = torch.stack([parameters.heads[str(m)] for m in range(len(study.facts.domains))])
            request = replace(request, candidates=torch.stack([heads] * len(STEPS_TRIED)))
        if settings.row().weighs and phase.name in TRAINED:
            request = replace(request, domain_weights=torch.tensor([1.0, 50.0, 1.0], dtype=torch.float64))
        yield request


def request_of(study, phase):
    return next(request for request in requests_of(study) if request.phase.name == phase)


MESSAGES = [
    b"",
    b"\x80\x04.",
    pack({}),
    pack({"kind": []}),
    pack({"kind": {"a": 1}}),
    pack({"kind": "\ud800\x1b[2J" * 1000}),
    pack({"kind": "join"}),
    pack({"kind": "join", "run": RUN}),
    pack({"kind": "join", "run": RUN, "study": []}),
    pack({"kind": "join", "run": RUN, "study": {"study": 1, "columns": 2}}),
    pack({"kind": "join", "run": RUN, "study": {"study": {"\ud800": 1}, "columns": {"a": "number"}}}),
    pack({"kind": "ask"}),
    pack({"kind": "ask", "run": RUN}),
    pack({"kind": "finish", "run": RUN}),
    pack({"kind": "finish", "run": [RUN]}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=map(str, range(len(MESSAGES))))
def test_no_message_makes_a_site_raise(folder, message):
    heard = []
    site = site_of(folder, say=lambda text: heard.append(text.encode()))
    about, tensors = unpack(site.answer(message))
    assert about["kind"] in ("refused", "failed", "stranger")
    assert not tensors
    assert not any(b"\x1b" in text for text in heard)
    assert len(site.answer(message)) < 1000


@given(st.binary(max_size=60))
@hypothesis_settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_a_site_raise(folder, content):
    assert unpack(site_of(folder).answer(content))[0]["kind"] == "failed"


@given(
    st.dictionaries(
        st.sampled_from(["phase", "round", "seed", "step", "limit", "run"]),
        st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.floats(),
        min_size=1,
    )
)
@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_facts_of_a_request_make_a_site_raise(joined, change):
    site, study = joined
    request = next(requests_of(study))
    about, _ = unpack(site.answer(pack({"kind": "ask", "run": RUN, **request_header(request)} | change)))
    assert about["kind"] in ("reply", "refused", "failed", "stranger")


@pytest.fixture
def joined(folder):
    site, study = site_of(folder), make_study(folder / "data")
    assert join(site, study) == {"kind": "joined"}
    return site, study


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_said_of_a_small_domain(folder, method):
    """The coordinator weighs that domain fifty times; even so, its two samples change no bit of any reply."""
    study = make_study(folder / "data", method=method, rounds=2, tune_rounds=1)
    heard = []
    site = site_of(folder, SMALL, say=heard.append)
    assert join(site, study) == {"kind": "joined"}
    assert "samples of B are left out: fewer than 5 patients to train on" in heard[-1]
    path = folder / "data" / f"{SMALL}.csv"
    table = pd.read_csv(path)
    assert (table["race"].value_counts().to_dict()) == {"A": 58, "B": 2}
    held_out = study.read_site(path, SMALL).held_out(study.facts.test, study.training.seed)
    client = site.participation.client
    trained_on = float(len(client.train))
    assert trained_on + len(client.validation) == ((table["race"] == "A") & ~held_out).sum()
    for request in requests_of(study):
        about, tensors = ask(site, request)
        assert about["kind"] == "reply", about
        if request.phase.assigns:  # heads are of learned components, of which all rows that are trained on are
            for group in {name.split("/")[0] for name in about["weights"]}:
                parts = [weight for name, weight in about["weights"].items() if name.startswith(group)]
                assert sum(parts) == pytest.approx(trained_on)
            continue
        assert all(name.split("/")[1] in ("all", "0") for name in tensors if "/" in name)
        if not request.phase.counts_by_factor:  # a factor that all rows that are trained on have
            assert set(about["weights"].values()) <= {trained_on}
        assert set(about["weights"]) <= {"heads/all", "heads/0", "encoder/all", "encoder/0"}
        assert about["samples"] in (0, trained_on)
        match request.phase.name:
            case "census":
                assert tensors["counts"].tolist() == [trained_on, 0, 0]
                assert tensors["present"].max() <= trained_on
            case "validate":
                assert tensors["validation"][:, 1].tolist() == [len(client.validation), 0, 0]
                assert not bool(tensors["validation"][1:].any())
            case "measure":
                assert tensors["numbers"][0, 0] == ((table["race"] == "A") & held_out).sum()
                assert not any(bool(value[1:].any()) for value in tensors.values())
        if "risks" in tensors:
            assert not bool(tensors["risks"][1:].any())


def test_a_request_has_as_many_components_as_the_study(folder):
    study, site = make_study(folder / "data", method="feddar-mixture", components=2), site_of(folder)
    join(site, study)
    heads = next(r.parameters.heads["0"] for r in requests_of(study) if r.phase.name == "heads")
    for request in requests_of(study):
        if request.phase.name != "heads":
            continue
        other = request.parameters.without("heads").changed({}, {str(m): heads.clone() for m in range(4)})
        about, _ = ask(site, replace(request, parameters=other))
        assert (about["kind"], about["why"]) == ("refused", "the model is not that of the study.")
        known = replace(request, phase=replace(request.phase, assigns=None))
        assert "the study has no such heads phase" in ask(site, known)[0]["why"]


def test_a_small_domain_changes_nothing(folder):
    """What is told with the two samples of B, whatever they hold, is what is told without them."""
    path = folder / "data" / f"{SMALL}.csv"
    told = []
    for value in (60.0, 6000.0):
        table = pd.read_csv(path)
        table.loc[table["race"] == "B", "age"] = value
        table.to_csv(path, index=False)
        study, site = make_study(folder / "data", method="fedavg"), site_of(folder / str(value), SMALL)
        site.data = path
        join(site, study)
        told.append([ask(site, request)[1] for request in requests_of(study)])
    for first, second in zip(*told, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_column_with_few_values_has_no_sums(folder):
    path = folder / "data" / f"{NAMES[0]}.csv"
    table = pd.read_csv(path)
    study = make_study(folder / "data")
    table.loc[4:, "lactate"] = np.nan
    table.to_csv(path, index=False)
    site = site_of(folder)
    join(site, study)
    _, told = ask(site, next(requests_of(study)))
    number = [column.name for column in study.columns if column.is_numeric].index("lactate")
    for name in ("present", "sum", "squares"):
        assert told[name][number] == 0
        assert told[name][1 - number] > 0


def test_a_site_with_too_few_samples_stays_out(folder):
    study = make_study(folder / "data")
    path = folder / "data" / f"{NAMES[0]}.csv"
    pd.read_csv(path).query("race == 'A'").head(5).to_csv(path, index=False)
    answer = join(site_of(folder), study)
    assert answer == {"kind": "refused", "why": "it has fewer than 5 patients of every domain to train on."}


def test_scores_of_single_samples_are_not_given(joined):
    site, study = joined
    about, tensors = ask(site, Request(Phase("evaluate", "global", "domain"), 1, 0, parameters_of(study), step=1))
    assert (about["kind"], tensors) == ("refused", {})
    assert about["why"] == "the study has no such evaluate phase in round 1."


def test_sites_are_not_left_out_of_rounds(joined):
    site, study = joined
    phase = next(iter(phases(study.training.row_in(1), study.training, study.objective, 1)))
    about, tensors = ask(site, Request(phase, 1, 0, parameters_of(study), step=1, up_to=0))
    assert (about, tensors) == (
        {"kind": "refused", "why": "the study asks all sites in the heads phase of every round."},
        {},
    )


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 1}, {"lr": 0.5}, {"epochs": 99}, {"risks": True}, {"curvature": "gram"}, {"encoder": "domain"}],
    ids=str,
)
def test_only_phases_of_the_study_are_answered(joined, change):
    site, study = joined
    request = request_of(study, "encoder")
    phase = Phase(**{**request_header(request)["phase"], **change})
    assert ask(site, request)[0]["kind"] == "reply"
    assert ask(site, Request(phase, 1, 0, request.parameters, step=1))[0]["kind"] == "refused"
    beyond = Request(request.phase, study.training.rounds + 1, 0, request.parameters, step=1)
    assert ask(site, beyond)[0]["kind"] == "refused"


@pytest.mark.parametrize("changes", [{"credibility": False}, {}], ids=["none", "pooled"])
def test_evidence_is_given_only_where_the_method_asks_for_it(folder, changes):
    study, site = make_study(folder / "data", **changes), site_of(folder)
    join(site, study)
    heads = request_of(study, "heads")
    assert ask(site, heads)[0]["kind"] == "reply"
    with_evidence = replace(heads, mean_head=heads.parameters.heads["0"].clone())
    assert ask(site, with_evidence)[0]["kind"] == "refused"


@pytest.mark.parametrize(
    ("phase", "field", "change"),
    [
        ("heads", "candidates", lambda c: c),
        ("measure", "candidates", lambda c: c),
        ("offsets", "candidates", lambda c: c),
        ("validate", "candidates", lambda c: c.repeat(100, 1, 1, 1)),
        ("validate", "candidates", lambda c: c[:, :1]),
        ("validate", "candidates", lambda c: c + float("inf")),
        ("heads", "spreads", lambda s: s),
        ("validate", "spreads", lambda s: s),
        ("pool", "spreads", lambda _: None),
        ("pool", "spreads", lambda s: -s),
        ("offsets", "spreads", lambda _: None),
        ("offsets", "spreads", lambda s: -s),
        ("offsets", "spreads", lambda s: s * float("nan")),
        ("offsets", "spreads", lambda s: s + float("inf")),
        ("offsets", "spreads", lambda s: s[:2]),
        ("encoder", "directions", lambda d: d),
        ("validate", "directions", lambda d: d),
        ("offsets", "directions", lambda d: d[1:]),
        ("offsets", "directions", lambda d: d.repeat(1, 2)),
        ("offsets", "directions", lambda d: d[0]),
        ("offsets", "directions", lambda d: d * float("nan")),
    ],
)
def test_only_what_the_study_plans_is_taken(joined, phase, field, change):
    site, study = joined
    home = {"candidates": "validate", "spreads": "offsets", "directions": "offsets"}[field]
    request, value = request_of(study, phase), getattr(request_of(study, home), field)
    assert ask(site, request)[0]["kind"] == "reply"
    about, tensors = ask(site, replace(request, **{field: change(value)}))
    assert (about["kind"], tensors) == ("refused", {})
    assert f"in the {phase} phase" in about["why"]


@pytest.mark.parametrize(
    ("method", "tally", "taken"),
    [
        ("afl", torch.tensor([20.0, 30.0]), True),
        ("afl", torch.tensor([20.0, -30.0]), False),
        ("afl", torch.tensor([20.0, torch.nan]), False),
        ("afl", torch.ones(3), False),
        ("fairfed", torch.ones(11), True),
        ("fairfed", torch.ones(2), False),
        ("fedavg", torch.ones(2), False),
    ],
)
def test_sums_for_the_weights_of_sites_are_such_as_the_study_has(folder, method, tally, taken):
    study, site = make_study(folder / "data", method=method), site_of(folder)
    join(site, study)
    about, _ = ask(site, replace(request_of(study, "together"), tally=tally.double()))
    assert about["kind"] == ("reply" if taken else "refused")
    assert taken or about["why"] == "the study has no such sums for the weights of sites in the together phase."


@pytest.mark.parametrize(
    ("changes", "phase", "field"),
    [
        ({"validation": 0}, "offsets", "directions"),
        ({"k": LARGEST_POOLED}, "offsets", "directions"),
        ({"k": LARGEST_POOLED}, "validate", "candidates"),
        ({"credibility": False}, "validate", "candidates"),
    ],
)
def test_what_other_studies_plan_is_not_taken(folder, changes, phase, field):
    study, site = make_study(folder / "data", **changes), site_of(folder)
    join(site, study)
    model, domains = build(study)[0], len(study.facts.domains)
    value = {
        "directions": torch.eye(model.outputs * model.width, dtype=torch.float64),
        "candidates": torch.zeros(len(STEPS_TRIED), domains, model.outputs, model.width),
    }[field]
    request = request_of(study, phase)
    assert ask(site, request)[0]["kind"] == "reply"
    assert ask(site, replace(request, **{field: value}))[0]["kind"] == "refused"


@pytest.mark.parametrize(
    ("phase", "more", "changes", "kind"),
    [
        ("heads", -1, {}, "reply"),  # by evidence that domains are alike
        ("heads", 1, {}, "refused"),
        ("heads", -2, {}, "refused"),  # none at all
        ("heads", -1, {"reweight": True}, "refused"),
        ("heads", -1, {"method": "feddar-wa"}, "refused"),
        ("encoder", 1, {}, "refused"),
    ],
)
def test_heads_are_trained_for_as_many_epochs_as_the_study_says_or_fewer(folder, phase, more, changes, kind):
    study, site = make_study(folder / "data", **{"head_epochs": 2} | changes), site_of(folder)
    join(site, study)
    request = request_of(study, phase)
    asked = replace(request, phase=replace(request.phase, epochs=request.phase.epochs + more))
    assert ask(site, asked)[0]["kind"] == kind


def test_large_heads_are_not_pooled(folder):
    study, site = make_study(folder / "data", k=LARGEST_POOLED), site_of(folder)
    join(site, study)
    phase = next(phase for phase in planned(study.training, study.objective, 1) if phase.name == "pool")
    about, _ = ask(site, Request(phase, 1, 0, parameters_of(study), step=1))
    assert about == {"kind": "refused", "why": "the study's heads are not pooled."}


def test_parameters_that_do_not_fit_are_refused_without_a_value(joined):
    site, study = joined
    request = request_of(study, "encoder")
    about, tensors = ask(site, Request(request.phase, 1, 0, Parameters(heads={"0": torch.ones(1)}), step=1))
    assert about == {"kind": "refused", "why": "the model is not that of the study."}
    assert not tensors


@pytest.mark.parametrize("part", ["encoder", "heads"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_model_with_values_that_are_not_finite_is_refused(joined, part, value):
    site, study = joined
    request = request_of(study, "encoder")
    encoders, heads = request.parameters.encoders, request.parameters.heads
    if part == "heads":
        heads = {key: head.clone().fill_(value) for key, head in heads.items()}
    else:
        encoders = {
            key: {name: each.clone().fill_(value) if each.is_floating_point() else each for name, each in own.items()}
            for key, own in encoders.items()
        }
    about, tensors = ask(site, replace(request, parameters=Parameters(encoders, heads)))
    assert about == {"kind": "refused", "why": "the model has values that are not finite."}
    assert not tensors


def test_a_domain_to_withhold_that_the_study_does_not_have_is_refused(joined):
    site, study = joined
    about, _ = ask(site, replace(request_of(study, "encoder"), withheld=(len(study.facts.domains),)))
    assert about == {"kind": "refused", "why": "the study has no such domains to withhold."}


def test_data_that_changed_since_joining(folder):
    study, site = make_study(folder / "data"), site_of(folder)
    join(site, study)
    path = folder / "data" / f"{NAMES[0]}.csv"
    table = pd.read_csv(path)
    table.loc[0, "age"] += 1
    table.to_csv(path, index=False)
    changed = {"kind": "refused", "why": "its data has changed since the run began."}
    assert ask(site_of(folder), next(requests_of(study)))[0] == changed
    assert join(site_of(folder), study) == changed
    assert join(site_of(folder), study, run="ff" * 8) == {"kind": "joined"}


def test_a_study_that_changed_since_joining(folder):
    site = site_of(folder)
    join(site, make_study(folder / "data"))
    answer = join(site, make_study(folder / "data", lr=0.5))
    assert answer == {"kind": "refused", "why": "the study has changed since the run began."}


def test_another_study_than_agreed(folder):
    agreed, other = make_study(folder / "data"), make_study(folder / "data", lr=0.5)
    site = site_of(folder, study=agreed)
    answer = join(site, other)
    assert answer["kind"] == "refused"
    assert answer["why"] == "the study offered is not the one it agreed to."
    assert files_in(folder / "kept") == set()
    assert join(site, agreed) == {"kind": "joined"}
    # A run joined before the agreement is none of it.
    assert ask(site_of(folder, study=other), next(requests_of(agreed)))[0]["kind"] == "refused"


def test_code_of_the_sites_own_needs_its_permission(folder, monkeypatch):
    (folder / "nets_of_a_site.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nfrom feddar.models.encoders.tabular import *\n"
        f"Path({str(folder / 'imported')!r}).touch()\n"
        "class Net(nn.Module):\n    def forward(self, x, codes):\n        return x.nan_to_num()\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "nets_of_a_site", raising=False)
    plain = make_study(folder / "data").tables()
    tables = plain | {"training": plain["training"] | {"encoder": "nets_of_a_site:Net"}}
    study = feddar.federation.study.Study.from_tables(tables, "")
    answer = join(site_of(folder), study)
    assert answer["kind"] == "refused"
    assert "code of the site's own as encoder" in answer["why"]
    assert not (folder / "imported").exists()
    with pytest.raises(UserError, match="--allow-code nets_of_a_site:Net"):
        site_of(folder, study=study)
    assert not (folder / "imported").exists()
    monkeypatch.setenv(PERMITTED, "nets_of_a_site:Net")
    heard = []
    assert join(site_of(folder, study=study, say=heard.append), study) == {"kind": "joined"}, heard
    assert (folder / "imported").exists()


@pytest.mark.parametrize(
    "run", ["../../escape", "/tmp/escape", "..", "", "abc", "ABCDEF0123", "0" * 65, f"{RUN}\n", None, [RUN], {"a": 1}]
)
def test_tricks_with_the_name_of_a_run(folder, run):
    before = files_in(folder)
    for kind in ("join", "ask", "finish"):
        message = pack({"kind": kind, "run": run, "study": make_study(folder / "data").tables()})
        assert unpack(site_of(folder).answer(message))[0] == {"kind": "refused", "why": "the run has no proper name."}
    assert files_in(folder) == before


def test_a_stranger_says_so(folder):
    about, _ = ask(site_of(folder), next(requests_of(make_study(folder / "data"))))
    assert about == {"kind": "stranger", "why": "it has not joined this run."}


def without_time(answer):
    about, tensors = answer
    return pack({name: value for name, value in about.items() if name not in ("seconds", "again")}, tensors)


@pytest.mark.parametrize("method", ["feddar", "feddar-sa", "fedrep", "apfl", "fedbn"])
def test_a_phase_can_be_repeated_also_by_another_process(folder, method):
    """Whatever came in between: an answer depends on the request and what was there before its place in the run."""
    study = make_study(folder / "data", method=method)
    site = site_of(folder)
    join(site, study)
    requests = [*requests_of(study)]
    first = [without_time(ask(site, request)) for request in requests]
    assert [without_time(ask(site, request)) for request in requests] == first
    assert [without_time(ask(site_of(folder), request)) for request in reversed(requests)] == first[::-1]


def test_own_parameters_go_on_in_the_next_round(folder):
    study = make_study(folder / "data", method="fedrep", schedule="constant")
    site = site_of(folder)
    join(site, study)
    for request in requests_of(study):
        ask(site, request)
    heads = request_of(study, "heads")
    again = Request(heads.phase, 2, 0, heads.parameters, step=1)
    ask(site_of(folder), again)
    own = folder / "kept" / NAMES[0] / RUN / "own"
    assert {path.name for path in own.iterdir()} == {f"1-{n}.safetensors" for n in (1, 2, 3, 4, 5)} | {
        "2-1.safetensors"
    }
    later = Request(heads.phase, 3, 0, heads.parameters, step=1)
    ask(site, later)
    assert {path.name for path in own.iterdir()} == {"1-5.safetensors", "2-1.safetensors", "3-1.safetensors"}


def test_a_site_without_parameters_of_its_own_says_that_it_lacks_them(folder):
    study, site = make_study(folder / "data", method="fedrep"), site_of(folder)
    join(site, study)
    heads = request_of(study, "heads")
    assert ask(site, heads)[0] == {"kind": "lacks"}
    finish = {"kind": "finish", "run": RUN, "round": 3, "counts": [1, 1, 1]}
    about, _ = unpack(site.answer(pack(finish, named_parameters(parameters_of(study)))))
    assert about["why"] == "it has no parameters of its own, without which the model is not whole."


def test_a_reply_that_is_too_large_is_refused(joined):
    site, study = joined
    about, tensors = ask(site, next(requests_of(study)), limit=100)
    assert about["kind"] == "refused"
    assert about["why"] == "its reply is larger than the 100 bytes that can be carried."
    assert not tensors


@pytest.mark.parametrize("method", ["feddar", "feddar-sa", "fedrep", "ditto"])
def test_the_model_that_is_left_works(folder, method):
    study = make_study(folder / "data", method=method, rounds=1)
    run = coordinate(study, local_link(make_sites(folder / "data", folder / "kept")), folder / "out")
    (name,) = {path.name for path in (folder / "kept" / NAMES[0]).iterdir() if path.is_dir() and not path.is_symlink()}
    model = folder / "kept" / NAMES[0] / name / "model"
    new = pd.read_csv(folder / "data" / f"{NAMES[0]}.csv").drop(columns="outcome")
    mine = feddar.load(model)
    found = mine.predict_proba(new, domain=new["race"])
    assert found.shape == (60, 2)
    if not run.method.personal:  # what the coordinator has is the same but for corrections, which it does not know
        common = replace(mine, own={}).predict_proba(new, domain=new["race"])
        np.testing.assert_array_equal(common, run.predict_proba(new, domain=new["race"]))
        assert (np.abs(found - common).max() > 1e-4) == run.method.site_offset
    new.to_csv(folder / "new.csv", index=False)
    result = CliRunner().invoke(app, ["predict", str(model), str(folder / "new.csv"), "--out", str(folder / "p.csv")])
    assert result.exit_code == 0, result.output
    predicted = pd.read_csv(folder / "p.csv")
    np.testing.assert_allclose(predicted["probability_died"], found[:, 1], atol=1e-6)


def test_the_model_that_is_left_knows_its_columns(tmp_path):
    """Also that of images, and of patients: what it was made from is in its configuration."""
    folder, rng = tmp_path / "images", np.random.default_rng(0)
    folder.mkdir()
    for number in range(30):
        pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    table = pd.DataFrame({"scan": [f"{number}.png" for number in range(30)], "race": ["A"] * 30})
    table = table.assign(patient=np.arange(30) // 2, outcome=np.arange(30) % 4 // 2)
    path = folder / "scans.csv"
    table.to_csv(path, index=False)
    roles = {"domain": "race", "target": "outcome", "group": "patient", "image": "scan"}
    study = study_of_table(
        "scans",
        TableOptions(data=str(path), image_size=8, features="", **roles),
        Settings(method="fedavg", rounds=1, last=1),
        CoordinatorSettings(sites=1, min_clients=1, wait=5, timeout=30),
    )
    site = Site("h", path, tmp_path / "kept", say=lambda _: None)
    coordinate(study, LocalLink({"h": site.answer}), tmp_path / "out")
    told = tomllib.loads((tmp_path / "kept" / "model" / "config.toml").read_text())["data"]
    assert {name: told[name] for name in ("data", *roles)} == {"data": str(path), **roles}


def test_options_of_an_engines_configuration(folder):
    study = make_study(folder / "data")
    study.write(folder / "agreed.toml")
    needed = {"data": str(folder / "data" / f"{NAMES[0]}.csv"), "name": "h", "study": str(folder / "agreed.toml")}
    for name in needed:
        with pytest.raises(UserError, match=f"does not say its {name}"):
            open_site({each: value for each, value in needed.items() if each != name})
    site = open_site(needed).__self__
    assert isinstance(site, Site)
    assert (site.name, site.data, site.folder) == ("h", folder / "data" / f"{NAMES[0]}.csv", Path("feddar-h"))
    assert (site.min_cell, site.agreed) == (MIN_CELL, study)
    others = {"state": str(folder / "k"), "min-cell": "9"}
    site = open_site(needed | others).__self__
    assert (site.folder, site.min_cell) == (folder / "k", 9)


def test_a_site_with_more_rows_than_the_study_allows_takes_no_part(folder):
    study, ended = with_facts(make_study(folder / "data"), max_rows=20), []
    site = site_of(folder, study=study, ended=ended.append)
    answer, _ = unpack(site.answer(pack({"kind": "join", "run": RUN, "study": study.tables()})))
    assert answer == {"kind": "refused", "why": "it has more than the 20 rows that the study allows."}
    assert ended[0].endswith("ask for a study with a larger max_rows.")
