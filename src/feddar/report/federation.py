"""Terminal output of the commands between sites: a study, the progress, what leaves a site, and results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feddar.algorithm.local_training import samples_by_domain
from feddar.algorithm.processors import Processors
from feddar.algorithm.rounds import RoundEnd
from feddar.errors import UserError, printable
from feddar.evaluation.metrics import worst
from feddar.federation.coordinator import EXCHANGES_FILE, CoordinatorEvents, Exchanged
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.privacy.answer_log import Entry, VerifiedLog
from feddar.federation.rehearsal import build, what_leaves
from feddar.federation.site import processors_of, seen_in
from feddar.federation.study import Facts, Study
from feddar.models.encoders.own import require_allowed
from feddar.report.numbers import byte_size, direction, metric_name, number
from feddar.report.operating_point import show_operating_point
from feddar.report.terminal import levels, say_class_weight, show_choices, show_outcomes
from feddar.report.validation import results_of
from feddar.results.figure_files import read_figures
from feddar.results.run import Run
from feddar.results.run_folder import notes_in
from feddar.settings import Settings

ONCE = (
    "Each phase of a round is answered once; asked again, the same reply is sent. Every answer is written down before "
    "it leaves: `feddar client log` shows them."
)
"""What a site promises of its answers, whatever its processors are."""


def show_study(console: Console, study: Study, path: Path) -> None:
    """Print what was written, and what to do next."""
    facts, kinds = study.facts, [column.kind for column in study.columns]
    columns = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    predicts = study.objective.kind
    then = (
        "or make keys  feddar keys KEYS --server HOST --client NAME --client NAME"
        if facts.keys is None
        else f"or begin      feddar server --config {escape(str(path))} --listen HOST:9092 --keys KEYS"
    )
    console.print(
        f"Written: [bold]{escape(str(path))}[/bold]: {study.training.method}, "
        f"{study.training.rounds} rounds; {len(facts.domains)} domains, {predicts}, columns: {columns}\n"
        + _optional(study)
        + "Look through it: every domain, class and level that any site may have must be listed.\n"
        f"Digest of the study, to compare with others by telephone: {study.digest}\n\n"
        f"Next: rehearse it   feddar simulate --config {escape(str(path))} --data FOLDER\n"
        f"      {then}",
        highlight=False,
    )


def _optional(study: Study) -> str:
    """Return a line that names the columns that sites may lack; nothing if there are none."""
    names = ", ".join(column.name for column in study.columns if column.optional)
    return f"Optional, and missing at sites that lack them: {escape(printable(names))}.\n" if names else ""


@contextmanager
def show_federation(console: Console, study: Study) -> Iterator[CoordinatorEvents]:
    """Print a line for each phase, with the sites that answered and their times, and one for each round."""
    rounds = study.training.rounds

    def exchanged(number: int, phase: str, outcomes: Sequence[Exchanged]) -> None:
        good = [each for each in outcomes if not each.problem]
        times = ", ".join(f"{escape(each.site)} {each.seconds:.1f} s" for each in good)
        sent, received = sum(each.sent for each in outcomes), sum(each.received for each in outcomes)
        size = f"{byte_size(sent)} out, {byte_size(received)} in"
        where = f"round {number} of {rounds}" if number else "before round 1"
        console.print(f"[dim]{where}, {phase}: {times}; {size}[/dim]", highlight=False)
        for each in outcomes:
            if each.problem:
                console.print(
                    f"{where}, {phase}: done without [bold]{escape(each.site)}[/bold]: {escape(each.problem)}",
                    highlight=False,
                )

    def progress(now: RoundEnd) -> None:
        low, mean = (number(value, metric=now.metric) for value in (now.worst_domain, now.mean_domain))
        console.print(
            f"round {now.round} of {now.rounds}: loss {number(now.loss)}, {metric_name(now.metric)} of the worst "
            f"domain {low}, mean {mean}",
            highlight=False,
        )

    def say(what: str) -> None:
        console.print(escape(what), highlight=False)

    yield CoordinatorEvents(say, exchanged, progress)


def show_federated(console: Console, run: Run, folder: Path) -> None:
    """Print the metrics of every domain and site, from the sums that sites sent."""
    metric = run.model.objective.headline(run.settings.metric)
    results = run.results()
    console.print(
        f"\n{metric_name(metric)} on the sites' own test samples, {results_of(run.settings)}; {direction(metric)}",
        style="bold",
        highlight=False,
    )
    shown = results[results["metric"] == metric]
    average = shown.set_index("name")["value"]
    for scope, title, mean in (("domain", "domain", "domain_avg"), ("client", "site", "client_avg")):
        rows = shown[shown["scope"] == scope]
        if rows.empty:  # of single sites nothing is known here
            continue
        table = Table(box=SIMPLE_HEAD)
        table.add_column(title)
        table.add_column(metric_name(metric), justify="right")
        table.add_column("test samples", justify="right")
        for name, value, count in zip(rows["name"], rows["value"], rows["count"], strict=True):
            table.add_row(escape(str(name)), number(value, metric=metric), f"{count:,}")
        table.add_section()
        table.add_row(f"mean {title}", number(average[mean], metric=metric), "")
        table.add_row(f"worst {title}", number(worst(metric, rows["value"]), metric=metric), "")
        if scope == "domain":
            for level, texts in levels({run.settings.method: results}, metric):
                table.add_row(level, *texts)
        console.print(table)
    show_outcomes(console, {run.settings.method: results}, metric)
    show_operating_point(console, read_figures(folder))
    show_choices(console, {run.settings.method: run})
    for note in notes_in(folder):
        console.print(escape(note), highlight=False)
    say_class_weight(console, run.settings)
    console.print(
        f"Saved in [bold]{escape(str(folder))}[/bold]: study.toml, config.toml, metrics.csv, figures.csv, "
        f"model.safetensors, {EXCHANGES_FILE}\nNext: feddar report {escape(str(folder))}",
        highlight=False,
    )


def explain_study(console: Console, study: Study, data: Path, name: str, min_cell: int) -> None:
    """Print the whole study, and what would leave a site; if its encoder is code that is not allowed, only say so."""
    show_tables(console, study)
    try:
        require_allowed(study.training.encoder)
    except UserError as reason:
        study.read_site(data, name)  # report data that does not fit
        console.print(f"What leaves this site is not listed, since {escape(str(reason))}", highlight=False)
    else:
        show_what_leaves(console, study, data, name, min_cell)


def show_tables(console: Console, study: Study) -> None:
    """Print every entry of a study, with what it means; texts of the file cannot steer the terminal."""
    meanings: dict[str, type[BaseModel]] = {"study": Facts, "training": Settings, "terms": CoordinatorSettings}
    console.print(f"The study '{escape(printable(study.facts.name))}'", style="bold", highlight=False)
    console.print(f"Digest of the study, to compare with others by telephone: {study.digest}", highlight=False)
    for title, entries in study.tables().items():
        table = Table(escape(f"[{title}]"), "", "", box=SIMPLE_HEAD)
        fields = meanings[title].model_fields if title in meanings else {}
        for name, value in entries.items():
            shown = printable(json.dumps(value, ensure_ascii=False))
            about = fields[name].description if name in fields else ""
            table.add_row(escape(printable(name)), escape(shown), escape(about or ""))
        console.print(table)


def show_what_leaves(console: Console, study: Study, data: Path, name: str, min_cell: int) -> None:
    """List every tensor that would leave a site, by phase, with its bytes."""
    train, _ = study.divided(study.read_site(data, name))
    model = build(study)[0]
    processors = Processors.of(processors_of(min_cell, study, model))
    rows = samples_by_domain(processors.admit(train))
    held = rows.nonzero().flatten().tolist()
    if not held:
        raise UserError(f"{data} has fewer than {min_cell} patients of every domain: nothing would leave this site.")
    frame = what_leaves(study, rows)
    table = Table(box=SIMPLE_HEAD)
    for column in ("method", "phase", "tensor", "shape", "type"):
        table.add_column(column)
    table.add_column("bytes", justify="right")
    for (_, method, phase), sent in frame.groupby(["round", "method", "phase"], sort=False):
        for tensor, shape, kind, size in zip(sent["tensor"], sent["shape"], sent["type"], sent["bytes"], strict=True):
            table.add_row(
                str(method), str(phase), escape(tensor), " x ".join(map(str, shape)) or "1", kind, f"{size:,}"
            )
        table.add_row("", "", "", "", "", f"[bold]{sent['bytes'].sum():,}[/bold]", end_section=True)
    hidden = [
        name for number, name in enumerate(study.facts.domains) if number not in held and name in train.domain_names
    ]
    domains = ", ".join(f"{index} is {study.facts.domains[index]}" for index in held)
    parameters = sum(value.numel() for value in model.body.state_dict().values())
    console.print(f"What leaves {escape(name)} in study '{escape(printable(study.facts.name))}'", style="bold")
    console.print(table)
    if lacking := study.lacking(data):
        console.print(
            f"This table lacks {escape(printable(', '.join(lacking)))}, which the study has as optional: missing in "
            "all rows here, and the sums say so.",
            highlight=False,
        )
    console.print(
        f"Domains by number: {escape(printable(domains))}; the encoder has {parameters:,} numbers.\n"
        + (
            f"Left out, with fewer than {min_cell} patients to train on: {escape(printable(', '.join(hidden)))}.\n"
            if hidden
            else ""
        )
        + "With each phase go the numbers of samples behind it, the summed loss, and the seconds it took.\n"
        "No row of the table leaves this site. What holds for everything that does:\n"
        + "\n".join(f"  - {escape(promise)}" for promise in (*(each.promise for each in processors.each), ONCE))
        + "".join(f"\nWho sees it: {sentence}." for sentence in seen_in(study)),
        highlight=False,
    )


def show_answers(console: Console, log: VerifiedLog, noted: str | None = None) -> None:
    """Print a line for each answer that has left a site, and whether the log has all that it had at a noted hash."""
    if noted is not None and not log.goes_on_from(noted):
        raise UserError(f"the log never ended with {noted}: lines were changed or cut off since it was noted down.")
    table = Table(box=SIMPLE_HEAD)
    for title in ("time (UTC)", "run", "round", "step", "asked for", "answer"):
        table.add_column(title)
    for title in ("numbers", "received", "sent"):
        table.add_column(title, justify="right")
    for entry in log.entries:
        table.add_row(*_answer_row(entry))
    console.print(table)
    answers, sent = len(log.entries), sum(entry.sent for entry in log.entries)
    since = "" if noted is None else " The log has all that it had when the hash was noted down."
    console.print(
        f"{answers:,} answer{'s' if answers != 1 else ''}, {byte_size(sent)} sent. Each line follows from the one "
        f"before it.{since} Note down what it ends with, and `--noted HASH` says later whether anything was changed "
        "before:\n"
        f"{log.end}",
        highlight=False,
        soft_wrap=True,
    )


def _answer_row(entry: Entry) -> tuple[str, ...]:
    """Return an entry of the log as the cells of a table."""
    place = ("" if number is None else str(number) for number in (entry.round, entry.step))
    numbers = sum(prod(shape) for shape in entry.tensors.values())
    texts = (escape(text) for text in (entry.phase or entry.asked, entry.answer))
    return (
        entry.time.replace("T", " ").removesuffix("+00:00"), escape(entry.run), *place, *texts, f"{numbers:,}",
        byte_size(entry.received), byte_size(entry.sent),
    )  # fmt: skip
