"""What it costs to use `feddar` where another method is the best: the regret on every cohort there is.

Parts are cohorts, real and synthetic, some in several variants. Tables are trained with the product's own defaults and
what their source declares, and nothing chosen for them here; exam, digits and faces with the settings of their own
experiments. Results are read from the run folders, or from `results.csv` where these are gone, so that parts that are
trained one after another, or stopped, make one table, which says what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.comparison.cells import Cell, CellProgress, Parts
from feddar.comparison.references import fit_references, reference_cells
from feddar.data.cohort import Cohort
from feddar.data.sources import BUILT_IN, exam_cases, resolve_options
from feddar.data.sources.exam import exam_cohort
from feddar.evaluation.intervals import RESULTS_COLUMNS
from feddar.experiments import (
    common,
    controlled,
    digit_table,
    exam_table,
    face_tables,
    faces,
    planted,
    regret,
    tcga_brca,
)
from feddar.experiments.common import ExperimentOptions
from feddar.experiments.controlled import Data, Setting

FIRST = (
    "feddar", "fedavg", "feddar-wa", "fedrep", "fedavg-mh", "fedavg-separate-ft", "feddar-sa", "separate",
)  # fmt: skip
"""The methods that answer the question asked here. Digits and faces, which take long, are trained with these alone."""
EVERY = (
    *FIRST, "local", "fedavg-ft", "fedavg-di", "fedprox", "fedprox-ft", "fedminmax", "fedper", "lg-fedavg", "fedbn",
    "ditto", "apfl",
)  # fmt: skip
"""The methods of the table; those that came later are not in it. The first are trained first, so that what is stopped
early has all folds of some methods."""
COLUMNS = ["cohort", *RESULTS_COLUMNS]
TEST = 0.2
"""The share of a drawn cohort that is held out."""
DIFFERENCES = (0, 0.5, 1)
"""How far domains differ in the exam cohort."""


@dataclass(frozen=True)
class Repetitions:
    """How often a method is trained on a cohort."""

    folds: int
    """Folds of a table."""
    draws: int
    """Fresh draws of a synthetic cohort, one split each."""
    image_draws: int
    """Fresh draws of clients from pools of images."""


SCALES = {"small": Repetitions(folds=5, draws=5, image_draws=3)}

Units = Mapping[tuple[int, int], Callable[[], Parts]]
"""The training and test part of each (fold, seed), which is read or drawn when it is called."""


@dataclass(frozen=True)
class Entry:
    """One cohort of the table: its trainings and its pooled references; making it reads no data."""

    name: str
    cells: list[Cell]
    references: list[Cell]

    @property
    def planned(self) -> list[Cell]:
        """Everything that is to be trained or fitted."""
        return [*self.cells, *self.references]


def run(options: ExperimentOptions) -> pd.DataFrame:
    """Train the parts that were asked for; write `results.csv`, `table.md` and `figure.png`; return the results.

    Files are written after every part, from everything that is finished in the folder.
    """
    _, often = common.pick(SCALES, options, parts=PARTS)
    chosen = common.chosen_parts(options, PARTS)
    often = replace(often, draws=options.seeds or often.draws, image_draws=options.seeds or often.image_draws)

    def declared(part: str) -> list[Entry]:
        return PARTS[part](part, often, options)

    every = [cell for part in PARTS for entry in declared(part) for cell in entry.planned]
    planned = pd.DataFrame([cell.labels for cell in every])
    earlier = common.earlier_results(every, options)
    # Read before the first training, which may take hours: a folder with other settings is an error.
    done = {part: finished(declared(part), earlier) for part in PARTS}
    failures: list[tuple[Cell, str]] = []
    for part in chosen:
        # Declared anew: entries keep the data that they have read, which the next part has no use for.
        failures += train(declared(part), earlier, options)
        done[part] = finished(declared(part), earlier)
        write(common.joined(done.values(), COLUMNS), planned, failures, options)
    common.require_all(failures)
    return common.joined(done.values(), COLUMNS)


def train(
    entries: Sequence[Entry], earlier: Mapping[Path, pd.DataFrame], options: ExperimentOptions
) -> tuple[tuple[Cell, str], ...]:
    """Fit references and train cells that have no earlier results; return the trainings that failed, and why."""

    def report(step: CellProgress) -> None:
        if step.state != "running":
            options.say(f"{step.cell} {step.state}")

    references = [cell for entry in entries for cell in entry.references]
    fit_references(common.pending(references, earlier), options.jobs, report)
    cells = [cell for entry in entries for cell in entry.cells]
    return common.train_cells(common.pending(cells, earlier), options).failures


def write(
    results: pd.DataFrame, planned: pd.DataFrame, failures: Sequence[tuple[Cell, str]], options: ExperimentOptions
) -> None:
    """Write the results, their table, which says what is missing of what is planned, and the picture."""
    text = regret.table(results, planned, [f"{cell}: {why}" for cell, why in failures])
    common.finish(options.out, results, text, regret.draw_figure)


def finished(entries: Sequence[Entry], earlier: Mapping[Path, pd.DataFrame]) -> pd.DataFrame:
    """Return the results of methods and references as far as they are finished, without those of single clients."""
    frames = []
    for each in entries:
        frames += [common.finished(each.cells, earlier), common.finished(each.references, earlier, _fitted)]
    return controlled.tested(common.joined(frames, COLUMNS))


def _fitted(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return the results of references of one cohort that are fitted, from their files."""
    found = fit_references([cell for cell in cells if cell.folder.exists()], 1, lambda _: None)
    found.insert(0, "cohort", cells[0].labels["cohort"])
    return found


def entry(
    name: str, folder: Path, units: Units, settings: Mapping[str, Mapping[str, Any]], *, pooled: bool = False
) -> Entry:
    """Return a cohort with a cell for each method, of which ``settings`` has the options, and each unit."""
    cells = [
        Cell(
            {"cohort": name, "method": method, "fold": fold, "seed": seed},
            # Validation as the product has it by default: on for tables.
            {"validation": None, **own, "method": method, "seed": seed},
            data,
            folder / method / f"seed-{seed}-fold-{fold}",
            later,
        )
        for later in (False, True)
        for (fold, seed), data in units.items()
        for method, own in settings.items()
        if (method not in FIRST) == later
    ]
    references = reference_cells(units, folder / "references") if pooled else []
    return Entry(name, cells, [replace(each, labels={"cohort": name, **each.labels}) for each in references])


def exam(part: str, often: Repetitions, options: ExperimentOptions) -> list[Entry]:
    """Return the synthetic hospitals, with domains that do not differ, differ by half, and differ."""
    settings = {**BUILT_IN["exam"].settings, **exam_table.SCALES["small"]}

    def drawn(difference: float, seed: int) -> Parts:
        return exam_cohort(exam_cases.draw(seed, difference)).split(TEST, seed)

    return [
        entry(
            f"exam (synthetic), difference {difference:g}",
            options.out / "runs" / part / f"difference-{difference:g}",
            {(0, seed): partial(drawn, difference, seed) for seed in range(often.draws)},
            dict.fromkeys(EVERY, settings),
        )
        for difference in DIFFERENCES
    ]


def public_table(part: str, often: Repetitions, options: ExperimentOptions) -> list[Entry]:
    """Return one of the built-in tables of real sites, with the settings that its source declares."""
    source = BUILT_IN[part]
    given = {} if options.data is None else {"folder": options.data}
    load = partial(source.load, resolve_options(source, part, given), 0)
    return [_folded(part, load, source.settings, often, options)]


def breast_cancer(part: str, often: Repetitions, options: ExperimentOptions) -> list[Entry]:
    """Return the patients of TCGA-BRCA."""
    return [_folded(part, partial(tcga_brca.cohort, options.data), {}, often, options)]


def _folded(
    part: str, load: Callable[[], Cohort], settings: Mapping[str, Any], often: Repetitions, options: ExperimentOptions
) -> Entry:
    """Return a table in folds; it is loaded once."""
    loaded = cache(load)

    def parts(fold: int) -> Parts:
        return loaded().fold(fold, often.folds)

    units = {(fold, 0): partial(parts, fold) for fold in range(often.folds)}
    return entry(part, options.out / "runs" / part, units, dict.fromkeys(EVERY, settings), pooled=True)


def planted_tables(part: str, often: Repetitions, options: ExperimentOptions) -> list[Entry]:
    """Return the synthetic tables whose domains are one population, and whose domains are not."""

    def drawn(apart: bool, seed: int) -> Parts:
        return planted.cohort(seed, apart=apart).split(TEST, seed)

    return [
        entry(
            f"planted (synthetic), domains {how}",
            options.out / "runs" / part / how,
            {(0, seed): partial(drawn, apart, seed) for seed in range(often.draws)},
            {method: {} for method in EVERY},
            pooled=True,
        )
        for how, apart in (("alike", False), ("apart", True))
    ]


def digits(part: str, often: Repetitions, options: ExperimentOptions) -> list[Entry]:
    """Return the mixtures of digits, as in the small scale of their own experiment."""
    setting = replace(digit_table.SCALES["small"], seeds=often.image_draws)
    return _mixtures(part, setting, lambda: digit_table.samples(setting, options), options)


def face_age(part: str, often: Repetitions, options: ExperimentOptions) -> list[Entry]:
    """Return the mixtures of faces by age, as in the small scale of their own experiment."""
    small = faces.SCALES["small"]
    setting = replace(small, seeds=often.image_draws, second_order={"k": face_tables.AGE_K})
    return _mixtures(part, setting, lambda: faces.samples("age", "small", setting, options)[0], options)


def _mixtures(part: str, setting: Setting, load: Callable[[], Data], options: ExperimentOptions) -> list[Entry]:
    """Return a cohort for each alpha; the pool of images is loaded once."""
    loaded = cache(load)

    def parts(alpha: float, seed: int) -> Parts:
        return loaded()(alpha, seed)

    return [
        entry(
            f"{part}, α = {alpha:g}",
            options.out / "runs" / part / f"alpha-{alpha:g}",
            {(0, seed): partial(parts, alpha, seed) for seed in range(setting.seeds)},
            {method: controlled.options(setting, method) for method in FIRST},
        )
        for alpha in setting.alphas
    ]


PARTS: dict[str, Callable[[str, Repetitions, ExperimentOptions], list[Entry]]] = {
    "exam": exam,
    "eicu": public_table,
    "covid-mx": public_table,
    "acs-income": public_table,
    "tcga-brca": breast_cancer,
    "planted": planted_tables,
    "digits": digits,
    "face-age": face_age,
}
"""What returns the cohorts of each part, by name."""
