"""The phases of a round, written out: what a method's row and the settings become."""

from dataclasses import replace

import pytest

from feddar.algorithm.protocol import Phase
from feddar.algorithm.schedule import census, phases, planned
from feddar.methods import METHODS
from feddar.objectives import Binary, Multiclass, Regression
from feddar.settings import Settings

BINARY = Binary(("no", "yes"))

# No two are alike, so that none can stand for another; the learning rates are halved after round 4.
OPTIONS = {
    "rounds": 9,
    "head_epochs": 7,
    "encoder_epochs": 3,
    "lr": 0.02,
    "head_lr": 0.07,
    "lr_steps": "4:0.5",
    "optimizer": "sgd",
    "momentum": 0.8,
    "weight_decay": 0.01,
    "batch_size": 17,
    "curvature_at": "start",
    "mu": 0.3,
    "mix": 0.25,
    "tune_factor": 0.4,
    "q": 2.5,
    "minmax_lr": 0.7,
    "beta": 0.6,
    "last": 2,
}

TOGETHER = Phase(
    "together",
    epochs=3,
    lr=0.02,
    optimizer="sgd",
    momentum=0.8,
    weight_decay=0.01,
    batch_size=17,
    curvature_at="start",
)
OWN = replace(TOGETHER, name="personal", encoder="client", heads="client")
ADOPT = Phase("adopt", "client", "client")
IN_TURN = (replace(TOGETHER, name="heads", epochs=7, lr=0.07), replace(TOGETHER, name="encoder"))
OF_DOMAINS = tuple(replace(phase, heads="domain") for phase in IN_TURN)
SECOND_ORDER = (replace(OF_DOMAINS[0], curvature="hessian"), OF_DOMAINS[1])

EXPECTED = {
    "local": (replace(TOGETHER, encoder="client", heads="client"),),
    "fedavg": (TOGETHER,),
    # One epoch, however many the common model has, at the rate of fine-tuning.
    "fedavg-ft": (TOGETHER, ADOPT, replace(OWN, epochs=1, lr=0.008)),
    "separate": (replace(TOGETHER, encoder="domain", heads="domain"),),
    "fedavg-separate-ft": (replace(TOGETHER, encoder="domain", heads="domain", lr=0.008),),
    "fedavg-mh": (replace(TOGETHER, heads="domain"),),
    "fedavg-di": (TOGETHER,),
    "fedprox": (replace(TOGETHER, mu=0.3),),
    "fedprox-ft": (replace(TOGETHER, mu=0.3), ADOPT, replace(OWN, epochs=1, lr=0.008)),
    "fedminmax": (replace(TOGETHER, risks=True),),
    "group-dro": (replace(TOGETHER, risks=True),),
    "q-ffl": (replace(TOGETHER, q=2.5),),
    "afl": (replace(TOGETHER, agnostic=0.7),),
    "analytic": (TOGETHER,),
    "fedrod": (
        replace(TOGETHER, balanced=True),
        replace(TOGETHER, name="personal", epochs=7, lr=0.07, added_heads=True),
    ),
    "fairfed": (replace(TOGETHER, fair=0.6),),
    "fedrep": tuple(replace(phase, heads="client") for phase in IN_TURN),
    "fedper": (replace(TOGETHER, heads="client"),),
    "lg-fedavg": (replace(TOGETHER, encoder="client"),),
    "fedbn": (replace(TOGETHER, private_norm=True),),
    "ditto": (TOGETHER, replace(OWN, mu=0.3)),
    "apfl": (TOGETHER, replace(OWN, mix=0.25)),
    "ifca": (replace(TOGETHER, encoder="domain", heads="domain", assigns="client"),),
    "fedem": (replace(TOGETHER, encoder="domain", heads="domain", assigns="sample"),),
    "feddar-mixture": tuple(replace(phase, assigns="sample") for phase in OF_DOMAINS),
    "feddar-wa": OF_DOMAINS,
    "feddar-sa": SECOND_ORDER,
    "feddar": OF_DOMAINS,
}


def round_of(number, objective=BINARY, **options):
    settings = Settings(**(OPTIONS | options))
    return phases(settings.row(), settings, objective, number)


def close(found, expected):
    """Equal but for the last bit of the learning rate."""
    assert [phase.lr for phase in found] == pytest.approx([phase.lr for phase in expected], rel=1e-12)
    assert tuple(replace(phase, lr=0.0) for phase in found) == tuple(replace(phase, lr=0.0) for phase in expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_asks_for_what_the_method_is_and_the_settings_say(method):
    close(round_of(4, method=method), EXPECTED[method])
    close(round_of(5, method=method), [replace(phase, lr=phase.lr / 2) for phase in EXPECTED[method]])


def test_heads_have_the_common_rate_where_they_have_none_of_their_own():
    assert [phase.lr for phase in round_of(1, method="feddar", head_lr=None)] == [0.02, 0.02]


def test_what_a_phase_does_not_train_it_is_not_asked_about():
    """Risks are those of the model that is sent, once a round; curvature is that of heads that are combined."""
    in_turn = round_of(1, method="fedminmax", alternating=True)
    assert [(phase.name, phase.risks) for phase in in_turn] == [("heads", False), ("encoder", True)]
    joint = round_of(1, method="feddar-sa", alternating=False)
    assert [(phase.name, phase.curvature) for phase in joint] == [("together", "hessian")]


@pytest.mark.parametrize("companion", ["tuned", "pulled", "mixed"])
def test_a_companion_tells_nobody_of_itself(companion):
    """Any method may have one: neither risks nor curvature are asked of a model that stays with its client."""
    row = replace(METHODS["feddar-sa"], companion=companion, minmax=True)
    *common, own = phases(row, Settings(**OPTIONS), BINARY, 1)
    assert (own.name, own.risks, own.curvature, own.is_personal) == ("personal", False, None, True)
    assert any(phase.risks for phase in common)
    assert any(phase.curvature for phase in common)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_phase_that_trains_has_the_optimizer(optimizer):
    for method in METHODS:
        found = round_of(1, method=method, optimizer=optimizer)
        assert {phase.optimizer for phase in found if phase.name != "adopt"} == {optimizer}


def test_curvature_is_the_objectives_where_none_is_named():
    many = Multiclass(tuple("abcdefghijkl"))
    for objective in (BINARY, many, Regression()):
        assert round_of(1, objective, method="feddar-sa")[0].curvature == objective.default_curvature
        assert round_of(1, objective, method="feddar-sa", curvature="block")[0].curvature == "block"
        assert round_of(1, objective, method="feddar-wa", curvature="block")[0].curvature is None


@pytest.mark.parametrize(
    ("bias", "said", "number"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_a_census_asks_for_the_units_of_a_number(bias, said, number):
    settings = Settings(bias=bias, standardise_target=said)
    assert census(settings, Regression()) == Phase("census", target=number)
    assert census(settings, BINARY) == Phase("census", target=False)


@pytest.mark.parametrize("method", METHODS)
def test_sites_may_be_asked_for_the_census_then_adoption_training_and_evaluation(method):
    settings = Settings(**(OPTIONS | {"method": method, "warmup": 1}))
    assert planned(settings, BINARY, 0) == (Phase("census"),)
    fedavg = planned(settings, BINARY, 1)
    assert fedavg == (Phase("adopt"), TOGETHER, Phase("measure"))
    used, corrected = METHODS[method].used, method == "feddar"
    # Corrections are fitted to heads for use, which are pooled before them; held-out samples are scored with them.
    fitted = (Phase("pool", *used), Phase("offsets", *used)) if corrected else ()
    fitted = (Phase("pool", curvature="gram"),) if method == "analytic" else fitted
    first, *between, last = planned(settings, BINARY, 9)
    more = {"offsets": corrected, "added_heads": method == "fedrod", "assigns": METHODS[method].assigns}
    assert (first, last) == (Phase("adopt", *used), Phase("measure", *used, **more))
    close(between, (*round_of(9, method=method), *fitted))
    validated = planned(settings.model_copy(update={"validation": 0.1}), BINARY, 9)
    assert validated[-2:] == (Phase("validate", *used, **more), last)
    assert validated[:-2] == (first, *between)


def test_sites_are_asked_for_what_the_options_of_the_method_need():
    def names(**options):
        return [phase.name for phase in planned(Settings(**(OPTIONS | options)), BINARY, 9)]

    assert names(site_offset=False) == ["adopt", "heads", "encoder", "pool", "measure"]
    assert names(credibility=False) == ["adopt", "heads", "encoder", "offsets", "measure"]
    assert names(method="feddar-sa", site_offset=True) == ["adopt", "heads", "encoder", "offsets", "measure"]
    assert names(method="feddar-wa") == ["adopt", "heads", "encoder", "measure"]


def test_the_rate_falls_in_every_phase_that_trains():
    settings = Settings(**(OPTIONS | {"lr_steps": "", "schedule": "cosine", "method": "feddar"}))
    first, last = (phases(settings.row(), settings, BINARY, number) for number in (1, 9))
    close(first, OF_DOMAINS)
    close(last, [replace(phase, lr=phase.lr * settings.lr_factor(9)) for phase in OF_DOMAINS])
    assert last[0].lr < 0.05 * first[0].lr
