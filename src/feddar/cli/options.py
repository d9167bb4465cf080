"""Makes flags from settings, and settings from flags.

Every option of `run` is a field of ``Settings`` or of a source's options, and is turned into a flag here; so its name,
default, bounds and help are defined in one place. The settings also check the values.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from feddar.cli.console import allow
from feddar.data.sources import SOURCES, find_source, resolve_options, sources_with
from feddar.data.sources.source import Source, flag_of
from feddar.settings import DataSettings, Settings, checked, read_config

Command = Callable[..., None]


def with_options(
    *models: type[BaseModel], of_sources: bool = False, without: tuple[str, ...] = ()
) -> Callable[[Command], Command]:
    """Add a flag for every field of the models and, if ``of_sources``, for every option of a source.

    The command gets the values that were given as one dict, ``given``.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        taken = {p.name for p in own}
        fields = [(name, field, _help(field)) for model in models for name, field in model.model_fields.items()]
        fields += _fields_of_sources() if of_sources else []
        flags = [_flag(*each) for each in fields if each[0] not in taken.union(without)]

        def call(**values: Any) -> None:
            mine = {name: values.pop(name) for name in list(values) if name in taken}
            command(**mine, given={name: value for name, value in values.items() if value is not None})

        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in [*own, *flags]}
        return call

    return decorate


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


def _help(field: FieldInfo) -> str:
    """Return the description of an option with its default; ``choose`` replaces some defaults of Python by its own."""
    more = field.json_schema_extra
    default = more["of_commands"] if isinstance(more, dict) else field.default
    return f"{field.description}" + ("" if default in (None, "") else f" [default: {default}]")


def _fields_of_sources() -> list[tuple[str, FieldInfo, str]]:
    """Return the name, field and help of every option that any source has."""
    fields = {name: field for source in SOURCES for name, field in source.options.model_fields.items()}
    return [(name, field, _help_of_sources(name, field)) for name, field in fields.items()]


def _help_of_sources(name: str, field: FieldInfo) -> str:
    """Return an option's help, with its sources if not all have it, and with each default if they differ."""
    having = sources_with(name)
    defaults: dict[Any, list[str]] = {}
    for source in having:
        defaults.setdefault(source.options.model_fields[name].default, []).append(source.name)
    prefix = "" if len(having) == len(SOURCES) else f"{', '.join(source.name for source in having)}: "
    if len(defaults) == 1:
        return f"{prefix}{_help(field)}"
    listed = ", ".join(f"{default} ({', '.join(names)})" for default, names in defaults.items())
    return f"{prefix}{field.description} [default: {listed}]"


def given_for(model: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given values that are fields of the model."""
    return {name: value for name, value in given.items() if name in model.model_fields}


class Chosen(NamedTuple):
    """The data source, its options, and the settings of training."""

    source: Source
    options: DataSettings
    settings: Settings


def choose(data: str, config: Path | None, given: dict[str, Any]) -> Chosen:
    """Combine options; each of these overrides those before it: defaults, the source's defaults, the file, flags.

    An encoder that is code is allowed by its flag, and not by the file.
    """
    from feddar.models.encoders.own import require_allowed

    source, tables = find_source(data), read_config(config) if config else {}
    training = given_for(Settings, given)
    others = {name: value for name, value in given.items() if name not in training}
    options = resolve_options(source, data, others, tables.get("data"))
    default = {"jobs": os.cpu_count() or 1} if "threads" not in training | tables.get("training", {}) else {}
    settings = checked(Settings, default | source.settings | tables.get("training", {}) | training)
    allow([training["encoder"]] if "encoder" in training else None)
    require_allowed(settings.encoder)
    return Chosen(source, options, settings)
