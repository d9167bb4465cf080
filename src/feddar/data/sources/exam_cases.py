"""A SYNTHETIC hospital cohort, modelled on the private EXAM data of the FedDAR paper.

It contains no real patient. From the paper come only the published figures: six hospitals, five race groups,
7,681 cases, the share of each group and the rate of positive labels at each hospital. Everything else is
invented, above all how risk differs between groups: *nothing here says anything about real medicine*.

A case is a chest-X-ray-like image and 20 values of a medical record. Its label says whether the patient will
need high-flow oxygen or more. It depends on a few clinical factors, which are the same functions for all groups:
five are nonlinear combinations of values of the record, and two are the opacity of the lower and of the upper
lungs, which only the image shows. Each group has its own weights of these factors:

    logit P(y = 1 | x, race) = weights[race] . factors(x) + bias[race]

So no single model is right for all groups, but a shared representation is, and the rare groups are too small to
learn it alone. The hospital is not in the formula: hospitals differ only in how ill their patients are, which
gives each its published label rate.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feddar.errors import UserError

Floats = NDArray[np.float64]
Images = NDArray[np.float32]
Integers = NDArray[np.int64]

SITES = ("Site-1", "Site-2", "Site-3", "Site-4", "Site-5", "Site-6")
RACES = ("White", "Black", "Asian", "Latino", "Other")

# Percent of each race (columns) at each site (rows), and percent of positive labels at each site, as published.
SHARES = (
    (59.6, 10.0, 3.4, 2.0, 24.9),
    (75.0, 11.1, 2.8, 0.6, 10.5),
    (46.5, 26.3, 4.2, 7.0, 16.0),
    (71.4, 6.3, 4.2, 0.8, 17.2),
    (44.0, 28.4, 1.6, 6.3, 19.8),
    (0.0, 0.0, 100.0, 0.0, 0.0),
)
LABEL_RATES = (12.4, 9.1, 9.6, 11.4, 9.9, 18.8)

# The paper gives only the total, 7,681; how it divides into sites is our choice.
SITE_SIZES = (2412, 1520, 1103, 1310, 806, 530)

# Values of the record, each in standard deviations from a reference mean (laboratory values on a log scale).
FEATURES = (
    "age",
    "body_mass_index",
    "temperature",
    "respiratory_rate",
    "heart_rate",
    "systolic_pressure",
    "oxygen_saturation",
    "c_reactive_protein",
    "d_dimer",
    "ferritin",
    "lactate_dehydrogenase",
    "procalcitonin",
    "troponin",
    "lymphocytes",
    "neutrophils",
    "creatinine",
    "filtration_rate",
    "aspartate_transaminase",
    "glucose",
    "lactate",
)

# Organ systems, and how strongly each value of the record depends on their state (negative: it falls as they worsen).
SYSTEMS: dict[str, dict[str, float]] = {
    "breathing": {"oxygen_saturation": -0.8, "respiratory_rate": 0.8},
    "inflammation": {
        "c_reactive_protein": 0.8,
        "ferritin": 0.7,
        "lactate_dehydrogenase": 0.7,
        "procalcitonin": 0.6,
        "lymphocytes": -0.5,
        "temperature": 0.4,
    },
    "clotting": {"d_dimer": 0.8, "troponin": 0.7},
    "kidneys": {"creatinine": 0.8, "filtration_rate": -0.8},
    "circulation": {"heart_rate": 0.7, "systolic_pressure": -0.6, "lactate": 0.7},
    "age": {"age": 1.0},
}

# The factors the label depends on, their common weights, and what is added for each race (times `difference`).
# The differences are invented: as if, for example, oximeters read too high in one group, and the image said more
# than the laboratory in another. No group's weights are the reverse of another's.
FACTORS = ("breathing", "inflammation", "clotting", "organs", "age", "lower_opacity", "upper_opacity")
WEIGHTS = (1.4, 1.2, 1.1, 0.9, 1.0, 1.6, 1.3)
DIFFERENCES = {
    "White": (0.8, -0.1, -0.5, -0.3, 0.4, 0.3, -0.6),
    "Black": (-1.2, 0.2, 1.2, 0.6, -0.2, -0.9, 0.8),
    "Asian": (-0.3, -1.0, -0.6, 0.2, 0.1, 1.0, 0.9),
    "Latino": (-0.6, 1.3, 0.2, 0.9, -0.8, -0.4, -0.2),
    "Other": (0.2, 0.6, 0.7, -0.7, 0.9, -1.2, 0.5),
}
BIAS = -5.0
BIAS_DIFFERENCES = {"White": 0.0, "Black": 0.2, "Asian": -0.2, "Latino": 0.6, "Other": 0.0}

SIZE = 32  # pixels per side of an image

# LOADINGS [20, 6]: how strongly each value depends on each system. READINGS [20, 6]: estimates the systems from values.
LOADINGS = np.array([[system.get(feature, 0.0) for system in SYSTEMS.values()] for feature in FEATURES])
READINGS = LOADINGS / np.sqrt(np.sum(LOADINGS**2, axis=0) ** 2 + np.sum(LOADINGS**2 - LOADINGS**4, axis=0))


class State(NamedTuple):
    """The clinical state of cases, from which records, images and labels are made."""

    record: Floats  # [n, 20]
    opacity: Floats  # [n, 2], of the lower and of the upper lungs

    def at(self, rows: NDArray[np.bool_] | Integers) -> "State":
        """Return the state of these cases only."""
        return State(self.record[rows], self.opacity[rows])


class ExamData(NamedTuple):
    """The synthetic cohort, one row per case, in random order."""

    image: Images  # [n, 1, 32, 32], grey from about 0 (air) to about 1 (dense)
    record: Images  # [n, 20], the columns of FEATURES
    y: Integers  # [n], 1 if the case will need high-flow oxygen or more
    race: NDArray[np.str_]  # [n], one of RACES
    site: NDArray[np.str_]  # [n], one of SITES
    logit: Floats  # [n], the true log-odds of y: the scores of a perfect model


def draw(seed: int = 0, difference: float = 1.0) -> ExamData:
    """Draw the synthetic cohort.

    `difference` says how far the races differ in P(y | x); at 0 they do not.
    """
    return draw_counts(case_counts(), seed, difference)


def case_counts() -> Integers:
    """Return the cases by site and race [6, 5]: the published shares, rounded so that the site sizes are exact."""
    exact = np.array(SHARES) / np.sum(SHARES, axis=1, keepdims=True) * np.array(SITE_SIZES)[:, None]
    counts: Integers = np.floor(exact).astype(np.int64)
    for row, rest in zip(counts, exact - counts, strict=True):
        missing = round(float(rest.sum()))
        row[np.argsort(-rest, kind="stable")[:missing]] += 1
    return counts


def draw_counts(counts: Integers, seed: int, difference: float) -> ExamData:
    """Draw a cohort with the given number of cases by site and race."""
    if not (np.isfinite(difference) and difference >= 0):
        raise UserError(f"difference must be zero or a positive number, got {difference}")
    rng = np.random.default_rng(seed)
    race = np.concatenate([np.repeat(np.arange(len(RACES)), row) for row in counts])
    site = np.repeat(np.arange(len(SITES)), counts.sum(axis=1))
    state = _average_cases(rng, len(site))
    severity = np.zeros(len(site))
    y = np.zeros(len(site), dtype=np.int64)
    for i, rate in enumerate(LABEL_RATES):
        here = site == i
        severity[here] = _severity(state.at(here), race[here], rate / 100, difference)
    state = _worsen(state, severity)
    logit = true_logit(factors(state), race, difference)
    for i in range(len(SITES)):
        y[site == i] = _labels(rng, logit[site == i])
    order = rng.permutation(len(site))
    state = state.at(order)
    some_at_a_time = np.array_split(state.opacity, 30)  # images of a few hundred cases fit into caches
    return ExamData(
        image=np.concatenate([render(rng, some) for some in some_at_a_time]),
        record=state.record.astype(np.float32),
        y=y[order],
        race=np.array(RACES)[race[order]],
        site=np.array(SITES)[site[order]],
        logit=logit[order],
    )


def factors(state: State) -> Floats:
    """Return the clinical factors of each case [n, 7]: the shared representation that an encoder should find."""
    read = dict(zip(SYSTEMS, (state.record @ READINGS).T, strict=True))
    return np.column_stack(
        [
            _reserve(read["breathing"]),
            1.5 * np.tanh(read["inflammation"]),  # saturates
            _reserve(read["clotting"]),
            _reserve((read["kidneys"] + read["circulation"]) / np.sqrt(2)),  # one can make up for the other
            _reserve(read["age"]),
            _reserve(state.opacity),
        ]
    )


def true_logit(factor: Floats, race: Integers, difference: float) -> Floats:
    """Return the log-odds [n] of a positive label, given factors and race; they do not depend on the site."""
    weights = np.array(WEIGHTS) + difference * np.array([DIFFERENCES[name] for name in RACES])
    bias = BIAS + difference * np.array([BIAS_DIFFERENCES[name] for name in RACES])
    return np.asarray(np.einsum("nk,nk->n", factor, weights[race]) + bias[race])


def render(rng: np.random.Generator, opacity: Floats) -> Images:
    """Draw schematic chest X-rays [n, 1, 32, 32], with the `opacity` [n, 2] of the lower and upper lungs."""
    n = len(opacity)

    def vary(low: float, high: float) -> Images:
        return rng.uniform(low, high, (n, 1, 1)).astype(np.float32)

    axis = np.linspace(-1, 1, SIZE, dtype=np.float32)
    v, h = axis[None, :, None], axis[None, None, :]  # downwards; from the viewer's left to right
    tilt, centre = vary(-0.05, 0.05), vary(0.44, 0.48)
    half_width, half_height = vary(0.33, 0.38), vary(0.72, 0.8)
    side = np.abs(h - tilt)  # distance from the middle of the chest: both lungs at once
    reach = ((side - centre + 0.1 * v) / half_width) ** 2 + ((v + 0.02) / half_height) ** 2
    lung = _soft(6 * (1 - reach)) * _soft(14 * (0.72 - v - 0.5 * (side - centre) ** 2))
    heart = _soft(5 * (1 - ((h - tilt - 0.1) / vary(0.2, 0.3)) ** 2 - ((v - 0.4) / 0.32) ** 2))
    torso = _soft(9 * (1.02 - np.abs(h) - 0.12 * v)) * (0.68 - 0.06 * v)
    spine = 0.22 * np.exp(-((side / 0.11) ** 2))
    ribs = 0.06 * np.sin(22 * (v + 0.4 * side**2) + vary(0, 6.3)) * lung
    clear = torso + spine - 0.5 * lung * (1 - 0.9 * heart) + ribs
    grey = clear + (0.8 - clear) * lung * (1 - np.exp(-_patches(rng, opacity, centre)))
    grey = vary(0.94, 1.06) * grey + vary(-0.03, 0.03)
    grey += 0.04 * rng.standard_normal(grey.shape, dtype=np.float32)
    images: Images = grey[:, None]
    return images


def _patches(rng: np.random.Generator, opacity: Floats, centre: Images) -> Images:
    """Draw blurred patches of opacity [n, 32, 32]: four per quarter of the lungs, at random places."""
    n, patches = len(opacity), 4
    shape = (n, 2, 2, patches)  # level (lower, upper), side (left, right)
    share = rng.gamma(0.8, size=shape)
    amount = np.logaddexp(0, 2 * opacity)[:, :, None, None] * share / share.sum(axis=(2, 3), keepdims=True)
    level = np.array([0.38, -0.38])[None, :, None, None]
    left_right = np.array([-1.0, 1.0])[None, None, :, None]
    v = level + rng.uniform(-0.22, 0.22, shape)
    h = left_right * (centre[..., None] + rng.uniform(-0.14, 0.2, shape))
    width, height = rng.uniform(0.1, 0.2, (2, *shape))
    axis = np.linspace(-1, 1, SIZE, dtype=np.float32)

    def bump(place: Floats, spread: Floats) -> Images:
        middle, width = (a.reshape(n, -1, 1).astype(np.float32) for a in (place, spread))
        return np.asarray(np.exp(-(((axis - middle) / width) ** 2)) / width)

    down = 0.04 * amount.reshape(n, -1, 1).astype(np.float32) * bump(v, height)
    return np.asarray(down.transpose(0, 2, 1) @ bump(h, width))


def _average_cases(rng: np.random.Generator, n: int) -> State:
    """Draw cases of average severity: values of one organ system are correlated, opacities are independent."""
    cause = rng.standard_normal((n, len(SYSTEMS)))
    own = rng.standard_normal((n, len(FEATURES)))
    record = cause @ LOADINGS.T + own * np.sqrt(1 - np.sum(LOADINGS**2, axis=1))
    return State(record, rng.standard_normal((n, 2)))


def _worsen(state: State, severity: Floats) -> State:
    """Return the same cases with higher severity: all organ systems worse and lungs more opaque, at the same age."""
    worse = LOADINGS.sum(axis=1) * (np.array(FEATURES) != "age")
    return State(state.record + severity[:, None] * worse, state.opacity + severity[:, None])


def _severity(state: State, race: Integers, rate: float, difference: float) -> float:
    """Return the severity at which the expected rate of positive labels of one hospital is `rate` (bisection)."""
    positives = round(rate * len(race))
    low, high = -6.0, 6.0
    for _ in range(45):
        middle = (low + high) / 2
        logit = true_logit(factors(_worsen(state, np.full(len(race), middle))), race, difference)
        low, high = (middle, high) if _chance(logit).sum() < positives else (low, middle)
    return low


def _labels(rng: np.random.Generator, logit: Floats) -> Integers:
    """Draw labels with the probabilities of the logits, whose sum is the expected number of positives.

    This is systematic sampling: a case is positive where the running sum of probabilities, from a random start,
    passes a whole number.
    """
    passed = np.floor(np.cumsum(_chance(logit)) + rng.uniform())
    return np.diff(passed, prepend=0).astype(np.int64)


def _reserve(reading: Floats) -> Floats:
    """Return a scaled softplus: nearly flat for low readings, then linear; about zero mean and unit variance."""
    return (np.logaddexp(0, 2 * reading) - 0.96) / 1.14


def _chance(logit: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(logit / 2)


def _soft(x: Images) -> Images:
    """Return the logistic function of x: a soft step from 0 to 1."""
    return (0.5 + 0.5 * np.tanh(x / 2)).astype(np.float32)
