"""Tables in Markdown, and ``table.md`` of a comparison, in the paper's layout.

Every number in it is computed from the comparison's results by ``feddar.evaluation.intervals``.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from feddar.evaluation.intervals import FEWEST, UNIT, across, is_clear, kinds_of_intervals, paired_differences
from feddar.evaluation.operating_point import nobody_or_everybody
from feddar.methods import Method
from feddar.objectives.objective import lower_is_better
from feddar.report.numbers import UNDEFINED, direction, metric_title, paper_number
from feddar.report.operating_point import FEW_NOTE, is_few
from feddar.report.validation import results_of
from feddar.results.client_metrics import ABOUT_CLIENTS, are_left_out
from feddar.results.run_folder import versions
from feddar.settings import Settings, trained_rows

if TYPE_CHECKING:
    from feddar.comparison.comparison import ComparisonResults

MOST_LISTED = 12


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]], *, words: bool = False) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers, or text too (``words``)."""
    lines = [header, ["---", *["---" if words else "---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def main_metric(results: pd.DataFrame) -> str:
    """Return the main metric of the outcome, which is the first in the results."""
    return str(results["metric"].iloc[0])


def worst_name(metric: str) -> str:
    """Return the name of the summary that is the worst domain's value."""
    return "domain_max" if lower_is_better(metric) else "domain_min"


def columns(results: pd.DataFrame, main: str) -> list[tuple[str, str, str]]:
    """Return the columns of the paper's table as (title, scope, name): domains, their worst and mean, clients' mean.

    A star is beside the name of a domain with few positives.
    """
    names = map(str, results[(results["scope"] == "domain") & (results["metric"] == main)]["name"].unique())
    positives, worst = sizes(results, "positives", "value"), worst_name(main)
    domains = [(f"{name}{'*' * is_few(positives.get(name))}", "domain", name) for name in names]
    summaries = [(worst.removeprefix("domain_").title(), worst), ("Avg", "domain_avg"), ("Client avg", "client_avg")]
    return [*domains, *((title, "summary", name) for title, name in summaries)]


def about_columns(shown: Sequence[tuple[str, str, str]], repeated: bool) -> list[str]:
    """Return sentences on the worst domain, if there are several repeats, and on stars beside names of domains."""
    worst = f"{shown[-3][0]} is of the worst domain of each repeat, then averaged: it may be worse than any column."
    starred = any(scope == "domain" and title != name for title, scope, name in shown)
    return [worst] * repeated + [f"{FEW_NOTE}."] * starred


def sizes(results: pd.DataFrame, metric: str, value: str) -> pd.Series[float]:
    """Return the test samples of each domain, or the positive ones: the sum over folds, averaged over seeds."""
    whole = results.groupby("method")["fold"].size().idxmax()
    rows = results[(results["method"] == whole) & (results["scope"] == "domain") & (results["metric"] == metric)]
    sums: pd.Series[float] = rows.groupby(["seed", "name"], sort=False)[value].sum().groupby("name").mean()
    return sums


def looked_up(frame: pd.DataFrame, *key: str) -> dict[tuple[str, ...], Any]:
    """Return the rows of a frame by the values in some of its columns."""
    return {tuple(str(getattr(row, name)) for name in key): row for row in frame.itertuples(index=False)}


def mean_and_sd(metric: str, row: Any, expected: int) -> str:
    """Format mean ± sd; a number in brackets is the number of values, if some are missing or undefined."""
    if row is None or np.isnan(row.mean):
        return UNDEFINED
    spread = "" if np.isnan(row.sd) else f" ± {paper_number(metric, row.sd)}"
    short = f" ({row.pairs})" if row.pairs < expected else ""
    return f"{paper_number(metric, row.mean)}{spread}{short}"


def interval(metric: str, row: Any) -> str:
    """Format a difference with its interval, in bold if the difference is clear."""
    if np.isnan(row.difference):
        return UNDEFINED
    text = paper_number(metric, row.difference, sign=True)
    if np.isnan(row.low):
        return text
    text += f" [{paper_number(metric, row.low, sign=True)}, {paper_number(metric, row.high, sign=True)}]"
    return f"**{text}**" if is_clear(row.low, row.high, row.pairs) else text


def comparison_table(comparison: ComparisonResults) -> str:
    """Return the content of table.md."""
    sections = [_heading(comparison)]
    if len(comparison.results):
        sections += [_scores(comparison), _differences(comparison), _other_metrics(comparison), _gaps(comparison)]
    sections += [
        _references(comparison),
        _missing(comparison),
        _tuning(comparison),
        _evaluation(comparison),
        _again(comparison),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _heading(comparison: ComparisonResults) -> str:
    where = "" if comparison.source is None else f" on {comparison.source.data}"
    return f"# Methods compared{where}"


def _expected(comparison: ComparisonResults) -> int:
    return comparison.plan.folds * comparison.plan.seeds


def _repetitions(comparison: ComparisonResults) -> str:
    folds, seeds = comparison.plan.folds, comparison.plan.seeds
    parts = [f"{folds} folds"] if folds > 1 else []
    parts += [f"{seeds} seeds"] if seeds > 1 else []
    return " and ".join(parts) or "one split"


def _scores(comparison: ComparisonResults) -> str:
    results, main = comparison.results, comparison.metric
    shown, methods = columns(results, main), comparison.plan.methods
    found = looked_up(across(results[results["metric"] == main]), "method", "scope", "name")
    lines: dict[str, list[str]] = {method: [] for method in methods}
    for _, scope, name in shown:
        means = [found[method, scope, name].mean for method in methods if (method, scope, name) in found]
        best = (min if lower_is_better(main) else max)(filter(np.isfinite, means), default=None)
        for method, line in lines.items():
            row = found.get((method, scope, name))
            text = mean_and_sd(main, row, _expected(comparison))
            line.append(f"**{text}**" if len(methods) > 1 and row is not None and row.mean == best else text)
    totals, positives = sizes(results, main, "count"), sizes(results, "positives", "value")
    counts = [
        f"{totals[name]:,.0f}" + (f" ({positives[name]:,.0f})" if len(positives) else "") if scope == "domain" else ""
        for _, scope, name in shown
    ]
    rows = [["*test samples (positives)*" if len(positives) else "*test samples*", *counts]]
    rows += [[method, *line] for method, line in lines.items()]
    spread = "mean ± standard deviation over " if _expected(comparison) > 1 else ""
    about = f"""{metric_title(main)}, {direction(main)}: {spread}{_repetitions(comparison)}; of each,
        {results_of(comparison.settings)}. Best in bold. {shown[-3][0]} and Avg are the worst and the mean domain,
        Client avg is the mean over clients. A number in brackets says how many values an average covers, where some
        are undefined (one class only) or missing. {" ".join(about_columns(shown, _expected(comparison) > 1))}"""
    table = markdown(["Methods", *(title for title, _, _ in shown)], rows)
    return "\n\n".join([_filled(about), table, *map(_filled, not_shown(results, main))])


def _differences(comparison: ComparisonResults) -> str:
    results, main, reference = comparison.results, comparison.metric, str(comparison.plan.reference)
    shown = columns(results, main)[-3:]
    wanted = (results["scope"] == "summary") & (results["metric"] == main)
    found = looked_up(paired_differences(results[wanted], reference), "method", "name")
    rows = [
        [method, *(interval(main, found[method, name]) for _, _, name in shown), found[method, "domain_avg"].pairs]
        for method in comparison.plan.methods
        if (method, "domain_avg") in found
    ]
    if not rows:
        return ""
    paired = "Paired within each fold and seed, where all methods saw the same samples."
    about = " ".join([paired, *_about_intervals(found)])
    table = markdown(["Methods", *(title for title, _, _ in shown), "Pairs"], rows)
    return f"## Differences to {reference}\n\n{_filled(about)}\n\n{table}"


def _about_intervals(differences: Mapping[Any, Any]) -> list[str]:
    """Return sentences on the intervals of paired differences: their kind as it was used, and what is in bold."""
    pairs = [int(row.pairs) for row in differences.values()]
    kinds = kinds_of_intervals(pairs)
    if not kinds:
        return ["One pair has no interval: a difference may be chance."]
    said = ["with fewer than five pairs no difference is called clear"] * (min(pairs) < FEWEST)
    said += ["bold where it leaves out zero"] * (max(pairs) >= FEWEST)
    return [
        f"In brackets is the 95 % interval of the mean difference over these pairs, {kinds}; {', else '.join(said)}.",
        "Folds share training samples, so the intervals are approximate, and they are not corrected for the number of "
        "methods.",
    ]


def _other_metrics(comparison: ComparisonResults) -> str:
    results = comparison.results
    means = results[(results["name"] == "domain_avg") & (results["metric"] != comparison.metric)]
    if means.empty:
        return ""
    return f"## Other metrics\n\nThe mean over domains.\n\n{_by_metric(comparison, means)}"


def _by_metric(comparison: ComparisonResults, summaries: pd.DataFrame) -> str:
    """Return a table of methods by metrics from the rows of one summary."""
    metrics = [str(metric) for metric in summaries["metric"].unique()]
    found = looked_up(across(summaries), "method", "metric")
    rows = [
        [method, *(mean_and_sd(metric, found.get((method, metric)), _expected(comparison)) for metric in metrics)]
        for method in comparison.plan.methods
        if (method, metrics[0]) in found
    ]
    return markdown(["Methods", *(metric_title(metric) for metric in metrics)], rows)


def _gaps(comparison: ComparisonResults) -> str:
    results = comparison.results
    gaps = results[(results["scope"] == "summary") & (results["name"] == "domain_gap")]
    at_half = " Decisions are taken at one half." if "selection_rate" in set(gaps["metric"]) else ""
    about = f"The largest difference between any two domains, by fairlearn's MetricFrame; smaller is fairer.{at_half}"
    about = " ".join([about, *of_methods(meaningless_gaps(results))])
    return f"## Gaps between domains\n\n{_filled(about)}\n\n{_by_metric(comparison, gaps)}"


def meaningless_gaps(results: pd.DataFrame) -> dict[str, str]:
    """Return a sentence for each method that flags nobody or everybody, of all or of some domains, by the method."""
    rates = results[(results["scope"] == "domain") & (results["metric"] == "selection_rate")]
    shares = rates.groupby(["method", "name"], sort=False)["value"].mean()
    by_method = {str(method): shares[method].to_dict() for method in dict.fromkeys(rates["method"])}
    return {method: said for method, found in by_method.items() if (said := nobody_or_everybody(found))}


def of_methods(said: Mapping[str, str]) -> list[str]:
    """Return each sentence that is said of methods once, with their names."""
    methods = {sentence: [name for name, own in said.items() if own == sentence] for sentence in said.values()}
    return [f"{', '.join(names)}: {sentence}" for sentence, names in methods.items()]


POOLED = """Models of scikit-learn that see all rows in one place, which is what a federation gives up: the shares of
    classes alone and, for tables, a linear model and gradient boosting with fixed settings; also with the domain,
    and with domain, client and both together, as further columns. They are not ranked."""


def _references(comparison: ComparisonResults) -> str:
    if comparison.references.empty:
        return ""
    header, rows = reference_rows(comparison.references, comparison.metric)
    return f"## Pooled references\n\n{_filled(POOLED)}\n\n{markdown(header, rows)}"


def reference_rows(
    references: pd.DataFrame,
    main: str,
    text: Callable[[str, Any, int], str] = mean_and_sd,
    name: Callable[[str], str] = metric_title,
) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of a table of references: the main metric summarised, then the mean domain of others.

    ``text`` writes means, and ``name`` metrics.
    """
    found = looked_up(across(references), "method", "name", "metric")
    shown = [(title, place, main) for title, _, place in columns(references, main)[-3:]]
    others = [metric for metric in dict.fromkeys(references["metric"]) if metric != main]
    shown += [(name(metric), "domain_avg", metric) for metric in others]
    units = len(references[UNIT].drop_duplicates())
    rows = [
        [method, *(text(metric, found.get((method, place, metric)), units) for _, place, metric in shown)]
        for method in dict.fromkeys(references["method"])
    ]
    return ["References", *(title for title, _, _ in shown)], rows


def _missing(comparison: ComparisonResults) -> str:
    if not comparison.failures:
        return ""
    return "## Missing\n\n" + "\n".join(f"- {cell}: {reason}" for cell, reason in comparison.failures)


def _tuning(comparison: ComparisonResults) -> str:
    if comparison.tuning.empty:
        return ""
    chosen = comparison.tuning[comparison.tuning["chosen"]]
    rows = []
    for method in [name for name in comparison.plan.methods if name in set(chosen["method"])]:
        own = chosen[chosen["method"] == method]
        knob, value = own["knob"].iloc[0], _counted(own["knob_value"].dropna())
        rows.append([method, _counted(own["lr"]), f"{knob}: {value}" if value else UNDEFINED])
    about = """The same search for every method, within the training part of each fold and seed; in brackets is how
        often a value was chosen. All scores are in tuning.csv."""
    return f"## What the search chose\n\n{_filled(about)}\n\n{markdown(['Methods', 'lr', 'own knob'], rows)}"


def _counted(values: pd.Series[float]) -> str:
    found = values.astype(float).value_counts().sort_index()
    return ", ".join(f"{value:.3g} ({count})" for value, count in zip(found.index, found, strict=True))


def not_shown(results: pd.DataFrame, main: str) -> list[str]:
    """Return sentences on clients that are too many, and on domains and clients whose main metric is undefined.

    In which test parts it is undefined depends on the samples alone (an AUC needs both classes), so it is the same for
    all methods.
    """
    rows = results[results["metric"] == main]
    said = [ABOUT_CLIENTS] if are_left_out(results) else []
    for scope, leave in (("domain", "the worst and the mean domain leave"), ("client", "the mean over clients leaves")):
        parts = rows[rows["scope"] == scope].drop_duplicates(["fold", "seed", "name"]).groupby("name", sort=False)
        absent = {str(name): int(part["value"].isna().sum()) for name, part in parts}
        listed = [f"{name} ({count} of {len(parts.get_group(name))})" for name, count in absent.items() if count]
        if listed:
            shown = ", ".join(listed[:MOST_LISTED]) + (
                f" and {len(listed) - MOST_LISTED} more" * (len(listed) > MOST_LISTED)
            )
            said.append(
                f"{metric_title(main)} is undefined in some test parts for these {scope}s, whose samples are of one "
                f"class there: {shown}. There, {leave} them out."
            )
    return said


def evaluated_with(methods: Iterable[Method]) -> list[str]:
    """Return sentences on which model predicts a test sample, one for each group of methods with the same answer."""
    whose = {
        "global": "one for all",
        "domain": "that of the sample's domain",
        "client": "the personal one of the client that holds the sample",
    }
    groups: dict[str, list[str]] = {}
    for method in methods:
        encoder, heads = method.used
        text = f"model: {whose[encoder]}" if encoder == heads else f"encoder: {whose[encoder]}; head: {whose[heads]}"
        if method.assigns:
            text = "model: the mean of the components' predictions, by their shares at the client that holds the sample"
        text += "; batch norm: that of the client" if method.private_norm else ""
        text += "; correction of the head: that of the client for the domain" if method.site_offset else ""
        text += "; added to it: the head of the client's own" if method.decoupled else ""
        text += "; correction by the rates of labels at the client" if method.label_shift else ""
        unseen = f"; for a client never seen, {method.for_unseen_client}" if method.keeps_own else ""
        groups.setdefault(f"{text}{unseen}", []).append(method.name)
    return [f"{', '.join(names)}: {text}." for text, names in groups.items()]


def _evaluation(comparison: ComparisonResults) -> str:
    plan, settings = comparison.plan, comparison.settings
    models = "\n".join(f"- {line}" for line in evaluated_with(trained_rows(settings.model_dump(), plan.methods)))
    seeds = ", ".join(str(settings.seed + i) for i in range(plan.seeds))
    how = f"{plan.folds}-fold cross-validation" if plan.folds > 1 else "One split into training and test part"
    tuned = "learning rate and each method's own knob were searched" if plan.tune else "the same settings"
    about = f"""{how}, stratified by client, domain and label; seeds: {seeds}; {settings.rounds} rounds. All methods
        have the same splits, initial weights and seeds; {tuned} (config.toml). Every client and every domain of a test
        part is also in its training part. After every round, each test sample is predicted at the client that holds
        it, and the predictions for a domain are pooled over clients. {_rounds_counted(settings)} Predicted is with"""
    return f"## How it was compared\n\n{_filled(about)}\n\n{models}"


def _rounds_counted(settings: Settings) -> str:
    """Return a sentence on which rounds results are of."""
    if not settings.validation:
        return "The last rounds are averaged, never the best."
    return (
        f"Of each client's training samples {settings.validation:.0%} are held out; the model with the lowest loss on "
        f"them is used, and {settings.patience} rounds without a lower one end a training. Test samples choose nothing."
    )


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _again(comparison: ComparisonResults) -> str:
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    if comparison.source is None:
        command = f"feddar.compare(cohort, {list(comparison.plan.methods)}, ...)  # options: config.toml"
    else:
        command = shlex.join(["feddar", "compare", comparison.source.data, "--config", "config.toml"])
    return f"## Again\n\n```\n{command}\n```\n\nMade with {software}."
