"""Commands that train, or show data and methods: run, compare, cohort, methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from feddar.cli.console import AllowCode, Out, Resume, console, folder_for, permission, say_written, stoppable
from feddar.cli.options import Chosen, choose, completing, completing_data, given_for, with_options
from feddar.cli.watch import Watch, WatchPort, watching
from feddar.data.sources import BUILT_IN, cohorts_in, find_source, resolve_options
from feddar.data.sources.source import Source, flag_of
from feddar.errors import TrainingError, UserError
from feddar.methods import METHODS
from feddar.settings import CONFIG_FILE, DataSettings, Plan, Settings, checked, read_config, write_config

if TYPE_CHECKING:
    from feddar.comparison.comparison import ComparisonResults
    from feddar.data.cohort import Cohort

ABOUT_DATA = f"A built-in cohort ({', '.join(BUILT_IN)}), a file or a folder"
Data = Annotated[str, typer.Argument(metavar="DATA", help=f"{ABOUT_DATA}.", autocompletion=completing_data)]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", rich_help_panel="training", hidden=True, help="TOML file with options; flags override it."
    ),
]


@with_options(Settings, of_sources=True)
def run(
    data: Data,
    out: Out = None,
    config: Config = None,
    resume: Resume = False,
    versus: Annotated[
        str | None,
        typer.Option(
            "--versus",
            metavar="METHOD",
            rich_help_panel="evaluation",
            help="Train this method as well, to compare.",
            autocompletion=completing(*METHODS),
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="PAGE",
            rich_help_panel="output",
            hidden=True,
            help="At the end write the page as well (.html).",
        ),
    ] = None,
    watch: Watch = False,
    watch_port: WatchPort = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Train one method, and say how it does in every domain and client."""
    from feddar.report.terminal import show_progress, show_results
    from feddar.report.tracked import track_pages
    from feddar.results.training import train

    source, options, settings = choose(data, _config_to_use("run", out, config, resume), given)
    _require_page(page)
    folder = folder_for(out, data, settings.method)
    chosen = _with_rival(settings, versus)
    options, loaded = _load(source, options, settings.seed, folder)
    train_part, test = loaded.split(options.test, settings.seed)
    console.print(f"{' and '.join(chosen)} on {escape(source.about)}")
    _say_notes(loaded)
    places = {name: folder if name == settings.method else folder / f"versus-{name}" for name in chosen}
    more = [*(["--versus", versus] if versus else []), *permission(settings.encoder)]
    again = ["feddar", "run", data, "--resume", "--out", str(folder), *more]
    runs = {}
    title = f"{' and '.join(chosen)} on {Path(data).name}"
    with stoppable(again), watching(watch, watch_port, "client", title, source.about, folder) as view:
        for name, each in chosen.items():
            with show_progress(console, each) as progress:
                begun = resume and places[name].is_dir()
                where: dict[str, Any] = {"out": places[name], "resume": begun, "source": options}
                if view is not None:
                    view.begin(each, places[name])
                    where |= {"callbacks": [view.round_ended], "listeners": [view.heard]}
                runs[name] = train(train_part, test=test, progress=progress, **where, **each.model_dump())
            track_pages(each, places[name])
    show_results(console, runs, test, list(places.values()), data)
    _write_page(page, list(places.values()))


def _require_page(page: Path | None) -> None:
    """Refuse, before training, a page that could not be written afterwards."""
    if page is not None:
        from feddar.report.page import require_page

        require_page(page)


def _write_page(page: Path | None, folders: list[Path]) -> None:
    """Write the page about runs, if one is wanted."""
    if page is not None:
        from feddar.report.page import write_page

        write_page(folders, page)
        say_written(page)


def _load(source: Source, options: DataSettings, seed: int, folder: Path) -> tuple[DataSettings, Cohort]:
    """Return the cohort, and the options it was loaded with: large images are kept in a file beside the run."""
    from feddar.data.image_cache import ImagesTooLargeError

    try:
        return options, source.load(options, seed)
    except ImagesTooLargeError:
        beside = options.model_copy(update={"image_cache": f"{folder}.images"})
        console.print(f"note: images are large, and kept in {escape(f'{folder}.images')}.", highlight=False)
        return beside, source.load(beside, seed)


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
    if not (out / CONFIG_FILE).exists():
        raise UserError(f"there is no {what} in {out}: leave out --resume to start one.")
    return config or out / CONFIG_FILE


def _say_notes(cohort: Cohort) -> None:
    for note in cohort.notes:
        console.print(f"note: {escape(note)}", highlight=False)


@with_options(Plan, Settings, of_sources=True, without=("method", "threads", *Settings.of_decisions))
def compare(
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help=f"{ABOUT_DATA}; several as a,b.", autocompletion=completing_data),
    ],
    out: Out = None,
    config: Config = None,
    resume: Resume = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            rich_help_panel="training",
            hidden=True,
            help="Trainings at a time. [default: one for each core, or GPU]",
        ),
    ] = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Train several methods on the same splits, and compare them."""
    names = cohorts_in(data)
    kept = _config_to_use("comparison", out, config, resume)
    folder = folder_for(out, data, "compare")
    places = [folder] if len(names) == 1 else [folder / Path(name).stem for name in names]
    # What is wrong with one of several cohorts is said before the first is trained on.
    begun = [resume and (place / CONFIG_FILE).exists() for place in places]
    own = [config or (place / CONFIG_FILE if is_begun else kept) for place, is_begun in zip(places, begun, strict=True)]
    asked = [_to_compare(*each, given) for each in zip(names, places, begun, own, strict=True)]
    if len(names) > 1 and not resume:
        _keep_options(folder, config, given)
    allowed = permission(asked[0].chosen.settings.encoder)
    with stoppable(["feddar", "compare", data, "--resume", "--out", str(folder), *allowed]):
        found = {each.folder: _trained(each, jobs) for each in asked}
    if len(names) > 1:
        from feddar.report.overview import Overview, write_overview
        from feddar.report.terminal import show_overview

        overview = Overview({place.name: comparison for place, comparison in found.items()})
        write_overview(overview, folder)
        show_overview(console, overview, folder)
    for place, comparison in found.items():
        _require_no_failure(comparison, place)


class _ToCompare(NamedTuple):
    """A comparison of methods on one cohort, as it was asked for."""

    chosen: Chosen
    plan: Plan
    folder: Path
    resume: bool


def _to_compare(data: str, folder: Path, resume: bool, config: Path | None, given: dict[str, Any]) -> _ToCompare:
    """Return what is compared on a cohort, by the options that are given, else by those of the configuration."""
    plan = checked(Plan, (read_config(config).get("compare", {}) if config else {}) | given_for(Plan, given))
    others = {name: value for name, value in given.items() if name not in Plan.model_fields}
    if "test" in others and plan.folds > 1:
        raise UserError("--test is for one split, and folds have a test part each: add --folds 1, or leave it out.")
    chosen = choose(data, config, others | {"method": plan.methods[0], "jobs": 1, "threads": 1})
    return _ToCompare(chosen, plan, folder, resume)


def _keep_options(folder: Path, config: Path | None, given: dict[str, Any]) -> None:
    """Write the options as they were given, by which cohorts that are not begun go on when it is resumed."""
    from feddar.comparison.comparison import refuse_results
    from feddar.results.run_folder import replacing, writing

    refuse_results(folder)
    before = read_config(config) if config else {}
    training, plan = given_for(Settings, given), given_for(Plan, given)
    own = {"training": training, "compare": plan, "data": {n: v for n, v in given.items() if n not in training | plan}}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / CONFIG_FILE) as temporary:
            write_config(temporary, **{title: before.get(title, {}) | values for title, values in own.items()})


def _trained(asked: _ToCompare, jobs: int | None) -> ComparisonResults:
    """Train and compare on one cohort, and show the results."""
    from feddar.api import compare as train_and_compare
    from feddar.models.devices import default_jobs
    from feddar.report.terminal import show_comparison, show_comparison_progress

    (source, options, settings), plan, folder, resume = asked
    console.print(f"{len(plan.methods)} method{'s' * (len(plan.methods) > 1)} on {escape(source.about)}")
    options, loaded = _load(source, options, settings.seed, folder)
    _say_notes(loaded)
    with show_comparison_progress(console) as report:
        comparison = train_and_compare(
            lambda seed: loaded if seed == settings.seed else source.load(options, seed),
            out=folder, resume=resume, jobs=jobs or default_jobs(settings.device), test=options.test, source=options,
            report=report, **plan.model_dump(), **settings.model_dump(exclude={"method", "jobs", "threads"}),
        )  # fmt: skip
    show_comparison(console, comparison, folder)
    return comparison


def _require_no_failure(comparison: ComparisonResults, folder: Path) -> None:
    if comparison.failures:
        first, reason = comparison.failures[0]
        more = f" ({len(comparison.failures)} of them; see {folder / 'table.md'})" * (len(comparison.failures) > 1)
        raise TrainingError(f"a training failed: {first}: {reason}{more}")


@with_options(of_sources=True)
def cohort(
    data: Data,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel="data", help="Seed of cohorts that are drawn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", rich_help_panel="output", help="Also write a page (.html), with some images of each domain."
        ),
    ] = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Show who holds what, and what to look out for, before training."""
    from feddar.report.terminal import show_cohort

    source = find_source(data)
    loaded = source.load(resolve_options(source, data, given), seed)
    if out is not None:
        from feddar.report.cohort_page import write_cohort_page

        write_cohort_page(loaded, data, source.about, out, seed)
    show_cohort(console, loaded, source.about)
    flags = ", ".join(flag_of(name) for name in source.options.model_fields if name != "data")
    console.print(f"options of {source.name}: {flags}", highlight=False)
    if out is not None:
        console.print(f"page: {escape(str(out))}", highlight=False)


def methods() -> None:
    """List the methods and what each of them shares."""
    from feddar.report.terminal import show_methods

    show_methods(console, METHODS.values())
