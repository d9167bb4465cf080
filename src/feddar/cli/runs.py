"""Commands that train, or show data and methods: run, compare, cohort, methods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from feddar.cli.console import AllowCode, Out, console, folder_for, permission, stoppable
from feddar.cli.options import choose, given_for, with_options
from feddar.data.sources import BUILT_IN, find_source, resolve_options
from feddar.data.sources.source import flag_of
from feddar.errors import TrainingError, UserError
from feddar.settings import Plan, Settings, checked, read_config

if TYPE_CHECKING:
    from feddar.comparison.comparison import ComparisonResults
    from feddar.data.cohort import Cohort

Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help=f"A built-in cohort ({', '.join(BUILT_IN)}), a file or a folder."),
]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with options; flags override it.")]


@with_options(Settings, of_sources=True)
def run(
    data: Data,
    out: Out = None,
    config: Config = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    versus: Annotated[str | None, typer.Option("--versus", help="Train this method as well, to compare.")] = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Train one method, evaluate it for every domain and client, and save it."""
    from feddar.report.terminal import show_progress, show_results
    from feddar.results.training import train

    source, options, settings = choose(data, _config_to_use("run", out, config, resume), given)
    folder = folder_for(out, data, settings.method)
    chosen = _with_rival(settings, versus)
    loaded = source.load(options, settings.seed)
    train_part, test = loaded.split(options.test, settings.seed)
    console.print(f"{' and '.join(chosen)} on {escape(source.about)}")
    _say_notes(loaded)
    places = {name: folder if name == settings.method else folder / f"versus-{name}" for name in chosen}
    more = [*(["--versus", versus] if versus else []), *permission(settings.encoder)]
    again = ["feddar", "run", data, "--resume", "--out", str(folder), *more]
    runs = {}
    with stoppable(again):
        for name, each in chosen.items():
            with show_progress(console, each) as progress:
                begun = resume and places[name].is_dir()
                where: dict[str, Any] = {"out": places[name], "resume": begun, "source": options}
                runs[name] = train(train_part, test=test, progress=progress, **where, **each.model_dump())
    show_results(console, runs, test, list(places.values()), data)


def _with_rival(settings: Settings, versus: str | None) -> dict[str, Settings]:
    """Return the settings of the method and, if there is one, of the method to compare it with."""
    if versus is None:
        return {settings.method: settings}
    if versus == settings.method:
        raise UserError(f"--versus {versus} is the method itself: name another one to compare with.")
    return {settings.method: settings, versus: settings.fitted_to(versus)}


def _config_to_use(what: str, out: Path | None, config: Path | None, resume: bool) -> Path | None:
    """Return the configuration file: the one given, else that of the run or comparison to resume."""
    if not resume:
        return config
    if out is None:
        raise UserError(f"say which {what} to go on with: --resume --out FOLDER.")
    if not (out / "config.toml").exists():
        raise UserError(f"there is no {what} in {out}: leave out --resume to start one.")
    return config or out / "config.toml"


def _say_notes(cohort: Cohort) -> None:
    for note in cohort.notes:
        console.print(f"note: {escape(note)}", highlight=False)


@with_options(Plan, Settings, of_sources=True, without=("method", "threads"))
def compare(
    data: Data,
    out: Out = None,
    config: Config = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Trainings at a time [default: as many as processors].")
    ] = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Train several methods on the same splits, and compare them for every domain and client."""
    from feddar.api import compare as train_and_compare
    from feddar.report.terminal import show_comparison, show_comparison_progress

    config = _config_to_use("comparison", out, config, resume)
    plan = checked(Plan, (read_config(config).get("compare", {}) if config else {}) | given_for(Plan, given))
    others = {name: value for name, value in given.items() if name not in Plan.model_fields}
    if "test" in others and plan.folds > 1:
        raise UserError("--test is for one split, and folds have a test part each: add --folds 1, or leave it out.")
    source, options, settings = choose(data, config, others | {"method": plan.methods[0], "jobs": 1, "threads": 1})
    folder = folder_for(out, data, "compare")
    console.print(f"{len(plan.methods)} methods on {escape(source.about)}")
    loaded = source.load(options, settings.seed)
    _say_notes(loaded)
    again = ["feddar", "compare", data, "--resume", "--out", str(folder), *permission(settings.encoder)]
    with stoppable(again), show_comparison_progress(console) as report:
        comparison = train_and_compare(
            lambda seed: loaded if seed == settings.seed else source.load(options, seed),
            out=folder, resume=resume, jobs=jobs or os.cpu_count() or 1, test=options.test, source=options,
            report=report, **plan.model_dump(), **settings.model_dump(exclude={"method", "jobs", "threads"}),
        )  # fmt: skip
    show_comparison(console, comparison, folder)
    _require_no_failure(comparison, folder)


def _require_no_failure(comparison: ComparisonResults, folder: Path) -> None:
    if comparison.failures:
        first, reason = comparison.failures[0]
        more = f" ({len(comparison.failures)} of them; see {folder / 'table.md'})" * (len(comparison.failures) > 1)
        raise TrainingError(f"a training failed: {first}: {reason}{more}")


@with_options(of_sources=True)
def cohort(data: Data, seed: Annotated[int, typer.Option(min=0)] = 0, given: dict[str, Any] = {}) -> None:  # noqa: B006
    """Show who holds what: samples by client and domain, label rates, and what to look out for."""
    from feddar.report.terminal import show_cohort

    source = find_source(data)
    show_cohort(console, source.load(resolve_options(source, data, given), seed), source.about)
    flags = ", ".join(flag_of(name) for name in source.options.model_fields if name != "data")
    console.print(f"options of {source.name}: {flags}", highlight=False)


def methods() -> None:
    """List the methods."""
    from feddar.methods import METHODS
    from feddar.report.terminal import show_methods

    show_methods(console, METHODS.values())
