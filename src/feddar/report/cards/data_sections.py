"""The sections of a model card on its purpose and its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from feddar.data.columns import Column
from feddar.data.sources import BUILT_IN, source_named
from feddar.evaluation.figures import Figure
from feddar.report.cards.content import (
    Block,
    Items,
    Paragraph,
    Section,
    ask,
    capitalised,
    listed,
    number_table,
    section,
    words_table,
)
from feddar.report.cards.trained_run import ALL, TrainedRun, of, tested_in
from feddar.report.numbers import UNDEFINED, counted
from feddar.report.operating_point import FEW_POSITIVES
from feddar.results.run_folder import MODEL_FILE

MOST_DOMAINS = 12
"""Of more domains, the samples of each at each site are not shown."""
READING = ("features", "ignore", "missing", "categories", "numbers", "spellings", "incomplete", "min_client")
"""Options of reading a table that say what becomes of rows and columns."""


def data_sections(run: TrainedRun) -> Iterator[Section]:
    """Yield the sections, in the order of TRIPOD+AI."""
    asked = ask("intended_use", "intended_users", "population", "background", "inequalities", "responsible")
    yield section("Intended use", "items 3 and 4, background and objectives", *asked)
    yield section("Source of data", "item 5", _where_from(run), *_roles(run), *ask("data_source", "data_dates"))
    yield section(
        "Participants", "items 6 and 20", *_by_domain(run), *_by_site(run), *ask("setting", "eligibility", "treatments")
    )
    options = [(name, str(run.told(name))) for name in READING if run.told(name)]
    table = words_table("Options of reading", ("option", "value"), options)
    yield section("Data preparation", "item 7", _split(run), *table, *_noted(run), *ask("preparation"))
    outcome = f"Predicted is {run.outcome}. {_output(run)}"
    yield section("Outcome", "items 8 and 15, outcome and model output", outcome, *ask("outcome_definition"))
    yield section("Predictors", "item 9", *_inputs(run), _use_of_domain(run), *ask("predictor_definition"))
    yield section("Sample size", "items 10 and 21", _size(run), *ask("sample_size"))
    yield section("Missing data", "item 11", " ".join(_missing(run)), *ask("missing_reasons"))


def _where_from(run: TrainedRun) -> str:
    data = run.files.data
    if run.study is not None:
        return f"The study “{run.told('name')}”: each site read its own table, which stayed there."
    if run.between_sites:
        return "A study between sites: each site read its own table. This is one site's copy of the model."
    if data is None:
        return "The cohort was made in Python, and where it came from is not written down."
    if data in BUILT_IN:
        return f"The built-in cohort {data}. {capitalised(BUILT_IN[data].about)}."
    return f"The table {data}."


def _roles(run: TrainedRun) -> Iterable[Block]:
    roles = [(role, name) for role in ("client", "domain", "target", "group") if (name := run.role(role))]
    return words_table("Columns and their roles", ("role", "column"), roles)


def _by_domain(run: TrainedRun) -> Iterator[Block]:
    """Yield the samples of each domain, and how many of the test samples have the outcome."""
    column, validated = run.role("domain"), run.validated
    header = [f"domain ({column})" if column else "domain", "trained on"]
    header += ["validation"] * bool(validated) + ["tested on"] * bool(run.parts)
    header += [f"positives{of(end)} (test)" for end in run.outcomes]
    every = {name: [n, validated.get(name, 0)] for name, n in run.trained.items()}
    rows = [_samples(run, name, held, run.tested.get(name, {})) for name, held in every.items()]
    total = [sum(held) for held in zip(*every.values(), strict=True)]
    yield from number_table("Samples by domain", header, [*rows, _samples(run, ALL, total, run.overall)], MODEL_FILE)
    if not run.outcomes:
        yield Paragraph("How frequent outcomes are is not in this folder: “feddar cohort” says it of the data.")
    if run.rare:
        yield Paragraph(f"Fewer than {FEW_POSITIVES} positives among test samples: {', '.join(run.rare)}.")


def _samples(run: TrainedRun, name: str, held: list[int], tested: Mapping[str, Figure]) -> tuple[str, ...]:
    """Return a row: samples trained on, for validation if there are any, tested on, and positives among these."""
    shown = held if run.validated else held[:1]
    shown = [*shown, tested_in(tested)] if run.parts else shown
    return name, *(f"{n:,}" for n in shown), *(_rate(tested.get(f"threshold{end}")) for end in run.outcomes)


def _rate(figure: Figure | None) -> str:
    """Return the positives among test samples, with their share."""
    if figure is None or not figure.count:
        return UNDEFINED
    return f"{figure.positives:,.0f} ({100 * figure.positives / figure.count:.1f} %)"


def _by_site(run: TrainedRun) -> Iterator[Block]:
    """Yield the samples of each site, as far as they are known."""
    if run.sites_asked:
        yield Paragraph(f"{counted(run.sites_asked, 'site')} took part: {', '.join(run.sites_asked)}.")
    if not run.sites:
        yield Paragraph("How many samples each site has is not known here: only sums over sites were revealed.")
        return
    tested = dict(zip(run.by_site["name"], run.by_site["count"], strict=True))
    domains = run.cohort.domains if len(run.cohort.domains) <= MOST_DOMAINS else ()
    rows = []
    for name, held in zip(run.sites, run.cohort.counts.tolist(), strict=True):
        cells = [f"{n:,}" if n else "·" for n in held] if domains else []
        rows.append((name, *cells, f"{sum(held):,}", *([f"{tested.get(name, 0):,}"] if tested else [])))
    header = ["site", *domains, "trained on", *(["tested on"] if tested else [])]
    yield from number_table("Samples trained on, by site and domain", header, rows, MODEL_FILE)


def _split(run: TrainedRun) -> str:
    said, share = [], run.told("test")
    if share is not None:
        said.append(
            f"{100 * share:.0f} % of the samples, drawn within each site, domain and class, were held out to test."
        )
    known = () if run.files.data is None else source_named(run.files.data).options.model_fields
    if run.role("group"):
        said.append(f"Rows with the same {run.role('group')} are on one side of the split.")
    elif run.between_sites or "group" in known:
        said.append(
            "No column says which rows are of one patient: if patients have several rows, some may be on both sides of "
            "the split, and the figures below are then too good."
        )
    return " ".join(said)


def _noted(run: TrainedRun) -> Iterator[Block]:
    """Yield what was noted of the data before training, if anything was."""
    if run.cohort.notes:
        yield Paragraph("What feddar noted of the data before training, all of which the author has to judge:")
        yield Items(run.cohort.notes)


def _output(run: TrainedRun) -> str:
    classes, ends = run.objective.classes, run.objective.risk_outcomes
    if classes is not None:
        return f"The classes are {listed(map(str, classes))}; the output is the probability of each."
    if ends:
        return f"The outcomes are {listed(end[1:] for end in ends)}; the output is the risk of each."
    return "The output is a number, in the units of the target."


def _inputs(run: TrainedRun) -> Iterable[Block]:
    columns = run.cohort.columns
    if not columns:
        shapes = (" × ".join(map(str, part["shape"])) for part in run.files.about["inputs"])
        return [Paragraph(f"Inputs without names of columns, of {listed(shapes)} numbers for each sample.")]
    rows = [(each.name, each.kind, _content(each), "may be" if each.gaps else "none") for each in columns]
    return words_table("Columns learned from", ("column", "kind", "levels", "missing in training"), rows)


def _content(column: Column) -> str:
    """Return the levels of a category, or the size of images."""
    if column.kind == "image":
        return f"{column.size} × {column.size} pixels"
    more = len(column.levels) - 6
    return ", ".join(column.levels[:6]) + (f" and {more} more" if more > 0 else "")


def _use_of_domain(run: TrainedRun) -> str:
    if not run.uses_domain:
        return "The domain is not used to predict."
    how = "it is an input of the head" if run.method.domain_input else "it says which head answers"
    return f"The domain is needed to predict: {how}."


def _size(run: TrainedRun) -> str:
    smallest = min(run.trained, key=run.trained.__getitem__)
    tested = f", and {tested_in(run.overall):,} were tested on" if run.overall else ""
    return (
        f"{sum(run.trained.values()):,} samples were trained on{tested}; the smallest domain in training is "
        f"{smallest}, with {run.trained[smallest]:,}."
    )


def _missing(run: TrainedRun) -> Iterator[str]:
    columns = run.cohort.columns or ()
    gaps = [each.name for each in columns if each.gaps]
    if not columns:
        yield "Inputs are without names of columns: whether values were missing is not written down."
        return
    if any(each.is_numeric for each in columns):
        yield (
            "A missing number, truth value or date is filled with the mean of training; where training had gaps in "
            "that column, an input of its own says that it was missing."
        )
    if any(each.kind == "category" for each in columns):
        yield "A missing category is a level of its own."
    if run.between_sites:
        yield "A level or measurement that too few patients of a site have counts as missing there."
    yield f"Columns with gaps in training: {', '.join(gaps)}." if gaps else "No column has gaps in training."
    if gaps:
        yield "How many values are missing is not in this folder: “feddar cohort” says it of the data."
