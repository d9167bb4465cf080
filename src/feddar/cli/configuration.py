"""The command that begins a configuration: init."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from pydantic import BaseModel, create_model
from rich.markup import escape

from feddar.cli.console import console, say_written
from feddar.cli.options import kinds_of, with_options
from feddar.data.sources import BUILT_IN, SOURCES, resolve_options
from feddar.data.sources.table import table_source
from feddar.data.table_options import TableOptions
from feddar.errors import UserError
from feddar.settings import Plan, Settings, checked

SCHEMA_FILE = "feddar.schema.json"
ASKED = {
    "client": ("Which column names the hospital?", r"hospital|sites?|cent(er|re)|clinic|client|institut|state"),
    "domain": ("Which column names the group of patients?", r"race|ethnic|vendor|scanner|group|domain|sector|sex"),
    "target": ("Which column is to be predicted?", r"outcome|target|label|died|death|mortality|y"),
}
"""The question for each role of a column, and what its name often begins with."""


@with_options(TableOptions, without=("data",))
def init(
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="Your file or folder with a table; asked if left out.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", rich_help_panel="output", help="File to write.")] = Path("feddar.toml"),
    schema: Annotated[
        bool,
        typer.Option(
            "--schema", rich_help_panel="output", help=f"Also write {SCHEMA_FILE}, by which editors complete."
        ),
    ] = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Write a commented configuration for your table."""
    from feddar.data.tables import read_cohort
    from feddar.results.run_folder import replacing, writing

    if out.exists():
        raise UserError(f"{out} exists: choose another file with --out, or delete it.")
    table = table or _answer("Which file or folder holds the table?", None, "name it: feddar init TABLE")
    if table in BUILT_IN:
        raise UserError(f"{table} is built in and needs no configuration: feddar run {table}")
    roles = _roles(Path(table), given)
    options = resolve_options(table_source(Path(table)), table, given | roles)
    assert isinstance(options, TableOptions)  # those of a table
    notes = read_cohort(options).notes
    command = f"feddar run {shlex.quote(table)} --config {shlex.quote(str(out))}"
    texts = {out: "\n".join(_lines(options, notes, command, schema))}
    if schema:
        texts[out.with_name(SCHEMA_FILE)] = json.dumps(configuration_schema(), indent=1)
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with replacing(path) as temporary:
                temporary.write_text(f"{text}\n", encoding="utf-8")
    for note in notes:
        console.print(f"note: {escape(note)}", highlight=False)
    for path in texts:
        say_written(path)
    console.print(f"train with: {escape(command)}", highlight=False, soft_wrap=True)


def _roles(path: Path, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the column of each role that was not given: what is answered on a terminal, else the likely one."""
    from feddar.data.files import open_tables

    files = open_tables(path)
    header, taken = files[0].header, set(given.values())
    roles: dict[str, str] = {}
    for role, (question, pattern) in ASKED.items():
        if role in given or (role == "client" and len(files) > 1):  # a file of several is one client's
            continue
        free = [name for name in header if name not in taken]
        likely = [name for name in free if re.match(pattern, name, re.IGNORECASE)]
        columns = ", ".join(header)
        roles[role] = _answer(question, likely[0] if likely else None, f"say it: --{role} COLUMN, of {columns}", free)
        taken.add(roles[role])
    return roles


def _answer(question: str, likely: str | None, remedy: str, choices: Sequence[str] = ()) -> str:
    """Return the answer to a question on a terminal; elsewhere the likely one, which is said, or an error."""
    if sys.stdin.isatty():
        if choices:
            console.print(escape(f"  {', '.join(choices)}"), highlight=False)
        return str(typer.prompt(question, default=likely))
    if likely is None:
        raise UserError(f"{question} {remedy}.")
    console.print(f"{question} {escape(likely)}, by its name", highlight=False)
    return likely


def _lines(options: TableOptions, notes: Sequence[str], command: str, schema: bool) -> Iterator[str]:
    """Yield the lines of the configuration: what was said, and every other option at its default behind a #."""
    if schema:
        yield f"#:schema ./{SCHEMA_FILE}"
    yield f"# {command}"
    yield "# Every option is here. What stands behind a # has its default: take the # away to change it."
    yield from ("", "[data]")
    for note in notes:
        yield from _comment(f"Note: {note}")
    yield from _fields(options, without=("data",))
    yield from ("", "[training]")
    yield from _fields(checked(Settings, {}), without=())


def _fields(model: BaseModel, without: Sequence[str]) -> Iterator[str]:
    """Yield a comment and a line for each field: its value if that is not the default, else the default behind a #."""
    for name, field in type(model).model_fields.items():
        if name in without:
            continue
        value = getattr(model, name)
        choices = ", ".join(each for each in kinds_of(field) if isinstance(each, str))
        yield from ("", *_comment(f"{field.description} ({choices})" if choices else f"{field.description}"))
        if value != field.default:
            yield _entry(name, value)
        else:
            yield f"# {name} =" if value is None else f"# {_entry(name, value)}"


def _entry(name: str, value: object) -> str:
    return tomli_w.dumps({name: value}).strip()


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")


def configuration_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file: the tables [data], [training] and [compare]."""
    every: dict[str, Any] = {}
    kinds: list[type[BaseModel]] = [*(source.options for source in SOURCES), TableOptions]
    for kind in kinds:
        every |= {name: (field.annotation, field) for name, field in kind.model_fields.items()}
    data = create_model("Data", __config__=None, **every)
    whole = create_model("Configuration", data=(data, ...), training=(Settings, ...), compare=(Plan, ...))
    schema = whole.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)  # every table, and every option, may be left out
        part["additionalProperties"] = False
    return schema
