"""The command line: it parses, calls and prints, and nothing else.

Every option of `run` is a field of ``Settings`` or of a source's options, turned into a flag here; so there is one
place for its name, default, bounds and help. Values are checked there too, which gives one sentence for a wrong one.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
import typer.core
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape

from feddar.data.sources import BUILT_IN, SOURCES, find_source, resolve_options, sources_with
from feddar.data.sources.source import Source, flag_of
from feddar.data.table_options import TableOptions
from feddar.errors import Notice, TrainingError, UserError
from feddar.experiments import EXPERIMENTS
from feddar.federation.coordinator_settings import Terms
from feddar.settings import DataSettings, Plan, Settings, Unknown, checked, read_config
from feddar.simulation.processes import this_process_is_ours

if TYPE_CHECKING:
    from feddar.data.cohort import Cohort
    from feddar.federation.study import Study

# The typer that Flower asks for writes "\\[required]" where rich is installed, although help is plain text here.
typer.core.HAS_RICH = False

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In a file or a pipe there is no width to keep to.
console = Console(width=None if sys.stdout.isatty() else 200)


def main() -> None:
    """Run the command line; a wrong command or wrong data is one sentence and exit code 2."""
    warnings.showwarning = _show_warning
    this_process_is_ours()
    if "" not in sys.path:
        sys.path.append("")  # the current folder, last: where an encoder of the user's own may be
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except UserError as error:
        _fail(error, 2)
    except TrainingError as error:
        _fail(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped.", 1)
    except Exception as error:
        # The parser's own errors; their class has had several homes.
        if not hasattr(error, "format_message"):
            raise
        _fail(f"{error.format_message().strip()} (see: feddar --help)", 2)


_python_shows_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    if issubclass(category, Notice):
        console.print(f"note: {escape(str(message))}", highlight=False)
    else:
        _python_shows_warning(message, category, *place, **more)


def _fail(what: object, code: int) -> None:
    sys.stdout.flush()
    print(f"feddar: {what}", file=sys.stderr)
    sys.exit(code)


def _with_options(
    *models: type[BaseModel], of_sources: bool = False, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag for every field of the models, and if asked of all sources.

    The command gets the values that were given as one dict, ``given``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        taken = {p.name for p in own}
        helps = [(name, field, _help(field)) for model in models for name, field in model.model_fields.items()]
        helps += _source_helps() if of_sources else []
        flags = [_flag(*each) for each in helps if each[0] not in taken.union(without)]

        def call(**values: Any) -> None:
            mine = {name: values.pop(name) for name in list(values) if name in taken}
            command(**mine, given={name: value for name, value in values.items() if value is not None})

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
        return call

    return decorate


def _help(field: FieldInfo) -> str:
    default = "" if field.default in (None, "") else f" [default: {field.default}]"
    return f"{field.description}{default}"


def _source_helps() -> list[tuple[str, FieldInfo, str]]:
    """Return every option of a source: name, field, and help that says which sources have it, if not all do."""
    fields = {name: field for source in SOURCES for name, field in source.options.model_fields.items()}
    return [(name, field, _source_help(name, field)) for name, field in fields.items()]


def _source_help(name: str, field: FieldInfo) -> str:
    having = sources_with(name)
    defaults: dict[Any, list[str]] = {}
    for source in having:
        defaults.setdefault(source.options.model_fields[name].default, []).append(source.name)
    prefix = "" if len(having) == len(SOURCES) else f"{', '.join(source.name for source in having)}: "
    if len(defaults) == 1:
        return f"{prefix}{_help(field)}"
    listed = ", ".join(f"{default} ({', '.join(names)})" for default, names in defaults.items())
    return f"{prefix}{field.description} [default: {listed}]"


def _flag(name: str, field: FieldInfo, help_text: str) -> inspect.Parameter:
    flag = flag_of(name)
    given_as = get_args(field.annotation) or (field.annotation,)
    kinds = [one for kind in given_as if kind is not NoneType for one in get_args(kind) or (kind,)]
    if kinds == [bool]:
        annotation: Any = Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help_text)]
    else:
        metavar = kinds[0].__name__.upper() if isinstance(kinds[0], type) else "|".join(map(str, kinds))
        annotation = Annotated[str | None, typer.Option(flag, help=help_text, metavar=metavar)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


Data = Annotated[
    str,
    typer.Argument(metavar="DATA", help=f"A built-in cohort ({', '.join(BUILT_IN)}), a file or a folder."),
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results; a new one under runs/ if left out.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with options; flags override it.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"feddar {version('feddar')}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Federated Domain-Aware Representation learning: one model for many hospitals, fair to every group."""


@app.command()
@_with_options(Settings, of_sources=True)
def run(
    data: Data,
    out: Out = None,
    config: Config = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    versus: Annotated[str | None, typer.Option("--versus", help="Train this method as well, to compare.")] = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Train one method, evaluate it for every domain and client, and save it."""
    from feddar.report.terminal import show_progress, show_results
    from feddar.results.training import train

    if resume and out is None:
        raise UserError("say which run to go on with: --resume --out FOLDER.")
    if resume and out is not None:
        config = _config_to_resume(out, config)
    source = find_source(data)
    options, settings = _resolve(source, data, config, given)
    folder = _folder(out, data, settings.method)
    chosen = {settings.method: settings}
    if versus == settings.method:
        raise UserError(f"--versus {versus} is the method itself: name another one to compare with.")
    if versus is not None:
        chosen[versus] = checked(Settings, settings.model_dump() | {"method": versus})
    loaded = source.load(options, settings.seed)
    train_part, test = loaded.split(options.test, settings.seed)
    console.print(f"{' and '.join(chosen)} on {escape(source.about)}")
    _say_notes(loaded)
    runs = {}
    places = {name: folder if name == settings.method else folder / f"versus-{name}" for name in chosen}
    try:
        for name, each in chosen.items():
            place = places[name]
            with show_progress(console, each) as progress:
                begun = resume and place.is_dir()
                where: dict[str, Any] = {"out": place, "resume": begun, "source": options}
                runs[name] = train(train_part, test=test, progress=progress, **where, **each.model_dump())
    except KeyboardInterrupt:
        again = ["feddar", "run", data, "--resume", "--out", str(folder), *(["--versus", versus] if versus else [])]
        _fail(f"stopped; go on with: {shlex.join(again)}", 1)
    show_results(console, runs, test, list(places.values()), data)


def _say_notes(cohort: Cohort) -> None:
    for note in cohort.notes:
        console.print(f"note: {escape(note)}", highlight=False)


def _folder(out: Path | None, data: str, method: str) -> Path:
    """Return the folder asked for, or the first free one under runs/."""
    if out is not None:
        return out
    stem = Path("runs") / f"{Path(data).stem or 'data'}-{method}"
    return next(
        path
        for path in (stem if n == 1 else stem.with_name(f"{stem.name}-{n}") for n in range(1, sys.maxsize))
        if not path.exists()
    )


def _config_to_resume(folder: Path, config: Path | None, what: str = "run") -> Path:
    if not (folder / "config.toml").exists():
        raise UserError(f"there is no {what} in {folder}: leave out --resume to start one.")
    return config or folder / "config.toml"


def _of(model: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given values that are fields of the model."""
    return {name: value for name, value in given.items() if name in model.model_fields}


def _resolve(source: Source, data: str, config: Path | None, given: dict[str, Any]) -> tuple[DataSettings, Settings]:
    """Put options together: defaults, then what suits the data, then the file, then the flags."""
    tables = read_config(config) if config else {}
    training = _of(Settings, given)
    others = {name: value for name, value in given.items() if name not in training}
    options = resolve_options(source, data, others, tables.get("data"))
    default = {"jobs": os.cpu_count() or 1} if "threads" not in training | tables.get("training", {}) else {}
    return options, checked(Settings, default | source.settings | tables.get("training", {}) | training)


@app.command()
@_with_options(Plan, Settings, of_sources=True, without=("method", "threads"))
def compare(
    data: Data,
    out: Out = None,
    config: Config = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Trainings at a time [default: as many as processors].")
    ] = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Train several methods on the same splits, and compare them for every domain and client."""
    from feddar.api import compare as train_and_compare
    from feddar.report.terminal import show_comparison, show_comparison_progress

    if resume and out is None:
        raise UserError("say which comparison to go on with: --resume --out FOLDER.")
    if resume and out is not None:
        config = _config_to_resume(out, config, "comparison")
    plan = checked(Plan, (read_config(config).get("compare", {}) if config else {}) | _of(Plan, given))
    given = {name: value for name, value in given.items() if name not in Plan.model_fields}
    if "test" in given and plan.folds > 1:
        raise UserError("--test is for one split, and folds have a test part each: add --folds 1, or leave it out.")
    source = find_source(data)
    options, settings = _resolve(source, data, config, given | {"method": plan.methods[0], "jobs": 1, "threads": 1})
    folder = _folder(out, data, "compare")
    console.print(f"{len(plan.methods)} methods on {escape(source.about)}")
    loaded = source.load(options, settings.seed)
    _say_notes(loaded)
    try:
        with show_comparison_progress(console) as report:
            comparison = train_and_compare(
                lambda seed: loaded if seed == settings.seed else source.load(options, seed),
                out=folder, resume=resume, jobs=jobs or os.cpu_count() or 1, test=options.test, source=options,
                report=report, **plan.model_dump(), **settings.model_dump(exclude={"method", "jobs", "threads"}),
            )  # fmt: skip
    except KeyboardInterrupt:
        again = ["feddar", "compare", data, "--resume", "--out", str(folder)]
        _fail(f"stopped; go on with: {shlex.join(again)}", 1)
    show_comparison(console, comparison, folder)
    if comparison.failures:
        first, reason = comparison.failures[0]
        more = f" ({len(comparison.failures)} of them; see {folder / 'table.md'})" * (len(comparison.failures) > 1)
        raise TrainingError(f"a training failed: {first}: {reason}{more}")


@app.command()
@_with_options(of_sources=True)
def cohort(data: Data, seed: Annotated[int, typer.Option(min=0)] = 0, given: dict[str, Any] = {}) -> None:  # noqa: B006
    """Show who holds what: samples by client and domain, label rates, and what to look out for."""
    from feddar.report.terminal import show_cohort

    source = find_source(data)
    options = resolve_options(source, data, given)
    show_cohort(console, source.load(options, seed), source.about)
    flags = ", ".join(flag_of(name) for name in source.options.model_fields if name != "data")
    console.print(f"options of {source.name}: {flags}", highlight=False)


@app.command()
@_with_options(Unknown)
def predict(
    trained: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    data: Annotated[
        str,
        typer.Argument(
            metavar="NEW_DATA", help="A CSV or Parquet file, an image, a folder of either, or a built-in cohort."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="CSV or Parquet file to write.")] = Path("predictions.csv"),
    client: Annotated[
        str | None, typer.Option("--client", help="Column of the client [default: as in RUN]; of images, its name.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option("--domain", help="Column of the domain [default: as in RUN]; of images, its name.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Column of known labels, if there is one [default: as in RUN].")
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="Column to copy beside them [default: as in RUN].")
    ] = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Use a trained model: predict for new samples, and say which head answered."""
    from feddar.report.terminal import show_predictions
    from feddar.results.file_prediction import find_run, predict_file, read_new, require_new_file

    columns = {"client": client, "domain": domain, "target": target, "group": group}
    require_new_file(out, trained, Path(data))
    run = find_run(trained)
    pieces = read_new(run, trained, data, {role: name for role, name in columns.items() if name is not None}, given)
    show_predictions(console, run, predict_file(run, pieces, out, **given), out)


@app.command()
def methods() -> None:
    """List the methods."""
    from feddar.methods import METHODS
    from feddar.report.terminal import show_methods

    show_methods(console, METHODS.values())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The .onnx file to write.")] = Path("model.onnx"),
    client: Annotated[
        str | None, typer.Option("--client", help="Export what this client uses; of a personal method, its own model.")
    ] = None,
) -> None:
    """Write a trained model as one ONNX file, with the domain as an input, and check it with onnxruntime."""
    from feddar.results.file_prediction import find_run

    written = find_run(run).export(out, client)
    more = f"; it computes {written.encoders} encoders for every sample" * (written.encoders > 1)
    console.print(
        f"Written: [bold]{escape(str(out))}[/bold], {out.stat().st_size / 1e3:,.0f} kB{more}\n"
        f"Checked with onnxruntime: predictions differ from the run's by at most {written.difference:.1e}",
        highlight=False,
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A comparison's folder, or folders of runs.")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option("--title", help="Its heading; says what was compared if left out.")
    ] = None,
) -> None:
    """Write one self-contained page about a comparison, or about runs on the same data."""
    from feddar.report.page import write_page

    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file for the page, such as {out / 'report.html'}.")
    write_page(runs, out, title)
    console.print(f"Written: [bold]{escape(str(out))}[/bold]", highlight=False)


@app.command()
def keys(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the keys; what it holds is never overwritten.")],
    server: Annotated[
        str | None,
        typer.Option(
            "--server", metavar="HOST[,HOST...]", help="Names and IP addresses by which clients find the server."
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="Make a key for this client; may be repeated.")
    ] = None,
    sign: Annotated[
        list[Path] | None, typer.Option("--sign", metavar="CSR", help="Certify the key that a site made itself.")
    ] = None,
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="NAME", help="At a site: make its own key, and ask for a certificate."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long certificates are valid.")] = 365,
) -> None:
    """Make the keys and certificates with which a server and its clients know each other."""
    from feddar.federation.security.keys import make_keys, request_certificate

    if request is not None and (server or client or sign):
        raise UserError(
            "--request is for a site, and the other options are for the coordinator: give one or the other."
        )
    if request is not None:
        summary = request_certificate(out, request).summary()
    else:
        hosts = [host.strip() for host in server.split(",")] if server else []
        summary = make_keys(out, hosts, client or [], sign or [], days).summary()
    console.print(escape(summary), highlight=False, soft_wrap=True)


@app.command()
def example(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")] = Path("tables"),
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Write small synthetic tables of three hospitals, to try things out with."""
    from feddar.data.sources.example import write_example

    for file in write_example(out, seed=seed):
        console.print(f"Written: [bold]{escape(str(file))}[/bold]", highlight=False)
    roles = "--domain race --target intensive_care --group patient"
    console.print(f"Next: feddar compare {escape(str(out))} {roles} --methods feddar,fedavg", highlight=False)


@app.command()
@_with_options(Settings, TableOptions, Terms, without=("jobs", "batched"))
def study(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="An example: the table of one site or several, or a folder.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The study file to write.")] = Path("study.toml"),
    name: Annotated[
        str | None, typer.Option("--name", help="What the study is called [default: as the table].")
    ] = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Write the study file that all sites agree on, from an example of their tables."""
    from feddar.federation.study import study_of_table
    from feddar.report.federation import show_study

    if not Path(data).exists():
        raise UserError(f"there is no {data}: a study is made from a CSV or Parquet file, or a folder of such files.")
    options = checked(TableOptions, _of(TableOptions, given) | {"data": data})
    settings, terms = checked(Settings, _of(Settings, given)), checked(Terms, _of(Terms, given))
    if out.exists():
        raise UserError(f"{out} exists already: choose another name with --out, or delete it.")
    made = study_of_table(name or Path(data).stem, options, settings, terms)
    made.write(out)
    show_study(console, made, out)


Keys = Annotated[Path | None, typer.Option("--keys", help="Folder made by `feddar keys`: certificates and keys.")]
Insecure = Annotated[
    int,
    typer.Option(
        "--insecure", count=True, show_default=False, help="Plain text, on this machine; twice: on any network."
    ),
]
StudyFile = Annotated[Path, typer.Option("--config", help="The study file.")]


@app.command()
@_with_options(Terms)
def server(
    config: StudyFile,
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT that sites connect to.")] = "127.0.0.1:9092",
    keys: Keys = None,
    insecure: Insecure = 0,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Coordinate a study between sites: wait for them, train, evaluate, and give each of them the model."""
    from feddar.federation.deployment import serve
    from feddar.report.federation import show_federated, show_federation

    agreed, folder = _study(config, given), _folder(out, str(config), "server")
    if resume and out is None:
        raise UserError("say which run to go on with: --resume --out FOLDER.")
    safety = ["--keys", str(keys)] if keys else ["--insecure"] * insecure
    again = ["feddar", "server", "--config", str(config), "--listen", listen, *safety, "--resume", "--out", str(folder)]
    with _stoppable(again), show_federation(console, agreed) as voice:
        run = serve(agreed, listen, folder, keys=keys, insecure=insecure, resume=resume, voice=voice)
    show_federated(console, run, folder)


@app.command()
def client(
    data: Annotated[Path, typer.Option("--data", help="This site's own table: a CSV or Parquet file.")],
    server: Annotated[str | None, typer.Option("--server", help="HOST:PORT of the coordinator.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What this site is called [default: as its keys].")] = None,
    keys: Keys = None,
    insecure: Insecure = 0,
    study: Annotated[
        Path | None, typer.Option("--study", help="The study file agreed on: any other study is refused.")
    ] = None,
    min_cell: Annotated[
        int, typer.Option("--min-cell", min=1, help="Say nothing of a domain with fewer samples than this.")
    ] = 5,
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder for what stays here, and the model [default: feddar-NAME].")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only list everything that would leave this site.")
    ] = False,
) -> None:
    """Take part in a study with this site's own table, which stays here."""
    from feddar.federation.deployment import take_part
    from feddar.federation.study import Study
    from feddar.report.federation import show_what_leaves

    agreed = None if study is None else Study.read(study)
    if explain:
        if agreed is None:
            raise UserError("say which study to explain: --study FILE.")
        show_what_leaves(console, agreed, data, name or "this site", min_cell)
        return
    if server is None:
        raise UserError("say where the coordinator is: --server HOST:PORT.")
    with _stoppable([]):
        take_part(
            server, data, name, state, keys=keys, insecure=insecure, study=agreed, min_cell=min_cell, say=_say_with_time
        )


@app.command()
@_with_options(Terms)
def simulate(
    config: StudyFile,
    data: Annotated[Path, typer.Option("--data", help="Folder with one table per site.")],
    engine: Annotated[str, typer.Option("--engine", help="flower, nvflare, or local: no engine.")] = "flower",
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out (not on nvflare).")] = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Rehearse a study on this machine, with one table per site, on an engine's simulator."""
    from feddar.federation.deployment import ENGINES
    from feddar.federation.deployment import simulate as run_on
    from feddar.report.federation import show_federated, show_federation
    from feddar.results.run import load

    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}': there are {', '.join(ENGINES)}.")
    if not data.is_dir():
        raise UserError(f"{data} is no folder: put one table per site into a folder.")
    agreed, folder = _study(config, given), _folder(out, str(config), engine)
    named = ["--config", str(config), "--data", str(data), "--engine", engine]
    with (
        _stoppable(["feddar", "simulate", *named, "--resume", "--out", str(folder)]),
        show_federation(console, agreed) as voice,
    ):
        where = run_on(agreed, data, folder, engine=engine, resume=resume, voice=voice)
    show_federated(console, load(where), where)


@app.command()
def flare_job(
    config: StudyFile,
    out: Annotated[Path, typer.Option("--out", help="Folder of the job, which must be new.")] = Path("job"),
    site: Annotated[list[str] | None, typer.Option("--site", help="A site that takes part; all if left out.")] = None,
    code: Annotated[
        bool, typer.Option("--code/--no-code", help="Carry the two lines that name feddar's classes.")
    ] = True,
) -> None:
    """Write the job that an administrator of NVIDIA FLARE submits for a study."""
    from feddar.federation.links.nvflare.job import write_job
    from feddar.federation.study import Study

    study_file = Study.read(config)
    write_job(config.read_text(encoding="utf-8"), out, site, study_file.terms.min_clients, code=code)
    console.print(
        f"Written: [bold]{escape(str(out))}[/bold]\n"
        'Each site names its table in local/feddar.toml of its startup kit: data = "/path/to/table.csv"\n'
        f"Submit it: nvflare job submit -j {escape(str(out))}",
        highlight=False,
    )


def _study(config: Path, given: dict[str, Any]) -> Study:
    """Read a study, with what the flags say of its terms."""
    from dataclasses import replace

    from feddar.federation.study import Study

    found = Study.read(config)
    return replace(found, terms=checked(Terms, found.terms.model_dump() | given))


def _say_with_time(what: str) -> None:
    console.print(f"{datetime.now():%H:%M:%S} {escape(what)}", highlight=False)


@contextmanager
def _stoppable(again: list[str]) -> Iterator[None]:
    """End orderly when told to, by Ctrl-C or by SIGTERM, and say how to go on."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # Not by way of SIGINT, which a shell has jobs in the background ignore.
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        _fail(f"stopped; go on with: {shlex.join(again)}" if again else "stopped.", 1)


@app.command()
def paper(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(EXPERIMENTS)}.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results [default: results/NAME].")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How many repetitions.")] = None,
    scale: Annotated[str | None, typer.Option("--scale", help="small or full, the paper's own settings.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Trainings at a time; one per processor.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    data: Annotated[str | None, typer.Option("--data", help="Folder of digits and faces; else FEDDAR_DATA.")] = None,
) -> None:
    """Make a figure or table of the paper, from data to picture."""
    from feddar.experiments import find_experiment
    from feddar.results.folder import writing

    experiment = find_experiment(name)
    folder = out or Path("results") / name
    given = {"seeds": seeds, "scale": scale, "data": data}
    chosen = {option: value for option, value in given.items() if value is not None}
    with writing(folder):
        experiment(folder, say=console.print, jobs=jobs or os.cpu_count() or 1, resume=resume, **chosen)
    console.print(f"Written: {folder}/results.csv, {folder}/table.md, {folder}/figure.png")
