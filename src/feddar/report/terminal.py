"""Terminal output: progress while training, results by domain and client, cohorts and methods.

On a terminal there are colours and a progress bar; in a file or pipe it is plain text without progress.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from torch import Tensor

from feddar.algorithm.rounds import RoundEnd
from feddar.comparison.cells import Cell, CellProgress
from feddar.comparison.comparison import ComparisonResults
from feddar.data.cohort import Cohort
from feddar.evaluation.intervals import across, kinds_of_intervals, paired_differences
from feddar.evaluation.metrics import worst
from feddar.methods import Method
from feddar.objectives import Objective
from feddar.objectives.objective import lower_is_better
from feddar.report import markdown
from feddar.report.folders import choices_in
from feddar.report.missing_domains import say_cost
from feddar.report.numbers import AREAS, counted, direction, metric_name, metric_title, number, paper_number
from feddar.report.operating_point import FEW_NOTE, FEW_SAMPLES_NOTE, is_few, show_operating_point
from feddar.report.overview import ABOUT_RANKS, Overview
from feddar.report.validation import about_choice, about_choices, results_of
from feddar.results.client_metrics import ABOUT_CLIENTS, are_left_out
from feddar.results.figure_files import read_figures
from feddar.results.file_prediction import Summary
from feddar.results.run import Run
from feddar.settings import Settings

FEW = 20
MOST_ROWS = 30
MOST_NOTES = 5
MOST_NAMES = 10
LEVEL = ("log_loss", "ece")
"""The metrics that are shown beside the main one, where there are any: AUC is blind to the level of risks."""


@contextmanager
def show_progress(console: Console, settings: Settings) -> Iterator[Callable[[RoundEnd], None]]:
    """Show a bar with round, loss, worst and mean domain and the time left; nothing if this is not a terminal."""
    columns = (
        TextColumn(f"{settings.method} round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with ProgressBar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=settings.rounds, state="starting")

        def update(now: RoundEnd) -> None:
            state = f"loss {number(now.loss)}"
            if not np.isnan(now.mean_domain):
                low, mean = (number(value, metric=now.metric) for value in (now.worst_domain, now.mean_domain))
                state += f" {metric_name(now.metric)} worst {low} mean {mean}"
            bar.update(task, completed=now.round, state=state)

        yield update


def show_results(console: Console, runs: dict[str, Run], test: Cohort, folders: list[Path], data: str) -> None:
    """Print the methods' metrics in every domain and at every client, and what to do next with their folders."""
    first = next(iter(runs.values()))
    metric = first.model.objective.headline(first.settings.metric)
    results = {name: run.results() for name, run in runs.items()}
    looked_for = test.objective.positive
    positive = "" if looked_for is None else f", positive class {looked_for!r}"
    what = f"{metric_name(metric)}{_averaged(test.objective, metric)}"
    title = f"{what} on held-out samples, {results_of(first.settings)}; {direction(metric)}{positive}"
    console.print(f"\n{escape(title)}", style="bold", highlight=False)
    holders = [("domain", test.domains, test.domain)]
    left_out = any(map(are_left_out, results.values()))
    holders += [] if left_out else [("client", test.clients, test.client)]
    for scope, names, holder in holders:
        values = {
            method: frame[(frame["scope"] == scope) & (frame["metric"] == metric)].set_index("name")["value"]
            for method, frame in results.items()
        }
        console.print()
        labels = [test.y[holder == i] for i in range(len(names))]
        table = _scores(console, scope, names, labels, values, metric, test.objective)
        if scope == "domain":
            _add_level(table, results, metric)
        console.print(table)
    if left_out:
        console.print(f"\n{ABOUT_CLIENTS}", highlight=False)
    show_outcomes(console, results, metric)
    show_operating_point(console, read_figures(folders[0]))
    say_cost(console, folders[0], metric)
    show_choices(console, runs)
    say_class_weight(console, first.settings)
    console.print(
        f"\nSaved in [bold]{escape(str(folders[0]))}[/bold]: config.toml, metrics.csv, figures.csv, model.safetensors"
    )
    _say_what_next(console, data, folders)


def _averaged(objective: Objective, metric: str) -> str:
    """Return over what a metric is a mean, in brackets; empty if it is none."""
    over = "outcomes" if len(objective.risk_outcomes) > 1 else "classes" if objective.positive is None else ""
    return f" (mean over {over})" if over and (over == "outcomes" or metric in AREAS) else ""


def say_class_weight(console: Console, settings: Settings) -> None:
    """Print what class weights do to predicted risks; nothing without them."""
    if settings.class_weight is not None:
        console.print(
            "\n[yellow]note:[/yellow] with --class-weight balanced, predicted risks are those of classes that are "
            "equally frequent: much too high for a rare one. Rank by them; do not read them as probabilities.",
            highlight=False,
        )


def show_choices(console: Console, runs: Mapping[str, Run]) -> None:
    """Print which round of each run is in use and why, as validation says; nothing without validation."""
    chosen = {name: choice for name, run in runs.items() if (choice := run.choice()) is not None}
    for name, choice in chosen.items():
        said = " ".join(about_choice(choice))
        console.print(f"\n{escape(name)}: {said}", highlight=False)


@contextmanager
def show_comparison_progress(console: Console) -> Iterator[Callable[[CellProgress], None]]:
    """Show how many trainings are done, which run, and the time left; without a terminal, a line for each one done."""
    columns = (
        MofNCompleteColumn(),
        TextColumn("trained"),
        BarColumn(bar_width=12),
        TimeRemainingColumn(compact=True),
        TextColumn("left: {task.fields[running]}"),
    )
    shares: dict[Cell, float] = {}
    done: list[Cell] = []
    with ProgressBar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None, running="preparing")

        def update(step: CellProgress) -> None:
            shares[step.cell] = step.share
            if step.state != "running":
                done.append(step.cell)
                del shares[step.cell]
                if not console.is_terminal or step.state == "failed":
                    console.print(
                        f"{len(done)} of {step.cells} {step.state}: {escape(str(step.cell))}", highlight=False
                    )
            running = textwrap.shorten("; ".join(map(str, shares)), max(20, console.width - 42), placeholder=" …")
            bar.update(task, total=step.cells, completed=len(done) + sum(shares.values()), running=running)

        yield update


def show_comparison(console: Console, comparison: ComparisonResults, folder: Path) -> None:
    """Print the methods' metrics in every domain, and their differences from the reference."""
    results, plan = comparison.results, comparison.plan
    if results.empty:
        console.print("No training came to its end: there is nothing to compare.")
        return
    main = comparison.metric
    repetitions = f"{plan.folds} folds" if plan.folds > 1 else "one split"
    repetitions += f" and {plan.seeds} seeds" if plan.seeds > 1 else ""
    console.print(f"\n{metric_title(main)}, mean of {repetitions}; {direction(main)}", style="bold")
    console.print()
    console.print(_comparison_scores(console, comparison, main))
    for line in markdown.about_columns(markdown.columns(results, main), plan.folds * plan.seeds > 1):
        console.print(line, style="dim", highlight=False)
    if are_left_out(results):
        console.print(f"\n{ABOUT_CLIENTS}", highlight=False)
    if len(plan.methods) > 1 and plan.reference in set(results["method"]):
        wanted = (results["scope"] == "summary") & (results["metric"] == main)
        found = markdown.looked_up(paired_differences(results[wanted], str(plan.reference)), "method", "name")
        kinds = kinds_of_intervals(int(row.pairs) for row in found.values())
        interval = f", with its 95 % interval, {kinds}" if kinds else ""
        console.print(f"\nDifference to {plan.reference}{interval}", style="bold", highlight=False)
        console.print()
        console.print(_comparison_differences(console, comparison, found))
    say_class_weight(console, comparison.settings)
    if not comparison.references.empty:
        console.print("\nModels that see all rows in one place, for reference", style="bold", highlight=False)
        console.print()
        console.print(_references(console, comparison.references, main))
    chosen = choices_in(comparison.curves, comparison.settings.model_dump())
    if chosen:
        said = " ".join(about_choices([choice for each in chosen.values() for choice in each]))
        console.print(f"\n{said}", highlight=False)
    console.print(
        f"\nSaved in [bold]{escape(str(folder))}[/bold]: report.html, table.md, results.csv, curves.csv, runs/"
    )


def show_overview(console: Console, overview: Overview, folder: Path) -> None:
    """Print how each method does on each of several cohorts: the mean and the worst domain, and the mean rank."""
    console.print("\nAll cohorts", style="bold")
    console.print()
    table = _table(console)
    table.add_column("method", no_wrap=True)
    columns = [
        _compared(overview.values(place).tolist(), place.metric, partial(paper_number, place.metric))
        for place in overview.places
    ]
    for place in overview.places:
        table.add_column(escape(place.title), justify="right")
    table.add_column("rank", justify="right")
    for method, *texts in zip(overview.methods, *columns, strict=True):
        table.add_row(method, *texts, overview.rank_text(method))
    console.print(table)
    console.print(ABOUT_RANKS, style="dim", highlight=False)
    console.print(f"\nSaved in [bold]{escape(str(folder))}[/bold]: report.html, table.md, results.csv")


def _comparison_scores(console: Console, comparison: ComparisonResults, main: str) -> Table:
    """Return a table with methods in rows; it has columns for domains only if the terminal is wide enough."""
    measured = set(comparison.results["metric"])
    shown = [
        (title.lower() if scope == "summary" else title, scope, name, main)
        for title, scope, name in markdown.columns(comparison.results, main)
    ]
    shown += [
        (f"avg {metric_name(metric)}", "summary", "domain_avg", metric)
        for metric in LEVEL
        if metric != main and metric in measured
    ]
    whole = _methods_by(console, comparison, shown)
    if console.measure(whole, options=console.options.update_width(10_000)).maximum <= console.width:
        return whole
    short = _methods_by(console, comparison, [column for column in shown if column[1] == "summary"])
    short.caption = "table.md has a column for each domain"
    return short


def _methods_by(console: Console, comparison: ComparisonResults, shown: list[tuple[str, str, str, str]]) -> Table:
    """Return a table of methods by columns, each of which has a title, scope, name and metric."""
    results, methods = comparison.results, comparison.plan.methods
    wanted = results["metric"].isin({metric for *_, metric in shown})
    found = markdown.looked_up(across(results[wanted]), "method", "scope", "name", "metric")
    table = _table(console)
    table.add_column("method", no_wrap=True)
    lines: dict[str, list[str]] = {method: [] for method in methods}
    for title, *figure in shown:
        metric = figure[-1]
        table.add_column(escape(title), justify="right", no_wrap=True)
        means = [found[m, *figure].mean if (m, *figure) in found else float("nan") for m in methods]
        for method, text in zip(methods, _compared(means, metric, partial(paper_number, metric)), strict=True):
            lines[method].append(text)
    for method, line in lines.items():
        table.add_row(method, *line)
    return table


def _comparison_differences(
    console: Console, comparison: ComparisonResults, found: Mapping[tuple[str, ...], Any]
) -> Table:
    main = comparison.metric
    table = _table(console)
    table.add_column("method")
    every = markdown.columns(comparison.results, main)
    shown = [column for column in every if column[2] in ("domain_avg", markdown.worst_name(main))]
    for title, _, _ in shown:
        table.add_column(title.lower(), justify="right")
    for method in comparison.plan.methods:
        if (method, "domain_avg") in found:
            texts = [markdown.interval(main, found[method, name]).strip("*") for _, _, name in shown]
            table.add_row(method, *map(escape, texts))
    return table


def _references(console: Console, references: pd.DataFrame, main: str) -> Table:
    """Return a table of the references, with as many columns as the terminal has room for."""
    header, rows = markdown.reference_rows(
        references[references["metric"].isin((main, *LEVEL))], main, name=metric_name
    )
    table = _table(console)
    table.add_column(header[0].lower(), no_wrap=True)
    width = max(len(row[0]) for row in rows)
    for place, title in enumerate(header[1:], start=1):
        width += max(len(title), *(len(row[place]) for row in rows)) + 2
        if width > console.width:
            break
        table.add_column(escape(title.lower()), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row[: len(table.columns)]))
    return table


def show_predictions(console: Console, run: Run, summary: Summary, out: Path) -> None:
    """Print a summary of predictions by domain and head, notes on unknown values and, with labels, metrics."""
    rows, done = int(summary.answers["rows"].sum()), run.standing.position.round
    of = f"{run.round} of {run.settings.rounds} rounds" if run.round == done else f"round {run.round} of {done}"
    console.print(f"{rows:,} rows predicted by {run.settings.method} ({of})\n", highlight=False)
    console.print(_predicted(console, summary.answers, run.model.objective))
    for column, count in summary.flagged.items():
        console.print(f"{column}: {count:,} of {rows:,} rows ({count / rows:.1%})", highlight=False)
    for note, count in summary.notes.most_common(MOST_NOTES):
        console.print(
            f"[yellow]note:[/yellow] {count:,} {'row' if count == 1 else 'rows'}: {escape(note)}", highlight=False
        )
    if len(summary.notes) > MOST_NOTES:
        console.print(f"… and {len(summary.notes) - MOST_NOTES:,} other notes; see the column 'note'", highlight=False)
    if summary.labelled is not None and summary.metrics is not None:
        _show_labelled(console, run, summary.labelled, summary.metrics)
    if summary.unlabelled:
        console.print(f"{summary.unlabelled:,} rows have no label, or one that was not in training", highlight=False)
    console.print(f"\nWritten: [bold]{escape(str(out))}[/bold]", highlight=False)


def _show_labelled(console: Console, run: Run, test: Cohort, metrics: pd.DataFrame) -> None:
    metric = run.model.objective.headline(run.settings.metric)
    console.print(
        f"\n{metric_name(metric)} of the rows with a label; {direction(metric)}", style="bold", highlight=False
    )
    console.print("Rows that it was trained on make a model look better than it is.\n", style="dim", highlight=False)
    found = metrics[(metrics["scope"] == "domain") & (metrics["metric"] == metric)].set_index("name")["value"]
    labels = [test.y[test.domain == index] for index in range(len(test.domains))]
    values = {run.settings.method: found}
    table = _scores(console, "domain", test.domains, labels, values, metric, test.objective, count="rows")
    results = {run.settings.method: metrics}
    _add_level(table, results, metric)
    console.print(table)
    show_outcomes(console, results, metric)


def _predicted(console: Console, answers: pd.DataFrame, objective: Objective) -> Table:
    """Return a table with a row for each domain, as given, and the head that was used."""
    table = _table(console)
    table.add_column("domain")
    table.add_column("head")
    table.add_column("rows", justify="right")
    rows: list[dict[Any, Any]] = answers.to_dict("records")
    summaries = [objective.summarised(row, row["rows"]) for row in rows]
    for name in summaries[0]:
        table.add_column(escape(name), justify="right")
    for row, found in list(zip(rows, summaries, strict=True))[:MOST_ROWS]:
        shown = [f"{value:,}" if isinstance(value, int) else number(value) for value in found.values()]
        table.add_row(escape(str(row["domain"])), escape(str(row["head"])), f"{int(row['rows']):,}", *shown)
    if len(rows) > MOST_ROWS:
        table.add_row(f"… {len(rows) - MOST_ROWS:,} more")
    return table


def show_outcomes(console: Console, results: Mapping[str, pd.DataFrame], metric: str) -> None:
    """If several outcomes are predicted, print the main metric of each by method, as the mean over domains."""
    prefix = f"{metric}:"
    means = {
        method: frame[frame["name"] == "domain_avg"].set_index("metric")["value"] for method, frame in results.items()
    }
    outcomes = [name for name in next(iter(means.values())).index if name.startswith(prefix)]
    if not outcomes:
        return
    table = _table(console)
    table.add_column("outcome, mean domain")
    for method in means:
        table.add_column(escape(method), justify="right")
    for name in outcomes:
        found = [float(values.get(name, float("nan"))) for values in means.values()]
        table.add_row(escape(name.removeprefix(prefix)), *_compared(found, metric))
    console.print()
    console.print(table)


def _say_what_next(console: Console, data: str, folders: list[Path]) -> None:
    if data != "exam":
        commands = {
            shlex.join(["feddar", "report", *map(str, folders), "--out", "report.html"]): "look at it",
            shlex.join(["feddar", "predict", str(folders[0]), "NEW.csv", "--out", "predictions.csv"]): "use it",
        }
        lines = [f"{command:<{max(map(len, commands))}}  # {what}" for command, what in commands.items()]
        console.print("Next:", *lines, sep="\n  ", highlight=False, markup=False, soft_wrap=True)
        return
    command = "feddar" if shutil.which("feddar") else sys.argv[0]
    columns = "your.csv --client hospital --domain race --target outcome"
    console.print(
        "The exam cohort is synthetic. Next, with your own table (a column for the hospital, one for the group, one "
        "for the outcome; the others are learned from):"
    )
    for line in (f"  {command} cohort {columns}", f"  {command} run {columns} --versus fedavg"):
        console.print(line, highlight=False, soft_wrap=True)


def _scores(
    console: Console,
    scope: str,
    names: tuple[str, ...],
    labels: list[Tensor],
    values: dict[str, pd.Series[float]],
    metric: str,
    objective: Objective,
    count: str = "test n",
) -> Table:
    """Return a table with a row for each domain or client, then their mean and their worst; ``count`` titles sizes."""
    table = _table(console)
    table.add_column(scope)
    table.add_column(count, justify="right")
    with_positives = objective.positive is not None
    if with_positives:
        table.add_column("positive", justify="right")
    for method in values:
        table.add_column(method, justify="right")
    if len(names) <= MOST_ROWS:
        for name, own in zip(names, labels, strict=True):
            counts = [f"{len(own):,}"] + ([f"{int(own.sum()):,}"] if with_positives else [])
            if scope == "domain" and is_few(float(own.sum()) if with_positives else len(own)):
                counts[-1] += "*"
                table.caption = FEW_NOTE if with_positives else FEW_SAMPLES_NOTE
            found = [float(series.get(name, float("nan"))) for series in values.values()]
            table.add_row(escape(name), *counts, *_compared(found, metric))
        table.add_section()
    defined = min(int(series.notna().sum()) for series in values.values())
    covers = f" ({defined} of {len(names)})" if defined < len(names) or len(names) > MOST_ROWS else ""
    blank = [""] * (2 if with_positives else 1)
    mean = [float(series.mean()) for series in values.values()]
    table.add_row(f"mean {scope}{covers}", *blank, *_compared(mean, metric))
    table.add_row(f"worst {scope}", *blank, *_compared([worst(metric, series) for series in values.values()], metric))
    return table


def _add_level(table: Table, results: Mapping[str, pd.DataFrame], main: str) -> None:
    """Add a row to a table of scores for each metric of the level of risks: its mean over domains, by method."""
    blank = [""] * (len(table.columns) - 1 - len(results))
    for title, texts in levels(results, main):
        table.add_row(title, *blank, *texts)


def levels(results: Mapping[str, pd.DataFrame], main: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a title and the methods' means over domains of each metric of the level of risks, but for the main one."""
    for metric in LEVEL:
        found = [frame[(frame["name"] == "domain_avg") & (frame["metric"] == metric)] for frame in results.values()]
        if metric != main and all(map(len, found)):
            means = [float(frame["value"].iloc[0]) for frame in found]
            yield f"mean domain, {metric_name(metric)}", _compared(means, metric)


def _compared(values: list[float], metric: str, show: Callable[[float], str] | None = None) -> list[str]:
    """Format values, the best of several in bold; undefined ones as a dash."""
    show = show or partial(number, metric=metric)
    lower = lower_is_better(metric)
    best = min(values, key=lambda value: np.inf if np.isnan(value) else value if lower else -value)
    shown = []
    for value in values:
        text = show(value)
        shown.append(f"[bold green]{text}[/bold green]" if len(values) > 1 and value == best else text)
    return shown


def show_cohort(console: Console, cohort: Cohort, about: str) -> None:
    """Print counts by client and domain with label rates, then warnings."""
    console.print(escape(about))
    console.print(f"samples: {len(cohort):,}   clients: {len(cohort.clients)}   domains: {len(cohort.domains)}")
    for line in what_happens(cohort):
        console.print(line, highlight=False, markup=False)
    console.print()
    table = _table(console)
    table.add_column("client")
    for name in (*cohort.domains, "all", cohort.objective.rate_title()):
        table.add_column(escape(name), justify="right")
    counts = cohort.counts
    shown = cohort.clients if len(cohort.clients) <= MOST_ROWS else cohort.clients[:20]
    for index, name in enumerate(shown):
        held = cohort.client == index
        cells = [f"{int(count):,}" if count else "·" for count in counts[index]]
        table.add_row(escape(name), *cells, f"{int(counts[index].sum()):,}", label_rate(cohort, held.numpy()))
    if len(shown) < len(cohort.clients):
        table.add_row(f"… {len(cohort.clients) - len(shown)} more")
    table.add_section()
    totals = [f"{int(count):,}" for count in counts.sum(0)]
    everyone = np.ones(len(cohort), bool)
    table.add_row("all", *totals, f"{len(cohort):,}", label_rate(cohort, everyone))
    by_domain = [label_rate(cohort, (cohort.domain == m).numpy()) for m in range(len(cohort.domains))]
    table.add_row(cohort.objective.rate_title(), *by_domain, label_rate(cohort, everyone))
    console.print(table)
    if cohort.columns:
        console.print()
        console.print(_columns(console, cohort))
    for warning in warnings(cohort):
        console.print(f"[yellow]note:[/yellow] {escape(warning)}")


def what_happens(cohort: Cohort) -> list[str]:
    """Return lines on what is predicted, and how the columns are preprocessed."""
    found = [f"predicted: {cohort.objective.described(cohort.y.numpy())}"]
    columns = cohort.columns or ()
    named = [column for column in columns if column.kind == "category"]
    measured = [column for column in columns if column.is_numeric]
    steps = [f"images of {column.size} x {column.size} pixels" for column in columns if column.kind == "image"]
    if measured:
        steps.append(f"{counted(len(measured), 'column')} of numbers in standard units, by sums over clients")
    if gaps := sum(column.gaps for column in measured):
        steps.append(f"gaps in {gaps} of them filled with the mean and marked")
    if named:
        steps.append(
            f"{counted(len(named), 'category', 'categories')} with an embedding each, missing as its own level"
        )
    if cohort.weight is not None:
        found.append(
            f"weights of samples in training: {_range('number', cohort.weight.numpy())}; metrics do not use them"
        )
    return [*found, f"inputs: {'; '.join(steps)}"] if steps else found


def _columns(console: Console, cohort: Cohort) -> Table:
    """Return a table of the features: their values, and how many are missing."""
    table = _table(console)
    for name in ("column", "kind", "values"):
        table.add_column(name)
    table.add_column("missing", justify="right")
    for column, values in cohort.by_column():
        if column.kind == "image":
            share, held = 0.0, f"{column.size} x {column.size} pixels"
        elif column.is_numeric:
            present = ~values.isnan()
            share, held = float((~present).double().mean()), _range(column.kind, values[present].numpy())
        else:
            share, held = float((values == 0).double().mean()), ", ".join(column.levels[:6])
            held += f", … ({len(column.levels)})" if len(column.levels) > 6 else ""
        table.add_row(escape(column.name), column.kind, escape(held), f"{share:.1%}" if share else "")
    return table


def _range(kind: str, values: NDArray[np.floating]) -> str:
    """Return the range or share of a numeric column as text."""
    if kind == "boolean":
        return f"{values.mean():.1%} yes"
    ends = [values.min(), values.max()]
    if kind == "date":
        return " to ".join(str(np.datetime64("1970-01-01") + np.timedelta64(int(end), "D")) for end in ends)
    return f"{ends[0]:.4g} to {ends[1]:.4g}, mean {values.mean():.4g}"


def warnings(cohort: Cohort) -> list[str]:
    """Return warnings on what may disturb training or make metrics noisy."""
    found = list(cohort.notes)
    for kind, names, holder in (
        ("domain", cohort.domains, cohort.domain),
        ("client", cohort.clients, cohort.client),
    ):
        noisy, undefined = [], []
        for index, name in enumerate(names):
            labels = cohort.y[holder == index]
            if len(labels) < 2:
                noisy.append(f"{kind} '{name}' has {len(labels)} sample: training and testing need at least 2.")
            elif len(labels) < FEW:
                noisy.append(f"{kind} '{name}' has {len(labels)} samples only: its figures will be noisy.")
            only = cohort.objective.only(labels.numpy())
            if only is not None and len(labels) > 1:
                undefined.append(f"{kind} '{name}' has one class only ({only}): its AUC is undefined.")
        found += _summed_up(noisy, f"{kind}s with fewer than {FEW} samples, whose figures will be noisy", len(names))
        found += _summed_up(undefined, f"{kind}s with one class only, whose AUC is undefined", len(names))
    if len(cohort.domains) == 1:
        found.append("there is one domain only: FedDAR has nothing to tell apart, feddar-mixture may.")
    elif single := int(((cohort.counts > 0).sum(1) == 1).sum()):
        found.append(f"clients with one domain only: {single} of {len(cohort.clients)}.")
    if len(cohort.clients) == 1:
        found.append("there is one client only: nothing is shared between clients.")
    constant = [f"'{name}'" for name in _constant(cohort)]
    if constant:
        which, have = ("columns", "each have") if constant[1:] else ("column", "has")
        found.append(f"{which} {', '.join(constant)} {have} the same value everywhere.")
    return found


def _summed_up(notes: list[str], what: str, among: int) -> list[str]:
    """Return the notes if they are few, else one note with their number."""
    return notes if len(notes) <= MOST_NOTES else [f"{what}: {len(notes)} of {among}."]


def _constant(cohort: Cohort) -> list[str]:
    """Return the names of columns with one value only; missing numbers are ignored."""
    values = ((column, part[~part.isnan()]) for column, part in cohort.by_column() if column.kind != "image")
    return [column.name for column, present in values if len(present) and bool((present == present[0]).all())]


def show_methods(console: Console, methods: Iterable[Method]) -> None:
    """Print the table of methods, the meaning of its columns, and our readings of open points in the papers."""
    rows = list(methods)
    table = _table(console)
    for name in ("method", "encoder", "heads", "trained", "more", "paper"):
        table.add_column(name, no_wrap=name == "method")
    for row in rows:
        trained = "in turn" if row.alternating else "together"
        table.add_row(row.name, row.encoder, row.heads, trained, _more(row), row.paper)
    console.print(table)
    console.print(
        "encoder, heads: shared by all (global), by those with the same domain, or kept by each client; in turn: "
        "heads, then encoder; second order: how heads are combined, otherwise by the average; weighted: every domain "
        "counts the same (by evidence: as far as domains differ); pooled: heads in use are drawn together as far as "
        "there is no evidence that domains differ; minmax: weights of domains follow their risks; by loss: clients "
        "count by a power of their loss; own weight: each knows its own, which follows its loss or its gap between "
        "domains; averaged: over the last rounds; corrected: each client corrects heads for its own samples.",
        style="dim",
    )
    console.print("\nWhere a paper is open, this reading was taken:")
    for reading in dict.fromkeys(row.reading for row in rows if row.reading):
        names = ", ".join(row.name for row in rows if row.reading == reading)
        console.print(f"  {names}: {escape(reading)}", highlight=False)


def _more(row: Method) -> str:
    companions = {"tuned": "fine-tuned", "pulled": "own model", "mixed": "own mixture", None: ""}
    said = {
        "second order": row.second_order,
        "weighted by evidence" if row.by_evidence else "weighted": row.reweighted,
        "pooled": row.credible,
        "averaged": row.averaged,
        "corrected": row.site_offset,
        "corrected by label rates": row.label_shift,
        "domain input": row.domain_input,
        "proximal": row.proximal,
        "minmax" if row.ascent == "projected" else "exponentiated minmax": row.minmax,
        "by loss": row.by_loss,
        "heads of domains in closed form": row.closed_form,
        "balanced, own head added": row.decoupled,
        "own weight by loss": row.own_weight == "agnostic",
        "own weight by gap": row.own_weight == "fair",
        "own norm": row.private_norm,
        companions[row.companion]: row.companion,
        f"after {row.start}": row.start,
    }
    return ", ".join(text for text, holds in said.items() if holds)


def _table(console: Console) -> Table:
    return Table(
        box=SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
        collapse_padding=console.is_terminal,
        highlight=False,
    )


def label_rate(cohort: Cohort, held: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> str:
    """Return the rate of the label among the samples that are ``held``."""
    labels = cohort.y.numpy()[held]
    return cohort.objective.rate(labels) if len(labels) else "–"
