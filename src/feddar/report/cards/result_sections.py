"""The sections of a model card on its training and on its figures: by domain, with intervals, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isnan, nan
from typing import Any

from feddar.evaluation.fairness import RATES
from feddar.evaluation.figures import Figure, Figures
from feddar.evaluation.operating_point import OperatingPoint, nobody_or_everybody
from feddar.objectives.objective import metric_kind
from feddar.report.cards.content import (
    Block,
    CardTable,
    Items,
    Paragraph,
    Section,
    ask,
    capitalised,
    number_table,
    section,
    words_table,
)
from feddar.report.cards.trained_run import ALL, MOST_OUTCOMES, TrainedRun, of, with_interval
from feddar.report.markdown import evaluated_with
from feddar.report.missing_domains import ABOUT, TITLE, cost_table
from feddar.report.numbers import better, interval_kinds, metric_name, number
from feddar.report.operating_point import FEW_POSITIVES, selection_rates
from feddar.report.validation import about_choice, results_of
from feddar.results.client_metrics import ABOUT_CLIENTS, are_left_out
from feddar.results.figure_files import FILES, MISSING_FILE
from feddar.results.run import CUSTOM_ENCODER
from feddar.results.run_folder import METRICS_FILE, MODEL_FILE
from feddar.settings import CONFIG_FILE

FIGURES_FILE, CALIBRATION_FILE, DECISIONS_FILE = FILES
CALIBRATION = ("calibration_slope", "calibration_intercept", "ece")
DECISIONS = ("sensitivity", "specificity", "ppv", "npv")
OLDER = (
    f"this folder has no {FIGURES_FILE}, since an earlier version wrote it. Going on with the run (--resume), or "
    "training it again, writes it."
)
ABOUT_CALIBRATION = (
    "Risks are right on average where the intercept is 0, and neither too extreme (slope below 1) nor too cautious "
    "(above 1) where the slope is 1. The expected calibration error (ECE) is the mean distance between predicted risk "
    "and observed share, over tenths of the samples by risk."
)


def result_sections(run: TrainedRun) -> Iterator[Section]:
    """Yield the sections, in the order in which they are read."""
    specification = "items 12 and 22, analytical methods and model specification"
    yield section("Analysis methods", specification, " ".join(_method(run)), " ".join(_rounds(run)), *_training(run))
    yield section("Performance by domain", "item 23", *_performance(run))
    yield section("Calibration by domain", "items 12 and 23", *_calibration(run))
    asked = ask("threshold_rationale") if run.objective.risk_outcomes else ()
    yield section("Operating point", "item 15, model output", *_operating_point(run), *asked)
    yield section("Differences between domains", "item 14, fairness", *_differences(run), *ask("fairness_judgement"))
    yield section("Sites", "items 12 and 23, differences between clusters", *_sites(run))
    untested = Items(tuple(_not_tested(run)))
    yield section("What was not tested", "items 16 and 26, limitations", untested, *ask("limitations"))


def _method(run: TrainedRun) -> Iterator[str]:
    paper = {"ours": "of this software", "-": "without exchange"}.get(run.method.paper, run.method.paper)
    yield f"The method is {run.files.method} ({paper})."
    if run.method.reading:
        yield f"{capitalised(run.method.reading)}."
    yield from evaluated_with([replace(run.method, name="A sample is predicted with")])


def _rounds(run: TrainedRun) -> Iterator[str]:
    """Yield sentences on which round's model is in use, and why."""
    choice, settings = run.files.choice, run.settings
    if choice is not None:
        share = f"{100 * (settings.validation or 0):.0f} %"
        yield f"{share} of each site's training samples are held out to choose the round in use."
        yield from about_choice(choice)
    elif not run.files.history.empty:
        used = f"the model in use is that of round {run.files.about['round']}, the last"
        yield f"No samples are held out to choose a round: {used}."
        if settings.last > 1 and run.parts:
            yield f"Figures here are of that model; terminal and page show the {results_of(settings)}."
    yield "Test samples have chosen nothing."


def _training(run: TrainedRun) -> Iterator[Block]:
    settings = run.settings
    unnamed = {None: "chosen by the shape of the data", CUSTOM_ENCODER: "a module of the user's own"}
    facts = {
        "encoder": unnamed.get(settings.encoder, settings.encoder),
        "rounds": f"{settings.rounds:,} at most",
        "optimiser": f"{settings.optimizer}, rate {settings.rate:g}, {settings.schedule or 'constant'}",
        "epochs in a round": f"{settings.encoder_epochs} of the encoder, up to {settings.head_epochs} of heads",
        "seed": settings.seed,
        "parameters": MODEL_FILE,
        "all settings": CONFIG_FILE,
    }
    yield from words_table("Training", ("setting", "value"), [(name, str(value)) for name, value in facts.items()])


def _performance(run: TrainedRun) -> Iterator[Block]:
    if not run.parts:
        yield Paragraph(run.untested)
        return
    yield Paragraph(" ".join(_about_intervals(run)))
    main = run.files.metric
    metrics = [main, *(each for each in run.objective.metrics if each != main and each in run.overall)]
    common = [each for each in metrics if ":" not in each]
    header = ["domain", *(f"{metric_name(each)}, {better(each)} is better" for each in common), "n"]
    rows = [(*row, f"{part.samples:,}") for row, part in zip(run.figure_rows(common), run.parts, strict=True)]
    yield from number_table("Performance by domain", header, rows, FIGURES_FILE)
    single = [each for each in metrics if ":" in each and metric_kind(each) == metric_kind(main)][:MOST_OUTCOMES]
    if single:
        header = ["domain", *map(metric_name, single)]
        yield from number_table("Performance by outcome", header, run.figure_rows(single), FIGURES_FILE)
    if run.rare:
        yield Paragraph(f"Hardly more than chance, with fewer than {FEW_POSITIVES} positives: {', '.join(run.rare)}.")


def _about_intervals(run: TrainedRun) -> Iterator[str]:
    where = "at each site on its own held-out samples, and added up" if run.between_sites else "on held-out samples"
    yield f"Figures are of the model in use, {where}."
    kinds = interval_kinds(each.interval for part in run.parts for each in part.figures.values())
    if kinds:
        yield (
            f"In brackets is the 95 % interval ({kinds}); it covers the draw of test samples, and not that "
            "of training samples, splits and seeds."
        )
    else:
        yield f"There are no intervals: {OLDER}"


def _calibration(run: TrainedRun) -> Iterator[Block]:
    if not run.objective.risk_outcomes:
        yield Paragraph("Calibration was not examined: it is for yes/no outcomes, and this outcome is not one.")
        return
    if run.figures is None:
        yield Paragraph(f"Calibration was not computed: {OLDER}" if run.parts else run.untested)
        return
    yield Paragraph(ABOUT_CALIBRATION)
    for end in run.outcomes:
        header = ["domain", *map(metric_name, CALIBRATION)]
        rows = run.figure_rows([f"{each}{end}" for each in CALIBRATION])
        yield from number_table(f"Calibration{of(end)}", header, rows, FIGURES_FILE)
        yield _tenths(run.figures, end)
    yield Paragraph(f"The tenths of each domain are in {CALIBRATION_FILE}.")


def _tenths(figures: Figures, end: str) -> CardTable:
    """Return the calibration curve of all samples."""
    curve = figures.calibration
    rows = []
    for each in curve[(curve["scope"] == ALL) & (curve["outcome"] == end[1:])].to_dict("records"):
        observed = with_interval(_figure(each, "observed"))
        rows.append((str(each["group"]), number(each["predicted"], scale=1), observed, f"{each['count']:,}"))
    header = ("tenth by risk", "predicted risk", "observed share", "n")
    return CardTable(f"Predicted and observed{of(end)}, all domains", header, tuple(rows))


def _figure(row: Mapping[Any, Any], value: str) -> Figure:
    """Return a row of the calibration or decision table as a figure."""
    return Figure(row[value], row["low"], row["high"], 0, nan, "" if isnan(row["low"]) else "interval")


def _operating_point(run: TrainedRun) -> Iterator[Block]:
    if not run.objective.risk_outcomes:
        yield Paragraph("There is no operating point: the outcome is not yes/no, and nobody is flagged.")
        return
    if run.figures is None:
        yield Paragraph(f"Rates of decisions were not computed: {OLDER}" if run.parts else run.untested)
        return
    yield Paragraph(_flagged(run))
    for end in run.outcomes:
        rates = run.figure_rows([f"{each}{end}" for each in DECISIONS])
        rows = [
            (name, *_threshold(part.figures, end), *cells)
            for part, (name, *cells) in zip(run.parts, rates, strict=True)
        ]
        header = ["domain", "positives", "threshold", "flagged", *map(metric_name, DECISIONS)]
        yield from number_table(f"Decisions by domain{of(end)}", header, rows, FIGURES_FILE)
        said = nobody_or_everybody(selection_rates(run.figures, end))
        if said:
            yield Paragraph(said)
        yield from _net_benefit(run, run.figures, end)


def _flagged(run: TrainedRun) -> str:
    """Return a sentence on who is flagged."""
    point = OperatingPoint.of(run.settings)
    if not point.chosen:
        why = "as none was asked for" if run.settings.threshold is None else "as was asked for"
        return f"Samples with a risk above {point.at:g} are flagged, {why}."
    which = "one for each domain" if point.by_domain else "one for all domains"
    at = f"{100 * point.at:g} %"
    aim = {"flag": f"flags {at} of them", "sensitivity": f"finds {at} of the positives among them"}
    return f"The threshold was chosen on validation samples, {which}, so that it {aim[point.kind]}."


def _threshold(figures: Mapping[str, Figure], end: str) -> tuple[str, str, str]:
    """Return the positives, the threshold and the share that is flagged."""
    threshold, flagged = figures[f"threshold{end}"], figures[f"selection_rate{end}"]
    at = "by domain" if isnan(threshold.value) else number(threshold.value, scale=1)
    return f"{threshold.positives:,.0f}", at, f"{100 * flagged.value:.1f} %"


def _net_benefit(run: TrainedRun, figures: Figures, end: str) -> Iterator[Block]:
    """Yield the net benefit of each domain at the threshold of the decision curve that is nearest to its own."""
    curve, rows = figures.decisions, []
    for scope, name, found in run.parts:
        own = curve[(curve["name"] == name) & (curve["scope"] == scope) & (curve["outcome"] == end[1:])]
        threshold = found[f"threshold{end}"].value
        if not isnan(threshold) and not own.empty:
            at = own.iloc[int((own["threshold"] - threshold).abs().argmin())].to_dict()
            benefit = with_interval(_figure(at, "net_benefit"))
            rows.append((name, f"{at['threshold']:.2f}", benefit, number(at["flag_all"], scale=1)))
    header = ("domain", "at threshold", "net benefit", "of flagging everybody")
    yield from number_table(f"Net benefit{of(end)} (flagging nobody has 0)", header, rows, DECISIONS_FILE)


def _differences(run: TrainedRun) -> Iterator[Block]:
    if not run.parts:
        yield Paragraph(run.untested)
        return
    name, ranked = metric_name(run.files.metric), run.ranked
    if len(ranked) > 1:
        ends = [f"{domain}, {with_interval(figure, run.files.metric)}" for domain, figure in ranked.items()]
        yield Paragraph(f"By {name}, the worst domain is {ends[0]}, and the best is {ends[-1]}.")
    else:
        yield Paragraph(f"There is nothing to compare: {name} is defined in {len(ranked)} domain{'s' * (not ranked)}.")
    if run.figures is None:
        yield Paragraph(f"Differences have no intervals: {OLDER}")
        return
    gaps = {each: gap for each, gap in run.figures.gaps.items() if not isnan(gap.value)}
    rows = [(metric_name(each), with_interval(gap, each), f"{gap.count:,}") for each, gap in gaps.items()]
    yield from number_table("Largest difference between any two domains", ("of", "difference", "domains"), rows, "")
    if rows:
        rates = "Rates are those at the operating point. " * any(each in RATES for each in gaps)
        yield Paragraph(f"{rates}The smaller domains are, and the more there are, the larger it is by chance alone.")


def _missing_domains(run: TrainedRun) -> Iterator[Block]:
    if run.missing is None:
        return
    titles, parts = cost_table(run.missing, run.files.metric)
    rows = [(part, *(number(value, metric=each) for each, value in values)) for part, values in parts.items()]
    yield from number_table(TITLE, ("domain", *titles), rows, MISSING_FILE)
    yield Paragraph(ABOUT)


def _sites(run: TrainedRun) -> Iterator[Block]:
    said, method, metric = [], run.method, run.files.metric
    if method.site_offset:
        said += ["Each site corrects the heads of domains for its own samples, as far as sites are found to differ."]
    elif method.label_shift:
        said += ["Each site corrects the common model by its own rates of labels, as if sites differed in these alone."]
    elif method.assigns:
        said += ["All sites use the same components, and each has shares of them of its own."]
    else:
        said += ["A part of the model is each site's own." if method.keeps_own else "All sites use the same model."]
    if method.keeps_own and run.between_sites:
        said += ["What is a site's own is never sent: it stays there, and is not in the coordinator's folder."]
    elif method.assigns:
        said += [f"The shares of components at each site are in {MODEL_FILE}."]
    elif method.keeps_own:
        said += [f"What is a site's own is in {MODEL_FILE}; “feddar export --client NAME” writes what one site uses."]
    said += [f"A site that was not in training gets {method.for_unseen_client}."]
    if run.uses_domain:
        said += [
            "A domain that was not in training is refused or, on request, answered by the average of all heads; one "
            "that is missing is refused or, on request, answered by the mixture of heads by the shares at its site."
        ]
    yield Paragraph(" ".join(said))
    yield from _missing_domains(run)
    rows = [
        (str(row["name"]), number(row["value"], metric=metric), f"{row['count']:,}")
        for row in run.by_site.to_dict("records")
    ]
    yield from number_table("Performance by site", ("site", metric_name(metric), "n"), rows, METRICS_FILE)
    if not rows:
        absent = "Figures of single sites are not in this folder."
        yield Paragraph(ABOUT_CLIENTS if are_left_out(run.results) else absent)


def _not_tested(run: TrainedRun) -> Iterator[str]:
    if not run.parts:
        yield f"Everything. {run.untested}"
        return
    unseen = [name for name in run.by_site["name"] if name not in run.cohort.clients]
    if unseen:
        yield f"New sites other than these, which were tested and not trained at: {', '.join(unseen)}."
    else:
        yield "External validation and sites never seen: test samples are of the sites that the model was trained at."
    if run.told("test") is None:
        yield "Drift, unless the test samples that were given in Python are later than those of training."
    else:
        yield "Drift: test samples are drawn at random and are not later ones, so a change over time would not show."
    absent = [name for name in run.trained if name not in run.tested]
    if absent:
        yield f"Domains without test samples: {', '.join(absent)}."
    if run.rare:
        yield f"Domains with fewer than {FEW_POSITIVES} positives, hardly more than by chance: {', '.join(run.rare)}."
    undefined = [name for name in run.tested if name not in run.ranked]
    if undefined:
        name = metric_name(run.files.metric)
        yield f"Domains with one class only, in which {name} is undefined: {', '.join(undefined)}."
    yield "Domains other than those named here, and groups within them."
    more = "" if run.between_sites else " “feddar compare --folds 5” repeats it, beside other methods."
    yield f"Other splits and seeds: this is one training.{more}"
    if run.figures is None or not run.outcomes:
        yield "Calibration and decisions."
    yield "Inputs of poor quality, and the effect on decisions and on patients where the model is used."
