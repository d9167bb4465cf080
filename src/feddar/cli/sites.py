"""Commands for training between sites: example, study, keys, server, client, simulate, flare-job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from feddar.cli.console import (
    AllowCode,
    Device,
    Out,
    Resume,
    console,
    folder_for,
    permission,
    say_written,
    stoppable_by_signal,
)
from feddar.cli.options import given_for, with_options
from feddar.cli.watch import Watch, WatchPort, watching
from feddar.data.table_options import TableOptions
from feddar.errors import UserError
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.settings import Settings, checked

if TYPE_CHECKING:
    from feddar.federation.coordinator import CoordinatorEvents
    from feddar.federation.study import Study

Keys = Annotated[
    Path | None,
    typer.Option("--keys", rich_help_panel="safety", help="Folder made by `feddar keys`: certificates and keys."),
]
Insecure = Annotated[
    int,
    typer.Option(
        "--insecure",
        count=True,
        show_default=False,
        rich_help_panel="safety",
        help="Plain text, on this machine; twice: on any network.",
    ),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        rich_help_panel="safety",
        help="File with the passphrase of keys. [default: FEDDAR_PASSPHRASE, or it is asked for]",
    ),
]
StudyFile = Annotated[Path, typer.Option("--config", rich_help_panel="sites", help="The study file.")]


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
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Protect the keys that are made by a passphrase, and ask for it.")
    ] = False,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make the keys by which a server and its clients know each other."""
    from feddar.federation.security.keys import make_keys, request_certificate
    from feddar.federation.security.passphrase import Passphrase

    protect, source = passphrase or passphrase_file is not None, Passphrase(passphrase_file)
    if request is not None and (server or client or sign):
        raise UserError(
            "--request is for a site, and the other options are for the coordinator: give one or the other."
        )
    if request is not None:
        summary = request_certificate(out, request, protect=protect, passphrase=source).summary()
    else:
        hosts = [host.strip() for host in server.split(",")] if server else []
        made = make_keys(out, hosts, client or [], sign or [], days, protect=protect, passphrase=source)
        summary = made.summary()
    console.print(escape(summary), highlight=False, soft_wrap=True)


def example(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")] = Path("tables"),
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Write small synthetic tables of three hospitals, to try with."""
    from feddar.data.sources.example import write_example

    for file in write_example(out, seed=seed):
        say_written(file)
    roles = "--domain race --target intensive_care --group patient"
    console.print(f"Next: feddar compare {escape(str(out))} {roles} --methods feddar,fedavg", highlight=False)


AGREED = tuple(name for name in Settings.model_fields if name != "track")
"""Settings that the study fixes, so that they are no flags here; only a tracker may differ."""


@with_options(Settings, TableOptions, CoordinatorSettings, without=(*Settings.of_one_machine, "image_cache"))
def study(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="An example: the table of one site or several, or a folder.")
    ],
    out: Annotated[Path, typer.Option("--out", rich_help_panel="output", help="The study file to write.")] = Path(
        "study.toml"
    ),
    name: Annotated[
        str | None,
        typer.Option("--name", rich_help_panel="output", help="What the study is called. [default: as the table]"),
    ] = None,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            rich_help_panel="output",
            help="Also write its JSON schema, by which editors complete.",
        ),
    ] = False,
    secure: Annotated[
        bool | None,
        typer.Option(
            "--secure/--no-secure",
            rich_help_panel="safety",
            help="Whether the coordinator learns only sums over sites. [default: from three sites on]",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            rich_help_panel="safety",
            help="The server's folder of keys: sites know each other by those that it lists.",
        ),
    ] = None,
    max_norm: Annotated[
        float,
        typer.Option(
            "--max-norm",
            rich_help_panel="safety",
            hidden=True,
            help="A phase moves no tensor by more than this, times 1 + its length.",
        ),
    ] = 10.0,
    max_rows: Annotated[
        int,
        typer.Option("--max-rows", rich_help_panel="safety", hidden=True, help="Rows that a site may have at most."),
    ] = 10**6,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Write what all sites agree on, from an example of their tables."""
    from feddar.federation.study import study_of_table
    from feddar.report.federation import show_study

    if not Path(data).exists():
        raise UserError(f"there is no {data}: a study is made from a CSV or Parquet file, or a folder of such files.")
    options = checked(TableOptions, given_for(TableOptions, given) | {"data": data})
    settings, coordinator = (
        checked(Settings, given_for(Settings, given)),
        checked(CoordinatorSettings, given_for(CoordinatorSettings, given)),
    )
    if out.exists():
        raise UserError(f"{out} exists already: choose another name with --out, or delete it.")
    known = None if keys is None else _fingerprints(keys)
    limits = {"secure": secure, "keys": known, "max_norm": max_norm, "max_rows": max_rows}
    made = study_of_table(name or Path(data).stem, options, settings, coordinator, **limits)
    made.write(out)
    if schema:
        _write_schema(out)
    show_study(console, made, out)
    if keys is not None:
        _warn_of_secrets(keys, made.facts.keys or {})


def _write_schema(out: Path) -> None:
    """Write the JSON schema beside a study file, and its name into the file's first line, where editors look for it."""
    from feddar.federation.study_schema import study_schema

    path = out.with_suffix(".schema.json")
    path.write_text(json.dumps(study_schema(), indent=1), encoding="utf-8")
    out.write_text(f"#:schema ./{path.name}\n" + out.read_text(encoding="utf-8"), encoding="utf-8")


def _warn_of_secrets(keys: Path, known: Mapping[str, str]) -> None:
    """Say which sites' secret keys lie beside the server's folder of keys, where ``feddar keys --client`` puts them."""
    folder = keys.parent / "clients"
    here = [name for name in known if (folder / name / "client.key").exists()]
    if here:
        console.print(
            f"The secret keys of {', '.join(here)} are in {folder}: whoever has them can take part in their name, and "
            "learn single replies of the others. Between real sites let each make its own (feddar keys --request).",
            highlight=False,
        )


def _fingerprints(keys: Path) -> dict[str, str]:
    """Return the fingerprint of each site's key, as the server's folder of keys lists them."""
    from feddar.federation.security.keys import load_clients

    return {name: client.fingerprint for name, client in load_clients(keys / "clients", keys / "ca.pem").items()}


@with_options(CoordinatorSettings, Settings, without=AGREED, default="as the study says")
def server(
    config: StudyFile,
    listen: Annotated[
        str, typer.Option("--listen", rich_help_panel="sites", help="HOST:PORT that sites connect to.")
    ] = "127.0.0.1:9092",
    keys: Keys = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = 0,
    out: Out = None,
    resume: Resume = False,
    watch: Watch = False,
    watch_port: WatchPort = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Coordinate a study: wait for sites, train, give each the model."""
    from feddar.federation.deployment import serve
    from feddar.report.federation import show_federated, show_federation
    from feddar.report.tracked import track_pages

    agreed, folder = _study(config, given), folder_for(out, str(config), "server")
    if resume and out is None:
        raise UserError("say which run to go on with: --resume --out FOLDER.")
    safety = ["--keys", str(keys)] if keys else ["--insecure"] * insecure
    safety += ["--passphrase-file", str(passphrase_file)] if passphrase_file else []
    safety += permission(agreed.training.encoder)
    again = ["feddar", "server", "--config", str(config), "--listen", listen, *safety, "--resume", "--out", str(folder)]
    with (
        stoppable_by_signal(again),
        _watching(watch, watch_port, agreed, folder) as watched,
        show_federation(console, agreed) as shown,
    ):
        events = shown if watched is None else shown.beside(watched)
        run = serve(
            agreed, listen, folder, keys=keys, insecure=insecure, resume=resume, events=events,
            passphrase=passphrase_file,
        )  # fmt: skip
    track_pages(agreed.training, folder)
    show_federated(console, run, folder)


def client(
    context: typer.Context,
    what: Annotated[
        str | None, typer.Argument(metavar="[log]", help="log: show and verify what has left this site.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", rich_help_panel="data", help="This site's own table: a CSV or Parquet file."),
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", rich_help_panel="sites", help="HOST:PORT of the coordinator.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", rich_help_panel="sites", help="What this site is called. [default: as its keys]"),
    ] = None,
    keys: Keys = None,
    passphrase_file: PassphraseFile = None,
    insecure: Insecure = 0,
    study: Annotated[
        Path | None,
        typer.Option(
            "--study",
            rich_help_panel="sites",
            help="The study file agreed on; any other study is refused. Required.",
        ),
    ] = None,
    min_cell: Annotated[
        int,
        typer.Option(
            "--min-cell",
            min=1,
            rich_help_panel="safety",
            help="Say nothing of a domain with fewer patients than this.",
        ),
    ] = 5,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            rich_help_panel="output",
            help="Folder for what stays here, and the model. [default: feddar-NAME]",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            rich_help_panel="output",
            help="Only show the study, and everything that would leave this site.",
        ),
    ] = False,
    noted: Annotated[
        str | None,
        typer.Option(
            "--noted", metavar="HASH", rich_help_panel="output", help="With log: what the log once ended with."
        ),
    ] = None,
    device: Device = "cpu",
    _: AllowCode = None,
) -> None:
    """Take part with this site's own table, or show what has left it."""
    from feddar.federation.deployment import take_part
    from feddar.federation.study import Study
    from feddar.report.federation import explain_study

    if what is not None:
        _require_of_log(context)
        _show_log(what, state or (Path(f"feddar-{name}") if name else None), noted)
        return
    if noted is not None:
        raise UserError("--noted is compared with a log: say feddar client log.")
    if data is None:
        raise UserError("say which table is this site's own: --data FILE.")
    if study is None:
        raise UserError("say which study this site has agreed to: --study FILE; ask the coordinator for the file.")
    agreed = Study.read(study)
    if explain:
        explain_study(console, agreed, data, name or "this site", min_cell)
        return
    if server is None:
        raise UserError("say where the coordinator is: --server HOST:PORT.")
    with stoppable_by_signal():
        take_part(
            server, data, name, state, keys=keys, insecure=insecure, study=agreed, min_cell=min_cell,
            say=_say_with_time, passphrase=passphrase_file, device=device,
        )  # fmt: skip


def _require_of_log(context: typer.Context) -> None:
    """Refuse options that showing a log has no use for."""
    for name in context.params.keys() - {"what", "state", "name", "noted"}:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.strip("_").replace("_", "-") or "allow-code"
            raise UserError(f"--{option} says nothing about a log: leave it out, or leave out 'log' to take part.")


def _show_log(what: str, folder: Path | None, noted: str | None) -> None:
    from feddar.federation.privacy.answer_log import read_log
    from feddar.report.federation import show_answers

    if what != "log":
        raise UserError(f"'{what}' is nothing that a client does: leave it out to take part, or say log.")
    if folder is None:
        raise UserError("say whose log to show: --state FOLDER, or --name NAME for the folder feddar-NAME.")
    show_answers(console, read_log(folder), noted)


@with_options(CoordinatorSettings, Settings, without=AGREED, default="as the study says")
def simulate(
    config: StudyFile,
    data: Annotated[Path, typer.Option("--data", rich_help_panel="data", help="Folder with one table per site.")],
    engine: Annotated[
        str, typer.Option("--engine", rich_help_panel="sites", help="flower, nvflare, or local: no engine.")
    ] = "flower",
    out: Out = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", rich_help_panel="output", help="Go on with the run in --out (not on nvflare)."),
    ] = False,
    watch: Watch = False,
    watch_port: WatchPort = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Rehearse a study on this machine, with one table per site."""
    from feddar.federation.deployment import ENGINES
    from feddar.federation.deployment import simulate as run_on
    from feddar.report.federation import show_federated, show_federation
    from feddar.report.tracked import track_pages
    from feddar.results.run import load

    if engine not in ENGINES:
        raise UserError(f"there is no engine '{engine}': there are {', '.join(ENGINES)}.")
    if not data.is_dir():
        raise UserError(f"{data} is no folder: put one table per site into a folder.")
    if engine == "nvflare" and (watch or watch_port is not None):
        raise UserError("FLARE's simulator reports nothing while it runs: leave out --watch, or choose another engine.")
    agreed, folder = _study(config, given), folder_for(out, str(config), engine)
    named = ["--config", str(config), "--data", str(data), "--engine", engine, *permission(agreed.training.encoder)]
    again = [] if engine == "nvflare" else ["--resume"]
    with (
        stoppable_by_signal(["feddar", "simulate", *named, *again, "--out", str(folder)]),
        _watching(watch, watch_port, agreed, folder) as watched,
        show_federation(console, agreed) as shown,
    ):
        events = shown if watched is None else shown.beside(watched)
        where = run_on(agreed, data, folder, engine=engine, resume=resume, events=events)
    track_pages(agreed.training, where)
    show_federated(console, load(where), where)


def flare_job(
    config: StudyFile,
    out: Annotated[Path, typer.Option("--out", help="Folder of the job, which must be new.")] = Path("job"),
    site: Annotated[list[str] | None, typer.Option("--site", help="A site that takes part; all if left out.")] = None,
    code: Annotated[
        bool, typer.Option("--code/--no-code", help="Carry the two lines that name feddar's classes.")
    ] = True,
) -> None:
    """Write a study as a job that NVIDIA FLARE runs."""
    from feddar.federation.links.nvflare.job import write_job
    from feddar.federation.study import Study

    study_file = Study.read(config)
    write_job(config.read_text(encoding="utf-8"), out, site, study_file.coordinator.min_clients, code=code)
    console.print(
        f"Written: [bold]{escape(str(out))}[/bold]\n"
        "Each site names its table and the study that it agreed to in local/feddar.toml of its startup kit: "
        'data = "/path/to/table.csv", study = "/path/to/study.toml"\n'
        f"Submit it: nvflare job submit -j {escape(str(out))}",
        highlight=False,
    )


@contextmanager
def _watching(watch: bool, port: int | None, study: Study, folder: Path) -> Iterator[CoordinatorEvents | None]:
    """Show a study as a page within the block, if that is wanted, and yield the callbacks that tell the page."""
    name = study.facts.name
    about = f"{study.training.method} between sites"
    with watching(watch, port, "site", f"Study {name}", about, folder) as view:
        if view is not None:
            view.begin(study.training, folder)
        yield None if view is None else view.events


def _study(config: Path, given: dict[str, Any]) -> Study:
    """Read a study, with the coordinator's settings and the tracker changed by flags; its code must be allowed."""
    from dataclasses import replace

    from feddar.federation.study import Study
    from feddar.models.encoders.own import require_allowed

    found = Study.read(config)
    require_allowed(found.training.encoder)
    coordinator = checked(CoordinatorSettings, found.coordinator.model_dump() | given_for(CoordinatorSettings, given))
    training = checked(Settings, found.training.model_dump() | given_for(Settings, given))
    return replace(found, coordinator=coordinator, training=training)


def _say_with_time(what: str) -> None:
    console.print(f"{datetime.now():%H:%M:%S} {escape(what)}", highlight=False)
